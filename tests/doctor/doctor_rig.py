"""Runs ``kvxfer doctor`` as users do, on hosts that are really broken."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvxfer

HOME = Path(kvxfer.__file__).parents[1]


@dataclasses.dataclass
class Told:
    """What the doctor said, and its exit status."""

    status: int
    report: dict[str, Any]

    def backend(self, name: str) -> dict[str, Any]:
        (found,) = [b for b in self.report["backends"] if b["name"] == name]
        return found

    def of(self, check: str, backend: str = "") -> list[dict[str, str]]:
        """The findings of one check, of the host or of a backend."""
        findings = self.backend(backend)["findings"] if backend else self.report["host"]
        return [f for f in findings if f["check"] == check]

    def one(self, check: str, backend: str = "") -> dict[str, str]:
        (found,) = self.of(check, backend)
        return found


def run_doctor(
    *arguments: str,
    python: str | Path = sys.executable,
    path: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
    json_only: bool = True,
) -> Any:
    """``Told``, or the process if not ``json_only``. ``before`` runs in the new process."""
    words = [str(python), "-m", "kvxfer", "doctor", *arguments, *(["--json"] if json_only else [])]
    search = [*map(str, path), str(HOME)]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        preexec_fn=before,
    )
    if not json_only:
        return done
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return Told(done.returncode, json.loads(done.stdout))


def environment_without(folder: Path, *removed: str) -> Path:
    """The Python of a new environment that has what this one has, less what is ``removed``.

    ``removed`` are the beginnings of names in site-packages: packages and their metadata.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    there = folder / "lib" / version / "site-packages"
    for here in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(here).iterdir():
            gone = entry.name.lower().startswith(removed)
            if not gone and not (there / entry.name).exists():
                (there / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
