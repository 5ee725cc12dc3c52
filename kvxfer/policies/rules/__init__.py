"""The rules that kvxfer ships, one table per engine, each beside samples of what it matches.

``*_samples`` modules are data for tests and for ``check_samples``; classifying does not load them.
"""

from __future__ import annotations

from kvxfer.policies.rule import RuleTable
from kvxfer.policies.rules import loopback, mooncake, moriio, nixl, own, shm

__all__ = ["builtin_rules"]


def builtin_rules() -> tuple[RuleTable, ...]:
    """The classifier plug-in ``builtin``."""
    return (own.TABLE, loopback.TABLE, shm.TABLE, moriio.TABLE, mooncake.TABLE, nixl.TABLE)
