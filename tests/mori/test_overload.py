"""Far more requests than the send queue takes: nothing is lost, and nobody waits for the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REQUESTS, BLOCKS = 512, 128


def overload(**options):
    """What ``overload_run.py`` saw."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "MORI_IO_SQ_BACKOFF_TIMEOUT_US": str(options.pop("backoff_us")),
    }
    options = {"requests": REQUESTS, "blocks": BLOCKS, "hold_s": 2.0, "tries": 3, **options}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("overload_run.py")), json.dumps(options)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0
    return json.loads(done.stdout)


def judge(result):
    """What must hold with and without admission. The last run is the one with good timing."""
    for run in result["runs"]:
        assert run["failed"] == []
        assert (run["received"], run["events"]) == (REQUESTS, REQUESTS)
        assert run["wrong"] == 0
        assert run["between_untouched"]
        assert not any(run["tables"].values()), run["tables"]
        # While completions were held: nothing arrived, and the engine was never called from here.
        assert run["arrived_early"] == 0
        assert run["held"] == 1, "one queue pair stands still"
        assert run["engine"]["here"] == 0
        assert run["engine"]["elsewhere"] > 0, "nobody called the engine: the trace shows nothing"
    assert not any(result["prefill"].values()), result["prefill"]
    assert result["prefill_status"] == 0
    run = result["runs"][-1]
    print({name: run[name] for name in ("seconds", "submit", "poll", "empty", "engine")})
    assert run["too_slow"] == [], [r["too_slow"] for r in result["runs"]]
    return run


@pytest.mark.timeout(900)
def test_with_admission(softrdma):
    """512 requests of 128 scattered blocks into a queue of 64, completions held for 2 s and then
    delayed: all succeed, byte by byte, without one refusal by the engine, and every table is empty.
    A client that posts and fails loses requests in the same run. No call of the engine is made on
    the caller's thread, and ``pull`` and ``poll`` take no longer than a loop that does nothing."""
    result = overload(admission=True, naive=True, backoff_us=1000)
    print(result["naive"])
    assert result["naive"]["lost"] > 0
    assert result["naive"]["sq_full"] == result["naive"]["lost"]
    judge(result)
    assert all(run["refused"] == 0 for run in result["runs"])


@pytest.mark.timeout(900)
def test_without_admission(softrdma):
    """The same without any admission, where a post waits half a second inside the engine and is
    then refused: the refusals are counted, all requests still succeed, and the wait is that of the
    posting thread."""
    result = overload(admission=False, naive=False, backoff_us=500_000)
    run = judge(result)
    print({name: run[name] for name in ("refused", "refused_in_hold")})
    assert run["refused_in_hold"] > 0
    assert run["engine"]["longest_elsewhere"] >= 0.4, "no post waited: the run shows nothing"
