"""Producer, in an engine's scheduler: prompts that are pushed while they are computed in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import attrs

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.orders import PushOrder
from kvxfer.core.layout import Blocks
from kvxfer.integrations.sources import Push

__all__ = ["Chunk", "Pushes"]

R = TypeVar("R")


@attrs.frozen
class Chunk:
    """Blocks that the coming forward fills, to be pushed layer by layer; ``last`` seals them."""

    push: PushOrder
    last: bool


@attrs.define
class _Prompt(Generic[R]):
    request: R
    push: Push
    pushed: int = 0
    """Blocks, from the first."""
    began: bool = False
    sealed: bool = False
    over: bool = False
    """Not to be pushed any further."""


class Pushes(Generic[R]):
    """By token progress: whole blocks as they fill, the partial one with the last chunk.

    A prompt that is preempted keeps what was pushed; computed again, it goes on where it was, from
    its new blocks. Not thread-safe; ``R`` is the engine's request.

    Args:
        block_size: tokens.
        placeholder: what an engine's block lists have where a sliding window has moved past.
    """

    def __init__(self, agent: SchedulerAgent, *, block_size: int, placeholder: int) -> None:
        self._agent = agent
        self._block_size = block_size
        self._placeholder = placeholder
        self.prompts: dict[str, _Prompt[R]] = {}
        """By request id."""
        self.moving: set[str] = set()
        """Transfers that have begun to push and have not ended."""

    def add(self, request_id: str, request: R, push: Push) -> None:
        """The request is in the queue."""
        self.prompts[request_id] = _Prompt(request, push)

    def due(self, request_id: str, *, prompt: int, there: int) -> int:
        """How many blocks from the first are complete once ``there`` tokens are computed.

        0 if none of them remains to be pushed.
        """
        known = self.prompts[request_id]
        last = there >= prompt
        upto = -(-prompt // self._block_size) if last else there // self._block_size
        return 0 if known.over or known.sealed or upto <= known.pushed else upto

    def advance(
        self, request_id: str, upto: int, block_ids: Sequence[Sequence[int]], *, last: bool
    ) -> Chunk:
        """The chunk that brings the push to ``upto`` blocks. ``block_ids`` is per group.

        Raises:
            KvxferError: the push cannot begin; ``give_up`` the prompt.
        """
        known = self.prompts[request_id]
        transfer_id = known.push.transfer_id
        if not known.began:
            self._agent.follow_push(transfer_id)
            self.moving.add(transfer_id)
            known.began = True
        blocks = tuple(
            Blocks.at(known.pushed, ids[known.pushed : upto], placeholder=self._placeholder)
            for ids in block_ids
        )
        known.pushed, known.sealed = upto, last
        return Chunk(PushOrder(transfer_id=transfer_id, blocks=blocks, to=known.push.to), last)

    def give_up(self, request_id: str) -> None:
        """Not to be pushed any further."""
        self.prompts[request_id].over = True

    def reading(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """The transfers of those requests that may be pushing from their blocks just now."""
        known = (self.prompts[i].push.transfer_id for i in request_ids if i in self.prompts)
        return tuple(transfer_id for transfer_id in known if transfer_id in self.moving)

    def leave(self, request_id: str) -> str | None:
        """The request has ended. The transfer whose end its blocks have to wait for, if any."""
        known = self.prompts.pop(request_id)
        transfer_id = known.push.transfer_id
        if transfer_id not in self.moving:
            return None
        if not known.sealed:
            self._agent.abort(transfer_id)
        return transfer_id

    def ended(self, transfer_id: str) -> None:
        """A transfer of this side has ended."""
        if transfer_id in self.moving:
            self.moving.discard(transfer_id)
            for known in self.prompts.values():
                if known.push.transfer_id == transfer_id:
                    known.over = True
