"""Section 3, sessions: exceptions of ``create_session`` and of calls that open one."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs

from kvxfer.testing.softrdma.codes import SetupCall
from kvxfer.testing.softrdma.engine import mori
from kvxfer.testing.softrdma.pair import PIECE
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario

SILENT_PEER = "ReadMessageHeader(type) failed: expected N byte(s), received M, errno=E (<strerror>)"


def _session(
    rig: Rig, before: Callable[[], None] = lambda: None, *, retry: bool = False, **config: Any
) -> Observation:
    """create_session to a healthy peer, after ``before`` has broken something.

    ``retry`` asks for the same call again and a READ, after all faults have ended.
    """
    engine, peer = rig.engine(**config), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    before()
    observation = rig.raised(lambda: engine.session(buffer, peer.memory))
    if not retry:
        return observation
    rig.rdma.reset()
    outcome = engine.session(buffer, peer.memory).read(0, 0, PIECE).wait()
    return attrs.evolve(observation, facts={"retry": attrs.asdict(outcome)})


@scenario(
    section=3,
    row="Device RQ capacity insufficient for configured notifPerQp",
    verdict=Verdict.PERMANENT,
)
def receive_queue_too_small(rig: Rig) -> Observation:
    """create_session with notif_per_qp=20000 on a device whose queues hold 16384."""
    return _session(rig, enable_notification=True, notif_per_qp=20000)


@scenario(
    section=3,
    row="RDMA device max_msg_sz is unavailable",
    verdict=Verdict.PERMANENT,
    environment={"SOFTIBV_MAX_MSG": "0"},
)
def max_message_unavailable(rig: Rig) -> Observation:
    """create_session on a port that reports a largest message of 0 bytes."""
    return _session(rig)


@scenario(section=3, row="connect(HOST:PORT): Connection refused", verdict=Verdict.TRANSIENT)
def connect_refused(rig: Rig) -> Observation:
    """create_session to a peer that was killed."""
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    peer.kill()
    return rig.raised(lambda: engine.session(buffer, peer.memory))


@scenario(section=3, row="connect(HOST:PORT): Connection refused", verdict=Verdict.TRANSIENT)
def connect_refused_engine_read(rig: Rig) -> Observation:
    """Engine-level READ from a peer that was killed before any session existed."""
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    peer.kill()
    return rig.raised(lambda: engine.read(buffer, 0, peer.memory, 0, PIECE))


@scenario(
    section=3,
    row=SILENT_PEER,
    verdict=Verdict.TRANSIENT,
    environment={"MORI_IO_CP_TIMEOUT_MS": "200"},
)
def handshake_timeout(rig: Rig) -> Observation:
    """create_session to a stopped peer; the time-out is set from 5 s to 200 ms."""
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    peer.stop()
    observation = rig.raised(lambda: engine.session(buffer, peer.memory))
    peer.resume()
    retry = engine.session(buffer, peer.memory).read(0, 0, PIECE).wait()
    return attrs.evolve(observation, facts={"retry": attrs.asdict(retry)})


_IMPOSTOR = """
import socket, sys
server = socket.socket(fileno=int(sys.argv[1]))
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(bytes.fromhex(sys.argv[2]))
    connection.close()
"""


def _impostor(rig: Rig, reply: bytes) -> Observation:
    """create_session where something that is no mori engine listens at the peer's address.

    It is a process of its own: create_session holds the GIL while it waits for an answer.
    """
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        impostor = subprocess.Popen(
            [sys.executable, "-c", _IMPOSTOR, str(server.fileno()), reply.hex()],
            pass_fds=[server.fileno()],
        )
        port = server.getsockname()[1]
    try:
        description = mori().EngineDesc.unpack(peer.description)
        there = peer.description.replace(_packed(description.port), _packed(port))
        engine.add_peer(there)
        return rig.raised(lambda: engine.session(buffer, peer.memory))
    finally:
        impostor.kill()
        impostor.wait()


def _packed(port: int) -> bytes:
    """A port as msgpack writes it."""
    return b"\xcd" + port.to_bytes(2, "big")


@scenario(
    section=3,
    row="<op> failed: expected N byte(s), received M before EOF",
    verdict=Verdict.TRANSIENT,
)
def handshake_eof(rig: Rig) -> Observation:
    """create_session to a listener that closes the connection without an answer."""
    return _impostor(rig, b"")


@scenario(section=3, row="failed to decode Message...", verdict=Verdict.PERMANENT)
def handshake_undecodable(rig: Rig) -> Observation:
    """create_session to a listener that answers zeros: the right type, and nothing in it."""
    return _impostor(rig, bytes(4096))


@scenario(section=3, row="... exceeds control-plane limit ...", verdict=Verdict.PERMANENT)
def handshake_oversized(rig: Rig) -> Observation:
    """create_session to a listener that announces an answer of 4 GiB, of the right type."""
    return _impostor(rig, b"\0" + b"\xff" * 4)


@scenario(section=3, row="unexpected control-plane message (...)", verdict=Verdict.PERMANENT)
def handshake_unexpected(rig: Rig) -> Observation:
    """create_session to a listener that answers as a web server does."""
    return _impostor(rig, b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@scenario(
    section=3,
    row=(
        "RdmaBackend::CreateSession: remote MR size mismatch for engine K rdevId=D memId=M "
        "expected=X got=0"
    ),
    verdict=Verdict.PERMANENT,
)
def remote_memory_unknown(rig: Rig) -> Observation:
    """create_session for memory that the peer has deregistered."""
    engine, peer = rig.engine(), rig.peer()
    buffer = engine.buffer(PIECE)
    engine.add_peer(peer.description)
    peer.deregister()
    return rig.raised(lambda: engine.session(buffer, peer.memory))


def _failing_call(call: SetupCall, error: int, *, retry: bool) -> Callable[[Rig], Observation]:
    # Completion channels exist in event mode only.
    mode = "EVENT" if call is SetupCall.CREATE_CHANNEL else "POLLING"
    return lambda rig: _session(
        rig, lambda: rig.rdma.fail_setup(call, error), retry=retry, poll_cq_mode=mode
    )


for _name, _row, _call, _error, _verdict in (
    (
        "create_qp_enomem",
        "ibv_create_qp failed: <strerror>",
        SetupCall.CREATE_QP,
        errno.ENOMEM,
        Verdict.TRANSIENT,
    ),
    (
        "create_qp_einval",
        "ibv_create_qp failed: <strerror>",
        SetupCall.CREATE_QP,
        errno.EINVAL,
        Verdict.PERMANENT,
    ),
    (
        "create_cq_enomem",
        "ibv_create_cq failed: <strerror>",
        SetupCall.CREATE_CQ,
        errno.ENOMEM,
        Verdict.TRANSIENT,
    ),
    (
        "alloc_pd_enomem",
        "ibv_alloc_pd failed: <strerror>",
        SetupCall.ALLOCATE_PD,
        errno.ENOMEM,
        Verdict.TRANSIENT,
    ),
    (
        "create_channel_emfile",
        "ibv_create_comp_channel failed: <strerror>",
        SetupCall.CREATE_CHANNEL,
        errno.EMFILE,
        Verdict.TRANSIENT,
    ),
    (
        "modify_qp_init_einval",
        "ibv_modify_qp(INIT) failed: <strerror>",
        SetupCall.MODIFY_QP_INIT,
        errno.EINVAL,
        Verdict.PERMANENT,
    ),
    (
        "modify_qp_rtr_einval",
        "ibv_modify_qp(RTR) failed: <strerror>",
        SetupCall.MODIFY_QP_RTR,
        errno.EINVAL,
        Verdict.PERMANENT,
    ),
    (
        "modify_qp_rtr_etimedout",
        "ibv_modify_qp(RTR) failed: <strerror>",
        SetupCall.MODIFY_QP_RTR,
        errno.ETIMEDOUT,
        Verdict.TRANSIENT,
    ),
    (
        "modify_qp_rts_einval",
        "ibv_modify_qp(RTS) failed: <strerror>",
        SetupCall.MODIFY_QP_RTS,
        errno.EINVAL,
        Verdict.PERMANENT,
    ),
):
    scenario(
        section=3,
        row=_row,
        verdict=_verdict,
        name=_name,
        how=f"create_session while {_call.name} fails with {errno.errorcode[_error]}.",
    )(_failing_call(_call, _error, retry=_verdict is Verdict.TRANSIENT))


@scenario(section=3, row="Read(): incompatible function arguments", verdict=Verdict.PERMANENT)
def negative_offset(rig: Rig) -> Observation:
    """READ with negative offsets: a TypeError."""
    pair = rig.pair()
    return rig.raised(lambda: pair.session.read(-1, -1, PIECE))
