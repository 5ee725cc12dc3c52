"""``pytest --pyargs kvxfer.testing --kvxfer-backend NAME``, away from the source tree."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

import kvxfer
from kvxfer.testing.conformance import FaultTests, TransportTests
from kvxfer.testing.pytest_plugin import options_of

PLUGIN = "kvxfer.testing.pytest_plugin"

pytestmark = pytest.mark.timeout(300)  # a whole suite in a process of its own


def announced() -> bool:
    """Whether the metadata of kvxfer here has the plug-in; that of a source tree may be older."""
    return any(e.name == PLUGIN for e in importlib.metadata.entry_points(group="pytest11"))


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the suite in a folder that holds nothing but its report."""

    def run(*words: str, folders: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
        path = [*map(str, folders), str(Path(kvxfer.__file__).parents[1])]
        early = () if announced() else ("-p", PLUGIN)
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *early, "-q", "-p", "no:cacheprovider"),
                *("--junitxml=report.xml", "--pyargs", "kvxfer.testing", *words),
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    return run


def counts(folder: Path) -> tuple[int, int, int]:
    """Passed, failed, skipped."""
    cases = list(ET.parse(folder / "report.xml").getroot().iter("testcase"))
    failed = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
    skipped = sum(c.find("skipped") is not None for c in cases)
    return len(cases) - failed - skipped, failed, skipped


def names(suite: type) -> set[str]:
    return {name for name in dir(suite) if name.startswith("test_")}


def test_a_strangers_backend_by_name(
    suite: Callable[..., subprocess.CompletedProcess[str]], installed_sample: Path, tmp_path: Path
) -> None:
    """The installed sample passes the whole contract and every fault, with an option of its own,
    and nothing is skipped but what its capabilities rule out."""
    done = suite(
        *("--kvxfer-backend", "sample", "--kvxfer-option", "greeting=hello"),
        folders=(installed_sample,),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed, skipped = counts(tmp_path)
    assert failed == 0
    assert passed > 100
    cases = list(ET.parse(tmp_path / "report.xml").getroot().iter("testcase"))
    ran = {c.get("name", "").partition("[")[0] for c in cases}
    assert ran >= names(TransportTests) | names(FaultTests)
    reasons = [s.get("message", "") for c in cases for s in c.iter("skipped")]
    assert len(reasons) == skipped > 0
    assert all(reason.startswith("by capability: ") for reason in reasons)


def test_a_built_in_backend_between_two_processes(
    suite: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """``shm`` gets memory that peers can map without being told so, and options as a mapping; its
    far side is another process."""
    done = suite(
        *("--kvxfer-backend", "shm", "--kvxfer-option", "workers=1"),
        *("-k", "exactly or parallel or refused_posts or TestPlugin"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts(tmp_path) == (14, 0, 0)


def test_a_broken_backend_fails(
    suite: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The run by name can fail: with a transport that copies one byte too many, also given as
    ``module:attribute``."""
    (tmp_path / "broken.py").write_text(
        "import ctypes\n"
        "from kvxfer.backends.loopback import LoopbackTransport\n"
        "from kvxfer.core.verdict import Op\n"
        "class Broken(LoopbackTransport):\n"
        "    def _post(self, attempt):\n"
        "        super()._post(attempt)\n"
        "        if attempt.op is Op.READ:\n"
        "            local, _ = attempt.path.pairs[0]\n"
        "            ctypes.memset(local.span.address + local.nbytes, 0, 1)\n"
    )
    done = suite(
        *("--kvxfer-backend", "broken:Broken", "-k", "test_moves_exactly_the_pieces"),
        folders=(tmp_path,),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "bytes around near buffer" in done.stdout
    assert counts(tmp_path)[1] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--kvxfer-backend NAME"),
        (("--kvxfer-backend", "nobody"), "no plug-in 'nobody' in kvxfer.backends"),
        (("--kvxfer-backend", "shm", "--kvxfer-option", "workers"), "key=value, not 'workers'"),
        (("--kvxfer-backend", "shm", "--kvxfer-option", "wokers=1"), "did you mean 'workers'"),
    ],
)
def test_what_is_wrong_is_said(
    suite: Callable[..., subprocess.CompletedProcess[str]], words: tuple[str, ...], said: str
) -> None:
    """No backend, an unknown one, an option without a value or of no meaning: never a green run."""
    done = suite(*words, "-k", "test_moves_exactly_the_pieces or found_by_name", "-x")
    assert done.returncode not in (0, 5), done.stdout
    assert said in done.stdout + done.stderr


def test_options_are_json_or_text() -> None:
    """Numbers, lists and true stay what they are; what is no JSON is a text, ``=`` included."""
    assert options_of(["a=1", "b=true", 'c=["x"]', "d=sm,tcp", "e=x=y", "f=null"]) == {
        "a": 1,
        "b": True,
        "c": ["x"],
        "d": "sm,tcp",
        "e": "x=y",
        "f": None,
    }
    for words, said in ((["=1"], "key=value"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(pytest.UsageError, match=said):
            options_of(words)
