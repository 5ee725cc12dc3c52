"""The sample distribution, really installed; and folders with hand-written metadata."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvxfer
from kvxfer.core.plugins import refresh_plugins

SAMPLE = Path(__file__).parents[1] / "sample_plugin"


@pytest.fixture(scope="session")
def installed_sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the sample distribution, with no network."""
    # Building writes into the source folder: use a copy.
    source = tmp_path_factory.mktemp("sample") / "source"
    shutil.copytree(SAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = tmp_path_factory.mktemp("sample") / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"pip and setuptools>=77 are needed here:\n{done.stderr}"
    return target


@pytest.fixture
def sample_on_path(installed_sample: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The sample distribution is on ``sys.path``, as if installed into this environment."""
    monkeypatch.syspath_prepend(str(installed_sample))
    refresh_plugins()
    yield installed_sample
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvxfer_sample"]:
        del sys.modules[name]
    refresh_plugins()


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a program in a fresh interpreter that sees kvxfer and the folders given."""

    def run(program: str, *folders: Path) -> str:
        path = [*map(str, folders), str(Path(kvxfer.__file__).parents[1])]
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


Distribution = Callable[..., Path]


@pytest.fixture
def distribution(tmp_path: Path) -> Distribution:
    """Writes the metadata of a distribution as files: ``(name, entry_points, ...) -> folder``."""

    def make(
        name: str,
        entry_points: str | bytes | None,
        *,
        version: str = "1.0",
        folder: str = "site",
        kind: str = "dist-info",
    ) -> Path:
        site = tmp_path / folder
        info = site / f"{name.replace('-', '_')}-{version}.{kind}"
        info.mkdir(parents=True)
        header = "METADATA" if kind == "dist-info" else "PKG-INFO"
        (info / header).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if entry_points is not None:
            raw = entry_points if isinstance(entry_points, bytes) else entry_points.encode()
            (info / "entry_points.txt").write_bytes(raw)
        return site

    return make
