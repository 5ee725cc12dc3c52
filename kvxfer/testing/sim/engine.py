"""The simulated engine: a transport whose posts are flights through simulated time.

What an attempt says and what its bytes do are two things here, as on a real NIC: a flight goes on
after its attempt has failed, and after its process has died, until it is over or fenced.  The block
memories on both sides are told of every flight, so that the checker knows the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvxfer.core.attempt import Accepted, Attempt
from kvxfer.core.capabilities import Cancel, Capabilities, DataPathAuth, FenceScope, Visibility
from kvxfer.core.memory import Descriptor, MemoryKind, Region, Span
from kvxfer.core.pollable import Deferred, Pollable, Ready
from kvxfer.core.transport import Fence, Path, Peer, PeerInfo, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import BackpressureError, PeerLostError, StaleError
from kvxfer.testing.clock import FakeClock
from kvxfer.testing.sim.config import PostFault, SimConfig
from kvxfer.testing.sim.memory import CELL, BlockMemory
from kvxfer.testing.sim.phases import is_again

__all__ = ["Fabric", "SimTransport"]

_LATENCY = 0.003
"""Mean seconds of one leg of a post."""
_AGAIN = 3.0
"""So many times as likely are the faults of a post that is a second try."""
_RETRY = 0.5
"""Seconds after which a queue pair gives up on a peer that does not answer."""


def _mori(message: str, code: int = 13) -> EngineError:
    # Real texts of a real engine, so that the shipped rules decide.
    return EngineError(backend="moriio", code=code, message=message)


_SQ_FULL = _mori("SQ full (batch): ep=0 depth=60 requested=8 max=64")
_PARTIAL = _mori("ibv_post_send failed with 12: Cannot allocate memory (posted 3/6 WRs)")
_DEGRADED = _mori("EP is degraded, rejecting new submissions")
_FLUSHED = _mori("Work Request Flushed Error")
_UNREACHABLE = _mori("transport retry counter exceeded")
_DENIED = _mori("remote access error")

At = Callable[[float, Callable[[], None]], None]
"""``at(delay, action)``: have something done later."""


class Fabric:
    """What connects the transports of one world."""

    def __init__(self, clock: FakeClock, rng: random.Random, config: SimConfig, at: At) -> None:
        self.clock = clock
        self.rng = rng
        self.config = config
        self.at = at
        self.transports: dict[str, SimTransport] = {}
        self.flights: dict[Flight, None] = {}
        self.violation: Callable[[str, str], None] = lambda text, transfer_id: None
        self.on_fault: Callable[[PostFault, Attempt], None] = lambda fault, attempt: None
        self.on_post: Callable[[SimTransport], None] = lambda transport: None
        self._faults = tuple(config.posts.items())

    def draw(self, *, again: bool) -> PostFault | None:
        """A fault for one post; posts of what has failed before are few, and fare worse."""
        x = self.rng.random()
        if again:
            x /= _AGAIN
        for fault, chance in self._faults:
            x -= chance
            if x < 0:
                return fault
        return None

    def leg(self) -> float:
        return self.rng.expovariate(1 / _LATENCY)

    def between(self, one: SimTransport, other: SimTransport) -> list[Flight]:
        """Flights of either towards the other that are not over."""
        return [
            f
            for f in (*one.flights, *other.flights)
            if {f.mine, f.theirs} == {one, other} and not f.over
        ]


class Flight:
    """The bytes of one post on their way; over a connection that was fenced, none lands."""

    def __init__(
        self,
        fabric: Fabric,
        attempt: Attempt,
        mine: SimTransport,
        theirs: SimTransport,
        *,
        fenced: bool = False,
    ) -> None:
        self._fabric = fabric
        self.attempt = attempt
        self.mine = mine
        self.theirs = theirs
        self.over = False
        self.arrived = False
        """Every byte has landed."""
        self._landed = 0
        read = attempt.op is Op.READ
        self._source = (theirs if read else mine).memory
        self._target = (mine if read else theirs).memory
        batch = attempt.batch
        cells: list[tuple[int, int]] = []
        for local, remote, size in zip(
            batch.local.tolist(), batch.remote.tolist(), batch.size.tolist(), strict=True
        ):
            for step in range(0, size, CELL):
                here, there = (local + step) // CELL, (remote + step) // CELL
                cells.append((there, here) if read else (here, there))
        self._cells = cells
        self._own_source = None if read else self._source
        self._fenced = fenced
        for source, target in cells:
            block = target % self._target.blocks
            if not fenced:
                self._target.landing[block] += 1
                if not self._target.owner[block] and not self._target.dead:
                    self._violation(
                        f"posted into block {block} of {theirs.incarnation}, which is free"
                    )
            if self._own_source is not None:
                self._own_source.reading[source % self._own_source.blocks] += 1
        mine.flights[self] = None

    def _violation(self, text: str) -> None:
        part = getattr(self.attempt.tag, "part", None)
        handle = getattr(getattr(part, "_owner", None), "handle", None)
        name = handle.transfer_id if handle is not None else ""
        self._fabric.violation(f"{self.mine.incarnation}: {name}: {text}", name)

    def land(self, share: float) -> None:
        """Bytes land up to that share of the whole."""
        if self.over or self._target.dead:
            return
        stop = int(len(self._cells) * share)
        source, target = self._source.cells.reshape(-1), self._target.cells.reshape(-1)
        for i in range(self._landed, stop):
            a, b = self._cells[i]
            if not self._target.owner[b % self._target.blocks]:
                self._violation(f"landed in block {b % self._target.blocks}, which is free")
            target[b] = source[a]
        self._landed = max(self._landed, stop)

    def end(self) -> None:
        """Nothing of it lands or is read any more."""
        if self.over:
            return
        self.over = True
        for source, target in self._cells:
            if not self._fenced:
                self._target.landing[target % self._target.blocks] -= 1
            if self._own_source is not None:
                self._own_source.reading[source % self._own_source.blocks] -= 1
        self.mine.flights.pop(self, None)


class SimPeer(Peer):
    def __init__(self, transport: Transport, info: PeerInfo, remote: SimTransport) -> None:
        super().__init__(transport, info)
        self.remote = remote
        self.cut = False
        """The other side fenced this connection: it never carries anything again."""


class SimTransport(Transport):
    """See the module. ``memory`` is the only region."""

    name: ClassVar[str] = "sim"
    must_be_polled: ClassVar[bool] = False

    def __init__(self, fabric: Fabric, memory: BlockMemory, *, incarnation: str) -> None:
        super().__init__(incarnation=incarnation)
        self._fabric = fabric
        self.memory = memory
        self.flights: dict[Flight, None] = {}
        self.dead = False
        self.stalled_until = 0.0
        self.cut_until = 0.0
        self._barred: set[str] = set()
        self._inbound: dict[str, list[SimPeer]] = {}
        self._regions = 0
        fabric.transports[incarnation] = self
        self._capabilities = Capabilities(
            ops=frozenset((op, MemoryKind.DRAM, MemoryKind.DRAM) for op in Op),
            visibility=Visibility.VISIBLE,
            cancel=Cancel.NONE,
            fence=FenceScope.PEER,
            max_pieces=8,
            credits=64,
            atomic_refusal=False,
            data_path_auth=DataPathAuth.SECRET,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def local_info(self) -> PeerInfo:
        return PeerInfo(transport=self.name, incarnation=self.incarnation)

    def _register(self, span: Span) -> Region:
        self._regions += 1
        return Region(
            span=span,
            descriptor=Descriptor(
                transport=self.name,
                incarnation=self.incarnation,
                region_id=self._regions,
                nbytes=span.nbytes,
            ),
        )

    def _deregister(self, region: Region) -> None:
        pass

    # ---- peers -------------------------------------------------------------------------------

    def _connect(self, info: PeerInfo) -> Pollable[Peer]:
        answer: Deferred[Peer] = Deferred()
        remote = self._fabric.transports.get(info.incarnation)
        self._barred.discard(info.incarnation)

        def look() -> None:
            if self.dead:
                return
            now = self._fabric.clock.now()
            if remote is None or remote.dead or remote.closed:
                answer.fail(PeerLostError(f"{info.incarnation} does not answer"))
            elif remote.stalled_until > now or max(self.cut_until, remote.cut_until) > now:
                self._fabric.at(0.1, look)
            elif self.incarnation in remote._barred:
                answer.fail(StaleError(f"{info.incarnation} has fenced us"))
            else:
                peer = SimPeer(self, info, remote)
                remote._inbound.setdefault(self.incarnation, []).append(peer)
                answer.resolve(peer)

        self._fabric.at(self._fabric.leg(), look)
        return answer

    def _prepare(self, peer: Peer, pairs: Sequence[tuple[Region, Descriptor]]) -> Pollable[Path]:
        return Ready(Path(peer, pairs))

    # ---- posts -------------------------------------------------------------------------------

    def _post(self, attempt: Attempt) -> None:
        fabric = self._fabric
        remote = _remote(attempt.path.peer)
        fault = fabric.draw(again=is_again(attempt))
        if fault is not None:
            fabric.on_fault(fault, attempt)
        if fault is PostFault.REFUSED:
            raise BackpressureError(_SQ_FULL.message, engine=_SQ_FULL)
        if fault is PostFault.REFUSED_VALUE:
            attempt.fail(_SQ_FULL, accepted=Accepted.NONE)
            self._report(attempt)
            return
        fenced = _sim_peer(attempt.path.peer).cut
        flight = Flight(fabric, attempt, self, remote, fenced=fenced)
        fabric.on_post(self)
        now = fabric.clock.now()
        if remote.dead or max(self.cut_until, remote.cut_until) > now:
            self._unreachable(flight)
        elif fenced:
            self._later(fabric.leg(), flight, lambda: self._denied(flight))
        else:
            self._fly(flight, fault)

    def _fly(self, flight: Flight, fault: PostFault | None) -> None:
        """The life of one flight, in the order of time."""
        fabric, rng, attempt = self._fabric, self._fabric.rng, flight.attempt
        half, whole = fabric.leg(), fabric.leg() + _LATENCY
        if fault is PostFault.LATE:
            half += rng.uniform(0.3, fabric.config.late)
        whole += half
        report = whole + fabric.leg() / 2
        if fault is PostFault.LATE_REPORT:
            report += rng.uniform(0.3, fabric.config.late)
        share = rng.random()
        self._later(half, flight, lambda: flight.land(share))
        if fault is PostFault.PARTIAL:
            attempt.fail(_PARTIAL, accepted=Accepted.UNKNOWN)
            self._report(attempt)
            self._trail(flight, half + rng.uniform(0.0, 1.5), share)
        elif fault is PostFault.FAILED:
            self._later(whole, flight, lambda: self._fail(attempt, _DEGRADED, drained_by=""))
            self._trail(flight, whole + rng.uniform(0.0, 1.5), rng.choice((share, 1.0)))
        elif fault is PostFault.FAILED_DRAINED:

            def flushed() -> None:
                flight.end()
                self._fail(attempt, _FLUSHED, drained_by="queue pair in error")

            self._later(whole, flight, flushed)
        else:

            def landed() -> None:
                flight.land(1.0)
                flight.arrived = True
                flight.end()

            self._later(whole, flight, landed)
            if fault is not PostFault.NEVER:
                copies = 2 if fault is PostFault.DUPLICATE else 1
                fabric.at(report, lambda: self._done(flight, copies))

    def _later(self, delay: float, flight: Flight, action: Callable[[], None]) -> None:
        """Unless the flight is over by then."""

        def act() -> None:
            if not flight.over:
                action()

        self._fabric.at(delay, act)

    def _trail(self, flight: Flight, delay: float, share: float) -> None:
        """The last bytes of a post that has failed already; half of the time the proof follows."""

        def end() -> None:
            flight.land(share)
            flight.end()
            if self._fabric.rng.random() < 0.5:
                self._fabric.at(self._fabric.leg(), lambda: self._proof(flight.attempt))

        self._later(delay, flight, end)

    def _done(self, flight: Flight, copies: int) -> None:
        if self.dead or not flight.arrived:
            return
        flight.attempt.complete()
        for _ in range(copies):
            self._report(flight.attempt)

    def _fail(self, attempt: Attempt, error: EngineError, *, drained_by: str) -> None:
        if not self.dead and attempt.fail(error, accepted=Accepted.UNKNOWN, drained_by=drained_by):
            self._report(attempt)

    def _proof(self, attempt: Attempt) -> None:
        if not self.dead and attempt.mark_drained("late proof"):
            self._report(attempt)

    def _unreachable(self, flight: Flight) -> None:
        """Nobody answers: after a while our queue pair is in error, which ends a READ."""

        def gave_up() -> None:
            flight.end()
            proof = "queue pair in error" if flight.attempt.op is Op.READ else ""
            self._fail(flight.attempt, _UNREACHABLE, drained_by=proof)

        self._later(_RETRY, flight, gave_up)

    def _denied(self, flight: Flight) -> None:
        """The other side fenced us: it answered that, so nothing follows."""
        flight.end()
        self._fail(flight.attempt, _DENIED, drained_by="refused by the peer")

    # ---- the end -----------------------------------------------------------------------------

    def _fence(self, peer: Peer) -> Pollable[Fence]:
        answer: Deferred[Fence] = Deferred()
        remote = _remote(peer)
        rng = self._fabric.rng
        impossible = rng.random() < self._fabric.config.fence_impossible
        ours = rng.random() < 0.5

        def cut() -> None:
            if self.dead:
                return
            for flight in self._fabric.between(self, remote):
                if flight.mine is self:
                    if impossible and not ours:
                        continue
                    flight.end()
                    continue
                if not impossible:
                    flight.end()
                    self._fabric.at(self._fabric.leg(), _deny(flight))
            if not impossible:
                self._barred.add(remote.incarnation)
                for inbound in self._inbound.pop(remote.incarnation, ()):
                    inbound.cut = True
            if not impossible or ours:
                self._settle(remote)
            answer.resolve(
                Fence(
                    done=not impossible,
                    reason="the engine cannot" if impossible else "",
                    ours_done=ours or not impossible,
                )
            )

        self._fabric.at(rng.expovariate(20.0), cut)
        return answer

    def _settle(self, remote: SimTransport) -> None:
        """Every attempt of ours towards ``remote`` has ended: they are drained."""
        for path in tuple(self._paths):
            if _remote(path.peer) is not remote:
                continue
            for attempt in tuple(path.undrained):
                attempt.fail(_FLUSHED, accepted=Accepted.UNKNOWN)
                if attempt.mark_drained("fence"):
                    self._report(attempt)

    def _disconnect(self, peer: Peer) -> Pollable[Fence]:
        return self._fence(peer)

    def die(self) -> None:
        """The process is gone; what its NIC has sent may still land."""
        self.dead = self.memory.dead = True
        rng = self._fabric.rng
        for flight in tuple(self.flights):
            if flight.attempt.op is Op.READ or rng.random() < 0.5:
                flight.end()
            else:
                delay = rng.uniform(0.0, self._fabric.config.late)

                def last(flight: Flight = flight) -> None:
                    flight.land(rng.random())
                    flight.end()

                self._fabric.at(delay, last)
        for other in tuple(self._fabric.transports.values()):
            for flight in tuple(other.flights):
                if flight.theirs is self and not other.dead:
                    other._unreachable(flight)

    def _close(self, deadline: float) -> None:
        for flight in tuple(self.flights):
            flight.end()
        self._fabric.transports.pop(self.incarnation, None)


def _deny(flight: Flight) -> Callable[[], None]:
    return lambda: flight.mine._fail(flight.attempt, _DENIED, drained_by="refused by the peer")


def _sim_peer(peer: Peer) -> SimPeer:
    assert isinstance(peer, SimPeer)
    return peer


def _remote(peer: Peer) -> SimTransport:
    return _sim_peer(peer).remote
