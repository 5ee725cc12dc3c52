"""When a new engine generation is made, and when its predecessor is ended."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import TYPE_CHECKING

from kvxfer.backends.moriio.binding import BACKEND
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ClosedError, KvxferError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends.moriio.generation import Generation

__all__ = ["Generations"]

_log = LimitedLog(logging.getLogger("kvxfer.backends.moriio"))

_LOOK_S = 0.05
"""How often the keeper looks whether calls on the old engine are over; nothing announces it."""


class Generations:
    """The current generation and at most one before it. Any thread.

    ``make`` makes generation n.  ``switched`` is called with the new one, on the thread that asked
    for it.  A thread of ours, the keeper, lives while there is an old one: it ends that engine once
    it has lingered for ``linger`` seconds, so that peers could be told of the new one, and carries
    no call of a healthy peer, or ``drain`` seconds after that in any case.

    ``ended`` is a queue of those whose engine is gone, for the progress thread to take from.
    """

    def __init__(
        self,
        make: Callable[[int], Generation],
        *,
        linger: float,
        drain: float,
        switched: Callable[[Generation], None],
    ) -> None:
        self._make = make
        self._linger = linger
        self._drain = drain
        self._switched = switched
        self._wake = threading.Condition()
        self.current = make(1)
        self.old: Generation | None = None
        self.ended: collections.deque[Generation] = collections.deque()
        self.failed_fences: collections.deque[tuple[int, KvxferError]] = collections.deque()
        """Fences up to that generation that cannot be, since no successor could be made."""
        self._fenced = 0
        self._switched_at = 0.0
        self._making = False
        self._closing = False
        self._keeper: threading.Thread | None = None

    @property
    def live(self) -> tuple[Generation, ...]:
        """Those whose engine exists, the current one first."""
        old, current = self.old, self.current
        return (current,) if old is None else (current, old)

    def after(self, generation: Generation, timeout: float) -> Generation:
        """The generation that replaces ``generation``, made now if there is none. May wait.

        Raises:
            TransportError: the one before ``generation`` still exists after ``timeout`` seconds, or
                no engine can be made.
            ClosedError: the transport is being closed.
        """
        end = time.monotonic() + timeout
        with self._wake:
            while True:
                if self._closing:
                    raise ClosedError(f"the {BACKEND} transport is closed")
                if self.current.number > generation.number:
                    return self.current
                if self.old is None and not self._making:
                    self._making = True
                    break
                left = end - time.monotonic()
                if left <= 0 or not self._wake.wait(left):
                    if self.current.number > generation.number:
                        continue
                    old = self.old.number if self.old is not None else generation.number
                    message = f"engine generation {old} has not ended"
                    raise TransportError(
                        f"{message}, and there are at most two: the queue pairs are not rebuilt",
                        next_step="try again; its calls end when their peers answer or time out",
                        engine=EngineError(backend=BACKEND, message=message),
                    )
        return self._switch()

    def _switch(self) -> Generation:
        try:
            fresh = self._make(self.current.number + 1)
        except BaseException:
            with self._wake:
                self._making = False
                self._wake.notify_all()
            raise
        with self._wake:
            self._making = False
            self.old, self.current = self.current, fresh
            self._switched_at = time.monotonic()
            self._ensure_keeper()
            self._wake.notify_all()
        _log.problem(
            "engine_rebuilt", "engine generation %d replaces %d", fresh.number, fresh.number - 1
        )
        self._switched(fresh)
        return fresh

    def fence(self) -> int:
        """Have every engine that exists now ended; the number of the last of them. Never waits."""
        with self._wake:
            number = self.current.number
            self._fenced = max(self._fenced, number)
            self._ensure_keeper()
            self._wake.notify_all()
        return number

    def close(self, timeout: float) -> None:
        """No new generation from now on. Waits at most ``timeout`` seconds for the keeper."""
        with self._wake:
            self._closing = True
            keeper = self._keeper
            self._wake.notify_all()
        if keeper is not None:
            keeper.join(timeout)

    # ---- the keeper ------------------------------------------------------------------------

    def _ensure_keeper(self) -> None:
        if self._keeper is None and not self._closing:
            self._keeper = threading.Thread(
                target=self._keep, name="kvxfer-moriio-keeper", daemon=True
            )
            self._keeper.start()

    def _keep(self) -> None:
        while True:
            with self._wake:
                if self._closing:
                    return
                if self.old is None and self._fenced < self.current.number:
                    self._keeper = None
                    return
                old, current = self.old, self.current
            if old is not None:
                self._retire(old)
                continue
            try:
                self.after(current, self._linger + self._drain)
            except KvxferError as error:
                with self._wake:
                    self._fenced = 0
                    self.failed_fences.append((current.number, error))

    def _retire(self, old: Generation) -> None:
        lingered = self._switched_at + self._linger
        while True:
            now = time.monotonic()
            with self._wake:
                if self._closing:
                    return
                overdue = now >= lingered + self._drain
                if now < lingered or (old.busy and not overdue):
                    self._wake.wait(max(lingered - now, _LOOK_S))
                    continue
            if old.leave(_LOOK_S):
                break
        old.end()
        with self._wake:
            self.old = None
            self.ended.append(old)
            self._wake.notify_all()
        _log.problem("engine_ended", "engine generation %d has ended", old.number)
