"""READ through the agent: hold, pull, release, in virtual time."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from agent_rig import Rig, at

from kvxfer.core.events import Declined, Drained, Expired, Failed, Gone, Quarantined, Received, Sent
from kvxfer.core.layout import KVLayout
from kvxfer.core.offer import Offer
from kvxfer.core.verdict import EngineError
from kvxfer.errors import CapacityError, ErrorKind, HandshakeError, InvalidInputError
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

SQ_FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)


def test_bytes_arrive_and_both_sides_are_told_once(rig: Rig) -> None:
    """Promises 1 and 12: Received means that all bytes are there; each side ends exactly once."""
    p, c = rig.node("p"), rig.node("c", num_blocks=8)
    offer = Offer.from_json(p.agent.hold("t", at(0, 5, 9, 2)).to_json())
    handle = c.agent.pull(offer, at(0, 1, 7, 3))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([1, 7, 3]) == p.content([5, 9, 2])
    assert len(c.of(Received)) == len(p.of(Sent)) == 1
    assert handle.result().nbytes == c.of(Received)[0].nbytes == len(p.content([5, 9, 2]))
    rig.pass_time(1)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_prefix_hit_pairs_by_position(rig: Rig) -> None:
    """Report O48: what decode already holds is not paired by count."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, *range(8)))
    before = c.content([12])
    c.agent.pull(offer, at(6, 10, 11, 12), uncovered_local=1)
    rig.run(lambda: bool(c.of(Received)))
    assert c.content([10, 11]) == p.content([6, 7])
    assert c.content([12]) == before


def test_empty_list_releases_only(rig: Rig) -> None:
    """Report O47: a full prefix hit reads nothing and still releases the producer."""
    p, c = rig.node("p"), rig.node("c")
    before = c.content(list(range(16)))
    c.agent.pull(p.agent.hold("t", at(0, 1, 2)), at(0))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.of(Received)[0].nbytes == 0
    assert c.content(list(range(16))) == before


def test_parts_are_published_together(rig: Rig) -> None:
    """Promise 4: layer by layer, nothing is published before the last part is terminal."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 4))
    first = c.agent.pull(offer, at(0, 6), layers=["layer0"], last=False)
    rig.pass_time(1)
    assert not c.of(Received)
    assert c.memory["layer0"][:, 6].tobytes() == p.memory["layer0"][:, 4].tobytes()
    assert c.agent.pull(offer, at(0, 6), layers=["layer1"]) is first
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([6]) == p.content([4])


@pytest.mark.parametrize("kind", [FaultKind.REFUSE, FaultKind.REFUSE_VALUE])
def test_full_queue_is_retried(rig: Rig, kind: FaultKind) -> None:
    """Report O01: "SQ full" is retried, the retries are counted, and nothing fails."""
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=kind, error=SQ_FULL)] * 5)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    assert c.content([1]) == p.content([5])
    assert c.counters["posts.retried.backpressure"] == 5
    assert not c.of(Failed)


def test_partial_post_is_reposted_whole(rig: Rig) -> None:
    """Promise 6: what may have been half-posted is posted again into still pinned memory."""
    partial = EngineError(
        backend="moriio",
        code=13,
        message="ibv_post_send failed with 12: Cannot allocate memory (posted 3/6 WRs)",
    )
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=FaultKind.PARTIAL, error=partial, after=0.3)])
    c.agent.pull(p.agent.hold("t", at(0, 5, 6)), at(0, 1, 2))
    took = rig.run(lambda: bool(c.of(Received)))
    assert c.content([1, 2]) == p.content([5, 6])
    assert took >= 0.3, "published before the half-posted attempt was drained"


def test_unknown_error_is_not_retried_and_names_itself(rig: Rig) -> None:
    """Unmatched errors are UNKNOWN: one attempt, counted, with the engine's words."""
    odd = EngineError(backend="moriio", code=99, message="something new")
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=FaultKind.REFUSE_VALUE, error=odd)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    failed = c.of(Failed)[0]
    assert failed.kind is ErrorKind.UNKNOWN
    assert failed.drained
    assert "something new" in str(failed.error)
    assert len(failed.error.history) == 1


def test_abort_in_flight_keeps_blocks_until_drained(rig: Rig) -> None:
    """Report O21: blocks are not reusable before the write into them has ended."""
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE, after=0.8)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    handle.abort()
    rig.run(lambda: handle.done)
    failed = c.of(Failed)[0]
    assert failed.kind is ErrorKind.ABORTED
    assert not failed.drained
    other = p.agent.hold("u", at(0, 6))
    with pytest.raises(InvalidInputError, match=r"block 1 of group 0 belongs to transfer 't'"):
        c.agent.pull(other, at(0, 1))
    rig.run(lambda: bool(c.of(Drained)))
    assert c.of(Drained)[0].blocks == ((1,),)
    c.agent.pull(other, at(0, 1))
    rig.run(lambda: bool(c.of(Received, "u")))
    assert c.content([1]) == p.content([6])


def test_abort_is_not_overwritten_by_success(rig: Rig) -> None:
    """Report O55: aborted stays aborted although the data completes later."""
    p = rig.node("p")
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE_REPORT, after=0.3)])
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: c.tables["in_flight_pieces"] > 0)
    handle.abort()
    rig.pass_time(2)
    assert [e.kind for e in c.of(Failed)] == [ErrorKind.ABORTED]
    assert not c.of(Received)


def test_silent_engine_ends_by_deadline_then_fence(rig: Rig) -> None:
    """Promise 4 and report O04: an engine that never reports anything cannot hold a transfer."""
    p = rig.node("p", lease=60.0)
    c = rig.node("c", posts=[Fault(kind=FaultKind.NEVER)])
    began = rig.clock.now()
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    assert rig.clock.now() - began == pytest.approx(5.0, abs=0.1)
    assert c.of(Failed)[0].kind is ErrorKind.TIMEOUT
    assert not c.of(Failed)[0].drained
    rig.run(lambda: bool(c.of(Drained)))
    assert c.of(Drained)[0].drained_by == "fence"


def test_no_proof_means_quarantine_and_not_ready(rig: Rig) -> None:
    """Promise 3: without a proof blocks are quarantined, visibly, until somebody reclaims them."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    from kvxfer.agent.config import Limits

    p = rig.node("p", lease=60.0)
    c = rig.node("c", plan=plan, limits=Limits(quarantined=1))
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Quarantined)))
    assert not c.of(Drained)
    assert not c.agent.health().ready
    assert [q.transfer_id for q in c.agent.snapshot().quarantine] == ["t"]
    refused = c.agent.pull(p.agent.hold("u", at(0, 6)), at(0, 2))
    rig.run(lambda: refused.done)
    assert refused.error is not None
    assert "quarantine" in str(refused.error)
    c.agent.reclaim("t")
    rig.run(lambda: bool(c.of(Drained, "t")))
    assert c.of(Drained, "t")[0].drained_by == "reclaim"
    assert c.agent.health().ready
    assert c.tables["pinned_blocks"] == 0


def test_a_late_fence_ends_the_quarantine(rig: Rig) -> None:
    """Promise 3: a fence that is done only after the blocks went into quarantine is as good a
    proof: they come back by themselves."""
    late = Fault(kind=FaultKind.LATE, after=8.0)
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[late] * 9)
    p, c = rig.node("p", lease=60.0), rig.node("c", plan=plan)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Quarantined)))
    began = rig.clock.now()
    rig.run(lambda: bool(c.of(Drained)))
    assert rig.clock.now() - began == pytest.approx(8.0 - 1.0, abs=0.2)  # Timeouts.drain is 1
    assert c.of(Drained)[0].drained_by == "fence"
    assert c.agent.snapshot().quarantine == ()
    assert c.tables["pinned_blocks"] == 0


def test_decline_frees_at_once(rig: Rig) -> None:
    """Report O23: declining needs no link, no caches and no pull."""
    p, c = rig.node("p"), rig.node("c")
    c.agent.decline(p.agent.hold("t", at(0, 5)))
    assert rig.run(lambda: bool(p.of(Declined))) < 0.1
    rig.pass_time(1)
    assert not any(p.tables.values())
    assert not any(c.tables.values())


def test_expiry_frees_and_late_reader_is_refused(rig: Rig) -> None:
    """Promise 5 and report O27: free at lease end plus margin; a late reader fails."""
    p, c = rig.node("p", lease=3.0, lease_margin=0.5), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    assert rig.run(lambda: bool(p.of(Expired))) == pytest.approx(3.5, abs=0.02)
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.EXPIRED
    assert c.of(Failed)[0].drained
    assert c.counters.get("pull.bytes", 0) == 0


def test_reader_is_told_that_the_hold_is_gone(rig: Rig) -> None:
    """Promise 5: an open reader gets one Gone and does not publish."""
    p = rig.node("p", lease=1.0, lease_margin=0.1)
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE_REPORT)], grant_interval=30.0)
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(p.of(Expired)))
    rig.run(lambda: bool(c.of(Failed)))
    rig.pass_time(1)
    assert not c.of(Received)
    assert c.of(Failed)[0].kind is ErrorKind.EXPIRED
    assert len(c.of(Gone)) <= 1


def test_active_pull_renews_its_lease(rig: Rig) -> None:
    """A pull that takes longer than the lease lives, because it renews."""
    p = rig.node("p", lease=1.0, lease_margin=0.1)
    c = rig.node("c", posts=[Fault(kind=FaultKind.LATE, after=4.0)])
    c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: bool(c.of(Received)))
    assert c.content([1]) == p.content([5])


def test_renew_keeps_a_waiting_request_alive(rig: Rig) -> None:
    """Requests in decode's queue keep their holds, and their pull needs no new round trip."""
    p, c = rig.node("p", lease=2.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    for _ in range(8):
        c.agent.renew([offer])
        rig.pass_time(1.0)
    assert not p.of(Expired)
    given = p.counters["grants.given"]
    handle = c.agent.pull(offer, at(0, 1))
    rig.run(lambda: handle.done)
    assert c.content([1]) == p.content([5])
    assert p.counters["grants.given"] == given


def test_abort_of_a_hold_only_shortens_it(rig: Rig) -> None:
    """Report O20: aborting what waits for a reader does not free under it."""
    p = rig.node("p", lease=30.0, abort_lease=1.0)
    p.agent.hold("t", at(0, 5))
    rig.pass_time(0.5)
    p.agent.abort("t")
    rig.pass_time(0.5)
    assert p.tables["holds"] == 1
    assert rig.run(lambda: bool(p.of(Expired))) < 1.6


def test_release_lost_ten_times(rig: Rig) -> None:
    """Promise 6: the release is re-sent until confirmed; twice equals once."""
    p, c = rig.node("p", lease=30.0), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(offer, at(0, 1))
    carry, lost = rig.network.carry, []

    def lossy(source, target, route, data) -> None:  # type: ignore[no-untyped-def]
        if b"release" in data and len(lost) < 10:
            lost.append(data)
        else:
            carry(source, target, route, data)
            if b"release" in data:
                carry(source, target, route, data)

    rig.network.carry = lossy  # type: ignore[method-assign]
    rig.run(lambda: bool(p.of(Sent)))
    rig.pass_time(2)
    assert len(lost) == 10
    assert len(p.of(Sent)) == 1
    assert p.counters["messages.duplicate"] == 1
    assert c.tables["unconfirmed"] == 0


def test_consumed_reference_is_refused(rig: Rig) -> None:
    """Report O53: the same reference pulled again after its release is refused, not served."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(offer, at(0, 1))
    rig.run(lambda: bool(p.of(Sent)))
    again = c.agent.pull(offer, at(0, 2))
    rig.run(lambda: again.done)
    assert c.of(Failed)[0].kind is ErrorKind.STALE
    assert "consumed" in str(c.of(Failed)[0].error)


def test_reference_to_an_older_hold_is_refused(rig: Rig) -> None:
    """Report O53: the id is used again; the old reference does not read the new blocks."""
    p, c = rig.node("p"), rig.node("c")
    old = p.agent.hold("t", at(0, 5))
    c.agent.decline(old)
    rig.run(lambda: bool(p.of(Declined)))
    p.agent.hold("t", at(0, 6))
    handle = c.agent.pull(old, at(0, 1))
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.STALE
    assert p.tables["holds"] == 1


def test_pull_before_the_hold_is_normal(rig: Rig) -> None:
    """The scheduler's offer may reach decode before the worker was told to hold."""
    p, c = rig.node("p"), rig.node("c")
    import attrs

    offer = attrs.evolve(p.agent.hold("other", at(0, 4)), transfer_id="t", epoch=7)
    c.agent.pull(offer, at(0, 1))
    rig.pass_time(0.5)
    p.agent._hold("t", 7, 3.0)
    rig.run(lambda: bool(p.of(Sent, "t")))
    assert c.content([1]) == p.content([4])


def test_decline_before_the_hold_is_normal(rig: Rig) -> None:
    """An ACK that arrives before the orders is buffered and applied once."""
    p, c = rig.node("p"), rig.node("c")
    import attrs

    offer = attrs.evolve(p.agent.hold("other", at(0, 4)), transfer_id="t", epoch=7)
    c.agent.decline(offer)
    rig.pass_time(0.5)
    assert p.counters["acks.early"] == 1
    p.agent._hold("t", 7, 3.0)
    rig.run(lambda: bool(p.of(Declined, "t")))
    assert "other" in [h.transfer_id for h in p.agent._engine.producer.leases]


def test_offer_of_a_dead_incarnation_fails(rig: Rig) -> None:
    """Promise 10: a producer restarted at the same address does not serve the old life's offers."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    import attrs

    old = attrs.evolve(offer, endpoints=(attrs.evolve(offer.endpoints[0], incarnation="0" * 16),))
    handle = c.agent.pull(old, at(0, 1))
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.STALE
    assert "restarted" in str(c.of(Failed)[0].error)


def test_unreachable_producer_fails_by_connect_deadline(rig: Rig) -> None:
    """Promise 7: no peer, no hang; the next pull starts a fresh handshake (report O56)."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    rig.nodes.remove(p)  # nobody runs it
    handle = c.agent.pull(offer, at(0, 1))
    assert rig.run(lambda: handle.done) == pytest.approx(2.0, abs=0.1)
    assert c.of(Failed)[0].kind is ErrorKind.HANDSHAKE
    assert c.of(Failed)[0].drained
    rig.nodes.append(p)
    again = c.agent.pull(p.agent.hold("u", at(0, 5)), at(0, 1))
    rig.run(lambda: again.done)
    assert c.content([1]) == p.content([5])
    rig.run(lambda: bool(p.of(Failed, "t")))  # the failed pull told that it is finished


def test_fingerprints_must_match(rig: Rig) -> None:
    """Promise 11: equal geometry of another model is refused, with both values."""
    p, c = rig.node("p", fingerprint="llama"), rig.node("c", fingerprint="qwen")
    with pytest.raises(HandshakeError, match=r"'llama'.*'qwen'"):
        c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))


def test_geometry_is_compared_at_the_handshake(rig: Rig) -> None:
    """Promise 11: what cannot be mapped is refused with both geometries, before reading."""
    p, c = rig.node("p"), rig.node("c", heads=3)
    handle = c.agent.pull(p.agent.hold("t", at(0, 5)), at(0, 1))
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.HANDSHAKE


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (at(0, 16), r"block id 16 of group 0 is outside 0\.\.15"),
        (at(0, -1), r"block id -1 of group 0 is outside 0\.\.15"),
        (at(0, 3, 3), "block id 3 of group 0 is listed twice"),
    ],
)
def test_bad_block_ids_are_refused_at_once(rig: Rig, blocks, text: str) -> None:  # type: ignore[no-untyped-def]
    """Bad input raises on the caller's thread, names value and range, and leaves nothing behind."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5, 6))
    with pytest.raises(InvalidInputError, match=text):
        c.agent.pull(offer, blocks)
    assert not any(c.tables.values())
    handle = c.agent.pull(offer, at(0, 1, 2))
    rig.run(lambda: handle.done)
    assert c.content([1, 2]) == p.content([5, 6])


def test_producer_ids_out_of_range_fail_before_posting(rig: Rig) -> None:
    """Report O53: ids are checked against the peer's range; nothing is posted."""
    import attrs

    from kvxfer.core.layout import Blocks

    p, c = rig.node("p"), rig.node("c")
    offer = attrs.evolve(p.agent.hold("t", at(0, 5, 6)), groups=(Blocks.at(0, [3, 16]),))
    handle = c.agent.pull(offer, at(0, 1, 2))
    rig.run(lambda: handle.done)
    assert c.of(Failed)[0].kind is ErrorKind.INVALID
    assert "16" in str(c.of(Failed)[0].error)
    assert "post" not in c.transport.counters or c.transport.counters["post"] == 0


def test_same_transfer_twice_is_refused(rig: Rig) -> None:
    """Report O54: an id cannot be started again before its first use has ended."""
    p, c = rig.node("p"), rig.node("c")
    offer = p.agent.hold("t", at(0, 5))
    c.agent.pull(offer, at(0, 1))
    with pytest.raises(InvalidInputError, match="under way"):
        c.agent.pull(offer, at(0, 2))
    with pytest.raises(InvalidInputError, match="under way"):
        p.agent.hold("t", at(0, 5))


def test_transfer_limit_is_a_failed_event(rig: Rig) -> None:
    """Promise 8: what exceeds a table is refused with the limit in the text."""
    from kvxfer.agent.config import Limits

    p, c = rig.node("p"), rig.node("c", limits=Limits(transfers=1))
    c.agent.pull(p.agent.hold("a", at(0, 5)), at(0, 1))
    second = c.agent.pull(p.agent.hold("b", at(0, 6)), at(0, 2))
    rig.run(lambda: second.done)
    assert second.error is not None
    assert "1 transfers" in str(second.error)
    rig.run(lambda: bool(c.of(Received, "a")))
    _ = CapacityError


def test_one_layout_for_several_views_begins_where_each_view_begins(rig: Rig) -> None:
    """Layers that are views of one array do not silently all mean its first bytes (promise 11)."""
    nodes = []
    for name in ("p", "c"):
        node = rig.node(name)
        whole = np.random.default_rng(len(nodes)).integers(0, 256, (3, 8, 64), dtype=np.uint8)
        flat = KVLayout(
            num_blocks=8,
            block_stride=64,
            kernel_tokens=4,
            token_stride=16,
            head_nbytes=16,
            dtype="uint8",
        )
        node.agent.register_kv_caches({f"l{i}": whole[i] for i in range(3)}, flat)
        nodes.append((node, whole))
    (p, source), (c, target) = nodes
    c.agent.pull(p.agent.hold("t", at(0, 1, 2)), at(0, 5, 6))
    rig.run(lambda: bool(c.of(Received)))
    assert c.of(Received)[0].nbytes == 3 * 2 * 64
    assert (target[:, 5:7] == source[:, 1:3]).all()


def test_layouts_that_cannot_be_meant_are_refused(rig: Rig) -> None:
    """An offset before the buffer, and two layouts from the same byte: both are named."""
    p = rig.node("p")
    whole = np.zeros((2, 8, 64), dtype=np.uint8)
    flat = KVLayout(
        num_blocks=8,
        block_stride=64,
        kernel_tokens=4,
        token_stride=16,
        head_nbytes=16,
        dtype="uint8",
    )
    with pytest.raises(InvalidInputError, match=r"begins at byte 0 of its storage.*byte 512"):
        p.agent.register_kv_caches({"a": whole[1]}, {"a": flat})
    other = attrs.evolve(flat, kernel_tokens=2, token_stride=32, head_nbytes=32)
    with pytest.raises(InvalidInputError, match="'a' and 'b' of group 0 begin at the same byte"):
        p.agent.register_kv_caches({"a": whole, "b": whole}, {"a": flat, "b": other})


def test_layers_that_share_a_cache_move_it_once(rig: Rig) -> None:
    """KV sharing between layers: the second name moves nothing of its own, READ and WRITE."""
    nodes = []
    for name in ("p", "c"):
        node = rig.node(name)
        memory = np.random.default_rng(len(nodes)).integers(0, 256, (8, 64), dtype=np.uint8)
        flat = KVLayout(
            num_blocks=8,
            block_stride=64,
            kernel_tokens=4,
            token_stride=16,
            head_nbytes=16,
            dtype="uint8",
        )
        node.agent.register_kv_caches({"a": memory, "b": memory}, flat)
        nodes.append((node, memory))
    (p, source), (c, target) = nodes
    c.agent.pull(p.agent.hold("t", at(0, 1, 2)), at(0, 5, 6), layers=["a", "b"])
    rig.run(lambda: bool(c.of(Received)))
    assert c.of(Received)[0].nbytes == 2 * 64
    assert (target[5:7] == source[1:3]).all()
    c.agent.accept("w", at(0, 0))
    p.agent.push("w", at(0, 3), to=c.agent.endpoint, layers=["a"])
    p.agent.push("w", at(0, 3), to=c.agent.endpoint, layers=["b"])
    p.agent.seal("w")
    rig.run(lambda: bool(c.of(Received, "w")))
    assert (target[0] == source[3]).all()
    rig.pass_time(1)
    assert not any(p.tables.values())
