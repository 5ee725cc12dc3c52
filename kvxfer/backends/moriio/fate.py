"""What a failed status proves: how much of a call was posted, and whether anything can still land.

A pure function of the engine's words.  ``atomic`` calls are those that the engine makes as one post
batch on one queue pair (``MoriioConfig.one_queue_pair_per_call``); of any other a part may have
been posted before the refusal.

The engine's messages, before `` Hint: ``, as seen with amd-mori 1.2.4 (code 13 unless said):

    nothing posted      ``SQ full (batch): ep=N depth=D requested=R max=M``,
                        ``SQ request exceeds capacity (batch): ...``,
                        ``EP is degraded, rejecting new submissions``,
                        ``ibv_post_send failed with E: ... (posted 0/T WRs)``,
                        everything with code 11 or 14
    partly posted       ``ibv_post_send failed with E: ... (posted P/T WRs)``, P > 0
    all data posted     everything that names ``(notify)``, every completion status,
                        ``verbs async event ...``

Two texts are ours: ``own admission: send queue full`` (no code, nothing posted), and, where the
engine has told why a call was flushed, ``CAUSE; status: Work Request Flushed Error``, for instance
with the cause ``transport retry counter exceeded: peer did not acknowledge within ...``.
"""

from __future__ import annotations

import re

import attrs

from kvxfer.core.attempt import Accepted
from kvxfer.core.verdict import Op

__all__ = ["Fate", "depth_in", "judge"]

INVALID_ARGUMENTS = 11
BAD_STATE = 14

COMPLETION_ERRORS = (
    "local length error",
    "local QP operation error",
    "local EE context operation error",
    "local RDD violation error",
    "remote invalid RD request",
    "invalid EE context number",
    "invalid EE context state",
    "local protection error",
    "Work Request Flushed Error",
    "memory management operation error",
    "bad response error",
    "local access error",
    "remote invalid request error",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "RNR retry counter exceeded",
    "aborted error",
    "fatal error",
    "response timeout error",
    "general error",
)
"""Texts of ``ibv_wc_status_str``: the queue pair is in error and has completed this request."""

QUEUE_PAIR_ERROR = "local queue pair in error"

_DEPTH = re.compile(r"\bmax=(\d+)")
_POSTED = re.compile(r"\(posted (\d+)/\d+ WRs\)")


@attrs.frozen(kw_only=True)
class Fate:
    """``proof`` is why nothing of the call lands any more, empty if there is none.

    ``queue_dead``: no call on this queue pair succeeds again.
    """

    accepted: Accepted
    proof: str = ""
    queue_dead: bool = False


_NOTHING = Fate(accepted=Accepted.NONE, proof="nothing posted")
_PERHAPS = Fate(accepted=Accepted.UNKNOWN)


def depth_in(message: str) -> int | None:
    """The depth of the send queue, where the message names it: the device may grant less."""
    found = _DEPTH.search(message) if message.startswith("SQ ") else None
    return None if found is None else int(found.group(1))


def judge(op: Op, code: int, message: str, work_requests: int, *, atomic: bool = True) -> Fate:
    """The fate of one failed engine call of so many work requests."""
    text = message.partition(" Hint: ")[0]
    nothing = _NOTHING if atomic else _PERHAPS
    if code in (INVALID_ARGUMENTS, BAD_STATE):
        return nothing
    if "(notify)" in text:
        return Fate(accepted=Accepted.ALL)  # the data goes on, nothing will tell when it is done
    if text.startswith(("SQ full", "SQ request exceeds capacity")):
        depth = depth_in(text)
        # Where the device's queue is smaller than asked for, the call is several post batches.
        whole = depth is not None and work_requests <= depth
        return nothing if whole else _PERHAPS
    if text.startswith("EP is degraded"):
        return attrs.evolve(nothing, queue_dead=True)
    if text.startswith("endpoint was failed by a fatal verbs async event; submission rejected"):
        return attrs.evolve(nothing, queue_dead=True)
    if text.startswith("endpoint retired by a fatal async event"):
        return Fate(accepted=Accepted.UNKNOWN, queue_dead=True)
    if text.startswith("ibv_post_send"):
        posted = _POSTED.search(text)
        if posted is not None and posted.group(1) == "0":
            return nothing
        # No signalled tail was posted: no completion will ever tell.
        return Fate(accepted=Accepted.UNKNOWN, queue_dead=True)
    if text.startswith(COMPLETION_ERRORS):
        # Bytes of a WRITE that have left may land whatever happened to the queue pair since.
        # Of a call over several queue pairs, one of them in error says nothing of the others.
        proof = QUEUE_PAIR_ERROR if op is Op.READ and atomic else ""
        return Fate(accepted=Accepted.ALL, proof=proof, queue_dead=True)
    if text.startswith("verbs async event"):
        # The engine fails what is in flight when it hears of the event, not when the queue pair
        # has given it back.
        return Fate(accepted=Accepted.ALL, queue_dead=True)
    return Fate(accepted=Accepted.UNKNOWN)
