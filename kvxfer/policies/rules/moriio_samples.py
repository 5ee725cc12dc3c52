"""Samples for ``moriio``.

``testing.softrdma`` holds a recording of the real engine, against which the rules are tested as
well; these add what could not be provoked.

Evidence: "rxe" = seen over the kernel's software RDMA; "soft" = seen over the software device of
``testing.softrdma``; "source" = read in mori's source, the text is in the 1.2.4 wheel; "wheel" = a
text in the wheel, its path is not known.
"""

from __future__ import annotations

from kvxfer.core.verdict import EngineError
from kvxfer.policies.rules.samples import Sample

__all__ = ["SAMPLES"]

_HINT = " Hint: a tail whose wording changes between releases"

_STATUSES: tuple[tuple[str, int, str, str], ...] = (
    ("sq_full", 13, "SQ full (batch): ep=0 depth=16 requested=8 max=16", "rxe soft"),
    ("sq_full", 13, "SQ full (batch): ep=1 depth=256 requested=8 max=256" + _HINT, "rxe soft"),
    ("sq_full_notify", 13, "SQ full (notify): ep=0 depth=16 requested=1 max=16", "soft"),
    (
        "sq_request_exceeds_capacity",
        13,
        "SQ request exceeds capacity (batch): ep=0 requested=300 max=256",
        "source",
    ),
    (
        "sq_request_exceeds_capacity",
        13,
        "SQ request exceeds capacity (notify): ep=0 requested=2 max=1",
        "source",
    ),
    (
        "post_send_no_memory",
        13,
        "ibv_post_send failed with 12: Cannot allocate memory (posted 0/10 WRs)" + _HINT,
        "soft",
    ),
    (
        "post_send_invalid",
        13,
        "ibv_post_send failed with 22: Invalid argument (posted 0/10 WRs)" + _HINT,
        "soft",
    ),
    (
        "post_send_refused",
        13,
        "ibv_post_send failed with 5: Input/output error (posted 0/10 WRs)",
        "soft",
    ),
    (
        "post_send_partial",
        13,
        "ibv_post_send failed with 12: Cannot allocate memory (posted 5/10 WRs)" + _HINT,
        "soft",
    ),
    (
        "post_send_notify",
        13,
        "ibv_post_send (notify) failed with 12: Cannot allocate memory",
        "soft",
    ),
    ("degraded", 13, "EP is degraded, rejecting new submissions", "soft"),
    (
        "failed_by_async_event",
        13,
        "endpoint was failed by a fatal verbs async event; submission rejected",
        "wheel",
    ),
    ("retired_by_async_event", 13, "endpoint retired by a fatal async event", "wheel"),
    (
        "no_ledger",
        13,
        "submission ledger is not initialized for signaled WR tracking",
        "source",
    ),
    (
        "qp_fatal",
        13,
        "verbs async event IBV_EVENT_QP_FATAL: queue pair entered Error state and must be rebuilt "
        "before it can carry traffic again",
        "soft",
    ),
    (
        "cq_error",
        13,
        "verbs async event IBV_EVENT_CQ_ERR: completion queue failed, so no further completion can "
        "be reaped for this endpoint",
        "soft",
    ),
    (
        "device_fatal",
        13,
        "verbs async event IBV_EVENT_DEVICE_FATAL: device reported a fatal error affecting every "
        "endpoint on its context",
        "soft",
    ),
    ("peer_unreachable", 13, "transport retry counter exceeded" + _HINT, "rxe soft"),
    ("flushed", 13, "Work Request Flushed Error", "rxe soft"),
    ("remote_access", 13, "remote access error" + _HINT, "rxe soft"),
    ("local_protection", 13, "local protection error" + _HINT, "rxe soft"),
    ("completion_error", 13, "local QP operation error" + _HINT, "rxe"),
    ("completion_error", 13, "local length error" + _HINT, "soft"),
    ("completion_error", 13, "remote operation error" + _HINT, "soft"),
    ("completion_error", 13, "RNR retry counter exceeded" + _HINT, "soft"),
    ("completion_error", 13, "remote invalid request error", "soft"),
    ("completion_error", 13, "fatal error", "soft"),
    ("completion_error", 13, "response timeout error", "soft"),
    ("completion_error", 13, "general error", "soft"),
    ("completion_error", 13, "bad response error", "source"),
    ("completion_error", 13, "local access error", "source"),
    ("completion_error", 13, "aborted error", "source"),
    ("completion_error", 13, "memory management operation error", "source"),
    ("out_of_range", 11, "length out of range", "rxe soft"),
    (
        "unequal_vectors",
        11,
        "lengths of local offsets, remote offsets or sizes mismatch",
        "rxe soft",
    ),
    (
        "piece_too_large",
        11,
        "single request size 4294967296 exceeds UINT32_MAX; split it before submitting",
        "rxe soft",
    ),
    (
        "piece_too_large",
        11,
        "single request size exceeds UINT32_MAX; split it before submitting",
        "rxe soft",
    ),
    (
        "message_too_large",
        11,
        "merged RDMA WR 0 length 16777216 exceeds local max_msg_sz 8388608; enable RDMA transfer "
        "chunking or reduce batch size",
        "soft",
    ),
    ("batch_too_long", 11, "batch size exceeds int range", "source"),
    ("too_many_work_requests", 11, "final WR count exceeds int range", "source"),
    ("no_chunks", 11, "maxChunks must be >= 1", "source"),
    ("no_endpoints", 11, "no endpoints", "source"),
    ("unequal_regions", 11, "memory-region vectors must align with endpoints", "source"),
    ("invalid_arguments", 11, "a text of a later release", "made up"),
    ("not_found", 12, "a text of a later release", "made up"),
    ("no_backend", 14, "No available backend found, create backend first", "rxe soft"),
    ("no_message_size", 14, "RDMA endpoint local max_msg_sz is unavailable for ep 0", "source"),
    ("no_chunk_plan", 14, "failed to plan RDMA chunks for non-empty SGE stream", "source"),
    ("no_worker", 14, "worker not started yet", "source"),
    ("pool_exhausted", 14, "XGMI: Failed to get stream or event from pool", "source"),
    ("pool_exhausted", 14, "FABRIC: Failed to get stream or event from pool", "source"),
    ("no_session", 14, "XGMI: Failed to create session", "source"),
    ("no_session", 14, "FABRIC: Failed to create session", "source"),
    ("bad_state", 14, "a text of a later release", "made up"),
    *(
        ("xgmi", 15, f"XGMI: {what}: out of memory", "source")
        for what in (
            "hipEventSynchronize failed",
            "hipEventQuery failed",
            "Failed to set device",
            "hipMemcpyAsync failed",
            "hipMemcpyPeerAsync failed",
            "hipEventRecord failed",
            "scatter/gather kernel launch failed",
            "memcpy failed",
        )
    ),
    *(
        ("fabric", 15, f"FABRIC: {what}: out of memory", "source")
        for what in (
            "hipEventSynchronize failed",
            "hipEventQuery failed",
            "Failed to set device",
            "copy launch failed",
            "batch copy launch failed",
            "hipEventRecord failed",
        )
    ),
    ("gpu_operation", 15, "a text of a later release", "made up"),
    ("success", 0, "success", "rxe soft"),
    ("initial", 1, "", "soft"),
    ("pending", 2, "", "rxe soft"),
)

_RAISED: tuple[tuple[str, str, str], ...] = (
    (
        "no_device",
        "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only "
        "fallback",
        "soft, bare host",
    ),
    (
        "no_device",
        "no active RDMA device and no usable GPU P2P; cannot create any backend",
        "soft",
    ),
    ("no_device", "RdmaManager: no active RDMA device/port found", "source"),
    *(
        ("invalid_config", f"Invalid RDMA config: {what}", "soft")
        for what in (
            "notifPerQp must be >= 1 when notification is enabled",
            "chunkBytes must be >= 4096 when chunking is enabled",
            "maxChunksPerTransfer must be >= 1",
            "numNicsPerTransfer must be >= 1",
        )
    ),
    (
        "receive_queue_too_small",
        "Device RQ capacity insufficient for configured notifPerQp",
        "soft",
    ),
    ("connect_refused", "connect(127.0.0.1:40001): Connection refused", "rxe soft"),
    (
        "peer_silent",
        "ReadMessageHeader(type) failed: expected 1 byte(s), received 0, errno=11 (Resource "
        "temporarily unavailable)",
        "rxe soft",
    ),
    (
        "peer_died_in_handshake",
        "ReadMessageHeader(len) failed: expected 4 byte(s), received 2 before EOF",
        "source",
    ),
    (
        "peer_died_in_handshake",
        "ReadMessageRegEndpoint(body) failed: expected 96 byte(s), received 0, errno=104 "
        "(Connection reset by peer)",
        "source",
    ),
    (
        "peer_died_in_handshake",
        "WriteMessageHeader(type) failed while writing 1 byte(s): errno=32 (Broken pipe)",
        "source",
    ),
    (
        "remote_memory_unknown",
        "RdmaBackend::CreateSession: remote MR size mismatch for engine prefill-0 rdevId=0 memId=3 "
        "expected=4096 got=0",
        "rxe soft",
    ),
    (
        "foreign_control_plane",
        "unexpected control-plane message (RegEndpoint): expected RegEndpoint(1), observed "
        "Unknown(72), len=1414541105",
        "source",
    ),
    ("foreign_control_plane", "unsupported control-plane message type 72", "source"),
    (
        "foreign_control_plane",
        "MessageRegEndpoint length 1414541105 exceeds control-plane limit 1048576",
        "source",
    ),
    ("foreign_control_plane", "failed to decode MessageRegEndpoint: bad cast", "source"),
    ("verbs_for_now", "ibv_create_qp failed: Cannot allocate memory", "soft"),
    ("verbs_for_now", "ibv_create_comp_channel failed: Too many open files", "soft"),
    ("verbs_for_now", "ibv_modify_qp(RTR) failed: Connection timed out", "soft"),
    ("verbs_invalid", "ibv_create_qp failed: Invalid argument", "soft"),
    ("verbs_invalid", "ibv_modify_qp(INIT) failed: Invalid argument", "soft"),
    ("device_unusable", "failed to select a valid RDMA GID index", "source"),
    ("device_unusable", "unsupported RDMA link layer 3", "source"),
    ("device_unusable", "RDMA device max_msg_sz is unavailable", "source"),
    ("device_unusable", "requested RDMA maxMsgSge exceeds device max_sge", "source"),
    ("session_setup", "BuildRdmaConn: no matching local RDMA NIC candidate", "source"),
    (
        "session_setup",
        "AskRemoteMemoryRegion: remote engine prefill-0 is not registered",
        "source",
    ),
    ("session_setup", "RdmaBackend::CreateSession: insufficient RDMA endpoints", "source"),
    ("junk_descriptor", "insufficient bytes", "soft"),
    ("junk_descriptor", "std::bad_cast", "soft"),
    ("own_admission", "own admission: send queue full", "backends.moriio"),
    ("own_capacity", "own admission: request exceeds capacity, max=16", "backends.moriio"),
    ("generation_ended", "engine generation 1 has ended", "backends.moriio"),
    ("generation_waits", "engine generation 1 has not ended", "backends.moriio"),
    ("generation_cut_off", "engine generation 1 ended before the call did", "backends.moriio"),
    ("fencing", "the peer is being fenced", "backends.moriio"),
    (
        "rehearsal",
        "rehearsal failed: RegisterRdmaMemoryRegionAuto failed; Assertion `ibufMr' failed",
        "backends.moriio",
    ),
    (
        "peer_unreachable",
        "transport retry counter exceeded: peer did not acknowledge within the transport retry "
        "budget; status: Work Request Flushed Error",
        "backends.moriio",
    ),
    (
        "peer_unreachable",
        "completion status transport retry counter exceeded: peer did not acknowledge within the "
        "transport retry budget",
        "rxe soft, pop_peer_failure",
    ),
)

SAMPLES: tuple[Sample, ...] = (
    *(
        Sample(
            rule=f"moriio.{rule}",
            error=EngineError(backend="moriio", code=code, message=text),
            evidence=evidence,
        )
        for rule, code, text, evidence in _STATUSES
    ),
    *(
        Sample(
            rule=f"moriio.{rule}",
            error=EngineError.of("moriio", RuntimeError(text)),
            evidence=evidence,
        )
        for rule, text, evidence in _RAISED
    ),
    Sample(
        rule="moriio.binding_arguments",
        error=EngineError.of("moriio", TypeError("Read(): incompatible function arguments. ...")),
        evidence="rxe soft",
    ),
)
