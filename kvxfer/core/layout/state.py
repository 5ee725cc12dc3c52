"""``StateLayout``: recurrent state, one slot per request instead of blocks per token."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.layout import _wire
from kvxfer.core.layout._checks import is_count, is_name, is_nonnegative
from kvxfer.core.layout.kv import KVLayout, LayoutKind
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["MAX_PARTS", "Sharding", "StateLayout", "StatePart"]

MAX_PARTS = 64
"""Most parts one layer's state may have. Real models have two to four."""


class Sharding(enum.Enum):
    """How tensor parallelism spreads one part of the state."""

    SHARDED = "sharded"
    """Its units are dealt out over the ranks in order."""
    REPLICATED = "replicated"
    """Every rank holds all of it."""
    FUSED = "fused"
    """Spread over the ranks in a form that cannot be cut by unit: equal shares or nothing."""


@attrs.frozen(kw_only=True)
class StatePart:
    """One array of the state: per slot, ``rows`` rows of ``units`` units.

    A unit is what tensor parallelism deals out (a head, a channel).  The byte ``x`` of unit ``u``
    of row ``r`` of slot ``s`` lies at
    ``offset + s*slot_stride + r*row_stride + u*unit_stride + x``.

    ``total_units`` says how many there are over all ranks; None means ``units`` times the ranks.
    It is needed where there are more ranks than units, so that some ranks hold copies.
    """

    name: str = attrs.field(validator=is_name)
    offset: int = attrs.field(default=0, validator=is_nonnegative)
    slot_stride: int = attrs.field(validator=is_nonnegative)
    rows: int = attrs.field(default=1, validator=is_count)
    row_stride: int = attrs.field(default=0, validator=is_nonnegative)
    units: int = attrs.field(default=1, validator=is_count)
    unit_stride: int = attrs.field(default=0, validator=is_nonnegative)
    unit_nbytes: int = attrs.field(validator=is_count)
    total_units: int | None = attrs.field(default=None, validator=v.optional(is_count))
    dtype: str = attrs.field(validator=is_name)
    sharding: Sharding = attrs.field(default=Sharding.REPLICATED, validator=v.instance_of(Sharding))

    @property
    def slot_nbytes(self) -> int:
        """Payload bytes of one slot."""
        return self.rows * self.units * self.unit_nbytes


_PART_FIELDS = {
    "name": str,
    "offset": int,
    "slot_stride": int,
    "rows": int,
    "row_stride": int,
    "units": int,
    "unit_stride": int,
    "unit_nbytes": int,
    "total_units": int,
    "dtype": str,
    "sharding": str,
}


def _parts(parts: Iterable[StatePart]) -> tuple[StatePart, ...]:
    return tuple(parts)


@attrs.frozen(kw_only=True)
class StateLayout:
    """Slots of recurrent state, each of several parts.

    Raises:
        InvalidInputError: no parts, or two of one name.
        GeometryError: cells of one part overlap.
    """

    num_slots: int = attrs.field(validator=is_count)
    parts: tuple[StatePart, ...] = attrs.field(converter=_parts)
    offset: int = attrs.field(default=0, validator=is_nonnegative)

    geometry: tuple[Any, ...] = attrs.field(init=False, eq=False, repr=False)
    """Hashable key, equal for layers of equal geometry: everything but ``offset``."""
    part_layouts: tuple[KVLayout, ...] = attrs.field(init=False, eq=False, repr=False)
    """Each part in the planner's terms: rows are planes, units are heads, one token per block."""
    end_offset: int = attrs.field(init=False, eq=False, repr=False)
    """One past the last byte of the region that the layout may touch."""

    def __attrs_post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not 0 < len(names) <= MAX_PARTS:
            raise InvalidInputError(f"parts must hold 1 to {MAX_PARTS} entries, not {len(names)}")
        if len(set(names)) != len(names):
            raise InvalidInputError(f"parts must have different names, not {names}")
        layouts = tuple(
            KVLayout(
                num_blocks=self.num_slots,
                block_stride=part.slot_stride,
                planes=part.rows,
                plane_stride=part.row_stride,
                kernel_tokens=1,
                heads=part.units,
                head_stride=part.unit_stride,
                head_nbytes=part.unit_nbytes,
                offset=self.offset + part.offset,
                dtype=part.dtype,
                kind=LayoutKind.STATE,
            )
            for part in self.parts
        )
        put = object.__setattr__
        put(self, "part_layouts", layouts)
        put(self, "geometry", (LayoutKind.STATE, self.num_slots, self.parts))
        put(self, "end_offset", max(layout.end_offset for layout in layouts))

    @property
    def num_blocks(self) -> int:
        """Slots: the same word as for blocks, so that callers need not tell the two apart."""
        return self.num_slots

    @property
    def block_nbytes(self) -> int:
        """Payload bytes of one slot, all parts."""
        return sum(part.slot_nbytes for part in self.parts)

    @property
    def tokens_per_block(self) -> int:
        """1: positions of state blocks are slots."""
        return 1

    @property
    def span_nbytes(self) -> int:
        """Bytes from the first to one past the last that the layout may touch."""
        return self.end_offset - min(layout.offset for layout in self.part_layouts)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        sharding: Mapping[str, Sharding],
        unit_axis: Mapping[str, int] | None = None,
        total_units: Mapping[str, int] | None = None,
        region_address: int | None = None,
    ) -> StateLayout:
        """The state of one layer, kept as one tensor per part with the slots as first axis.

        Args:
            sharding: of every part.
            unit_axis: which axis of a sharded part is dealt out to the ranks; 1 by default.
            total_units: units over all ranks, see ``StatePart``.
            region_address: where the region starts, if not where the tensors' storage does.

        Raises:
            GeometryError: no tensors, slot counts that differ, an empty tensor, or strides that no
                part has.
        """
        from kvxfer.core.layout.states import state_of_tensors

        return state_of_tensors(
            tensors,
            sharding=sharding,
            unit_axis=unit_axis,
            total_units=total_units,
            region_address=region_address,
        )

    @classmethod
    def from_pages(
        cls, pages: Any, parts: Iterable[StatePart], *, region_address: int | None = None
    ) -> StateLayout:
        """The state of one layer, kept in padded byte pages, uint8[slots, page bytes].

        ``parts`` say what lies in one page; their ``offset`` counts from the page's start and
        their ``slot_stride`` is replaced by the page's.

        Raises:
            GeometryError: the pages are no bytes, not contiguous, or too small for the parts.
        """
        from kvxfer.core.layout.states import state_of_pages

        return state_of_pages(pages, tuple(parts), region_address=region_address)

    @classmethod
    def from_wire(cls, message: Any) -> StateLayout:
        """What ``to_wire`` made, from a peer that is not trusted.

        Raises:
            InvalidInputError: a key is missing, unknown, or of the wrong type or range.
            GeometryError: the numbers describe no valid layout.
        """
        fields = _wire.fields("state", message, {"num_slots": int, "parts": list, "offset": int})
        parts = []
        for i, entry in enumerate(_wire.items("state.parts", fields["parts"], MAX_PARTS)):
            part = _wire.fields(f"state.parts[{i}]", entry, _PART_FIELDS)
            part["sharding"] = _wire.enum_member(
                f"state.parts[{i}].sharding", Sharding, part["sharding"]
            )
            part["total_units"] = part["total_units"] or None
            parts.append(StatePart(**part))
        return cls(num_slots=fields["num_slots"], parts=parts, offset=fields["offset"])

    def to_wire(self) -> dict[str, Any]:
        """A dict of builtins, for the handshake."""
        return {
            "num_slots": self.num_slots,
            "parts": [
                {
                    **{f: getattr(part, f) for f in _PART_FIELDS},
                    "total_units": part.total_units or 0,
                    "sharding": part.sharding.value,
                }
                for part in self.parts
            ],
            "offset": self.offset,
        }

    def at_offset(self, offset: int) -> StateLayout:
        """The same geometry beginning at another byte of its region."""
        return attrs.evolve(self, offset=offset)

    def describe(self) -> str:
        """One line for error messages."""
        parts = "; ".join(
            f"{part.name} {part.dtype} {part.rows}x{part.units}x{part.unit_nbytes} B "
            f"{part.sharding.value}"
            for part in self.parts
        )
        return f"[state, {self.num_slots} slots, {parts}]"


def same_parts(local: StateLayout, remote: StateLayout) -> None:
    """Refuse states whose parts differ in name, dtype, rows, unit size or sharding.

    Raises:
        GeometryError: naming both.
    """

    def kind(state: StateLayout) -> list[tuple[Any, ...]]:
        return [(p.name, p.dtype, p.rows, p.unit_nbytes, p.sharding) for p in state.parts]

    if kind(local) != kind(remote):
        raise GeometryError(
            f"the recurrent states differ: local {local.describe()}, remote {remote.describe()}"
        )
