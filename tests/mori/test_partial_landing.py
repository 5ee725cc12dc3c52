"""Bytes that land after ``Failed``: shown to happen, and to harm nobody who waits for drained.

The device's send queue has 16 places where 64 were asked for.  So the engine posts a call of 24
pieces in two batches: 16 are taken, the rest is refused, and the call as a whole has failed.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvxfer import Agent, Blocks
from kvxfer.agent.config import AgentConfig
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.core.attempt import Accepted, AttemptState
from kvxfer.core.events import Drained, Failed, Quarantined, Received
from kvxfer.core.verdict import Op
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.policies.admission import NoAdmission
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.life import Geometry
from kvxfer.testing.memory import pattern
from kvxfer.testing.two_sides import BLOCK, NBYTES, scattered

GRANTED, ASKED, PIECES = 16, 64, 24
NEXT_OWNER = 0x77
"""What whoever gets the blocks next puts into them."""


def overwritten(memory, batch):
    """How many pieces of ``batch`` no longer hold what their next owner put there."""
    _, local, _, size = batch.lists()
    return sum(memory[a : a + n].tobytes() != b"\x77" * n for a, n in zip(local, size, strict=True))


def test_read_lands_in_a_reused_block(rig, softrdma):
    """A READ of which a part was posted: FAILED and not drained, with nothing landed yet. Memory
    that is given to somebody else now is overwritten when the posted part lands."""
    softrdma.device(max_send_wr=GRANTED)
    r = rig(max_send_wr=ASKED, own_admission=False)
    far = r.far()
    far.connect()
    batch = scattered(PIECES)
    with softrdma.hold():
        attempt = r.read(far.path, batch)
        assert attempt.state is AttemptState.FAILED
        assert (attempt.accepted, attempt.drained) == (Accepted.UNKNOWN, False)
        assert attempt.error.message.startswith("SQ full (batch): ")
        assert r.landed(batch) == 0
        r.arrays[0][:] = NEXT_OWNER  # too early: that is the point
        assert overwritten(r.arrays[0], batch) == 0
    r.until(lambda: r.landed(batch) == GRANTED, "what was posted landed")
    assert overwritten(r.arrays[0], batch) == GRANTED
    assert attempt.state is AttemptState.FAILED


def test_write_lands_in_a_reused_block(rig, softrdma):
    """The same for a WRITE, in the peer's memory: it lands in what the peer has put to another use
    since the sender saw its WRITE fail."""
    softrdma.device(max_send_wr=GRANTED)
    r = rig(max_send_wr=ASKED, own_admission=False)
    far = r.far()
    far.connect()
    batch = scattered(PIECES)
    r.arrays[0][:] = 0x5A
    with softrdma.hold():
        attempt = r.moved(Op.WRITE, far.path, batch)
        assert attempt.state is AttemptState.FAILED
        assert not attempt.drained
        far.process.fill(far.there[0], 9)  # its next owner
        assert far.process.read(far.there[0]) == pattern(9, NBYTES)

    def hit():
        theirs, own = far.process.read(far.there[0]), pattern(9, NBYTES)
        return sum(theirs[b : b + BLOCK] != own[b : b + BLOCK] for b in batch.lists()[2])

    r.until(lambda: hit() == GRANTED, "what was posted landed at the peer")
    assert not attempt.drained


SHAPE = (48, 256)
"""Blocks and bytes of each."""


class Side:
    def __init__(self, fill, **config):
        self.memory = np.full((1, *SHAPE), fill, np.uint8)
        self.agent = Agent(
            MoriioTransport(MoriioConfig(rehearse=False, generation_linger_s=0.5, **config)),
            config=AgentConfig(lease=20.0, admission=NoAdmission()),
            timeouts=Timeouts(transfer=1.0, drain=2.0),
        )
        Geometry(layers=1, blocks=SHAPE[0], nbytes=SHAPE[1]).register(self.agent, self.memory)
        self.events = []

    def until(self, condition, what, seconds=30.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s: {what}; {self.events}"
            self.events += self.agent.poll()
            time.sleep(0.001)

    def event(self, kind, transfer_id):
        def found():
            return [e for e in self.events if isinstance(e, kind) and e.transfer_id == transfer_id]

        self.until(found, f"{kind} of {transfer_id}")
        return found()[0]


@pytest.fixture
def sides(softrdma):
    softrdma.device(max_send_wr=GRANTED)
    made = [Side(1), Side(0, max_send_wr=ASKED, own_admission=False)]
    yield made
    softrdma.reset()
    for side in made:
        side.agent.close()


def test_agent_hands_blocks_back_only_when_drained(sides, softrdma):
    """The same READ through two agents: it fails by its deadline while a part of it is still under
    way, and that part lands after ``Failed``. The blocks are refused to anybody else until
    ``Drained`` says that they are free; what is put into them then stays."""
    prefill, decode = sides
    blocks = list(range(0, 2 * PIECES, 2))  # with gaps, so that each is a piece of its own
    warm = decode.agent.pull(prefill.agent.hold("warm", Blocks.at(0, [0])), Blocks.at(0, [0]))
    assert decode.agent.wait(warm, 30)
    decode.memory[:] = 0
    offer = prefill.agent.hold("partly", Blocks.at(0, blocks))
    with softrdma.hold():
        decode.agent.pull(offer, Blocks.at(0, blocks))
        failed = decode.event(Failed, "partly")
        assert (failed.drained, failed.kind) == (False, ErrorKind.TIMEOUT)
        assert not decode.memory.any()
    # Now it lands, into blocks that have been reported as failed.
    decode.until(lambda: (decode.memory[0, blocks] == 1).all(axis=1).sum() > 0, "late landing")
    assert not [e for e in decode.events if isinstance(e, Drained)]
    other = prefill.agent.hold("other", Blocks.at(0, [1]))
    with pytest.raises(InvalidInputError, match="into which bytes may still land"):
        decode.agent.pull(other, Blocks.at(0, [blocks[0]]))
    drained = decode.event(Drained, "partly")
    assert drained.blocks == (tuple(blocks),)
    decode.memory[0, blocks] = NEXT_OWNER
    prefill.memory[0, 1] = 3
    handle = decode.agent.pull(other, Blocks.at(0, [blocks[0]]))
    assert decode.agent.wait(handle, 30)
    assert decode.event(Received, "other").nbytes == SHAPE[1]
    time.sleep(0.2)  # in which something could land; nothing tells that nothing will
    assert (decode.memory[0, blocks[0]] == 3).all()
    assert (decode.memory[0, blocks[1:]] == NEXT_OWNER).all()
    assert not [e for e in decode.events if isinstance(e, Quarantined)]
