"""Several requests that share one transfer id (samples of one prompt), and users' own tags."""

from __future__ import annotations

import pickle

import pytest
from agent_rig import Rig, at
from test_ranks import Combiner, hand_down, instance

from kvxfer.core.events import (
    Declined,
    Drained,
    Expired,
    Failed,
    Gone,
    Quarantined,
    Received,
    Role,
    Sent,
)
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

# ---- owners ------------------------------------------------------------------------------------


def test_owners_of_one_hold_end_together(rig: Rig) -> None:
    """Report O15: three samples hold the same blocks: one offer, one event, for all three."""
    p, c = rig.node("p"), rig.node("c")
    offers = [p.agent.hold("t", at(0, 5, 6), owner=f"{n}_c", tag="parent") for n in range(3)]
    assert offers[0] == offers[1] == offers[2]
    c.agent.pull(offers[1], at(0, 1, 2))
    rig.run(lambda: bool(p.of(Sent)))
    assert [e.owners for e in p.of(Sent)] == [("0_c", "1_c", "2_c")]
    assert p.of(Sent)[0].tag == "parent"
    assert p.agent.hold("t", at(0, 9), owner="0_c").epoch != offers[0].epoch


@pytest.mark.parametrize(
    ("blocks", "owner"), [((5, 6), None), ((5, 7), "1_c"), ((5, 6), "0_c")], ids=str
)
def test_unrelated_owner_of_a_hold_is_refused(
    rig: Rig, blocks: tuple[int, ...], owner: str | None
) -> None:
    """Report O15: no name, other blocks, or the same name twice: refused, and told why."""
    p = rig.node("p")
    p.agent.hold("t", at(0, 5, 6), owner="0_c")
    with pytest.raises(InvalidInputError, match=r"'t' is (held already|under way)"):
        p.agent.hold("t", at(0, *blocks), owner=owner)
    assert len(p.agent._engine.producer.leases) <= 1


def test_owners_of_one_pull_are_published_together(rig: Rig) -> None:
    """Report O15: each sample pulls into its own blocks; one release, one event at the end."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    first = c.agent.pull(offer, at(0, 1), owner="0_c", owners=3)
    rig.pass_time(0.5)
    assert not c.of(Received)
    assert c.agent.pull(offer, at(0, 2), owner="1_c", owners=3) is first
    rig.pass_time(0.5)
    assert not c.of(Received)
    assert not p.of(Sent)
    c.agent.pull(offer, at(0, 3), owner="2_c", owners=3)
    rig.run(lambda: bool(p.of(Sent)))
    assert [e.owners for e in c.of(Received)] == [("0_c", "1_c", "2_c")]
    assert c.content([1]) == c.content([2]) == c.content([3]) == p.content([5])
    assert len(p.of(Sent)) == 1


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_decline_of_one_owner_leaves_the_others_alone(rig: Rig, when: str) -> None:
    """A decline is per owner: the others read, and the producer hears of a release."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    steps = ["pull 0", "pull 1"]
    steps.insert({"before": 0, "between": 1, "after": 2}[when], "decline 2")
    for step in steps:
        verb, number = step.split()
        if verb == "pull":
            c.agent.pull(offer, at(0, int(number) + 1), owner=number, owners=3)
        else:
            c.agent.decline(offer, owner=number, owners=3)
        rig.pass_time(0.3)
    rig.run(lambda: bool(p.of(Sent) or p.of(Declined)))
    assert p.of(Sent)
    assert c.of(Received)[0].owners == ("0", "1")
    assert c.content([1]) == c.content([2]) == p.content([5])
    rig.pass_time(1)
    assert not any(c.tables.values())


def test_when_all_owners_decline_the_producer_hears_of_it(rig: Rig) -> None:
    """Report O23 for several owners: freed at the last decline, not before."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.decline(offer, owner="0", owners=2)
    rig.pass_time(0.5)
    assert not p.of(Declined)
    c.agent.decline(offer, owner="1", owners=2)
    assert rig.run(lambda: bool(p.of(Declined))) < 0.2
    assert len(c.agent._declines) == 0


def test_owner_that_never_comes(rig: Rig) -> None:
    """Promise 4: the others fail by their deadline, with all their blocks; nothing is kept."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    handle = c.agent.pull(offer, at(0, 1), owner="0", owners=2)
    rig.run(lambda: handle.done, seconds=30)
    assert c.of(Failed)[0].kind is ErrorKind.TIMEOUT
    assert c.of(Failed)[0].owners == ("0",)
    other = p.agent.hold("u", at(0, 5))
    c.agent.decline(other, owner="0", owners=2)
    assert len(c.agent._declines) == 1
    rig.pass_time(40)
    assert len(c.agent._declines) == 0


@pytest.mark.parametrize(
    ("owner", "owners", "text"),
    [
        ("0", 2, "'0' has pulled"),
        ("1", 3, "says that 3 owners share"),
        ("", 2, "owner must be"),
        ("1", 0, "owners must be their number"),
        (None, 1, "for owners that were named"),
    ],
)
def test_owner_that_does_not_belong_is_refused(
    rig: Rig, owner: str | None, owners: int, text: str
) -> None:
    """A second unrelated owner of one transfer id is refused; the first one goes on."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(offer, at(0, 1), owner="0", owners=2)
    with pytest.raises(InvalidInputError, match=text):
        c.agent.pull(offer, at(0, 2), owner=owner, owners=owners)
    if owner is not None:
        with pytest.raises(InvalidInputError, match=text):
            c.agent.decline(offer, owner=owner, owners=owners)
    assert c.tables["pinned_blocks"] == 1
    c.agent.pull(offer, at(0, 2), owner="1", owners=2)
    rig.run(lambda: bool(c.of(Received)))


def test_first_owner_that_is_refused_leaves_the_declines(rig: Rig) -> None:
    """A pull with a bad block id changes nothing, also not what other owners said before."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.decline(offer, owner="1", owners=2)
    with pytest.raises(InvalidInputError, match="outside"):
        c.agent.pull(offer, at(0, 99), owner="0", owners=2)
    with pytest.raises(InvalidInputError, match="'1' has declined"):
        c.agent.pull(offer, at(0, 1), owner="1", owners=2)
    c.agent.pull(offer, at(0, 1), owner="0", owners=2)
    rig.run(lambda: bool(c.of(Received)))


def test_owners_over_several_ranks(rig: Rig) -> None:
    """The scheduler half combines ranks and owners: one event for all of both."""
    prefill, ps = instance(rig, "p", 2)
    decode, cs = instance(rig, "c", 2)
    offer = prefill.hold("t", at(0, 5), owner="p0", tag={"request": 1})
    assert prefill.hold("t", at(0, 5), owner="p1") is offer
    with pytest.raises(InvalidInputError, match="under way"):
        prefill.hold("t", at(0, 6), owner="p2")
    hand_down(prefill, ps)
    for number in range(2):
        decode.pull(offer, at(0, number + 1), owner=f"d{number}", owners=3, tag="decode")
        hand_down(decode, cs)
        rig.pass_time(0.2)
    decode.decline(offer, owner="d2", owners=3)
    hand_down(decode, cs)
    sent, received = Combiner(prefill, ps), Combiner(decode, cs)
    rig.run(lambda: bool(received()) and any(isinstance(e, Sent) for e in sent()))
    (got,) = [e for e in received.events if isinstance(e, Received)]
    assert (got.owners, got.tag) == (("d0", "d1"), "decode")
    (told,) = [e for e in sent.events if isinstance(e, Sent)]
    assert (told.owners, told.tag) == (("p0", "p1"), {"request": 1})


# ---- tags --------------------------------------------------------------------------------------


def test_tags_come_back_in_every_event(rig: Rig) -> None:
    """Whatever happens to it, a transfer's events carry what its user hung on it, untouched."""
    tag = object()
    p, c = rig.node("p"), rig.node("c")
    c.agent.pull(p.agent.hold("t", at(0, 5), tag=tag), at(0, 1), tag=("r", 1))
    c.agent.accept("w", at(0, 3), tag=3)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer0"], tag=4)
    p.agent.push("w", at(0, 7), to=c.agent.endpoint, layers=["layer1"])
    p.agent.seal("w")
    c.agent.decline(p.agent.hold("u", at(0, 5), tag=5))
    p.agent.hold("v", at(0, 5), tag=6)
    c.agent.accept("x", at(0, 4), deadline=0.5, tag=7)
    rig.run(lambda: bool(p.of(Expired)))
    assert p.of(Sent, "t")[0].tag is tag
    assert c.of(Received, "t")[0].tag == ("r", 1)
    assert c.of(Received, "w")[0].tag == 3
    assert p.of(Sent, "w")[0].tag == 4
    assert p.of(Declined)[0].tag == 5
    assert p.of(Expired)[0].tag == 6
    assert c.of(Failed)[0].tag == 7


def test_tags_come_back_in_what_follows_a_failure(rig: Rig) -> None:
    """Failed, Quarantined, Drained and Gone; also where the order itself was refused."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    p, c = rig.node("p", lease=2.0), rig.node("c", plan=plan, grant_interval=30.0)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1), tag="mine")
    rig.run(lambda: bool(c.of(Quarantined)))
    c.agent.reclaim("t")
    rig.run(lambda: bool(c.of(Drained)))
    for kind in (Failed, Quarantined, Drained):
        assert [e.tag for e in c.of(kind)] == ["mine"], kind
    assert {e.tag for e in c.of(Gone)} <= {"mine"}
    p.agent.hold("bad", at(0, 5), readers=[], tag="refused")
    rig.run(lambda: bool(p.of(Failed)))
    assert p.of(Failed)[0].tag == "refused"
    handle = c.agent.accept("open", at(0, 9), tag="open")
    c.agent.close(0.0)
    rig.nodes.remove(c)
    assert [e.tag for e in c.agent.poll() if e.transfer_id == "open"] == ["open"]
    assert handle.tag == "open"


def test_events_with_tags_pickle() -> None:
    """Engines move events between processes: a tag that pickles arrives equal."""
    event = Drained(transfer_id="t", tag=("r", 1), owners=("a",), role=Role.CONSUMER)
    assert pickle.loads(pickle.dumps(event)) == event
