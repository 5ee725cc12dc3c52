"""``SchedulerAgent``: the scheduler half. No transport, no socket, no thread.

It lives in the engine's scheduler process, hands orders down to the worker halves of all ranks
(``take_orders``, ``Agent.execute``), takes their reports up (``Agent.report``, ``apply``), and
combines the ranks: an event comes out once all of them have theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvxfer.agent import orders as o
from kvxfer.agent.combine import Combined
from kvxfer.agent.config import AgentConfig, seconds_of
from kvxfer.core.events import Event, Role
from kvxfer.core.layout import Align, Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import ConfigError, InvalidInputError

__all__ = ["SchedulerAgent"]

_PER_RANK = ("tp_rank", "pp_rank")


class SchedulerAgent:
    """One per engine instance (one data-parallel replica). Not thread-safe.

    Args:
        workers: what every worker's ``Agent.info`` said, in any order; ``set_workers`` later is
            as good, but offers need it.
        config: for the default lease.
        transfer_timeout: default deadline of ``accept`` in seconds.
    """

    def __init__(
        self,
        workers: Iterable[o.WorkerInfo] = (),
        *,
        config: AgentConfig | None = None,
        transfer_timeout: float = 30.0,
    ) -> None:
        self.config = config or AgentConfig()
        self._timeout = transfer_timeout
        self._workers: tuple[o.WorkerInfo, ...] = ()
        self._orders: list[o.Order] = []
        self._epochs = itertools.count(1)
        self._open: dict[tuple[Role, str], Combined] = {}
        self.stale = 0
        """Events of transfers that were not, or no longer, under way here."""
        infos = tuple(workers)
        if infos:
            self.set_workers(infos)

    def __len__(self) -> int:
        """Transfers that are under way or not drained."""
        return len(self._open)

    def set_workers(self, workers: Iterable[o.WorkerInfo]) -> None:
        """Learn how the workers can be reached: all ranks of the instance, each once.

        Raises:
            ConfigError: a rank is missing or given twice, or the workers disagree on sizes or
                fingerprint.
        """
        infos = sorted(workers, key=lambda w: w.endpoint.rank)
        if not infos:
            raise ConfigError("no workers are given")
        first = infos[0]
        sizes = _without_ranks(first.sizes)
        for info in infos:
            if _without_ranks(info.sizes) != sizes or info.fingerprint != first.fingerprint:
                raise ConfigError(
                    f"workers of ranks {first.endpoint.rank} and {info.endpoint.rank} disagree: "
                    f"{sizes} {first.fingerprint!r} and {_without_ranks(info.sizes)} "
                    f"{info.fingerprint!r}"
                )
        world = sizes["tp_size"] * sizes["pp_size"]
        ranks = [info.endpoint.rank for info in infos]
        if ranks != list(range(world)):
            raise ConfigError(
                f"workers of ranks {ranks} are given: ranks 0..{world - 1} are needed"
            )
        self._workers = tuple(infos)

    @property
    def world_size(self) -> int:
        """Ranks that must report; 1 until ``set_workers``."""
        return len(self._workers) or 1

    # ---- verbs -------------------------------------------------------------------------------

    def hold(
        self, transfer_id: str, blocks: Blocks | Sequence[Blocks], *, lease: float | None = None
    ) -> Offer:
        """Producer, READ: have all ranks hold, and make the offer. See ``Agent.hold``.

        Raises:
            ConfigError: ``set_workers`` has not been called.
            InvalidInputError: the id is under way.
        """
        if not self._workers:
            raise ConfigError("the workers are not known", next_step="call set_workers first")
        seconds = self.config.lease if lease is None else seconds_of("lease", lease)
        self._begin(Role.PRODUCER, transfer_id)
        epoch = next(self._epochs)
        self._orders.append(o.HoldOrder(transfer_id=transfer_id, epoch=epoch, lease=seconds))
        return Offer(
            transfer_id=transfer_id,
            epoch=epoch,
            endpoints=tuple(w.endpoint for w in self._workers),
            sizes=self._workers[0].sizes,
            lease=seconds,
            groups=_groups(blocks),
            fingerprint=self._workers[0].fingerprint,
        )

    def pull(
        self,
        offer: Offer,
        blocks: Blocks | Sequence[Blocks],
        *,
        align: Align | None = None,
        uncovered_local: int = 0,
    ) -> None:
        """Consumer, READ: have all ranks pull. See ``Agent.pull``."""
        self._begin(Role.CONSUMER, offer.transfer_id)
        self._orders.append(
            o.PullOrder(
                offer=offer, blocks=_groups(blocks), align=align, uncovered_local=uncovered_local
            )
        )

    def accept(
        self,
        transfer_id: str,
        blocks: Blocks | Sequence[Blocks],
        *,
        deadline: float | None = None,
        producers: Sequence[Endpoint] = (),
    ) -> None:
        """Consumer, WRITE: have all ranks accept. See ``Agent.accept``."""
        self._begin(Role.CONSUMER, transfer_id)
        self._orders.append(
            o.AcceptOrder(
                transfer_id=transfer_id,
                blocks=_groups(blocks),
                deadline=self._timeout if deadline is None else seconds_of("deadline", deadline),
                producers=tuple(producers),
            )
        )

    def follow_push(self, transfer_id: str) -> None:
        """Producer, WRITE: the workers push by themselves, layer by layer; combine their events."""
        self._begin(Role.PRODUCER, transfer_id)

    def decline(self, offer: Offer) -> None:
        """Consumer, READ: nobody of this instance will read."""
        self._orders.append(o.DeclineOrder(offer=offer))

    def renew(self, offers: Iterable[Offer]) -> None:
        """Consumer, READ: keep holds alive for requests that wait in the queue."""
        self._orders.append(o.RenewOrder(offers=tuple(offers)))

    def abort(self, transfer_id: str) -> None:
        """Give a transfer up; its event still comes."""
        self._orders.append(o.AbortOrder(transfer_id=transfer_id))

    # ---- to and from the workers -------------------------------------------------------------

    def take_orders(self) -> list[o.Order]:
        """The orders since the last call: for every worker, the same list."""
        orders, self._orders = self._orders, []
        return orders

    def apply(self, reports: o.Report | Iterable[o.Report]) -> list[Event]:
        """Take reports of any ranks, in any order; returns the combined events.

        Events about peers come through as they are. A transfer's events for ids that are not under
        way are counted as stale and dropped.
        """
        out: list[Event] = []
        for report in [reports] if isinstance(reports, o.Report) else reports:
            for event in report.events:
                if not event.transfer_id:
                    out.append(event)
                    continue
                out.extend(self._combine(report.rank, event))
        return out

    def _combine(self, rank: int, event: Event) -> list[Event]:
        for role in Role:
            combined = self._open.get((role, event.transfer_id))
            if combined is not None and combined.concerns(event):
                found = combined.add(rank, event)
                if combined.over:
                    del self._open[(role, event.transfer_id)]
                return found
        self.stale += 1
        return []

    def _begin(self, role: Role, transfer_id: str) -> None:
        if (role, transfer_id) in self._open:
            raise InvalidInputError(
                f"transfer {transfer_id!r} is under way already as {role.value}",
                next_step="wait for its event, or use another id",
            )
        self._open[(role, transfer_id)] = Combined(
            role=role, transfer_id=transfer_id, world_size=self.world_size
        )


def _groups(blocks: Blocks | Sequence[Blocks]) -> tuple[Blocks, ...]:
    return (blocks,) if isinstance(blocks, Blocks) else tuple(blocks)


def _without_ranks(sizes: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in sizes.items() if name not in _PER_RANK}
