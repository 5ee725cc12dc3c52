"""What ``pull``, ``accept``, ``push`` and ``hold`` return: a view of one transfer."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from kvxfer.core.limitedlog import LimitedLog
from kvxfer.errors import TransferError

if TYPE_CHECKING:
    import asyncio

    from kvxfer.core.observations import Verb

__all__ = ["TransferHandle", "TransferState"]

_log = LimitedLog(logging.getLogger("kvxfer.agent"))


class TransferState(enum.Enum):
    """PENDING, then exactly one of the others for ever."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    DECLINED = "declined"
    EXPIRED = "expired"


class TransferHandle:
    """One transfer as its user sees it. Attributes may be read from any thread.

    ``drained`` says that no engine can touch the blocks any more on behalf of this transfer.
    """

    __slots__ = (
        "_abort",
        "_began_at",
        "_callbacks",
        "_done",
        "_lock",
        "_offered",
        "_on_end",
        "_posted_at",
        "_told",
        "_traceparent",
        "drained",
        "error",
        "nbytes",
        "owners",
        "payload",
        "role",
        "state",
        "tag",
        "transfer_id",
        "verb",
    )

    def __init__(
        self,
        transfer_id: str,
        verb: Verb,
        abort: Callable[[TransferHandle], None],
        *,
        tag: object = None,
        now: float = 0.0,
        traceparent: str = "",
        offered: str = "",
    ) -> None:
        self.transfer_id = transfer_id
        self.verb = verb
        self.role = verb.role
        self.tag = tag
        self.owners: tuple[str, ...] = ()
        """Requests of ours that share the transfer, where they were named."""
        self.state = TransferState.PENDING
        self.drained = False
        self.error: TransferError | None = None
        self.nbytes = 0
        self.payload = b""
        self._abort = abort
        self._began_at = now
        self._posted_at: float | None = None
        self._traceparent = traceparent
        self._offered = offered
        self._done: threading.Event | None = None
        """Made by who waits first: most handles are never waited for."""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._on_end: Callable[[], None] | None = None
        self._told = False
        """Its event is there."""

    def __repr__(self) -> str:
        return f"<TransferHandle {self.transfer_id!r} {self.role.value} {self.state.value}>"

    @property
    def done(self) -> bool:
        """Whether the state is terminal."""
        return self.state is not TransferState.PENDING

    def abort(self) -> None:
        """Give the transfer up. Never waits; the outcome arrives as an event."""
        self._abort(self)

    def result(self) -> TransferHandle:
        """This handle, if the transfer is DONE.

        Raises:
            TransferError: it failed, or has not ended.
        """
        if self.state is TransferState.DONE:
            return self
        if self.error is not None:
            raise self.error
        from kvxfer.errors import ErrorKind

        kind = {
            TransferState.DECLINED: ErrorKind.DECLINED,
            TransferState.EXPIRED: ErrorKind.EXPIRED,
        }.get(self.state, ErrorKind.INVALID)
        raise TransferError(f"transfer {self.transfer_id!r} is {self.state.value}", kind=kind)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it is terminal, on the progress thread; at once if it is."""
        with self._lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def __await__(self) -> Generator[object, None, TransferHandle]:
        """Wait inside an event loop until it is terminal; does not raise for a failed transfer.

        With ``progress="manual"`` somebody has to keep calling ``poll``.
        """
        return self._as_future().__await__()

    # ---- for the agent -----------------------------------------------------------------------

    def _join(self, owner: str) -> bool:
        """One more owner. False if it has ended: then its event did not name this one."""
        with self._lock:
            if self.done:
                return False
            self.owners = (*self.owners, owner)
            return True

    def _finish(
        self, state: TransferState, *, drained: bool, tell: Callable[[], None] | None = None
    ) -> bool:
        """First wins. The id is free again before ``tell`` emits the event, and the event is there
        before anybody who waits for the handle is woken.
        """
        with self._lock:
            if self.done:
                return False
            self.drained = drained
            self.state = state
            callbacks, self._callbacks = self._callbacks, []
        on_end, self._on_end = self._on_end, None  # it knows us: no cycle may stay behind
        if on_end is not None:
            on_end()
        if tell is not None:
            tell()
        with self._lock:
            self._told, waited = True, self._done
        if waited is not None:
            waited.set()
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - users' code: the others must be called too
                _log.failed(
                    "callback", "a done callback of %r failed", self.transfer_id, error=error
                )
        return True

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._told:
                return True
            if self._done is None:
                self._done = threading.Event()
            waited = self._done
        return waited.wait(timeout)

    def _as_future(self) -> asyncio.Future[TransferHandle]:
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[TransferHandle] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(self)

        def from_any_thread() -> None:
            try:
                loop.call_soon_threadsafe(resolve)
            except RuntimeError:
                return  # the loop was closed: nobody waits any more

        self.add_done_callback(from_any_thread)
        return future
