"""The ``kvxfer`` command. Needs nothing but the base package; ``rich`` makes it nicer."""

from kvxfer.cli.main import main

__all__ = ["main"]
