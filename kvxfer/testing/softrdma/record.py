"""``record``: run the scenarios and write down what the engine said."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from kvxfer.errors import ConfigError
from kvxfer.testing.softrdma.control import find_verbs_library
from kvxfer.testing.softrdma.samples import Recording
from kvxfer.testing.softrdma.scenario import all_scenarios, run_scenario
from kvxfer.testing.softrdma.wheel import find_wheel

__all__ = ["describe_wheel", "record"]


def describe_wheel() -> dict[str, str]:
    """What identifies the wheel in this environment.

    Raises:
        ConfigError: It was not installed by pip.
    """
    wheel = find_wheel([find_verbs_library().parent.parent])
    if wheel is None:
        raise ConfigError("amd-mori is here, but not its RECORD: install it with pip")
    return {
        "name": "amd-mori",
        "version": wheel.version,
        "tag": wheel.tag,
        "libmori_io_sha256": wheel.main_library_digest,
        "record_sha256": wheel.record_digest,
    }


def record(
    output: Path,
    *,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Recording:
    """Provoke every error, each in a process of its own, and write the samples to ``output``.

    Args:
        output: The file to write.
        only: Names of the scenarios to run; None runs all.
        say: Called with each line of progress.

    Raises:
        ConfigError: A name in ``only`` is unknown.
        KvxferError: A scenario did not end as it should.
    """
    known = all_scenarios()
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        raise ConfigError(f"no such scenario: {', '.join(unknown)}")
    samples = []
    for name in known if only is None else only:
        sample = run_scenario(name)
        what = sample.code if sample.exception is None else sample.exception
        say(f"{name}: {what} {sample.message!r}")
        samples.append(sample)
    recording = Recording(
        wheel=describe_wheel(),
        recorded_with={
            "command": "python -m kvxfer.testing.softrdma record",
            "python": platform.python_version(),
            "libc": os.confstr("CS_GNU_LIBC_VERSION") or "",
            "machine": platform.machine(),
        },
        samples=tuple(samples),
    )
    output.write_text(recording.to_json(), encoding="utf-8")
    return recording
