"""One rank among others: which heads and tokens it holds, and what it shares with a peer's rank."""

from __future__ import annotations

import enum

import attrs
from attrs import validators as v

from kvxfer.core.layout._checks import is_count, is_nonnegative
from kvxfer.core.layout.blocks import TokenShare
from kvxfer.core.layout.heads import HeadSlice
from kvxfer.errors import GeometryError, InvalidInputError

__all__ = [
    "MAX_RANKS",
    "Ranks",
    "Role",
    "check_pair",
    "facing",
    "fused_fits",
    "head_slice",
    "replicates_heads",
    "shard_heads",
]


MAX_RANKS = 1024
"""Ranks of one instance (``tp_size * pp_size``), of which a peer tells us.

Each of them may have to acknowledge, so they are counted out: a number without bound would let one
message of a few bytes take any amount of time and memory.  The widest instances that serve have
tens of ranks; data-parallel replicas do not count.
"""


class Role(enum.Enum):
    """Which side of the transfer a rank is on, whoever issues the reads or writes."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


@attrs.frozen(kw_only=True)
class Ranks:
    """One rank and the sizes around it.

    Attributes:
        tp_size, tp_rank: tensor parallelism.
        dp_size, dp_rank: data-parallel replicas; a request belongs to one of them.
        pp_size, pp_rank: pipeline stages; layers are matched by name across them.
        dcp_size: ranks among which the tokens of one head shard are dealt out (a divisor of
            ``tp_size``); ``interleave`` tokens at a time.
        total_kv_heads: KV heads of the whole model; None only for latent caches.
        latent: the cache is one latent vector per token, the same on every rank (MLA).

    Raises:
        InvalidInputError: a size or rank is out of range, there are more than ``MAX_RANKS`` of
            them, or heads do not divide over the ranks.
    """

    tp_size: int = attrs.field(validator=is_count)
    tp_rank: int = attrs.field(default=0, validator=is_nonnegative)
    dp_size: int = attrs.field(default=1, validator=is_count)
    dp_rank: int = attrs.field(default=0, validator=is_nonnegative)
    pp_size: int = attrs.field(default=1, validator=is_count)
    pp_rank: int = attrs.field(default=0, validator=is_nonnegative)
    dcp_size: int = attrs.field(default=1, validator=is_count)
    interleave: int = attrs.field(default=1, validator=is_count)
    total_kv_heads: int | None = attrs.field(default=None, validator=v.optional(is_count))
    latent: bool = attrs.field(default=False, validator=v.instance_of(bool))

    def __attrs_post_init__(self) -> None:
        for axis in ("tp", "dp", "pp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if rank >= size:
                raise InvalidInputError(f"{axis}_rank must lie in 0..{size - 1}, not {rank}")
        if self.tp_size * self.pp_size > MAX_RANKS:
            raise InvalidInputError(
                f"tp_size={self.tp_size} times pp_size={self.pp_size} makes more than {MAX_RANKS} "
                "ranks, the most that one instance may have"
            )
        if self.tp_size % self.dcp_size:
            raise InvalidInputError(
                f"dcp_size={self.dcp_size} does not divide tp_size={self.tp_size}"
            )
        if self.total_kv_heads is None:
            if not self.latent:
                raise InvalidInputError(
                    "total_kv_heads is missing",
                    next_step="pass it, or latent=True for a cache without heads",
                )
        elif not self.latent:
            _divides(self.total_kv_heads, self.head_shards)

    @property
    def head_shards(self) -> int:
        """Over how many shards the heads are spread."""
        return self.tp_size // self.dcp_size

    @property
    def share(self) -> TokenShare | None:
        """The tokens this rank holds; None means all."""
        if self.dcp_size == 1:
            return None
        return TokenShare(self.tp_rank % self.dcp_size, self.dcp_size, self.interleave)

    def at(self, tp_rank: int) -> Ranks:
        """The same sizes seen from another tensor-parallel rank."""
        return attrs.evolve(self, tp_rank=tp_rank)


def _divides(total: int, shards: int) -> None:
    small, large = sorted((total, shards))
    if large % small:
        raise InvalidInputError(
            f"{total} KV heads cannot be dealt out to {shards} shards: neither is a multiple of "
            "the other"
        )


def check_pair(mine: Ranks, peer: Ranks) -> None:
    for what, ours, theirs in (
        ("TP sizes", mine.tp_size, peer.tp_size),
        ("context-parallel sizes", mine.dcp_size, peer.dcp_size),
        ("head shards", mine.head_shards, peer.head_shards),
    ):
        small, large = sorted((ours, theirs))
        if large % small:
            raise InvalidInputError(
                f"{what} {ours} and {theirs} (mine and the peer's) must be multiples of each other"
            )
    if mine.latent != peer.latent or (
        not mine.latent and mine.total_kv_heads != peer.total_kv_heads
    ):
        raise GeometryError(
            f"the models differ: {_heads_text(mine)} here, {_heads_text(peer)} at the peer"
        )
    if min(mine.dcp_size, peer.dcp_size) > 1 and mine.interleave != peer.interleave:
        raise GeometryError(
            f"tokens are dealt out in turns of {mine.interleave} here and {peer.interleave} at "
            "the peer: no rank holds what another needs as a whole"
        )


def _heads_text(ranks: Ranks) -> str:
    return "a latent cache" if ranks.latent else f"{ranks.total_kv_heads} KV heads"


def shard_heads(total: int, shards: int, shard: int) -> tuple[int, int]:
    """``(first head, number of heads)`` that a shard holds, of ``total`` in the model.

    Raises:
        InvalidInputError: heads and shards are no multiples of each other.
    """
    _divides(total, shards)
    return shard * total // shards, max(total // shards, 1)


def replicates_heads(ranks: Ranks) -> bool:
    """Whether several ranks hold the same heads."""
    if ranks.latent or ranks.total_kv_heads is None:
        return ranks.head_shards > 1
    return ranks.head_shards > ranks.total_kv_heads


def fused_fits(total: int, shards: int, peer_shards: int) -> bool:
    """Whether a cache that cannot be cut by head fits the peer's: equally many heads per shard."""
    return shard_heads(total, shards, 0)[1] == shard_heads(total, peer_shards, 0)[1]


def head_slice(
    mine: Ranks,
    peer: Ranks,
    *,
    role: Role = Role.CONSUMER,
    total: int | None = None,
    latent: bool | None = None,
    turn: int = 0,
) -> HeadSlice | None:
    """Which heads move between rank ``mine.tp_rank`` and rank ``peer.tp_rank``.

    Every head of every consumer comes from exactly one producer rank, so None may be the answer
    even for two ranks that hold the same head: a copy of it is taken from another rank.

    Args:
        role: what ``mine`` is.
        total: heads (or units of a state) over all ranks, where that differs from the model's.
        latent: as in ``Ranks``, where a layer differs.
        turn: picks among ranks that hold copies; give successive requests successive numbers to
            spread the load. Both sides of one request must use the same.

    Raises:
        InvalidInputError: the sizes do not divide.
        GeometryError: the two sides run different models.
    """
    check_pair(mine, peer)
    consumer, producer = (mine, peer) if role is Role.CONSUMER else (peer, mine)
    if latent is None:
        latent = mine.latent if total is None else False
    count = 1 if latent else total or mine.total_kv_heads
    if count is None:
        raise InvalidInputError("total is missing: the model is latent, the layer is not")
    if not _holds_tokens_of(consumer, producer):
        return None
    found = _slice(
        count,
        (consumer.head_shards, consumer.tp_rank // consumer.dcp_size),
        (producer.head_shards, producer.tp_rank // producer.dcp_size),
        latent=latent,
        turn=turn,
    )
    return found if found is None or role is Role.CONSUMER else found.swapped()


def _holds_tokens_of(consumer: Ranks, producer: Ranks) -> bool:
    """Whether the two ranks' shares of the tokens meet."""
    ours, theirs = consumer.dcp_size, producer.dcp_size
    common = min(ours, theirs)  # one is a multiple of the other
    return consumer.tp_rank % ours % common == producer.tp_rank % theirs % common


def _slice(
    total: int,
    consumer: tuple[int, int],
    producer: tuple[int, int],
    *,
    latent: bool,
    turn: int,
) -> HeadSlice | None:
    """The consumer's view of what it takes from one producer shard; both are (shards, shard)."""
    (to_shards, to), (from_shards, from_) = consumer, producer
    if from_shards < to_shards:
        if to * from_shards // to_shards != from_:
            return None
        copies, copy = 1, 0
    elif from_ * to_shards // from_shards != to:
        return None
    if latent:
        copies = max(from_shards // to_shards, 1)
        return HeadSlice(0, 0, 1) if from_ % copies == turn % copies else None
    first, count = shard_heads(total, to_shards, to)
    held, held_count = shard_heads(total, from_shards, from_)
    if from_shards >= to_shards:
        # Within the producers that face this consumer, those that hold one and the same head.
        copies = max(from_shards // max(total, to_shards), 1)
        copy = from_ % copies
        if copy != turn % copies:
            return None
    begin, end = max(first, held), min(first + count, held + held_count)
    return HeadSlice(begin - first, begin - held, end - begin)


def facing(mine: Ranks, peer: Ranks) -> tuple[int, ...]:
    """The peer's tensor-parallel ranks that hold heads and tokens which ``mine`` holds, rising.

    ``peer.tp_rank`` is not looked at, and which side is which makes no difference.  The sizes have
    passed ``check_pair``.  Costs as much as there are such ranks, not as many as the peer has.
    """
    shard, ours, theirs = mine.tp_rank // mine.dcp_size, mine.head_shards, peer.head_shards
    each = max(theirs // ours, 1)
    first = shard * theirs // ours if theirs < ours else shard * each
    common = min(mine.dcp_size, peer.dcp_size)  # one is a multiple of the other
    places = range(mine.tp_rank % mine.dcp_size % common, peer.dcp_size, common)
    return tuple(
        shard * peer.dcp_size + place for shard in range(first, first + each) for place in places
    )
