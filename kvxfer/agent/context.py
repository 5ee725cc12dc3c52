"""What the parts of an agent share: configuration, strategies, counters, events, wake-ups."""

from __future__ import annotations

import collections
import itertools
import logging
from typing import TYPE_CHECKING, Protocol

import attrs

from kvxfer.agent.admission import Desk
from kvxfer.agent.keeping import Keeping
from kvxfer.agent.posting import StuckThreads
from kvxfer.agent.sweeper import Sweeper
from kvxfer.agent.trust import Trust
from kvxfer.core import wire
from kvxfer.core.events import Declined, Expired, Failed, Received, Sent
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.core.observations import (
    Outcome,
    TransferBegan,
    TransferEnded,
    TransferPosted,
)
from kvxfer.core.timers import Timers
from kvxfer.policies.breaker import BreakerTable

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from kvxfer.agent.config import AgentConfig
    from kvxfer.agent.handles import TransferHandle
    from kvxfer.core.channel import Channel, Route
    from kvxfer.core.clock import Clock
    from kvxfer.core.events import Event, Observation
    from kvxfer.core.memory import Region
    from kvxfer.core.observations import Observer
    from kvxfer.core.reliable import Outbox
    from kvxfer.policies.classify import ClassifierRegistry
    from kvxfer.policies.retry import RetryPolicy
    from kvxfer.policies.timeouts import Timeouts

__all__ = ["Context", "Counters", "Steppable"]


_log = logging.getLogger("kvxfer.agent")

_AFTER_A_BUG = 1.0
"""Seconds after which a step that raised is tried again."""


_OUTCOMES: dict[type[Event], Outcome] = {
    Received: Outcome.DONE,
    Sent: Outcome.DONE,
    Declined: Outcome.DECLINED,
    Expired: Outcome.EXPIRED,
    Failed: Outcome.FAILED,
}


class Steppable(Protocol):
    """Something that moves on when it is told to. Hashable by identity."""

    def step(self, now: float) -> None: ...

    def __hash__(self) -> int: ...


class Counters(collections.Counter[str]):
    """Counts by name; names are stable and never contain a transfer id."""

    def count(self, name: str, n: int = 1) -> None:
        self[name] += n


class Context:
    """One per agent, used on its progress thread only.

    ``soon`` and ``at`` are the only ways to be called again: nothing is polled for its own sake,
    so that what is idle costs nothing.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        config: AgentConfig,
        timeouts: Timeouts,
        retry: RetryPolicy,
        classifier: ClassifierRegistry,
        rng: random.Random,
        channel: Channel,
        clock: Clock,
        observers: tuple[Observer, ...] = (),
        listener: Callable[[], None] = lambda: None,
    ) -> None:
        """``listener`` hears that there is an event; it must not raise."""
        self.incarnation = incarnation
        self.config = config
        self.timeouts = timeouts
        self.retry = retry
        self.classifier = classifier
        self.rng = rng
        self.channel = channel
        self.clock = clock
        """For what must not be judged by the time at which the round began."""
        self.counters = Counters()
        self.events: collections.deque[Event] = collections.deque()
        self.in_flight = 0
        """Pieces posted and not drained, all peers: while there are any, engines are polled."""
        self.log = LimitedLog(_log, clock, agent=config.name)
        self.desk = Desk(self, config.admission)
        self.breakers: BreakerTable[str] = BreakerTable(config.breaker, most=config.limits.peers)
        self.stuck = StuckThreads()
        self.scratch: dict[str, Region] = {}
        """Memory for probes, by backend; only with failover on."""
        self.observers = observers
        """Replaced as a whole, from any thread. Look before anything is made for them."""
        self._listener = listener
        self._mids = itertools.count(1)
        self._soon: dict[Steppable, None] = {}
        self._nudged: collections.deque[Steppable] = collections.deque()
        self._timers: Timers[Steppable] = Timers()
        self.sweeper = Sweeper(self)
        self.trust = Trust(self)
        self.keeping = Keeping(self, None, None)

    # ---- wake-ups ----------------------------------------------------------------------------

    def soon(self, target: Steppable) -> None:
        """Step ``target`` before this round ends."""
        self._soon[target] = None

    def at(self, target: Steppable, at: float) -> None:
        """Step ``target`` at ``at`` at the latest; an earlier wake-up that is set stays."""
        due = self._timers.due_at(target)
        if due is None or at < due:
            self._timers.set(target, at)

    def nudge(self, target: Steppable) -> None:
        """Like ``soon``, from any thread; ends the channel's ``wait``."""
        self._nudged.append(target)
        self.channel.wake()

    def forget(self, target: Steppable) -> None:
        """No more wake-ups for ``target``."""
        self._soon.pop(target, None)
        self._timers.cancel(target)

    def run_due(self, now: float) -> int:
        """Step everything that is due, until nothing is; returns how many steps were made."""
        steps = 0
        for target in self._timers.pop_due(now):
            self._soon[target] = None
        while self._nudged:
            self._soon[self._nudged.popleft()] = None
        while self._soon:
            target = next(iter(self._soon))
            del self._soon[target]
            try:
                target.step(now)
            except BaseException:
                # A bug: the others keep their turn, and this one gets another, not at once.
                self.at(target, now + _AFTER_A_BUG)
                raise
            steps += 1
        return steps

    def next_at(self) -> float | None:
        return self._timers.next_at()

    @property
    def scheduled(self) -> int:
        """Wake-ups that are set: zero when nothing is under way."""
        return len(self._timers)

    # ---- output ------------------------------------------------------------------------------

    def emit(self, event: Event, handle: TransferHandle | None = None) -> None:
        """Publish ``event``, with what the user hung on the transfer it belongs to."""
        if handle is not None and (handle.tag is not None or handle.owners):
            event = attrs.evolve(event, tag=handle.tag, owners=handle.owners)
        self.events.append(event)
        self.counters.count(f"events.{type(event).__name__.lower()}")
        if _log.isEnabledFor(logging.DEBUG):
            self._debug(event)
        if self.observers:
            self.observe(event)
            if handle is not None and type(event) in _OUTCOMES:
                self.observe(self._ended(event, handle))
        self._listener()

    def _debug(self, event: Event) -> None:
        """Per transfer, so never above DEBUG. Block ids may be thousands: left out."""
        name = type(event).__name__
        why = f": {event.error}" if isinstance(event, Failed) else ""
        self.log.detail(name.lower(), "%s%s", name, why, transfer=event.transfer_id)

    def observe(self, observation: Observation) -> None:
        """Tell the observers. To be called only where there are any: ``if ctx.observers:``."""
        for observer in self.observers:
            try:
                observer(observation)
            except Exception as error:  # noqa: BLE001 - users' code must not stop the agent
                self.counters.count("observers.failed")
                self.log.failed(
                    "observer", "an observer failed on %s", type(observation).__name__, error=error
                )

    def began(self, handle: TransferHandle) -> None:
        """The agent takes this transfer up."""
        if self.observers:
            self.observe(
                TransferBegan(
                    verb=handle.verb,
                    transfer_id=handle.transfer_id,
                    waited=self.clock.now() - handle._began_at,
                    traceparent=handle._traceparent,
                    offered=handle._offered,
                )
            )

    def posted(self, handle: TransferHandle, now: float) -> None:
        """Something of it is being posted; only the first time counts."""
        if handle._posted_at is None:
            handle._posted_at = now
            if self.observers:
                self.observe(
                    TransferPosted(
                        verb=handle.verb,
                        transfer_id=handle.transfer_id,
                        queued=max(0.0, now - handle._began_at),
                    )
                )

    def _ended(self, event: Event, handle: TransferHandle) -> TransferEnded:
        failed = event if isinstance(event, Failed) else None
        posted = handle._posted_at
        return TransferEnded(
            verb=handle.verb,
            transfer_id=handle.transfer_id,
            outcome=_OUTCOMES[type(event)],
            kind=None if failed is None else failed.kind,
            nbytes=event.nbytes if isinstance(event, (Received, Sent)) else 0,
            seconds=max(0.0, self.clock.now() - handle._began_at),
            queued=None if posted is None else max(0.0, posted - handle._began_at),
            drained=handle.drained,
            message="" if failed is None else str(failed.error),
        )

    def send(self, route: Route, body: wire.Message, version: int | None = None) -> None:
        """Send once; may be lost. ``version`` left out: the oldest, for who is not known yet."""
        oldest = self.config.wire_versions[0]
        self._transmit(route, wire.encode(self.incarnation, body, version=version or oldest))

    def mail(
        self,
        outbox: Outbox,
        route: Route,
        body: wire.Message,
        *,
        now: float,
        until: float,
        version: int,
    ) -> int:
        """Send now and again until confirmed or ``until``; returns the message id."""
        mid = next(self._mids)
        frame = wire.encode(self.incarnation, body, mid, version=version)
        outbox.put(mid, frame, now=now, until=until)
        self._transmit(route, frame)
        return mid

    def _transmit(self, route: Route, frame: bytes) -> None:
        if self.channel.send(route, frame):
            self.counters.count("messages.sent")
        else:
            self.counters.count("messages.not_sent")

    def transmit(self, route: Route, frames: list[bytes]) -> None:
        """Send frames that exist already (re-sends)."""
        for frame in frames:
            self._transmit(route, frame)
