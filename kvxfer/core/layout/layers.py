"""Layers of both sides: matched by name, checked and grouped once, when the peer is met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import attrs
import numpy as np
from attrs import validators as v

from kvxfer.core.layout import _wire
from kvxfer.core.layout._checks import Int32Array, Int64Array, is_count, is_name, is_nonnegative
from kvxfer.core.layout._overlay import overlaid
from kvxfer.core.layout._sharing import gaps_of
from kvxfer.core.layout.heads import HeadSlice
from kvxfer.core.layout.kv import KVLayout
from kvxfer.core.layout.recipe import Recipe, recipe_of
from kvxfer.core.layout.rule import Side
from kvxfer.core.layout.state import Sharding, StateLayout, same_parts
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "LayerPair",
    "LayerRef",
    "Layers",
    "Layout",
    "Shared",
    "match_layers",
    "require_same_names",
]

Layout = Union[KVLayout, StateLayout]  # noqa: UP007 - evaluated at run time on 3.10


MAX_LAYERS = 2**11
"""Most layers of one rank. They may come from a peer, and are compared with each other."""


def _layer_name(value: object) -> object:
    return str(value) if type(value) is int and value >= 0 else value


@attrs.frozen(kw_only=True)
class LayerRef:
    """One side's layer.

    Attributes:
        name: what the layer is called on both sides; a number (a layer id) is taken as its digits.
        group: the KV-cache group whose block ids it follows.
        region: index of the region it lies in.
        layout: where it lies in that region.
        total_heads: KV heads of the layer over all ranks, where that differs from the model's.
    """

    name: str = attrs.field(converter=_layer_name, validator=is_name)
    group: int = attrs.field(validator=is_nonnegative)
    region: int = attrs.field(validator=is_nonnegative)
    layout: Layout = attrs.field(validator=v.instance_of((KVLayout, StateLayout)))
    total_heads: int | None = attrs.field(default=None, validator=v.optional(is_count))

    def to_wire(self) -> dict[str, Any]:
        """A dict of builtins, for the handshake."""
        return {
            "name": self.name,
            "group": self.group,
            "region": self.region,
            "total_heads": self.total_heads or 0,
            "state": isinstance(self.layout, StateLayout),
            "layout": self.layout.to_wire(),
        }

    @classmethod
    def from_wire(cls, message: Any) -> LayerRef:
        """What ``to_wire`` made, from a peer that is not trusted.

        Raises:
            InvalidInputError: a key is missing, unknown, or of the wrong type or range.
            GeometryError: the numbers describe no valid layout.
        """
        fields = _wire.fields(
            "layer",
            message,
            {
                "name": str,
                "group": int,
                "region": int,
                "total_heads": int,
                "state": bool,
                "layout": dict,
            },
        )
        state = fields.pop("state")
        fields["layout"] = (StateLayout if state else KVLayout).from_wire(fields["layout"])
        fields["total_heads"] = fields["total_heads"] or None
        return cls(**fields)


@attrs.frozen(kw_only=True)
class LayerPair:
    """A layer that both sides hold.

    Attributes:
        pair: index of (local region, remote region) in ``Layers.regions``.
        group, remote_group: whose block ids it follows, on either side.
        heads: the heads to move; None moves all, which must be equally many on both sides.
        units: for recurrent state, which units of each part to move, None for a part that does not
            move; None altogether moves whole parts.
    """

    name: str = attrs.field(converter=_layer_name, validator=is_name)
    pair: int = attrs.field(validator=is_nonnegative)
    local: Layout = attrs.field(validator=v.instance_of((KVLayout, StateLayout)))
    remote: Layout = attrs.field(validator=v.instance_of((KVLayout, StateLayout)))
    group: int = attrs.field(default=0, validator=is_nonnegative)
    remote_group: int = attrs.field(
        default=attrs.Factory(lambda self: self.group, takes_self=True), validator=is_nonnegative
    )
    heads: HeadSlice | None = attrs.field(
        default=None, validator=v.optional(v.instance_of(HeadSlice))
    )
    units: tuple[HeadSlice | None, ...] | None = None


@attrs.define(eq=False)
class Shared:
    """Layers, or parts of states, of equal geometry: one plan serves them all.

    ``local`` and ``remote`` are the first member's; ``local_base`` and ``remote_base`` hold the
    members' offsets, to which the shared plan is added.
    """

    local: KVLayout
    remote: KVLayout
    recipe: Recipe
    heads: HeadSlice | None
    group: int
    remote_group: int
    is_state: bool
    names: tuple[str, ...]
    pair: Int32Array
    local_base: Int64Array
    remote_base: Int64Array
    checks: tuple[tuple[int, bool, int], tuple[int, bool, int]]
    """What one request need check once: (group, whether local, number of blocks) of both sides."""
    pairing: tuple[Any, ...]
    """Equal for layers whose blocks pair alike, whatever else their geometry is."""
    gaps: tuple[int, int] = attrs.field(init=False)
    """Least distance between two members of one pair, on either side."""

    @gaps.default
    def _measured(self) -> tuple[int, int]:
        return gaps_of(self.pair, self.local_base, self.remote_base)

    kept: dict[Any, Any] = attrs.field(init=False, factory=dict, repr=False)
    """See ``PlanGroup.keep``."""


class Layers(tuple[LayerPair, ...]):
    """Layer pairs with what geometry alone decides: groups that share a plan, and refusals.

    Attributes:
        regions: the (local region, remote region) that each pair index stands for.
        shared: the groups of equal geometry.
        overlaid_local, overlaid_remote: indices of groups whose bytes may overlap with another's
            on that side; where that side is written, the planner compares bytes.

    Raises:
        GeometryError: a layer cannot be mapped; the text names it and both geometries.
    """

    regions: tuple[tuple[int, int], ...]
    shared: tuple[Shared, ...]
    overlaid_local: tuple[int, ...]
    overlaid_remote: tuple[int, ...]

    def __new__(
        cls, layers: Sequence[LayerPair], regions: Sequence[tuple[int, int]] | None = None
    ) -> Layers:
        self = super().__new__(cls, layers)
        if regions is None:  # without a list of regions, each pair index is its own regions
            top = max((layer.pair for layer in self), default=-1)
            regions = [(pair, pair) for pair in range(top + 1)]
        self.regions = tuple(regions)
        if len(self) > MAX_LAYERS:
            raise InvalidInputError(f"{len(self)} layers, over {MAX_LAYERS}")
        for layer in self:
            if layer.pair >= len(self.regions):
                raise InvalidInputError(
                    f"layer {layer.name!r} has pair {layer.pair} of {len(self.regions)} pairs"
                )
        self.shared = _share(self)
        self.overlaid_local = _overlaid(self, 0)
        self.overlaid_remote = _overlaid(self, 1)
        return self

    def __reduce__(self) -> Any:
        return (Layers, (tuple(self), self.regions))

    def require_inside(self, local_nbytes: Sequence[int], remote_nbytes: Sequence[int]) -> None:
        """Refuse layers that reach beyond their regions; sizes in bytes by region index.

        A peer describes its layers itself: hold them against the regions it registered.

        Raises:
            GeometryError: naming the layer, its end and its region's.
        """
        for layer in self:
            for side, region, sizes, layout in (
                ("local", self.regions[layer.pair][0], local_nbytes, layer.local),
                ("remote", self.regions[layer.pair][1], remote_nbytes, layer.remote),
            ):
                held = sizes[region] if region < len(sizes) else 0
                if layout.end_offset > held:
                    raise GeometryError(
                        f"layer {layer.name!r} ends at byte {layout.end_offset} of {side} region "
                        f"{region}, which has {held}: {layout.describe()}"
                    )


def _overlaid(layers: Layers, side: int) -> tuple[int, ...]:
    places = []
    for index, shared in enumerate(layers.shared):
        layout, base = (
            (shared.remote, shared.remote_base) if side else (shared.local, shared.local_base)
        )
        for pair, offset in zip(shared.pair.tolist(), base.tolist(), strict=True):
            places.append((layers.regions[pair][side], offset, index, layout))
    return overlaid(places)


def _share(layers: Sequence[LayerPair]) -> tuple[Shared, ...]:
    found: dict[Any, list[tuple[LayerPair, str, KVLayout, KVLayout]]] = {}
    seen: set[Any] = set()
    for layer in layers:
        for label, local, remote, heads in _cells(layer):
            key = (local.geometry, remote.geometry, heads, layer.group, layer.remote_group)
            members = found.get(key)
            if members is None:
                members = found[key] = []
            # Two names for one memory on both sides (layers that share their cache) move once.
            place = (id(members), layer.pair, local.offset, remote.offset)
            if place not in seen:
                seen.add(place)
                members.append((layer, label, local, remote))
    return tuple(_shared(key[2], members) for key, members in found.items())


def _shared(
    heads: HeadSlice | None, members: list[tuple[LayerPair, str, KVLayout, KVLayout]]
) -> Shared:
    layer, label, local, remote = members[0]
    try:
        recipe = recipe_of(local, remote, heads)
    except GeometryError as error:
        raise GeometryError(
            f"layer {label!r}: {error.message}", next_step=error.next_step
        ) from None
    pairing: tuple[Any, ...] = (layer.group, layer.remote_group, local.tokens_per_block)
    if recipe.by_runs:
        pairing += (
            remote.tokens_per_block,
            local.cell_tokens,
            recipe.local_steps,
            recipe.remote_steps,
        )
    return Shared(
        local=local,
        remote=remote,
        recipe=recipe,
        heads=heads,
        group=layer.group,
        remote_group=layer.remote_group,
        is_state=isinstance(layer.local, StateLayout),
        names=tuple(member[1] for member in members),
        pair=np.array([member[0].pair for member in members], np.int32),
        local_base=np.array([member[2].offset for member in members], np.int64),
        remote_base=np.array([member[3].offset for member in members], np.int64),
        checks=(
            (layer.group, True, local.num_blocks),
            (layer.remote_group, False, remote.num_blocks),
        ),
        pairing=pairing,
    )


def _cells(layer: LayerPair) -> list[tuple[str, KVLayout, KVLayout, HeadSlice | None]]:
    """The layer in the planner's terms: itself, or the parts of its state."""
    local, remote = layer.local, layer.remote
    if isinstance(local, KVLayout) and isinstance(remote, KVLayout):
        return [(layer.name, local, remote, layer.heads)]
    if not (isinstance(local, StateLayout) and isinstance(remote, StateLayout)):
        raise GeometryError(
            f"layer {layer.name!r} is a KV cache on one side and recurrent state on the other: "
            f"local {local.describe()}, remote {remote.describe()}"
        )
    try:
        same_parts(local, remote)
    except GeometryError as error:
        raise GeometryError(f"layer {layer.name!r}: {error.message}") from None
    units = layer.units
    if units is not None and len(units) != len(local.parts):
        raise InvalidInputError(
            f"layer {layer.name!r} has {len(local.parts)} parts but {len(units)} unit slices"
        )
    out: list[tuple[str, KVLayout, KVLayout, HeadSlice | None]] = []
    for index, (part, ours, theirs) in enumerate(
        zip(local.parts, local.part_layouts, remote.part_layouts, strict=True)
    ):
        unit = None if units is None else units[index]
        if units is not None and unit is None:
            continue
        moved = ours.heads if unit is None else unit.count
        if part.sharding is not Sharding.SHARDED and not ours.heads == theirs.heads == moved:
            raise GeometryError(
                f"part {part.name!r} of layer {layer.name!r} is {part.sharding.value} and cannot "
                f"be cut: local {local.describe()}, remote {remote.describe()}"
            )
        out.append((f"{layer.name}.{part.name}", ours, theirs, unit))
    return out


def match_layers(
    local: Sequence[LayerRef],
    remote: Sequence[LayerRef],
    *,
    heads: HeadSlice | Mapping[str, HeadSlice | None] | None = None,
    units: Mapping[str, tuple[HeadSlice | None, ...]] | None = None,
    only_common: bool = False,
) -> Layers:
    """Match the layers of both sides by name, never by order.

    ``topology.layers_between`` does the same and computes heads and units from the ranks.

    Args:
        heads: which heads to move: for all layers, or by layer name. A layer without one moves
            whole.
        units: for recurrent state, by layer name: which units of each part.
        only_common: match what both sides hold (pipeline stages) and leave the rest.

    Returns:
        the pairs, in the local order, with ``regions``: the sorted distinct (local region, remote
        region), of which a pair's ``pair`` is the index.

    Raises:
        GeometryError: a layer cannot be mapped; names the layer and both geometries.
        InvalidInputError: a name occurs twice, or is missing on one side.
    """
    ours = _by_name(local, Side.LOCAL)
    theirs = _by_name(remote, Side.REMOTE)
    if not only_common:
        require_same_names(local, remote)
    common = [(layer, theirs[name]) for name, layer in ours.items() if name in theirs]
    regions = sorted({(a.region, b.region) for a, b in common})
    index = {region_pair: i for i, region_pair in enumerate(regions)}
    pairs = []
    for a, b in common:
        wanted: HeadSlice | None = None
        if isinstance(a.layout, KVLayout):
            wanted = heads if isinstance(heads, HeadSlice) or heads is None else heads.get(a.name)
        pairs.append(
            LayerPair(
                name=a.name,
                pair=index[a.region, b.region],
                local=a.layout,
                remote=b.layout,
                group=a.group,
                remote_group=b.group,
                heads=wanted,
                units=None if units is None else units.get(a.name),
            )
        )
    return Layers(pairs, regions)


def _by_name(layers: Sequence[LayerRef], side: Side) -> dict[str, LayerRef]:
    found: dict[str, LayerRef] = {}
    for layer in layers:
        if layer.name in found:
            raise InvalidInputError(f"the {side.value} layer {layer.name!r} occurs twice")
        found[layer.name] = layer
    return found


def require_same_names(local: Sequence[LayerRef], remote: Sequence[LayerRef]) -> None:
    """Refuse layers that only one side holds.

    Raises:
        InvalidInputError: naming them.
    """
    ours, theirs = {layer.name for layer in local}, {layer.name for layer in remote}
    for side, missing in (("remote", ours - theirs), ("local", theirs - ours)):
        if missing:
            raise InvalidInputError(
                f"{len(missing)} layers are missing on the {side} side: "
                f"{', '.join(sorted(missing)[:5])}",
                next_step="pass only_common=True if the two sides are pipeline stages",
            )
