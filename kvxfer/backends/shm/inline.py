"""Small copies, made by ``post`` itself: to hand them to a thread would take longer.

This is work with a bound, not waiting: at most ``limit`` bytes and ``INLINE_PIECES`` pieces between
two calls of ``progress``, less than a millisecond; and only in memory that is mapped, which is
there whether its owner runs, stands still or has died.  What is read in place has no such bound
(a page may have to be fetched over there), so that is for the copy threads.

Of what is more than one chunk, ``post`` copies one while the threads wake up for the others, and
then, within the same bound, those that none of them has begun.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.backends.shm.copying import SCRATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvxfer.backends.shm.jobs import ChunkTask
    from kvxfer.backends.shm.pool import CopyPool

__all__ = ["INLINE_PIECES", "InlineCopies"]

INLINE_PIECES = 1024
"""Each may be a page that no cache knows: about a quarter of a microsecond."""


class InlineCopies:
    """What may still be copied without a thread. Any thread; nobody waits for another."""

    def __init__(self, pool: CopyPool, limit: int) -> None:
        """``limit``: bytes between two calls of ``renew``; 0 for none at all."""
        self._pool = pool
        self._limit = limit
        self._bytes_left = limit
        self._pieces_left = INLINE_PIECES
        self._turn = threading.Lock()
        self._scratch = np.empty(SCRATCH_BYTES if limit else 0, dtype=np.uint8)

    def renew(self) -> None:
        """Whoever posts has looked around in the meantime: start counting anew."""
        self._bytes_left = self._limit
        self._pieces_left = INLINE_PIECES

    def run(self, key: Hashable, tasks: Sequence[ChunkTask]) -> None:
        """Have ``tasks`` run: here and now from the last one on, as far as they are small enough
        and no thread has taken them; by the pool otherwise.

        For the pool these run under ``key`` as well: they count for ``when_idle`` and ``stop``.
        """
        own = tasks[-1]
        # Where another path's post is at it, this one does not wait for its turn.
        if not self._fits(own) or not self._turn.acquire(blocking=False):
            self._pool.submit(key, tasks)
            return
        try:
            if not self._pool.enter(key):
                self._pool.submit(key, tasks)
                return
            try:
                if len(tasks) > 1:
                    self._pool.submit(key, tasks[:-1])
                self._run(own)
                for task in tasks[-2::-1]:
                    if not self._fits(task) or not self._pool.withdraw(key, task):
                        break  # the threads have the others
                    self._run(task)
            finally:
                self._pool.leave(key)
        finally:
            self._turn.release()

    def _run(self, task: ChunkTask) -> None:
        self._bytes_left -= task.nbytes
        self._pieces_left -= task.pieces
        task.run(self._scratch)

    def _fits(self, task: ChunkTask) -> bool:
        return (
            not task.in_place
            and task.nbytes <= self._bytes_left
            and task.pieces <= self._pieces_left
        )
