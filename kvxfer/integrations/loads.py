"""Consumer, in an engine's scheduler: which request loads what, from the queue to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from kvxfer.agent import SchedulerAgent
from kvxfer.core.clock import Clock
from kvxfer.core.layout import Blocks
from kvxfer.core.remembered import Remembered
from kvxfer.integrations.sources import Remote, Source

__all__ = ["Loads"]

R = TypeVar("R")


class Loads(Generic[R]):
    """The agent's verbs, once per prompt, whatever an engine asks how often.

    A hold is renewed while its request waits in the queue. Of several requests with one source, the
    samples of a prompt, the first whose turn comes loads it, and the others wait for it. When the
    last of them goes without having loaded, the producer hears that nobody will. What was loaded
    once, well or not, is never loaded again. Not thread-safe; ``R`` is the engine's request.

    Args:
        groups: of KV caches.
        accept_timeout: seconds that a push may take, from ``begin`` on.
        caching: blocks that one request has loaded are found by the next one in a prefix cache.
    """

    def __init__(
        self,
        agent: SchedulerAgent,
        *,
        groups: int,
        accept_timeout: float,
        caching: bool,
        clock: Clock,
    ) -> None:
        self._agent = agent
        self._groups = groups
        self._accept_timeout = accept_timeout
        self._caching = caching
        self._clock = clock
        self.waiting: dict[str, Source] = {}
        """By request id: whose turn has not come."""
        self.leads: dict[str, str] = {}
        """By request id: the transfer it loads, for as long as others wait for its blocks."""
        self.loading: dict[str, tuple[str, R] | None] = {}
        """By transfer id: for whom, until nothing can land any more; None: for nobody."""
        limits = agent.config.limits
        self._settled: Remembered[str, bool] = Remembered(
            capacity=limits.early, ttl=limits.remembered_ttl
        )

    def wait(self, request_id: str, source: Source) -> None:
        """The request is in the queue."""
        self.waiting[request_id] = source
        if isinstance(source, Remote) and not self._taken(source):
            self._agent.keep(source.offer)

    def behind(self, request_id: str) -> bool:
        """Whether another request loads its prompt just now: ask again later."""
        source = self.waiting.get(request_id)
        return self._caching and source is not None and source.transfer_id in self.leads.values()

    def source(self, request_id: str) -> Source | None:
        """What the request may load; None if there is nothing (any more)."""
        source = self.waiting.get(request_id)
        return None if source is None or self._taken(source) else source

    def take(self, request_id: str) -> Source | None:
        """As ``source``, and the wait is over: ``begin`` or ``decline`` what comes."""
        self.leads.pop(request_id, None)  # asked again: its load has ended
        source = self.source(request_id)
        self.waiting.pop(request_id, None)
        return source

    def begin(self, request_id: str, request: R, source: Source, blocks: Sequence[Blocks]) -> None:
        """Load it into these blocks, per group."""
        if isinstance(source, Remote):
            self._agent.pull(source.offer, blocks)
        else:
            self._agent.accept(source.transfer_id, blocks, deadline=self._accept_timeout)
        self.leads[request_id] = source.transfer_id
        self.loading[source.transfer_id] = request_id, request

    def decline(self, source: Source) -> None:
        """A request does not want it. The producer hears of it if no other one waits."""
        if any(other.transfer_id == source.transfer_id for other in self.waiting.values()):
            return
        if isinstance(source, Remote):
            self._agent.decline(source.offer)
            return
        # What is pushed for nobody has to end as well: it is accepted, into no block.
        nothing = [Blocks.at(0, ())] * self._groups
        self._agent.accept(source.transfer_id, nothing, deadline=self._accept_timeout)
        self.loading[source.transfer_id] = None

    def leave(self, request_id: str) -> None:
        """The request has ended, however and wherever it was."""
        source = self.take(request_id)
        if source is not None:
            self.decline(source)
        for transfer_id, user in self.loading.items():
            if user is not None and user[0] == request_id:
                self._agent.abort(transfer_id)

    def user(self, transfer_id: str) -> R | None:
        """The request that loads it."""
        user = self.loading.get(transfer_id)
        return None if user is None else user[1]

    def settle(self, transfer_id: str) -> None:
        """It has ended, and nothing can land any more."""
        now = self._clock.now()
        self._settled.expire(now)
        if transfer_id in self.loading:
            del self.loading[transfer_id]
            self._settled.add(transfer_id, True, now)

    def _taken(self, source: Source) -> bool:
        return source.transfer_id in self.loading or source.transfer_id in self._settled
