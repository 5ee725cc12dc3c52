"""The control channel as the agent sees it: small messages to and from peers, nothing that waits.

``control.ZmqChannel`` is the real one; the simulator brings its own.  Delivery is not promised:
messages may be lost, repeated or arrive late.  What matters is confirmed and re-sent one level up
(``reliable``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

import attrs

__all__ = ["Channel", "Inbound", "Route"]

Route = Hashable
"""Names one way to one peer. Opaque; compared and hashed only."""


@attrs.frozen
class Inbound:
    """One message that arrived; answer on ``route``."""

    route: Route
    data: bytes
    peer: str = ""
    """Who sent it, by the name of its key in the allow-list; empty without keys."""


class Channel(ABC):
    """All methods but ``wake`` are called from one thread, the agent's progress thread."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What peers dial, such as ``tcp://10.0.0.5:41001``. Known from construction on."""

    @abstractmethod
    def dial(self, address: str) -> Route:
        """Begin a connection; returns at once. Dialling the same address twice gives two routes.

        Raises:
            InvalidInputError: not an address.
            CapacityError: too many connections.
        """

    @abstractmethod
    def hang_up(self, route: Route) -> None:
        """Drop a dialled connection and what is queued on it. Unknown routes are ignored."""

    @abstractmethod
    def send(self, route: Route, data: bytes) -> bool:
        """Queue one message. False when it was dropped (queue full, route gone): counted."""

    @abstractmethod
    def receive(self, budget: int = 256) -> list[Inbound]:
        """What arrived, at most ``budget`` messages, oversized ones dropped and counted."""

    @property
    def authenticated(self) -> bool:
        """Whether ``Inbound.peer`` is known of every message: keys are on."""
        return False

    def peer_of(self, route: Route) -> str:
        """Whose key stands behind a route, by its name in the allow-list; empty without keys.

        Of a dialled route it may not be known before the connection is up.
        """
        del route
        return ""

    def reload_keys(self) -> None:
        """Read the key files again, where there are any. Peers whose keys went are cut off."""

    def lost_routes(self) -> list[Route]:
        """Routes whose connection dropped since the last call. A dialled one comes back by itself.

        A hint: a channel that cannot tell returns nothing.
        """
        return []

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return once something arrived, ``wake`` was called, or ``timeout`` seconds passed."""

    @abstractmethod
    def wake(self) -> None:
        """End a ``wait`` early. Any thread."""

    def watch_descriptor(self, fd: int) -> None:
        """Let a readable ``fd`` end a ``wait``, too, until ``unwatch_descriptor``.

        A channel whose ``wait`` does not sleep has nothing to do here.
        """

    def unwatch_descriptor(self, fd: int) -> None:
        """To be called before ``fd`` is closed; unknown ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything; never waits for peers."""

    @property
    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Messages and bytes in and out, and every reason for which something was dropped."""
