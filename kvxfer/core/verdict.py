"""What an engine said, and what we make of it: the values that classification and retry share."""

from __future__ import annotations

import enum

import attrs

from kvxfer.errors import ErrorKind

__all__ = ["Action", "EngineError", "HistoryEntry", "Op", "Verdict"]


class Op(enum.Enum):
    """Direction of a post. READ: the local side pulls. WRITE: the local side pushes."""

    READ = "read"
    WRITE = "write"


class Action(enum.Enum):
    """What to do about an error."""

    REPOST = "repost"
    """Post the same pieces again on the same path, after the policy's wait."""
    SPLIT = "split"
    """Post the pieces again in smaller batches: of the size the engine named, else in halves."""
    WAIT = "wait"
    """The attempt is still in progress; do nothing yet."""
    REBUILD = "rebuild"
    """The path is dead: prepare a new one, then post again."""
    REHANDSHAKE = "rehandshake"
    """What we know of the peer is out of date: exchange hellos again, then rebuild."""
    FAIL = "fail"
    """Give up; the same call fails again."""


@attrs.frozen(kw_only=True)
class EngineError:
    """An engine's own words, unjudged.

    ``exception`` holds the class names of a raised exception, most derived first, so that rules
    can match by type without importing the engine.
    """

    backend: str
    code: int | None = None
    message: str = ""
    exception: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: str, error: BaseException, code: int | None = None) -> EngineError:
        """Describe a raised exception."""
        names = tuple(
            f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__ if c is not object
        )
        return cls(backend=backend, code=code, message=str(error), exception=names)

    def __str__(self) -> str:
        code = "" if self.code is None else f" code {self.code}"
        name = f" {self.exception[0].rpartition('.')[2]}" if self.exception else ""
        return f"{self.backend}{code}{name}: {self.message}"


@attrs.frozen(kw_only=True)
class Verdict:
    """A classifier's answer. ``rule`` names the rule that gave it."""

    kind: ErrorKind
    action: Action
    retryable: bool
    drained: bool
    """The error itself proves that nothing of the attempt can land any more."""
    rule: str
    most_pieces: int | None = None
    """With SPLIT: the most pieces that the engine says one call may have."""
    most_nbytes: int | None = None
    """With SPLIT: the most bytes that the engine says one call, or one merged piece, may have."""


@attrs.frozen(kw_only=True)
class HistoryEntry:
    """One refused or failed attempt, as kept on the final error. ``at`` is clock seconds."""

    at: float
    kind: ErrorKind
    action: Action
    rule: str
    message: str
