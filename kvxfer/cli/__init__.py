"""The ``kvxfer`` command. Needs nothing but the base package; ``rich`` makes it nicer."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]

try:
    from kvxfer.cli.main import main
except ModuleNotFoundError as error:
    if (error.name or "kvxfer").partition(".")[0] == "kvxfer":
        raise
    _missing = error.name

    def main(argv: Sequence[str] | None = None) -> int:
        """In place of the command where a library is not there that all of it needs."""
        import sys

        del argv
        sys.stderr.write(
            f"kvxfer: {_missing} is not installed, which kvxfer requires. "
            "Next step: pip install --force-reinstall kvxfer\n"
        )
        return 1
