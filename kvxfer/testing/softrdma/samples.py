"""What the engine said: its codes and messages, recorded from the real wheel.

``samples.json`` was written by ``python -m kvxfer.testing.softrdma record``.  Rules that classify
errors are tested against it; a test records every sample again and compares.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Recording", "Sample", "Surface", "Verdict", "load_samples", "normalise"]

SAMPLES = Path(__file__).with_name("samples.json")
FORMAT = 1
HINT = " Hint: "


class Surface(enum.Enum):
    """Where the caller meets an error."""

    STATUS = "status"
    """The code and message of a transfer's status."""
    EXCEPTION = "exception"
    """A Python exception."""
    EXIT = "exit"
    """The process ended; nothing can be caught."""


class Verdict(enum.Enum):
    """What the error means for the caller who wants to try again."""

    SUCCESS = "success"
    TRANSIENT = "transient"
    """The same call on the same session can succeed."""
    REBUILD = "rebuild"
    """The connection is dead; nothing on it works again."""
    PERMANENT = "permanent"
    """The same arguments fail again; the connection is healthy."""
    FATAL = "fatal"
    """The process is gone."""


@attrs.frozen(kw_only=True)
class Sample:
    """One thing that the engine said, and how it came about."""

    name: str
    section: int
    """1: statuses over RDMA; 3: Python exceptions; 4: what kills the process."""
    row: str
    """The message with its variable parts as letters, as the failure guide lists it."""
    verdict: Verdict
    how: str
    """What was done to provoke it."""
    surface: Surface
    code: int | None
    """The status code, or the exit status (negative: a signal); None for exceptions."""
    exception: str | None
    """The exception's type."""
    message: str
    """Whole, letter by letter."""
    op: str | None
    """READ or WRITE; None where it is neither."""
    facts: Mapping[str, Any]
    """What else was seen: ``retry`` is the same call on the same session again."""


@attrs.frozen(kw_only=True)
class Recording:
    """Samples, and what they were recorded with."""

    wheel: Mapping[str, str]
    recorded_with: Mapping[str, str]
    samples: tuple[Sample, ...]

    def __getitem__(self, name: str) -> Sample:
        """The sample of that name.

        Raises:
            KeyError: There is none.
        """
        for sample in self.samples:
            if sample.name == name:
                return sample
        raise KeyError(name)

    def to_json(self) -> str:
        """The file's text."""

        def plain(_instance: type, _field: attrs.Attribute[Any], value: Any) -> Any:
            return value.value if isinstance(value, enum.Enum) else value

        document = {"format": FORMAT, **attrs.asdict(self, value_serializer=plain)}
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load_samples(path: Path = SAMPLES) -> Recording:
    """Read a recording.

    Raises:
        ValueError: The file is not a recording of this format.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {document.get('format')!r}, not {FORMAT}")
    samples = tuple(
        Sample(
            **{
                **entry,
                "verdict": Verdict(entry["verdict"]),
                "surface": Surface(entry["surface"]),
            }
        )
        for entry in document["samples"]
    )
    return Recording(
        wheel=document["wheel"], recorded_with=document["recorded_with"], samples=samples
    )


_VARIABLE = (
    (re.compile(r"softrdma-[0-9a-f]+"), "KEY"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"\d+(\.\d+)*"), "N"),
)


def normalise(message: str) -> str:
    """The message without hint, addresses, keys and numbers: equal for two runs of one cause."""
    text = message.partition(HINT)[0]
    for variable, replacement in _VARIABLE:
        text = variable.sub(replacement, text)
    return text
