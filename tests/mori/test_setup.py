"""``python -m kvxfer.testing.softrdma setup``: finding what is needed, saying what is missing."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError, MissingDependencyError
from kvxfer.testing.softrdma.__main__ import main
from kvxfer.testing.softrdma.environment import STAMP, VERBS_LIBRARY, setup
from kvxfer.testing.softrdma.interpreters import (
    Interpreter,
    candidates,
    find_interpreter,
    why_unsuitable,
)
from kvxfer.testing.softrdma.stubs import stub_source
from kvxfer.testing.softrdma.toolchain import SOURCE_DIRECTORY, VERBS_SOURCES, find_toolchain
from kvxfer.testing.softrdma.wheel import find_wheel


def fake_python(
    path: Path, *, version: str = "3.10.14", libc: str = "glibc 2.36", machine: str = "x86_64"
) -> Path:
    """A program that answers the probe as such an interpreter would."""
    answer = {
        "implementation": "CPython",
        "version": [int(part) for part in version.split(".")],
        "libc": libc,
        "system": "Linux",
        "machine": machine,
        "has_venv": True,
    }
    return program(path, f"echo '{json.dumps(answer)}'")


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# ---- interpreters ----


@pytest.mark.parametrize(
    ("version", "libc", "machine", "reason"),
    [
        ("3.10.1", "glibc 2.35", "x86_64", None),
        ("3.12.0", "glibc 2.38", "x86_64", None),
        ("3.12.0", "glibc 2.36", "x86_64", "needs glibc 2.38"),
        ("3.10.1", "glibc 2.31", "x86_64", "needs glibc 2.35"),
        ("3.10.1", "", "x86_64", "has no glibc"),
        ("3.11.7", "glibc 2.36", "x86_64", "not CPython 3.10 or 3.12"),
        ("3.10.1", "glibc 2.36", "aarch64", "not Linux on x86_64"),
    ],
)
def test_which_interpreters_the_wheel_supports(
    tmp_path: Path, version: str, libc: str, machine: str, reason: str | None
) -> None:
    """The wheel needs CPython 3.10 with glibc 2.35, or 3.12 with glibc 2.38, on x86-64."""
    path = fake_python(tmp_path / "python", version=version, libc=libc, machine=machine)
    if reason is None:
        assert isinstance(find_interpreter(path), Interpreter)
    else:
        with pytest.raises(MissingDependencyError, match=reason):
            find_interpreter(path)


@pytest.mark.parametrize("variable", ["PYENV_ROOT", "HOME", "PATH"])
def test_pyenv_installations_are_found(tmp_path: Path, variable: str) -> None:
    """A version that pyenv installed is found by PYENV_ROOT, in the home directory, and through
    its shims on PATH, even where the shim itself refuses to run because no version is chosen."""
    root = tmp_path / ".pyenv"
    installed = fake_python(root / "versions" / "3.10.99" / "bin" / "python3.10")
    program(root / "shims" / "python3.10", "echo 'no version chosen' >&2; exit 127")
    environment = {"HOME": str(tmp_path / "nowhere"), "PATH": "/nonexistent"}
    environment[variable] = {
        "PYENV_ROOT": str(root),
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join(["/nonexistent", str(root / "shims")]),
    }[variable]
    assert installed in candidates(environment)
    others = [path for path in candidates(environment) if path != Path(sys.executable)]
    assert others[-1] == installed


def test_a_later_directory_of_path_counts(tmp_path: Path) -> None:
    """A python3.10 that does not work does not hide a later one on PATH."""
    first, second = tmp_path / "first", tmp_path / "second"
    program(first / "python3.10", "exit 127")
    fake_python(second / "python3.10")
    environment = {"HOME": str(tmp_path), "PATH": f"{first}{os.pathsep}{second}"}
    found = list(candidates(environment))
    assert found.index(first / "python3.10") < found.index(second / "python3.10")


def test_the_error_lists_what_was_looked_at(tmp_path: Path) -> None:
    """Where none is suitable the error names each one looked at, why not, and what to install."""
    path = fake_python(tmp_path / "python3.9", version="3.9.18")
    with pytest.raises(MissingDependencyError) as caught:
        find_interpreter(path)
    assert f"{path} is CPython 3.9, not CPython 3.10 or 3.12" in str(caught.value)
    assert "pyenv install 3.10" in str(caught.value)


def test_an_interpreter_that_does_not_run(tmp_path: Path) -> None:
    """A path that is no program is reported as such, not raised as an OSError."""
    with pytest.raises(MissingDependencyError, match="does not run"):
        find_interpreter(tmp_path / "missing")


def test_this_interpreter_is_suitable() -> None:
    """These tests run in an environment that the wheel supports."""
    assert why_unsuitable(find_interpreter(Path(sys.executable))) is None


# ---- tools ----


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    """Without gcc the error says so, and which package brings it."""
    with pytest.raises(MissingDependencyError, match="apt-get install gcc"):
        find_toolchain({"PATH": str(tmp_path)})


def test_missing_headers_are_named(tmp_path: Path) -> None:
    """Without the verbs headers the error names the package that brings them."""
    program(tmp_path / "gcc", "echo 'fatal error: infiniband/verbs.h: No such file' >&2; exit 1")
    for tool in ("nm", "readelf"):
        program(tmp_path / tool, "exit 0")
    with pytest.raises(MissingDependencyError, match="apt-get install libibverbs-dev"):
        find_toolchain({"PATH": f"{tmp_path}{os.pathsep}/bin"})


def test_every_source_is_built() -> None:
    """No C file lies beside the build: each is compiled, or the hand-written half of the stubs."""
    sources = {path.name for path in SOURCE_DIRECTORY.glob("*.c")}
    assert sources == {*VERBS_SOURCES, "rocm_stub.c"}


def test_the_sources_compile_without_warnings(tmp_path: Path) -> None:
    """gcc has nothing to say about them, even when asked for more than the build asks for."""
    flags = ["-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Wpointer-arith"]
    for name in (*VERBS_SOURCES, "rocm_stub.c"):
        subprocess.run(
            ["gcc", *flags, "-Werror", str(SOURCE_DIRECTORY / name)], check=True, cwd=tmp_path
        )


def test_stubs_tell_data_from_functions() -> None:
    """Virtual tables get memory, functions a jump, and what is written by hand gets nothing."""
    source = stub_source(["_ZTVN4grpc6StatusE", "hipMalloc", "pci_alloc"], frozenset({"pci_alloc"}))
    assert "char _ZTVN4grpc6StatusE[" in source
    assert "hipMalloc: jmp stub_unavailable@PLT" in source
    assert "pci_alloc" not in source


# ---- the wheel ----


def fake_wheel(site_packages: Path) -> Path:
    library = site_packages / "mori" / "libmori_io.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"engine")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"engine").digest()).decode().rstrip("=")
    information = site_packages / "amd_mori-9.9.dist-info"
    information.mkdir()
    (information / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp310-cp310-linux_x86_64\n")
    (information / "RECORD").write_text(
        f"mori/libmori_io.so,sha256={digest},6\n../../../bin/mori,sha256=x,1\nmori/a.pyc,,\n"
    )
    return library


def test_a_modified_wheel_is_refused(tmp_path: Path) -> None:
    """A file that differs from the wheel's own record is found, and named."""
    library = fake_wheel(tmp_path)
    wheel = find_wheel([tmp_path / "nowhere", tmp_path])
    assert wheel is not None
    assert (wheel.version, wheel.tag) == ("9.9", "cp310-cp310-linux_x86_64")
    assert wheel.verify() == 1
    assert wheel.main_library_digest == hashlib.sha256(b"engine").hexdigest()
    library.write_bytes(b"patched")
    with pytest.raises(KvxferError, match=r"not as the wheel shipped them: mori/libmori_io\.so"):
        wheel.verify()


# ---- the whole ----


def test_setup_again_does_nothing() -> None:
    """On an environment that is complete, setup builds and downloads nothing and reports the
    wheel's and the library's hashes."""
    environment = Path(sys.prefix)
    setup(environment)  # complete it, should the sources be newer
    lines: list[str] = []
    report = setup(environment, say=lines.append)
    assert not report.built
    assert report.files_verified > 1000
    text = "\n".join(lines)
    assert f"amd-mori {report.wheel.version}" in text
    assert report.wheel.main_library_digest in text
    assert report.verbs_library_sha256 in text


def test_setup_replaces_what_is_not_its_own() -> None:
    """A library that is not the one an earlier setup built is built again. (The record of it is
    altered here, not the library: other tests may be using that.)"""
    environment = Path(sys.prefix)
    stamp = setup(environment).wheel.directory / STAMP
    content = json.loads(stamp.read_text())
    content["files"][VERBS_LIBRARY] = "0" * 64
    stamp.write_text(json.dumps(content))
    assert setup(environment).built
    assert not setup(environment).built


def test_setup_leaves_other_directories_alone(tmp_path: Path) -> None:
    """A directory with something else in it is refused, by name."""
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(KvxferError, match=r"holds 'thesis\.tex'"):
        setup(tmp_path)


def test_the_command_explains_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that can be explained ends the command with status 1 and the text, not a trace."""
    (tmp_path / "thesis.tex").write_text("")
    assert main(["setup", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
