"""Which peers are alive: heartbeats between keepers. Pure; times are arguments.

A peer is asked for a sign of life only when nothing was heard of it for an interval, so that of two
keepers one asks and the other hears it by that.  Only peers that have a keeper are judged.
"""

from __future__ import annotations

import attrs

from kvxfer.core.timers import Timers

__all__ = ["Peer", "PeerTable"]


@attrs.define
class Peer:
    """One peer. Addresses may be empty."""

    incarnation: str
    version: int
    agent: str
    keeper: str
    key: str
    heard_at: float
    quiet: bool = False


class PeerTable:
    """Bounded by the agent's own table of peers.

    Args:
        interval: seconds without a word after which a peer is asked.
        quiet_after: seconds without a word after which it counts as quiet.
    """

    def __init__(self, *, interval: float, quiet_after: float) -> None:
        self._interval = interval
        self._quiet_after = quiet_after
        self._peers: dict[str, Peer] = {}
        self._timers: Timers[str] = Timers()
        self._not_before = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, incarnation: str) -> Peer | None:
        return self._peers.get(incarnation)

    def know(
        self, incarnation: str, *, version: int, agent: str, keeper: str, key: str, now: float
    ) -> Peer:
        """The agent accepted this peer, or learnt a new address of it."""
        peer = self._peers.get(incarnation)
        if peer is None:
            peer = Peer(incarnation, version, agent, keeper, key, heard_at=now)
            self._peers[incarnation] = peer
        elif keeper != peer.keeper:
            peer.heard_at = now  # a new keeper has the time of a new peer
        peer.version, peer.agent, peer.keeper, peer.key = version, agent, keeper, key
        if keeper:
            self._timers.set(incarnation, now)
        else:
            self._timers.cancel(incarnation)
        return peer

    def forget(self, incarnation: str) -> None:
        self._peers.pop(incarnation, None)
        self._timers.cancel(incarnation)

    def heard(self, incarnation: str, now: float) -> bool:
        """Something came from it. True if it had been quiet."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return False
        peer.heard_at = now
        was_quiet, peer.quiet = peer.quiet, False
        return was_quiet

    def stalled(self, now: float) -> None:
        """This process did not run for a while: nobody is judged by what it could not hear."""
        self._not_before = now + self._quiet_after

    def due(self, now: float) -> tuple[list[Peer], list[Peer]]:
        """Peers to ask for a sign of life, and those that have become quiet."""
        ask, quiet = [], []
        for incarnation in self._timers.pop_due(now):
            peer = self._peers[incarnation]
            silent = now - peer.heard_at
            if silent < self._interval:
                self._timers.set(incarnation, peer.heard_at + self._interval)
                continue
            ask.append(peer)
            if silent >= self._quiet_after and now >= self._not_before and not peer.quiet:
                peer.quiet = True
                quiet.append(peer)
            at = now + self._interval
            if not peer.quiet:
                at = min(at, max(peer.heard_at + self._quiet_after, self._not_before))
            self._timers.set(incarnation, max(at, now + self._interval / 8))
        return ask, quiet

    def next_at(self) -> float | None:
        """When ``due`` has something next."""
        return self._timers.next_at()
