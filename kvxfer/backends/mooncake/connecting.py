"""``connect``: see that the peer's engine answers, then read the identity of its incarnation.

Runs on the remote's thread, and may wait there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvxfer.backends.mooncake import messages
from kvxfer.backends.mooncake.config import Protocol
from kvxfer.backends.mooncake.handshake import ACKNOWLEDGED, Description, describe
from kvxfer.backends.mooncake.identity import NBYTES
from kvxfer.errors import BackpressureError, HandshakeError, PeerLostError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.backends._background import Gate
    from kvxfer.backends.mooncake.config import MooncakeConfig
    from kvxfer.backends.mooncake.flights import Flight, Flights
    from kvxfer.backends.mooncake.remotes import Remote

__all__ = ["Connector"]

MAX_NAMES = 4096
"""Addresses of peers whose data port is remembered, as the engine remembers them for ever."""
_LOOK_S = 0.002
"""Seconds between two looks at the identity that is read."""
_AGAIN_S = 0.25
"""Seconds before it is read again: after a lost connection the engine fails the first try, and for
a second it does not dial."""


class Connector:
    """Reaches remotes. Each remote's thread calls ``reach`` for it."""

    def __init__(
        self, config: MooncakeConfig, flights: Flights, gate: Gate, is_closed: Callable[[], bool]
    ) -> None:
        self._config = config
        self._flights = flights
        self._gate = gate
        self._is_closed = is_closed
        self._data_ports: dict[str, int] = {}
        """By the engine's name of a peer; guarded by the lock of the flights."""

    def reach(self, remote: Remote) -> None:
        """Prove that this life of ``remote`` is there.

        Raises:
            PeerLostError: nobody listens there.
            HandshakeError: it does not answer, moves no bytes, or is another one.
            BackpressureError: other posts kept the engine's queue full all the time.
        """
        self._look(remote)
        end = time.monotonic() + self._config.connect_timeout
        while not self._identify(remote, end):
            if time.monotonic() + _AGAIN_S > end or self._is_closed():
                raise HandshakeError(
                    f"the engine at {remote.name} describes itself, but its memory cannot be read",
                    next_step=f"check that its data port {remote.data_port} can be reached",
                    engine=messages.BROKEN.engine(remote.name),
                )
            time.sleep(_AGAIN_S)

    # ---- asking its engine -----------------------------------------------------------------

    def _look(self, remote: Remote) -> None:
        """See that the peer's engine answers, before ours goes near it."""
        timeout = self._config.connect_timeout
        try:
            found = describe(remote.address, timeout)
        except ConnectionRefusedError as error:
            raise PeerLostError(
                f"nobody listens at {remote.name}",
                next_step="check that the peer process lives",
                engine=messages.PEER_GONE.engine(remote.name, None),
            ) from error
        except TimeoutError as error:
            raise HandshakeError(
                f"the engine at {remote.name} does not answer within {timeout:g} s",
                next_step="check whether the peer process is stopped, and the network",
                engine=messages.PEER_SILENT.engine(remote.name, None),
            ) from error
        except (OSError, WireError) as error:
            raise HandshakeError(
                f"{remote.name} cannot be asked for its engine: {error}",
                next_step="check routes, firewalls and the version of the peer's Mooncake",
                engine=messages.UNREACHABLE.engine(f"{remote.name}: {error}", None),
            ) from error
        self._check(remote, found)
        remote.data_port = found.data_port

    def _check(self, remote: Remote, found: Description) -> None:
        ours = self._config.protocol
        if found.protocol != ours.value:
            raise HandshakeError(
                f"the engine at {remote.name} uses {found.protocol}, ours {ours.value}",
                next_step="configure one protocol on both sides",
            )
        if ours is Protocol.TCP and found.tcp_version < ACKNOWLEDGED:
            raise HandshakeError(
                f"the engine at {remote.name} does not confirm what it receives (tcp version "
                f"{found.tcp_version})",
                next_step="bring Mooncake there to the version here",
            )
        if not found.covers(remote.token_address, NBYTES):
            raise _other_life(remote)
        with self._flights.lock:
            known = self._data_ports.get(remote.name, found.data_port)
        if known != found.data_port:
            raise HandshakeError(
                f"the engine at {remote.name} was another one before, with data port {known} "
                f"instead of {found.data_port}: ours keeps that for as long as it lives",
                next_step="reopen this transport, or restart the peer for another port",
            )

    # ---- reading its identity --------------------------------------------------------------

    def _identify(self, remote: Remote, end: float) -> bool:
        """Read the peer's identity through the engine; False if that failed.

        ``end``: monotonic seconds.
        """
        flight = self._begin(remote, end)
        while True:
            with self._gate:
                ended = self._flights.ask(flight)
            if ended:
                break
            if time.monotonic() > end or self._is_closed():
                with self._flights.lock:  # progress sees it to its end
                    self._flights.under_way.append(flight)
                raise HandshakeError(
                    f"the engine at {remote.name} describes itself, but moves no bytes within "
                    f"{self._config.connect_timeout:g} s",
                    next_step=f"check that its data port {remote.data_port} can be reached",
                    engine=messages.PEER_SILENT.engine(remote.name, None),
                )
            time.sleep(_LOOK_S)
        with self._flights.lock:
            same = self._flights.is_same(flight)
            self._flights.release(flight)
        if flight.failed or flight.cut:
            return False
        if not same:
            raise _other_life(remote)
        return True

    def _begin(self, remote: Remote, end: float) -> Flight:
        while True:
            try:
                with self._flights.lock:
                    flight = self._flights.reserve(remote, None, 0, identity=True)
                break
            except BackpressureError:  # other connections to it keep the engine busy
                if time.monotonic() > end:
                    raise
                time.sleep(_LOOK_S)
        with self._gate:
            # The first submit to a name dials, and keeps what it hears.
            self._flights.submit_identity(flight)
        with self._flights.lock:
            if len(self._data_ports) >= MAX_NAMES:
                self._data_ports.pop(next(iter(self._data_ports)))
            self._data_ports[remote.name] = remote.data_port
        return flight


def _other_life(remote: Remote) -> HandshakeError:
    return HandshakeError(
        f"another incarnation than {remote.incarnation} answers at {remote.name}",
        next_step="fetch the peer's current PeerInfo over the control channel",
        engine=messages.OTHER_LIFE.engine(remote.name, None),
    )
