"""How long the object lives into which MoRI-IO writes the fate of a call."""

from __future__ import annotations

import gc
import weakref

from kvxfer.backends.moriio import statuses


class Status:
    """Stands for the engine's: whoever frees it while the engine still writes damages the heap."""

    said = "nothing"


def renew(status: Status) -> None:
    status.said = "nothing"


def test_a_status_outlives_its_call() -> None:
    """The engine writes to it after it has said that the call is over: one that succeeded is used
    again and never freed, so that there are as many as calls were in flight at once."""
    kept = statuses.Statuses(Status, renew)
    first, second = kept.take(), kept.take()
    seen = weakref.WeakSet([first, second])
    kept.succeeded(first)
    kept.succeeded(second)
    del first, second
    gc.collect()
    assert len(seen) == 2
    for _ in range(100):
        status = kept.take()
        assert status in seen
        assert status.said == "nothing"  # the success of another call would be a silent one
        status.said = "success"
        kept.succeeded(status)


def test_a_failed_status_is_kept_and_not_used_again() -> None:
    """It keeps its code for good.  So many are kept that the engine has long let go of the one that
    is freed."""
    kept = statuses.Statuses(Status, renew)
    failed = weakref.WeakSet()
    for _ in range(statuses.KEPT_FAILED + 3):
        status = kept.take()
        assert status not in failed
        failed.add(status)
        kept.failed(status)
    del status
    gc.collect()
    assert len(failed) == statuses.KEPT_FAILED
