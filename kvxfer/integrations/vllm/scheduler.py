"""The connector in vLLM's scheduler: which request holds, pulls, pushes or declines what."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from vllm.v1.request import RequestStatus

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.orders import PushOrder, Report
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
from kvxfer.core.remembered import Remembered
from kvxfer.errors import InvalidInputError, KvxferError
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Chunk, Load, Step
from kvxfer.integrations.vllm.params import Push, Remote
from kvxfer.integrations.vllm.router_ids import params_of_request_id

__all__ = ["SchedulerHalf"]

logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_NO_BLOCK = 0
"""vLLM's null block: an entry that a sliding window has moved past."""

BlockLists = Sequence[Sequence[int]]
"""Block ids per group, from the beginning of the request."""


@attrs.define
class _Prefill:
    """WRITE: a request whose KV is pushed as it is computed."""

    request: Any
    push: Push
    pushed: int = 0
    """Blocks, from the first."""
    began: bool = False
    over: bool = False
    """Sealed, or not to be pushed any further."""


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
        self._clock = clock or SystemClock()
        self.agent = SchedulerAgent(config=config.agent("scheduler", ""), clock=self._clock)
        self._config = config
        self._groups = groups
        self._block_size = block_size
        self._produces = produces
        self._caching = caching
        self.kv_cache_manager: Any = None
        self._waiting: dict[str, Remote | Push] = {}
        """By request id: whose turn has not come yet."""
        self._leads: dict[str, str] = {}
        """By request id: the transfer it loads, for as long as other samples of the prompt wait."""
        self._loading: dict[str, Any] = {}
        """By transfer id: the request, until nothing can land any more."""
        self._aside: dict[str, list[Any]] = {}
        """By transfer id: blocks in quarantine. They go back when it is drained, if ever."""
        limits = config.agent("", "").limits
        self._settled: Remembered[str, bool] = Remembered(
            capacity=limits.early, ttl=limits.remembered_ttl
        )
        self._prefills: dict[str, _Prefill] = {}
        self._pushing: set[str] = set()
        """Transfers that have begun to push and have not ended."""
        self._holds: dict[str, str] = {}
        self._loads: dict[str, Load] = {}

    # ---- decode ------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """``request`` is in the queue. While it waits, its hold is renewed."""
        ranks = self._config.peers_from_request_ids
        if ranks and not request.kv_transfer_params:
            request.kv_transfer_params = params_of_request_id(
                request.request_id, produces=self._produces, ranks=ranks
            )
        params = request.kv_transfer_params or {}
        try:
            push = self._push_of(params)
            if params.get("do_remote_prefill"):
                source = push or Remote.from_params(params)
                self._waiting[request.request_id] = source
                if isinstance(source, Remote) and not self._taken(source):
                    self.agent.keep(source.offer)
            elif push is not None and self._produces and params.get("do_remote_decode"):
                self._prefills[request.request_id] = _Prefill(request, push)
        except InvalidInputError as error:
            logger.warning("%s is computed here and stays here: %s", request.request_id, error)
            request.kv_transfer_params = None

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens to load beyond the ``computed`` ones; None: ask again later.

        vLLM may ask several times.
        """
        source = self._waiting.get(request.request_id)
        if source is None:
            return 0
        if self._caching and source.transfer_id in self._leads.values():
            return None  # another sample loads the prompt: its blocks will be in the prefix cache
        if self._taken(source):
            return 0
        if self.agent.full:
            logger.warning("%s is prefilled here: quarantine is full", request.request_id)
            del self._waiting[request.request_id]
            self._decline(source)
            return 0
        return max(0, self._end(source, request) - computed)

    def allocated(self, request: Any, block_ids: BlockLists, external: int) -> None:
        """``request`` has its blocks; load what lies beyond the local prefix hit."""
        self._leads.pop(request.request_id, None)  # asked again: the load has ended
        source = self._waiting.pop(request.request_id, None)
        if source is None or self._taken(source):
            return
        if external == 0:
            self._decline(source)
            return
        end = self._end(source, request)
        first = (end - external) // self._block_size
        wanted = [ids[first : self._blocks(end)] for ids in block_ids]
        transfer_id = source.transfer_id
        groups = [Blocks.at(first, ids, placeholder=_NO_BLOCK) for ids in wanted]
        if isinstance(source, Remote):
            self.agent.pull(source.offer, groups)
        else:
            self.agent.accept(transfer_id, groups, deadline=self._config.accept_timeout)
        self._leads[request.request_id] = transfer_id
        self._loading[transfer_id] = request
        real = tuple(tuple(i for i in ids if i != _NO_BLOCK) for ids in wanted)
        self._loads[transfer_id] = Load(request.request_id, real)

    # ---- the end of a request, either side -----------------------------------------------------

    def finished(self, request: Any, block_ids: BlockLists) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the blocks, and what the response tells the decode side."""
        unread = self._waiting.pop(request.request_id, None)
        if unread is not None and not self._taken(unread):
            self._decline(unread)
        self._leads.pop(request.request_id, None)
        for transfer_id, loading in self._loading.items():
            if loading is request:
                self.agent.abort(transfer_id)
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is not None:
            return self._pushed(prefill), None
        params = request.kv_transfer_params or {}
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        wanted = self._produces and params.get("do_remote_decode")
        if not wanted or request.status not in _SERVED or tokens == 0:
            return False, None
        if self.agent.full:
            logger.warning("%s is not offered: quarantine is full", request.request_id)
            return False, None
        # Unique without asking anybody; the request id is there for people who read logs.
        transfer_id = f"{request.request_id[-128:]}.{secrets.token_hex(8)}"
        held = [
            Blocks.at(0, ids[: self._blocks(tokens)], placeholder=_NO_BLOCK) for ids in block_ids
        ]
        offer = self.agent.hold(transfer_id, held)
        self._holds[transfer_id] = request.request_id
        return True, Remote(offer, tokens).to_params()

    def _pushed(self, prefill: _Prefill) -> bool:
        """A request that pushed has finished. Its blocks are read from until the push has ended."""
        transfer_id = prefill.push.transfer_id
        if not prefill.began or transfer_id not in self._pushing:
            return False
        if not prefill.over:
            self.agent.abort(transfer_id)
        self._holds[transfer_id] = prefill.request.request_id
        return True

    @property
    def busy(self) -> bool:
        """Whether workers still have something to say: vLLM has to go on stepping to hear it."""
        return len(self.agent) > len(self.agent.quarantine)

    # ---- each step -----------------------------------------------------------------------------

    def step(self, output: Any) -> Step:
        """What the workers are to do in the step that vLLM has just scheduled."""
        self.apply(())  # what no report tells: transfers whose workers are silent
        preempted = tuple(self._preempted(output.preempted_req_ids or ()))
        chunks = list(self._chunks(output))
        step = Step(self.agent.take_orders(), self._holds, self._loads, chunks, preempted)
        self._holds, self._loads = {}, {}
        return step

    def _preempted(self, request_ids: Iterable[str]) -> Iterable[str]:
        """They will be computed again, into other blocks, and are not pushed a second time."""
        for request_id in request_ids:
            prefill = self._prefills.get(request_id)
            if prefill is not None:
                prefill.over = True
                if prefill.push.transfer_id in self._pushing:
                    yield prefill.push.transfer_id

    def _chunks(self, output: Any) -> Iterable[Chunk]:
        """What the coming forward completes of prompts that are pushed: whole blocks."""
        for request_id in self._prefills.keys() & output.num_scheduled_tokens.keys():
            prefill = self._prefills[request_id]
            request, transfer_id = prefill.request, prefill.push.transfer_id
            prompt = request.num_prompt_tokens
            there = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            last = there >= prompt
            upto = self._blocks(prompt) if last else there // self._block_size
            if prefill.over or upto <= prefill.pushed:
                continue
            if not prefill.began:
                try:
                    self.agent.follow_push(transfer_id)
                except KvxferError as error:  # the id comes from a client; quarantine may be full
                    logger.warning("%s is not pushed: %s", request_id, error)
                    prefill.over = True
                    continue
                self._pushing.add(transfer_id)
                prefill.began = True
            lists: BlockLists = output.kv_connector_block_state.get_block_ids(request_id)
            blocks = tuple(
                Blocks.at(prefill.pushed, ids[prefill.pushed : upto], placeholder=_NO_BLOCK)
                for ids in lists
            )
            prefill.pushed, prefill.over = upto, last
            order = PushOrder(transfer_id=transfer_id, blocks=blocks, to=prefill.push.to)
            yield Chunk(order, last)

    def apply(self, reports: Iterable[Report]) -> None:
        """What the workers have seen."""
        for event in self.agent.apply(reports):
            match event:
                case (
                    Received()
                    | Drained(role=Role.CONSUMER)
                    | Failed(role=Role.CONSUMER, drained=True)
                ):
                    self._drained(event.transfer_id)
                case Quarantined(role=Role.CONSUMER):
                    self._set_aside(event)
                case Sent() | Declined() | Expired() | Failed(role=Role.PRODUCER):
                    self._pushing.discard(event.transfer_id)

    def _drained(self, transfer_id: str) -> None:
        now = self._clock.now()
        self._settled.expire(now)
        if transfer_id in self._loading:
            del self._loading[transfer_id]
            self._settled.add(transfer_id, True, now)
        blocks = self._aside.pop(transfer_id, None)
        if blocks:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def _set_aside(self, event: Quarantined) -> None:
        """Bytes may still land, and no fence can be had: the request fails without its blocks."""
        request = self._loading.get(event.transfer_id)
        if request is None or event.transfer_id in self._aside:
            return
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        self._aside[event.transfer_id] = blocks
        logger.error(
            "unhealthy: %d blocks of %s are out of use until it is known that nothing lands in "
            "them any more: %s. Restart this engine to have them back.",
            len(blocks),
            request.request_id,
            event.reason,
        )

    # ---- sources -------------------------------------------------------------------------------

    def _push_of(self, params: Mapping[str, Any]) -> Push | None:
        push = Push.from_params(params)
        if push is not None and not self._config.write:
            raise InvalidInputError(
                "kv_transfer_params speak of a push",
                next_step='set "write": true in kv_connector_extra_config on both sides',
            )
        return push

    def _taken(self, source: Remote | Push) -> bool:
        """Whether some request of ours loads it or has loaded it."""
        return source.transfer_id in self._loading or source.transfer_id in self._settled

    def _decline(self, source: Remote | Push) -> None:
        """A request does not want it. The producer hears of it if no other sample waits."""
        if any(other.transfer_id == source.transfer_id for other in self._waiting.values()):
            return
        if isinstance(source, Remote):
            self.agent.decline(source.offer)
            return
        # What is pushed for nobody has to end as well: it is accepted, into no block.
        nothing = [Blocks.at(0, ())] * self._groups
        self.agent.accept(source.transfer_id, nothing, deadline=self._config.accept_timeout)
        self._loading[source.transfer_id] = None

    def _end(self, source: Remote | Push, request: Any) -> int:
        """How many tokens of the prompt it brings."""
        prompt: int = request.num_prompt_tokens
        return min(source.tokens, prompt) if isinstance(source, Remote) else prompt

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
