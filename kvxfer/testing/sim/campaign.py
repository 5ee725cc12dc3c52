"""Many seeds on several processes, and the way from a failing seed to a small one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvxfer.testing.sim.config import SimConfig
from kvxfer.testing.sim.report import SimReport
from kvxfer.testing.sim.world import World

__all__ = ["Job", "campaign", "run", "shrink"]

Job = tuple[int, dict[str, Any]]
"""A seed and ``SimConfig.to_dict()``."""


def run(seed: int, config: SimConfig | None = None) -> SimReport:
    """One whole run."""
    with _without_warnings():
        world = World(seed, config or SimConfig())
        try:
            return world.run()
        finally:
            world.close()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Peers fail and leases end on purpose, in thousands: the report counts them, no log has to."""
    logger = logging.getLogger("kvxfer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_job(job: Job) -> dict[str, Any]:
    seed, config = job
    return run(seed, SimConfig.from_dict(config)).to_dict()


def campaign(jobs: Sequence[Job], *, processes: int) -> Iterator[Mapping[str, Any]]:
    """``SimReport.to_dict()`` of every job, in the order in which they end."""
    if processes <= 1:
        yield from map(_run_job, jobs)
        return
    # spawn: a child that inherits no state runs a seed exactly as a fresh process does.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in concurrent.futures.as_completed([pool.submit(_run_job, j) for j in jobs]):
            yield future.result()


def shrink(seed: int, config: SimConfig, *, most: int = 60) -> tuple[int, SimConfig, SimReport]:
    """A smaller run that is violated too: fewer faults, nodes and transfers, after ``most`` tries.

    The text of the violation may change on the way; that it is one does not.
    """
    report = run(seed, config)
    if not report.violations:
        return seed, config, report
    best = attrs.evolve(config, transfers=_needed(report, config))
    found = run(seed, best)
    if not found.violations:
        best, found = config, report
    tries = 0
    progress = True
    while progress and tries < most:
        progress = False
        for smaller in _smaller(best):
            if tries >= most:
                break
            # Another order of draws may hide the same fault: a few neighbouring seeds count too.
            for other in (seed, seed + 1_000_003, seed + 2_000_003):
                tries += 1
                tried = run(other, smaller)
                if tried.violations:
                    seed, best, found, progress = other, smaller, tried, True
                    break
            if progress:
                break
    return seed, best, found


def _needed(report: SimReport, config: SimConfig) -> int:
    """Requests that had begun when it happened."""
    begun = int(report.violations[0].at * config.rate * 1.3) + 5
    return max(1, min(config.transfers, begun))


def _smaller(config: SimConfig) -> Iterator[SimConfig]:
    """One thing less at a time, the largest steps first."""
    if config.transfers > 1:
        yield attrs.evolve(config, transfers=config.transfers // 2)
    if config.nodes:
        yield attrs.evolve(config, nodes={})
    if config.posts:
        yield attrs.evolve(config, posts={})
    for name in ("lose", "duplicate", "abort", "abort_producer", "decline", "lose_offer"):
        if getattr(config, name):
            yield SimConfig.from_dict({**config.to_dict(), name: 0.0})
    if config.retry_elsewhere:
        yield attrs.evolve(config, retry_elsewhere=0.0)
    if 0.0 < config.writes < 1.0:
        yield attrs.evolve(config, writes=0.0)
        yield attrs.evolve(config, writes=1.0)
    for kind in config.nodes:
        yield attrs.evolve(config, nodes={k: p for k, p in config.nodes.items() if k is not kind})
    for fault in config.posts:
        yield attrs.evolve(config, posts={k: p for k, p in config.posts.items() if k is not fault})
    if config.producers > 1:
        yield attrs.evolve(config, producers=config.producers // 2)
    if config.consumers > 1:
        yield attrs.evolve(config, consumers=config.consumers // 2)
    if config.transfers > 1:
        yield attrs.evolve(config, transfers=config.transfers - max(1, config.transfers // 8))
