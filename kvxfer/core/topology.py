"""Topology: which rank reads from or writes to which, which heads, and whose ACKs are needed.

Pure arithmetic on sizes.  A *producer* rank holds blocks that prefill computed, a *consumer* rank
needs them.  Tensor-parallel ranks of the two sides must be multiples of each other; KV heads are
dealt out in order, and copied where there are more ranks than heads.

With decode context parallelism, ``dcp_size`` neighbouring ranks hold the same heads and deal the
tokens out among them; heads are then spread over ``tp_size // dcp_size`` shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvxfer.core.layout.heads import HeadSlice
from kvxfer.core.layout.kv import KVLayout, LayoutKind
from kvxfer.core.layout.layers import Layers, match_layers, require_same_names
from kvxfer.core.layout.ranks import (
    Ranks,
    Role,
    check_pair,
    facing,
    fused_fits,
    head_slice,
    replicates_heads,
    shard_heads,
)
from kvxfer.core.layout.state import Sharding, StateLayout, same_parts
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.layout.layers import LayerRef

__all__ = [
    "Link",
    "PeerTable",
    "Ranks",
    "Role",
    "SlotPicker",
    "ack_ranks",
    "fixed_port",
    "fused_fits",
    "head_slice",
    "holders_to_release",
    "layers_between",
    "overlapping_stages",
    "peer_size",
    "pod_of",
    "replicates_heads",
    "shard_heads",
    "source_ranks",
    "sources",
    "target_ranks",
    "targets",
]


@attrs.frozen(kw_only=True)
class Link:
    """What moves between this rank and one peer rank.

    Attributes:
        rank: the peer's tensor-parallel rank.
        heads: which KV heads; None if no KV moves over this link (a copy of them moves over
            another), only recurrent state or nothing.
        writers: how many producer ranks write to this link's consumer.
    """

    rank: int
    heads: HeadSlice | None
    writers: int


def peer_size(field: str, value: object, mine: int, *, unknown_peer_size: str | None = None) -> int:
    """A size that a peer sent, or an error: an absent size is never taken for 1.

    Args:
        unknown_peer_size: ``"equal"`` takes an absent, 0 or -1 size for ``mine``. For adapters to
            protocols that do not send it; kvxfer's own messages always do.

    Raises:
        InvalidInputError: the size is absent or no positive integer.
    """
    if unknown_peer_size not in {None, "equal"}:
        raise InvalidInputError(
            f'unknown_peer_size must be None or "equal", not {unknown_peer_size!r}'
        )
    if value is None or (type(value) is int and value in {0, -1}):
        if unknown_peer_size == "equal":
            return mine
        raise InvalidInputError(
            f"the peer did not say its {field} (got {value!r})",
            next_step="a legacy adapter may pass unknown_peer_size='equal'",
        )
    if type(value) is not int or value < 1:
        raise InvalidInputError(f"the peer's {field} must be an int of at least 1, not {value!r}")
    return value


def holders_to_release(mine: Ranks, peer: Ranks) -> tuple[int, ...]:
    """The producer ranks that consumer rank ``mine.tp_rank`` must send its ack to.

    Also those it takes nothing from: every producer rank holds blocks for the request, and each
    waits for exactly the consumers that ``ack_ranks`` names.
    """
    check_pair(mine, peer)
    return facing(mine, peer)


def ack_ranks(producer: Ranks, consumer: Ranks) -> frozenset[int]:
    """The consumer ranks whose acks producer rank ``producer.tp_rank`` must see before it frees."""
    check_pair(producer, consumer)
    return frozenset(facing(producer, consumer))


def sources(mine: Ranks, peer: Ranks, *, state: bool = False, turn: int = 0) -> tuple[Link, ...]:
    """What consumer ``mine`` takes from which producer rank; ``peer.tp_rank`` is not looked at.

    Args:
        state: recurrent state, sharded over all ranks, moves as well: then every rank that is
            faced is a source, even one whose KV heads are taken from a copy.
        turn: see ``head_slice``.
    """
    links = []
    for rank in holders_to_release(mine, peer):
        heads = head_slice(mine, peer.at(rank), turn=turn)
        if heads is not None or state:
            links.append((rank, heads))
    return tuple(Link(rank=rank, heads=heads, writers=len(links)) for rank, heads in links)


def targets(mine: Ranks, peer: Ranks, *, state: bool = False, turn: int = 0) -> tuple[Link, ...]:
    """What producer ``mine`` gives to which consumer rank; ``peer.tp_rank`` is not looked at."""
    links = []
    for rank in sorted(ack_ranks(mine, peer)):
        consumer = peer.at(rank)
        heads = head_slice(mine, consumer, role=Role.PRODUCER, turn=turn)
        if heads is not None or state:
            writers = len(sources(consumer, mine, state=state, turn=turn))
            links.append(Link(rank=rank, heads=heads, writers=writers))
    return tuple(links)


def source_ranks(
    mine: Ranks, peer: Ranks, *, state: bool = False, turn: int = 0
) -> tuple[int, ...]:
    """The producer ranks that consumer ``mine`` takes data from."""
    return tuple(link.rank for link in sources(mine, peer, state=state, turn=turn))


def target_ranks(
    mine: Ranks, peer: Ranks, *, state: bool = False, turn: int = 0
) -> tuple[int, ...]:
    """The consumer ranks that producer ``mine`` gives data to."""
    return tuple(link.rank for link in targets(mine, peer, state=state, turn=turn))


def layers_between(
    local: Sequence[LayerRef],
    remote: Sequence[LayerRef],
    mine: Ranks,
    peer: Ranks,
    *,
    role: Role = Role.CONSUMER,
    turn: int = 0,
    only_common: bool = False,
) -> Layers:
    """Match two ranks' layers, each with the heads or state units that move between these two.

    Latent and key-only layers count as copies on every rank, whatever the model's other layers
    are.  Layers of which nothing moves between these two ranks are left out.

    Raises:
        GeometryError: a layer cannot be mapped.
        InvalidInputError: a layer is missing on one side, or sizes do not divide.
    """
    if not only_common:
        require_same_names(local, remote)
    theirs = {layer.name: layer for layer in remote}
    flow = _Flow(mine, peer, role, turn)
    heads: dict[str, HeadSlice | None] = {}
    units: dict[str, tuple[HeadSlice | None, ...]] = {}
    moving: list[LayerRef] = []
    for layer in local:
        other = theirs.get(layer.name)
        if other is None:
            continue
        if isinstance(layer.layout, KVLayout) and isinstance(other.layout, KVLayout):
            found = flow.heads(layer, other, layer.layout, other.layout)
            if found is None:
                continue
            heads[layer.name] = found
        elif isinstance(layer.layout, StateLayout) and isinstance(other.layout, StateLayout):
            slices = flow.units(layer.name, layer.layout, other.layout)
            if not any(slices):
                continue
            units[layer.name] = slices
        moving.append(layer)
    return match_layers(moving, remote, heads=heads, units=units, only_common=True)


class _Flow:
    """Slices of single layers between two ranks."""

    def __init__(self, mine: Ranks, peer: Ranks, role: Role, turn: int) -> None:
        self._mine, self._peer, self._role, self._turn = mine, peer, role, turn
        # State is spread over all tensor-parallel ranks; context parallelism does not touch it.
        self._flat = [attrs.evolve(ranks, dcp_size=1, latent=True) for ranks in (mine, peer)]

    def heads(
        self, layer: LayerRef, other: LayerRef, local: KVLayout, remote: KVLayout
    ) -> HeadSlice | None:
        mine, peer = self._mine, self._peer
        copied = local.kind in {LayoutKind.LATENT, LayoutKind.KEY_ONLY} or (
            local.kind is LayoutKind.SCALE and mine.latent
        )
        if copied and layer.total_heads is None:
            expected = (1, 1)
            found = head_slice(mine, peer, role=self._role, latent=True, turn=self._turn)
        else:
            total = layer.total_heads or mine.total_kv_heads
            if total is None or total != (other.total_heads or peer.total_kv_heads):
                raise GeometryError(
                    f"layer {layer.name!r} has {total} heads in all here and "
                    f"{other.total_heads or peer.total_kv_heads} at the peer",
                    next_step="set LayerRef.total_heads on both sides",
                )
            expected = (
                shard_heads(total, mine.head_shards, 0)[1],
                shard_heads(total, peer.head_shards, 0)[1],
            )
            found = head_slice(mine, peer, role=self._role, total=total, turn=self._turn)
        if (local.heads, remote.heads) != expected:
            raise GeometryError(
                f"layer {layer.name!r} should hold {expected[0]} heads here and {expected[1]} at "
                f"the peer by the ranks given: local {local.describe()}, remote "
                f"{remote.describe()}"
            )
        return found

    def units(
        self, name: str, local: StateLayout, remote: StateLayout
    ) -> tuple[HeadSlice | None, ...]:
        same_parts(local, remote)
        ours, theirs = self._flat
        out: list[HeadSlice | None] = []
        for part, other in zip(local.parts, remote.parts, strict=True):
            if part.sharding is Sharding.REPLICATED:
                found = head_slice(ours, theirs, role=self._role, latent=True, turn=self._turn)
                out.append(found and HeadSlice(0, 0, part.units))
                continue
            total = part.total_units or part.units * ours.tp_size
            if total != (other.total_units or other.units * theirs.tp_size):
                raise GeometryError(
                    f"part {part.name!r} of layer {name!r} has other units over all ranks: local "
                    f"{local.describe()} at TP {ours.tp_size}, remote {remote.describe()} at TP "
                    f"{theirs.tp_size}",
                    next_step="set StatePart.total_units where ranks hold copies",
                )
            found = head_slice(ours, theirs, role=self._role, total=total, turn=self._turn)
            if part.sharding is Sharding.FUSED:
                # One unit to the planner: it moves whole between ranks of equal shares.
                if not fused_fits(total, ours.tp_size, theirs.tp_size):
                    raise GeometryError(
                        f"part {part.name!r} of layer {name!r} cannot be cut, and {total} units "
                        f"over {ours.tp_size} ranks here and {theirs.tp_size} at the peer give "
                        "unequal shares"
                    )
                found = found and HeadSlice(0, 0, part.units)
            out.append(found)
        return tuple(out)


# Pipeline stages, data-parallel slots, ports ------------------------------------------------


def overlapping_stages(mine: range, stages: Sequence[range]) -> tuple[int, ...]:
    """The peer's pipeline stages that hold some of my layers; ranges count layer numbers.

    Raises:
        InvalidInputError: some of my layers are held by no stage, or by two.
    """
    for layer in mine:
        holders = [index for index, stage in enumerate(stages) if layer in stage]
        if len(holders) != 1:
            raise InvalidInputError(
                f"layer {layer} is held by {len(holders)} of the peer's stages {list(stages)}"
            )
    return tuple(
        index
        for index, stage in enumerate(stages)
        if max(mine.start, stage.start) < min(mine.stop, stage.stop)
    )


class SlotPicker:
    """Spreads requests evenly over (instance, data-parallel rank) slots. Not thread-safe.

    The instance changes with every request and the rank with every round of instances, so that
    each slot comes up equally often; deriving both from one counter visits a part of them only.
    """

    def __init__(self, instances: int, dp_size: int) -> None:
        if instances < 1 or dp_size < 1:
            raise InvalidInputError(
                f"instances={instances} and dp_size={dp_size} must be at least 1"
            )
        self._instances = instances
        self._dp_size = dp_size
        self._next = 0

    def pick(self) -> tuple[int, int | None]:
        """``(instance, dp rank)``; the rank is None where there is only one."""
        turn, instance = divmod(self._next, self._instances)
        self._next = (self._next + 1) % (self._instances * self._dp_size)
        return instance, turn % self._dp_size if self._dp_size > 1 else None


def fixed_port(base: int, ranks: Ranks, role: Role) -> int:
    """The port of a rank where fixed ports are asked for: every rank and role has its own.

    ``base + ((role * dp + dp_rank) * pp + pp_rank) * tp + tp_rank``, with role 0 for producers
    and 1 for consumers.

    Raises:
        InvalidInputError: some rank's port would lie outside 1..65535.
    """
    per_role = ranks.dp_size * ranks.pp_size * ranks.tp_size
    last = base + 2 * per_role - 1
    if type(base) is not int or base < 1 or last > 65535:
        raise InvalidInputError(
            f"base port {base} with {2 * per_role} ports ends at {last}: ports end at 65535",
            next_step="lower the base port, or let the system choose ports",
        )
    stage = (ranks.dp_rank + (role is Role.CONSUMER) * ranks.dp_size) * ranks.pp_size
    return base + (stage + ranks.pp_rank) * ranks.tp_size + ranks.tp_rank


def pod_of(dp_rank: int, dp_per_pod: int, hosts: Sequence[str]) -> tuple[str, int]:
    """``(host, data-parallel rank inside that pod)`` of a global data-parallel rank.

    Raises:
        InvalidInputError: no pod has that rank.
    """
    if dp_per_pod < 1 or not 0 <= dp_rank < dp_per_pod * len(hosts):
        raise InvalidInputError(
            f"dp rank {dp_rank} lies outside {len(hosts)} pods of {dp_per_pod} ranks"
        )
    return hosts[dp_rank // dp_per_pod], dp_rank % dp_per_pod


@attrs.define
class PeerTable:
    """What is known of peers' engines, by (engine, pipeline rank). Bounded by ``max_peers``."""

    mine: Ranks
    max_peers: int = 4096
    _peers: dict[tuple[str, int], tuple[Ranks, range]] = attrs.field(factory=dict, init=False)

    def add(self, engine: str, peer: Ranks, layers: range = range(0)) -> None:
        """Remember a stage; refuses, and remembers nothing, where the sizes do not fit.

        Raises:
            InvalidInputError, GeometryError: as ``holders_to_release``.
        """
        check_pair(self.mine, peer)
        known = (engine, peer.pp_rank) in self._peers
        if not known and len(self._peers) >= self.max_peers:
            raise InvalidInputError(f"more than {self.max_peers} peers")
        self._peers[engine, peer.pp_rank] = (peer, layers)

    def get(self, engine: str, pp_rank: int = 0) -> Ranks:
        """The ranks of a stage.

        Raises:
            InvalidInputError: unknown.
        """
        return self._find(engine, pp_rank)[0]

    def layers(self, engine: str, pp_rank: int = 0) -> range:
        """The layers a stage said it holds; empty if it did not say."""
        return self._find(engine, pp_rank)[1]

    def remove(self, engine: str) -> None:
        """Forget all stages of an engine."""
        for key in [key for key in self._peers if key[0] == engine]:
            del self._peers[key]

    def __len__(self) -> int:
        return len(self._peers)

    def _find(self, engine: str, pp_rank: int) -> tuple[Ranks, range]:
        found = self._peers.get((engine, pp_rank))
        if found is None:
            raise InvalidInputError(f"no stage {pp_rank} of engine {engine!r} is known")
        return found
