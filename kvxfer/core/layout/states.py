"""From tensors to ``StateLayout``: one tensor per part, or padded pages that hold all parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.core.layout.state import Sharding, StateLayout, StatePart
from kvxfer.core.layout.tensors import TensorFacts, tensor_facts
from kvxfer.errors import GeometryError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["state_of_pages", "state_of_tensors"]


def state_of_tensors(
    tensors: Mapping[str, Any],
    *,
    sharding: Mapping[str, Sharding],
    unit_axis: Mapping[str, int] | None = None,
    total_units: Mapping[str, int] | None = None,
    region_address: int | None = None,
) -> StateLayout:
    """See ``StateLayout.from_tensors``."""
    if not tensors:
        raise GeometryError("a state needs at least one tensor")
    parts = []
    slots: dict[str, int] = {}
    for name, tensor in tensors.items():
        facts = tensor_facts(tensor, region_address)
        if name not in sharding:
            raise InvalidInputError(f"sharding lacks part {name!r}")
        if len(facts.shape) < 2 or 0 in facts.shape:
            raise GeometryError(
                f"state part {name!r} of shape {facts.shape} holds no slots: it needs the axes "
                "slot and at least one more, none of them empty"
            )
        slots[name] = facts.shape[0]
        axis = (unit_axis or {}).get(name, 1)
        parts.append(_part(name, facts, sharding[name], axis, (total_units or {}).get(name)))
    if len(set(slots.values())) > 1:
        raise GeometryError(f"the parts of a state have different numbers of slots: {slots}")
    return StateLayout(num_slots=next(iter(slots.values())), parts=parts)


def _part(
    name: str, facts: TensorFacts, sharding: Sharding, axis: int, total_units: int | None
) -> StatePart:
    shape, strides = facts.shape, facts.strides
    if not 1 <= axis < len(shape):
        raise InvalidInputError(f"unit_axis {axis} of part {name!r} is no axis of {shape}")
    if sharding is not Sharding.SHARDED:
        return StatePart(
            name=name,
            offset=facts.offset,
            slot_stride=strides[0],
            unit_nbytes=_contiguous_nbytes(name, facts, 1),
            dtype=facts.dtype,
            sharding=sharding,
            total_units=total_units,
        )
    nbytes = _contiguous_nbytes(name, facts, axis + 1)
    # Axes before the unit axis must form one run of rows.
    rows, row_stride = 1, 0
    for position in range(axis - 1, 0, -1):
        if shape[position] == 1:
            continue
        if rows == 1:
            rows, row_stride = shape[position], strides[position]
        elif strides[position] == rows * row_stride:
            rows *= shape[position]
        else:
            raise GeometryError(f"state part {name!r} of strides {strides} B has several row axes")
    return StatePart(
        name=name,
        offset=facts.offset,
        slot_stride=strides[0],
        rows=rows,
        row_stride=row_stride,
        units=shape[axis],
        unit_stride=strides[axis],
        unit_nbytes=nbytes,
        dtype=facts.dtype,
        sharding=sharding,
        total_units=total_units,
    )


def _contiguous_nbytes(name: str, facts: TensorFacts, first: int) -> int:
    """Bytes of the axes from ``first`` on, which must be contiguous."""
    nbytes = facts.itemsize
    inner = zip(facts.shape[first:], facts.strides[first:], strict=True)
    for size, stride in reversed(list(inner)):
        if size > 1 and stride != nbytes:
            raise GeometryError(
                f"state part {name!r} of shape {facts.shape} and strides {facts.strides} B is not "
                "contiguous inside a unit"
            )
        nbytes *= size
    return nbytes


def state_of_pages(
    pages: Any,
    parts: Sequence[StatePart],
    *,
    region_address: int | None = None,
) -> StateLayout:
    """See ``StateLayout.from_pages``."""
    facts = tensor_facts(pages, region_address)
    if facts.itemsize != 1 or len(facts.shape) != 2:
        raise GeometryError(
            f"pages must be bytes of shape (slots, page bytes), not {facts.dtype} of shape "
            f"{facts.shape}"
        )
    slots, page = facts.shape
    if facts.strides != (page, 1):
        raise GeometryError(f"pages must be contiguous, not of strides {facts.strides}")
    layout = StateLayout(
        num_slots=slots,
        parts=[attrs.evolve(part, slot_stride=page) for part in parts],
        offset=facts.offset,
    )
    end, before = 0, "the page's start"
    for part, cells in sorted(
        zip(layout.parts, layout.part_layouts, strict=True), key=lambda entry: entry[0].offset
    ):
        if part.offset < end:
            raise GeometryError(f"part {part.name!r} at byte {part.offset} overlaps {before}")
        end, before = part.offset + cells.span_nbytes - (slots - 1) * page, part.name
        if end > page:
            raise GeometryError(f"part {part.name!r} ends at byte {end} of a page of {page}")
    return layout
