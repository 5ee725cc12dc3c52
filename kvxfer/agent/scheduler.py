"""``SchedulerAgent``: the scheduler half. No transport, no socket, no thread.

It lives in the engine's scheduler process, hands orders down to the worker halves of all ranks
(``take_orders``, ``Agent.execute``), takes their reports up (``Agent.report``, ``apply``), and
combines the ranks: an event comes out once all of them have theirs.

Every transfer has a deadline of its own here, which needs no report: when it passes, ``poll`` (or
``apply``) says that the transfer failed.  What a silent worker may still do with the blocks is not
known then: they come back with its report, or when it is known to have ended (``worker_lost``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import attrs

from kvxfer.agent import orders as o
from kvxfer.agent.accept import destinations
from kvxfer.agent.combine import Combined
from kvxfer.agent.config import AgentConfig, seconds_of
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.events import Event, Role
from kvxfer.core.layout import Align, Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.core.timers import Timers
from kvxfer.core.trace import checked_traceparent, trace_of
from kvxfer.errors import CapacityError, ConfigError, InvalidInputError
from kvxfer.policies.timeouts import Phase, Timeouts

__all__ = ["SchedulerAgent"]

_PER_RANK = ("tp_rank", "pp_rank")
_RENEWALS_PER_LEASE = 3
"""One may be lost, and another late, before a kept hold ends."""


class SchedulerAgent:
    """One per engine instance (one data-parallel replica). Not thread-safe.

    Args:
        workers: what every worker's ``Agent.info`` said, in any order; ``set_workers`` later is
            as good, but offers need it.
        config: for the default lease.
        transfer_timeout: default deadline of ``accept`` in seconds.
        report_grace: seconds that a worker's report may take to arrive here.
        longest: seconds after which a hold is given up here whatever renews it.
        clock: for the deadlines; the system's unless a test or simulator has its own.
        trace_context: as for ``Agent``; asked by ``hold``.
    """

    def __init__(
        self,
        workers: Iterable[o.WorkerInfo] = (),
        *,
        config: AgentConfig | None = None,
        transfer_timeout: float = 30.0,
        report_grace: float = 5.0,
        longest: float = 3600.0,
        clock: Clock | None = None,
        trace_context: Callable[[], str] | None = None,
    ) -> None:
        self.config = config or AgentConfig()
        self._trace_context = trace_context
        self._timeout = seconds_of("transfer_timeout", transfer_timeout)
        self._grace = seconds_of("report_grace", report_grace)
        self._longest = seconds_of("longest", longest)
        self._clock = clock or SystemClock()
        self._workers: tuple[o.WorkerInfo, ...] = ()
        self._orders: list[o.Order] = []
        self._epochs = itertools.count(1)
        self._open: dict[tuple[Role, str], _Open] = {}
        self._deadlines: Timers[tuple[Role, str]] = Timers()
        self._quarantined: dict[tuple[Role, str], None] = {}
        self._kept: dict[str, _Kept] = {}
        """By transfer id: offers whose holds are renewed until somebody pulls or declines."""
        self._renewals: Timers[str] = Timers()
        self._heard: dict[int, float] = {}
        """By rank: when its last report came."""
        self.stale = 0
        """Events of transfers that were not, or no longer, under way here."""
        infos = tuple(workers)
        if infos:
            self.set_workers(infos)

    def __len__(self) -> int:
        """Transfers that are under way or not drained."""
        return len(self._open)

    @property
    def quarantine(self) -> tuple[str, ...]:
        """Transfers that failed and of which no worker has said that they are drained."""
        return tuple(transfer_id for _, transfer_id in self._quarantined)

    @property
    def full(self) -> bool:
        """Whether new transfers are refused because too many are in quarantine."""
        return len(self._quarantined) >= self.config.limits.quarantined

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
        self,
        transfer_id: str,
        blocks: Blocks | Sequence[Blocks],
        *,
        lease: float | None = None,
        owner: str | None = None,
        tag: object = None,
        traceparent: str | None = None,
    ) -> Offer:
        """Producer, READ: have all ranks hold, and make the offer. See ``Agent.hold``.

        Raises:
            ConfigError: ``set_workers`` has not been called.
            InvalidInputError: the id is under way, and not for owners of the same blocks.
            CapacityError: too many transfers are in quarantine.
        """
        if not self._workers:
            raise ConfigError("the workers are not known", next_step="call set_workers first")
        seconds = self.config.lease if lease is None else seconds_of("lease", lease)
        groups = _groups(blocks)
        trace = trace_of(traceparent, self._trace_context)
        known = self._open.get((Role.PRODUCER, transfer_id))
        if known is not None and known.joins(owner) and known.holds(groups):
            known.join(owner)
            assert known.offer is not None
            return known.offer
        budget = seconds + self.config.lease_margin + self.config.retry_window
        entry = self._begin(Role.PRODUCER, transfer_id, groups, budget, owner=owner, tag=tag)
        entry.renewable = True
        epoch = next(self._epochs)
        self._orders.append(
            o.HoldOrder(transfer_id=transfer_id, epoch=epoch, lease=seconds, traceparent=trace)
        )
        entry.offer = Offer(
            transfer_id=transfer_id,
            epoch=epoch,
            endpoints=tuple(w.offering(transfer_id, epoch) for w in self._workers),
            sizes=self._workers[0].sizes,
            lease=seconds,
            groups=groups,
            fingerprint=self._workers[0].fingerprint,
            traceparent=trace,
        )
        return entry.offer

    def pull(
        self,
        offer: Offer,
        blocks: Blocks | Sequence[Blocks],
        *,
        align: Align | None = None,
        uncovered_local: int = 0,
        owner: str | None = None,
        owners: int = 1,
        tag: object = None,
        traceparent: str | None = None,
    ) -> None:
        """Consumer, READ: have all ranks pull. See ``Agent.pull``."""
        groups = _groups(blocks)
        trace = checked_traceparent("traceparent", traceparent)
        self.let_go(offer.transfer_id)
        known = self._open.get((Role.CONSUMER, offer.transfer_id))
        if known is not None and known.joins(owner):
            known.join(owner, groups)
        else:
            budget = self._phases("connect", "queue", "transfer", "transfer")
            self._begin(Role.CONSUMER, offer.transfer_id, groups, budget, owner=owner, tag=tag)
        self._orders.append(
            o.PullOrder(
                offer=offer,
                blocks=groups,
                align=align,
                uncovered_local=uncovered_local,
                owner=owner,
                owners=owners,
                traceparent=trace,
            )
        )

    def accept(
        self,
        transfer_id: str,
        blocks: Blocks | Sequence[Blocks],
        *,
        deadline: float | None = None,
        producers: Sequence[Endpoint] = (),
        tag: object = None,
    ) -> None:
        """Consumer, WRITE: have all ranks accept. See ``Agent.accept``."""
        seconds = self._timeout if deadline is None else seconds_of("deadline", deadline)
        groups = _groups(blocks)
        self._begin(Role.CONSUMER, transfer_id, groups, seconds, tag=tag)
        self._orders.append(
            o.AcceptOrder(
                transfer_id=transfer_id,
                blocks=groups,
                deadline=seconds,
                producers=tuple(producers),
            )
        )

    def follow_push(self, transfer_id: str, *, tag: object = None) -> None:
        """Producer, WRITE: the workers push by themselves, layer by layer; combine their events."""
        budget = self._phases("connect", "queue", "transfer", "transfer", "ack")
        self._begin(Role.PRODUCER, transfer_id, (), budget, tag=tag)

    def decline(self, offer: Offer, *, owner: str | None = None, owners: int = 1) -> None:
        """Consumer, READ: nobody of this instance will read, or this owner will not.

        See ``Agent.decline``.
        """
        if owner is None:
            self.let_go(offer.transfer_id)
        self._orders.append(o.DeclineOrder(offer=offer, owner=owner, owners=owners))

    def renew(self, offers: Iterable[Offer]) -> None:
        """Consumer, READ: keep holds alive for requests that wait in the queue."""
        self._orders.append(o.RenewOrder(offers=tuple(offers)))

    def keep(self, offer: Offer) -> None:
        """Consumer, READ: renew that hold by and by, for a request that waits in the queue.

        First with the next ``take_orders``, unless it is pulled by then: how old an offer is that
        came through a router is not known.  It ends with ``pull`` or ``decline`` of the transfer,
        with ``let_go``, or after ``longest`` seconds.
        """
        full = len(self._kept) >= self.config.limits.transfers
        if offer.transfer_id in self._kept or full:
            return
        now = self._clock.now()
        self._kept[offer.transfer_id] = _Kept(offer=offer, until=now + self._longest)
        self._renewals.set(offer.transfer_id, now)

    def let_go(self, transfer_id: str) -> None:
        """Renew that hold no longer; unknown ids are ignored."""
        if self._kept.pop(transfer_id, None) is not None:
            self._renewals.cancel(transfer_id)

    def abort(self, transfer_id: str) -> None:
        """Give a transfer up; its event still comes."""
        self._orders.append(o.AbortOrder(transfer_id=transfer_id))

    def reclaim(self, transfer_id: str) -> list[Event]:
        """Take a transfer's blocks out of quarantine here, on your own responsibility."""
        out: list[Event] = []
        for role in Role:
            entry = self._open.get((role, transfer_id))
            if entry is not None and entry.combined.quarantined:
                out.extend(entry.combined.reclaim())
                self._forget((role, transfer_id))
        return out

    def worker_lost(self, rank: int) -> list[Event]:
        """The worker of that rank has ended, with its memory: no report of it will come.

        Returns what that ends.  A worker that takes its place begins with nothing.
        """
        out: list[Event] = []
        for key, entry in tuple(self._open.items()):
            out.extend(entry.combined.lose(rank))
            self._after(key, entry)
        return out

    # ---- to and from the workers -------------------------------------------------------------

    def take_orders(self) -> list[o.Order]:
        """The orders since the last call: for every worker, the same list."""
        self._renew_kept(self._clock.now())
        orders, self._orders = self._orders, []
        return orders

    def apply(
        self, reports: o.Report | Iterable[o.Report], now: float | None = None
    ) -> list[Event]:
        """Take reports of any ranks, in any order; returns the combined events.

        Events about peers come through as they are. A transfer's events for ids that are not under
        way are counted as stale and dropped. Also does what ``poll`` does.
        """
        now = self._clock.now() if now is None else now
        out: list[Event] = []
        for report in [reports] if isinstance(reports, o.Report) else reports:
            if 0 <= report.rank < self.world_size:
                self._heard[report.rank] = now
            for event in report.events:
                if not event.transfer_id:
                    out.append(event)
                    continue
                out.extend(self._combine(report.rank, event, now))
        out.extend(self.poll(now))
        return out

    def poll(self, now: float | None = None) -> list[Event]:
        """Transfers whose deadline has passed although ranks are silent. Needs no report.

        Call it once per step, or at ``next_at``.
        """
        now = self._clock.now() if now is None else now
        out: list[Event] = []
        for key in self._deadlines.pop_due(now):
            entry = self._open[key]
            later = self._still_alive(entry, now)
            if later is not None:
                self._deadlines.set(key, later)
            elif not entry.combined.published:
                out.extend(entry.combined.expire(now - entry.began))
                self._orders.append(o.AbortOrder(transfer_id=entry.combined.transfer_id))
                self._deadlines.set(key, now + self._phases("drain", "drain"))
            else:
                out.extend(entry.combined.quarantine())
            self._after(key, entry)
        return out

    def next_at(self) -> float | None:
        """When ``poll`` or ``take_orders`` has something next, if nothing comes first.

        Seconds of the clock.
        """
        times = [self._deadlines.next_at(), self._renewals.next_at()]
        return min((at for at in times if at is not None), default=None)

    # ---- inside ------------------------------------------------------------------------------

    def _renew_kept(self, now: float) -> None:
        due: list[Offer] = []
        for transfer_id in self._renewals.pop_due(now):
            kept = self._kept[transfer_id]
            if now >= kept.until:
                del self._kept[transfer_id]
                continue
            due.append(kept.offer)
            # A router may write any lease into an offer: workers would not ask more often either.
            pause = max(kept.offer.lease / _RENEWALS_PER_LEASE, self.config.grant_interval)
            self._renewals.set(transfer_id, now + pause)
        if due:
            self.renew(due)

    def _still_alive(self, entry: _Open, now: float) -> float | None:
        """A hold that its readers renew: a worker that reports ends it by its own deadlines.

        Returns when to look again; None if the deadline counts.
        """
        combined = entry.combined
        if not entry.renewable or combined.published:
            return None
        heard = min(self._heard.get(rank, entry.began) for rank in combined.silent)
        later = min(heard + entry.budget, entry.began + self._longest)
        return later if later > now else None

    def _combine(self, rank: int, event: Event, now: float) -> list[Event]:
        for role in Role:
            entry = self._open.get((role, event.transfer_id))
            if entry is not None and entry.combined.concerns(event):
                was_published = entry.combined.published
                found = entry.combined.add(rank, event)
                if entry.combined.published and not was_published:
                    # What is left is the proof that it is drained; workers have deadlines for that.
                    at = now + self._phases("drain", "drain")
                    self._deadlines.set((role, event.transfer_id), at)
                self._after((role, event.transfer_id), entry)
                return found
        self.stale += 1
        return []

    def _after(self, key: tuple[Role, str], entry: _Open) -> None:
        if entry.combined.over:
            self._forget(key)
        elif entry.combined.quarantined:
            self._quarantined[key] = None

    def _forget(self, key: tuple[Role, str]) -> None:
        self._open.pop(key, None)
        self._quarantined.pop(key, None)
        self._deadlines.cancel(key)

    def _phases(self, *names: str) -> float:
        """The longest that any worker gives these phases together, and the way of its report."""
        timeouts = [w.timeouts for w in self._workers if w.timeouts is not None] or [Timeouts()]
        return max(sum(t.of(Phase(n)) for n in names) for t in timeouts) + self._grace

    def _begin(
        self,
        role: Role,
        transfer_id: str,
        groups: tuple[Blocks, ...],
        seconds: float,
        *,
        owner: str | None = None,
        tag: object = None,
    ) -> _Open:
        if (role, transfer_id) in self._open:
            raise InvalidInputError(
                f"transfer {transfer_id!r} is under way already as {role.value}",
                next_step="wait for its event, or use another id",
            )
        if self.full:
            raise CapacityError(
                f"{len(self._quarantined)} transfers are in quarantine: the limit",
                next_step="restart the workers that are silent (worker_lost), or reclaim",
            )
        combined = Combined(
            role=role,
            transfer_id=transfer_id,
            world_size=self.world_size,
            blocks=tuple(tuple(ids.tolist()) for ids in destinations(groups)),
            tag=tag,
            owners=() if owner is None else (owner,),
        )
        budget = seconds + self._grace
        entry = _Open(combined=combined, began=self._clock.now(), budget=budget)
        self._open[(role, transfer_id)] = entry
        self._deadlines.set((role, transfer_id), entry.began + budget)
        return entry


@attrs.define(kw_only=True)
class _Open:
    """One transfer that is under way or not drained."""

    combined: Combined
    began: float
    budget: float
    renewable: bool = False
    offer: Offer | None = None

    def joins(self, owner: str | None) -> bool:
        """Whether another owner may share it."""
        owners = self.combined.owners
        return (
            owner is not None
            and bool(owners)
            and owner not in owners
            and not self.combined.published
        )

    def holds(self, groups: tuple[Blocks, ...]) -> bool:
        """Whether it is a hold of exactly these blocks."""
        return self.offer is not None and self.offer.groups == groups

    def join(self, owner: str | None, groups: tuple[Blocks, ...] = ()) -> None:
        """One more owner, with blocks of its own or the same."""
        assert owner is not None
        combined = self.combined
        combined.owners = (*combined.owners, owner)
        if groups:
            more = [tuple(ids.tolist()) for ids in destinations(groups)]
            combined.blocks = tuple(
                tuple(dict.fromkeys((*ids, *new)))
                for ids, new in zip(combined.blocks, more, strict=True)
            )


@attrs.frozen(kw_only=True)
class _Kept:
    """An offer that waits for its request's turn."""

    offer: Offer
    until: float
    """The end of our patience; clock seconds."""


def _groups(blocks: Blocks | Sequence[Blocks]) -> tuple[Blocks, ...]:
    return (blocks,) if isinstance(blocks, Blocks) else tuple(blocks)


def _without_ranks(sizes: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in sizes.items() if name not in _PER_RANK}
