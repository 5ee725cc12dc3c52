"""MoRI-IO (amd-mori 1.2.4): statuses by (code, message start), exceptions by message.

Code 13 alone says nothing: four different refusals and every hardware error share it, so there is
no rule for the bare code and unknown texts under it stay UNKNOWN.  For 11, 12, 14 and 15 the bare
code has a rule for texts that none of the others knows.

What the proofs rest on (reasoning from the ordering of reliable connections, seen with a software
device, not measured on a NIC):

* READ: an error completion or flush of the signalled tail means that nothing of the call lands
  later in our memory. WRITE: it proves nothing, since packets already sent may still land.
* A refusal means that nothing was posted when the call was one post batch on one queue pair, which
  is how the backend cuts its calls. Argument checks run per share of a call, so the same holds.
* A partial post has no signalled tail; an async event fails what is in flight when the engine hears
  of it, not when the queue pair has given it back (seen: the bytes landed afterwards); copies over
  XGMI or FABRIC have no queue: no proof.
"""

from __future__ import annotations

import re

from kvxfer.core.verdict import Action
from kvxfer.errors import ErrorKind
from kvxfer.policies.rule import Proof, RuleTable
from kvxfer.policies.rules.build import RuleMaker

__all__ = ["TABLE", "normalise"]

_on = RuleMaker("moriio")

SUCCESS, INIT, IN_PROGRESS = 0, 1, 2
INVALID_ARGS, NOT_FOUND, RDMA_OP, BAD_STATE, GPU_OP = 11, 12, 13, 14, 15

_REFUSED, _QUEUE_ERROR, _NOT_POSTED = Proof.REFUSED, Proof.QUEUE_ERROR, Proof.NOT_POSTED


def normalise(message: str) -> str:
    """The message without its " Hint: " tail, whose wording changes between releases.

    ``pop_peer_failure`` repeats completion texts after "completion status ": cut as well.
    """
    return message.partition(" Hint: ")[0].removeprefix("completion status ")


def _one_of(*texts: str) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in texts))


_TOO_LONG = re.compile(
    r"merged RDMA WR \d+ length \d+ exceeds local max_m(?:sg_sz (?P<most_nbytes>\d+))?"
)

_REFUSALS = [
    # The backend's own count of what is in flight, which spares the engine's refusal.
    _on.transient("own_admission", "own admission: send queue full", drained=_NOT_POSTED),
    # More than the queues take when they are empty: a device that grants less than was asked for.
    _on.rule(
        "own_capacity",
        re.compile(r"own admission: request exceeds capacity, max=(?P<most_pieces>\d+)"),
        kind=ErrorKind.INVALID,
        action=Action.SPLIT,
        retryable=True,
        drained=_NOT_POSTED,
    ),
    _on.transient("sq_full", "SQ full (batch): ", code=RDMA_OP, drained=_REFUSED),
    # The data is posted and lands; only the notification was refused.
    _on.transient("sq_full_notify", "SQ full (notify): ", code=RDMA_OP),
    _on.rule(
        "sq_request_exceeds_capacity",
        re.compile(r"SQ request exceeds capacity \((?:.*\bmax=(?P<most_pieces>\d+))?"),
        code=RDMA_OP,
        kind=ErrorKind.INVALID,
        action=Action.SPLIT,
        retryable=True,
        drained=_REFUSED,
    ),
    # P/T counts one post batch. ENOMEM: a retry worked.
    _on.transient(
        "post_send_no_memory",
        re.compile(r"ibv_post_send failed with 12: .*\(posted 0/\d+ WRs\)"),
        code=RDMA_OP,
        drained=_REFUSED,
    ),
    _on.permanent(
        "post_send_invalid",
        re.compile(r"ibv_post_send failed with 22: .*\(posted 0/\d+ WRs\)"),
        code=RDMA_OP,
        drained=_REFUSED,
    ),
    # Another errno: what it needs is not known, but nothing was posted.
    _on.permanent(
        "post_send_refused",
        re.compile(r"ibv_post_send failed with (?!(?:12|22): )\d+: .*\(posted 0/\d+ WRs\)"),
        code=RDMA_OP,
        kind=ErrorKind.UNKNOWN,
        drained=_REFUSED,
    ),
    _on.rebuild(
        "post_send_partial",
        re.compile(r"ibv_post_send failed with \d+: .*\(posted [1-9]\d*/\d+ WRs\)"),
        code=RDMA_OP,
    ),
    _on.transient("post_send_notify", "ibv_post_send (notify) failed with ", code=RDMA_OP),
    # Never cleared: no work request is posted any more whose completion could clear it.
    _on.rebuild(
        "degraded", "EP is degraded, rejecting new submissions", code=RDMA_OP, drained=_REFUSED
    ),
    _on.rebuild(
        "failed_by_async_event",
        "endpoint was failed by a fatal verbs async event; submission rejected",
        code=RDMA_OP,
        drained=_REFUSED,
    ),
    _on.rebuild("retired_by_async_event", "endpoint retired by a fatal async event", code=RDMA_OP),
    _on.rebuild(
        "no_ledger", "submission ledger is not initialized", code=RDMA_OP, drained=_REFUSED
    ),
]

# The backend's own, about engine generations; nothing was posted but with the last.
_GENERATIONS = [
    _on.rebuild(
        "generation_ended", re.compile(r"engine generation \d+ has ended"), drained=_NOT_POSTED
    ),
    # There are two already: the older one has to end first.
    _on.transient(
        "generation_waits",
        re.compile(r"engine generation \d+ has not ended"),
        kind=ErrorKind.CONNECTION,
        drained=_NOT_POSTED,
    ),
    _on.transient(
        "fencing", "the peer is being fenced", kind=ErrorKind.CONNECTION, drained=_NOT_POSTED
    ),
    _on.permanent("rehearsal", "rehearsal failed: ", kind=ErrorKind.RESOURCE, drained=_NOT_POSTED),
    # The call was still in flight: whether it is drained, the attempt says.
    _on.rebuild(
        "generation_cut_off", re.compile(r"engine generation \d+ ended before the call did")
    ),
]

_EVENTS = [
    _on.rebuild("qp_fatal", "verbs async event IBV_EVENT_QP_FATAL: ", code=RDMA_OP),
    _on.rebuild("cq_error", "verbs async event IBV_EVENT_CQ_ERR: ", code=RDMA_OP),
    _on.rebuild("device_fatal", "verbs async event IBV_EVENT_DEVICE_FATAL: ", code=RDMA_OP),
]

_COMPLETIONS = [
    _on.rebuild(
        "peer_unreachable",
        "transport retry counter exceeded",
        kind=ErrorKind.PEER_LOST,
        drained=_QUEUE_ERROR,
    ),
    # Also the first failure of a batch of several work requests: the cause is in
    # pop_peer_failure.
    _on.rebuild("flushed", "Work Request Flushed Error", code=RDMA_OP, drained=_QUEUE_ERROR),
    # Deregistered, or registered by an earlier life of the peer.
    _on.rebuild(
        "remote_access",
        "remote access error",
        code=RDMA_OP,
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
        drained=_QUEUE_ERROR,
    ),
    # Our own buffer was deregistered in use: the same pieces fail on any path.
    _on.rebuild(
        "local_protection",
        "local protection error",
        code=RDMA_OP,
        kind=ErrorKind.INVALID,
        retryable=False,
        drained=_QUEUE_ERROR,
    ),
    _on.rebuild(
        "completion_error",
        _one_of(
            "local QP operation error",
            "local length error",
            "remote operation error",
            "RNR retry counter exceeded",
            "remote invalid request error",
            "fatal error",
            "response timeout error",
            "general error",
            "bad response error",
            "local access error",
            "aborted error",
            "memory management operation error",
            "local EE context operation error",
            "local RDD violation error",
            "remote invalid RD request",
            "invalid EE context number",
            "invalid EE context state",
        ),
        code=RDMA_OP,
        drained=_QUEUE_ERROR,
    ),
]

_ARGUMENTS = [
    *(
        _on.permanent(name, text, code=INVALID_ARGS, drained=_REFUSED)
        for name, text in (
            ("out_of_range", "length out of range"),
            ("unequal_vectors", "lengths of local offsets, remote offsets or sizes mismatch"),
            ("batch_too_long", "batch size exceeds int range"),
            ("too_many_work_requests", "final WR count exceeds int range"),
            ("no_chunks", "maxChunks must be >= 1"),
            ("no_endpoints", "no endpoints"),
            ("unequal_regions", "memory-region vectors must align with endpoints"),
        )
    ),
    *(
        _on.rule(
            name,
            text,
            code=INVALID_ARGS,
            kind=ErrorKind.INVALID,
            action=Action.SPLIT,
            retryable=True,
            drained=_REFUSED,
        )
        for name, text in (
            ("piece_too_large", re.compile(r"single request size (?:\d+ )?exceeds UINT32_MAX")),
            ("message_too_large", _TOO_LONG),
        )
    ),
    _on.permanent("invalid_arguments", code=INVALID_ARGS, drained=_REFUSED),
]

_STATES = [
    # The text misleads: it also comes when the remote engine is not registered.
    _on.permanent(
        "no_backend",
        "No available backend found, create backend first",
        code=BAD_STATE,
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    *(
        _on.rebuild(name, text, code=BAD_STATE, drained=_REFUSED)
        for name, text in (
            ("no_message_size", "RDMA endpoint local max_msg_sz is unavailable for ep "),
            ("no_chunk_plan", "failed to plan RDMA chunks for non-empty SGE stream"),
            ("no_worker", "worker not started yet"),
        )
    ),
    # Streams and events come from a pool of 64.
    _on.transient(
        "pool_exhausted",
        re.compile(r"(?:XGMI|FABRIC): Failed to get stream or event from pool"),
        code=BAD_STATE,
        drained=_NOT_POSTED,
    ),
    _on.rebuild(
        "no_session",
        re.compile(r"(?:XGMI|FABRIC): Failed to create session"),
        code=BAD_STATE,
        drained=_NOT_POSTED,
    ),
    _on.rebuild("bad_state", code=BAD_STATE),
]

# HIP errors are usually sticky.
_DEVICE = [
    _on.rebuild(
        "xgmi",
        re.compile(
            r"XGMI: (?:hip\w+ failed|Failed to set device|scatter/gather kernel launch failed"
            r"|memcpy failed): "
        ),
        code=GPU_OP,
    ),
    _on.rebuild(
        "fabric",
        re.compile(
            r"FABRIC: (?:hip\w+ failed|Failed to set device|(?:batch )?copy launch failed): "
        ),
        code=GPU_OP,
    ),
    _on.rebuild("gpu_operation", code=GPU_OP),
]

_OTHER_CODES = [
    # No errors: the status is asked again, or has been good all along.
    *(
        _on.rule(name, code=code, kind=ErrorKind.UNKNOWN, action=Action.WAIT, retryable=False)
        for name, code in (("pending", IN_PROGRESS), ("initial", INIT), ("success", SUCCESS))
    ),
    # In the enumeration; never seen from the engine.
    _on.rebuild(
        "not_found",
        code=NOT_FOUND,
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
        retryable=False,
    ),
]

# Raised by the creation of backends and sessions, and by engine-level calls that open a session on
# their way: always before anything is posted.
_EXCEPTIONS = [
    _on.permanent(
        "no_device",
        _one_of(
            "no active RDMA device on this host",
            "no active RDMA device and no usable GPU P2P",
            "RdmaManager: no active RDMA device/port found",
        ),
        kind=ErrorKind.RESOURCE,
        drained=_NOT_POSTED,
    ),
    _on.permanent("invalid_config", "Invalid RDMA config: ", drained=_NOT_POSTED),
    _on.permanent(
        "receive_queue_too_small",
        "Device RQ capacity insufficient for configured notifPerQp",
        drained=_NOT_POSTED,
    ),
    # The peer may be restarting; a successor comes with a new descriptor.
    _on.transient(
        "connect_refused",
        re.compile(r"connect\(.+\): Connection refused"),
        kind=ErrorKind.CONNECTION,
        drained=_NOT_POSTED,
    ),
    # A stopped peer, after MORI_IO_CP_TIMEOUT_MS.
    _on.transient(
        "peer_silent",
        re.compile(r"\w+\(\w+\) failed: expected \d+ byte\(s\), received \d+, errno=11 "),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.transient(
        "peer_died_in_handshake",
        re.compile(
            r"\w+\(\w+\) failed(?:: expected \d+ byte\(s\), received \d+"
            r"(?: before EOF|, errno=(?!11 ))| while writing \d+ byte\(s\): errno=)"
        ),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    # The peer deregistered the memory or restarted: its descriptors are out of date.
    _on.rebuild(
        "remote_memory_unknown",
        "RdmaBackend::CreateSession: remote MR size mismatch ",
        kind=ErrorKind.STALE,
        action=Action.REHANDSHAKE,
        drained=_NOT_POSTED,
    ),
    # Another version, or something else listens there.
    _on.permanent(
        "foreign_control_plane",
        re.compile(
            r"unexpected control-plane message|unsupported control-plane message type"
            r"|\w+ length \d+ exceeds control-plane limit|failed to decode Message"
        ),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    # Shortages of the host, and a queue pair that its peer did not answer in time.
    _on.transient(
        "verbs_for_now",
        re.compile(
            r"ibv_\w+(?:\(\w+\))? failed: "
            r"(?:Cannot allocate memory|Too many open files|Connection timed out)"
        ),
        kind=ErrorKind.RESOURCE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "verbs_invalid",
        re.compile(r"ibv_\w+(?:\(\w+\))? failed: Invalid argument"),
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "device_unusable",
        re.compile(
            r"failed to select a valid RDMA GID index|unsupported RDMA link layer "
            r"|RDMA device max_msg_sz is unavailable"
            r"|requested RDMA maxMsgSge exceeds device max_sge"
        ),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "session_setup",
        re.compile(
            r"BuildRdmaConn: |AskRemoteMemoryRegion: remote engine "
            r"|RdmaBackend::CreateSession: (?!remote MR size mismatch )"
        ),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "junk_descriptor",
        _one_of("insufficient bytes", "std::bad_cast"),
        kind=ErrorKind.HANDSHAKE,
        drained=_NOT_POSTED,
    ),
    _on.permanent(
        "binding_arguments",
        re.compile(r"\w+\(\): incompatible function arguments"),
        drained=_NOT_POSTED,
    ),
]

TABLE = RuleTable(
    backend=_on.backend,
    rules=[
        *_REFUSALS,
        *_GENERATIONS,
        *_EVENTS,
        *_COMPLETIONS,
        *_ARGUMENTS,
        *_STATES,
        *_DEVICE,
        *_OTHER_CODES,
        *_EXCEPTIONS,
    ],
    normalise=normalise,
)
