"""The agent's end: a keeper as the agent sees it, and the real one, a process.

A port brings a keeper up again and again; each life has a number, its generation.  All methods are
called on the progress thread (``close`` by whoever closes the agent, after that thread ended).
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.core.limitedlog import LimitedLog
from kvxfer.errors import ConfigError
from kvxfer.keeper import messages as m

if TYPE_CHECKING:
    from kvxfer.core.channel import Channel
    from kvxfer.core.clock import Clock
    from kvxfer.core.control_config import ChannelAuth, ControlConfig
    from kvxfer.keeper.config import KeeperConfig

__all__ = ["Died", "KeeperPort", "ProcessPort", "Started", "control_of", "recipe_of"]

_log = LimitedLog(logging.getLogger("kvxfer.keeper"))

_FRAME = 1 << 18
_BUDGET = 256
"""Frames per ``poll``."""
_LIVED = 60.0
"""Seconds after which a keeper counts as having worked: the next pause is short again."""
_CLOSE = 2.0
"""Seconds in which a killed process must be gone."""


@attrs.frozen
class Started:
    """A keeper was started; it can be sent orders."""

    generation: int


@attrs.frozen
class Died:
    """It is gone, and with certainty: nothing is granted by it after ``at``."""

    generation: int
    at: float
    why: str


class KeeperPort(ABC):
    """How an agent reaches its keeper."""

    @abstractmethod
    def open(self, channel: Channel) -> None:
        """Begin to start keepers; news end a ``wait`` of ``channel``. Returns at once."""

    @abstractmethod
    def poll(self) -> list[Started | Died | bytes]:
        """What happened since the last call, in order; bytes are frames of news."""

    @abstractmethod
    def send(self, frame: bytes) -> bool:
        """Hand orders over, all or nothing. False if there is no room now."""

    @abstractmethod
    def kill(self) -> None:
        """End the present keeper, whatever state it is in; ``Died`` follows."""

    @abstractmethod
    def close(self) -> None:
        """End the keeper for good, and leave nothing behind."""


def recipe_of(auth: ChannelAuth | None) -> m.AuthRecipe | None:
    """How a keeper makes ``auth`` again: what its method ``keeper_recipe`` says.

    ``keeper_recipe() -> tuple[str, bytes]`` names a factory as ``"module:function"`` and its one
    argument.

    Raises:
        ConfigError: it has no such method. A keeper without keys would be a hole in the wall.
    """
    if auth is None:
        return None
    method = getattr(auth, "keeper_recipe", None)
    if method is None:
        raise ConfigError(
            f"auth {type(auth).__name__} cannot be handed to the keeper, which is a process of its "
            "own",
            next_step="give it a method keeper_recipe() -> ('module:function', argument), or set "
            "AgentConfig.keeper to None",
        )
    factory, argument = method()
    return m.AuthRecipe(factory, argument)


def control_of(control: ControlConfig, config: KeeperConfig) -> dict[str, Any]:
    """The keeper's control channel: like the agent's, on a port of its own."""
    fields = attrs.asdict(control)
    fields["port"] = config.port
    shared = control.port_range is not None and not config.port
    fields["port_range"] = str(control.port_range) if shared else None
    return fields


class ProcessPort(KeeperPort):
    """A real keeper: ``python -m kvxfer.keeper``, watched by a thread of ours.

    That thread starts the process and lives as long as this port: the kernel kills the process when
    the thread that started it ends.
    """

    def __init__(self, config: KeeperConfig, setup: m.Setup, clock: Clock, name: str) -> None:
        self._config = config
        self._setup = m.encode(setup)
        self._clock = clock
        self._channel: Channel | None = None
        self._socket: socket.socket | None = None
        self._events: collections.deque[tuple[Started | Died, socket.socket | None]] = (
            collections.deque()
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"kvxfer-keeper-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the present process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def open(self, channel: Channel) -> None:
        self._channel = channel
        self._thread.start()

    def poll(self) -> list[Started | Died | bytes]:
        found: list[Started | Died | bytes] = []
        while self._events:
            event, sock = self._events.popleft()
            if isinstance(event, Started):
                self._socket = sock
                if sock is not None and self._channel is not None:
                    self._channel.watch_descriptor(sock.fileno())
            else:
                self._drain(found, budget=None)  # its last words come before its death
                self._hang_up()
            found.append(event)
        self._drain(found, budget=_BUDGET)
        return found

    def send(self, frame: bytes) -> bool:
        if self._socket is None:
            return True  # it is dead, and all that it knew will be told to the next one
        try:
            self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the same
        return True

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self.kill()
        if self._thread.is_alive():
            self._thread.join(_CLOSE)
        for event, sock in self._events:
            if isinstance(event, Started) and sock is not None:
                sock.close()
        self._events.clear()
        self._hang_up()

    def _drain(self, found: list[Started | Died | bytes], budget: int | None) -> None:
        while self._socket is not None and (budget is None or budget > 0):
            try:
                frame = self._socket.recv(_FRAME, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                self._hang_up()  # ``Died`` follows once the process is reaped
                return
            found.append(frame)
            budget = None if budget is None else budget - 1

    def _hang_up(self) -> None:
        if self._socket is not None:
            if self._channel is not None:
                self._channel.unwatch_descriptor(self._socket.fileno())
            self._socket.close()
            self._socket = None

    # ---- the watching thread -----------------------------------------------------------------

    def _run(self) -> None:
        pause = self._config.restart_min
        generation = 0
        while not self._stop.is_set():
            generation += 1
            began = self._clock.now()
            why = self._one_life(generation)
            if self._stop.is_set():
                return
            _log.problem("keeper_died", "%s; starting another in %.1f s", why, pause)
            self._tell(Died(generation, self._clock.now(), why))
            if self._clock.now() - began > _LIVED:
                pause = self._config.restart_min
            self._stop.wait(pause)
            pause = min(2 * pause, self._config.restart_max)

    def _one_life(self, generation: int) -> str:
        """Start a keeper and wait for its end; returns how it ended."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return f"the keeper cannot be started: {error.strerror}"
        try:
            with theirs:
                process = _start(theirs.fileno())
            ours.send(self._setup)
        except (OSError, ValueError) as error:
            ours.close()
            return f"the keeper cannot be started: {error}"
        with self._lock:
            self._process = process
            if self._stop.is_set():
                process.kill()
        self._tell(Started(generation), ours)
        code = process.wait()
        with self._lock:
            self._process = None
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"the keeper (process {process.pid}) {ended}"

    def _tell(self, event: Started | Died, sock: socket.socket | None = None) -> None:
        self._events.append((event, sock))
        if self._channel is not None:
            self._channel.wake()


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process, with the modules that this one would import."""
    if not sys.executable:
        raise OSError("sys.executable is empty: no Python to run it with")
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - our own interpreter, our own module, numbers
        [sys.executable, "-m", "kvxfer.keeper", str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        pass_fds=(descriptor,),
    )
