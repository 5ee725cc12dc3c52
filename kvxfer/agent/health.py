"""Health and snapshots: what a person or a probe sees of an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.core.inflight import QuarantineEntry

if TYPE_CHECKING:
    from kvxfer.agent.engine import Engine
    from kvxfer.agent.pump import Pump

__all__ = ["Health", "Snapshot", "health_of", "snapshot_of"]

_STALLED_AFTER = 5.0
"""Seconds without a round after which the progress thread counts as stalled."""


@attrs.frozen(kw_only=True)
class Health:
    """``ready``: new requests make sense here. ``reasons`` says why not."""

    ready: bool
    reasons: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Snapshot:
    """Sizes of all tables; every one but the quarantine is 0 when nothing is under way."""

    pulls: int
    accepts: int
    holds: int
    pushes: int
    pinned_blocks: int
    in_flight_pieces: int
    unconfirmed: int
    draining: int
    early: int
    peers: tuple[str, ...]
    quarantine: tuple[QuarantineEntry, ...]
    counters: dict[str, int]

    @property
    def tables(self) -> dict[str, int]:
        """What must be empty when nothing is under way."""
        return {
            "pulls": self.pulls,
            "accepts": self.accepts,
            "holds": self.holds,
            "pushes": self.pushes,
            "pinned_blocks": self.pinned_blocks,
            "in_flight_pieces": self.in_flight_pieces,
            "unconfirmed": self.unconfirmed,
            "draining": self.draining,
        }


def health_of(engine: Engine, pump: Pump | None, now: float, *, closed: bool) -> Health:
    reasons: list[str] = []
    limits = engine.ctx.config.limits
    if closed:
        reasons.append("the agent is closed")
    if engine.consumer.quarantine.full:
        reasons.append(f"{len(engine.consumer.quarantine)} transfers are in quarantine")
    if engine.ctx.counters["transports.failed"]:
        reasons.append(
            f"progress of a transport failed {engine.ctx.counters['transports.failed']} times; "
            "see the log"
        )
    if len(engine.ctx.events) > limits.events:
        reasons.append(f"{len(engine.ctx.events)} events were not collected")
    if pump is not None and not closed:
        if not pump.alive:
            reasons.append("the progress thread has ended")
        elif now - pump.last_round > _STALLED_AFTER:
            reasons.append(f"the progress thread made no round for {now - pump.last_round:.1f} s")
        if pump.errors:
            reasons.append(f"{pump.errors} rounds of the progress thread failed; see the log")
    return Health(ready=not reasons, reasons=tuple(reasons))


def snapshot_of(engine: Engine) -> Snapshot:
    counters = dict(engine.ctx.counters)
    counters.update({f"channel.{k}": v for k, v in engine.ctx.channel.counters.items()})
    return Snapshot(
        pulls=len(engine.consumer.pulls),
        accepts=len(engine.consumer.accepts),
        holds=len(engine.producer.leases),
        pushes=len(engine.producer.pushes),
        pinned_blocks=engine.consumer.pins.pinned_blocks,
        in_flight_pieces=engine.ctx.in_flight,
        unconfirmed=engine.links.mailboxes.unconfirmed,
        draining=len(engine.consumer.drainings) + len(engine.producer.drainings),
        early=len(engine.producer.acks.early),
        peers=tuple(link.incarnation for link in engine.links if link.up),
        quarantine=engine.consumer.quarantine.entries,
        counters=counters,
    )
