"""Our registered regions, and where each lies."""

from __future__ import annotations

import threading

import attrs

from kvxfer.backends.shm.memfd import Segment, find_segment
from kvxfer.core.memory import Span

__all__ = ["Export", "ExportTable"]


@attrs.frozen(kw_only=True)
class Export:
    """A registered region: in ``segment`` at offset ``place``, or at address ``place``."""

    region_id: int
    nbytes: int
    segment: Segment | None
    place: int


class ExportTable:
    """Regions by id. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exports: dict[int, Export] = {}
        self._next = 0

    def add(self, span: Span) -> Export:
        """Register a span; finds out whether it lies in a memory file."""
        segment = find_segment(span.address, span.nbytes)
        place = span.address if segment is None else span.address - segment.address
        with self._lock:
            export = Export(region_id=self._next, nbytes=span.nbytes, segment=segment, place=place)
            self._next += 1
            self._exports[export.region_id] = export
        return export

    def find(self, region_id: int) -> Export | None:
        with self._lock:
            return self._exports.get(region_id)

    def remove(self, region_id: int) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._exports.pop(region_id, None) is not None

    def clear(self) -> None:
        with self._lock:
            self._exports.clear()
