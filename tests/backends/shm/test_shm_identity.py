"""Who may reach whom: uids, namespaces, reused pids, other machines, wrong tokens."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import attrs
import msgspec
import pytest
from shm_child import descriptor_from_json, descriptor_to_json, info_from_json, info_to_json
from shm_rig import answer, error_of, noise, over, until

from kvxfer.backends.shm import ShmTransport, messages
from kvxfer.backends.shm.link import socket_name
from kvxfer.backends.shm.procs import ProcessId, ProcessWatch, start_time
from kvxfer.backends.shm.protocol import (
    PROTOCOL,
    Address,
    Challenge,
    Hello,
    Welcome,
    decode_address,
    decode_from_server,
    encode,
    encode_address,
    proof_of,
)
from kvxfer.core.attempt import AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, PeerLostError, StaleError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing the uid needs root")


def altered(info, **changes):
    """A peer's info with some fields of its address changed."""
    address = msgspec.structs.replace(decode_address(info.data), **changes)
    return attrs.evolve(info, data=encode_address(address))


def read_whole(child, far, near):
    """Have the child connect to ``near`` and prepare a path to ``far``; the answers."""
    peer = child.connected(info=info_to_json(near.transport.local_info()))
    if "error" in peer:
        return peer, None
    return peer, child.prepared(peer["index"], [[0, descriptor_to_json(far.descriptor)]])


@needs_root
def test_foreign_uid_is_refused_by_the_side_that_connects(near, make_child):
    """A peer under another uid is refused, with both uids and the way out in the text."""
    child = make_child()
    info = info_from_json(child.open(uid=NOBODY))
    error = error_of(near.transport.connect(info))
    assert isinstance(error, HandshakeError)
    assert error.message.startswith(messages.FOREIGN_UID.text)
    assert str(NOBODY) in error.message
    assert "allowed_uids" in str(error)


@needs_root
def test_foreign_uid_is_refused_by_the_owner(near, make_child):
    """A stranger who allows us, but whom the owner does not allow, gets nothing."""
    child = make_child()
    child.open(uid=NOBODY, allowed_uids=[0])
    child.register(nbytes=4096)
    _, region = near.register(4096)
    peer, _ = read_whole(child, region, near)
    assert peer["error"] == "HandshakeError"
    assert peer["text"].startswith(messages.REFUSED_UID.text)
    assert near.transport.counters["refused_uid"] == 1


@needs_root
def test_allowed_foreign_uid_maps_files_but_cannot_read_in_place(make_near, make_child):
    """Between uids that allow each other memory files work; memory in place is refused by the
    kernel (EPERM), which ``prepare`` reports with the ways out."""
    near = make_near(allowed_uids={0, NOBODY})
    child = make_child()
    child.open(uid=NOBODY, allowed_uids=[0])
    child.register(nbytes=4096)
    mapped, mapped_region = near.register(4096)
    mapped[:] = noise(4, 4096)
    _, in_place = near.register(4096, mapped=False)
    peer, path = read_whole(child, mapped_region, near)
    number = child.post(op="read", path=path["index"], batch=[[0], [0], [0], [4096]])
    assert child.ended(number)["state"] == "done"
    assert (child.data(0) == noise(4, 4096)).all()
    refused = child.prepared(peer["index"], [[0, descriptor_to_json(in_place.descriptor)]])
    assert refused["error"] == "HandshakeError"
    assert refused["engine"].startswith(messages.NOT_PERMITTED.text)
    assert refused["code"] == 1
    for way_out in ("allocate()", "share_storage()", "dumpable", "ptrace_scope", "admit_readers"):
        assert way_out in refused["engine"]


@needs_root
@pytest.mark.parametrize("dumpable", [True, False])
def test_target_that_is_not_dumpable(make_child, dumpable):
    """Under one uid without privileges the kernel lets us read a dumpable process and no other."""
    owner, reader = make_child(), make_child()
    owner_info = owner.open(uid=NOBODY, dumpable=dumpable)
    far = owner.register(nbytes=4096, mapped=False, fill=8)
    mapped = owner.register(nbytes=4096, fill=9)
    reader.open(uid=NOBODY, dumpable=True)
    reader.register(nbytes=4096)
    peer = reader.connected(info=owner_info)
    assert "error" not in peer, peer
    path = reader.prepared(peer["index"], [[0, far]])
    if dumpable:
        number = reader.post(op="read", path=path["index"], batch=[[0], [0], [0], [4096]])
        assert reader.ended(number)["state"] == "done"
        assert (reader.data(0) == noise(8, 4096)).all()
    else:
        assert path["error"] == "HandshakeError"
        assert path["engine"].startswith(messages.NOT_PERMITTED.text)
        assert path["code"] == 1
    path = reader.prepared(peer["index"], [[0, mapped]])
    number = reader.post(op="read", path=path["index"], batch=[[0], [0], [0], [4096]])
    assert reader.ended(number)["state"] == "done"
    assert (reader.data(0) == noise(9, 4096)).all()


def test_permission_that_goes_away_fails_the_attempt(near, make_child):
    """A READ that the kernel refuses after ``prepare`` fails with its errno, drained."""
    if os.geteuid() != 0:
        pytest.skip("changing the uid needs root")
    owner, reader = make_child(), make_child()
    owner_info = owner.open(uid=NOBODY, dumpable=True)
    far = owner.register(nbytes=4096, mapped=False)
    reader.open(uid=NOBODY, dumpable=True)
    reader.register(nbytes=4096)
    peer = reader.connected(info=owner_info)
    path = reader.prepared(peer["index"], [[0, far]])
    owner.undump()
    number = reader.post(op="read", path=path["index"], batch=[[0], [0], [0], [4096]])
    ended = reader.ended(number)
    assert (ended["state"], ended["drained"], ended["code"]) == ("failed", True, 1)
    assert ended["text"].startswith(messages.NOT_PERMITTED.text)


UNSHARE = {
    "proc of its own": ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
    "proc of the host": ("unshare", "--pid", "--fork", "--kill-child"),
}


def _may_unshare():
    if shutil.which("unshare") is None:
        return "the unshare program is missing"
    tried = subprocess.run(
        [*UNSHARE["proc of its own"], "true"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else f"unshare --pid: {tried.stderr.strip()}"


@pytest.mark.parametrize("proc", list(UNSHARE))
def test_other_pid_namespace(near, make_child, proc):
    """Across pid namespaces memory files work in both directions; memory in place is refused by
    ``prepare``, with a text that names the namespace."""
    if reason := _may_unshare():
        pytest.skip(f"pid namespaces cannot be made here: {reason}")
    child = make_child(prefix=UNSHARE[proc])
    info = child.open()
    assert child.facts()["namespaces"] != near.transport._process.namespaces
    mapped = child.register(nbytes=4096, fill=1)
    in_place = child.register(nbytes=4096, mapped=False, fill=2)
    here, region = near.register(4096)
    peer = near.connect(info_from_json(info))
    path = near.prepare(peer, [(region, descriptor_from_json(mapped))])
    for op in Op:
        (attempt,) = over([near.transport.post(op, path, Batch([0], [0], [0], [4096]))])
        assert attempt.state is AttemptState.DONE
    assert (here == noise(1, 4096)).all()
    error = error_of(near.transport.prepare(peer, [(region, descriptor_from_json(in_place))]))
    assert isinstance(error, HandshakeError)
    assert error.message.startswith(messages.OTHER_NAMESPACE.text)
    assert "share_storage()" in str(error)
    # The other way round.
    mine, mine_region = near.register(4096)
    mine[:] = 77
    there = child.connected(info=info_to_json(near.transport.local_info()))
    path = child.prepared(there["index"], [[0, descriptor_to_json(mine_region.descriptor)]])
    number = child.post(op="read", path=path["index"], batch=[[0], [0], [0], [4096]])
    assert child.ended(number)["state"] == "done"
    assert (child.data(0) == 77).all()
    # Its end is noticed, though its pid means nothing here.
    child.kill()
    until(lambda: not peer.alive, "the end of a process in another namespace")


def test_reused_pid_is_refused_by_connect(near, make_child):
    """A PeerInfo whose pid belongs to another process by now: the start time tells."""
    child = make_child()
    info = info_from_json(child.open())
    began = decode_address(info.data).start_time
    error = error_of(near.transport.connect(altered(info, start_time=began - 1)))
    assert isinstance(error, PeerLostError)
    assert error.message.startswith(messages.PID_REUSED.text)


def test_pid_of_nobody_is_a_lost_peer(near, make_child):
    """A PeerInfo of a process that has ended and was reaped: nothing of it lands any more.  That
    nobody listens at the address of one that lives proves nothing."""
    child = make_child()
    info = info_from_json(child.open())
    silent = error_of(near.transport.connect(altered(info, socket="@nobody")))
    assert not near.transport.proves_end(silent)
    child.kill()
    error = error_of(near.transport.connect(info))
    assert isinstance(error, PeerLostError)
    assert error.message.startswith(messages.PEER_GONE.text)
    assert near.transport.proves_end(error)


@pytest.mark.parametrize("checks_before", [0, 1, 2, 3])
def test_pid_reused_while_reading_in_place(near, make_child, checks_before):
    """Should a pid change hands at any moment of a READ, the attempt fails: the start time is
    looked up before the first and after every call."""
    child = make_child()
    info = info_from_json(child.open())
    size = 3 * 1024 * 4096
    far = child.register(nbytes=size, mapped=False)
    _, region = near.register(size, mapped=False)
    peer = near.connect(info)
    path = near.prepare(peer, [(region, descriptor_from_json(far))])
    real, looked = peer.watch, []

    def planted(pid):
        looked.append(pid)
        return start_time(pid) + (len(looked) > checks_before)

    peer.watch = ProcessWatch(
        os.dup(real.pidfd), pid=real.pid, began=start_time(real.pid), look_up=planted
    )
    try:
        count = size // 4096
        # Every second page first: nothing merges, so three calls of 1024 pieces are needed.
        order = [*range(0, count, 2), *range(1, count, 2)]
        offsets = [i * 4096 for i in order]
        batch = Batch([0] * count, offsets, offsets, [4096] * count)
        (attempt,) = over([near.transport.post(Op.READ, path, batch)])
    finally:
        peer.watch.close()
        peer.watch = real
    assert attempt.state is AttemptState.FAILED
    assert attempt.error.message.startswith(messages.PID_REUSED.text)
    assert len(looked) > checks_before


def test_other_machine_is_refused(near, make_child):
    """A peer with another boot id runs on another machine: refused with the way out."""
    child = make_child()
    info = info_from_json(child.open())
    error = error_of(near.transport.connect(altered(info, boot_id="another")))
    assert isinstance(error, HandshakeError)
    assert error.message.startswith(messages.OTHER_MACHINE.text)
    assert "moriio" in str(error)


def test_wrong_token_gets_nothing(near, make_child):
    """Without the token of the PeerInfo a process of our own uid is refused and counted."""
    child = make_child()
    info = info_from_json(child.open())
    error = error_of(near.transport.connect(altered(info, token=bytes(32))))
    assert isinstance(error, HandshakeError)
    assert error.message.startswith(messages.REFUSED_TOKEN.text)
    assert child.facts()["counters"]["refused_token"] == 1


def test_other_incarnation_behind_the_socket_is_stale(near, make_child):
    """The right socket and token, but another incarnation meant: StaleError."""
    child = make_child()
    info = info_from_json(child.open())
    error = error_of(near.transport.connect(attrs.evolve(info, incarnation="another")))
    assert isinstance(error, StaleError)
    assert error.message.startswith(messages.REFUSED_STALE.text)


def test_token_stays_out_of_logs(near):
    """Neither the info nor what is made of it shows the token."""
    info = near.transport.local_info()
    token = near.transport._server.token
    address = decode_address(info.data)
    hello = Hello(lowest=1, highest=1, nonce=bytes(32), incarnation="a", wanted="b")
    proof = proof_of(token, server=False, hello=hello, challenge=Challenge(nonce=bytes(32)))
    assert token not in encode(hello) + proof
    for text in (repr(info), repr(address)):
        assert repr(token)[2:-1] not in text
        assert token.hex() not in text


def stranger(near):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    address = decode_address(near.transport.local_info().data)
    sock.connect(socket_name(address.socket))
    return sock, address


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        b"x" * 31 * 1024,
        b"y" * 64 * 1024,
        encode(Welcome(version=1, mac=bytes(32))),
        msgspec.msgpack.encode({"type": "want", "request": 1, "regions": [0]}),
        msgspec.msgpack.encode({"type": "hello", "lowest": 1}),
        msgspec.msgpack.encode({"type": "bye"}),
    ],
    ids=["noise", "long", "too_long", "wrong_side", "before_hello", "incomplete", "bye_first"],
)
def test_strangers_messages_end_their_connection_only(near, message):
    """Anything but a proper Hello hangs up on its sender; the transport goes on serving."""
    sock, _ = stranger(near)
    with sock:
        sock.send(message)
        assert sock.recv(4096) == b""
    assert near.transport.counters["handover_errors"] == 0
    other = ShmTransport()
    try:
        answer(other.connect(near.transport.local_info()))
    finally:
        other.close()


def test_descriptors_a_stranger_sends_are_closed(near):
    """File descriptors that come with a message are closed, however many."""
    before = len(os.listdir("/proc/self/fd"))
    sock, _ = stranger(near)
    with sock:
        socket.send_fds(sock, [b"\xc1"], [sock.fileno()] * 200)
        assert sock.recv(4096) == b""
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "descriptors closed")


def test_hello_of_a_version_we_do_not_speak(near):
    """No common version is answered as such, not by silence."""
    sock, _ = stranger(near)
    with sock:
        sock.send(
            encode(
                Hello(
                    lowest=PROTOCOL + 1,
                    highest=9,
                    nonce=bytes(32),
                    incarnation="newer",
                    wanted=near.transport.incarnation,
                )
            )
        )
        assert decode_from_server(sock.recv(4096)).reason == "version"
        assert sock.recv(4096) == b""


def test_too_many_connections_are_refused(make_near):
    """``max_connections`` bounds what strangers can hold; the refusal says so."""
    near = make_near(max_connections=2)
    socks = [stranger(near)[0] for _ in range(2)]
    other = ShmTransport()
    try:
        error = error_of(other.connect(near.transport.local_info()))
        assert error.message.startswith(messages.REFUSED_FULL.text)
        socks.pop().close()
        until(lambda: len(near.transport._server._holders) == 1, "the place is free again")
        answer(other.connect(near.transport.local_info()))
    finally:
        other.close()
        for sock in socks:
            sock.close()


def test_socket_in_a_directory(make_near, make_child, tmp_path):
    """With ``socket_dir`` the socket is a file in a private directory, gone after close."""
    near = make_near(socket_dir=str(tmp_path))
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    _, region = near.register(4096)
    child = make_child()
    child.open()
    child.register(nbytes=4096)
    _, path = read_whole(child, region, near)
    assert "error" not in path
    near.transport.close()
    assert not list(tmp_path.iterdir())


def test_damaged_addresses_are_error_values(near):
    """Whatever stands in ``PeerInfo.data``: ``connect`` answers, it does not raise."""
    good = near.transport.local_info()
    fields = list(msgspec.msgpack.decode(good.data))
    for place, wrong in [(0, 0), (2, ""), (4, 0), (4, 2**40), (6, "@" + "x" * 200), (7, b"short")]:
        damaged = fields.copy()
        damaged[place] = wrong
        info = attrs.evolve(good, data=msgspec.msgpack.encode(damaged))
        assert isinstance(error_of(near.transport.connect(info)), HandshakeError)


def test_this_process_knows_itself():
    """What a transport says of its process is what others find in /proc."""
    own = ProcessId.current()
    assert own.pid == os.getpid()
    assert own.start_time == start_time(os.getpid())
    assert own.comparable(ProcessId.current())
    assert start_time(2**22 + 1) is None
    assert isinstance(decode_address(b"" or encode_address(_address(own))), Address)


def _address(process):
    return Address(
        lowest=1,
        highest=1,
        boot_id=process.boot_id,
        namespaces=process.namespaces,
        pid=process.pid,
        start_time=process.start_time,
        socket="@x",
        token=bytes(32),
    )


def test_a_watch_that_several_threads_ask():
    """Whoever asks while another thread is inside the same poll object gets an answer all the
    same."""

    class Busy:
        def poll(self, timeout):
            raise RuntimeError("concurrent poll() invocation")

    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    watches = [ProcessWatch(os.pidfd_open(pid)) for pid in (os.getpid(), gone.pid)]
    gone.wait()
    for watch in watches:
        watch._poll = Busy()
    assert [watch.alive() for watch in watches] == [True, False]
    for watch in watches:
        watch.close()


def test_a_watch_that_is_closed_looks_at_nobody():
    """What gets its descriptor's number next is not taken for an end of the process."""
    watch = ProcessWatch(os.pidfd_open(os.getpid()))
    number = watch.pidfd
    watch.close()
    readable, writable = os.pipe()
    os.write(writable, b"x")
    os.dup2(readable, number)
    try:
        assert watch.alive()
    finally:
        for fd in {readable, writable, number}:
            os.close(fd)
