"""How to judge this backend's errors, and a retry policy that waits longer than the default."""

from __future__ import annotations

import tenacity

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.classify import Proof, Rule
from kvxfer.policies.retry import RetryPolicy


def rules() -> list[Rule]:
    """The entry point of the group ``kvxfer.classifiers``."""
    return [
        Rule(
            name="sample.gone",
            backend="sample",
            pattern="nobody lives at ",
            kind=ErrorKind.PEER_LOST,
            action=Action.FAIL,
            retryable=False,
            drained=Proof.NOT_POSTED,
        )
    ]


def patient() -> RetryPolicy:
    """The entry point of the group ``kvxfer.retry_policies``."""
    return RetryPolicy(wait=tenacity.wait_fixed(0.1), stop=tenacity.stop_after_attempt(50))
