"""Prometheus metrics of agents (extra ``metrics``).

Counters and gauges are read from ``Agent.snapshot`` and ``Agent.health`` when they are scraped: the
data path pays nothing for them.  The histograms are filled by an observer, at three points of each
transfer's life and never per post.

``PROMETHEUS_MULTIPROC_DIR`` does not work with collectors such as this one: give each process a
port of its own.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvxfer import __version__
from kvxfer.agent.health import PROBLEMS
from kvxfer.core.events import Observation
from kvxfer.core.observations import Outcome, TransferEnded, TransferPosted, Verb
from kvxfer.errors import InvalidInputError, MissingDependencyError
from kvxfer.observe.families import (
    BYTE_BUCKETS,
    COUNTERS,
    HISTOGRAMS,
    INTERNAL,
    OUTCOMES,
    SECOND_BUCKETS,
    Family,
    Type,
    all_families,
)

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise MissingDependencyError(
        "metrics need prometheus-client", next_step="pip install 'kvxfer[metrics]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent import Agent, Snapshot

__all__ = ["AgentMetrics"]


class AgentMetrics(Collector):
    """The metrics of one or more agents of this process.

    Args:
        registry: where it registers itself; None: nowhere, for whoever calls ``collect``.

    ``watch`` and ``forget`` may be called from any thread; a scrape from any other.

    Raises:
        ValueError: the registry has these metrics already: use the ``AgentMetrics`` that is there.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self.registry = registry
        """Where it is registered; None: nowhere, or not any more."""
        if registry is not None:
            registry.register(self)

    def watch(self, agent: Agent) -> None:
        """Export ``agent`` from now on, under ``AgentConfig.name``.

        Raises:
            InvalidInputError: an agent of that name is watched already.
        """
        name = agent.config.name
        with self._lock:
            if name in self._watched:
                raise InvalidInputError(
                    f"an agent named {name!r} is watched already",
                    next_step="give each agent of a process an AgentConfig.name of its own",
                )
            self._watched[name] = _Watched(agent)

    def forget(self, agent: Agent) -> None:
        """Export ``agent`` no more. Without effect if it is not watched."""
        with self._lock:
            watched = self._watched.get(agent.config.name)
            if watched is None or watched.agent is not agent:
                return
            del self._watched[agent.config.name]
        watched.remove()

    def close(self) -> None:
        """Forget all agents and leave the registry. Idempotent."""
        with self._lock:
            watched, self._watched = list(self._watched.values()), {}
            registry, self.registry = self.registry, None
        for one in watched:
            one.remove()
        if registry is not None:
            registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """The families without samples: a registry looks for collisions by it."""
        return (_metric(family) for family in all_families())

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        metrics = {family.name: _metric(family) for family in all_families()}
        with self._lock:
            watched = dict(self._watched)
        for name, one in watched.items():
            snapshot = one.agent.snapshot()
            _add_counters(metrics, name, snapshot.counters)
            for gauge, labels, value in _gauges(one.agent, snapshot):
                metrics[gauge].add_metric([name, *labels], value)  # type: ignore[attr-defined]
            one.histograms.add_to(metrics, name)
        return iter(metrics.values())


class _Watched:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.histograms = _Histograms()
        self.remove: Callable[[], None] = agent.add_observer(self.histograms.observe)


def _metric(family: Family) -> Metric:
    kinds: dict[Type, type[Metric]] = {
        Type.COUNTER: CounterMetricFamily,
        Type.GAUGE: GaugeMetricFamily,
        Type.HISTOGRAM: HistogramMetricFamily,
    }
    make: Callable[..., Metric] = kinds[family.type]
    return make(f"kvxfer_{family.name}", family.help, labels=("agent", *family.labels))


# ---- counters --------------------------------------------------------------------------------

_EXACT = {
    source: (family, values)
    for family in COUNTERS
    for source, values in family.sources.items()
    if not source.endswith("*")
}
_PREFIXES = {
    source[:-1]: (family, values)
    for family in COUNTERS
    for source, values in family.sources.items()
    if source.endswith("*")
}


def _series_of(counter: str) -> Iterable[tuple[Family, tuple[str, ...]]]:
    """The series that a counter of the snapshot feeds: one, or two where it is also a total."""
    found = []
    if counter in _EXACT:
        found.append(_EXACT[counter])
    for prefix, (family, values) in _PREFIXES.items():
        if counter.startswith(prefix):
            found.append((family, (*values, counter[len(prefix) :])))
    return found or [(INTERNAL, (counter,))]


def _add_counters(metrics: Mapping[str, Metric], agent: str, counters: Mapping[str, int]) -> None:
    values = {(f.name, labels): 0 for f in COUNTERS for labels in f.series()}
    for counter, count in counters.items():
        for family, labels in _series_of(counter):
            key = (family.name, labels)
            values[key] = values.get(key, 0) + count
    for (name, labels), value in values.items():
        metrics[name].add_metric([agent, *labels], value)  # type: ignore[attr-defined]


# ---- gauges ----------------------------------------------------------------------------------


def _gauges(agent: Agent, now: Snapshot) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Name, label values and value of every gauge."""
    health = agent.health()
    fill = [q.in_flight / q.limit for q in now.queues if q.limit]
    yield "info", (__version__,), 1
    yield "ready", (), health.ready
    names = [problem.name for problem in health.problems]
    for name in PROBLEMS:
        yield "problems", (name,), names.count(name)
    for verb, count in (
        (Verb.HOLD, now.holds),
        (Verb.PULL, now.pulls),
        (Verb.PUSH, now.pushes),
        (Verb.ACCEPT, now.accepts),
    ):
        yield "transfers_open", (verb.value,), count
    yield "pinned_blocks", (), now.pinned_blocks
    yield "in_flight_pieces", (), now.in_flight_pieces
    yield "unconfirmed_messages", (), now.unconfirmed
    yield "draining_transfers", (), now.draining
    yield "early_messages", (), now.early
    yield "peers", (), len(now.peers)
    yield "peers_left_alone", (), len(now.breakers)
    yield "peers_failed_over", (), len(now.backends)
    yield "stuck_calls", (), sum(now.stuck_threads.values())
    yield "waiting_calls", (), now.waiting_for_credits
    yield "waiting_seconds", (), now.longest_wait
    yield "queue_fill_ratio", (), max(fill, default=0.0)
    yield "quarantine_transfers", (), len(now.quarantine)
    yield "quarantine_limit", (), agent.config.limits.quarantined
    yield "quarantine_blocks", (), sum(entry.count for entry in now.quarantine)
    yield "quarantine_oldest_seconds", (), _oldest(agent, now)


def _oldest(agent: Agent, now: Snapshot) -> float:
    since = [entry.since for entry in now.quarantine]
    return max(0.0, agent.clock.now() - min(since)) if since else 0.0


# ---- histograms ------------------------------------------------------------------------------


class _Histogram:
    """Counts per bucket. Written by an agent's progress thread, read by scrapes."""

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        bucket = bisect.bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def add_to(self, metric: HistogramMetricFamily, labels: list[str]) -> None:
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
        metric.add_metric(labels, buckets=buckets, sum_value=total)


class _Histograms:
    """Those of one agent. Every series is made at once, so that observing only looks one up."""

    def __init__(self) -> None:
        # By values: an enumeration's own hash is slow before Python 3.12.
        self.seconds = {
            (verb.value, outcome.value): _Histogram(SECOND_BUCKETS)
            for verb, outcomes in OUTCOMES.items()
            for outcome in outcomes
        }
        self.queued = {verb: _Histogram(SECOND_BUCKETS) for verb in ("pull", "push")}
        self.nbytes = {verb: _Histogram(BYTE_BUCKETS) for verb in ("pull", "push", "accept")}

    def observe(self, seen: Observation) -> None:
        """An observer."""
        kind = type(seen)
        if kind is TransferPosted:
            assert isinstance(seen, TransferPosted)
            self.queued[seen.verb._value_].observe(seen.queued)
        elif kind is TransferEnded:
            assert isinstance(seen, TransferEnded)
            verb = seen.verb._value_
            self.seconds[(verb, seen.outcome._value_)].observe(seen.seconds)
            if seen.outcome is Outcome.DONE and verb in self.nbytes:
                self.nbytes[verb].observe(seen.nbytes)

    def add_to(self, metrics: Mapping[str, Metric], agent: str) -> None:
        seconds, queued, nbytes = (metrics[family.name] for family in HISTOGRAMS)
        for (verb, outcome), histogram in self.seconds.items():
            histogram.add_to(seconds, [agent, verb, outcome])  # type: ignore[arg-type]
        for verb, histogram in self.queued.items():
            histogram.add_to(queued, [agent, verb])  # type: ignore[arg-type]
        for verb, histogram in self.nbytes.items():
            histogram.add_to(nbytes, [agent, verb])  # type: ignore[arg-type]
