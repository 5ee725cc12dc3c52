"""Section 1, completions: the work was taken and failed afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvxfer.testing.softrdma.codes import AsyncEvent, WcStatus
from kvxfer.testing.softrdma.pair import PIECE, MoriPair, scattered
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario

NOTED_WITHIN_S = 5.0
OTHER = "any other ibv_wc_status_str text"


def _failures(pair: MoriPair, *, expected: bool) -> list[str]:
    """The engine's list of failures. It is filled a little after the status says Failed: where one
    is expected, wait for it."""
    deadline = time.monotonic() + NOTED_WITHIN_S
    while True:
        reasons = [failure.reason for failure in pair.engine.failures()]
        if reasons or not expected or time.monotonic() > deadline:
            return reasons
        time.sleep(0.001)


def _after_failure(
    pair: MoriPair, *, noted: bool = False, can_connect: bool = True
) -> dict[str, Any]:
    """What every failed completion is asked: what is noted, is the session alive, does it work."""
    failures = _failures(pair, expected=noted)
    facts: dict[str, Any] = {
        "failures": failures,
        "alive": pair.session.alive(),
        "retry": pair.session.read(0, 0, PIECE).wait(),
    }
    if can_connect:
        session = pair.engine.session(pair.buffer, pair.peer.memory)
        facts["new_session"] = session.read(0, 0, PIECE).wait()
    return facts


# ---- real causes ----


@scenario(section=1, row="transport retry counter exceeded", verdict=Verdict.REBUILD)
def retry_exceeded(rig: Rig) -> Observation:
    """READ of one piece from a peer that was killed."""
    pair = rig.pair()
    rig.rdma.transport_retry(0.05)
    pair.peer.kill()
    outcome = pair.session.read(0, 0, PIECE).wait()
    return rig.status(outcome, **_after_failure(pair, noted=True, can_connect=False))


@scenario(section=1, row="Work Request Flushed Error", verdict=Verdict.REBUILD)
def flushed_first_failure(rig: Rig) -> Observation:
    """READ of 10 pieces from a peer that was killed: only the last work request is signaled, so
    the status shows the flush and the list of failures the cause."""
    pair = rig.pair()
    rig.rdma.transport_retry(0.05)
    pair.peer.kill()
    offsets = scattered(10)
    outcome = pair.session.read_batch(offsets, offsets, [PIECE] * len(offsets)).wait()
    return rig.status(outcome, **_after_failure(pair, noted=True, can_connect=False))


@scenario(section=1, row="Work Request Flushed Error", verdict=Verdict.REBUILD)
def flushed_after_error(rig: Rig) -> Observation:
    """READ on a session whose queue pair failed before."""
    pair = rig.pair()
    pair.peer.deregister()
    cause = pair.session.read(0, 0, PIECE).wait()
    flushed = pair.session.read(0, 0, PIECE).wait()
    return rig.status(flushed, cause=cause, **_after_failure(pair))


@scenario(section=1, row="remote access error", verdict=Verdict.REBUILD)
def remote_access_error(rig: Rig) -> Observation:
    """READ from memory that the peer has deregistered."""
    pair = rig.pair()
    pair.peer.deregister()
    outcome = pair.session.read(0, 0, PIECE).wait()
    return rig.status(outcome, **_after_failure(pair))


@scenario(section=1, row="remote access error", verdict=Verdict.REBUILD)
def remote_access_error_write(rig: Rig) -> Observation:
    """WRITE to memory that the peer has deregistered."""
    pair = rig.pair()
    pair.peer.deregister()
    outcome = pair.session.write(0, 0, PIECE).wait()
    return rig.status(outcome, "WRITE", **_after_failure(pair))


@scenario(section=1, row="remote access error", verdict=Verdict.REBUILD)
def remote_access_error_restarted_peer(rig: Rig) -> Observation:
    """READ from a restarted peer with the old key: the engine still uses the memory key of the
    peer's earlier life. Registered under another device id, because that makes a new queue pair."""
    pair = rig.pair()
    rig.rdma.transport_retry(0.05)
    pair.peer.kill()
    pair.session.read(0, 0, PIECE).wait()
    restarted = rig.peer(pair.peer.key)
    pair.engine.add_peer(restarted.description)
    pair.engine.register(pair.buffer, device_id=1)
    session = pair.engine.session(pair.buffer, restarted.memory)
    outcome = session.read(0, 0, PIECE).wait()
    return rig.status(outcome, retry=session.read(0, 0, PIECE).wait(), alive=session.alive())


@scenario(section=1, row="local protection error", verdict=Verdict.REBUILD)
def local_protection_error(rig: Rig) -> Observation:
    """READ into memory that was deregistered here."""
    pair = rig.pair()
    pair.engine.deregister(pair.buffer)
    outcome = pair.session.read(0, 0, PIECE).wait()
    return rig.status(outcome, **_after_failure(pair, can_connect=False))


# ---- injected completion statuses ----


def _injected(status: WcStatus) -> Callable[[Rig], Observation]:
    def provoke(rig: Rig) -> Observation:
        pair = rig.pair()
        rig.rdma.fail_next(status)
        outcome = pair.session.read(0, 0, PIECE).wait()
        return rig.status(outcome, **_after_failure(pair))

    return provoke


for _name, _row, _status in (
    ("local_length_error", "local length error", WcStatus.LOCAL_LENGTH),
    ("local_qp_operation_error", "local QP operation error", WcStatus.LOCAL_QP_OPERATION),
    ("remote_operation_error", "remote operation error", WcStatus.REMOTE_OPERATION),
    ("rnr_retry_exceeded", "RNR retry counter exceeded", WcStatus.RNR_RETRY_EXCEEDED),
    ("remote_invalid_request", OTHER, WcStatus.REMOTE_INVALID_REQUEST),
    ("fatal_error", OTHER, WcStatus.FATAL),
    ("response_timeout", OTHER, WcStatus.RESPONSE_TIMEOUT),
    ("general_error", OTHER, WcStatus.GENERAL),
    ("bad_response", OTHER, WcStatus.BAD_RESPONSE),
    ("local_access_error", OTHER, WcStatus.LOCAL_ACCESS),
    ("remote_aborted", OTHER, WcStatus.REMOTE_ABORTED),
    ("memory_window_bind", OTHER, WcStatus.MEMORY_WINDOW_BIND),
    ("local_eec_operation", OTHER, WcStatus.LOCAL_EEC_OPERATION),
    ("local_rdd_violation", OTHER, WcStatus.LOCAL_RDD_VIOLATION),
    ("remote_invalid_rd_request", OTHER, WcStatus.REMOTE_INVALID_RD_REQUEST),
    ("invalid_eec_number", OTHER, WcStatus.INVALID_EEC_NUMBER),
    ("invalid_eec_state", OTHER, WcStatus.INVALID_EEC_STATE),
):
    scenario(
        section=1,
        row=_row,
        verdict=Verdict.REBUILD,
        name=_name,
        how=f"Completion status {int(_status)} injected into the one work request of a READ.",
    )(_injected(_status))


@scenario(section=1, row="Work Request Flushed Error", verdict=Verdict.REBUILD)
def flushed_mid_batch(rig: Rig) -> Observation:
    """Completion status 12 injected into the sixth of ten work requests of a READ: five landed,
    the status shows the flush of the last one."""
    pair = rig.pair()
    offsets = scattered(10)
    rig.rdma.fail_next(WcStatus.RETRY_EXCEEDED, after=5)
    outcome = pair.session.read_batch(offsets, offsets, [PIECE] * len(offsets)).wait()
    landed = pair.landed(offsets)
    facts = _after_failure(pair, noted=True)
    return rig.status(outcome, pieces=len(offsets), landed_later=landed, **facts)


# ---- asynchronous events ----


def _async_event(event: AsyncEvent) -> Callable[[Rig], Observation]:
    def provoke(rig: Rig) -> Observation:
        pair = rig.pair()
        with rig.rdma.hold():
            transfer = pair.session.read(0, 0, PIECE)
            rig.rdma.wait_for(lambda seen: seen.held == 1)
            delivered = rig.rdma.async_event(event)
            outcome = transfer.wait()
        rig.settle()
        landed = pair.landed([0])
        facts = _after_failure(pair, noted=True)
        return rig.status(outcome, delivered=delivered, landed_later=landed, **facts)

    return provoke


for _event, _text in (
    (
        AsyncEvent.QP_FATAL,
        "verbs async event IBV_EVENT_QP_FATAL: queue pair entered Error state and must be rebuilt "
        "before it can carry traffic again",
    ),
    (
        AsyncEvent.CQ_ERROR,
        "verbs async event IBV_EVENT_CQ_ERR: completion queue failed, so no further completion can "
        "be reaped for this endpoint",
    ),
    (
        AsyncEvent.DEVICE_FATAL,
        "verbs async event IBV_EVENT_DEVICE_FATAL: device reported a fatal error affecting every "
        "endpoint on its context",
    ),
):
    scenario(
        section=1,
        row=_text,
        verdict=Verdict.REBUILD,
        name=f"async_{_event.name.lower()}",
        how=(
            f"Asynchronous event {_event.name} delivered while a READ is held in flight; only the "
            "news arrives, the queue pair goes on, so the piece lands later."
        ),
    )(_async_event(_event))
