"""The hostile run at a size for every day; ``python -m kvxfer.testing.hostile`` does more."""

from __future__ import annotations

from fuzz_rig import rounds

from kvxfer.testing.hostile import SECRETS, HostilePlan, run


def test_a_live_agent_under_fire() -> None:
    """Peers with a key, without one, and raw sockets against an agent with keys on: it keeps
    serving a friend, frees nothing, tells nothing, and does not grow."""
    report = run(HostilePlan(messages=rounds(8000), seed=7))
    assert report.violations == []
    assert report.messages == rounds(8000)
    assert report.friend_transfers >= 3
    assert report.held_after == SECRETS
    assert report.counters["messages.refused.impostor"] > 0
    assert report.counters["messages.refused.no_ticket"] > 0
    assert report.counters["messages.rejected"] > 1000
