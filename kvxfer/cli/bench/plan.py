"""What a run measures: contenders, shapes, and how long each may take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs

from kvxfer.errors import ConfigError

__all__ = ["BenchPlan", "Cell", "Contender", "in_words", "rounded"]

KIB, MIB = 1 << 10, 1 << 20

PATTERNS = ("contiguous", "random")


@attrs.frozen(kw_only=True)
class Contender:
    """A backend as it is measured."""

    label: str
    backend: str
    options: dict[str, Any] = attrs.field(factory=dict)
    """Of its configuration, as JSON values."""
    memory: str = "kvxfer.cli.bench.memory:PrivateMemory"

    @classmethod
    def named(cls, name: str, config: dict[str, Any] | None = None) -> list[Contender]:
        """How a backend is measured: shm twice, with memory that it maps and memory in place."""
        options = {"config": config} if config else {}
        if name != "shm":
            return [cls(label=name, backend=name, options=options)]
        mapped = "kvxfer.cli.bench.memory:SharedMemory"
        return [
            cls(label="shm", backend=name, options=options, memory=mapped),
            cls(label="shm in place", backend=name, options=options),
        ]


@attrs.frozen(kw_only=True)
class Cell:
    """One shape of a transfer."""

    size: int
    """Bytes of a block."""
    count: int
    pattern: str

    @property
    def nbytes(self) -> int:
        return self.size * self.count

    def __str__(self) -> str:
        return f"{self.count} x {in_words(self.size)} {self.pattern}"


def _numbers(_: Any, attribute: attrs.Attribute[Any], values: tuple[int, ...]) -> None:
    if not values or any(type(v) is not int or v < 1 for v in values):
        raise ConfigError(f"{attribute.name} must be positive integers, not {list(values)}")


@attrs.frozen(kw_only=True)
class BenchPlan:
    """Sizes in bytes, times in seconds. JSON values go in and out."""

    sizes: tuple[int, ...] = attrs.field(
        default=(4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB), converter=tuple, validator=_numbers
    )
    """Of blocks, in bytes; multiples of 8."""
    counts: tuple[int, ...] = attrs.field(
        default=(16, 256, 1024), converter=tuple, validator=_numbers
    )
    """Blocks of one transfer."""
    patterns: tuple[str, ...] = attrs.field(default=PATTERNS, converter=tuple)
    concurrency: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8, 16, 32), converter=tuple, validator=_numbers
    )
    """Transfers under way at once."""
    buffer: int = 256 * MIB
    """Bytes registered on each side: many times a processor's cache, so that memory is measured."""
    seconds: float = 100.0
    """For all measurements of all contenders together; set-up comes on top."""
    recovery: bool = True
    seed: int = 1

    def __attrs_post_init__(self) -> None:
        if any(size % 8 for size in self.sizes):
            raise ConfigError(f"sizes must be multiples of 8 bytes, not {list(self.sizes)}")
        if unknown := set(self.patterns) - set(PATTERNS):
            raise ConfigError(f"patterns are {', '.join(PATTERNS)}, not {sorted(unknown)}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"seconds must be positive and finite, not {self.seconds!r}")
        if not self.cells():
            raise ConfigError(
                f"no shape fits into a buffer of {self.buffer} bytes",
                next_step="choose smaller sizes, smaller counts or a larger buffer",
            )

    def cells(self) -> list[Cell]:
        """The shapes that fit into the buffer."""
        return list(self._cells())

    def _cells(self) -> Iterator[Cell]:
        for pattern in self.patterns:
            for size in self.sizes:
                for count in self.counts:
                    if size * count <= self.buffer:
                        yield Cell(size=size, count=count, pattern=pattern)

    @property
    def load(self) -> Cell:
        """One transfer of the concurrency and recovery parts: about a megabyte in 16 KiB blocks."""
        size = min(self.sizes, key=lambda s: abs(s - 16 * KIB))
        most = self.buffer // size
        return Cell(size=size, count=max(1, min(MIB // size, most)), pattern="random")

    def steps(self) -> int:
        """Measurements per contender."""
        return len(self.cells()) + len(self.concurrency) + self.recovery

    def to_json(self) -> str:
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchPlan:
        return cls(**json.loads(text))


def in_words(nbytes: int) -> str:
    """``64 KiB``."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def rounded(value: float) -> float:
    """To four digits, however small it is."""
    return float(f"{value:.4g}")
