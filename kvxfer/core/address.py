"""One parser and one formatter for network addresses, used wherever an address is read or shown.

Pure: no sockets, no name resolution.  Understood are IPv4 literals, IPv6 literals with or without
brackets and with a scope id, and host names; each with or without a port and a leading ``tcp://``.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Address", "PortRange"]

_SCHEME = "tcp://"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_SCOPE = re.compile(r"[A-Za-z0-9._~-]{1,64}")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_NAME = 253  # characters: RFC 1035, section 2.3.4, without the length octets
_MAX_PORT = 65535
_NEXT_STEP = 'Write it like "10.0.0.5:6301", "[2001:db8::7]:6301" or "node-a:6301"'


def _shown(text: str) -> str:
    """The text for an error message; it may come from a peer and be of any length."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}... ({len(text)} characters)"


def _bad(text: str, reason: str) -> InvalidInputError:
    return InvalidInputError(f"address {_shown(text)}: {reason}", next_step=_NEXT_STEP)


def _canonical_ipv6(text: str) -> str | None:
    """The one spelling of an IPv6 literal, or None if it is none."""
    body, percent, scope = text.partition("%")
    if percent and not _SCOPE.fullmatch(scope):
        return None
    try:
        parsed = ipaddress.IPv6Address(body)
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped
    # Python 3.13 prints mapped addresses differently from older ones; peers must agree.
    short = f"::ffff:{mapped}" if mapped is not None else parsed.compressed
    return f"{short}%{scope}" if percent else short


def _canonical_host(host: str, text: str = "") -> str:
    """The one spelling of ``host``. ``text`` is what the user wrote, for the error."""
    if not isinstance(host, str):
        raise InvalidInputError(f"host must be text, not {host!r}", next_step=_NEXT_STEP)
    text = text or host
    if not host:
        raise _bad(text, "the host is empty")
    if ":" in host:
        literal = _canonical_ipv6(host)
        if literal is None:
            raise _bad(text, "the host is no IPv6 literal")
        return literal
    if host == "*":
        raise _bad(text, 'the host is "*"; all interfaces are "0.0.0.0" or "::"')
    labels = host.split(".")
    if labels[-1] == "" and len(labels) > 1:
        labels.pop()  # a fully qualified name may end with a dot
    if labels[-1].isdigit():
        # A name never ends in a number (RFC 3696, section 2), so this is meant to be IPv4.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _bad(text, "the host is neither an IPv4 literal nor a name") from None
    if len(host) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise _bad(text, "the host is neither an IP literal nor a name")
    return host.lower()


def _check_port(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None and attribute.name == "port":
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_PORT:
        raise InvalidInputError(
            f"{type(instance).__name__}.{attribute.name} must be an integer from 1 to "
            f"{_MAX_PORT}, not {value!r}"
        )


@attrs.frozen
class Address:
    """A host and, if known, a port.

    ``host`` is kept in one spelling, without brackets: IPv6 compressed and in lower case, names in
    lower case.  Two addresses are equal exactly if they are spelt the same way then; names are
    not resolved.

    Raises:
        InvalidInputError: the host is no IP literal and no name, or the port is outside 1..65535.
    """

    host: str = attrs.field(converter=_canonical_host)
    port: int | None = attrs.field(default=None, validator=_check_port)

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Address:
        """Read an address.

        A port after an IPv6 literal needs the brackets: ``2001:db8::7:6301`` is a valid literal of
        its own and taken as a host without port.

        Args:
            text: such as ``10.0.0.5:6301``, ``[2001:db8::7]:6301``, ``fe80::1%eth0``, ``node-a``,
                or one of these after ``tcp://``.
            default_port: taken when ``text`` names no port.

        Raises:
            InvalidInputError: not an address; the text says which part is wrong.
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"address must be text, not {text!r}", next_step=_NEXT_STEP)
        host, port_text = _split(text)
        host = _canonical_host(host, text)
        if port_text is None:
            return cls(host, default_port)
        if not _PORT.fullmatch(port_text) or not 1 <= int(port_text) <= _MAX_PORT:
            raise _bad(text, f"the port must be a number from 1 to {_MAX_PORT}")
        return cls(host, int(port_text))

    @property
    def version(self) -> int | None:
        """4 or 6 for a literal, None for a name."""
        if ":" in self.host:
            return 6
        return 4 if self.host.rpartition(".")[2].isdigit() else None

    @property
    def is_wildcard(self) -> bool:
        """All interfaces: can be bound, cannot be dialled."""
        literal = self._literal()
        return literal is not None and literal.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """A literal that only this machine can reach. False for names, "localhost" included."""
        literal = self._literal()
        return literal is not None and literal.is_loopback

    def _literal(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        if self.version is None:
            return None
        literal = ipaddress.ip_address(self.host)
        return getattr(literal, "ipv4_mapped", None) or literal

    def with_host(self, host: str) -> Address:
        """The same port on another host."""
        return Address(host, self.port)

    def with_port(self, port: int | None) -> Address:
        """The same host with another port."""
        return Address(self.host, port)

    def tcp(self) -> str:
        """The address in the form that is bound, dialled and published.

        Raises:
            InvalidInputError: the port is not known.
        """
        if self.port is None:
            raise InvalidInputError(f"address {self} names no port", next_step=_NEXT_STEP)
        return f"{_SCHEME}{self}"

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if self.version == 6 else f"{self.host}:{self.port}"


def _split(text: str) -> tuple[str, str | None]:
    """Host and port text, without brackets; the host is not checked yet except where it must be."""
    rest = text.removeprefix(_SCHEME)
    if "://" in rest:
        raise _bad(text, f"only {_SCHEME} is understood")
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket:
            raise _bad(text, '"[" is never closed')
        if _canonical_ipv6(host) is None:
            raise _bad(text, "what stands in brackets is no IPv6 literal")
        if not tail:
            return host, None
        if not tail.startswith(":"):
            raise _bad(text, 'after "]" only ":" and a port may follow')
        return host, tail[1:]
    if rest.count(":") > 1:
        if _canonical_ipv6(rest) is None:
            raise _bad(text, "more than one colon, but no IPv6 literal")
        return rest, None
    host, colon, port = rest.partition(":")
    return host, port if colon else None


@attrs.frozen
class PortRange:
    """Ports ``first`` to ``last``, both included: what a firewall lets through.

    Raises:
        InvalidInputError: a port is outside 1..65535, or ``last`` lies before ``first``.
    """

    first: int = attrs.field(validator=_check_port)
    last: int = attrs.field(validator=_check_port)

    def __attrs_post_init__(self) -> None:
        if self.last < self.first:
            raise InvalidInputError(f"port range {self} ends before it begins")

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Read ``41000-41099`` or a single port.

        Raises:
            InvalidInputError: neither of the two.
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"port range must be text, not {text!r}")
        first, dash, last = text.partition("-")
        if not dash:
            last = first
        if not _PORT.fullmatch(first) or not _PORT.fullmatch(last):
            raise InvalidInputError(
                f"port range {_shown(text)} is not two ports",
                next_step='Write it like "41000-41099"',
            )
        return cls(int(first), int(last))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"
