"""The transfers of an agent that have not ended, as its callers see them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import attrs

from kvxfer.agent import arguments
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.sweeper import Guarded
from kvxfer.core.events import Role
from kvxfer.core.remembered import Remembered
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.agent.owners import Owners
    from kvxfer.core.clock import Clock
    from kvxfer.core.observations import Verb
    from kvxfer.core.offer import Offer

__all__ = ["OpenTransfer", "OpenTransfers"]


@attrs.define(eq=False)
class OpenTransfer:
    """One of them. Fields may be read and changed with ``lock`` held."""

    handle: TransferHandle
    complete: bool = False
    """No more submits may come."""
    submits: int = 0
    epoch: int = 0
    pin: int = 0
    offer: Offer | None = None
    """Of a hold: owners that join it get the same."""
    owners: Owners | None = None
    """Of a pull, where they are named."""
    lock: threading.Lock = attrs.field(factory=threading.Lock)


class OpenTransfers:
    """By role and transfer id; any thread.

    Those that failed before their last submit are remembered for a while: more submits may be on
    their way, and must not begin the transfer again.

    Args:
        capacity, ttl: how many of those are kept, and for how many seconds.
        check_open: raises if nothing may be begun any more.
        abort: what ``TransferHandle.abort`` does.
        aged: called, from any thread, when something was added that has to be forgotten later.
    """

    def __init__(
        self,
        *,
        capacity: int,
        ttl: float,
        clock: Clock,
        check_open: Callable[[], None],
        abort: Callable[[TransferHandle], None],
        aged: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._check_open = check_open
        self._abort = abort
        self._aged = aged
        self._lock = threading.Lock()
        self._open: dict[tuple[Role, str], OpenTransfer] = {}
        self._failed: Remembered[tuple[Role, str], OpenTransfer] = Remembered(
            capacity=capacity, ttl=ttl
        )
        self.failed = Guarded(self._failed, self._lock)
        """For the sweeper."""

    def __len__(self) -> int:
        return len(self._open)

    def get(self, role: Role, transfer_id: str) -> OpenTransfer | None:
        """The transfer if it has not ended."""
        with self._lock:
            return self._open.get((role, transfer_id))

    def find(self, role: Role, transfer_id: str) -> OpenTransfer | None:
        """As ``get``, or the one that failed before its last submit."""
        key = (role, transfer_id)
        with self._lock:
            return self._open.get(key) or self._failed.get(key)

    def handles(self) -> list[TransferHandle]:
        """Of all that have not ended."""
        with self._lock:
            return [entry.handle for entry in self._open.values()]

    def clear(self) -> list[TransferHandle]:
        """Forget all; their handles."""
        with self._lock:
            entries = list(self._open.values())
            self._open.clear()
        return [entry.handle for entry in entries]

    def begin(
        self, verb: Verb, transfer_id: str, *, tag: object = None, trace: str = ""
    ) -> TransferHandle:
        """A handle for a transfer of one submit that must not be under way.

        Raises:
            InvalidInputError: it is.
        """
        entry = OpenTransfer(self._handle(verb, transfer_id, tag, trace), complete=True)
        if self._enter(verb.role, transfer_id, entry) is not entry:
            raise InvalidInputError(
                f"transfer {transfer_id!r} is under way already as {verb.role.value}",
                next_step="wait for its event, or use another id",
            )
        return entry.handle

    def reopen(
        self, verb: Verb, transfer_id: str, *, tag: object, trace: str, offered: str = ""
    ) -> OpenTransfer:
        """The entry of a transfer that may take several submits, new or known."""
        entry = OpenTransfer(self._handle(verb, transfer_id, tag, trace, offered))
        return self._enter(verb.role, transfer_id, entry)

    def offered(self, handle: TransferHandle, offer: Offer) -> None:
        """That hold's offer, for owners that join it."""
        with self._lock:
            entry = self._open.get((Role.PRODUCER, handle.transfer_id))
            if entry is not None and entry.handle is handle:
                entry.offer = offer

    def forget(self, role: Role, transfer_id: str) -> None:
        """It was refused: as if it had never been."""
        with self._lock:
            self._open.pop((role, transfer_id), None)

    def after_the_end(self, entry: OpenTransfer, *, last: bool) -> TransferHandle:
        """A submit for a transfer that has failed meanwhile: dropped; its event says why."""
        if last:
            with self._lock:
                self._failed.pop((entry.handle.role, entry.handle.transfer_id))
        return entry.handle

    def _enter(self, role: Role, transfer_id: str, entry: OpenTransfer) -> OpenTransfer:
        """Enter it, or return the one that is there."""
        arguments.text_id("transfer_id", transfer_id)
        self._check_open()
        key = (role, transfer_id)
        with self._lock:
            known = self._open.get(key) or self._failed.get(key)
            if known is not None:
                return known
            self._open[key] = entry
        entry.handle._on_end = lambda: self._ended(role, transfer_id, entry)
        return entry

    def _ended(self, role: Role, transfer_id: str, entry: OpenTransfer) -> None:
        """It is terminal."""
        key = (role, transfer_id)
        with self._lock:
            if self._open.get(key) is entry:
                del self._open[key]
            if not entry.complete and entry.handle.state is TransferState.FAILED:
                self._failed.add(key, entry, self._clock.now())
        self._aged()

    def _handle(
        self, verb: Verb, transfer_id: str, tag: object, trace: str, offered: str = ""
    ) -> TransferHandle:
        return TransferHandle(
            transfer_id,
            verb,
            self._abort,
            tag=tag,
            now=self._clock.now(),
            traceparent=trace,
            offered="" if offered == trace else offered,
        )
