"""How the control channel is set up, and the ports it binds. Values only: loads no zmq."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvxfer.core.address import Address, PortRange
from kvxfer.core.events import Role
from kvxfer.core.keys import Security
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import zmq

__all__ = ["ChannelAuth", "ControlConfig", "Security", "exposure", "fixed_port", "refuse_exposure"]

_MAX_PORT = 65535


class ChannelAuth(Protocol):
    """Who may talk to us, and as whom we talk. The seam for other mechanisms than our keys.

    All methods are called by the thread that calls the channel, and may not wait for peers.
    """

    def start(self, context: zmq.Context[Any]) -> None:
        """Before any socket exists, for instance to answer authentication requests (ZAP)."""

    def configure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Set options on the socket that peers dial, before it is bound."""

    def configure_dialled(self, socket: zmq.Socket[bytes], address: Address) -> None:
        """Set options on a socket that will dial ``address``, before it connects."""

    def stop(self) -> None:
        """Close every socket made from the context. Called once, before the context ends."""


def _count(low: int, high: int) -> Any:
    def check(_: object, attribute: attrs.Attribute[int], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"ControlConfig.{attribute.name} must be an integer from {low} to {high}, "
                f"not {value!r}"
            )

    return check


def _duration(_: object, attribute: attrs.Attribute[float], value: object) -> None:
    # libzmq takes milliseconds, and the time-to-live of a heartbeat as 16 bits of 0.1 s.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0.001 <= value <= 6553:  # type: ignore[operator,arg-type]
        raise ConfigError(
            f"ControlConfig.{attribute.name} must be a number of seconds from 0.001 to 6553, "
            f"not {value!r}"
        )


def _host(_: object, attribute: attrs.Attribute[str], value: object) -> None:
    if value is None and attribute.name == "advertise_host":
        return
    if not isinstance(value, str):
        raise ConfigError(f"ControlConfig.{attribute.name} must be a host, not {value!r}")
    Address(value)


def _as_security(value: object) -> object:
    # As a configuration file has it.
    return Security(**value) if isinstance(value, dict) else value


def _security(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, Security):
        raise ConfigError(f"ControlConfig.{attribute.name} must be a Security, not {value!r:.200}")


def _flag(_: object, attribute: attrs.Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"ControlConfig.{attribute.name} must be True or False, not {value!r}")


def _port_range(value: PortRange | str | None) -> PortRange | None:
    if isinstance(value, str):
        return PortRange.parse(value)
    if value is None or isinstance(value, PortRange):
        return value
    raise ConfigError(f"ControlConfig.port_range must be a PortRange or text, not {value!r}")


@attrs.frozen(kw_only=True)
class ControlConfig:
    """Everything about the control channel. Durations are seconds. Pickles.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
        InvalidInputError: a host is no IP literal and no name.
    """

    bind_host: str = attrs.field(default="127.0.0.1", validator=_host)
    """The interface to listen on; ``0.0.0.0`` or ``::`` is all of them. Loopback by default."""

    advertise_host: str | None = attrs.field(default=None, validator=_host)
    """What peers are told to dial. By default the host that was bound."""

    port: int = attrs.field(default=0, validator=_count(0, _MAX_PORT))
    """The port to listen on; 0 lets the operating system choose, which cannot collide."""

    port_range: PortRange | None = attrs.field(default=None, converter=_port_range)
    """Instead of ``port``: the first free one of these is taken. For firewalls. Text such as
    ``"41000-41099"`` is accepted."""

    max_message_nbytes: int = attrs.field(default=8 << 20, validator=_count(1, 1 << 30))
    """Largest message in bytes, sent or received. The largest of ours, an offer or a grant, holds
    four bytes per block; 8 MiB leave room for two million blocks."""

    send_queue_messages: int = attrs.field(default=256, validator=_count(1, 1 << 20))
    """Messages that may wait per route while the peer does not take them. With the usual 32 KiB
    (8192 block ids) that is 8 MiB for a peer that has stopped."""

    receive_queue_messages: int = attrs.field(default=256, validator=_count(1, 1 << 20))
    """Messages that may wait per route until ``receive`` is called; then TCP holds the peer up."""

    max_routes: int = attrs.field(default=4096, validator=_count(1, 16384))
    """Dialled routes, and as many inbound ones. A dialled route takes 4 file descriptors."""

    max_pending: int = attrs.field(default=256, validator=_count(1, 16384))
    """Inbound connections that have been open for a second without a message. Beyond it the oldest
    is closed: one of ours speaks within milliseconds."""

    max_unread_nbytes: int = attrs.field(default=64 << 20, validator=_count(1 << 16, 1 << 40))
    """Bytes that an inbound connection may send without a whole message of it being received.
    Beyond it the connection is closed: libzmq holds them in memory. All connections that have not
    sent a message yet may send four times as much together."""

    heartbeat_interval: float = attrs.field(default=5.0, validator=_duration)
    """A connection without traffic is probed this often, by libzmq's thread, without the GIL."""

    heartbeat_timeout: float = attrs.field(default=10.0, validator=_duration)
    """A connection whose probe is not answered within this time counts as lost. A peer that was
    killed is noticed at once; this is for hosts and networks that vanish without a word."""

    handshake_timeout: float = attrs.field(default=10.0, validator=_duration)
    """A connection that has not introduced itself by then is closed."""

    connect_timeout: float = attrs.field(default=5.0, validator=_duration)
    """One attempt to connect; Linux itself would take more than two minutes."""

    reconnect_min: float = attrs.field(default=0.1, validator=_duration)
    """Pause after the first failed or lost connection; doubled each time."""

    reconnect_max: float = attrs.field(default=5.0, validator=_duration)
    """The longest pause. Attempts go on until the route is hung up."""

    security: Security | None = attrs.field(
        default=None, converter=_as_security, validator=_security
    )
    """Keys: who is let in, and who we are. None: whoever reaches the port may talk to us."""

    insecure: bool = attrs.field(default=False, validator=_flag)
    """Listen beyond loopback although there are no keys. Logged as a warning."""

    def __attrs_post_init__(self) -> None:
        if self.port and self.port_range is not None:
            raise ConfigError(
                f"ControlConfig.port is {self.port} and port_range is {self.port_range}",
                next_step="Give one of the two",
            )
        if self.heartbeat_timeout < self.heartbeat_interval:
            raise ConfigError(
                f"ControlConfig.heartbeat_timeout must be at least heartbeat_interval "
                f"({self.heartbeat_interval!r} s), not {self.heartbeat_timeout!r}"
            )
        if self.reconnect_max < self.reconnect_min:
            raise ConfigError(
                f"ControlConfig.reconnect_max must be at least reconnect_min "
                f"({self.reconnect_min!r} s), not {self.reconnect_max!r}"
            )
        told = self.bind_host if self.advertise_host is None else self.advertise_host
        if Address(told).is_wildcard:
            raise ConfigError(
                f"peers cannot dial {told}, which stands for all interfaces",
                next_step="Set ControlConfig.advertise_host to an address of this machine that "
                "peers can reach",
            )

    @property
    def ports(self) -> Iterable[int]:
        """The ports to try, in order; a single 0 if the operating system chooses."""
        return (self.port,) if self.port_range is None else self.port_range


def exposure(bound: Address, auth: ChannelAuth | None) -> str | None:
    """Why ``bound`` lets strangers in, or None if it does not.

    Args:
        bound: the literal that is listened on.
    """
    if auth is not None or bound.is_loopback:
        return None
    where = "every interface" if bound.is_wildcard else f"{bound}"
    return (
        f"the control channel listens on {where} without authentication: whoever reaches it can "
        "release and read about transfers"
    )


def refuse_exposure(bound: Address, config: ControlConfig, auth: ChannelAuth | None) -> None:
    """Refuse to listen where strangers can reach us, unless that was asked for.

    Args:
        bound: the literal that is to be listened on.

    Raises:
        ConfigError: it is beyond loopback, there are no keys, and ``insecure`` is not set.
    """
    if auth is None and not bound.is_loopback and not config.insecure:
        where = "every interface" if bound.is_wildcard else bound.host
        raise ConfigError(
            f"the control channel would listen on {where} (bind_host {config.bind_host!r}) without "
            "keys: whoever reaches it could free transfers and read about them",
            next_step="Set ControlConfig.security (keys: `kvxfer keys generate`), listen on "
            "127.0.0.1, or set insecure=True if the network admits nobody else",
        )


def fixed_port(base: int, role: Role, *, dp: int, tp: int, dp_rank: int, tp_rank: int) -> int:
    """The port of one rank where ports must be known beforehand.

    ``base + role * dp * tp + dp_rank * tp + tp_rank`` with role 0 for the producer and 1 for the
    consumer, so that both roles of one machine never meet.

    Raises:
        ConfigError: a rank is outside its size, or the ports of all ranks and both roles do not
            fit below 65536. The latter is refused on every rank, not only on those beyond.
    """
    for name, value, low in (("base", base, 1), ("dp", dp, 1), ("tp", tp, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
    for name, rank, size in (("dp_rank", dp_rank, dp), ("tp_rank", tp_rank, tp)):
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
            raise ConfigError(f"{name} must be an integer from 0 to {size - 1}, not {rank!r}")
    if not isinstance(role, Role):
        raise ConfigError(f"role must be a Role, not {role!r}")
    last = base + 2 * dp * tp - 1
    if last > _MAX_PORT:
        raise ConfigError(
            f"base port {base} with dp={dp} and tp={tp} needs ports up to {last}, "
            f"beyond {_MAX_PORT}",
            next_step=f"Choose a base of at most {_MAX_PORT - (last - base)}, or port 0",
        )
    offset = dp * tp if role is Role.CONSUMER else 0
    return base + offset + dp_rank * tp + tp_rank
