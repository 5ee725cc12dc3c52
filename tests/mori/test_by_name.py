"""The conformance suite by name over software RDMA, as the author of a backend runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer


@pytest.mark.timeout(300)
def test_suite_by_name(softrdma, tmp_path):
    """``pytest --pyargs kvxfer.testing --kvxfer-backend moriio`` in a folder that holds nothing,
    with options as a mapping: bytes move between two processes and a partial post is survived; the
    engine says what the committed table holds."""
    few = "TestPlugin or test_moves_exactly_the_pieces or test_partial_post_is_not_drained"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "kvxfer.testing.pytest_plugin", "--pyargs", "kvxfer.testing"),
            *("--kvxfer-backend", "moriio", "--kvxfer-option", "rehearse=false", "-k", few),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(kvxfer.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 passed" in done.stdout
