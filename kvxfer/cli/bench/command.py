"""``kvxfer bench``: the arguments of the command, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvxfer.errors import ConfigError

__all__ = ["add_arguments", "size_of"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size_of(text: str) -> int:
    """``4096``, ``64k``, ``64KiB``, ``1M``: bytes.

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = word[-1:] if word[-1:] in "kmg" else ""
    try:
        return int(word.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: give bytes, or a number with K, M or G"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = (
        "Measures how fast the backends of this host READ blocks from another process: bandwidth "
        "beside the engine's own call and memmove, latencies under load, and recovery after a "
        "peer was killed. The default run takes less than three minutes."
    )
    parser.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="again for more; default all"
    )
    parser.add_argument("--sizes", type=size_of, nargs="+", metavar="BYTES", help="of a block")
    parser.add_argument("--counts", type=int, nargs="+", metavar="N", help="blocks of a transfer")
    parser.add_argument("--patterns", nargs="+", choices=["contiguous", "random"])
    parser.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="transfers under way"
    )
    parser.add_argument("--buffer", type=size_of, metavar="BYTES", help="memory of each side")
    parser.add_argument("--seconds", type=float, help="for all measurements together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-recovery", action="store_true", help="kill no peer")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write the result and plots here"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kvxfer.cli.bench.driver import contenders, run
    from kvxfer.cli.bench.plan import BenchPlan
    from kvxfer.cli.bench.report import progress, show

    names = ("sizes", "counts", "patterns", "concurrency", "buffer", "seconds", "seed")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    plan = BenchPlan(recovery=not arguments.no_recovery, **given)
    chosen = contenders(arguments.backend)
    if not chosen:
        raise ConfigError("no backend is installed that reaches another process")
    with progress(plan.steps() * len(chosen), quiet=arguments.json) as step:
        result = run(plan, chosen, step)
    if arguments.output is not None:
        result["files"] = _write(arguments.output, result)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        show(result)
        for file in result.get("files", ()):
            sys.stdout.write(f"written: {file}\n")
    asked_for = [c for c in result["contenders"] if arguments.backend or c["state"] == "failed"]
    measured = [c for c in result["contenders"] if c["state"] == "measured"]
    wrong = [row for c in result["contenders"] for row in c["bandwidth"] if row["wrong_words"]]
    for row in wrong:
        sys.stderr.write(f"kvxfer: WRONG BYTES in {row}\n")
    failed = wrong or not measured or any(c["state"] != "measured" for c in asked_for)
    return 1 if failed else 0


def _write(folder: Path, result: dict[str, object]) -> list[str]:
    from kvxfer.cli.bench.plots import plot

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    written = [str(path)]
    try:
        written += map(str, plot(result, folder))
    except ImportError:
        sys.stderr.write("kvxfer: no plots: matplotlib is missing (pip install 'kvxfer[bench]')\n")
    return written
