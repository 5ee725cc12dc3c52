"""``setup``: a virtual environment in which the real mori engine runs on CPU memory.

Nothing of the wheel is changed.  Its libraries look for what they need beside themselves first
(RUNPATH is ``$ORIGIN``), so the software verbs library and the stand-ins are put there, and nothing
has to be set in the environment of a process that uses them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from kvxfer.errors import KvxferError, MissingDependencyError
from kvxfer.testing.softrdma.interpreters import Interpreter, find_interpreter
from kvxfer.testing.softrdma.stubs import STUB_LIBRARY, build_stub_library, plan_stubs
from kvxfer.testing.softrdma.toolchain import (
    build_verbs_library,
    find_toolchain,
    sources_digest,
)
from kvxfer.testing.softrdma.wheel import MORI_VERSION, InstalledWheel, find_wheel

__all__ = ["SetupReport", "setup"]

VERBS_LIBRARY = "libibverbs.so.1"
VERBS_LINK = "libibverbs.so"  # mori tries this name first, and would find the system's

# mori wants a PCI address in each device's path, and the path to exist (see src/device.c).
DEVICE_DIRECTORIES = tuple(f"0000:00:{bus:02x}.0" for bus in range(1, 5))

STAMP = "kvxfer-softrdma.json"

Say = Callable[[str], None]


@attrs.frozen(kw_only=True)
class SetupReport:
    """What an environment holds after ``setup``."""

    python: Path
    wheel: InstalledWheel
    archive_sha256: str | None
    """SHA-256 of the downloaded wheel; None when it was installed by somebody else."""
    files_verified: int
    built: bool
    """False when libraries of an earlier run were still up to date."""
    verbs_library_sha256: str


def setup(target: Path, *, wanted: Path | None = None, say: Say = lambda line: None) -> SetupReport:
    """Make ``target`` a virtual environment with the mori engine and software RDMA, or complete it.

    What is there already and matches is left alone.  Libraries are replaced whole, so a process
    that uses the old ones is not disturbed.  Two runs on one target wait for each other.

    Args:
        target: The virtual environment's directory; made when missing.
        wanted: The interpreter to make it with; None searches for one.
        say: Called with each line of progress.

    Raises:
        MissingDependencyError: A compiler, headers or a suitable interpreter is missing.
        KvxferError: pip, the compiler or the final import failed, or the wheel was modified.
    """
    target = target.absolute()
    if not (target / "pyvenv.cfg").is_file():
        find_interpreter(wanted)  # before anything is made
    with _locked(target):
        present = find_wheel(_site_packages(target))
        if present is None or not _up_to_date(present, _read_stamp(present)):
            find_toolchain()  # before anything is downloaded
        python = _virtual_environment(target, wanted, say)
        wheel, archive = _installed_wheel(target, python, say)
        verified = wheel.verify()
        say(f"wheel        amd-mori {wheel.version} ({wheel.tag})")
        say(f"             sha256 of the archive      {archive or 'not known: found installed'}")
        say(f"             sha256 of libmori_io.so    {wheel.main_library_digest}")
        say(f"             sha256 of RECORD's files   {wheel.record_digest}")
        say(f"             {verified} files are as the wheel shipped them")
        stamp = _read_stamp(wheel)
        built = not _up_to_date(wheel, stamp)
        if built:
            with tempfile.TemporaryDirectory(dir=wheel.directory, prefix=".softrdma-") as work:
                names = _build(wheel, Path(work))
                _remove_left_over(wheel, stamp, names)
                stamp = _write_stamp(wheel, names, archive)
        digest = stamp["files"][VERBS_LIBRARY]
        say(f"libraries    {'built' if built else 'up to date'}: {len(stamp['files'])} files")
        say(f"             sha256 of {VERBS_LIBRARY}  {digest}")
        _check_import(python)
        say("import       mori.cpp works")
        return SetupReport(
            python=python,
            wheel=wheel,
            archive_sha256=archive,
            files_verified=verified,
            built=built,
            verbs_library_sha256=digest,
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".softrdma-setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- the virtual environment and the wheel ----


def _virtual_environment(target: Path, wanted: Path | None, say: Say) -> Path:
    python = target / "bin" / "python"
    if (target / "pyvenv.cfg").is_file():
        interpreter = find_interpreter(python)  # refuses one that the wheel is not for
        if wanted is not None:
            asked = find_interpreter(wanted)
            if asked.version[:2] != interpreter.version[:2]:
                raise KvxferError(
                    f"{target} is a virtual environment of {interpreter}, "
                    f"but --python asks for {asked}",
                    next_step="Remove the directory, or leave --python away",
                )
        say(f"environment  {target}: kept, {interpreter}")
        return python
    others = [entry.name for entry in target.iterdir() if not entry.name.startswith(".softrdma-")]
    if others:
        raise KvxferError(
            f"{target} is neither empty nor a virtual environment (it holds {others[0]!r})",
            next_step="Name another directory",
        )
    interpreter = find_interpreter(wanted)
    _make_environment(target, interpreter)
    say(f"environment  {target}: made with {interpreter}")
    return python


def _make_environment(target: Path, interpreter: Interpreter) -> None:
    if not interpreter.has_venv:
        version = f"{interpreter.version[0]}.{interpreter.version[1]}"
        raise MissingDependencyError(
            f"{interpreter.path} cannot make virtual environments: venv or ensurepip is missing",
            next_step=f"Debian and Ubuntu: apt-get install python{version}-venv",
        )
    _run([str(interpreter.path), "-m", "venv", str(target)], "making the virtual environment")


def _site_packages(target: Path) -> Iterator[Path]:
    yield from sorted(target.glob("lib*/python3.*/site-packages"))


def _installed_wheel(target: Path, python: Path, say: Say) -> tuple[InstalledWheel, str | None]:
    wheel = find_wheel(_site_packages(target))
    if wheel is not None and wheel.version == MORI_VERSION:
        archive = _read_stamp(wheel).get("archive_sha256")
        return wheel, archive if isinstance(archive, str) else None
    say(f"wheel        installing amd-mori {MORI_VERSION}")
    with tempfile.TemporaryDirectory(prefix="softrdma-") as work:
        report = Path(work) / "report.json"
        # No dependencies: of the engine's Python half only mori.cpp is used here.
        options = ("--quiet", "--no-deps", "--only-binary=:all:", f"--report={report}")
        _run(
            [str(python), "-m", "pip", "install", *options, f"amd-mori=={MORI_VERSION}"],
            f"installing amd-mori {MORI_VERSION}",
        )
        archive = _archive_digest(json.loads(report.read_text(encoding="utf-8")))
    wheel = find_wheel(_site_packages(target))
    if wheel is None:
        raise KvxferError(f"pip succeeded, but amd-mori is not in {target}")
    return wheel, archive


def _archive_digest(report: dict[str, Any]) -> str | None:
    for item in report.get("install", []):
        archive = item.get("download_info", {}).get("archive_info", {})
        digest = archive.get("hashes", {}).get("sha256")
        if isinstance(digest, str):
            return digest
        old_form = str(archive.get("hash", "")).partition("sha256=")[2]  # pip before 23
        return old_form or None
    return None


def _run(command: list[str], doing: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise KvxferError(
            f"{doing} failed with status {result.returncode}: {' '.join(command)}\n"
            f"{result.stdout}{result.stderr}"
        )


def _check_import(python: Path) -> None:
    _run([str(python), "-c", "import mori.cpp; mori.cpp.IOEngine"], "importing mori.cpp")


# ---- the libraries beside the wheel's ----


def _build(wheel: InstalledWheel, work: Path) -> list[str]:
    """Build in ``work``, move into place, and return the names of what was put there."""
    tools = find_toolchain()
    plan = plan_stubs(tools, wheel.libraries)
    build_stub_library(tools, plan, work, work / STUB_LIBRARY)
    build_verbs_library(tools, work / VERBS_LIBRARY)
    links = dict.fromkeys(plan.sonames, STUB_LIBRARY)
    links[VERBS_LINK] = VERBS_LIBRARY
    for name, points_to in links.items():
        (work / name).symlink_to(points_to)
    for name in DEVICE_DIRECTORIES:
        (wheel.directory / name).mkdir(exist_ok=True)
    names = [STUB_LIBRARY, VERBS_LIBRARY, *links]
    for name in names:
        os.replace(work / name, wheel.directory / name)
    return names


def _remove_left_over(wheel: InstalledWheel, stamp: dict[str, Any], names: list[str]) -> None:
    """Remove what an earlier version put there and this one does not."""
    files = stamp.get("files")
    for name in set(files if isinstance(files, dict) else ()) - set(names):
        (wheel.directory / Path(name).name).unlink(missing_ok=True)


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _read_stamp(wheel: InstalledWheel) -> dict[str, Any]:
    try:
        stamp = json.loads((wheel.directory / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(wheel: InstalledWheel, names: list[str], archive: str | None) -> dict[str, Any]:
    stamp = {
        "sources": sources_digest(),
        "record": wheel.record_digest,
        "archive_sha256": archive,
        "files": {name: _file_digest(wheel.directory / name) for name in names},
    }
    temporary = wheel.directory / f"{STAMP}.new"
    temporary.write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    os.replace(temporary, wheel.directory / STAMP)
    return stamp


def _up_to_date(wheel: InstalledWheel, stamp: dict[str, Any]) -> bool:
    files = stamp.get("files")
    return (
        stamp.get("sources") == sources_digest()
        and stamp.get("record") == wheel.record_digest
        and isinstance(files, dict)
        and all(_file_digest(wheel.directory / name) == digest for name, digest in files.items())
        and all((wheel.directory / name).is_dir() for name in DEVICE_DIRECTORIES)
    )
