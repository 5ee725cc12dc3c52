"""The sdist and the wheel, built from a copy of the source tree."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

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


def test_wheel_is_pure(distributions: tuple[Path, Path]) -> None:
    """One wheel serves every supported Python: nothing in it is compiled."""
    assert distributions[1].name.endswith("-py3-none-any.whl")


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
    """The typing marker, and the C sources of the software RDMA device."""
    assert PurePosixPath("kvxfer/py.typed") in wheel_names
    data = {
        PurePosixPath(path.relative_to(ROOT))
        for path in (SOURCES / "testing" / "softrdma").rglob("*")
        if path.suffix in {".c", ".h", ".json"}
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
