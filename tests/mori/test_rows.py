"""The index of failures: every row of the failure guide that was seen here, and who provokes it.

A row is one cause that the guide (``docs/reference/moriio-failures.md``) describes.  Each names the
scenarios that provoke it on the bare engine, which ``test_samples.py`` runs, the engine's verdict,
what kvxfer does about it, and the tests that meet it through kvxfer.  If one of them vanishes, or a
scenario belongs to no row, this fails.
"""

from __future__ import annotations

import ast
from pathlib import Path

import attrs
import pytest

from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.policies.classify import ClassifierRegistry
from kvxfer.policies.rules import builtin_rules
from kvxfer.testing.softrdma.samples import Sample, Surface, Verdict, load_samples
from kvxfer.testing.softrdma.scenario import all_scenarios

HERE = Path(__file__).parent
TESTS = HERE.parent
GUIDE = TESTS.parent / "docs" / "reference" / "moriio-failures.md"

V, A = Verdict, Action


@attrs.frozen
class Row:
    """``section``: 1 statuses, 3 exceptions, 4 what ends the process; ``text`` as in the guide."""

    section: int
    name: str
    text: str
    verdict: Verdict
    action: Action | None
    """What kvxfer does; None where nothing can be caught: kvxfer keeps it from being reached."""
    scenarios: tuple[str, ...]
    through_kvxfer: tuple[str, ...] = ()
    """``file.py::test`` below ``tests``; of ``tests/mori`` where no folder is named."""


def _row(section, name, text, verdict, action, scenarios, *tests):  # noqa: PLR0917
    return Row(section, name, text, verdict, action, tuple(scenarios.split()), tests)


_COMPLETION = "test_generations.py::test_rebuild_beside_a_healthy_peer"

ROWS = (
    # ---- statuses: refused
    _row(
        1,
        "no room in the send queue",
        "SQ full (batch): ",
        V.TRANSIENT,
        A.REPOST,
        "sq_full_batch sq_full_batch_write",
        "test_overload.py::test_without_admission",
        "test_read.py::test_engine_refusal_posts_nothing",
    ),
    _row(
        1,
        "no room for the second half of a call",
        "SQ full (batch): ",
        V.TRANSIENT,
        A.REPOST,
        "sq_full_after_partial_post sq_full_after_partial_post_write",
        "test_partial_landing.py::test_read_lands_in_a_reused_block",
        "test_partial_landing.py::test_agent_hands_blocks_back_only_when_drained",
        "test_read.py::test_ordered_later_success_proves_a_doubtful_call",
    ),
    _row(
        1,
        "depth that never comes back",
        "SQ full (batch): ",
        V.REBUILD,
        A.REPOST,  # the same words: the retry policy bounds it and rebuilds in the end
        "sq_full_leaked_depth",
        "policies/test_rules_recorded.py::test_a_leaked_queue_is_rebuilt_in_the_end",
    ),
    _row(
        1,
        "no room for the notification",
        "SQ full (notify): ",
        V.TRANSIENT,
        A.REPOST,
        "sq_full_notify",
        "test_admission.py::test_notifications_take_their_place",
    ),
    _row(
        1,
        "the driver has no memory",
        "ibv_post_send failed with 12: ",
        V.TRANSIENT,
        A.REPOST,
        "post_refused_enomem",
        "test_read.py::test_first_call_refused_raises",
        "test_read.py::test_second_call_refused",
    ),
    _row(
        1,
        "the driver finds it wrong",
        "ibv_post_send failed with 22: ",
        V.PERMANENT,
        A.FAIL,
        "post_refused_einval",
    ),
    _row(
        1,
        "the driver says something else",
        "ibv_post_send failed with E: ",
        V.PERMANENT,
        A.FAIL,
        "post_refused_eio",
    ),
    _row(
        1,
        "posted in part",
        "(posted P/T WRs)",
        V.REBUILD,
        A.REBUILD,
        "post_partial post_partial_write",
        "test_read.py::test_partly_posted_call_is_not_drained",
        "test_agent_recovers.py::test_fence_returns_the_blocks",
    ),
    _row(
        1,
        "degraded",
        "EP is degraded, rejecting new submissions",
        V.REBUILD,
        A.REBUILD,
        "degraded",
        "test_read.py::test_partly_posted_call_is_not_drained",
    ),
    _row(
        1,
        "the notification is refused",
        "ibv_post_send (notify) failed with ",
        V.TRANSIENT,
        A.REPOST,
        "notify_post_refused",
    ),
    # ---- statuses: events of the device
    _row(
        1,
        "queue pair fatal",
        "IBV_EVENT_QP_FATAL",
        V.REBUILD,
        A.REBUILD,
        "async_qp_fatal",
        "test_read.py::test_async_event_is_no_proof",
        "test_generations.py::test_async_event_then_rebuild",
    ),
    _row(1, "completion queue fatal", "IBV_EVENT_CQ_ERR", V.REBUILD, A.REBUILD, "async_cq_error"),
    _row(1, "device fatal", "IBV_EVENT_DEVICE_FATAL", V.REBUILD, A.REBUILD, "async_device_fatal"),
    # ---- statuses: completions
    _row(
        1,
        "peer unreachable",
        "transport retry counter exceeded",
        V.REBUILD,
        A.REBUILD,
        "retry_exceeded",
        "test_read.py::test_killed_peer",
        "test_life_mori.py::test_peer_life",
    ),
    _row(
        1,
        "flushed",
        "Work Request Flushed Error",
        V.REBUILD,
        A.REBUILD,
        "flushed_first_failure flushed_after_error flushed_mid_batch",
        "test_read.py::test_killed_peer",
    ),
    _row(
        1,
        "the peer's memory is gone",
        "remote access error",
        V.REBUILD,
        A.REHANDSHAKE,
        "remote_access_error remote_access_error_write remote_access_error_restarted_peer",
        "test_read.py::test_completion_error_drains_a_read",
        "test_generations.py::test_the_end_of_an_engine_stops_writers",
    ),
    _row(
        1,
        "our memory is gone",
        "local protection error",
        V.REBUILD,
        A.REBUILD,  # for others on that path; not tried again for these pieces
        "local_protection_error",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        1,
        "local QP operation error",
        "local QP operation error",
        V.REBUILD,
        A.REBUILD,
        "local_qp_operation_error",
        _COMPLETION,
    ),
    _row(
        1,
        "other completions with a hint",
        "local length error",
        V.REBUILD,
        A.REBUILD,
        "local_length_error remote_operation_error rnr_retry_exceeded",
        "test_agent_recovers.py::test_again_and_again",
    ),
    _row(
        1,
        "other completions without one",
        "general error",
        V.REBUILD,
        A.REBUILD,
        "remote_invalid_request fatal_error response_timeout general_error bad_response "
        "local_access_error remote_aborted memory_window_bind local_eec_operation "
        "local_rdd_violation remote_invalid_rd_request invalid_eec_number invalid_eec_state",
        "test_agent_recovers.py::test_dead_queue_pair_is_rebuilt",
        _COMPLETION,
    ),
    # ---- statuses: arguments, state, success
    _row(
        1,
        "beyond the memory",
        "length out of range",
        V.PERMANENT,
        A.FAIL,
        "length_out_of_range length_out_of_range_batch",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        1,
        "vectors of different lengths",
        "lengths of local offsets, remote offsets or sizes mismatch",
        V.PERMANENT,
        A.FAIL,
        "vectors_mismatch",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        1,
        "a piece of 4 GiB",
        "single request size N exceeds UINT32_MAX",
        V.PERMANENT,
        A.SPLIT,
        "size_exceeds_uint32 size_exceeds_uint32_batch",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        1,
        "merged above the port's largest message",
        "merged RDMA WR K length L exceeds local max_msg_sz M",
        V.PERMANENT,
        A.SPLIT,
        "merged_exceeds_max_message",
    ),
    _row(
        1,
        "no backend, or the peer's engine is not known",
        "No available backend found, create backend first",
        V.PERMANENT,
        A.FAIL,
        "no_backend peer_engine_not_registered",
    ),
    _row(
        1,
        "success",
        "",
        V.SUCCESS,
        A.WAIT,
        "success success_empty_batch success_zero_size",
        "test_read.py::test_read_and_write_between_processes",
    ),
    # ---- exceptions
    _row(
        3,
        "no device",
        "no active RDMA device on this host",
        V.PERMANENT,
        A.FAIL,
        "no_device port_down",
        "test_config.py::test_refused_settings_say_why",
    ),
    _row(
        3,
        "no device and no GPU",
        "no active RDMA device and no usable GPU P2P",
        V.PERMANENT,
        A.FAIL,
        "no_device_no_gpu",
    ),
    _row(
        3,
        "refused settings",
        "Invalid RDMA config: ",
        V.PERMANENT,
        A.FAIL,
        "config_notif_per_qp config_chunk_bytes config_max_chunks config_num_nics",
        "backends/test_moriio_rules.py::test_configuration_is_checked",
    ),
    _row(
        3,
        "receive queue too small",
        "Device RQ capacity insufficient for configured notifPerQp",
        V.PERMANENT,
        A.FAIL,
        "receive_queue_too_small",
    ),
    _row(
        3,
        "no largest message",
        "RDMA device max_msg_sz is unavailable",
        V.PERMANENT,
        A.FAIL,
        "max_message_unavailable",
    ),
    _row(
        3,
        "nobody listens",
        "Connection refused",
        V.TRANSIENT,
        A.REPOST,
        "connect_refused connect_refused_engine_read",
        "test_generations.py::test_no_engine_for_a_dead_peer",
        "test_life_mori.py::test_peer_life",
    ),
    _row(
        3,
        "silent peer",
        "ReadMessageHeader(type) failed: ",
        V.TRANSIENT,
        A.REPOST,
        "handshake_timeout",
        "test_read.py::test_stopped_peer_does_not_stop_the_interpreter",
    ),
    _row(3, "died in the handshake", "before EOF", V.TRANSIENT, A.REPOST, "handshake_eof"),
    _row(
        3,
        "something else listens there",
        "unexpected control-plane message",
        V.PERMANENT,
        A.FAIL,
        "handshake_undecodable handshake_oversized handshake_unexpected",
    ),
    _row(
        3,
        "memory that the peer does not know",
        "RdmaBackend::CreateSession: remote MR size mismatch",
        V.PERMANENT,
        A.REHANDSHAKE,
        "remote_memory_unknown",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        3,
        "setting up fails for now",
        "ibv_create_qp failed: ",
        V.TRANSIENT,
        A.REPOST,
        "create_qp_enomem create_cq_enomem alloc_pd_enomem create_channel_emfile "
        "modify_qp_rtr_etimedout",
    ),
    _row(
        3,
        "setting up fails for good",
        "ibv_modify_qp(",
        V.PERMANENT,
        A.FAIL,
        "create_qp_einval modify_qp_init_einval modify_qp_rtr_einval modify_qp_rts_einval",
    ),
    _row(
        3,
        "junk for a descriptor",
        "insufficient bytes",
        V.PERMANENT,
        A.FAIL,
        "unpack_empty unpack_junk",
        "test_read.py::test_descriptor_of_another_size_is_refused",
    ),
    _row(
        3,
        "arguments of the wrong kind",
        "incompatible function arguments",
        V.PERMANENT,
        A.FAIL,
        "negative_offset",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    # ---- what ends the process
    _row(
        4,
        "vectors of different lengths, engine level",
        "aborts on vectors of different lengths",
        V.FATAL,
        None,
        "exit_inner_vectors_mismatch exit_outer_vectors_mismatch",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
    _row(
        4,
        "port in use, host not local",
        "exits where its port is taken or its host is not local",
        V.FATAL,
        None,
        "exit_port_in_use exit_host_not_local",
        "test_rehearsal.py::test_fixed_ports",
        "backends/test_moriio_rules.py::test_hosts_that_would_end_the_process_are_refused",
    ),
    _row(
        4,
        "registration fails",
        "aborts where `ibv_reg_mr` fails",
        V.FATAL,
        None,
        "exit_registration_fails exit_second_registration_fails",
        "test_rehearsal.py::test_a_registration_that_would_end_the_process",
    ),
    _row(
        4,
        "a session after its engine",
        "crashes on a session after its backend or engine is gone",
        V.FATAL,
        None,
        "exit_session_after_remove_backend exit_session_outlives_engine",
        "test_read.py::test_close_with_a_thread_inside_the_engine",
        "test_fuzz_mori.py::test_random_calls_leave_the_process_alive",
    ),
)

NOT_HERE = ("librocm_smi64", "a virtual RDMA device")
"""Seen on other machines only: no test here can provoke them, and the guide says so."""

RECORDING = load_samples()


def ids(row: Row) -> str:
    return f"{row.section}-{row.name}"


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_every_row_is_provoked(row: Row) -> None:
    """Each of its scenarios exists, is recorded, is of that section and has that verdict; the tests
    that meet it through kvxfer exist; and the guide has it."""
    scenarios = all_scenarios()
    assert row.scenarios
    for name in row.scenarios:
        assert (scenarios[name].section, scenarios[name].verdict) == (row.section, row.verdict)
        assert RECORDING[name].verdict is row.verdict
    for test in row.through_kvxfer:
        file, _, name = test.partition("::")
        path = TESTS / file if "/" in file else HERE / file
        assert name in functions(path), f"{test} has vanished"
    assert row.text in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", [r for r in ROWS if r.action is not None], ids=ids)
def test_every_row_gets_its_verdict(row: Row) -> None:
    """kvxfer recognises what the engine said in each scenario, and does what the row says."""
    rules = ClassifierRegistry(builtin_rules())
    for name in row.scenarios:
        verdict = rules.classify(_error(RECORDING[name]), op=Op.READ)
        assert (name, verdict.action) == (name, row.action)
        assert verdict.rule != "unmatched"


def _error(sample: Sample) -> EngineError:
    if sample.surface is Surface.STATUS:
        return EngineError(backend="moriio", code=sample.code, message=sample.message)
    classes = (f"builtins.{sample.exception}", "builtins.Exception", "builtins.BaseException")
    return EngineError(backend="moriio", message=sample.message, exception=classes)


def test_nothing_is_left_over() -> None:
    """Every scenario belongs to exactly one row, and every one is provoked again by its test."""
    listed = [name for row in ROWS for name in row.scenarios]
    assert sorted(listed) == sorted(all_scenarios())
    assert {r.name for r in ROWS}.__len__() == len(ROWS)
    source = (HERE / "test_samples.py").read_text(encoding="utf-8")
    again = '@pytest.mark.parametrize("sample", RECORDING.samples'
    assert source.count(again) >= 2, "not every sample is provoked again"
    assert "test_the_engine_says_it_again" in functions(HERE / "test_samples.py")


def test_what_cannot_be_provoked_is_said() -> None:
    """What was only seen elsewhere is marked in the guide as not reproducible here, and nothing
    else is."""
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    marked = [line for line in lines if "not reproducible here" in line]
    assert len(marked) == len(NOT_HERE)
    for words in NOT_HERE:
        assert sum(words in line for line in marked) == 1, words
