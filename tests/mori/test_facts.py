"""Facts about the engine that decide how it may be called: which of its calls stop the process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport

SILENT_PEER = """
import json, sys, threading, time
from kvxfer.testing.softrdma import MoriEngine, MoriPeer, SoftRdma

def ticks_while(call):
    ticks, end = 0, threading.Event()
    def count():
        nonlocal ticks
        while not end.is_set():
            ticks += 1
            time.sleep(0.001)
    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.05)
    before, start = ticks, time.monotonic()
    try:
        call()
        error = None
    except RuntimeError as caught:
        error = str(caught)
    seconds, counted = time.monotonic() - start, ticks - before
    end.set()
    thread.join()
    return {"seconds": seconds, "ticks": counted, "error": error}

with SoftRdma(), MoriPeer() as silent, MoriPeer() as opened, MoriEngine() as engine:
    buffer = engine.buffer(4096)
    for peer in (silent, opened):
        engine.add_peer(peer.description)
    engine.read(buffer, 0, opened.memory, 0, 0).wait()
    for peer in (silent, opened):
        peer.stop()
    answers = {
        "create_session": ticks_while(lambda: engine.session(buffer, silent.memory)),
        "engine_read": ticks_while(lambda: engine.read(buffer, 0, silent.memory, 0, 0)),
        "create_session_later": ticks_while(lambda: engine.session(buffer, opened.memory)),
    }
    with open(int(sys.argv[1]), "w") as stream:
        json.dump(answers, stream)
"""


def test_create_session_holds_the_gil() -> None:
    """create_session keeps every Python thread of the process from running while it waits for a
    silent peer. An engine-level READ of zero bytes opens the same connection without that, and
    create_session needs no answer afterwards."""
    reader, writer = os.pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MORI_IO_CP_TIMEOUT_MS": "500",
    }
    with os.fdopen(reader) as stream:
        subprocess.run(
            [sys.executable, "-c", SILENT_PEER, str(writer)],
            env=environment,
            pass_fds=[writer],
            check=True,
        )
        os.close(writer)
        seen = json.load(stream)
    for call in ("create_session", "engine_read"):
        assert seen[call]["error"].startswith("ReadMessageHeader(type) failed")
        assert seen[call]["seconds"] >= 0.5
    # A thread that only sleeps for a millisecond at a time, for half a second.
    assert seen["engine_read"]["ticks"] >= 10
    assert seen["create_session"]["ticks"] < seen["engine_read"]["ticks"] / 4
    assert seen["create_session_later"]["error"] is None
    assert seen["create_session_later"]["seconds"] < 0.5


def test_a_stalled_client_does_not_stop_the_end_of_an_engine(softrdma) -> None:
    """The engine's end waits for a handshake in progress with the interpreter lock held, up to 5 s,
    and for each that is next in line: the transport takes no more of them and hangs up on whoever
    is in one, so that ``close`` is quick."""
    transport = MoriioTransport(MoriioConfig(rehearse=False))
    engine = transport._generations.current.engine
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(4):
            clients.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", engine.port)))
            )
            clients[-1].sendall(b"\x01")
        time.sleep(0.2)  # until the engine has taken a byte: nothing tells
        began = time.monotonic()
        assert transport.close() == []
        assert time.monotonic() - began < 3.0  # one alone would cost 5 s
        for client in clients:
            with contextlib.suppress(ConnectionResetError):  # whom nobody had looked at yet
                assert client.recv(1) == b""


EVENT_MODE_ENDS = """
import os
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport, PollMode
from kvxfer.testing.softrdma import MoriEngine, SoftRdma

with SoftRdma():
    before = os.fstat(0)
    for _ in range(2):
        MoriioTransport(MoriioConfig(rehearse=False, poll_cq_mode=PollMode.EVENT)).close()
        assert os.path.samestat(before, os.fstat(0))
    MoriEngine(poll_cq_mode="EVENT").close()
    try:
        os.fstat(0)
        print("kept")
    except OSError:
        print("closed")
"""


def test_event_mode_closes_descriptor_zero() -> None:
    """An engine in EVENT mode closes file descriptor 0 when it ends, whoever it belongs to; the
    transport puts it back."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", EVENT_MODE_ENDS],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "closed", "the engine does so no more: drop the guard"
