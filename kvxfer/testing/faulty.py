"""A transport that wraps another one and makes things go wrong, on purpose and to plan."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from kvxfer.core.attempt import Accepted, Attempt, AttemptState
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.pollable import Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError
from kvxfer.errors import (
    BackpressureError,
    HandshakeError,
    InvalidInputError,
    KvxferError,
    PeerLostError,
    StaleError,
    TransportError,
)
from kvxfer.testing._flights import Flight, Hold, Mapped, Never
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan, FaultPoint, Injection

if TYPE_CHECKING:
    from kvxfer.core.batch import Batch
    from kvxfer.core.capabilities import Capabilities
    from kvxfer.core.memory import Descriptor, Region, Span

__all__ = ["FaultyTransport"]

_PREFIX = frozenset({FaultKind.PARTIAL, FaultKind.FAIL, FaultKind.FAIL_DRAINED})
"""A part of the pieces lands."""
_TOLD = frozenset({FaultKind.LATE, FaultKind.LATE_REPORT, FaultKind.DUPLICATE})
"""What the engine says of the attempt is passed on in the end."""
_TWICE = frozenset({FaultKind.DUPLICATE})
_HELD = frozenset(
    {
        FaultKind.PARTIAL,
        FaultKind.FAIL,
        FaultKind.LATE,
        FaultKind.LATE_REPORT,
        FaultKind.PEER_GONE,
    }
)
"""Something waits for the fault's release."""


class FaultyTransport(Transport):
    """Behaves like ``inner`` but for what ``plan`` injects. Bytes move through ``inner`` for real.

    Name, capabilities, incarnation, regions and descriptors are those of ``inner``, so a faulty
    transport and a plain one can be peers.  ``clock`` releases faults with ``after``.  Every
    injection is counted in ``counters`` and kept in ``log``, the last ``log_size`` of them.

    What is claimed is true: an attempt is drained only once nothing of it can land any more.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        inner: Transport,
        plan: FaultPlan | None = None,
        *,
        clock: Clock | None = None,
        log_size: int = 1024,
    ) -> None:
        super().__init__(incarnation=inner.incarnation)
        vars(self)["name"] = inner.name  # the wrapped engine's, whatever the class is called
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.counters: dict[str, int] = {}
        """``point`` counts the calls there, ``point.kind`` the faults that struck."""
        self.log: collections.deque[Injection] = collections.deque(maxlen=log_size)
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._flights: dict[Attempt, Flight] = {}
        self._watched: dict[Attempt, Flight] = {}
        """Flights that a fault struck: looked at by every ``progress``."""
        self._holds: list[Hold] = []
        self._again: list[Attempt] = []
        self._gone: dict[str, EngineError] = {}
        self._dropping: list[_FaultyPeer] = []
        self._peers: weakref.WeakKeyDictionary[Peer, _FaultyPeer] = weakref.WeakKeyDictionary()

    # ---- what tests ask --------------------------------------------------------------------

    @property
    def held(self) -> list[Attempt]:
        """Attempts that wait for a fault to be released, oldest first."""
        with self._lock:
            return [f.outer for f in self._watched.values() if not f.released]

    def release(self, count: int | None = None) -> int:
        """Release the oldest ``count`` faults, all by default; returns how many there were.

        What they held back goes on with the next ``progress``, or ``poll`` of the answer.
        """
        with self._lock:
            self._holds = [hold for hold in self._holds if not hold.over]
            freed = self._holds[:count]
            for hold in freed:
                hold.released = True
        return len(freed)

    # ---- passed through --------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def local_info(self) -> PeerInfo:
        return self.inner.local_info()

    def on_change(self, waker: Callable[[], None] | None) -> None:
        super().on_change(waker)
        self.inner.on_change(waker)

    def _register(self, span: Span) -> Region:
        return self.inner.register(span)

    def _deregister(self, region: Region) -> None:
        self.inner.deregister(region)

    def proves_end(self, error: KvxferError) -> bool:
        return self.inner.proves_end(error)

    def lost_peers(self) -> list[Peer]:
        lost = super().lost_peers()
        for inner in self.inner.lost_peers():
            outer = self._peers.get(inner)
            if outer is not None:
                lost.append(outer)
        return lost

    # ---- peers and paths -------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        fault = self._draw(FaultPoint.CONNECT)
        if info.incarnation in self._gone:
            return Ready(error=self._gone_error(info.incarnation))
        if fault and fault.kind is FaultKind.FAIL:
            return Ready(error=fault.exception(self.name, HandshakeError))

        def wrap(peer: Peer) -> Peer:
            outer = self._peers[peer] = _FaultyPeer(self, info, peer)
            return outer

        return Mapped(self.inner.connect(info), wrap, self._hold(fault))

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        fault = self._draw(FaultPoint.PREPARE)
        if fault and fault.kind is FaultKind.FAIL:
            return Ready(error=fault.exception(self.name, TransportError))
        ours = _ours(peer)

        def wrap(path: Path) -> Path:
            if ours.closed:
                path.close()
                raise StaleError(f"{ours!r} was closed meanwhile", next_step="connect again")
            return _FaultyPath(ours, pairs, path)

        return Mapped(self.inner.prepare(ours.inner, pairs), wrap, self._hold(fault))

    def _close_path(self, path: Path) -> None:
        # A closed peer's paths are closed by its disconnect; a late post still needs its path.
        if not path.peer.closed and not self._unposted(path):
            _inner_path(path).close()

    def _unposted(self, path: Path) -> bool:
        with self._lock:
            flights = tuple(self._watched.values())
        return any(f.outer.path is path and f.to_post is not None for f in flights)

    # ---- posts -----------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        fault = self._draw(FaultPoint.POST)
        incarnation = attempt.path.peer.info.incarnation
        if incarnation in self._gone:
            raise self._gone_error(incarnation)
        if fault is None:
            self._launch(Flight(attempt, None, None), attempt.batch)
        elif fault.kind is FaultKind.REFUSE:
            raise fault.exception(self.name, BackpressureError)
        elif fault.kind is FaultKind.REFUSE_VALUE:
            attempt.fail(fault.engine_error(self.name), accepted=Accepted.NONE)
            self._report(attempt)
        else:
            self._post_faulty(attempt, fault)

    def _post_faulty(self, attempt: Attempt, fault: Fault) -> None:
        flight = Flight(attempt, fault, self._hold(fault) if fault.kind in _HELD else None)
        batch = attempt.batch
        if fault.kind in _PREFIX:
            batch = batch.slice(0, int(len(batch) * fault.fraction))
        if fault.kind is FaultKind.PEER_GONE or not len(batch):
            self._add(flight)
        elif fault.kind is FaultKind.LATE or (fault.kind in _PREFIX and fault.lands_late):
            flight.to_post = batch
            self._add(flight)
        else:
            self._launch(flight, batch)
        if fault.kind is FaultKind.PEER_GONE:
            self._peer_goes(attempt.path.peer.info.incarnation, fault.engine_error(self.name))
        elif fault.kind is FaultKind.PARTIAL:
            self._fail(attempt, fault.engine_error(self.name))

    def _launch(self, flight: Flight, batch: Batch) -> None:
        """Hand ``batch`` to the wrapped engine. What it raises, we raise."""
        outer = flight.outer
        flight.launching = True  # ``progress`` on the other thread must not take it for landed
        self._add(flight)
        try:
            flight.inner = self.inner.post(outer.op, _inner_path(outer.path), batch, tag=flight)
        except BaseException:
            self._remove(flight)
            raise
        flight.launching = False
        if flight.fault is None:
            self._mirror(flight)

    def _peer_goes(self, incarnation: str, error: EngineError) -> None:
        with self._lock:
            self._gone[incarnation] = error
            flights = tuple(self._flights.values())
        for flight in flights:
            if flight.outer.path.peer.info.incarnation == incarnation:
                self._fail(flight.outer, error)

    def _gone_error(self, incarnation: str) -> PeerLostError:
        engine = self._gone[incarnation]
        return PeerLostError(engine.message, engine=engine)

    def cancel(self, attempt: Attempt) -> None:
        flight = self._flights.get(attempt)
        if flight is not None and flight.inner is not None:
            flight.inner.request_cancel()

    # ---- progress --------------------------------------------------------------------------

    def _advance(self, budget: int) -> None:
        again, self._again = self._again, []
        for attempt in again:
            self._report(attempt)
        for inner in self.inner.progress(budget):
            flight = inner.tag
            if isinstance(flight, Flight):
                flight.inner = inner  # ``post`` on the other thread may not have returned yet
                self._step(flight)
        with self._lock:
            watched = tuple(self._watched.values())
        for flight in watched:
            self._step(flight)
        for peer in tuple(self._dropping):
            if not any(f.outer.path.peer is peer for f in tuple(self._flights.values())):
                self._dropping.remove(peer)
                self.inner.disconnect(peer.inner)

    def _step(self, flight: Flight) -> None:
        """Let everything happen to ``flight`` that can happen now. Repeating it is harmless."""
        if flight.to_post is not None and flight.released:
            self._post_late(flight, flight.to_post)
        outer, fault = flight.outer, flight.fault
        if fault is None or fault.kind in _TOLD:
            if flight.released and self._mirror(flight) and fault and fault.kind in _TWICE:
                self._again.append(outer)
        elif fault.kind is not FaultKind.NEVER:
            self._step_failing(flight, fault)
        if outer.drained and flight.landed:
            self._remove(flight)

    def _step_failing(self, flight: Flight, fault: Fault) -> None:
        early = fault.lands_late and fault.kind is not FaultKind.FAIL_DRAINED
        if not (flight.landed or early):
            return
        outer = flight.outer
        proof = f"injected {fault.kind.value}" if flight.landed and flight.released else ""
        error = fault.engine_error(self.name)
        if not outer.terminal:
            news = outer.fail(error, accepted=Accepted.UNKNOWN, drained_by=proof)
        else:
            news = bool(proof) and outer.mark_drained(proof)
        if news:
            self._report(outer)

    def _post_late(self, flight: Flight, batch: Batch) -> None:
        outer = flight.outer
        path = _inner_path(outer.path)
        try:
            flight.inner = self.inner.post(outer.op, path, batch, tag=flight)
        except BackpressureError:
            return  # it gets them with a later progress
        except TransportError as error:
            engine = error.engine or EngineError.of(self.name, error)
            flight.to_post = None
            if outer.fail(engine, accepted=Accepted.NONE):
                self._report(outer)
        flight.to_post = None
        if outer.path.closed and not self._unposted(outer.path):
            path.close()

    def _mirror(self, flight: Flight) -> bool:
        """Tell ours what became of the engine's attempt; True if that was news."""
        inner, outer = flight.inner, flight.outer
        if inner is None or not inner.terminal:
            return False
        if inner.state is AttemptState.DONE:
            news = outer.complete(by=inner.drained_by)
        else:
            assert inner.error is not None
            proof = inner.drained_by if inner.drained else ""
            news = outer.fail(inner.error, accepted=inner.accepted, drained_by=proof)
        if news:
            self._report(outer)
        return news

    def _fail(self, outer: Attempt, error: EngineError) -> None:
        if not outer.terminal and outer.fail(error, accepted=Accepted.UNKNOWN):
            self._report(outer)

    # ---- fences and the end ----------------------------------------------------------------

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        ours = _ours(peer)
        fault = self._draw(FaultPoint.FENCE)
        if fault and fault.kind is FaultKind.FAIL:
            return Ready(_impossible(fault, self.name))
        return Mapped(self.inner.fence(ours.inner), self._settler(ours), self._hold(fault))

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        ours = _ours(peer)
        if ours.disconnecting is None:
            fault = self._draw(FaultPoint.FENCE)
            if fault and fault.kind is FaultKind.FAIL:
                # What is under way must be able to land: the engine's connection stays till then.
                self._dropping.append(ours)
                ours.disconnecting = Ready(_impossible(fault, self.name))
            else:
                inner = self.inner.disconnect(ours.inner)
                ours.disconnecting = Mapped(inner, self._settler(ours), self._hold(fault))
        return ours.disconnecting

    def _settler(self, peer: _FaultyPeer) -> Callable[[Fence], Fence]:
        def settle(fence: Fence) -> Fence:
            if fence.done:
                self._settle(lambda flight: flight.outer.path.peer is peer, "fence")
            return fence

        return settle

    def _settle(self, concerned: Callable[[Flight], bool], by: str) -> None:
        """The engine proved that nothing of these lands any more: neither does what we held."""
        with self._lock:
            flights = [f for f in self._flights.values() if concerned(f)]
        for flight in flights:
            flight.to_post = None
            if flight.landed:
                if flight.fault is None or flight.fault.kind in _TOLD:
                    self._mirror(flight)
                self._fail(flight.outer, EngineError(backend=self.name, message=f"ended by {by}"))
                if flight.outer.mark_drained(by):
                    self._report(flight.outer)
                self._remove(flight)

    def _close(self, deadline: float) -> None:
        self.inner.close(deadline)
        self._settle(lambda _: True, "close")

    # ---- small things ----------------------------------------------------------------------

    def _draw(self, point: FaultPoint) -> Fault | None:
        number, fault = self.plan.draw(point)
        with self._lock:
            self._count(point.value)
            if fault is not None:
                self._count(f"{point.value}.{fault.kind.value}")
                self.log.append(
                    Injection(at=self._clock.now(), point=point, number=number, fault=fault)
                )
        return fault

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def _hold(self, fault: Fault | None) -> Hold | None:
        if fault is None:
            return None
        if fault.kind is FaultKind.NEVER:
            return Never(fault, self._clock)
        hold = Hold(fault, self._clock)
        with self._lock:
            self._holds = [h for h in self._holds if not h.over]
            self._holds.append(hold)
        return hold

    def _add(self, flight: Flight) -> None:
        with self._lock:
            self._flights[flight.outer] = flight
            if flight.fault is not None:
                self._watched[flight.outer] = flight

    def _remove(self, flight: Flight) -> None:
        with self._lock:
            self._flights.pop(flight.outer, None)
            self._watched.pop(flight.outer, None)
        flight.inner = None  # whose tag it is: no cycle stays behind


class _FaultyPeer(Peer):
    def __init__(self, transport: Transport, info: PeerInfo, inner: Peer) -> None:
        super().__init__(transport, info)
        self.inner = inner
        self.disconnecting: Pollable[Fence] | None = None


class _FaultyPath(Path):
    def __init__(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]], inner: Path) -> None:
        super().__init__(peer, pairs)
        self.inner = inner
        self.queues = inner.queues


def _impossible(fault: Fault, backend: str) -> Fence:
    return Fence(done=False, reason=fault.engine_error(backend).message)


def _ours(peer: Peer) -> _FaultyPeer:
    if not isinstance(peer, _FaultyPeer):
        raise InvalidInputError(f"{peer!r} is no peer of a faulty transport")
    return peer


def _inner_path(path: Path) -> Path:
    if not isinstance(path, _FaultyPath):
        raise InvalidInputError(f"{path!r} is no path of a faulty transport")
    return path.inner
