"""Transports with one fault each, and the contract test that must notice it.

Not collected by itself: ``test_suite_can_fail`` runs it in a subprocess.
"""

from __future__ import annotations

import ctypes
import threading
import time

import attrs

from kvxfer.backends.loopback import CANCELLED, CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.backends.shm import ShmTransport
from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch, Members
from kvxfer.core.pollable import Deferred, Ready
from kvxfer.core.transport import Fence, Transport
from kvxfer.core.verdict import EngineError, Op
from kvxfer.errors import BackpressureError, PeerLostError, RegionBusyError
from kvxfer.testing.conformance import IN_PROCESS, TransportTests
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan
from kvxfer.testing.faulty import FaultyTransport


class Honest(LoopbackTransport):
    """No fault: every test named below passes here, so that a failure means the fault."""

    copy_in = CopyIn.PROGRESS

    def __init__(self):
        super().__init__(LoopbackConfig(copy_in=self.copy_in, max_pieces=300))
        self.peers = []

    def _connect(self, info):
        answer = super()._connect(info)
        self.peers.append(answer.poll()[0])
        return answer

    def copy(self, attempt, start=0, stop=None, extra=0):
        """Move pieces without telling anybody."""
        for i in range(start, len(attempt.batch) if stop is None else stop):
            source, destination, size = self.where(attempt, i)
            ctypes.memmove(destination, source, size + extra)

    def where(self, attempt, i):
        """Source address, destination address and size of a piece."""
        batch = attempt.batch
        local, descriptor = attempt.path.pairs[batch.pair[i]]
        far = attempt.path.peer.remote._regions[descriptor.region_id].span.address
        here, there = local.span.address + int(batch.local[i]), far + int(batch.remote[i])
        size = int(batch.size[i])
        return (there, here, size) if attempt.op is Op.READ else (here, there, size)


class FlipsAByte(Honest):
    def _report(self, attempt):
        if attempt.state is AttemptState.DONE and len(attempt.batch):
            address = self.where(attempt, len(attempt.batch) // 2)[1]
            value = ctypes.string_at(address, 1)[0]
            ctypes.memset(address, value ^ 1, 1)
        super()._report(attempt)


class CopiesOneByteTooMany(Honest):
    def _report(self, attempt):
        if attempt.state is AttemptState.DONE:
            self.copy(attempt, extra=1)
        super()._report(attempt)


class LosesTheLastOfManyPieces(Honest):
    def _report(self, attempt):
        n = len(attempt.batch)
        if attempt.state is AttemptState.DONE and n > 200:
            _, address, size = self.where(attempt, n - 1)
            ctypes.memset(address, 0, size)
        super()._report(attempt)


class UsesTheFirstPairOnly(Honest):
    def _post(self, attempt):
        batch = attempt.batch
        attempt.batch = Batch(batch.pair * 0, batch.local, batch.remote, batch.size)
        super()._post(attempt)


class ForgetsTheBasesOfMembers(Honest):
    def _post(self, attempt):
        batch = attempt.batch
        if batch.members is not None:
            zero = batch.members.local_base * 0
            members = Members(batch.members.pair, zero, zero)
            attempt.batch = Batch.repeated_pieces(members, batch.shared)
        super()._post(attempt)


class SendsToTheLatestPeer(Honest):
    def _post(self, attempt):
        peer = attempt.path.peer
        proper, peer.remote = peer.remote, self.peers[-1].remote
        try:
            super()._post(attempt)
            super()._advance(1)
        finally:
            peer.remote = proper


class DoneBeforeTheCopy(Honest):
    def _post(self, attempt):
        attempt.complete()
        self._report(attempt)
        self.late = [*getattr(self, "late", []), attempt]

    def _advance(self, budget):
        if not self._changed:  # a round after the report
            for attempt in self.__dict__.pop("late", []):
                self.copy(attempt)


class DoneWithoutDrained(Honest):
    def _report(self, attempt):
        if attempt.state is AttemptState.DONE:
            attempt.drained = False
        super()._report(attempt)


class HalfPostsThenRefuses(Honest):
    posts = 0

    def _post(self, attempt):
        self.posts += 1
        if self.posts % 5 == 3:
            self.copy(attempt, stop=(len(attempt.batch) + 1) // 2)
            raise BackpressureError(
                "queue full", engine=EngineError(backend=self.name, message="queue full")
            )
        super()._post(attempt)


class ClipsWhatIsOutOfRange(Honest):
    def post(self, op, path, batch, *, tag=None):
        if len(batch) and int(batch.pair.max()) < len(path.pairs):
            local, remote = path.local_nbytes[batch.pair], path.remote_nbytes[batch.pair]
            ok = (batch.local <= local - batch.size) & (batch.remote <= remote - batch.size)
            start = int((~ok).argmax()) if not ok.all() else len(batch)
            batch = batch.slice(0, start)
        return super().post(op, path, batch, tag=tag)


class TakesTheFirstOfTooManyPieces(Honest):
    def post(self, op, path, batch, *, tag=None):
        return super().post(op, path, batch.slice(0, 300), tag=tag)


class PostsOnClosedPaths(Honest):
    def post(self, op, path, batch, *, tag=None):
        was, path.closed = path.closed, False
        try:
            return super().post(op, path, batch, tag=tag)
        finally:
            path.closed = was


class ForgetsToReport(Honest):
    reports = 0

    def _report(self, attempt):
        self.reports += 1
        if self.reports % 7:
            super()._report(attempt)


class ReportsTooEarly(Honest):
    def progress(self, budget=1024):
        return [*super().progress(budget - 1), *tuple(self._queue)[:1]]


class ReportsStrangers(Honest):
    def _report(self, attempt):
        super()._report(attempt)
        stranger = Attempt(attempt.op, attempt.path, attempt.batch)
        stranger.complete()
        super()._report(stranger)


class IgnoresTheBudget(Honest):
    def progress(self, budget=1024):
        return super().progress(1024)


class SuccessOverwritesFailure(Honest):
    def _advance(self, budget):
        for attempt in tuple(self._queue)[:budget]:
            if attempt.state is AttemptState.FAILED:
                attempt.state, attempt.error = AttemptState.DONE, None
        super()._advance(budget)


class LosesTrackOfAttempts(Honest):
    def _post(self, attempt):
        super()._post(attempt)
        attempt.path.undrained.discard(attempt)


class LeavesPendingOnDisconnect(Honest):
    def _fail_pending(self, path, why):
        pass

    def _disconnect(self, peer):
        return Ready(Fence(done=False, reason="no"))


class LandsAfterDisconnect(Honest):
    def _disconnect(self, peer):
        zombies = [a for a in self._queue if a.path.peer is peer]
        self.zombies = getattr(self, "zombies", []) + zombies
        return super()._disconnect(peer)

    def _advance(self, budget):
        super()._advance(budget)
        if any(a.state is AttemptState.DONE for a in self._changed):
            for attempt in self.__dict__.pop("zombies", []):
                self.copy(attempt)


class FencesWithoutProof(Honest):
    def _fence(self, peer):
        return Ready(Fence(done=True))


class ImpossibleFenceWithoutReason(Honest):
    def _disconnect(self, peer):
        super()._disconnect(peer)
        return Ready(Fence(done=False))


class FenceLetsWritesThrough(Honest):
    def _fence(self, peer):
        self._drop_queued(peer, "fenced")
        return Ready(Fence(done=True))


class DisconnectCutsEveryConnection(Honest):
    def _disconnect(self, peer):
        for other in self.peers:
            if other.info.incarnation == peer.info.incarnation:
                other.link.open = False
        return super()._disconnect(peer)


class ForgetsPendingOnClose(Honest):
    def _fail_pending(self, path, why):
        if why != "the transport was closed":
            super()._fail_pending(path, why)

    def _drop(self, attempt, why):
        if not self.closed:
            super()._drop(attempt, why)


class SlowToClose(Honest):
    def _close(self, deadline):
        pending = bool(self._queue)
        super()._close(deadline)
        time.sleep(3.2 * pending)


class RaisesFromConnect(Honest):
    def _connect(self, info):
        answer = super()._connect(info)
        if answer.poll()[1] is not None:
            raise PeerLostError("nobody there")
        return answer


class NeverAnswersConnect(Honest):
    def _connect(self, info):
        answer = super()._connect(info)
        return answer if answer.poll()[1] is None else Deferred()


class WaitsInConnect(Honest):
    def _connect(self, info):
        time.sleep(0.5)
        return super()._connect(info)


class WaitsInProgress(Honest):
    def _advance(self, budget):
        time.sleep(0.05)
        super()._advance(budget)


class WaitsInPost(Honest):
    def _post(self, attempt):
        time.sleep(0.05)
        super()._post(attempt)


class TakesAnyIncarnation(Honest):
    def _connect(self, info):
        if len(info.incarnation) == 16:
            from kvxfer.backends.loopback import _reachable

            others = [i for i in _reachable if i != self.incarnation]
            if info.incarnation not in others:
                info = attrs.evolve(info, incarnation=others[0])
        return super()._connect(info)


class TakesOldDescriptors(Honest):
    def prepare(self, peer, pairs):
        current = peer.info.incarnation
        return super().prepare(peer, [(r, attrs.evolve(d, incarnation=current)) for r, d in pairs])


class ChangesItsAnswer(Honest):
    def prepare(self, peer, pairs):
        prepare = super().prepare

        class Anew:
            def poll(self):
                return prepare(peer, pairs).poll()

        return Anew()


class CancelClaimsNothingLanded(Honest):
    def cancel(self, attempt):
        self.copy(attempt)
        super().cancel(attempt)


class ForgetsARegion(Honest):
    def _register(self, span):
        region = super()._register(span)
        return attrs.evolve(region, descriptor=attrs.evolve(region.descriptor, region_id=0))


class TimeoutIsLost(Honest):
    """After an attempt that its owner failed, the proof of being drained never comes."""

    def _advance(self, budget):
        while self._queue and self._queue[0].terminal:
            self._queue.popleft()
        super()._advance(budget)


class KeepsTheProofToItself(Honest):
    def _report(self, attempt):
        if attempt.drained_by != CANCELLED:
            super()._report(attempt)


class ProvesHalfTooEarly(LandsAfterDisconnect):
    """What it posted itself still lands, though it says that no such thing does."""

    def _disconnect(self, peer):
        super()._disconnect(peer)
        return Ready(Fence(done=False, reason="who knows what they do", ours_done=True))


class NamesTooFewQueues(Honest):
    def _prepare(self, peer, pairs):
        answer = super()._prepare(peer, pairs)
        path = answer.poll()[0]
        path.queues = path.queues[:1]
        return answer


class DescribesAnotherRegion(Honest):
    def descriptor(self, region):
        return attrs.evolve(region.descriptor, region_id=0)


class LetsThemSleep(Honest):
    must_be_polled = False

    def _report(self, attempt):
        self._changed.append(attempt)


class DeclaresTheLivingDead(Honest):
    def _advance(self, budget):
        super()._advance(budget)
        for peer in self.peers[:1]:
            self._report_lost(peer)


class ShowsDoneTooEarly(Honest):
    times = 5

    def _report(self, attempt):
        if self.times:
            self.times -= 1
            attempt.drained = False
            time.sleep(0.05)
            attempt.drained = True
        super()._report(attempt)


class AnswersEveryThreadAnew(ChangesItsAnswer):
    pass


class LooksAtEveryPath(Honest):
    def _advance(self, budget):
        super()._advance(budget)
        for peer in self.peers:
            for _ in peer.paths:
                sum(range(500))


class KeepsRegionsOfClosedPaths(Honest):
    def _close_path(self, path):
        self.kept = [*getattr(self, "kept", []), *(region for region, _ in path.pairs)]

    def _deregister(self, region):
        if any(region is kept for kept in getattr(self, "kept", [])):
            raise RegionBusyError("a path was here once")
        super()._deregister(region)


class LeavesAThread(Honest):
    def __init__(self):
        super().__init__()
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


class NeverEnds(FaultyTransport):
    """A lost peer leaves its attempts pending for ever."""

    def __init__(self):
        super().__init__(ShmTransport(), FaultPlan(posts=[Fault(kind=FaultKind.NEVER)]))


class WaitsForThePeer(ShmTransport):
    def _connect(self, info):
        answer = super()._connect(info)
        deadline = time.monotonic() + 3.0  # far above what a busy machine makes of an honest call
        while answer.poll() == (None, None) and time.monotonic() < deadline:
            time.sleep(0.001)
        return answer


class RaisesAboutDamage(ShmTransport):
    def _connect(self, info):
        answer = super()._connect(info)
        if isinstance(answer, Ready):
            raise ValueError("what is this?")
        return answer


class HonestShm(ShmTransport):
    """The control of those three."""


NOTICED_BY_TWO = {
    NeverEnds: "test_killed_peer_ends_every_attempt",
    WaitsForThePeer: "test_stopped_peer_holds_nobody",
    RaisesAboutDamage: "test_damaged_peer_info_is_an_error_value",
}

NOTICED_BY = {
    FlipsAByte: "test_moves_exactly_the_pieces",
    CopiesOneByteTooMany: "test_moves_exactly_the_pieces",
    LosesTheLastOfManyPieces: "test_many_regions_in_one_path",
    UsesTheFirstPairOnly: "test_one_region_in_several_pairs",
    ForgetsTheBasesOfMembers: "test_layers_share_their_pieces",
    SendsToTheLatestPeer: "test_two_peers_at_once",
    DoneBeforeTheCopy: "test_done_means_drained_and_there",
    DoneWithoutDrained: "test_done_means_drained_and_there",
    HalfPostsThenRefuses: "test_a_refused_post_has_posted_nothing",
    ClipsWhatIsOutOfRange: "test_out_of_range_is_refused",
    TakesTheFirstOfTooManyPieces: "test_too_many_pieces_are_refused",
    PostsOnClosedPaths: "test_closed_path_is_stale",
    ForgetsToReport: "test_progress_reports_every_attempt_and_nothing_else",
    ReportsTooEarly: "test_progress_reports_every_attempt_and_nothing_else",
    ReportsStrangers: "test_progress_reports_every_attempt_and_nothing_else",
    IgnoresTheBudget: "test_progress_reports_every_attempt_and_nothing_else",
    SuccessOverwritesFailure: "test_a_time_out_is_not_overwritten",
    TimeoutIsLost: "test_a_time_out_is_not_overwritten",
    LosesTrackOfAttempts: "test_deregister_waits_until_drained",
    LeavesPendingOnDisconnect: "test_disconnect_fails_what_is_pending",
    LandsAfterDisconnect: "test_disconnect_fails_what_is_pending",
    ImpossibleFenceWithoutReason: "test_disconnect_fails_what_is_pending",
    FencesWithoutProof: "test_fence_keeps_its_word",
    FenceLetsWritesThrough: "test_receivers_fence_stops_writes",
    DisconnectCutsEveryConnection: "test_connected_twice",
    ForgetsPendingOnClose: "test_close_fails_what_is_pending",
    SlowToClose: "test_close_fails_what_is_pending",
    RaisesFromConnect: "test_nobody_there_is_an_error_value",
    NeverAnswersConnect: "test_nobody_there_is_an_error_value",
    WaitsInConnect: "test_calls_do_not_wait",
    WaitsInProgress: "test_calls_do_not_wait",
    WaitsInPost: "test_calls_do_not_wait",
    TakesAnyIncarnation: "test_another_life_is_not_taken_for_this_one",
    TakesOldDescriptors: "test_other_incarnation_is_stale",
    ChangesItsAnswer: "test_moves_exactly_the_pieces",
    CancelClaimsNothingLanded: "test_cancel_lies_about_nothing",
    ForgetsARegion: "test_region_says_what_was_registered",
    KeepsTheProofToItself: "test_a_time_out_is_not_overwritten",
    ProvesHalfTooEarly: "test_disconnect_fails_what_is_pending",
    NamesTooFewQueues: "test_every_pair_names_its_queue",
    DescribesAnotherRegion: "test_descriptor_addresses_the_region",
    LetsThemSleep: "test_whoever_sleeps_is_woken",
    DeclaresTheLivingDead: "test_lost_peers_have_ended",
    ShowsDoneTooEarly: "test_posts_beside_progress",
    AnswersEveryThreadAnew: "test_answers_are_for_any_thread",
    LooksAtEveryPath: "test_idle_things_cost_nothing",
    KeepsRegionsOfClosedPaths: "test_paths_come_and_go",
    LeavesAThread: "test_close_frees_everything",
}


class Sabotaged(TransportTests):
    modes = (IN_PROCESS,)
    timeout = 1.0
    engine: type[Honest]

    def make_transport(self):
        return self.engine()


class SabotagedWithPeers(TransportTests):
    backend = "shm"
    memory = "kvxfer.testing.memory:MappedMemory"
    timeout = 8.0
    engine: type[Transport]

    def make_transport(self):
        return self.engine()


for _base, _engines in (
    (Sabotaged, (Honest, *NOTICED_BY)),
    (SabotagedWithPeers, (HonestShm, *NOTICED_BY_TWO)),
):
    for _engine in _engines:
        _name = f"Test{_engine.__name__}"
        globals()[_name] = type(_name, (_base,), {"engine": _engine, "__module__": __name__})
