"""Section 4: what ends the process. Nothing of this can be caught."""

from __future__ import annotations

from kvxfer.testing.softrdma.engine import mori
from kvxfer.testing.softrdma.pair import PIECE
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario


def _survived(rig: Rig, what: object) -> Observation:
    del rig
    raise SystemExit(f"the process was expected to end, but went on: {what!r}")


def _batch(rig: Rig, *, locals_: int, offsets: list[list[int]]) -> Observation:
    pair = rig.pair()
    local = [pair.buffer.descriptor] * locals_
    remote = mori().MemoryDesc.unpack(pair.peer.memory)
    status = mori().TransferStatus()
    pair.engine.native.BatchRead(local, offsets, [remote], [[0]], [[PIECE]], [status], [1])
    return _survived(rig, status.Message())


@scenario(
    section=4,
    row="ENGINE-level batch_read with inner vectors of different length",
    verdict=Verdict.FATAL,
)
def exit_inner_vectors_mismatch(rig: Rig) -> Observation:
    """Engine-level batch READ with two local offsets and one remote offset."""
    return _batch(rig, locals_=1, offsets=[[0, PIECE]])


@scenario(
    section=4,
    row="ENGINE-level batch_read with outer vectors of different length",
    verdict=Verdict.FATAL,
)
def exit_outer_vectors_mismatch(rig: Rig) -> Observation:
    """Engine-level batch READ with two local descriptors and one remote descriptor."""
    return _batch(rig, locals_=2, offsets=[[0]])


@scenario(section=4, row="IOEngineConfig(port) already in use", verdict=Verdict.FATAL)
def exit_port_in_use(rig: Rig) -> Observation:
    """A second engine on the port of the first."""
    first = mori().EngineDesc.unpack(rig.engine().description)
    return _survived(rig, rig.engine(port=first.port))


@scenario(section=4, row="IOEngineConfig(host) not local", verdict=Verdict.FATAL)
def exit_host_not_local(rig: Rig) -> Observation:
    """An engine on an address that no interface here has (TEST-NET-1, RFC 5737)."""
    return _survived(rig, rig.engine(host="192.0.2.1"))


@scenario(section=4, row="ibv_reg_mr fails (e.g. memlock)", verdict=Verdict.FATAL)
def exit_registration_fails(rig: Rig) -> Observation:
    """create_session while ibv_reg_mr fails with ENOMEM: the memory is registered lazily."""
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    rig.rdma.fail_registration()
    return _survived(rig, engine.session(buffer, peer.memory))


@scenario(section=4, row="ibv_reg_mr fails (e.g. memlock)", verdict=Verdict.FATAL)
def exit_second_registration_fails(rig: Rig) -> Observation:
    """The same for another buffer, when the connection to the peer exists already."""
    pair = rig.pair()
    second = pair.engine.buffer(PIECE)
    rig.rdma.fail_registration()
    return _survived(rig, pair.engine.session(second, pair.peer.memory))


@scenario(section=4, row="using a session after remove_backend", verdict=Verdict.FATAL)
def exit_session_after_remove_backend(rig: Rig) -> Observation:
    """READ on a session whose backend was removed."""
    pair = rig.pair()
    pair.engine.native.RemoveBackend(mori().BackendType.RDMA)
    return _survived(rig, pair.session.read(0, 0, PIECE).outcome)


@scenario(
    section=4,
    row="using a session after the IOEngine object was collected",
    verdict=Verdict.FATAL,
)
def exit_session_outlives_engine(rig: Rig) -> Observation:
    """READ on a session whose engine was dropped."""
    pair = rig.pair()
    native = pair.session.native
    pair.engine.close()
    status = mori().TransferStatus()
    native.Read(0, 0, PIECE, status, native.AllocateTransferUniqueId())
    return _survived(rig, status.Message())
