"""Virtual environments of the lanes: made once, kept, and remade when their pins change.

An environment is stamped with a hash of its interpreter, its steps, ``pyproject.toml``, the sources
that are compiled and the files under ``constraints/``.  A warm run compares the stamp and does
nothing else.  What pip prints goes to a log beside the environment, without addresses of package
indexes.

One pinned pip fills all of them (``pip --python``), and compiles nothing ahead of need: that is
three times faster than a pip in each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venvs"
STAMP = "kvxfer-stamp.json"
COMPILED_FROM = (ROOT / "setup.py", ROOT / "kvxfer" / "backends" / "shm" / "_copy.c")
"""What an installation from the source tree compiles."""

_ADDRESS = re.compile(r"https?://\S+|(?<=host=)'[^']*'")
_NO_WHEEL = "No matching distribution found"


class SetupError(Exception):
    """An environment cannot be made here; the text says what to install."""


@dataclass(frozen=True)
class Step:
    """One program that fills an environment.

    ``{python}`` stands for its interpreter, ``{venv}`` for its folder and ``{pip}`` for a pip that
    works on it.  ``optional`` is what to tell when it fails with ``excuse`` in its output (pip: no
    wheel for this machine); without it, or for another reason, the step has to work.
    """

    argv: tuple[str, ...]
    optional: str = ""
    excuse: str = _NO_WHEEL

    @property
    def touches_source(self) -> bool:
        """It writes beside the sources, so that two such steps must not run at once."""
        return "-e" in self.argv


def pip(*arguments: str, optional: str = "", pinned: bool = True) -> Step:
    """``pip install`` with those arguments, held to the pins unless ``pinned`` is false."""
    pins = ("-c", "constraints/constraints.txt") if pinned else ()
    quiet = ("-q", "--no-input", "--no-compile")
    return Step(("{pip}", "install", *quiet, *pins, *arguments), optional)


@dataclass(frozen=True)
class Venv:
    """One environment: where, with which Python (in order of preference), filled how."""

    name: str
    pythons: tuple[str, ...]
    steps: tuple[Step, ...]
    path: Path | None = None

    @property
    def folder(self) -> Path:
        return self.path or HOME / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


@dataclass(frozen=True)
class Ready:
    """An environment that can be used. ``notes`` tell what it had to do without."""

    python: Path
    notes: tuple[str, ...]
    seconds: float


def find_python(*versions: str) -> str:
    """The path of a working CPython of one of ``versions``, first choice first.

    Raises:
        SetupError: there is none; the text says what to install.
    """
    done = subprocess.run(
        [str(ROOT / "scripts" / "find-python.sh"), *versions],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SetupError(done.stderr.strip())
    return done.stdout.strip()


def ensure(venv: Venv) -> Ready:
    """Make ``venv`` unless it is there and up to date. Any thread, any process.

    Raises:
        SetupError: no suitable Python, or a step failed.
    """
    start = time.monotonic()
    HOME.mkdir(exist_ok=True)
    with locked(venv.name):
        stamp = venv.folder / STAMP
        known = json.loads(stamp.read_text()) if stamp.exists() else {}
        current = known.get("key") == _key(venv, known.get("interpreter", ""))
        if not (current and venv.python.exists()):
            interpreter = find_python(*venv.pythons)
            notes = _make(venv, interpreter)
            known = {"key": _key(venv, interpreter), "interpreter": interpreter, "notes": notes}
            stamp.write_text(json.dumps(known, indent=1))
    return Ready(venv.python, tuple(known["notes"]), time.monotonic() - start)


def pip_argv(python: Path) -> list[str]:
    """The start of a command line: our pip, working on the environment of ``python``."""
    return [str(ensure(PIP).python), "-m", "pip", "--python", str(python)]


def _key(venv: Venv, interpreter: str) -> str:
    digest = hashlib.sha256()
    pins = sorted((ROOT / "constraints").glob("*.txt"))
    for path in [ROOT / "pyproject.toml", *COMPILED_FROM, *pins]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((interpreter, venv.pythons, venv.steps, str(venv.folder))).encode())
    return digest.hexdigest()


def _make(venv: Venv, interpreter: str) -> list[str]:
    shutil.rmtree(venv.folder, ignore_errors=True)
    bare = () if venv is PIP else ("--without-pip",)
    notes: list[str] = []
    with (HOME / f"{venv.name}.log").open("w") as log:
        _run(venv, Step((interpreter, "-m", "venv", *bare, str(venv.folder))), log)
        for step in venv.steps:
            note = _run(venv, step, log)
            if note:
                notes.append(note)
    return notes


def _run(venv: Venv, step: Step, log: TextIO) -> str:
    """Run one step. Returns a note when it was optional and could not be had."""
    argv: list[str] = []
    for part in step.argv:
        if part == "{pip}":
            argv += pip_argv(venv.python)
        else:
            names = {"{python}": str(venv.python), "{venv}": str(venv.folder)}
            argv.append(names.get(part, part))
    started = time.monotonic()
    with locked("source") if step.touches_source else contextlib.nullcontext():
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    output = _ADDRESS.sub("<address>", done.stdout)
    print(f"$ {' '.join(argv)}\n{output}# {time.monotonic() - started:.1f} s", file=log, flush=True)
    if done.returncode == 0:
        return ""
    if step.optional and step.excuse in output:
        return step.optional
    tail = "\n".join("  " + line for line in output.strip().splitlines()[-15:])
    raise SetupError(
        f"setting up {venv.folder.name} failed (exit status {done.returncode}):\n"
        f"  {' '.join(argv)}\n{tail}"
    )


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other processes, and other threads of ours, from doing the same thing."""
    with (HOME / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


PIP = Venv(
    "pip",
    ("3.11", "3.12", "3.13", "3.10"),
    (
        Step(
            (
                *("{python}", "-m", "pip", "install", "-q", "--no-input", "--no-compile"),
                *("-c", "constraints/constraints.txt", "pip"),
            )
        ),
    ),
)
