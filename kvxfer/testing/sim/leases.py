"""What the wire alone says about leases, against what the readers believe and do (promise 5).

Durations travel: a reader counts a grant from when it sent the request, the producer from when it
received it.  Seen from outside, with both clocks in view, three things follow, whatever was late:

- No reader believes in a grant for longer than the producer has promised.
- Nothing is published after the end of every grant that the reader can know of.
- Nobody holds a grant any more when the producer frees the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core import wire
from kvxfer.errors import WireError

if TYPE_CHECKING:
    from kvxfer.testing.sim.node import SimNode
    from kvxfer.testing.sim.world import World

__all__ = ["LeaseWatch"]

_EPSILON = 1e-6
"""Seconds: sums of the same durations in another order differ by less."""
_OPEN, _GRANT = b"\xa4open", b"\xa5grant"


class LeaseWatch:
    """Told of every frame that is sent and of every frame that arrives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[tuple[str, int], float] = {}
        """By reader and number of the request: when it was sent, by the reader's clock."""
        self._promised: dict[tuple[str, wire.Ref], float] = {}
        """By reader and hold: until when it was granted, in true time."""
        self._known: dict[tuple[str, str], float] = {}
        """By reader and transfer id: until when its grants last, by its own clock."""
        self._to_check: dict[str, dict[wire.Ref, None]] = {}

    def sent(self, node: SimNode, to: SimNode | None, data: bytes) -> None:
        """``node`` sends a frame to ``to``, whatever becomes of it."""
        if _OPEN in data:
            body = _body(data)
            if isinstance(body, wire.Open):
                self._asked[node.name, body.seq] = node.clock.look()
        elif _GRANT in data and to is not None:
            body = _body(data)
            if isinstance(body, wire.Grant):
                now = self._world.clock.now() if node.paused_in_round else node.round_began
                for granted in body.granted:
                    until = now + granted.remaining
                    key = (to.name, granted.ref)
                    self._promised[key] = max(until, self._promised.get(key, 0.0))

    def arrived(self, node: SimNode, data: bytes) -> None:
        """A frame is in ``node``'s inbox."""
        if _GRANT not in data:
            return
        body = _body(data)
        if not isinstance(body, wire.Grant):
            return
        asked = self._asked.get((node.name, body.seq))
        for granted in body.granted:
            self._to_check.setdefault(node.name, {})[granted.ref] = None
            if asked is not None:
                key = (node.name, granted.ref.transfer)
                self._known[key] = max(asked + granted.remaining, self._known.get(key, 0.0))

    def polled(self, node: SimNode) -> None:
        """``node`` has handled what was in its inbox."""
        refs = self._to_check.pop(node.name, None)
        if not refs:
            return
        for ref in refs:
            pull = node.agent._engine.consumer.pulls.get(ref.transfer)
            if pull is None or pull.over:
                continue
            for source in pull._sources:
                if pull.offer.ref(source.endpoint) != ref:
                    continue
                promised = self._promised.get((node.name, ref), 0.0)
                if node.clock.true(source.granted_until) > promised + _EPSILON:
                    self._world.violation(
                        f"{node}: {ref.transfer} counts as granted for longer than was promised",
                        ref.transfer,
                    )

    def received(self, node: SimNode, transfer_id: str) -> None:
        """``node`` has published what it read."""
        if node.paused_in_round:
            return  # when exactly it looked for the last time is not known
        until = self._known.pop((node.name, transfer_id), None)
        if until is not None and node.clock.look() > until + _EPSILON:
            self._world.violation(
                f"{node}: {transfer_id} was received after its lease had ended", transfer_id
            )

    def freed(self, node: SimNode, transfer_id: str, readers: list[SimNode]) -> None:
        """``node`` has freed what it held: its lease is over."""
        now = self._world.clock.now()
        for reader in readers:
            pull = None if reader.dead else reader.agent._engine.consumer.pulls.get(transfer_id)
            if pull is None or pull.over:
                continue
            for source in pull._sources:
                if source.endpoint.incarnation != node.agent.incarnation:
                    continue
                if reader.clock.true(source.granted_until) > now + _EPSILON:
                    self._world.violation(
                        f"{node}: {transfer_id} was freed while {reader} still holds a grant for "
                        "it",
                        transfer_id,
                    )


def _body(data: bytes) -> wire.Message | None:
    try:
        return wire.decode(data).body
    except WireError:
        return None
