"""Agents, keepers and network in any order: nothing is freed under a reader, and all ends."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from agent_rig import at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keeper_rig import KEEPER, LEASE, LONG, MARGIN, KeeperRig, KeptNode

from kvxfer.core.events import Declined, Event, Expired, Failed, Received, Role, Sent
from kvxfer.errors import InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind
from kvxfer.testing.keeper import StopAt

SIDES = st.sampled_from(["p", "c", "d"])
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["offer", "pull", "pull twice", "renew", "decline"]), st.none()),
    st.tuples(st.just("abort"), SIDES),
    st.tuples(st.just("gil"), st.tuples(SIDES, st.floats(0.1, 2.5 * LEASE))),
    st.tuples(st.just("stop"), st.tuples(SIDES, st.sampled_from(list(StopAt)))),
    st.tuples(st.just("go on"), SIDES),
    st.tuples(st.just("kill"), SIDES),
    st.tuples(st.just("time"), st.floats(0.01, 1.5 * LEASE)),
)


class Story:
    """Carries out a list of actions. ``c`` and ``d`` read, ``p`` holds."""

    def __init__(self, seed: int) -> None:
        self.rig = KeeperRig(seed, lose=0.03, duplicate=0.03, delay=0.01)
        self.rng = random.Random(seed)
        self.nodes: dict[str, KeptNode] = {}
        for name in "pcd":
            posts = [self._slow() for _ in range(64)]
            self.nodes[name] = self.rig.make(name, timeouts=LONG, abort_lease=0.5, posts=posts)
        for name in "cd":
            self.nodes[name].agent.connect([self.nodes["p"].agent.endpoint])
        self.rig.pass_time(1.0)
        self.offers: list[Any] = []
        self.ids: list[str] = []
        self.declined: set[tuple[str, str]] = set()

    def _slow(self) -> Fault | None:
        """Some reads take longer than two leases, some no time at all."""
        if self.rng.random() < 0.4:
            return None
        return Fault(kind=FaultKind.LATE, after=self.rng.uniform(0.1, 2.5 * LEASE))

    def close(self) -> None:
        for node in self.rig.kept:
            node.agent.close(0.0)

    def do(self, what: str, how: Any) -> None:
        p = self.nodes["p"]
        if what in ("offer", "pull", "pull twice", "renew", "decline"):
            if what == "offer" or not self.offers:
                transfer_id = f"t{len(self.ids)}"
                if len(self.ids) >= 12:
                    return
                self.ids.append(transfer_id)
                self.offers.append(p.agent.hold(transfer_id, at(0, len(self.ids))))
            offer = self.rng.choice(self.offers)
            for name in "cd" if what == "pull twice" else "c":
                self._use(self.nodes[name], offer, what)
        elif what == "abort":
            if self.ids:
                self.nodes[how].agent.abort(self.rng.choice(self.ids))
        elif what == "gil":
            self.nodes[how[0]].hold_gil(how[1])
        elif what == "stop":
            self.nodes[how[0]].kept.stop(how[1])
        elif what == "go on":
            self.nodes[how].kept.go_on()
        elif what == "kill":
            self.nodes[how].kept.kill()
        else:
            self.rig.pass_time(how)

    def _use(self, node: KeptNode, offer: Any, what: str) -> None:
        if (node.name, offer.transfer_id) in self.declined:
            return  # whoever said that it will not read must not
        if what == "renew":
            node.agent.renew([offer])
        elif what == "decline":
            node.agent.decline(offer)
            self.declined.add((node.name, offer.transfer_id))
        elif what != "offer":
            with contextlib.suppress(InvalidInputError):  # it is pulling that already
                node.agent.pull(offer, at(0, 1 + self.offers.index(offer)))

    def end(self) -> None:
        """Everybody goes on; everything must end in time."""
        for node in self.rig.kept:
            node.kept.go_on()
            node.held_until = 0.0
        self.rig.pass_time(0.2)
        p = self.nodes["p"]

        def quiet() -> bool:
            ended = {e.transfer_id for e in p.events if _ends_a_hold(e)}
            return ended == set(self.ids) and not any(
                any(node.tables.values()) or node.keeping._watched for node in self.rig.kept
            )

        bound = 2 * LONG.transfer + 2 * LEASE + MARGIN + KEEPER.hang_timeout + LONG.ack + 10
        self.rig.run(quiet, seconds=bound)
        self.rig.pass_time(1.0)
        for transfer_id in self.ids:
            ends = [e for e in p.events if e.transfer_id == transfer_id and _ends_a_hold(e)]
            assert len(ends) == 1, (transfer_id, ends)
        for node in self.rig.kept:
            keeper = node.kept.keeper
            assert keeper is not None
            assert len(keeper.holds) == 0
            assert len(keeper.watches) == 0
        for name in "cd":
            for event in self.nodes[name].of(Received):
                index = 1 + int(event.transfer_id[1:])
                assert self.nodes[name].content([index]) == p.content([index])


def _ends_a_hold(event: Event) -> bool:
    failed = isinstance(event, Failed) and event.role is Role.PRODUCER
    return failed or isinstance(event, (Sent, Expired, Declined))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(seed=st.integers(0, 2**16), actions=st.lists(ACTIONS, min_size=4, max_size=25))
def test_any_order_of_everything(seed: int, actions: list[tuple[str, Any]]) -> None:
    """Promises 4 and 5: sources outlive all grants, whatever is stopped, killed, lost or late."""
    tell(seed, actions)


def tell(seed: int, actions: list[tuple[str, Any]]) -> Story:
    story = Story(seed)
    try:
        for what, how in actions:
            story.do(what, how)
            story.rig.pass_time(0.02)
        story.end()
    finally:
        story.close()
    return story
