"""Hellos: what this agent says of itself, and what a peer said, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.agent.mapping import ranks_from_wire, ranks_to_wire
from kvxfer.core import wire
from kvxfer.core.layout import KVLayout, LayerRef, StateLayout
from kvxfer.core.layout.layers import MAX_LAYERS
from kvxfer.core.memory import Descriptor, MemoryKind
from kvxfer.core.topology import Ranks
from kvxfer.core.transport import PeerInfo
from kvxfer.errors import HandshakeError, InvalidInputError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.caches import Caches
    from kvxfer.core.transport import Transport

__all__ = ["MAX_LAYOUTS", "LocalHello", "PeerHello"]

MAX_LAYOUTS = 4 * MAX_LAYERS
"""Most layouts of one hello. Recurrent states have two to four parts, each of which has one, and
making one takes some 40 us of the thread that renews leases."""


@attrs.frozen(kw_only=True)
class PeerHello:
    """A peer's hello, validated."""

    incarnation: str
    name: str
    address: str
    versions: tuple[int, int]
    session: int
    revision: int
    ranks: Ranks
    fingerprint: str
    infos: Mapping[str, PeerInfo]
    descriptors: Mapping[str, tuple[Descriptor, ...]]
    layers: tuple[LayerRef, ...]
    keeper: wire.KeeperWire | None = None
    failover: tuple[str, ...] = ()

    @classmethod
    def from_wire(cls, sender: str, message: wire.Hello) -> PeerHello:
        """Turn a decoded message into values.

        Raises:
            WireError: a rank, a layout or a region index makes no sense; the text says which.
        """
        infos: dict[str, PeerInfo] = {}
        descriptors: dict[str, tuple[Descriptor, ...]] = {}
        for t in message.transports:
            infos[t.name] = PeerInfo(transport=t.name, incarnation=t.incarnation, data=t.data)
            descriptors[t.name] = tuple(
                Descriptor(
                    transport=t.name,
                    incarnation=t.incarnation,
                    region_id=r.region_id,
                    nbytes=r.nbytes,
                    kind=MemoryKind(r.kind),
                    device=r.device,
                    data=r.data,
                )
                for r in t.regions
            )
        if message.keeper is None and message.versions[1] >= 2:
            raise WireError(
                f"hello of {message.name!r}: it speaks wire version {message.versions[1]} and does "
                "not say where its keeper is reached, or that it has none"
            )
        layouts = sum(_layouts(x.layout) for x in message.layers)
        for what, found, most in (
            ("layers", len(message.layers), MAX_LAYERS),
            ("layouts, those of all parts of its states included", layouts, MAX_LAYOUTS),
        ):
            if found > most:
                raise WireError(f"hello of {message.name!r}: it has {found} {what}, over {most}")
        try:
            layers = tuple(
                LayerRef(name=x.name, group=x.group, region=x.region, layout=_layout(x.layout))
                for x in message.layers
            )
            ranks = ranks_from_wire(message.ranks)
        except InvalidInputError as error:
            raise WireError(f"hello of {message.name!r}: {error}") from None
        for regions in descriptors.values():
            for layer in layers:
                if (
                    layer.region >= len(regions)
                    or layer.layout.end_offset > regions[layer.region].nbytes
                ):
                    raise WireError(
                        f"hello of {message.name!r}: layer {layer.name!r} leaves its region "
                        f"{layer.region}"
                    )
        return cls(
            incarnation=sender,
            name=message.name,
            address=message.address,
            versions=message.versions,
            session=message.session,
            revision=message.revision,
            ranks=ranks,
            fingerprint=message.fingerprint,
            infos=infos,
            descriptors=descriptors,
            layers=layers,
            keeper=message.keeper,
            failover=tuple(message.failover),
        )

    def used(self, ours: Sequence[Transport]) -> tuple[Transport, ...]:
        """Those of ``ours`` over which that peer may reach into our memory."""
        mine = {t.name: t for t in ours}
        if self.failover:
            return tuple(mine[n] for n in self.failover if n in mine and n in self.infos)
        return tuple(mine[n] for n in self.infos if n in mine)[:1]


def _layouts(message: Mapping[str, Any]) -> int:
    """How many layouts have to be made of one layer's: one, or one for each part of its state."""
    parts = message.get("parts")
    return len(parts) if isinstance(parts, list) else 1


def _layout(message: Mapping[str, Any]) -> KVLayout | StateLayout:
    return (StateLayout if "parts" in message else KVLayout).from_wire(message)


@attrs.define(kw_only=True)
class LocalHello:
    """What this agent says. ``caches`` changes when caches are registered."""

    name: str
    incarnation: str
    address: str
    ranks: Ranks
    fingerprint: str
    transports: Sequence[Transport]
    caches: Caches
    versions: tuple[int, int] = (wire.WIRE_MIN, wire.WIRE_MAX)
    order: tuple[str, ...] | None = None
    """Failover: backends in order of preference, all of them if empty; None: there is none."""
    revision: int = 0
    keeper: wire.KeeperWire = attrs.field(factory=lambda: wire.KeeperWire("", 0))

    def message(self, *, answer: bool, session: int) -> wire.Hello:
        return wire.Hello(
            versions=self.versions,
            answer=answer,
            session=session,
            revision=self.revision,
            name=self.name,
            address=self.address,
            ranks=ranks_to_wire(self.ranks),
            fingerprint=self.fingerprint,
            # One engine may have ended while the others serve.
            transports=[self.caches.transport_wire(t) for t in self.transports if not t.closed],
            layers=self.caches.layers_wire(),
            keeper=self.keeper,
            failover=[] if self.order is None else [t.name for t in self.preferred if not t.closed],
        )

    @property
    def preferred(self) -> tuple[Transport, ...]:
        """The transports that may be used, in order of preference."""
        if not self.order:
            return tuple(self.transports)
        mine = {t.name: t for t in self.transports}
        return tuple(mine[name] for name in self.order)

    def check(self, peer: PeerHello) -> None:
        """Refuse a peer we cannot work with.

        Raises:
            HandshakeError: names both sides' values.
        """
        if wire.common_version(self.versions, peer.versions) is None:
            raise HandshakeError(
                f"{peer.name!r} speaks wire versions {peer.versions[0]} to {peer.versions[1]}, we "
                f"speak {self.versions[0]} to {self.versions[1]}",
                next_step="upgrade the older side",
            )
        if peer.fingerprint != self.fingerprint:
            raise HandshakeError(
                f"the fingerprint of {peer.name!r} is {peer.fingerprint!r}, ours is "
                f"{self.fingerprint!r}: equal geometry of another model is silent garbage",
                next_step="serve the same model, dtype and KV quantisation on both sides",
            )

    def common(self, peer: PeerHello) -> tuple[Transport, ...]:
        """Those of our transports that the peer has too, the preferred one first.

        Raises:
            HandshakeError: there is none.
        """
        found = tuple(t for t in self.preferred if t.name in peer.infos)
        if found:
            return found
        raise HandshakeError(
            f"{peer.name!r} offers the transports {sorted(peer.infos)}, we have "
            f"{[t.name for t in self.preferred]}",
            next_step="configure one backend on both sides",
        )
