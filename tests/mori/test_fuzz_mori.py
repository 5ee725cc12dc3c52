"""Nothing that a user of the API does, or a peer suffers, ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvxfer.core.attempt import AttemptState
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.errors import HandshakeError, StaleError
from kvxfer.testing.two_sides import NBYTES, scattered

CALLS = int(os.environ.get("KVXFER_MORI_FUZZ", "10000"))
SEED = 20


@pytest.mark.timeout(600)
def test_random_calls_leave_the_process_alive(softrdma):
    """10,000 random calls with a fixed seed (bad vectors, closed paths, dropped objects,
    deregistered memory, restarted, stopped and killed peers, damaged descriptors, injected faults):
    each returns or raises an error of ours, the process lives, moves good bytes afterwards, and
    ends with status 0."""
    search = os.pathsep.join(p or os.getcwd() for p in sys.path)
    program = str(Path(__file__).with_name("fuzz_run.py"))
    done = subprocess.run(
        [sys.executable, program, str(CALLS), str(SEED)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    print(result["seconds"], result["outcomes"])
    assert result["defects"] == []
    assert result["calls"] == CALLS
    assert result["works"]
    outcomes = result["outcomes"]
    for call in ("post", "prepare", "connect", "register", "fence", "restart", "renew"):
        assert outcomes.get(f"{call} ok", 0) > 0, f"no {call} ever succeeded: {outcomes}"
    refused = sum(n for what, n in outcomes.items() if not what.endswith(" ok"))
    assert refused > CALLS / 10, "hardly anything was wrong with the calls"


def test_names_that_are_no_text(rig):
    """A descriptor whose engine or memory has a name that is no UTF-8 is refused as damaged."""
    r = rig(regions=1)
    far = r.far()
    far.connect()
    info, key = far.process.info, far.process.info.incarnation.encode()
    damaged = attrs.evolve(info, data=info.data.replace(key, b"\xad" * len(key)))
    _, error = r.outcome(r.transport.connect(damaged))
    assert isinstance(error, HandshakeError)
    there = far.there[0].descriptor
    at = there.data.rindex(key)  # in the memory's part, which comes last
    spoilt = there.data[:at] + b"\xad" * len(key) + there.data[at + len(key) :]
    for data in (spoilt, there.data.replace(key, b"\xad" * len(key))):
        pairs = [(r.regions[0], attrs.evolve(there, data=data))]
        _, error = r.outcome(r.transport.prepare(far.peer, pairs))
        assert isinstance(error, HandshakeError)
    assert r.read(far.path, scattered(4)).state is AttemptState.DONE


def test_lengths_that_are_lies(rig):
    """A descriptor that announces more than the machine has is refused as damaged."""
    r = rig(regions=1)
    far = r.far()
    info = far.process.info
    damaged = attrs.evolve(info, data=b"\xdd\xff\xff\xff\xff" + info.data[1:])
    _, error = r.outcome(r.transport.connect(damaged))
    assert isinstance(error, HandshakeError)


def test_deregistered_memory_is_not_registered_again(rig):
    """Once memory is deregistered its owner may free it: neither its descriptor nor a path can be
    had any more, and a peer that kept the old one changes no byte."""
    r = rig(regions=1)
    writer = rig(regions=1)
    transport, region = r.transport, r.regions[0]
    peer = writer.answer(writer.transport.connect(transport.local_info()))
    pairs = [(writer.regions[0], transport.descriptor(region))]
    path = writer.answer(writer.transport.prepare(peer, pairs))
    writer.arrays[0][:] = 0x11
    assert writer.moved(Op.WRITE, path, scattered(4)).state is AttemptState.DONE
    transport.deregister(region)
    with pytest.raises(StaleError, match="deregistered"):
        transport.descriptor(region)
    r.arrays[0][:] = 0  # it is somebody else's now
    assert writer.moved(Op.WRITE, path, scattered(4)).state is AttemptState.FAILED
    _, error = writer.outcome(writer.transport.prepare(peer, pairs))
    assert error is not None
    assert not r.arrays[0].any()


def test_deregister_while_an_engine_ends(rig):
    """Memory can be deregistered at any moment of an engine's end, which it is part of."""
    r = rig(regions=1, generation_linger_s=0.01)
    far = r.far()
    far.connect()
    for _ in range(3):
        regions = [r.transport.register(span_of(np.zeros(NBYTES, np.uint8))) for _ in range(40)]
        for region in regions:
            r.answer(r.transport.prepare(far.peer, [(region, far.there[0].descriptor)])).close()
        fence = r.transport.fence(far.peer)
        while regions:
            r.transport.deregister(regions.pop())
            r.transport.progress()
        assert r.answer(fence).ours_done
    path = r.answer(r.transport.prepare(far.peer, far.pairs))
    assert r.read(path, scattered(4)).state is AttemptState.DONE
