"""``python -m kvxfer.testing.softrdma``: set the engine up, try it, record what it says."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.errors import KvxferError

__all__ = ["main"]


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _setup(arguments: argparse.Namespace) -> None:
    from kvxfer.testing.softrdma.environment import setup

    report = setup(arguments.venv, wanted=arguments.python, say=_say)
    _say(f"ready: {report.python}")


def _check(arguments: argparse.Namespace) -> None:
    from kvxfer.testing.softrdma.check import check

    del arguments
    check(say=_say)


def _record(arguments: argparse.Namespace) -> None:
    from kvxfer.testing.softrdma.record import record

    record(arguments.output, only=arguments.only, say=_say)


def _sweep(arguments: argparse.Namespace) -> None:
    from kvxfer.testing.softrdma.tables import sweep

    del arguments
    for name in sweep():
        _say(f"removed {name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvxfer.testing.softrdma",
        description="The real MoRI-IO engine on CPU memory, over software RDMA.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "setup", help="make a virtual environment with the engine in it, or complete one"
    )
    command.add_argument("venv", type=Path, metavar="VENV", help="its directory")
    command.add_argument(
        "--python", type=Path, metavar="PATH", help="the interpreter to make it with"
    )
    command.set_defaults(run=_setup)

    command = commands.add_parser(
        "check", help="READ, WRITE and a batch between two processes (run with VENV/bin/python)"
    )
    command.set_defaults(run=_check)

    command = commands.add_parser(
        "record", help="record the engine's codes and messages (run with VENV/bin/python)"
    )
    command.add_argument("output", type=Path, metavar="OUTPUT", help="the file to write")
    command.add_argument(
        "--only", action="append", metavar="NAME", help="record this sample only; may be repeated"
    )
    command.set_defaults(run=_record)

    command = commands.add_parser("sweep", help="remove what runs that were killed left behind")
    command.set_defaults(run=_sweep)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 1 for an error that the text explains."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except KvxferError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
