"""Finding a CPython that the ``amd-mori`` wheel supports.

The wheel exists for CPython 3.10 (glibc 2.35 or later) and 3.12 (glibc 2.38 or later) on x86-64
Linux.  Candidates are asked what they are, never guessed from their file names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from kvxfer.errors import MissingDependencyError

__all__ = ["Interpreter", "candidates", "find_interpreter", "probe", "why_unsuitable"]

MINIMUM_GLIBC: Mapping[tuple[int, int], tuple[int, int]] = {(3, 10): (2, 35), (3, 12): (2, 38)}
"""The CPython versions that the wheel is built for, and the glibc its platform tag asks for."""

PROBE_TIMEOUT_S = 20.0

_PROBE = """
import importlib.util, json, os, platform, sys
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (AttributeError, OSError, ValueError):
    libc = ""
print(json.dumps({
    "implementation": platform.python_implementation(),
    "version": list(sys.version_info[:3]),
    "libc": libc,
    "system": platform.system(),
    "machine": platform.machine(),
    "has_venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""


@attrs.frozen(kw_only=True)
class Interpreter:
    """What an interpreter says about itself."""

    path: Path
    implementation: str
    version: tuple[int, int, int]
    libc: str
    """For instance ``glibc 2.36``; empty when it is not glibc."""
    system: str
    machine: str
    has_venv: bool
    """Whether it can make virtual environments with pip in them."""

    def __str__(self) -> str:
        version = ".".join(map(str, self.version))
        libc = f", {self.libc}" if self.libc else ""
        return f"{self.path} ({self.implementation} {version}{libc})"


def probe(path: Path) -> Interpreter | str:
    """Run the interpreter at ``path``; the text says why it did not answer."""
    try:
        result = subprocess.run(
            [str(path), "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    try:
        answer = json.loads(result.stdout)
        major, minor, micro = answer.pop("version")
        return Interpreter(path=path, version=(major, minor, micro), **answer)
    except (ValueError, TypeError):
        # A version manager's shim without a selected version, for instance.
        return f"does not run (exit status {result.returncode})"


def why_unsuitable(interpreter: Interpreter) -> str | None:
    """Why the wheel cannot be used with this interpreter; None when it can."""
    version = interpreter.version[:2]
    dotted = f"{version[0]}.{version[1]}"
    if interpreter.system != "Linux" or interpreter.machine != "x86_64":
        return f"is for {interpreter.system} on {interpreter.machine}, not Linux on x86_64"
    if interpreter.implementation != "CPython" or version not in MINIMUM_GLIBC:
        return f"is {interpreter.implementation} {dotted}, not CPython 3.10 or 3.12"
    name, _, text = interpreter.libc.partition(" ")
    try:
        libc = tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        libc = ()
    needed = MINIMUM_GLIBC[version]
    if name != "glibc" or libc < needed:
        return (
            f"has {interpreter.libc or 'no glibc'}, and the wheel for {dotted} "
            f"needs glibc {needed[0]}.{needed[1]} or later"
        )
    return None


def candidates(environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Interpreters that may be suitable, best first: this one, then PATH, then version managers.

    Looks at every directory of PATH, because an earlier one may hold a shim that does not work,
    and into the installations of pyenv (``PYENV_ROOT``, ``~/.pyenv`` and wherever a pyenv on PATH
    lives) and of uv.
    """
    environment = os.environ if environment is None else environment
    yield Path(sys.executable)
    names = [f"python{major}.{minor}" for major, minor in MINIMUM_GLIBC]
    directories = [Path(entry) for entry in environment.get("PATH", "").split(os.pathsep) if entry]
    for name in [*names, "python3", "python"]:
        yield from _executables(directory / name for directory in directories)
    for root in _manager_roots(environment, directories):
        for name in names:
            yield from _executables(sorted(root.glob(f"*/bin/{name}"), reverse=True))


def _executables(paths: Iterator[Path] | Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file() and os.access(path, os.X_OK):
            yield path


def _manager_roots(environment: Mapping[str, str], directories: Sequence[Path]) -> Iterator[Path]:
    """Directories with one installation of Python in each sub-directory."""
    home = Path(environment.get("HOME") or Path.home())
    if environment.get("PYENV_ROOT"):
        yield Path(environment["PYENV_ROOT"]) / "versions"
    yield home / ".pyenv" / "versions"
    for directory in directories:
        if directory.name in {"bin", "shims"}:
            yield directory.parent / "versions"
    if environment.get("UV_PYTHON_INSTALL_DIR"):
        yield Path(environment["UV_PYTHON_INSTALL_DIR"])
    data_home = environment.get("XDG_DATA_HOME")
    yield (Path(data_home) if data_home else home / ".local" / "share") / "uv" / "python"


def find_interpreter(
    wanted: Path | None = None, environment: Mapping[str, str] | None = None
) -> Interpreter:
    """The interpreter to use.

    Args:
        wanted: Use this one or fail; None searches (see ``candidates``).
        environment: Where PATH, HOME and PYENV_ROOT are taken from; None is the process's own.

    Raises:
        MissingDependencyError: None is suitable; the text names what was looked at and why each
            was refused.
    """
    refused: list[str] = []
    seen: set[Path] = set()
    for path in [wanted] if wanted is not None else candidates(environment):
        # A virtual environment's python resolves to its base, but is a different one.
        if path in seen:
            continue
        seen.add(path)
        found = probe(path)
        reason = found if isinstance(found, str) else why_unsuitable(found)
        if reason is None and isinstance(found, Interpreter):
            return found
        refused.append(f"{path} {reason}")
    listing = "".join(f"\n  {line}" for line in refused)
    raise MissingDependencyError(
        f"no interpreter that amd-mori has a wheel for; looked at:{listing or ' nothing'}",
        next_step=(
            "Install CPython 3.10 (or 3.12 where glibc is 2.38 or later), for instance with "
            "`pyenv install 3.10` or `uv python install 3.10`, or name one with --python"
        ),
    )
