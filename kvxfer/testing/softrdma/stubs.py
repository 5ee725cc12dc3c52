"""One small library that stands in for everything the wheel links against and a bare host lacks.

The libraries of the ``amd-mori`` wheel need ROCm, gRPC, protobuf, libpci, libnuma and libdrm to be
loaded at all, although MoRI-IO over RDMA on CPU memory calls next to nothing of them.  The stand-in
is generated from what the wheel itself asks for: every undefined symbol that no library of the
wheel defines gets a stub with the symbol version asked for, and every shared object that the wheel
names gets a link to it.  The few functions whose answer matters are written by hand in
``src/rocm_stub.c``.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from kvxfer.errors import KvxferError
from kvxfer.testing.softrdma.toolchain import SOURCE_DIRECTORY, Toolchain

__all__ = ["STUB_LIBRARY", "StubPlan", "build_stub_library", "plan_stubs", "stub_source"]

STUB_LIBRARY = "libmoristub.so"

BASE_LIBRARIES = re.compile(
    r"^(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux)(?=[.-])"
)
"""Shared objects that every host has and that stay real."""

OPENED_AT_RUN_TIME = ("librocm_smi64.so.1",)
"""Opened with dlopen, so that no library names it as needed."""

_PROVIDED = re.compile(r"^(Py|_Py|_ITM|__gmon|__cxa_finalize)|@(GLIBC|GLIBCXX|CXXABI|GCC)")
"""Symbols that the interpreter, libc, libstdc++ and libgcc provide."""

_DATA = re.compile(
    r"^_ZT[VI]"  # virtual tables and type information
    r"|4g_core_codegen_interface|6g_glipE|6Status2OKE"  # gRPC
    r"|fixed_address_empty_string|kCppTypeToName"  # protobuf
)
"""Undefined symbols carry no type; these are variables, which a function cannot stand in for."""

_DATA_BYTES = 512  # more than the largest of them
_UNVERSIONED = ""


@attrs.frozen(kw_only=True)
class StubPlan:
    """What the stand-in has to define."""

    symbols: Mapping[str, str]
    """Symbol name to the version it is asked for with; empty text: no version."""
    sonames: tuple[str, ...]
    """Names under which the stand-in must be found."""


def plan_stubs(tools: Toolchain, libraries: Sequence[Path]) -> StubPlan:
    """Read from the wheel's libraries what is missing.

    Raises:
        KvxferError: ``nm`` or ``readelf`` could not read a library.
    """
    defined: set[str] = set()
    undefined: dict[str, str] = {}
    needed: set[str] = set(OPENED_AT_RUN_TIME)
    for library in libraries:
        for line in _run([tools.nm, "-D", "--defined-only", str(library)]):
            defined.add(line.split()[-1].partition("@")[0])
        for line in _run([tools.nm, "-D", "--undefined-only", str(library)]):
            kind, name = line.split()[-2:]
            if kind == "U" and not _PROVIDED.search(name):  # not weak: those may stay undefined
                base, _, version = name.replace("@@", "@").partition("@")
                undefined[base] = version
        for line in _run([tools.readelf, "-d", "-W", str(library)]):
            match = re.search(r"\(NEEDED\).*\[(.+)\]", line)
            if match and not BASE_LIBRARIES.match(match[1]):
                needed.add(match[1])
    own = {library.name for library in libraries}
    return StubPlan(
        symbols={name: undefined[name] for name in sorted(undefined) if name not in defined},
        sonames=tuple(sorted(needed - own)),
    )


def stub_source(symbols: Iterable[str], written_by_hand: frozenset[str]) -> str:
    """C source with a stub for every symbol that is not written by hand."""
    lines = ["/* Generated: stand-ins for symbols that mori links against but does not call. */"]
    for name in symbols:
        if name in written_by_hand:
            continue
        if _DATA.search(name):
            lines.append(f"char {name}[{_DATA_BYTES}] __attribute__((aligned(64)));")
        else:
            # An alias in assembler: C++ names may hold characters that C identifiers may not.
            lines.append(
                f'__asm__(".globl {name}\\n.type {name}, @function\\n'
                f'{name}: jmp stub_unavailable@PLT");'
            )
    return "\n".join(lines) + "\n"


def _version_script(symbols: Mapping[str, str], written_by_hand: frozenset[str]) -> str:
    """A linker script that gives every symbol the version it is asked for with."""
    by_version: dict[str, list[str]] = {_UNVERSIONED: []}
    for name, version in symbols.items():
        by_version.setdefault(version, []).append(name)
    by_version[_UNVERSIONED] += sorted(written_by_hand - set(symbols))
    blocks = [
        f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};"
        for version, names in sorted(by_version.items())
        if version != _UNVERSIONED
    ]
    rest = " ".join(f"{name};" for name in by_version[_UNVERSIONED])
    blocks.append(f"STUB_BASE {{ global: {rest} local: *; }};")
    return "\n".join(blocks) + "\n"


def build_stub_library(tools: Toolchain, plan: StubPlan, work: Path, output: Path) -> None:
    """Compile the stand-in to ``output``, with ``work`` for the files in between.

    Raises:
        KvxferError: A tool failed.
    """
    by_hand = work / "rocm_stub.o"
    flags = ("-fPIC", "-O1", "-fno-builtin")
    tools.compile(["-c", *flags, "-o", str(by_hand), str(SOURCE_DIRECTORY / "rocm_stub.c")])
    names = _run([tools.nm, "-g", "--defined-only", str(by_hand)])
    written_by_hand = frozenset(line.split()[-1] for line in names)
    source, script = work / "stubs.c", work / "stubs.map"
    source.write_text(stub_source(plan.symbols, written_by_hand))
    script.write_text(_version_script(plan.symbols, written_by_hand))
    linking = ("-shared", f"-Wl,--version-script={script}", f"-Wl,-soname,{STUB_LIBRARY}")
    tools.compile([*flags, *linking, "-o", str(output), str(source), str(by_hand)])


def _run(command: Sequence[str]) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise KvxferError(f"{' '.join(command)} failed: {result.stderr.strip()}")
    return result.stdout.splitlines()
