"""Fences: the end of every engine that could reach a peer, and what that proves."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from kvxfer.core.pollable import Deferred, Pollable
from kvxfer.core.transport import Fence

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.moriio.generations import Generations
    from kvxfer.backends.moriio.peers import MoriioPeer
    from kvxfer.errors import KvxferError

__all__ = ["NO_FENCE_BY_DISCONNECT", "Fences"]

NO_FENCE_BY_DISCONNECT = (
    "MoRI-IO cannot end one peer's queue pairs: fence the peer, which replaces the engine, or close"
)


class Fences:
    """Those that were asked for and are not answered. Progress thread only.

    ``undrained`` counts the attempts of a peer that may still land.
    """

    def __init__(self, generations: Generations, undrained: Callable[[MoriioPeer], int]) -> None:
        self._generations = generations
        self._undrained = undrained
        self._open: collections.deque[tuple[int, MoriioPeer, Deferred[Fence]]] = collections.deque()

    def ask(self, peer: MoriioPeer) -> Pollable[Fence]:
        """Replace the engine. Done once every engine that could reach ``peer`` is gone."""
        peer.fencing = True
        for generation in self._generations.live:
            generation.forsake(peer.key_prefix)
        answer: Deferred[Fence] = Deferred()
        self._open.append((self._generations.fence(), peer, answer))
        return answer

    def failed(self) -> None:
        """Answer those whose engine cannot be replaced."""
        while self._generations.failed_fences:
            self.answer(*self._generations.failed_fences.popleft())

    def answer(self, number: int, failure: KvxferError | None = None) -> None:
        """The engines up to generation ``number`` are gone, or will not go: see ``failure``."""
        for fence in tuple(self._open):
            wanted, peer, answer = fence
            if wanted > number:
                continue
            self._open.remove(fence)
            peer.fencing = False
            if failure is not None:
                reason = f"no engine could be made to replace this one: {failure}"
                answer.resolve(Fence(done=False, reason=reason))
                continue
            left = self._undrained(peer)
            reason = f"what {left} attempts have sent may still land at the peer" if left else ""
            # Its keys to our memory died with the engine: nothing of the peer lands here. So did
            # the queue pairs: nothing of ours reads there or here.
            answer.resolve(Fence(done=not left, reason=reason, source_done=True))
