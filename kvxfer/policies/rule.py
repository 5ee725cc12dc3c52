"""One rule of the classifier: what it matches, and the verdict it gives."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from attrs import validators as v

from kvxfer.core.verdict import Action, EngineError, Op, Verdict
from kvxfer.errors import ConfigError, ErrorKind

__all__ = ["ANY", "Proof", "Rule", "RuleTable"]

ANY = "*"
"""The backend of a rule that holds for all backends."""


class Proof(enum.Enum):
    """What an error proves about the bytes of the engine call that it ended."""

    NONE = "none"
    """Nothing: pieces may still land."""
    NOT_POSTED = "not_posted"
    """The engine refused before it posted anything. Proves READ and WRITE."""
    REFUSED = "refused"
    """A queue refused. Nothing was posted if the engine's refusals are atomic
    (``Capabilities.atomic_refusal``); otherwise what came before the refusal may still land."""
    QUEUE_ERROR = "queue_error"
    """The local queue is in error, or the call was flushed from it. Nothing of a READ on that
    queue lands any more; of a WRITE, bytes already sent may."""

    def drains(self, op: Op | None, *, atomic_refusal: bool = False) -> bool:
        """Whether it proves that an engine call in the direction ``op`` is drained."""
        if self is Proof.NOT_POSTED:
            return True
        if self is Proof.REFUSED:
            return atomic_refusal
        return self is Proof.QUEUE_ERROR and op is Op.READ


def _proof(value: Proof | bool) -> Proof:
    if isinstance(value, bool):
        return Proof.NOT_POSTED if value else Proof.NONE
    return value


def _ops(value: Iterable[Op] | Op | None) -> frozenset[Op] | None:
    if value is None:
        return None
    return frozenset({value} if isinstance(value, Op) else value)


def _tuple(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(rules)


def _pattern(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None or isinstance(value, re.Pattern) or (isinstance(value, str) and value):
        return
    raise ConfigError(
        f"{type(instance).__name__}.{attribute.name} must be a text that messages begin with, a "
        f"compiled regular expression, or None for any message, not {value!r}"
    )


@attrs.frozen(kw_only=True)
class Rule:
    """Matches engine errors; all conditions that are given must hold.

    Attributes:
        name: unique in a registry; the verdict carries it.
        backend: ``EngineError.backend``, or ``ANY``.
        code: the engine's numeric code.
        pattern: a text that the message begins with, or a compiled expression that matches at its
            beginning. The message is the normalised one (``RuleTable.normalise``). The groups
            ``most_pieces`` and ``most_nbytes`` of an expression, numbers, go into the verdict.
        exception: a class name, bare or with its module; base classes count, the nearest wins.
        ops: the directions it is for; None for both. An error of unknown direction matches only
            rules for both.
        kind, action, retryable: go into the verdict. ``retryable``: the pieces may be posted again
            once ``action`` is done. False with REBUILD or REHANDSHAKE: this attempt is lost, but
            the path needs it for the sake of others.
        drained: what the error proves; True is short for ``Proof.NOT_POSTED``, False for NONE.
        priority: the higher wins among equally specific rules.

    Raises:
        ConfigError: a pattern of another type, or FAIL or WAIT called retryable.
    """

    name: str = attrs.field(validator=v.and_(v.instance_of(str), v.min_len(1)))
    backend: str = attrs.field(default=ANY, validator=v.and_(v.instance_of(str), v.min_len(1)))
    code: int | None = attrs.field(default=None, validator=v.optional(v.instance_of(int)))
    pattern: str | re.Pattern[str] | None = attrs.field(default=None, validator=_pattern)
    exception: str | None = attrs.field(
        default=None, validator=v.optional(v.and_(v.instance_of(str), v.min_len(1)))
    )
    ops: frozenset[Op] | None = attrs.field(default=None, converter=_ops)
    kind: ErrorKind = attrs.field(validator=v.instance_of(ErrorKind))
    action: Action = attrs.field(validator=v.instance_of(Action))
    retryable: bool = attrs.field(validator=v.instance_of(bool))
    drained: Proof = attrs.field(
        default=Proof.NONE, converter=_proof, validator=v.instance_of(Proof)
    )
    priority: int = attrs.field(default=0, validator=v.instance_of(int))

    @retryable.validator
    def _agrees_with_action(self, _: attrs.Attribute[bool], value: bool) -> None:
        if value and self.action in {Action.FAIL, Action.WAIT}:
            raise ConfigError(
                f"rule {self.name!r}: {self.action.value} cannot be retryable",
                next_step="give the action that makes another post succeed",
            )

    def matches(self, error: EngineError, message: str, op: Op | None) -> bool:
        """Whether every condition holds. ``message`` is the normalised one."""
        if self.backend not in {ANY, error.backend}:
            return False
        if self.code is not None and self.code != error.code:
            return False
        if self.ops is not None and op not in self.ops:
            return False
        if self.exception is not None and self.distance(error) is None:
            return False
        if self.pattern is None:
            return True
        if isinstance(self.pattern, str):
            return message.startswith(self.pattern)
        return self.pattern.match(message) is not None

    def distance(self, error: EngineError) -> int | None:
        """How far up the class tree ``exception`` is found: 0 is the class itself."""
        for depth, name in enumerate(error.exception):
            if self.exception in (name, name.rpartition(".")[2]):
                return depth
        return None

    def rank(self, error: EngineError) -> tuple[int, ...]:
        """The larger, the more specific; for rules that match ``error``.

        A rule that names the message comes before one that names the exception (the nearer class
        first), then one that names the code, the direction, the backend; then priority.
        """
        depth = self.distance(error) if self.exception is not None else None
        return (
            self.pattern is not None,
            depth is not None,
            -(depth or 0),
            self.code is not None,
            self.ops is not None,
            self.backend != ANY,
            self.priority,
        )

    def verdict(self, op: Op | None, *, atomic_refusal: bool = False) -> Verdict:
        """What to make of a matching error."""
        return Verdict(
            kind=self.kind,
            action=self.action,
            retryable=self.retryable,
            drained=self.drained.drains(op, atomic_refusal=atomic_refusal),
            rule=self.name,
        )

    @property
    def asks_for_sizes(self) -> bool:
        return isinstance(self.pattern, re.Pattern) and bool(self.pattern.groupindex)

    def sizes(self, message: str) -> dict[str, int]:
        """``most_pieces`` and ``most_nbytes``, as far as the message names them."""
        if not isinstance(self.pattern, re.Pattern):
            return {}
        match = self.pattern.match(message)
        found = match.groupdict() if match is not None else {}
        sizes = {name: found.get(name) or "" for name in ("most_pieces", "most_nbytes")}
        # 0 is no size that anything could be cut to; the text is the engine's, not ours.
        return {n: int(s) for n, s in sizes.items() if s.isdecimal() and len(s) < 19 and int(s)}


@attrs.frozen(kw_only=True)
class RuleTable:
    """Rules that belong together, and how to prepare their backend's messages.

    ``normalise`` cuts what varies without meaning; it is applied to every message of ``backend``
    before any rule sees it.
    """

    backend: str
    rules: tuple[Rule, ...] = attrs.field(
        converter=_tuple, validator=v.deep_iterable(v.instance_of(Rule))
    )
    normalise: Callable[[str], str] | None = attrs.field(
        default=None, validator=v.optional(v.is_callable())
    )
