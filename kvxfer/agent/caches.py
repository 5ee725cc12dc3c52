"""The KV caches of one worker: one region per storage, layers as offsets in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvxfer.agent import arguments
from kvxfer.core.layout import KVLayout, LayerRef, LayoutKind, StateLayout
from kvxfer.core.memory import Region, Span, span_of, storage_span
from kvxfer.core.topology import Ranks
from kvxfer.core.transport import Transport
from kvxfer.core.wire import DescriptorWire, LayerWire, TransportWire
from kvxfer.errors import InvalidInputError, KvxferError

__all__ = ["Caches", "LayerCache", "as_layers", "register_caches", "single_rank"]


@attrs.frozen(kw_only=True)
class LayerCache:
    """One layer to register.

    Attributes:
        name: equal on both sides; layers are matched by it, never by order.
        buffer: what holds the layer: a tensor, an array, a buffer or a ``Span``.
        layout: its layout, with the offset counted from the start of the storage behind ``buffer``,
            as ``KVLayout.from_tensor`` gives it. For a plain buffer or ``Span`` the storage is the
            buffer itself.
        group: index of its block-id list.
    """

    name: str
    buffer: Any
    layout: KVLayout | StateLayout
    group: int = 0


@attrs.frozen(kw_only=True)
class Caches:
    """What was registered: spans (one per storage), layers, and regions per transport name."""

    spans: tuple[Span, ...] = ()
    layers: tuple[LayerRef, ...] = ()
    aliases: frozenset[str] = frozenset()
    """Layers that share the cache of an earlier one (KV sharing between layers): moved with it."""
    regions: Mapping[str, tuple[Region, ...]] = attrs.field(factory=dict)

    @property
    def groups(self) -> int:
        return 1 + max((layer.group for layer in self.layers), default=-1)

    @property
    def blocks_per_group(self) -> list[int]:
        """The smallest layer of a group limits its block ids."""
        sizes: list[int] = []
        for group in range(self.groups):
            counts = [x.layout.num_blocks for x in self.layers if x.group == group]
            if not counts:
                raise InvalidInputError(
                    f"group {group} has no layer", next_step="number groups from 0 without gaps"
                )
            sizes.append(min(counts))
        return sizes

    def layers_wire(self) -> list[LayerWire]:
        return [LayerWire(x.name, x.group, x.region, x.layout.to_wire()) for x in self.layers]

    def transport_wire(self, transport: Transport) -> TransportWire:
        info = transport.local_info()
        regions = [
            DescriptorWire(d.region_id, d.nbytes, d.kind.value, d.device, d.data)
            for d in map(transport.descriptor, self.regions.get(transport.name, ()))
        ]
        return TransportWire(info.transport, info.incarnation, info.data, regions)


def register_caches(layers: Sequence[LayerCache], transports: Sequence[Transport]) -> Caches:
    """Register every storage once with every transport. May block. All or nothing.

    Raises:
        InvalidInputError: no layers, two layers of one name, a layout that leaves its buffer, two
            layers of one group that begin at the same byte with different layouts, or memory that
            a transport cannot use.
        TransportError: a transport refused.
    """
    if not layers:
        raise InvalidInputError("no layers to register")
    names = [layer.name for layer in layers]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise InvalidInputError(f"two layers are named {twice!r}")
    spans: list[Span] = []
    refs: list[LayerRef] = []
    aliases: set[str] = set()
    begins: dict[tuple[int, int, int], LayerRef] = {}
    for layer in layers:
        storage = storage_span(layer.buffer)
        _check_offset(layer, storage)
        end = layer.layout.end_offset
        if end > storage.nbytes:
            raise InvalidInputError(
                f"the layout of layer {layer.name!r} reaches byte {end}, but its storage has "
                f"{storage.nbytes} bytes: {layer.layout.describe()}",
                next_step="take the layout from the tensor itself (KVLayout.from_tensor)",
            )
        index, outer = _region_for(storage, spans)
        layout = layer.layout.at_offset(storage.address - outer.address + layer.layout.offset)
        ref = LayerRef(name=layer.name, group=layer.group, region=index, layout=layout)
        first = begins.setdefault((index, layer.group, layout.offset), ref)
        if first is ref:
            refs.append(ref)
        elif first.layout == layout:
            aliases.add(layer.name)
        else:
            raise InvalidInputError(
                f"the layers {first.name!r} and {layer.name!r} of group {layer.group} begin at the "
                f"same byte with different layouts: {first.layout.describe()} and "
                f"{layout.describe()}"
            )
    spans = [
        attrs.evolve(span, views=_views(x.layout for x in refs if x.region == index))
        for index, span in enumerate(spans)
    ]
    caches = Caches(spans=tuple(spans), layers=tuple(refs), aliases=frozenset(aliases))
    _ = caches.blocks_per_group  # refuses gaps in the group numbers
    regions: dict[str, tuple[Region, ...]] = {}
    done: list[tuple[Transport, Region]] = []
    try:
        for transport in transports:
            mine = []
            for span in spans:
                region = transport.register(span)
                done.append((transport, region))
                mine.append(region)
            regions[transport.name] = tuple(mine)
    except KvxferError:
        for transport, region in reversed(done):
            transport.deregister(region)
        raise
    return attrs.evolve(caches, regions=regions)


def _check_offset(layer: LayerCache, storage: Span) -> None:
    """Offsets count from the storage: one that lies before the buffer was meant otherwise.

    Raises:
        InvalidInputError: names both.
    """
    begin = span_of(layer.buffer).address - storage.address
    if layer.layout.offset < begin:
        raise InvalidInputError(
            f"the layout of layer {layer.name!r} begins at byte {layer.layout.offset} of its "
            f"storage, but its buffer begins at byte {begin}",
            next_step="count from the storage: KVLayout.from_tensor, or layout.at_offset(...)",
        )


def _views(layouts: Iterable[KVLayout | StateLayout]) -> tuple[tuple[int, int], ...]:
    """Where the layers of one storage lie, if there are several and they lie one after the other.

    Layers that interleave get none: engines that register each view once more would register the
    whole storage for every layer.
    """
    ends: dict[int, int] = {}
    for layout in layouts:
        if isinstance(layout, KVLayout):
            ends[layout.offset] = max(layout.end_offset, ends.get(layout.offset, 0))
    views = sorted(ends.items())
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(views)):
        return ()
    return tuple((begin, end - begin) for begin, end in views if begin)


def _region_for(storage: Span, spans: list[Span]) -> tuple[int, Span]:
    """Index and span of the region that holds ``storage``, which is added if it is new."""
    for index, span in enumerate(spans):
        if span.covers(storage):
            return index, span
    spans.append(storage)
    return len(spans) - 1, storage


def as_layers(
    caches: Mapping[str, Any] | Iterable[LayerCache],
    layout: KVLayout | Mapping[str, KVLayout] | None,
    groups: Mapping[str, int],
) -> list[LayerCache]:
    """What a user registers, one value per layer: see ``Agent.register_kv_caches``.

    Raises:
        InvalidInputError: mistyped, or a layer without a layout.
    """
    if not isinstance(caches, Mapping):
        return list(arguments.items("caches", caches, LayerCache))
    arguments.mapping("caches", caches)
    arguments.mapping("groups", groups)
    if layout is not None and not isinstance(layout, (KVLayout, Mapping)):
        raise InvalidInputError(
            f"layout must be a KVLayout or one per layer name, not {type(layout).__name__}"
        )
    layers = []
    for name, buffer in caches.items():
        if layout is None:
            mine: Any = KVLayout.from_tensor(buffer)
        elif isinstance(layout, Mapping):
            if name not in layout:
                raise InvalidInputError(f"layer {name!r} has no layout")
            mine = layout[name]
        elif layout.offset == 0:  # one for all of them: from where each buffer begins
            mine = layout.at_offset(span_of(buffer).address - storage_span(buffer).address)
        else:
            mine = layout
        layers.append(LayerCache(name=name, buffer=buffer, layout=mine, group=groups.get(name, 0)))
    return layers


def single_rank(caches: Caches) -> Ranks:
    """The ranks of an instance of one: it holds all heads of every layer."""
    copied = (LayoutKind.LATENT, LayoutKind.KEY_ONLY)
    heads = [
        layer.layout.heads
        for layer in caches.layers
        if isinstance(layer.layout, KVLayout) and layer.layout.kind not in copied
    ]
    if not heads:
        return Ranks(tp_size=1, latent=True)
    return Ranks(tp_size=1, total_kv_heads=max(heads))
