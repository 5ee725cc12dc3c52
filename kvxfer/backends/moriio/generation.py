"""Engine generations: a new engine beside the old one, so that dead queue pairs are left behind.

A queue pair that has failed is dead for its two engine keys, and nothing the engine offers brings
it back: a new engine, with a new key, does.  At most two engines exist at a time: the current one,
which everything new goes through, and its predecessor, which finishes what is in flight on it and
serves peers that still address it until it is ended.  Ending it is also the only fence there is.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from kvxfer.backends._background import Gate
from kvxfer.backends.moriio.binding import BACKEND
from kvxfer.backends.moriio.queues import Connection
from kvxfer.core.verdict import EngineError
from kvxfer.errors import ClosedError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvxfer.backends.moriio.binding import Engine, Memory, Remote, Session
    from kvxfer.backends.moriio.config import MoriioConfig
    from kvxfer.core.memory import Span

__all__ = ["Generation", "GenerationEnded", "Place"]

Place = tuple[int, int, int]
"""Device, kind and NUMA node of a memory."""

_Key = tuple[str, Place, Place]

_LOOK_S = 0.001

MAX_CONNECTIONS = 65536
"""Dead and idle connections are remembered up to here, oldest out first."""


class GenerationEnded(TransportError):
    """The engine that a path was prepared on is gone, and nothing was posted."""

    def __init__(self, number: int) -> None:
        message = f"engine generation {number} has ended"
        super().__init__(
            message,
            next_step="prepare a new path",
            engine=EngineError(backend=BACKEND, message=message),
        )


class Generation:
    """One engine, and what we know of its connections. Any thread.

    Every call into the engine is made inside ``with generation:``, which raises
    ``GenerationEnded`` once it is being ended.
    """

    def __init__(self, number: int, engine: Engine, config: MoriioConfig) -> None:
        self.number = number
        self.engine = engine
        self.ended = False
        """Its engine is gone: nothing posted through it touches our memory any more."""
        self._config = config
        self.gate = Gate(BACKEND)
        self.leaving = False
        self.posting: set[object] = set()
        """Posts inside the engine. A post adds itself, then looks at ``leaving``; ``leave`` does it
        the other way round. So one of the two notices the other, without a lock."""
        self._lock = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._connections: dict[_Key, Connection] = {}
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._forsaken: set[str] = set()

    def __repr__(self) -> str:
        return f"<Generation {self.number}{' ended' * self.ended}>"

    def __enter__(self) -> None:
        try:
            self.gate.__enter__()
        except ClosedError:
            raise GenerationEnded(self.number) from None

    def __exit__(self, *_: object) -> None:
        self.gate.__exit__()

    # ---- memory and peers ------------------------------------------------------------------

    def register(self, span: Span) -> Memory:
        with self:
            return self.engine.register(span)

    def deregister(self, memory: Memory) -> None:
        with self:
            self.engine.deregister(memory)

    def add_remote(self, remote: Remote) -> None:
        """Make a peer's engine known; once is enough."""
        with self, self._lock:
            if remote.key not in self._remotes:
                self.engine.add_remote(remote)
                self._remotes[remote.key] = remote

    def remove_remotes(self, prefix: str) -> None:
        """Forget the engines whose keys begin like this."""
        with self, self._lock:
            for key in [k for k in self._remotes if k.startswith(prefix)]:
                self.engine.remove_remote(self._remotes.pop(key))
            # The engine keeps dead queue pairs for a peer that comes back: so must we.
            for place in [k for k in self._connections if k[0].startswith(prefix)]:
                connection = self._connections[place]
                if not connection.degraded and not connection.room[0]:
                    del self._connections[place]

    def connection(self, peer_key: str, local: Place, remote: Place) -> Connection:
        """The queue pairs that the engine uses between these two memories."""
        key = (peer_key, local, remote)
        with self._lock:
            found = self._connections.get(key)
            if found is None:
                while len(self._connections) >= MAX_CONNECTIONS:
                    del self._connections[next(iter(self._connections))]
                found = self._connections[key] = Connection(
                    self,
                    peer_key,
                    name=f"{self.engine.key}:{peer_key}:{local}:{remote}",
                    queue_pairs=self._config.qp_per_transfer,
                    depth=self._config.max_send_wr,
                    ordered=self._config.one_queue_pair_per_call,
                )
            return found

    def degraded(self, peer_keys: Iterable[str]) -> EngineError | None:
        """What killed a queue pair to one of these engines, if one is dead."""
        keys = frozenset(peer_keys)
        with self._lock:
            found = [c for k, c in self._connections.items() if k[0] in keys]
        return next((c.degraded for c in found if c.degraded is not None), None)

    def open_session(self, local: Memory, remote: Memory) -> Session:
        """See ``Engine.open_session``."""
        with self:
            session = self.engine.open_session(local, remote)
            self._sessions.add(session)
            return session

    # ---- the end ---------------------------------------------------------------------------

    def forsake(self, prefix: str) -> None:
        """The end need not wait for calls to engines whose keys begin like this."""
        with self._lock:
            self._forsaken.add(prefix)

    @property
    def busy(self) -> bool:
        """Whether calls are in flight that can still succeed."""
        with self._lock:
            connections = list(self._connections.values())
            forsaken = tuple(self._forsaken)
        return any(
            queue.in_flight and queue.dead is None
            for connection in connections
            if not connection.peer_key.startswith(forsaken)
            for queue in connection.queues
        )

    def leave(self, timeout: float) -> bool:
        """Let nobody in any more; whether nobody is inside after ``timeout`` seconds."""
        self.leaving = True
        end = time.monotonic() + timeout
        if not self.gate.close(timeout):
            return False
        while self.posting:
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def end(self) -> None:
        """End the engine. Nobody may be inside: see ``leave``."""
        for session in tuple(self._sessions):
            session.drop()
        self.engine.shut()
        self.ended = True
