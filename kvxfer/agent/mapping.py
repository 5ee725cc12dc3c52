"""Ranks and layers between two agents, in the terms the agent's parts need.

A rank is named by its place in its instance, ``pp_rank * tp_size + tp_rank``.  Every pipeline stage
of the consumer releases every stage of the producer, whether or not they share layers, so that
nobody has to know the other side's split to know whose ACKs are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.core.layout import Layers
from kvxfer.core.topology import (
    Ranks,
    Role,
    holders_to_release,
    layers_between,
    source_ranks,
)
from kvxfer.core.topology import ack_ranks as tp_ack_ranks
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.caches import Caches
    from kvxfer.core.layout import LayerRef
    from kvxfer.core.offer import Endpoint, Offer

__all__ = [
    "LinkLayers",
    "ack_ranks",
    "match_link",
    "rank_of",
    "ranks_from_wire",
    "ranks_to_wire",
    "read_sources",
    "writer_ranks",
]

_NO_LAYERS = Layers(())

_FIELDS = (
    "tp_size",
    "tp_rank",
    "dp_size",
    "dp_rank",
    "pp_size",
    "pp_rank",
    "dcp_size",
    "interleave",
    "total_kv_heads",
    "latent",
)


def ranks_to_wire(ranks: Ranks) -> dict[str, int]:
    """All fields as integers; 0 KV heads stands for "latent only"."""
    return {name: int(getattr(ranks, name) or 0) for name in _FIELDS}


def ranks_from_wire(message: Mapping[str, Any]) -> Ranks:
    """Inverse of ``ranks_to_wire``; nothing that is missing gets a guessed default.

    Raises:
        InvalidInputError: a field is missing, mistyped or out of range.
    """
    missing = [name for name in _FIELDS if name not in message]
    if missing:
        raise InvalidInputError(
            f"the peer did not say its {', '.join(missing)}",
            next_step="upgrade the older side",
        )
    fields: dict[str, Any] = {}
    for name in _FIELDS:
        value = message[name]
        if type(value) is not int:
            raise InvalidInputError(f"the peer's {name} is {value!r}: it must be an integer")
        fields[name] = value
    fields["latent"] = bool(fields["latent"])
    fields["total_kv_heads"] = fields["total_kv_heads"] or None
    return Ranks(**fields)


def rank_of(ranks: Ranks) -> int:
    """A rank's place in its instance."""
    return ranks.pp_rank * ranks.tp_size + ranks.tp_rank


def ack_ranks(producer: Ranks, consumer: Ranks) -> frozenset[int]:
    """READ: the consumer ranks whose ACKs this producer rank needs before it frees.

    Raises:
        InvalidInputError: the sizes do not divide.
    """
    tp_ranks = tp_ack_ranks(producer, consumer)
    return frozenset(
        stage * consumer.tp_size + tp for stage in range(consumer.pp_size) for tp in tp_ranks
    )


def writer_ranks(consumer: Ranks, producer: Ranks) -> frozenset[int]:
    """WRITE: the producer ranks that must seal before this consumer rank is complete."""
    tp_ranks = holders_to_release(consumer, producer)
    return frozenset(
        stage * producer.tp_size + tp for stage in range(producer.pp_size) for tp in tp_ranks
    )


def read_sources(mine: Ranks, offer: Offer) -> list[tuple[Endpoint, bool]]:
    """READ: the producer ranks that this rank must release, and whether it reads from them.

    Raises:
        InvalidInputError: the offer lacks an endpoint that is needed, or sizes do not divide.
    """
    peer = ranks_from_wire(offer.sizes)
    reads = set(source_ranks(mine, peer))
    by_rank = {endpoint.rank: endpoint for endpoint in offer.endpoints}
    found: list[tuple[Endpoint, bool]] = []
    for stage in range(peer.pp_size):
        for tp in holders_to_release(mine, peer):
            endpoint = by_rank.get(stage * peer.tp_size + tp)
            if endpoint is None:
                raise InvalidInputError(
                    f"the offer of {offer.transfer_id!r} names the ranks {sorted(by_rank)}, but "
                    f"rank {stage * peer.tp_size + tp} is needed",
                    next_step="make offers with SchedulerAgent when there are several ranks",
                )
            found.append((endpoint, tp in reads))
    return found


@attrs.frozen
class LinkLayers:
    """The layers that two agents share, as consumer and as producer of them.

    ``regions`` are the (local region, remote region) that pair indices of both stand for.
    ``common`` names every layer that both have, also those of which nothing moves between these two
    ranks, because another rank moves it.
    """

    as_consumer: Layers = _NO_LAYERS
    as_producer: Layers = _NO_LAYERS
    regions: tuple[tuple[int, int], ...] = ()
    common: frozenset[str] = frozenset()
    _subsets: dict[tuple[Role, frozenset[str]], Layers] = attrs.field(factory=dict)

    def names(self, role: Role) -> frozenset[str]:
        """Names of the layers of which something moves in that role."""
        layers = self.as_consumer if role is Role.CONSUMER else self.as_producer
        return frozenset(layer.name for layer in layers)

    def named(self, role: Role, names: frozenset[str] | None) -> Layers:
        """All layers, or those of ``names`` (their grouping is worked out once).

        Raises:
            InvalidInputError: a name that the two sides do not share.
        """
        layers = self.as_consumer if role is Role.CONSUMER else self.as_producer
        if names is None:
            return layers
        subset = self._subsets.get((role, names))
        if subset is None:
            subset = Layers([x for x in layers if x.name in names], layers.regions)
            if len(self._subsets) >= 1024:
                self._subsets.clear()
            self._subsets[(role, names)] = subset
        return subset


def match_link(caches: Caches, mine: Ranks, remote: Sequence[LayerRef], peer: Ranks) -> LinkLayers:
    """Match the layers of both sides; nothing to match while either side has registered none.

    Raises:
        GeometryError: a layer cannot be mapped exactly; names both geometries.
        InvalidInputError: a layer is missing on one side, or sizes do not divide.
    """
    if not caches.layers or not remote:
        return LinkLayers()
    stages = mine.pp_size > 1 or peer.pp_size > 1
    theirs = {layer.name: layer.region for layer in remote}
    regions = tuple(sorted({(x.region, theirs[x.name]) for x in caches.layers if x.name in theirs}))
    index = {pair: i for i, pair in enumerate(regions)}
    sides = []
    for role in (Role.CONSUMER, Role.PRODUCER):
        found = layers_between(caches.layers, remote, mine, peer, role=role, only_common=stages)
        moved = [attrs.evolve(x, pair=index[found.regions[x.pair]]) for x in found]
        layers = Layers(moved, regions)
        _ = layers.shared  # raises now, at the handshake, for what cannot be mapped
        sides.append(layers)
    common = frozenset(x.name for x in caches.layers if x.name in theirs)
    return LinkLayers(sides[0], sides[1], regions, common)
