"""How long each phase of a transfer may take. All values are seconds."""

from __future__ import annotations

import enum
import math
import numbers
from typing import Any

import attrs

from kvxfer.errors import ConfigError

__all__ = ["Phase", "Timeouts", "transport_retry_budget"]


class Phase(enum.Enum):
    """What a deadline bounds. Each is counted from where that phase begins."""

    CONNECT = "connect"
    QUEUE = "queue"
    POST = "post"
    TRANSFER = "transfer"
    ACK = "ack"
    DRAIN = "drain"


def _number(value: Any) -> Any:
    """Text that is a number, as configuration files and environments deliver it, becomes one."""
    if isinstance(value, (str, numbers.Real)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return value  # the validator names the field
    return value


def _duration(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be a positive, finite number of "
            f"seconds, not {value!r}"
        )


def _field(default: float) -> float:
    field: float = attrs.field(default=default, converter=_number, validator=_duration)
    return field


@attrs.frozen(kw_only=True)
class Timeouts:
    """Bounds per phase, in seconds. Numbers and numeric text ("1.5") are accepted.

    Raises:
        ConfigError: a value is not positive, not finite, a bool, or no number.
    """

    connect: float = _field(12.0)
    """Handshake, connect and prepare, all tries together. mori notices a stopped peer after 5.1 s
    (MORI_IO_CP_TIMEOUT_MS): two such tries fit."""

    queue: float = _field(10.0)
    """Waiting for a grant or for credit before anything is posted. Twice the 5 s that mori itself
    waits for room in a send queue (MORI_IO_SQ_BACKOFF_TIMEOUT_US)."""

    post: float = _field(6.0)
    """One call into an engine that may block. Longer than those 5 s, so that the engine's own
    answer comes before ours."""

    transfer: float = _field(30.0)
    """From the first post of a part to its end, retries included. As long as the default lease:
    what takes longer could not be published anyway."""

    ack: float = _field(30.0)
    """Until the peer confirmed a message that matters. As long as the default lease: what is not
    confirmed by then is settled by expiry."""

    drain: float = _field(5.0)
    """From a failure to the proof that nothing lands any more; then quarantine. Above 3.758 s, a
    queue pair's retry budget with the time-out exponent 17 (``transport_retry_budget``)."""

    def of(self, phase: Phase) -> float:
        """The bound of ``phase`` in seconds."""
        seconds: float = getattr(self, phase.value)
        return seconds


def transport_retry_budget(exponent: int = 14, retries: int = 7) -> float:
    """Seconds until an RDMA queue pair gives up on a silent peer.

    4.096 us times 2 to the ``exponent`` (1 to 31) is one time-out of the InfiniBand specification;
    ``retries`` (1 to 7) of them make the queue pair fail.  The defaults are mori's and give 0.470.

    Raises:
        ConfigError: a value is out of range.
    """
    for name, value, high in (("exponent", exponent, 31), ("retries", retries, 7)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise ConfigError(f"{name} must be an integer from 1 to {high}, not {value!r}")
    return float(4.096e-6 * 2**exponent * retries)
