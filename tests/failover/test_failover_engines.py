"""Failover under load between real engines, in real processes.

One engine of a peer ends in the middle of the traffic, its process lives on: whatever is under way
with that peer goes on over the next backend.  No request is lost, no byte wrong, no block handed
back too early; the other peer stays where it is.
"""

from __future__ import annotations

import os
import time

import attrs
import pytest

from kvxfer.policies.failover import Failover
from kvxfer.policies.timeouts import Timeouts
from kvxfer.testing.life import Life
from kvxfer.testing.softrdma import SoftRdma

pytestmark = pytest.mark.timeout(600)

MORIIO = {
    "rehearse": False,
    "generation_linger_s": 1.0,
    "generation_drain_s": 2.0,
    "qp_retry_count": 3,
}
OPTIONS = {"moriio": MORIIO, "nixl": {}, "shm": {}}
TIMEOUTS = Timeouts(connect=15.0, queue=20.0, post=10.0, transfer=30.0, ack=15.0, drain=1.5)
"""Generous: what is shown is that nothing is lost, on a machine that may be busy."""
SLOW = 0.0005
"""Seconds per work request of the software RDMA device, so that some are under way."""
POLICY = Failover(faults=2, pause=1.0, probes=2, spacing=0.2, longest_pause=8.0)
HEALS = attrs.evolve(POLICY, longest_pause=2.0)
"""For engines that come back: what was healed is probed soon."""


@pytest.fixture
def life(monkeypatch, request):
    """A decode worker and two peers with these backends, in order."""
    names, writes, policy = request.param
    # Over shared memory NIXL would copy inside its post: over tcp something is under way.
    monkeypatch.setenv("UCX_TLS", "tcp")
    if not os.path.exists("/dev/infiniband"):
        monkeypatch.setenv("UCX_MODULES", "^ib")
    with SoftRdma() as softrdma:
        mori = "moriio" in names
        if mori:
            softrdma.delay(SLOW)
        made = Life(
            [(name, OPTIONS[name]) for name in names],
            failover=policy,
            fences=names[0] == "moriio",
            softrdma=softrdma if mori else None,
            slow=SLOW if mori else 0.0,
            writes=writes,
            timeouts=TIMEOUTS,
            lease=30.0,
        )
        yield made
        made.end()


def dying(life, before, after):
    """End the victim's engine under load; traffic goes on until it is served over the next one."""
    victim, healthy = life.victim, life.healthy
    life.traffic(0.5, victim, healthy)
    life.end_engine(victim, before)
    life.until(lambda: bool(life.changes), "the downgrade", 90, victim, healthy)
    life.traffic(1.0, victim, healthy)
    life.settle("what was under way", victim)
    life.serves("over the next backend", victim)
    assert not life.problems, f"{life.problems} {life.outcomes}"
    (change,) = [c for c in life.changes if c.down]
    assert (change.before, change.backend) == (before, after)
    assert change.reason
    life.finish()
    print(life)
    counters = life.agent.snapshot().counters
    print({k: n for k, n in sorted(counters.items()) if k.startswith("failover")})
    life.judge(hit=False)
    assert counters["failover.downgrades"] == counters[f"failover.to.{after}"] == 1
    # The engine is gone for good: probes find that out, and nobody goes back.
    assert "failover.upgrades" not in counters
    assert not [c for c in life.their_changes if c[0] is healthy]
    return counters


def cases(*paths, writes):
    return pytest.mark.parametrize(
        ("life", "path"),
        [((path, writes, POLICY), path) for path in paths],
        indirect=["life"],
        ids=["-".join(path) for path in paths],
    )


@cases(("moriio", "shm"), ("moriio", "nixl"), writes=False)
def test_reads_survive_the_engine_of_the_peer(life, path):
    """READ: every pull is received, those under way included."""
    dying(life, *path)
    assert not [what for what in life.outcomes if "failed" in what]


@cases(("moriio", "shm"), ("moriio", "nixl"), ("nixl", "shm"), writes=True)
def test_reads_and_writes_survive_it(life, path):
    """READ: as above.  WRITE: the peer that pushes moves by itself; for a push of which nothing
    proves that it cannot land any more both sides are asked for fresh blocks, into which it is
    received over the next backend, so that never two engines write one."""
    counters = dying(life, *path)
    assert counters.get("failover.fresh_blocks", 0) >= life.tried_again
    assert life.they_were_asked == life.tried_again
    victims = [c for c in life.their_changes if c[0] is life.victim]
    assert victims
    assert all(c[1:] == (*path, True) for c in victims)
    assert not [what for what in life.outcomes if "read failed" in what]


@pytest.mark.parametrize("life", [(("nixl", "shm"), False, POLICY)], indirect=True)
def test_reads_survive_their_own_engine(life):
    """The engine on this side ends: both peers are read over the next one, and nothing is lost."""
    life.traffic(0.5, life.victim, life.healthy)
    life.end_own_engine("nixl")
    life.until(lambda: len(life.changes) == 2, "two downgrades", 90, life.victim, life.healthy)
    life.serves("over shm", life.victim)
    life.serves("over shm", life.healthy)
    assert all((c.before, c.backend, c.down) == ("nixl", "shm", True) for c in life.changes)
    life.finish()
    print(life)
    life.judge(hit=False)
    assert not [what for what in life.outcomes if "failed" in what]


# ---- and back ----------------------------------------------------------------------------------

heals = pytest.mark.parametrize(
    "life",
    [(("moriio", "shm"), writes, HEALS) for writes in (False, True)],
    indirect=True,
    ids=["read", "read-write"],
)


def probes(life):
    """Good and failed probes of this side so far."""
    counters = life.agent.snapshot().counters
    failed = counters.get("failover.probes_failed", 0)
    return counters.get("failover.probes", 0) - failed, failed


def over_rdma(life, worker):
    """Work requests that our RDMA device and the peer's carry out for transfers of it alone."""
    life.alone(worker)
    ops = ("read", "write") if life.writes else ("read",)
    keys = [f"{worker.name} {op} received" for op in ops]
    goals = {key: life.outcomes[key] + 4 for key in keys}
    before = life.count_devices(worker)
    life.until(
        lambda: all(life.outcomes[key] >= goal for key, goal in goals.items()),
        "some transfers of one peer alone",
        60,
        worker,
    )
    after = life.count_devices(worker)
    return tuple(b - a for a, b in zip(before, after, strict=True))


@heals
def test_the_peer_goes_back_when_the_device_has_healed(life):
    """The RDMA device of a peer breaks under load and heals: down to shm, and back by itself, with
    no request lost and no byte wrong.  While it is broken every probe fails and nothing goes over
    it; after the way back everything does.  The other peer stays where it is."""
    victim, healthy = life.victim, life.healthy
    began = time.monotonic()

    def said(what):
        print(f"{time.monotonic() - began:6.2f} s  {what}")

    life.traffic(0.5, victim, healthy)

    def moved(count):
        theirs = [c for c in life.their_changes if c[0] is victim]
        return len(life.changes) >= count and (not life.writes or len(theirs) >= count)

    life.break_device(victim)
    said("broken")
    life.until(lambda: moved(1), "the way down", 90, victim, healthy)
    said(f"down: {life.changes}")
    life.settle("what was under way", victim)
    life.until(lambda: probes(life)[1] >= 2, "two failed probes", 60, victim, healthy)
    life.serves("over shm", victim)
    assert over_rdma(life, victim) == (0, 0)
    assert len(life.changes) == 1
    assert probes(life)[0] == 0

    life.mend_device(victim)
    said("healed")
    life.until(lambda: moved(2), "the way back", 60, victim, healthy)
    said(f"back: {life.changes[1:]}")
    life.serves("over moriio again", victim)
    ours, theirs = over_rdma(life, victim)
    said(f"work requests afterwards: {ours} for READs, {theirs} for WRITEs")
    life.finish()
    print(life)
    life.judge(hit=False)

    assert ours > 0
    assert (theirs > 0) == life.writes
    assert [(c.before, c.backend, c.down) for c in life.changes] == [
        ("moriio", "shm", True),
        ("shm", "moriio", False),
    ]
    both = [(victim, "moriio", "shm", True), (victim, "shm", "moriio", False)]
    assert life.their_changes == (both if life.writes else [])
    for counters in (life.agent.snapshot().counters, life.counters[victim])[: 1 + life.writes]:
        assert counters["failover.downgrades"] == counters["failover.to.shm"] == 1
        assert counters["failover.upgrades"] == counters["failover.to.moriio"] == 1
    assert life.agent.snapshot().backends == ()
    failed = [what for what in life.outcomes if "failed" in what]
    assert not [what for what in failed if not life.writes or "read" in what]


@pytest.mark.parametrize("life", [(("moriio", "shm"), False, HEALS)], indirect=True, ids=["read"])
def test_a_restarted_peer_is_reached_over_the_preferred_backend(life):
    """A peer is killed under load and restarted at its address: the new incarnation is served over
    the preferred backend at once, whatever was learnt of the old one."""
    old, healthy = life.victim, life.healthy
    life.gather(old, 2)
    life.traffic(0.5, old, healthy)
    before = life.agent.snapshot()
    began = time.monotonic()
    life.kill()
    life.pull_stock()
    life.replace_victim(same_port=True)
    life.settle("the transfers of the dead one", old)
    print(f"{time.monotonic() - began:6.2f} s  all transfers of the dead one have ended")
    life.until(lambda: life.victim in life.ready, "it is up", 60, healthy)
    life.serves("the new one", life.victim)
    print(f"{time.monotonic() - began:6.2f} s  the new one was served: {life.changes}")
    ours, _ = over_rdma(life, life.victim)
    print(f"work requests: {ours} for READs")
    after = life.agent.snapshot()
    life.finish()
    print(life)
    life.judge()

    assert ours > 0
    assert after.backends == ()
    (new,) = set(after.peers) - set(before.peers)
    assert not [c for c in life.changes if c.peer == new]
    assert not [c for c in life.their_changes if c[0] is not old]
