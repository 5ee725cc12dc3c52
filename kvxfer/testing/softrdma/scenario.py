"""Scenarios: each provokes one error of the engine, in a process of its own.

Of its own, because mori reads some of its environment once per process, and because some errors end
the process.  ``run_scenario`` starts that process and returns the sample; the scenarios themselves
are in the modules ``provoke_*``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs

from kvxfer.errors import KvxferError
from kvxfer.testing.softrdma.control import SoftRdma
from kvxfer.testing.softrdma.engine import MoriEngine
from kvxfer.testing.softrdma.pair import MoriPair
from kvxfer.testing.softrdma.peer import MoriPeer
from kvxfer.testing.softrdma.samples import Sample, Surface, Verdict
from kvxfer.testing.softrdma.session import Outcome, Transfer
from kvxfer.testing.softrdma.tables import sweep

__all__ = ["Observation", "Rig", "Scenario", "all_scenarios", "run_scenario", "scenario"]

MODULES = (
    "provoke_refusals",
    "provoke_completions",
    "provoke_arguments",
    "provoke_backends",
    "provoke_sessions",
    "provoke_exits",
)
TIMEOUT_S = 60.0
SEED = 1


@attrs.frozen(kw_only=True)
class Observation:
    """What a scenario saw."""

    surface: Surface
    code: int | None = None
    exception: str | None = None
    message: str
    op: str | None = None
    facts: Mapping[str, Any] = attrs.field(factory=dict)


class Rig:
    """What a scenario works with; everything it made ends with it."""

    def __init__(self, rdma: SoftRdma, stack: ExitStack) -> None:
        self.rdma = rdma
        self._stack = stack

    def engine(self, key: str | None = None, **options: Any) -> MoriEngine:
        """A ``MoriEngine``."""
        return self._stack.enter_context(MoriEngine(key, **options))

    def peer(self, key: str | None = None, **options: Any) -> MoriPeer:
        """A ``MoriPeer``; quiet, because the last words printed are to be the scenario's own."""
        return self._stack.enter_context(MoriPeer(key, seed=SEED, quiet=True, **options))

    def pair(self, *, peer_config: Mapping[str, Any] | None = None, **config: Any) -> MoriPair:
        """A connected pair, with a READ done, so that the connection is known to work."""
        pair = MoriPair.connect(self.engine(**config), self.peer(config=peer_config), seed=SEED)
        outcome = pair.session.read(0, 0, 1).wait()
        if not outcome.ok:
            raise KvxferError(f"the connection does not work to begin with: {outcome}")
        pair.buffer.write(0, b"\0")
        return pair

    def settle(self) -> None:
        """Wait until every work request that was accepted is carried out or flushed."""
        self.rdma.wait_for(
            lambda seen: seen.executed + seen.failed + seen.flushed == seen.posted,
        )

    def patiently(self, post: Callable[[], Transfer], seconds: float = 10.0) -> Outcome:
        """Post again and again while the send queue is full; the last outcome.

        The engine frees the queue when its own thread has polled the completions, which nothing
        announces.
        """
        deadline = time.monotonic() + seconds
        while (outcome := post().wait()).message.startswith("SQ full"):
            if time.monotonic() > deadline:
                break
        return outcome

    def status(self, outcome: Outcome, op: str = "READ", **facts: Any) -> Observation:
        """An observation of a transfer's status."""
        plain = {
            name: attrs.asdict(value) if isinstance(value, Outcome) else value
            for name, value in facts.items()
        }
        return Observation(
            surface=Surface.STATUS, code=outcome.code, message=outcome.message, op=op, facts=plain
        )

    def raised(self, call: Callable[[], Any], **facts: Any) -> Observation:
        """An observation of the exception that ``call`` raises.

        Raises:
            KvxferError: It raised none.
        """
        try:
            result = call()
        except (RuntimeError, TypeError) as error:
            return Observation(
                surface=Surface.EXCEPTION,
                exception=type(error).__name__,
                message=str(error),
                facts=facts,
            )
        raise KvxferError(f"expected an exception, but the call returned {result!r}")


@attrs.frozen(kw_only=True)
class Scenario:
    """A way to provoke one error, and what it is expected to mean."""

    name: str
    section: int
    row: str
    verdict: Verdict
    environment: Mapping[str, str]
    how: str
    provoke: Callable[[Rig], Observation]


_registry: dict[str, Scenario] = {}


def scenario(
    *,
    section: int,
    row: str,
    verdict: Verdict,
    environment: Mapping[str, str] | None = None,
    name: str | None = None,
    how: str | None = None,
) -> Callable[[Callable[[Rig], Observation]], Callable[[Rig], Observation]]:
    """Register a scenario under its function's name; the docstring says how it goes."""

    def register(provoke: Callable[[Rig], Observation]) -> Callable[[Rig], Observation]:
        entry = Scenario(
            name=name or provoke.__name__,
            section=section,
            row=row,
            verdict=verdict,
            environment=dict(environment or {}),
            how=how or " ".join((provoke.__doc__ or "").split()),
            provoke=provoke,
        )
        if entry.name in _registry:
            raise KvxferError(f"two scenarios are named {entry.name!r}")
        _registry[entry.name] = entry
        return provoke

    return register


def all_scenarios() -> Mapping[str, Scenario]:
    """Every scenario by name, in the order of the failure guide."""
    for module in MODULES:
        importlib.import_module(f"kvxfer.testing.softrdma.{module}")
    return dict(_registry)


# ---- running one in a process of its own ----


def run_scenario(name: str) -> Sample:
    """Provoke the error in a new process and return what was seen.

    The settings of mori in our own environment (``MORI_*``) do not count: a log level, for one,
    would take away the last words of a process that mori ends.

    Raises:
        KeyError: There is no such scenario.
        KvxferError: The process ended although it should not have, or did not end in time.
    """
    chosen = all_scenarios()[name]
    reader, writer = os.pipe()
    try:
        with os.fdopen(reader, encoding="utf-8") as answers:
            try:
                finished = subprocess.run(
                    [sys.executable, "-m", __spec__.name, name, str(writer)],
                    env={
                        **{k: v for k, v in os.environ.items() if not k.startswith("MORI_")},
                        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
                        **chosen.environment,
                    },
                    pass_fds=[writer],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=TIMEOUT_S,
                    check=False,
                )
            finally:
                os.close(writer)
            answer = answers.read()
    except subprocess.TimeoutExpired as error:
        raise KvxferError(f"scenario {name!r} did not end within {TIMEOUT_S} s") from error
    if finished.returncode != 0:
        sweep()  # it could not remove its table
    observation = _observed(chosen, answer, finished)
    return Sample(
        name=name,
        section=chosen.section,
        row=chosen.row,
        verdict=chosen.verdict,
        how=chosen.how,
        **attrs.asdict(observation),
    )


def _observed(
    chosen: Scenario, answer: str, finished: subprocess.CompletedProcess[str]
) -> Observation:
    if answer:
        values = json.loads(answer)
        return Observation(**{**values, "surface": Surface(values["surface"])})
    if chosen.verdict is Verdict.FATAL and finished.returncode != 1:
        return Observation(
            surface=Surface.EXIT, code=finished.returncode, message=_last_words(finished.stdout)
        )
    raise KvxferError(
        f"scenario {chosen.name!r} ended with status {finished.returncode}:\n{finished.stdout}"
    )


_LOG_PREFIX = re.compile(r"^((\[[^\]]*\] ?)+|python[\d.]*: )")
_NOT_WORDS = re.compile(r"^(Fatal Python error|Current thread|Thread 0x|  File|Extension modules)")


def _last_words(output: str) -> str:
    """The last line that the process printed, without time stamps or its own name."""
    lines = [line for line in output.splitlines() if line.strip() and not _NOT_WORDS.match(line)]
    return _LOG_PREFIX.sub("", lines[-1]).strip() if lines else ""


def _main(name: str, answers: int) -> None:
    chosen = all_scenarios()[name]
    with SoftRdma() as rdma, ExitStack() as stack:
        observation = chosen.provoke(Rig(rdma, stack))
        values = attrs.asdict(observation)
        values["surface"] = observation.surface.value
        with os.fdopen(answers, "w", encoding="utf-8") as stream:
            json.dump(values, stream)


if __name__ == "__main__":
    # Run as a module, this file exists twice; the scenarios register with the importable one.
    importlib.import_module(__spec__.name)._main(sys.argv[1], int(sys.argv[2]))
