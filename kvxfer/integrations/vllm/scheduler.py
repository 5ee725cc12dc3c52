"""The connector in vLLM's scheduler: which request holds, pulls, pushes or declines what."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from vllm.v1.request import RequestStatus

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.orders import Report
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.events import (
    Declined,
    Drained,
    Expired,
    Failed,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.core.layout import Blocks
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.errors import InvalidInputError, KvxferError
from kvxfer.integrations.loads import Loads
from kvxfer.integrations.pushes import Chunk, Pushes
from kvxfer.integrations.router_ids import push_of_request_id
from kvxfer.integrations.sources import Remote, Source
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Load, Step
from kvxfer.integrations.vllm.params import Push, offer_params, push_of, source_of

__all__ = ["SchedulerHalf"]

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Source | None)

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_NO_BLOCK = 0
"""vLLM's null block: an entry that a sliding window has moved past."""

BlockLists = Sequence[Sequence[int]]
"""Block ids per group, from the beginning of the request."""


class SchedulerHalf:
    """READ: prefill makes offers, decode takes them. WRITE: decode accepts, prefill pushes."""

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        block_size: int,
        produces: bool,
        groups: int = 1,
        caching: bool = True,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.agent = SchedulerAgent(config=config.agent("scheduler", ""), clock=clock)
        self.loads: Loads[Any] = Loads(
            self.agent,
            groups=groups,
            accept_timeout=config.accept_timeout,
            caching=caching,
            clock=clock,
        )
        self.pushes: Pushes[Any] = Pushes(self.agent, block_size=block_size, placeholder=_NO_BLOCK)
        self.aside: dict[str, list[Any]] = {}
        """By transfer id: blocks in quarantine. They go back when it is drained, if ever."""
        self.kv_cache_manager: Any = None
        self._log = LimitedLog(logger, clock)
        self._config = config
        self._block_size = block_size
        self._produces = produces
        self._new_holds: dict[str, str] = {}
        self._new_loads: dict[str, Load] = {}

    # ---- decode ------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """``request`` is in the queue. While it waits, its hold is renewed."""
        ranks = self._config.peers_from_request_ids
        if ranks and not request.kv_transfer_params:
            named = push_of_request_id(request.request_id, ranks=ranks, kind=Push)
            if named is not None:
                sided = named.for_prefill if self._produces else named.for_decode
                request.kv_transfer_params = sided()
        params = request.kv_transfer_params or {}
        try:
            if params.get("do_remote_prefill"):
                self.loads.wait(request.request_id, self._allowed(source_of(params)))
            elif self._produces and params.get("do_remote_decode"):
                push = self._allowed(push_of(params))
                if push is not None:
                    self.pushes.add(request.request_id, request, push)
        except InvalidInputError as error:
            self._log.problem(
                "params", "%s is computed here and stays here: %s", request.request_id, error
            )
            request.kv_transfer_params = None

    def _allowed(self, source: S) -> S:
        if isinstance(source, Push) and not self._config.write:
            raise InvalidInputError(
                "kv_transfer_params speak of a push",
                next_step='set "write": true in kv_connector_extra_config on both sides',
            )
        return source

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens to load beyond the ``computed`` ones; None: ask again later.

        vLLM may ask several times.
        """
        if self.loads.behind(request.request_id):
            return None  # its blocks will be in the prefix cache
        source = self.loads.source(request.request_id)
        if source is None:
            return 0
        if self.agent.full:
            self._log.problem(
                "full", "%s is prefilled here: quarantine is full", request.request_id
            )
            self.loads.leave(request.request_id)
            return 0
        return max(0, self._end(source, request) - computed)

    def allocated(self, request: Any, block_ids: BlockLists, external: int) -> None:
        """``request`` has its blocks; load what lies beyond the local prefix hit."""
        source = self.loads.take(request.request_id)
        if source is None:
            return
        if external == 0:
            self.loads.decline(source)
            return
        end = self._end(source, request)
        first = (end - external) // self._block_size
        wanted = [ids[first : self._blocks(end)] for ids in block_ids]
        groups = [Blocks.at(first, ids, placeholder=_NO_BLOCK) for ids in wanted]
        self.loads.begin(request.request_id, request, source, groups)
        real = tuple(tuple(i for i in ids if i != _NO_BLOCK) for ids in wanted)
        self._new_loads[source.transfer_id] = Load(request.request_id, real)

    # ---- the end of a request, either side -----------------------------------------------------

    def finished(self, request: Any, block_ids: BlockLists) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the blocks, and what the response tells the decode side."""
        request_id = request.request_id
        self.loads.leave(request_id)
        if request_id in self.pushes.prompts:
            reading = self.pushes.leave(request_id)
            if reading is not None:
                self._new_holds[reading] = request_id
            return reading is not None, None
        params = request.kv_transfer_params or {}
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        wanted = self._produces and params.get("do_remote_decode")
        if not wanted or request.status not in _SERVED or tokens == 0:
            return False, None
        if self.agent.full:
            self._log.problem("full", "%s is not offered: quarantine is full", request_id)
            return False, None
        # Unique without asking anybody; the request id is there for people who read logs.
        transfer_id = f"{request_id[-128:]}.{secrets.token_hex(8)}"
        held = [
            Blocks.at(0, ids[: self._blocks(tokens)], placeholder=_NO_BLOCK) for ids in block_ids
        ]
        offer = self.agent.hold(transfer_id, held)
        self._new_holds[transfer_id] = request_id
        return True, offer_params(Remote(offer, tokens))

    @property
    def busy(self) -> bool:
        """Whether workers still have something to say: vLLM has to go on stepping to hear it."""
        return len(self.agent) > len(self.agent.quarantine)

    # ---- each step -----------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the workers are to do in the step that vLLM has just scheduled."""
        self.apply(())  # what no report tells: transfers whose workers are silent
        preempted = self.pushes.reading(output.preempted_req_ids or ())
        chunks = list(self._chunks(output))
        orders = self.agent.take_orders()
        step = Step(orders, self._new_holds, self._new_loads, chunks, preempted)
        self._new_holds, self._new_loads = {}, {}
        return step

    def _chunks(self, output: Any) -> Iterable[Chunk]:
        """What the coming forward completes of prompts that are pushed."""
        for request_id in self.pushes.prompts.keys() & output.num_scheduled_tokens.keys():
            request = self.pushes.prompts[request_id].request
            prompt = request.num_prompt_tokens
            there = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            upto = self.pushes.due(request_id, prompt=prompt, there=there)
            if not upto:
                continue
            lists: BlockLists = output.kv_connector_block_state.get_block_ids(request_id)
            try:
                yield self.pushes.advance(request_id, upto, lists, last=there >= prompt)
            except KvxferError as error:  # the id comes from a client; quarantine may be full
                self._log.problem("not_pushed", "%s is not pushed: %s", request_id, error)
                self.pushes.give_up(request_id)

    def apply(self, reports: Iterable[Report]) -> None:
        """What the workers have seen."""
        for event in self.agent.apply(reports):
            match event:
                case (
                    Received()
                    | Drained(role=Role.CONSUMER)
                    | Failed(role=Role.CONSUMER, drained=True)
                ):
                    self.loads.settle(event.transfer_id)
                    self._give_back(event.transfer_id)
                case Quarantined(role=Role.CONSUMER):
                    self._set_aside(event)
                case Sent() | Declined() | Expired() | Failed(role=Role.PRODUCER):
                    self.pushes.ended(event.transfer_id)

    def _set_aside(self, event: Quarantined) -> None:
        """Bytes may still land, and no fence can be had: the request fails without its blocks."""
        request = self.loads.user(event.transfer_id)
        if request is None or event.transfer_id in self.aside:
            return
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        self.aside[event.transfer_id] = blocks
        logger.error(
            "unhealthy: %d blocks of %s are out of use until it is known that nothing lands in "
            "them any more: %s. Restart this engine to have them back.",
            len(blocks),
            request.request_id,
            event.reason,
        )

    def _give_back(self, transfer_id: str) -> None:
        blocks = self.aside.pop(transfer_id, None)
        if blocks:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    # ---- sizes ---------------------------------------------------------------------------------

    def _end(self, source: Source, request: Any) -> int:
        """How many tokens of the prompt it brings."""
        prompt: int = request.num_prompt_tokens
        return min(source.tokens, prompt) if isinstance(source, Remote) else prompt

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
