"""The connector in vLLM's scheduler: which request holds, pulls, declines or aborts what."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from kvxfer.agent import SchedulerAgent
from kvxfer.agent.orders import Report
from kvxfer.core.events import Drained, Failed, Received
from kvxfer.core.layout import Blocks
from kvxfer.errors import InvalidInputError
from kvxfer.integrations.vllm.config import ConnectorConfig
from kvxfer.integrations.vllm.messages import Load, Step
from kvxfer.integrations.vllm.params import Remote

__all__ = ["SchedulerHalf"]

logger = logging.getLogger(__name__)

_SERVED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerHalf:
    """READ: prefill makes offers, decode takes them."""

    def __init__(self, config: ConnectorConfig, *, block_size: int, produces: bool) -> None:
        self.agent = SchedulerAgent(config=config.agent("scheduler", ""))
        self._block_size = block_size
        self._produces = produces
        self._remotes: dict[str, Remote] = {}
        """By request id: offers of requests that have not been scheduled yet."""
        self._pulling: dict[str, str] = {}
        """Transfer id to request id, until nothing can land any more."""
        self._holds: dict[str, str] = {}
        self._loads: dict[str, Load] = {}

    # ---- decode ------------------------------------------------------------------------------

    def matched(self, request: Any, computed: int) -> int:
        """Tokens to load beyond the ``computed`` ones. vLLM may ask several times."""
        remote = self._remote(request)
        if remote is None or remote.offer.transfer_id in self._pulling:
            return 0
        if self.agent.full:
            logger.warning("%s is prefilled here: quarantine is full", request.request_id)
            self.agent.decline(remote.offer)
            self._consume(request)
            return 0
        prompt_tokens: int = request.num_prompt_tokens
        return max(0, min(remote.tokens, prompt_tokens) - computed)

    def allocated(self, request: Any, block_ids: Sequence[int], external: int) -> None:
        """``request`` has its blocks; pull what lies beyond the local prefix hit."""
        remote = self._consume(request)
        if remote is None or remote.offer.transfer_id in self._pulling:
            return  # the latter: another sample of the same prompt reads it
        if external == 0:
            self.agent.decline(remote.offer)
            return
        end = min(remote.tokens, request.num_prompt_tokens)
        first = (end - external) // self._block_size
        ids = tuple(block_ids[first : self._blocks(end)])
        transfer_id = remote.offer.transfer_id
        self.agent.pull(remote.offer, Blocks.at(first, ids))
        self._pulling[transfer_id] = request.request_id
        self._loads[transfer_id] = Load(request.request_id, ids)

    # ---- the end of a request, either side -----------------------------------------------------

    def finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the blocks, and what the response tells the decode side."""
        unread = self._consume(request)
        if unread is not None and unread.offer.transfer_id not in self._pulling:
            self.agent.decline(unread.offer)
        for transfer_id, request_id in self._pulling.items():
            if request_id == request.request_id:
                self.agent.abort(transfer_id)
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
        offer = self.agent.hold(transfer_id, Blocks.at(0, block_ids[: self._blocks(tokens)]))
        self._holds[transfer_id] = request.request_id
        return True, Remote(offer, tokens).to_params()

    # ---- each step -----------------------------------------------------------------------------

    def step(self) -> Step:
        """What the workers are to do in this step."""
        self.apply(())  # what no report tells: transfers whose workers are silent
        step = Step(self.agent.take_orders(), self._holds, self._loads)
        self._holds, self._loads = {}, {}
        return step

    def apply(self, reports: Iterable[Report]) -> None:
        """What the workers have seen."""
        for event in self.agent.apply(reports):
            match event:
                case Received() | Drained() | Failed(drained=True):
                    self._pulling.pop(event.transfer_id, None)

    def _remote(self, request: Any) -> Remote | None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        known = self._remotes.get(request.request_id)
        if known is None:
            try:
                known = Remote.from_params(params)
            except InvalidInputError as error:
                logger.warning("%s is prefilled here: %s", request.request_id, error)
                self._consume(request)
                return None
            self._remotes[request.request_id] = known
        return known

    def _consume(self, request: Any) -> Remote | None:
        """The offer of a request, which is settled from now on: nobody asks again."""
        params = request.kv_transfer_params
        remote = self._remotes.pop(request.request_id, None)
        if params and params.get("do_remote_prefill"):
            # A copy: the dictionary may belong to the caller, or to other samples.
            request.kv_transfer_params = {**params, "do_remote_prefill": False}
            if remote is None:
                try:
                    remote = Remote.from_params(params)
                except InvalidInputError:
                    return None  # aborted before it was looked at; there is nothing to release
        return remote

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
