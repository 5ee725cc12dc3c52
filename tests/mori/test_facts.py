"""Facts about the engine that decide how it may be called: which of its calls stop the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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
    assert seen["create_session"]["ticks"] <= 3
    assert seen["engine_read"]["ticks"] >= 30
    assert seen["create_session_later"]["error"] is None
    assert seen["create_session_later"]["seconds"] < 0.5
