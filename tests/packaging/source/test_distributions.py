"""The sdist and the wheel, built from a copy of the source tree."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import kvxfer

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "kvxfer"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it: what a release does."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel_names(distributions: tuple[Path, Path]) -> set[PurePosixPath]:
    with zipfile.ZipFile(distributions[1]) as wheel:
        return {PurePosixPath(name) for name in wheel.namelist()}


def test_one_wheel_serves_every_python(distributions: tuple[Path, Path]) -> None:
    """What is compiled keeps to the stable ABI of the oldest Python: a kind of machine, a wheel."""
    assert "-cp310-abi3-linux_" in distributions[1].name


def test_wheel_holds_the_compiled_copier(wheel_names: set[PurePosixPath], scripts: Any) -> None:
    """The sdist holds its source, and the wheel of it the module; no other file is compiled."""
    if why := scripts.compiles.problem():
        pytest.skip(f"shm's compiled copier is not built: {why}")
    compiled = {name for name in wheel_names if name.suffix == ".so"}
    assert compiled == {PurePosixPath("kvxfer/backends/shm/_copy.abi3.so")}


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler(
    distributions: tuple[Path, Path], tmp_path: Path, compiler: str
) -> None:
    """The package installs all the same, without the compiled part, and copies in Python."""
    subprocess.run(["tar", "-xzf", distributions[0], "-C", tmp_path], check=True)
    (source,) = tmp_path.iterdir()
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", source],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "installed")
    program = "from kvxfer.backends.shm import copier, copiers; print(copiers.__file__, copier())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    where, _, found = done.stdout.partition(" ")
    assert where.startswith(str(tmp_path))
    assert "name='python'" in found
    assert "cannot be loaded" in found


def test_wheel_holds_the_package_and_nothing_else(wheel_names: set[PurePosixPath]) -> None:
    """No tests, scripts, docs or examples land in site-packages."""
    tops = {name.parts[0] for name in wheel_names}
    assert tops == {"kvxfer", f"kvxfer-{kvxfer.__version__}.dist-info"}


def test_wheel_holds_every_module(wheel_names: set[PurePosixPath]) -> None:
    """A folder that lacks its ``__init__.py`` would be left out without a word."""
    sources = {PurePosixPath(path.relative_to(ROOT)) for path in SOURCES.rglob("*.py")}
    assert sources <= wheel_names
    packages = {path.parent for path in SOURCES.rglob("*.py")}
    assert not [package for package in packages if not (package / "__init__.py").exists()]


def test_wheel_holds_the_data(wheel_names: set[PurePosixPath]) -> None:
    """The typing markers, and the C sources of the copier and the software RDMA device."""
    assert PurePosixPath("kvxfer/py.typed") in wheel_names
    data = {
        PurePosixPath(path.relative_to(ROOT))
        for path in SOURCES.rglob("*")
        if path.suffix in {".c", ".h", ".json", ".pyi"}
    }
    assert any(name.suffix == ".c" for name in data)
    assert data <= wheel_names


def test_metadata(distributions: tuple[Path, Path]) -> None:
    """Version, license and the dependencies a user gets."""
    with zipfile.ZipFile(distributions[1]) as wheel:
        folder = f"kvxfer-{kvxfer.__version__}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        entry_points = wheel.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert metadata["Version"] == kvxfer.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = {
        requirement.partition(">")[0]
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert needed == {"attrs", "entrypoints", "msgspec", "numpy", "pyzmq", "tenacity"}
    for group in ("kvxfer.backends", "kvxfer.classifiers", "kvxfer.retry_policies"):
        assert f"[{group}]" in entry_points


def test_sdist_can_be_worked_with(distributions: tuple[Path, Path]) -> None:
    """The sdist holds what is needed to build, to read and to test."""
    with tarfile.open(distributions[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "pyproject.toml",
        "setup.py",
        "kvxfer/backends/shm/_copy.c",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "kvxfer/py.typed",
        "scripts/lanes.py",
        "constraints/constraints.txt",
        "docs/limits.md",
        "tests/packaging/test_import_rules.py",
    } <= names
    assert not {name for name in names if name.startswith((".venv", ".git/"))}
