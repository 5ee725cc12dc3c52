"""What ``import kvxfer`` loads and what it costs, measured in fresh interpreters."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys

import pytest

BUDGET = 0.060  # seconds above the bare interpreter


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that ``statement`` adds to those of a bare interpreter."""
    program = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    return set(json.loads(python(program)))


def test_import_loads_nothing_but_the_package() -> None:
    """No dependency, no backend, no submodule: torch, numpy, zmq, tenacity and rich stay out."""
    loaded = loaded_by("import kvxfer")
    assert "kvxfer" in loaded
    strangers = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    assert strangers == {"kvxfer"}


def test_errors_load_no_dependency() -> None:
    """``except kvxfer.KvxferError`` must not cost an import of numpy or zmq."""
    loaded = loaded_by("import kvxfer; kvxfer.KvxferError")
    strangers = {name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names}
    assert strangers == {"kvxfer", "kvxfer.errors"}


def test_import_time() -> None:
    """The median of nine warm runs is at most 60 ms above the bare interpreter.

    CPU seconds: on an idle machine they are the time that passes, on a busy one they still hold.
    """
    python("import kvxfer")  # compiles what is not compiled yet

    def seconds(program: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(program)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("pass"), seconds("import kvxfer")) for _ in range(9)]
    bare = statistics.median(bare for bare, _ in pairs)
    ours = statistics.median(ours for _, ours in pairs)
    assert ours - bare <= BUDGET, f"{ours * 1e3:.0f} ms against {bare * 1e3:.0f} ms"


# Importing these needs the engine they are for, or runs the program.
NOT_IMPORTABLE_ALONE = (
    "kvxfer.__main__",
    "kvxfer.integrations.vllm",
    "kvxfer.testing.test_backend",  # wants to be told a backend by the command line of pytest
)


@pytest.mark.timeout(180)
def test_no_module_of_ours_loads_torch_or_an_engine() -> None:
    """All modules together, imported for real, leave torch and the engines out."""
    program = f"""
import importlib, json, pkgutil, sys
import kvxfer
skip = {NOT_IMPORTABLE_ALONE!r}
names = [
    m.name
    for m in pkgutil.walk_packages(kvxfer.__path__, "kvxfer.", onerror=lambda name: None)
    if not any(m.name == s or m.name.startswith(s + ".") for s in skip)
]
for name in names:
    importlib.import_module(name)
engines = {{"torch", "mori", "nixl", "nixl_cu12", "nixl_cu13", "mooncake", "vllm"}}
print(json.dumps([len(names), sorted(engines & set(sys.modules))]))
"""
    count, loaded = json.loads(python(program))
    assert count > 10
    assert loaded == []
