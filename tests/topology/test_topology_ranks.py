"""Ranks of unequal sizes: who reads from whom, which heads, whose acks.

The numbers are behaviours 1 to 6, 46 to 50, 54, 58, 62 to 65, 71, 72, 74 and 79, and the public
reports O10 to O12, O32, O33 and O36.
"""

from __future__ import annotations

import collections
import pickle

import pytest

from kvxfer.core.layout import HeadSlice
from kvxfer.core.layout.ranks import MAX_RANKS, facing
from kvxfer.core.topology import (
    PeerTable,
    Ranks,
    Role,
    SlotPicker,
    ack_ranks,
    fixed_port,
    fused_fits,
    head_slice,
    holders_to_release,
    overlapping_stages,
    peer_size,
    pod_of,
    replicates_heads,
    shard_heads,
    source_ranks,
    sources,
    target_ranks,
    targets,
)
from kvxfer.errors import GeometryError, InvalidInputError


def grouped(tp: int, rank: int = 0, heads: int = 8, **more: int) -> Ranks:
    return Ranks(tp_size=tp, tp_rank=rank, total_kv_heads=heads, **more)


def latent(tp: int, rank: int = 0, **more: int) -> Ranks:
    return Ranks(tp_size=tp, tp_rank=rank, latent=True, **more)


def entries(producer: Ranks, consumer: Ranks, **more: bool):
    return [
        (link.rank, link.heads.local, link.heads.remote, link.heads.count, link.writers)
        for link in targets(producer, consumer, **more)
        if link.heads
    ]


def test_1_equal_sizes() -> None:
    """Behaviour 1: at equal TP 4/4 rank r meets rank r."""
    for rank in range(4):
        assert source_ranks(grouped(4, rank), grouped(4)) == (rank,)
        assert holders_to_release(grouped(4, rank), grouped(4)) == (rank,)


def test_2_more_consumers() -> None:
    """Behaviour 2: TP 8 against 4: ranks 0..7 meet 0,0,1,1,2,2,3,3."""
    found = [source_ranks(grouped(8, rank), grouped(4)) for rank in range(8)]
    assert found == [(rank // 2,) for rank in range(8)]


def test_3_more_producers() -> None:
    """Behaviour 3: TP 4 against 8: the first of each pair, or both where both hold heads."""
    assert [holders_to_release(grouped(4, r), grouped(8))[0] for r in range(4)] == [0, 2, 4, 6]
    assert [source_ranks(latent(4, r), latent(8)) for r in range(4)] == [(0,), (2,), (4,), (6,)]
    assert [source_ranks(grouped(4, r), grouped(8)) for r in range(4)] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]


@pytest.mark.parametrize(("mine", "peer"), [(6, 4), (4, 6)])
def test_4_sizes_must_be_multiples(mine: int, peer: int) -> None:
    """Behaviour 4: TP 6 against 4 is an error that says so."""
    for of in (latent, lambda tp: grouped(tp, heads=12)):
        with pytest.raises(InvalidInputError, match="must be multiples"):
            holders_to_release(of(mine), of(peer))


@pytest.mark.parametrize(
    ("mine", "peer", "heads"), [(4, 4, 8), (8, 4, 4), (4, 8, 4), (4, 2, 4), (2, 4, 4)]
)
def test_5_replicated_heads_are_mapped(mine: int, peer: int, heads: int) -> None:
    """Behaviour 5: the pairs vLLM accepts, and those it rejects for their replicated heads."""
    for rank in range(mine):
        first, count = shard_heads(heads, mine, rank)
        held = set()
        for link in sources(grouped(mine, rank, heads), grouped(peer, heads=heads)):
            held |= {first + link.heads.local + i for i in range(link.heads.count)}
        assert held == set(range(first, first + count))


def test_6_expected_acks() -> None:
    """Behaviour 6: P4/D4 1, P8/D4 1, P4/D8 2, P4/D6 an error."""
    assert len(ack_ranks(grouped(4), grouped(4))) == 1
    assert len(ack_ranks(grouped(8), grouped(4))) == 1
    assert len(ack_ranks(grouped(4), grouped(8))) == 2
    with pytest.raises(InvalidInputError, match="multiples"):
        ack_ranks(latent(4), latent(6))


def test_o10_acks_by_rank() -> None:
    """Report O10: P2/D6 waits for 3 ranks, P6/D2 for 1, P2/D5 is an error, P1/D3 for 0, 1, 2."""
    assert ack_ranks(grouped(2, 1, 6), grouped(6, heads=6)) == {3, 4, 5}
    assert len(ack_ranks(grouped(6, 0, 6), grouped(2, heads=6))) == 1
    with pytest.raises(InvalidInputError, match="2 and 5"):
        ack_ranks(latent(2), latent(5))
    assert ack_ranks(latent(1), latent(3)) == {0, 1, 2}


def test_o11_fan_out_uses_the_peers_size() -> None:
    """Report O11: TP 8 to 4 targets 0..3 only; TP 2 to 4 splits them without gap or repeat."""
    reached = {p for rank in range(8) for p in target_ranks(grouped(8, rank), grouped(4))}
    assert reached == {0, 1, 2, 3}
    assert target_ranks(grouped(2, 0), grouped(4)) == (0, 1)
    assert target_ranks(grouped(2, 1), grouped(4)) == (2, 3)


def test_o12_an_absent_peer_size_is_never_one() -> None:
    """Report O12: absent, 0 and -1 are errors, or equal where a legacy adapter says so; text is an
    error."""
    for absent in (None, 0, -1):
        with pytest.raises(InvalidInputError, match="did not say its tp_size"):
            peer_size("tp_size", absent, 8)
        size = peer_size("tp_size", absent, 8, unknown_peer_size="equal")
        assert target_ranks(grouped(8, 5), grouped(size)) == (5,)
    assert target_ranks(grouped(8, 5, 16), grouped(peer_size("tp_size", 16, 8), heads=16)) == (
        10,
        11,
    )
    for bad in ("8", True, 2.0, -2):
        with pytest.raises(InvalidInputError, match="must be an int"):
            peer_size("tp_size", bad, 8, unknown_peer_size="equal")
    with pytest.raises(InvalidInputError, match="unknown_peer_size"):
        peer_size("tp_size", None, 8, unknown_peer_size="one")


# Head ranges --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        (grouped(2, 1), grouped(2), [(1, 0, 0, 4, 1)]),
        (grouped(2, 1), grouped(4), [(2, 0, 0, 2, 1), (3, 2, 0, 2, 1)]),
        (grouped(4, 3), grouped(2), [(1, 0, 2, 2, 2)]),
        (grouped(2, 1, 2), grouped(4, heads=2), [(2, 0, 0, 1, 1), (3, 0, 0, 1, 1)]),
        (
            grouped(2, 0, 4),
            grouped(8, heads=4),
            [(0, 0, 0, 1, 1), (1, 0, 0, 1, 1), (2, 1, 0, 1, 1), (3, 1, 0, 1, 1)],
        ),
        (grouped(8, 0, 2), grouped(2, heads=2), [(0, 0, 0, 1, 1)]),
        (grouped(8, 1, 2), grouped(2, heads=2), []),
        (latent(2, 1), latent(4), [(2, 0, 0, 1, 1), (3, 0, 0, 1, 1)]),
        (latent(4, 2), latent(2), [(1, 0, 0, 1, 1)]),
        (latent(4, 3), latent(2), []),
    ],
    ids=["46-equal", "46-out", "46-in", "47-out", "47-2-to-8", "47-8-to-2", "47-copy", "48-out",
         "48-in", "48-copy"],
)  # fmt: skip
def test_46_to_48_push_entries(producer, consumer, expected) -> None:
    """Behaviours 46 to 48: (target rank, my head, its head, heads, writers)."""
    assert entries(producer, consumer) == expected


def test_48_state_of_a_rank_whose_latent_cache_is_a_copy() -> None:
    """Behaviour 48: with recurrent state P3 of 4 still writes slice 1 of 2, and writers is 2."""
    (link,) = targets(latent(4, 3), latent(2), state=True)
    assert (link.rank, link.heads, link.writers) == (1, None, 2)
    flat = {"latent": True, "total": 8}
    cut = head_slice(latent(4, 3), latent(2, 1), role=Role.PRODUCER, total=8)
    assert cut == HeadSlice(0, 2, 2)
    assert flat["total"] // 2 == 2 * cut.count


@pytest.mark.parametrize(
    "make",
    [
        lambda: targets(latent(2), latent(3)),
        lambda: targets(latent(4), latent(6)),
        lambda: grouped(4, heads=6),
        lambda: grouped(8, heads=3),
    ],
    ids=["2-3", "4-6", "6 heads over 4", "3 heads over 8"],
)
def test_49_what_does_not_divide_is_refused(make) -> None:
    """Behaviour 49: TP 2 to 3, 4 to 6, 6 heads over 4 ranks and 3 over 8 are errors."""
    with pytest.raises(InvalidInputError, match="multiple"):
        make()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
def test_50_every_head_and_state_slice_once(is_latent: bool, state: bool) -> None:
    """Behaviour 50: over TP {1,2,4,8} squared and 1 to 16 heads, every decode head and every state
    unit is written exactly once, and the advertised writers are the real ones."""
    for p_tp in (1, 2, 4, 8):
        for d_tp in (1, 2, 4, 8):
            for heads in (1, 2, 4, 8, 16):
                of = latent if is_latent else lambda tp, rank, n=heads: grouped(tp, rank, n)
                wrote: collections.Counter = collections.Counter()
                units: collections.Counter = collections.Counter()
                real: collections.Counter = collections.Counter()
                said = {}
                for p in range(p_tp):
                    for link in targets(of(p_tp, p), of(d_tp, 0), state=state):
                        real[link.rank] += 1
                        said.setdefault(link.rank, set()).add(link.writers)
                        if link.heads:
                            for i in range(link.heads.count):
                                wrote[link.rank, link.heads.remote + i] += 1
                    for d in range(d_tp):
                        cut = head_slice(
                            latent(p_tp, p), latent(d_tp, d), role=Role.PRODUCER, total=heads
                        )
                        for i in range(cut.count if cut else 0):
                            units[d, cut.remote + i] += 1
                count = 1 if is_latent else shard_heads(heads, d_tp, 0)[1]
                assert wrote == {(d, h): 1 for d in range(d_tp) for h in range(count)}
                count = shard_heads(heads, d_tp, 0)[1]
                assert units == {(d, u): 1 for d in range(d_tp) for u in range(count)}
                assert said == {d: {real[d]} for d in range(d_tp)}


def test_72_head_offsets() -> None:
    """Behaviour 72: rank 3 of 8 from P1 with 8 heads: 3; 5 of 8 from P2: 1; 5 of 16 from P1: 2;
    latent 0."""
    assert head_slice(grouped(8, 3), grouped(1)).remote == 3
    assert head_slice(grouped(8, 5), grouped(2, 1)).remote == 1
    assert head_slice(grouped(16, 5), grouped(1)).remote == 2
    assert head_slice(latent(8, 5), latent(2, 1)).remote == 0


def test_72_a_layer_with_its_own_number_of_heads() -> None:
    """Behaviour 72: a draft model's layers have their own head count."""
    assert head_slice(grouped(8, 3, 16), grouped(1, heads=16), total=8) == HeadSlice(0, 3, 1)


@pytest.mark.parametrize(
    ("heads", "local", "peer", "fits"),
    [
        (2, 1, 2, False),
        (2, 2, 1, False),
        (2, 1, 1, True),
        (2, 2, 4, True),
        (2, 4, 2, True),
        (4, 2, 4, False),
        (4, 2, 2, True),
        (4, 4, 8, True),
    ],
)
def test_74_layouts_that_cannot_be_cut_by_head(heads, local, peer, fits) -> None:
    """Behaviour 74: fused linear attention fits where ranks hold equally many heads."""
    assert fused_fits(heads, local, peer) is fits


# Releases, copies, context parallelism ------------------------------------------------------


def test_62_holders_to_release() -> None:
    """Behaviour 62: D1 of 2, P2: (1); D3 of 4, P2: (1); D1 of 2, P4: (2,3); D0 of 1, P8: 0..7."""
    assert holders_to_release(grouped(2, 1), grouped(2)) == (1,)
    assert holders_to_release(grouped(4, 3), grouped(2)) == (1,)
    assert holders_to_release(grouped(2, 1), grouped(4)) == (2, 3)
    assert holders_to_release(grouped(1, 0), grouped(8)) == tuple(range(8))


@pytest.mark.parametrize("of", [grouped, latent])
def test_62_every_producer_rank_frees_after_its_last_ack(of) -> None:
    """Behaviour 62: releases and expected acks are one relation, seen from both sides; no producer
    rank is left out, and none waits for an ack that nobody sends."""
    for p_tp in (1, 2, 4, 8):
        for d_tp in (1, 2, 4, 8):
            sent = {(p, d) for d in range(d_tp) for p in holders_to_release(of(d_tp, d), of(p_tp))}
            wanted = {(p, d) for p in range(p_tp) for d in ack_ranks(of(p_tp, p), of(d_tp))}
            assert sent == wanted
            assert {p for p, _ in sent} == set(range(p_tp))
            for d in range(d_tp):
                for turn in range(8):
                    taken = source_ranks(of(d_tp, d), of(p_tp), turn=turn)
                    assert {(p, d) for p in taken} <= sent


def test_58_early_finish_releases_each_rank_once() -> None:
    """Behaviour 58: a decode side of TP 4 reaches P ranks 0,1 of 2 and 0..7 of 8; an absent size
    counts as its own 4 in the legacy adapter."""
    size = peer_size("tp_size", None, 4, unknown_peer_size="equal")
    for p_tp, wanted in ((2, {0, 1}), (8, set(range(8))), (size, set(range(4)))):
        found = {p for d in range(4) for p in holders_to_release(grouped(4, d), grouped(p_tp))}
        assert found == wanted


def test_63_legacy_peer_size() -> None:
    """Behaviour 63: a size of 0 counts as equal TP, in the legacy adapter only."""
    assert peer_size("tp_size", 0, 4, unknown_peer_size="equal") == 4


def test_64_copies_are_read_in_turn_or_fixed() -> None:
    """Behaviour 64: latent P4 to D1: successive turns read 0,1,2,3; a fixed turn always one; all
    four are released each time."""
    consumer, producer = latent(1), latent(4)
    assert [source_ranks(consumer, producer, turn=turn) for turn in range(6)] == [
        (0,), (1,), (2,), (3,), (0,), (1,),
    ]  # fmt: skip
    assert {source_ranks(consumer, producer, turn=2) for _ in range(4)} == {(2,)}
    assert holders_to_release(consumer, producer) == (0, 1, 2, 3)


def test_64_turns_spread_over_head_copies_too() -> None:
    """A turn also picks among ranks that hold copies of a grouped head, and still covers each
    head once."""
    consumer = grouped(1, heads=2)
    for turn in range(4):
        links = sources(consumer, grouped(8, heads=2), turn=turn)
        assert [link.rank for link in links] == [turn, 4 + turn]
        assert sorted(link.heads.local for link in links) == [0, 1]


def test_71_source_ranks() -> None:
    """Behaviour 71: TP2 rank 1 from P2: (1); TP4 rank 2 from P2: (1); TP1 from P2: (0,1)."""
    assert source_ranks(grouped(2, 1), grouped(2)) == (1,)
    assert source_ranks(grouped(4, 2), grouped(2)) == (1,)
    assert source_ranks(grouped(1), grouped(2)) == (0, 1)


def test_71_context_parallel_sources() -> None:
    """Behaviour 71: D1 from P8/dcp8: 0..7; D2/dcp2 rank 0 from P4/dcp4: (0,2); D4/dcp4 rank 3 from
    P2/dcp2: (1); each P waits for exactly its readers."""
    assert source_ranks(latent(1), latent(8, dcp_size=8)) == tuple(range(8))
    assert source_ranks(latent(2, 0, dcp_size=2), latent(4, dcp_size=4)) == (0, 2)
    assert source_ranks(latent(4, 3, dcp_size=4), latent(2, dcp_size=2)) == (1,)
    for d_tp, d_cp, p_tp, p_cp in ((1, 1, 8, 8), (2, 2, 4, 4), (4, 4, 2, 2), (4, 2, 8, 4)):
        consumer, producer = latent(d_tp, dcp_size=d_cp), latent(p_tp, dcp_size=p_cp)
        reads = {(p, d) for d in range(d_tp) for p in source_ranks(consumer.at(d), producer)}
        waits = {(p, d) for p in range(p_tp) for d in ack_ranks(producer.at(p), consumer)}
        assert reads <= waits
        if d_tp // d_cp == p_tp // p_cp:
            assert reads == waits


def _share_something(one: Ranks, other: Ranks) -> bool:
    """By counting out what each holds, in parts that are the same on both sides."""
    shards = max(one.head_shards, other.head_shards)
    places = max(one.dcp_size, other.dcp_size)

    def held(ranks: Ranks) -> set[tuple[int, int]]:
        shard, place = divmod(ranks.tp_rank, ranks.dcp_size)
        return {
            (s, p)
            for s in range(shards)
            for p in range(places)
            if s * ranks.head_shards // shards == shard and p % ranks.dcp_size == place
        }

    return bool(held(one) & held(other))


@pytest.mark.parametrize("mine", [(1, 1), (4, 1), (4, 2), (8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("theirs", [(1, 1), (2, 1), (4, 4), (8, 2), (16, 4), (12, 1)])
def test_ranks_that_face_each_other_share_something(
    mine: tuple[int, int], theirs: tuple[int, int]
) -> None:
    """Promise 6: who has to acknowledge is who holds some of the same, and nobody else."""
    one, other = (latent(tp, dcp_size=dcp) for tp, dcp in (mine, theirs))
    try:
        holders_to_release(one, other)
    except InvalidInputError:
        return  # sizes that do not divide
    for rank in range(one.tp_size):
        found = facing(one.at(rank), other)
        shared = [r for r in range(other.tp_size) if _share_something(one.at(rank), other.at(r))]
        assert list(found) == shared


@pytest.mark.parametrize(("tp", "pp"), [(MAX_RANKS + 1, 1), (512, 4), (2**20, 1), (1, 2**62)])
def test_more_ranks_than_an_instance_may_have(tp: int, pp: int) -> None:
    """Promise 9: sizes that a peer sends are not counted out before they are looked at."""
    with pytest.raises(InvalidInputError, match=f"tp_size={tp} times pp_size={pp} .* {MAX_RANKS}"):
        Ranks(tp_size=tp, pp_size=pp, latent=True)
    assert len(ack_ranks(latent(1), latent(MAX_RANKS))) == MAX_RANKS


def test_context_parallel_turns_must_match() -> None:
    """Two sides that deal tokens out in different turns are refused: no rank holds what another
    needs."""
    with pytest.raises(GeometryError, match="turns of 1 here and 4"):
        source_ranks(latent(2, dcp_size=2), Ranks(tp_size=2, dcp_size=2, interleave=4, latent=True))
    with pytest.raises(InvalidInputError, match="does not divide"):
        latent(4, dcp_size=3)


def test_79_peers_by_engine_and_stage() -> None:
    """Behaviour 79: keyed by (engine, pipeline rank), default 0; TP4 rank 1 faces P rank 0 of 2; a
    stage of TP 4 faces TP 2 rank 1 with ranks 2, 3 and holds copies."""
    peers = PeerTable(grouped(4, 1))
    peers.add("engine", grouped(2))
    assert holders_to_release(peers.mine, peers.get("engine")) == (0,)
    assert peers.layers("engine") == range(0)

    peers = PeerTable(grouped(2, 1, heads=2))
    peers.add("engine", grouped(1, heads=2, pp_size=2), range(8))
    peers.add("engine", grouped(4, heads=2, pp_size=2, pp_rank=1), range(8, 16))
    assert holders_to_release(peers.mine, peers.get("engine", 0)) == (0,)
    assert holders_to_release(peers.mine, peers.get("engine", 1)) == (2, 3)
    assert not replicates_heads(peers.get("engine", 0))
    assert replicates_heads(peers.get("engine", 1))
    assert peers.layers("engine", 1) == range(8, 16)
    with pytest.raises(InvalidInputError, match="no stage 2 of engine 'engine'"):
        peers.get("engine", 2)
    peers.remove("engine")
    assert len(peers) == 0


def test_peer_table_is_bounded() -> None:
    """A table of peers has a bound, and replacing a known stage is not growth."""
    peers = PeerTable(latent(1), max_peers=1)
    peers.add("a", latent(1))
    peers.add("a", latent(2))
    assert peers.get("a").tp_size == 2
    with pytest.raises(InvalidInputError, match="more than 1"):
        peers.add("b", latent(1))


def test_pipeline_stages_overlap_by_layers() -> None:
    """A stage meets those of the peer's stages that hold its layers; a layer without holder, or
    with two, is refused."""
    assert overlapping_stages(range(8, 24), [range(12), range(12, 24)]) == (0, 1)
    assert overlapping_stages(range(12, 24), [range(12), range(12, 24)]) == (1,)
    with pytest.raises(InvalidInputError, match="layer 12 is held by 0"):
        overlapping_stages(range(13), [range(12)])
    with pytest.raises(InvalidInputError, match="layer 3 is held by 2"):
        overlapping_stages(range(3, 4), [range(12), range(2, 24)])


# Data-parallel slots, ports -----------------------------------------------------------------


def test_o32_read_and_release_use_the_owners_rank() -> None:
    """Report O32: peer dp 4, tp 2, owner dp 3, my tp 1: port offset 3*2+1 = 7 for both."""
    owner = grouped(2, 1, dp_size=4, dp_rank=3)
    assert source_ranks(grouped(2, 1), owner) == holders_to_release(grouped(2, 1), owner) == (1,)
    assert fixed_port(7000, owner, Role.PRODUCER) == 7007


def test_o33_fixed_ports_are_distinct() -> None:
    """Report O33: base 15000, both roles, dp 2, tp 2: 8 distinct ports; base 65530 is refused."""
    ports = {
        fixed_port(15000, grouped(2, tp, dp_size=2, dp_rank=dp), role)
        for role in Role
        for dp in range(2)
        for tp in range(2)
    }
    assert ports == set(range(15000, 15008))
    with pytest.raises(InvalidInputError, match="65535"):
        fixed_port(65530, grouped(2, dp_size=2), Role.PRODUCER)
    staged = {
        fixed_port(9000, grouped(2, tp, dp_size=2, dp_rank=dp, pp_size=3, pp_rank=pp), role)
        for role in Role
        for dp in range(2)
        for pp in range(3)
        for tp in range(2)
    }
    assert staged == set(range(9000, 9024))


def test_54_pods() -> None:
    """Behaviour 54: global rank 9 with 8 per pod is rank 1 of the second pod: port base + 1."""
    host, rank = pod_of(9, 8, ["h1", "h2"])
    assert (host, fixed_port(7000, latent(1, dp_size=8, dp_rank=rank), Role.PRODUCER)) == (
        "h2",
        7001,
    )
    with pytest.raises(InvalidInputError, match="dp rank 16"):
        pod_of(16, 8, ["h1", "h2"])


@pytest.mark.parametrize(("instances", "dp", "picks", "each"), [(2, 8, 48, 3), (3, 2, 12, 2)])
def test_o36_slots_are_covered_evenly(instances, dp, picks, each) -> None:
    """Report O36: 2 x 8 over 48 picks gives each slot exactly 3, 3 x 2 over 12 each twice."""
    picker = SlotPicker(instances, dp)
    seen = collections.Counter(picker.pick() for _ in range(picks))
    assert seen == {(i, d): each for i in range(instances) for d in range(dp)}


def test_65_slots() -> None:
    """Behaviour 65: 2 x 8 reaches all 16; 3 instances get the first three; dp 1 has no rank."""
    picker = SlotPicker(2, 8)
    assert len({picker.pick() for _ in range(16)}) == 16
    picker = SlotPicker(3, 1)
    assert [picker.pick() for _ in range(4)] == [(0, None), (1, None), (2, None), (0, None)]
    with pytest.raises(InvalidInputError, match="at least 1"):
        SlotPicker(0, 1)


# The value ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tp_size": 0, "total_kv_heads": 8}, "tp_size"),
        ({"tp_size": 2, "tp_rank": 2, "total_kv_heads": 8}, r"tp_rank must lie in 0\.\.1"),
        ({"tp_size": 2, "dp_rank": 1, "total_kv_heads": 8}, "dp_rank"),
        ({"tp_size": True, "total_kv_heads": 8}, "tp_size must be an int"),
        ({"tp_size": "8", "total_kv_heads": 8}, "tp_size must be an int"),
        ({"tp_size": 2}, "total_kv_heads is missing"),
    ],
)
def test_ranks_are_checked(values, text) -> None:
    """A rank outside its size, a size that is no count, and missing heads are named."""
    with pytest.raises(InvalidInputError, match=text):
        Ranks(**values)


def test_ranks_are_values() -> None:
    """Ranks compare, hash and pickle."""
    ranks = grouped(4, 1, dp_size=2)
    assert pickle.loads(pickle.dumps(ranks)) == ranks
    assert hash(ranks.at(2)) == hash(grouped(4, 2, dp_size=2))


def test_models_must_agree() -> None:
    """A latent peer of a grouped model, or other head counts, are refused naming both."""
    with pytest.raises(GeometryError, match="8 KV heads here, a latent cache"):
        holders_to_release(grouped(2), latent(2))
    with pytest.raises(GeometryError, match="8 KV heads here, 16 KV heads"):
        holders_to_release(grouped(2), grouped(2, heads=16))
    with pytest.raises(InvalidInputError, match="total is missing"):
        head_slice(latent(2), latent(2), latent=False)
