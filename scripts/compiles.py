"""Exit status 0 if C extensions can be compiled for the Python that runs this; says why if not."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CANNOT = "no C extension can be compiled for this Python"


def problem() -> str:
    """What is missing; empty if nothing is."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "x.c")
        source.write_text("#include <Python.h>\n#include <string.h>\nint x;\n")
        include = f"-I{sysconfig.get_paths()['include']}"
        words = [*shlex.split(compiler), "-shared", "-fPIC", include, str(source)]
        try:
            done = subprocess.run(
                [*words, "-o", f"{folder}/x.so"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
    if done.returncode:
        return done.stdout.strip() or f"{words[0]} ended with exit status {done.returncode}"
    return ""


if __name__ == "__main__":
    found = problem()
    if found:
        print(f"{CANNOT}: {found}")
    sys.exit(bool(found))
