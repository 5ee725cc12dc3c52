"""Shorthands for rule tables: one function per class of verdict."""

from __future__ import annotations

import re

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, Rule

__all__ = ["RuleMaker"]


class RuleMaker:
    """Makes the rules of one backend; names are prefixed with it."""

    def __init__(self, backend: str, prefix: str = "") -> None:
        self.backend = backend
        self.prefix = prefix or backend

    def transient(
        self,
        name: str,
        pattern: str | re.Pattern[str] | None = None,
        *,
        code: int | None = None,
        exception: str | None = None,
        kind: ErrorKind = ErrorKind.BACKPRESSURE,
        drained: Proof = Proof.NONE,
    ) -> Rule:
        """The same call can succeed later."""
        return self.rule(
            name,
            pattern,
            kind=kind,
            action=Action.REPOST,
            retryable=True,
            code=code,
            exception=exception,
            drained=drained,
        )

    def rebuild(
        self,
        name: str,
        pattern: str | re.Pattern[str] | None = None,
        *,
        code: int | None = None,
        exception: str | None = None,
        kind: ErrorKind = ErrorKind.CONNECTION,
        action: Action = Action.REBUILD,
        retryable: bool = True,
        drained: Proof = Proof.NONE,
    ) -> Rule:
        """The path is dead. Not ``retryable``: this attempt is lost, but the path needs it."""
        return self.rule(
            name,
            pattern,
            kind=kind,
            action=action,
            retryable=retryable,
            code=code,
            exception=exception,
            drained=drained,
        )

    def permanent(
        self,
        name: str,
        pattern: str | re.Pattern[str] | None = None,
        *,
        code: int | None = None,
        exception: str | None = None,
        kind: ErrorKind = ErrorKind.INVALID,
        drained: Proof = Proof.NONE,
    ) -> Rule:
        """The same call fails again."""
        return self.rule(
            name,
            pattern,
            kind=kind,
            action=Action.FAIL,
            retryable=False,
            code=code,
            exception=exception,
            drained=drained,
        )

    def rule(
        self,
        name: str,
        pattern: str | re.Pattern[str] | None = None,
        *,
        kind: ErrorKind,
        action: Action,
        retryable: bool,
        code: int | None = None,
        exception: str | None = None,
        drained: Proof = Proof.NONE,
    ) -> Rule:
        """Any verdict."""
        return Rule(
            name=f"{self.prefix}.{name}",
            backend=self.backend,
            code=code,
            pattern=pattern,
            exception=exception,
            kind=kind,
            action=action,
            retryable=retryable,
            drained=drained,
        )
