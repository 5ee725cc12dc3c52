"""The pytest plug-in, in the test suite of a project that is not this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = 'pytest_plugins = ["kvxfer.testing.softrdma.pytest_plugin"]\n'
TESTS = """
def test_bytes_arrive(mori_pair):
    pair = mori_pair(seed=5)
    assert pair.session.read(0, 0, 4096).wait().ok
    assert pair.buffer.read(0, 4096) == pair.peer.read(0, 4096)


def test_a_fault_ends_with_its_test(softrdma):
    softrdma.refuse_posts(12, times=1000)


def test_and_is_not_seen_by_the_next(softrdma, mori_engine, mori_peer):
    engine, peer = mori_engine(), mori_peer()
    session = engine.connect(engine.buffer(4096), peer)
    assert session.write(0, 0, 4096).wait().ok
"""


def suite(tmp_path: Path, *, python: list[str]) -> tuple[int, str]:
    """Run that project's suite; exit status and output."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_theirs.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    found = os.pathsep.join(os.path.abspath(p or ".") for p in sys.path)
    done = subprocess.run(
        [*python, "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": found},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout


def test_its_fixtures_serve_another_project(tmp_path: Path) -> None:
    """A conftest of one line gives a stranger's tests an engine, peers, and faults that end with
    the test that set them."""
    status, said = suite(tmp_path, python=[sys.executable, "-m", "pytest"])
    assert status == 0, said
    assert re.search(r"^3 passed in ", said, re.MULTILINE), said


def test_without_the_engine_they_fail(tmp_path: Path) -> None:
    """In an environment that has no engine nothing is skipped: each test is an error that says
    what to run."""
    hidden = (
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'mori' else find(name, *more)\n"
        "import pytest\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    status, said = suite(tmp_path, python=[sys.executable, "-c", hidden])
    assert status == 1, said
    assert re.search(r"^3 errors in ", said, re.MULTILINE), said
    assert "python -m kvxfer.testing.softrdma setup VENV" in said
