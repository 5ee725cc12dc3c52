"""Empties by timer what only ages: tables that no transfer of ours tidies up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvxfer.agent.context import Context

__all__ = ["Ageing", "Guarded", "Sweeper"]


class Ageing(Protocol):
    """A table whose entries have a time to live."""

    def expire(self, now: float) -> object: ...

    def next_at(self) -> float | None: ...


class Guarded:
    """A table that users' threads change under ``lock``."""

    def __init__(self, table: Ageing, lock: threading.Lock) -> None:
        self._table = table
        self._lock = lock

    def expire(self, now: float) -> None:
        with self._lock:
            self._table.expire(now)

    def next_at(self) -> float | None:
        with self._lock:
            return self._table.next_at()


class Sweeper:
    """One per agent. Nobody has to send anything for old entries to go."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tables: list[Ageing] = []

    def watch(self, table: Ageing) -> None:
        """Call ``table.expire`` when it has something to drop."""
        self._tables.append(table)

    def arm(self) -> None:
        """Something was added to a table: look at them before this round ends."""
        self._ctx.soon(self)

    def step(self, now: float) -> None:
        for table in self._tables:
            table.expire(now)
        times = [at for table in self._tables if (at := table.next_at()) is not None]
        if times:
            self._ctx.at(self, min(times))
