"""What is registered with the engine. It refuses memory that overlaps a registered one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvxfer.backends.mooncake import messages
from kvxfer.errors import InvalidInputError, TransportError

if TYPE_CHECKING:
    from kvxfer.backends.mooncake.binding import Engine
    from kvxfer.core.memory import Span

__all__ = ["Registry"]

_OVERLAP = -7


class Registry:
    """Counts the regions in each registered range: one inside another shares its registration.

    Any thread; calls may block in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._users: dict[tuple[int, int], int] = {}
        """By first and last address + 1."""
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int) -> tuple[int, int]:
        """Register, unless a registered range holds it; returns the range, for ``remove``.

        Raises:
            InvalidInputError: it overlaps a registered range without lying inside.
            TransportError: the engine refused.
        """
        end = address + nbytes
        with self._lock:
            for known in self._users:
                if known[0] <= address and end <= known[1]:
                    self._users[known] += 1
                    return known
                if known[0] < end and address < known[1]:
                    raise _overlap(address, nbytes, f"{known[0]:#x} to {known[1]:#x}")
            code = self._engine.register(address, nbytes)
            if code == _OVERLAP:  # with something that was not registered through us
                raise _overlap(address, nbytes, "another")
            if code:
                raise TransportError(
                    f"Mooncake does not register {nbytes} bytes at {address:#x} (code {code})",
                    next_step="its log on standard error may tell more",
                    engine=messages.NOT_TAKEN.engine(f"{nbytes} bytes", code),
                )
            self._users[address, end] = 1
            return address, end

    def remove(self, known: tuple[int, int]) -> None:
        """Undo one ``add``.

        Raises:
            TransportError: the engine refused.
        """
        with self._lock:
            if self._users[known] == 1:
                code = self._engine.unregister(known[0])
                if code:
                    raise TransportError(
                        f"Mooncake does not unregister {known[0]:#x} (code {code})",
                        engine=messages.NOT_TAKEN.engine("on unregistering", code),
                    )
                del self._users[known]
            else:
                self._users[known] -= 1


def _overlap(address: int, nbytes: int, other: str) -> InvalidInputError:
    return InvalidInputError(
        f"{nbytes} bytes at {address:#x} overlap the registered range {other}, which Mooncake does "
        "not allow",
        next_step="register the whole storage once",
    )


def span_words(span: Span) -> str:
    return f"{span.nbytes} bytes of {span.kind.value} at {span.address:#x}"
