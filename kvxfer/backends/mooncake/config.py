"""How the Mooncake engine is set up."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.backends._options import config_from
from kvxfer.core.address import Address
from kvxfer.errors import ConfigError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MooncakeConfig", "Protocol"]


class Protocol(enum.Enum):
    """What the engine moves bytes with. It never mixes them."""

    TCP = "tcp"
    RDMA = "rdma"
    """Never run by kvxfer's own tests, which have no such device."""


DEFAULT_QUEUE = 1024
"""Transfers that the engine queues per peer over tcp, unless the environment says otherwise. One
piece is one transfer. What is beyond waits for a second, then fails."""

_LOG_LEVELS = ("TRACE", "INFO", "WARNING", "ERROR")


def _count(low: int, high: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be an integer from {low} to "
                f"{high}, not {value!r}"
            )

    return check


def _seconds(low: float, high: float) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be more than {low:g} and less "
                f"than {high:g} seconds, not {value!r}"
            )

    return check


def _a(kind: type, words: str) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{type(instance).__name__}.{attribute.name} must be {words}, not {value!r}"
            )

    return check


def _log_level(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and value not in _LOG_LEVELS:
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be one of {', '.join(_LOG_LEVELS)} "
            f"or None, not {value!r}"
        )


@attrs.frozen(kw_only=True)
class MooncakeConfig:
    """Settings of one ``MooncakeTransport``. Times are seconds.

    Raises:
        ConfigError: names the field, what it must be, and the value.
    """

    host: str = attrs.field(default="127.0.0.1", validator=_a(str, "a text"))
    """The address of this machine that peers dial: a name, an IPv4 or an IPv6 literal.

    The engine listens on all interfaces, whatever stands here. With IPv6 it speaks nothing else in
    the whole process.
    """
    protocol: Protocol = attrs.field(
        default=Protocol.TCP, validator=_a(Protocol, "Protocol.TCP or Protocol.RDMA")
    )
    """The engine takes tcp where it finds no RDMA device, whatever it was asked for: the transport
    looks what it took, and does not start with another one."""
    devices: str = attrs.field(default="", validator=_a(str, "a text"))
    """RDMA devices to use, separated by commas. Empty: all that there are."""
    max_pieces: int = attrs.field(default=DEFAULT_QUEUE // 4, validator=_count(1, 16384))
    """Most pieces of one post. A quarter of the engine's queue at most, whatever stands here."""
    verify_peer: bool = attrs.field(default=True, validator=_a(bool, "True or False"))
    """Move one piece more with every post, which names the peer's incarnation.

    The engine knows peers by address only. A process that took over the address of one that died
    would be read, or written, in its place.
    """
    connect_timeout: float = attrs.field(default=5.0, validator=_seconds(0.0, 3600.0))
    """For each answer that ``connect`` waits for."""
    status_timeout: int | None = attrs.field(default=None)
    """``MC_TCP_STATUS_TIMEOUT_SEC`` unless set, in whole seconds: how long the engine waits for a
    peer's first byte before it fails a piece (engine: 30)."""
    lanes_per_peer: int | None = attrs.field(default=None)
    """``MC_TCP_LANES_PER_PEER`` unless set: connections per peer over tcp (engine: 4)."""
    log_level: str | None = attrs.field(default="ERROR", validator=_log_level)
    """``MC_LOG_LEVEL`` unless set. The engine logs to standard error, also what arrives as a value
    here; it reads the variable once per process."""

    @host.validator
    def _dialled(self, _attribute: object, value: str) -> None:
        try:
            address = Address.parse(value)
        except InvalidInputError as error:
            raise ConfigError(f"MooncakeConfig.host: {error.message}") from error
        if address.port is not None or address.is_wildcard:
            raise ConfigError(
                f"MooncakeConfig.host must be an address that peers can dial, without a port, not "
                f"{value!r}",
                next_step="the engine chooses its ports itself",
            )

    @status_timeout.validator
    def _timeout_range(self, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None:
            _count(1, 3600)(self, attribute, value)

    @lanes_per_peer.validator
    def _lanes_range(self, attribute: attrs.Attribute[Any], value: int | None) -> None:
        if value is not None:
            _count(1, 16)(self, attribute, value)

    @property
    def address(self) -> Address:
        """``host``, in its one spelling."""
        return Address.parse(self.host)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MooncakeConfig:
        """From JSON values, as a configuration file has them.

        Raises:
            ConfigError: an unknown key, with the nearest one as a hint, or a value that does not
                fit.
        """
        return config_from(cls, options)
