"""Faults of one process's software RDMA: what a test can break, and what it can count."""

from __future__ import annotations

import abc
import errno
import time
from collections.abc import Callable
from types import TracebackType

import attrs

from kvxfer.errors import ConfigError, InvalidInputError
from kvxfer.testing.softrdma.codes import AsyncEvent, SetupCall, WcStatus

__all__ = ["Counters", "Faults", "Hold"]

POLL_INTERVAL_S = 0.001


@attrs.frozen(kw_only=True)
class Counters:
    """What the library has done in one process since it was loaded."""

    posted: int
    """Work requests accepted."""
    refused: int
    """Posting calls that were refused."""
    executed: int
    """Work requests that succeeded."""
    failed: int
    """Work requests that failed; flushed ones are not among them."""
    flushed: int
    """Work requests flushed because their queue pair was in error."""
    held: int
    """Work requests that wait because of ``hold`` now: at most one per queue pair."""
    flying: int
    """Work requests whose bytes are on their way now: checked, and not to be stopped."""
    queue_pairs: int
    """Queue pairs that exist now."""
    regions: int
    """Memory regions that exist now."""


class Hold:
    """What ``Faults.hold`` returns; as a context manager it releases at the end."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._faults.release()


class Faults(abc.ABC):
    """Everything that can be made to go wrong in one process.

    A fault acts on the work requests and calls of the process it belongs to: ``SoftRdma`` for this
    one, ``MoriPeer.faults`` for a peer.  All methods may be called from any thread, at any time.
    """

    @abc.abstractmethod
    def _set(self, name: str, value: int) -> None:
        """Set a knob of the library (``struct knobs`` in ``src/faults.h``)."""

    @abc.abstractmethod
    def _get(self, name: str) -> int:
        """Read a knob or a counter."""

    @abc.abstractmethod
    def _deliver(self, event: int) -> int:
        """Deliver an asynchronous event; how many were delivered."""

    @abc.abstractmethod
    def reset(self) -> None:
        """End every fault; held work requests go on."""

    # ---- slow ----

    def hold(self) -> Hold:
        """Keep every work request from moving any byte until ``release``.

        Requests already being copied finish.  Usable as a context manager, which releases at its
        end.
        """
        self._set("permits", 0)
        self._set("hold", 1)
        return Hold(self)

    def let_through(self, count: int) -> None:
        """Let ``count`` work requests pass while the others are held."""
        if count < 0:
            raise InvalidInputError(f"let_through: count must be 0 or more, not {count}")
        self._set("permits", count)

    def release(self) -> None:
        """End ``hold``."""
        self._set("hold", 0)
        self._set("permits", 0)

    def delay(self, seconds: float) -> None:
        """Every work request takes at least this long, one after the other per queue pair; 0 ends
        it."""
        if seconds < 0:
            raise InvalidInputError(f"delay: seconds must be 0 or more, not {seconds}")
        self._set("delay_us", round(seconds * 1e6))

    def flight(self, seconds: float) -> None:
        """Bytes arrive this long after the peer allowed the access, whatever happens in between; 0
        ends it.

        Whoever deregisters memory or destroys a queue pair meanwhile waits for them, on both sides.
        """
        if seconds < 0:
            raise InvalidInputError(f"flight: seconds must be 0 or more, not {seconds}")
        self._set("flight_us", round(seconds * 1e6))

    # ---- broken ----

    def fail_next(self, status: WcStatus, *, after: int = 0) -> None:
        """Complete one work request with ``status``, once; its queue pair then is in error.

        Args:
            status: Anything but SUCCESS.
            after: How many work requests of this process still succeed first.
        """
        status = WcStatus(status)
        if status is WcStatus.SUCCESS:
            raise InvalidInputError("fail_next: SUCCESS is no failure; use reset() to disarm")
        self._set("fail_after", _count("fail_next", "after", after))
        self._set("fail_status", int(status))  # last: this arms it

    def refuse_posts(self, error: int = errno.ENOMEM, *, after: int = 0, times: int = 1) -> None:
        """Answer posting calls with an errno.

        Args:
            error: The errno; ``errno.ENOMEM`` is what a full queue gives.
            after: How many work requests are still accepted first. A call that posts several may
                so be refused in its middle.
            times: How many calls are refused.
        """
        self._set("post_after", _count("refuse_posts", "after", after))
        self._set("post_times", _count("refuse_posts", "times", times, minimum=1))
        self._set("post_errno", _errno("refuse_posts", error))

    def fail_registration(self, error: int = errno.ENOMEM) -> None:
        """Registering memory fails with this errno, until ``reset``. mori aborts the process."""
        self.fail_setup(SetupCall.REGISTER_MEMORY, error)

    def fail_setup(self, call: SetupCall, error: int) -> None:
        """A call that sets something up fails with this errno, until ``reset`` or 0."""
        self._set(call.value, error if error == 0 else _errno("fail_setup", error))

    def transport_retry(self, seconds: float | None) -> None:
        """How long an unreachable peer is tried; None: as the queue pair was configured."""
        if seconds is not None and seconds < 0:
            raise InvalidInputError(f"transport_retry: seconds must be 0 or more, not {seconds}")
        self._set("retry_ms", -1 if seconds is None else round(seconds * 1e3))

    # ---- the device ----

    def port_down(self, *, event: bool = True) -> None:
        """The port reports itself as down; work requests are still carried out.

        Args:
            event: Also deliver PORT_ERROR to every open device.
        """
        self._set("port_down", 1)
        if event:
            self._deliver(AsyncEvent.PORT_ERROR)

    def port_up(self, *, event: bool = True) -> None:
        """End ``port_down``, with a PORT_ACTIVE event."""
        self._set("port_down", 0)
        if event:
            self._deliver(AsyncEvent.PORT_ACTIVE)

    def device(
        self,
        *,
        count: int | None = None,
        max_send_wr: int | None = None,
        max_message_bytes: int | None = None,
    ) -> None:
        """Change what an engine that is created later finds; None leaves a value as it is.

        Args:
            count: How many devices exist, 0 to 4.
            max_send_wr: The largest send queue a queue pair may ask for.
            max_message_bytes: The port's largest message.
        """
        if count is not None and not 0 <= count <= 4:
            raise ConfigError(f"device: count must be 0 to 4, not {count}")
        for name, value in (
            ("devices", count),
            ("max_wr", max_send_wr),
            ("max_msg", max_message_bytes),
        ):
            if value is not None:
                self._set(name, _count("device", name, value))

    def async_event(self, event: AsyncEvent) -> int:
        """Deliver an event; queue pairs and memory stay as they are, only the news arrives.

        Queue pair and completion queue events go to each queue pair of the process, all others
        once to each open device.

        Returns:
            How many were delivered.
        """
        return self._deliver(int(AsyncEvent(event)))

    # ---- counting ----

    def counters(self) -> Counters:
        """The counters now; each is exact, together they are not of one instant."""
        return Counters(**{field.name: self._get(field.name) for field in attrs.fields(Counters)})

    def wait_for(self, condition: Callable[[Counters], bool], timeout: float = 10.0) -> Counters:
        """Wait until the counters satisfy ``condition``.

        Args:
            condition: For instance ``lambda counters: counters.held == 1``.
            timeout: Seconds.

        Raises:
            TimeoutError: They never did; the text holds the last counters.
        """
        deadline = time.monotonic() + timeout
        while not condition(counters := self.counters()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout} s: {counters}")
            time.sleep(POLL_INTERVAL_S)
        return counters


def _count(method: str, name: str, value: int, minimum: int = 0) -> int:
    if value < minimum:
        raise InvalidInputError(f"{method}: {name} must be {minimum} or more, not {value}")
    return value


def _errno(method: str, value: int) -> int:
    if value not in errno.errorcode:
        raise InvalidInputError(f"{method}: {value} is no errno; use the names in module errno")
    return value
