"""The lanes cannot be green for the wrong reason."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer.testing.expected import EXPECTED

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(sys.executable)


def run(
    scripts: Any,
    folder: Path,
    source: str,
    *expected_skips: str,
    limit: float = 60,
    skips: int | None = None,
) -> Any:
    """Run a lane whose suite is ``source``; returns its result."""
    (folder / "test_it.py").write_text(source)

    def body(run: Any, ready: Any) -> None:
        # Without third-party plug-ins a run takes half the time.
        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        run.pytest(PYTHON, "test_it.py", cwd=folder, env=env)

    lane = scripts.lane_table.Lane(
        "it",
        "a test",
        (),
        body,
        limit=limit,
        expected_skips=lambda notes: expected_skips,
        skips=skips,
    )
    return scripts.lanes.run_lane(lane, live=False)


def test_lane_that_holds(scripts: Any, tmp_path: Path) -> None:
    """Counts come from the report of the test runner."""
    result = run(scripts, tmp_path, "def test_a(): pass\ndef test_b(): pass")
    assert (result["ok"], result["passed"], result["failed"], result["skipped"]) == (True, 2, 0, 0)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def test_a(): assert 0\ndef test_b(): pass", "1 tests or checks failed"),
        (
            "import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_a(f): pass",
            "1 tests or checks",
        ),
        ("import nothing_of_that_name\ndef test_a(): pass", "1 tests or checks failed"),
        ("x = 1", "no test ran"),
        (
            "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('engine missing')",
            "unexpected skip: test_it::test_b: .*engine missing",
        ),
        (
            "import pytest\ndef test_a(): pass\n@pytest.mark.xfail\ndef test_b(): assert 0",
            "unexpected skip",
        ),
        ("import os\ndef test_a(): os._exit(0)", "pytest left no report"),
    ],
)
def test_lane_that_fails(scripts: Any, tmp_path: Path, source: str, problem: str) -> None:
    """A failure, an error, no test, an unexpected skip or a vanished runner fails the lane."""
    result = run(scripts, tmp_path, source)
    assert not result["ok"]
    assert re.search(problem, result["problem"])


def test_expected_skip(scripts: Any, tmp_path: Path) -> None:
    """A skip whose reason the lane expects is counted and does no harm, at any level."""
    source = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.importorskip('no_torch')"
    result = run(scripts, tmp_path, source, "could not import 'no_torch'")
    assert (result["ok"], result["passed"], result["skipped"]) == (True, 1, 1)


def test_exact_number_of_skips(scripts: Any, tmp_path: Path) -> None:
    """Where a lane says how many tests its capabilities rule out, one more or one less fails it,
    and other skips do not count; the lanes of the engines do, with the expected numbers."""
    source = (
        "import pytest\ndef test_a(): pass\n@pytest.mark.skip('by capability: known')\n"
        "def test_b(): pass\n@pytest.mark.skip('known')\ndef test_c(): pass"
    )
    for exactly, ok in ((1, True), (0, False), (2, False)):
        result = run(scripts, tmp_path, source, "known", skips=exactly)
        assert result["ok"] is ok
        assert ok or result["problem"] == f"1 tests were skipped, not {exactly}"
    lanes = scripts.lane_table.LANES
    assert lanes["mori"].skips > 0
    # Over tcp and with shared memory; once.
    assert lanes["nixl"].skips == 2 * EXPECTED["nixl"].skips
    assert lanes["mooncake"].skips == EXPECTED["mooncake"].skips


def test_a_lane_that_hangs_is_ended(scripts: Any, tmp_path: Path) -> None:
    """Its limit ends the lane and everything that it started."""
    source = "import time\ndef test_a(): time.sleep(3600)"
    result = run(scripts, tmp_path, source, limit=2)
    assert not result["ok"]
    assert "still running" in result["problem"]


def test_a_lane_without_its_python(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that cannot be set up fails, and says what to install."""
    venv = scripts.venvs.Venv("none", ("3.99",), ())
    lane = scripts.lane_table.Lane("none", "a test", (venv,), lambda run, ready: None)
    result = scripts.lanes.run_lane(lane, live=False)
    assert not result["ok"]
    assert "found no usable CPython 3.99" in result["problem"]


def test_report_misses_lanes(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lane without a result of this run fails the report; an older result does not count."""
    run(scripts, tmp_path, "def test_a(): pass")
    assert scripts.lanes.report(["it"])
    assert not scripts.lanes.report(["it", "other"])
    scripts.lanes.RUN = "another"
    assert not scripts.lanes.report(["it"])
    text = capsys.readouterr().out
    assert re.search(r"^other +DID NOT RUN", text, re.MULTILINE)
    assert re.search(r"^1 passed, 0 failed, 0 skipped$", text, re.MULTILINE)


def test_every_engine_suite_has_a_lane(scripts: Any) -> None:
    """What plain pytest leaves out is run by the lane of that name."""
    text = (ROOT / "pyproject.toml").read_text()
    suites = set(re.findall(r'"tests/([a-z]+)"', text.partition("norecursedirs")[2]))
    engines = {"failover", "mooncake", "mori", "net", "nixl"}
    assert suites == engines | {"prometheus", "sim", "soak", "vllm"}
    assert suites <= set(scripts.lane_table.LANES)


def test_what_ci_leaves_out(scripts: Any) -> None:
    """CI and its report cover every lane but the long soak, of which the mori lane has five
    rounds."""
    table = scripts.lane_table
    assert set(table.LANES) - set(table.CI) == {"soak-mori"}
    assert set(table.CI) - set(table.ALL) == {"lint"}


def test_an_environment_is_made_once(scripts: Any) -> None:
    """A second call finds the stamp; a changed step makes the environment again."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    touch = scripts.venvs.Step(("touch", str(scripts.home / "made")))
    venv = scripts.venvs.Venv("it", (version,), (touch,))
    made = scripts.home / "made"
    ready = scripts.venvs.ensure(venv)
    subprocess.run(
        [ready.python, "-c", "import sys; assert sys.prefix != sys.base_prefix"], check=True
    )
    made.unlink()
    scripts.venvs.ensure(venv)
    assert not made.exists()
    scripts.venvs.ensure(dataclasses.replace(venv, steps=(touch, touch)))
    assert made.exists()


def test_a_step_may_fail_for_one_reason_only(scripts: Any) -> None:
    """An optional step that fails with its excuse leaves a note; without, it is an error."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for words, excused in (("echo no compiler; exit 1", True), ("echo disk full; exit 1", False)):
        step = scripts.venvs.Step(("sh", "-c", words), optional="without it", excuse="no compiler")
        venv = scripts.venvs.Venv("it", (version,), (step,))
        if excused:
            assert scripts.venvs.ensure(venv).notes == ("without it",)
        else:
            with pytest.raises(scripts.venvs.SetupError, match="disk full"):
                scripts.venvs.ensure(venv)


def test_the_copier_may_be_missing_where_nothing_can_be_compiled(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tests are skipped only where the set-up found no compiler, and for no other reason."""
    table = scripts.lane_table
    reason = "shm's compiled copier is not built: ..."

    def expected(*notes: str) -> bool:
        lanes = (table.LANES["portable"], table.LANES["py310"])
        found = {any(re.search(p, reason) for p in lane.expected_skips(notes)) for lane in lanes}
        assert len(found) == 1
        return found.pop()

    assert expected(table.WITHOUT_COMPILER)
    assert not expected()
    assert not expected(table.WITHOUT_TORCH)
    for compiler in ("false", "no-such-compiler"):
        monkeypatch.setenv("CC", compiler)
        assert scripts.compiles.problem()


def test_a_failed_set_up_leaves_no_stamp(scripts: Any) -> None:
    """The next run tries again, and the error holds what the program said, without addresses."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    words = "echo at https://user:word@index.example/simple; exit 3"
    venv = scripts.venvs.Venv("it", (version,), (scripts.venvs.Step(("sh", "-c", words)),))
    for _ in range(2):
        with pytest.raises(scripts.venvs.SetupError, match="exit status 3") as caught:
            scripts.venvs.ensure(venv)
        assert "at <address>" in str(caught.value)
        assert "user:word@" not in str(caught.value).splitlines()[-1]
    assert "index.example/simple\n" not in (scripts.home / "it.log").read_text()


def fake(folder: Path, name: str, program: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)


def find(path: Path, *versions: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "find-python.sh", *versions],
        env={"PATH": f"{path}:{os.defpath}", "HOME": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_find_python_passes_a_shim_that_refuses(tmp_path: Path) -> None:
    """A program of the right name that fails when it is run is no Python."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    shims, real = tmp_path / "shims", tmp_path / ".pyenv" / "versions" / f"{version}.0" / "bin"
    shims.mkdir()
    real.mkdir(parents=True)
    fake(shims, f"python{version}", "echo refused >&2; exit 127")
    base = getattr(sys, "_base_executable", sys.executable)
    fake(real, "python", f'exec "{base}" "$@"')
    done = subprocess.run(
        [ROOT / "scripts" / "find-python.sh", version],
        env={"PATH": f"{shims}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) != shims / f"python{version}"
    assert "refused" not in done.stderr


def test_find_python_refuses_another_version_under_the_name(tmp_path: Path) -> None:
    """The version is what the program says, not what it is called; the error says what to do."""
    base = getattr(sys, "_base_executable", sys.executable)
    fake(tmp_path, "python3.99", f'exec "{base}" "$@"')
    done = find(tmp_path, "3.99")
    assert done.returncode == 1
    assert not done.stdout
    assert "found no usable CPython 3.99" in done.stderr
    assert "apt-get install python3.99" in done.stderr


def test_ci_runs_everything() -> None:
    """lint, the test command of the README, then all other lanes, then the table."""
    text = (ROOT / ".ci" / "run").read_text()
    order = [
        text.index(words)
        for words in ("make lint", "make test", "run --all --except portable", "lanes.py report")
    ]
    assert order == sorted(order)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_two_lanes_do_not_run_apt_at_once(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apt fails at once where another one is at work: the lanes take turns."""
    busy = tmp_path / "busy"
    program = f'mkdir "{busy}" || exit 1; sleep 0.2; rmdir "{busy}"; echo "$2" >> "{tmp_path}/done"'
    fake(tmp_path, "apt-get", program)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    failed: list[int] = []

    class Run:
        def program(self, words: list[str], **_: Any) -> tuple[int, str]:
            status = subprocess.run(words, check=False).returncode
            failed.extend([status] if status else [])
            return status, ""

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: scripts.lane_table._apt(Run(), "x"), range(4)))
    assert not failed
    assert sorted((tmp_path / "done").read_text().split()) == ["install"] * 4 + ["update"] * 4
