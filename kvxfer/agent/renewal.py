"""Keeps a hold alive for a request that waits in decode's queue and is not pulled yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.errors import ErrorKind, KvxferError

if TYPE_CHECKING:
    from kvxfer.agent.consumer import Consumer
    from kvxfer.agent.context import Context
    from kvxfer.core.offer import Endpoint

__all__ = ["Renewal"]

_TRIES = 5
"""How often an unanswered renewal is repeated; the caller renews again anyway."""


class Renewal:
    """One request for one grant, repeated until it is answered or has become pointless."""

    def __init__(
        self, ctx: Context, consumer: Consumer, endpoint: Endpoint, ref: wire.Ref, now: float
    ) -> None:
        self._ctx = ctx
        self._consumer = consumer
        self._ref = ref
        self._sent: dict[int, float] = {}
        self._tries = 0
        self._next_at = now
        self._until = now + ctx.timeouts.connect
        self._link = None
        try:
            self._link = consumer.links.reach(endpoint.address, endpoint.incarnation, now)
        except KvxferError:
            ctx.counters.count("renewals.failed")
            return
        self._link.when_changed(self)
        ctx.soon(self)

    @property
    def open(self) -> bool:
        """False once it is answered or given up."""
        return self._link is not None

    def step(self, now: float) -> None:
        link = self._link
        if link is None:
            return
        if not link.usable or now >= self._until or self._tries >= _TRIES:
            self._ctx.counters.count("renewals.failed")
            self._end()
            return
        if link.up and now >= self._next_at:
            seq = self._consumer.next_seq(self)
            self._sent[seq] = now
            self._tries += 1
            self._next_at = now + self._ctx.config.grant_interval
            link.mailbox.send(wire.Open(seq, [self._ref]))
        # While the link is not up there is nothing to do: it says when that changes.
        self._ctx.at(self, min(self._until, self._next_at) if link.up else self._until)

    def asked(self, seq: int, ref: wire.Ref, sender: str) -> bool:
        """Whether that is what we asked for with ``seq``."""
        return seq in self._sent and ref == self._ref and sender == ref.keeper

    def on_grant(self, seq: int, remaining: float, now: float) -> None:
        self._consumer.granted(self._ref, self._sent.get(seq, now) + remaining, now)
        self._ctx.counters.count("renewals.granted")
        self._end()

    def on_refused(self, kind: ErrorKind, message: str, now: float) -> None:
        self._ctx.counters.count(f"renewals.refused.{kind.value}")
        self._end()

    def stop(self) -> None:
        """Somebody else renews it now, or nobody does."""
        self._end()

    def _end(self) -> None:
        if self._consumer.renewals.get(self._ref) is self:
            del self._consumer.renewals[self._ref]
        if self._link is not None:
            self._link.unwatch(self)
            self._link = None
        for seq in self._sent:
            self._consumer.forget_seq(seq)
        self._ctx.forget(self)
