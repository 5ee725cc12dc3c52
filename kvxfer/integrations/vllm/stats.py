"""What vLLM logs and exports of transfers: ``KVConnectorStats`` and its Prometheus metrics."""

from __future__ import annotations

import statistics
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvxfer.core.events import (
    Declined,
    Drained,
    Event,
    Expired,
    Failed,
    PeerDown,
    Quarantined,
    Role,
    Sent,
)

__all__ = ["PromMetrics", "Stats", "Tally"]

_COUNTS = {
    "sent": "transfers that every reader or consumer has acknowledged (prefill)",
    "declined": "holds that decode did not want (prefill)",
    "expired": "holds whose lease ended unread (prefill)",
    "failed_sending": "holds and pushes that failed (prefill)",
    "failed_loading": "loads that failed; vLLM recomputes or errors (decode)",
    "quarantined": "loads whose blocks are out of use (decode)",
    "freed": "loads that left quarantine (decode)",
    "peers_lost": "connections to other workers that were lost",
}
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_NBYTES = tuple(float(1 << n) for n in range(12, 36, 2))


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Observations of an interval: ``seconds`` and ``nbytes`` per load, and counts. Aggregates."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data else value
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """One line for a person: how many, how much, how long, and what went wrong."""
        seconds: list[float] = self.data.get("seconds", [])
        nbytes: list[int] = self.data.get("nbytes", [])
        line: dict[str, int | float] = {}
        if seconds:
            ordered = sorted(seconds)
            line["loads"] = len(seconds)
            line["MB loaded"] = round(sum(nbytes) / 1e6, 3)
            line["median load ms"] = round(statistics.median(ordered) * 1e3, 1)
            line["slowest load ms"] = round(ordered[-1] * 1e3, 1)
        line.update({key: self.data[key] for key in _COUNTS if key in self.data})
        return line


class Tally:
    """Collects what one worker sees. Step thread only."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}
        self._quarantined: set[str] = set()

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A load has arrived, that long after the scheduler ordered it."""
        self._data.setdefault("seconds", []).append(seconds)
        self._data.setdefault("nbytes", []).append(nbytes)

    def count(self, event: Event) -> None:
        """Count an event by its kind."""
        match event:
            case Sent():
                key = "sent"
            case Declined():
                key = "declined"
            case Expired():
                key = "expired"
            case Failed():
                key = f"failed_{'sending' if event.role is Role.PRODUCER else 'loading'}"
            case Quarantined(role=Role.CONSUMER):
                self._quarantined.add(event.transfer_id)
                key = "quarantined"
            case Drained() if event.transfer_id in self._quarantined:
                self._quarantined.discard(event.transfer_id)
                key = "freed"
            case PeerDown():
                key = "peers_lost"
            case _:
                return
        self._data[key] = self._data.get(key, 0) + 1

    def take(self) -> Stats | None:
        """What came since the last call; None if nothing did."""
        data, self._data = self._data, {}
        return Stats(data) if data else None


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """``vllm:kvxfer_*`` in ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        kinds = {kind.__name__: metric for kind, metric in metric_types.items()}

        def made(kind: str, name: str, about: str, **more: Any) -> Any:
            metric = kinds[kind](
                name=f"vllm:kvxfer_{name}", documentation=about, labelnames=labelnames, **more
            )
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._observed = {
            "seconds": made(
                "Histogram",
                "load_seconds",
                "Seconds from the scheduler's order to the last byte of a load, per rank.",
                buckets=_SECONDS,
            ),
            "nbytes": made(
                "Histogram", "load_bytes", "Bytes of one load, per rank.", buckets=_NBYTES
            ),
        }
        self._counters = {
            key: made("Counter", key, f"Number of {about}, per rank.")
            for key, about in _COUNTS.items()
        }
        self._undrained = made(
            "Gauge",
            "quarantined_now",
            "Loads whose blocks are out of use now: above 0 the engine is unhealthy.",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, metric in self._observed.items():
            for value in transfer_stats_data.get(key, ()):
                metric[engine_idx].observe(value)
        for key, metric in self._counters.items():
            if key in transfer_stats_data:
                metric[engine_idx].inc(transfer_stats_data[key])
        change = transfer_stats_data.get("quarantined", 0) - transfer_stats_data.get("freed", 0)
        if change:
            self._undrained[engine_idx].inc(change)
