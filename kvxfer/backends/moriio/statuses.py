"""What the engine writes the fates of calls into, and how long that must live.

The engine stores the code first, then unlocks the mutex of the same object and notifies whoever
waits for it (``TransferStatus::Update`` of amd-mori 1.2.4).  So a status that says that its call is
over may still be written to.  Freed at once, it damages the heap where the engine's thread was put
aside between the two; that is seen on a busy machine.  Goes once the engine notifies first.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from kvxfer.backends.moriio.binding import renew_status, status_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["KEPT_FAILED", "Statuses"]

KEPT_FAILED = 4096
"""So many more must have failed before a failed one is freed: far more than a thread that was put
aside can miss of its own."""


class Statuses:
    """Each method is for any thread.

    One that succeeded serves another call, for which the engine takes the mutex first; none of them
    is ever freed, so there are as many as calls were in flight at once.  One that failed keeps its
    code for good: the last ``KEPT_FAILED`` are kept.
    """

    def __init__(
        self,
        make: Callable[[], Any] | None = None,
        renew: Callable[[Any], None] = renew_status,
    ) -> None:
        self._make = status_class() if make is None else make
        self._renew = renew
        self._free: collections.deque[Any] = collections.deque()
        self._failed: collections.deque[Any] = collections.deque(maxlen=KEPT_FAILED)

    def take(self) -> Any:
        """For one call; it says that nothing was posted."""
        try:
            status = self._free.popleft()
        except IndexError:
            return self._make()
        self._renew(status)
        return status

    def succeeded(self, status: Any) -> None:
        """Its call is over."""
        self._free.append(status)

    def failed(self, status: Any) -> None:
        """Its call has failed, or the engine refused it."""
        self._failed.append(status)
