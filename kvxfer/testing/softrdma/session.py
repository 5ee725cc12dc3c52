"""Sessions of the real mori engine and what they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.errors import ClosedError

if TYPE_CHECKING:
    from kvxfer.testing.softrdma.engine import MoriEngine

__all__ = ["Outcome", "Session", "Transfer"]

IN_PROGRESS_CODES = frozenset({1, 2})  # INIT, IN_PROGRESS


@attrs.frozen
class Outcome:
    """What the engine says about a transfer."""

    code: int
    message: str

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.code == 0


class Transfer:
    """A READ or WRITE that was given to the engine."""

    def __init__(self, status: Any, uid: int) -> None:
        self._status = status
        self.uid = uid
        """The engine's number for it; a notification at the peer carries it."""

    @property
    def outcome(self) -> Outcome:
        """What the engine says now."""
        return Outcome(int(self._status.Code()), self._status.Message())

    @property
    def done(self) -> bool:
        """Whether it succeeded or failed."""
        return int(self._status.Code()) not in IN_PROGRESS_CODES

    def wait(self, timeout: float = 30.0) -> Outcome:
        """Wait for the end.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: It is still in progress.
        """
        self._status.WaitFor(max(1, round(timeout * 1000)))
        if not self.done:
            raise TimeoutError(f"transfer still in progress after {timeout} s")
        return self.outcome


class Session:
    """The engine's session between one local and one remote buffer. Offsets and sizes in bytes."""

    def __init__(self, engine: MoriEngine, native: Any) -> None:
        self._engine = engine
        self._native = native

    @property
    def native(self) -> Any:
        """mori's own session.

        Raises:
            ClosedError: The engine was closed.
        """
        if self._native is None:
            raise ClosedError("the session's engine was closed")
        return self._native

    def alive(self) -> bool:
        """What the engine's ``alive`` says; no health check (see the failure guide)."""
        return bool(self.native.Alive())

    def read(self, local: int, remote: int, nbytes: int) -> Transfer:
        """Read from the peer."""
        return self._post(self.native.Read, local, remote, nbytes)

    def write(self, local: int, remote: int, nbytes: int) -> Transfer:
        """Write to the peer."""
        return self._post(self.native.Write, local, remote, nbytes)

    def read_batch(
        self, local: Sequence[int], remote: Sequence[int], nbytes: Sequence[int]
    ) -> Transfer:
        """Read several pieces in one call."""
        return self._post(self.native.BatchRead, list(local), list(remote), list(nbytes))

    def write_batch(
        self, local: Sequence[int], remote: Sequence[int], nbytes: Sequence[int]
    ) -> Transfer:
        """Write several pieces in one call."""
        return self._post(self.native.BatchWrite, list(local), list(remote), list(nbytes))

    def _post(self, call: Any, *arguments: Any) -> Transfer:
        transfer = self._engine.new_transfer(self.native.AllocateTransferUniqueId())
        call(*arguments, transfer._status, transfer.uid)
        return transfer

    def _close(self) -> None:
        self._native = None
