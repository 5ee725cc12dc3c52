"""The C compiler, binutils and verbs headers, and building the software verbs library with them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from kvxfer.errors import KvxferError, MissingDependencyError

__all__ = [
    "SOURCE_DIRECTORY",
    "Toolchain",
    "build_verbs_library",
    "find_toolchain",
    "sources_digest",
]

SOURCE_DIRECTORY = Path(__file__).parent / "src"

VERBS_SOURCES = (
    "completion.c",
    "device.c",
    "faults.c",
    "memory.c",
    "post.c",
    "process.c",
    "queue_pair.c",
    "receive.c",
    "status.c",
    "table.c",
    "thread.c",
    "transfer.c",
)

VERBS_FLAGS = (
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-O2",
    "-g",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wl,-soname,libibverbs.so.1",
)

_INSTALL_COMPILER = "Debian and Ubuntu: apt-get install gcc; Fedora and RHEL: dnf install gcc"
_INSTALL_HEADERS = (
    "Debian and Ubuntu: apt-get install libibverbs-dev; Fedora and RHEL: dnf install "
    "rdma-core-devel"
)


@attrs.frozen(kw_only=True)
class Toolchain:
    """Programs, by the name or path to run them with."""

    cc: str
    nm: str
    readelf: str

    def compile(self, arguments: Sequence[str]) -> None:
        """Run the compiler.

        Raises:
            KvxferError: It failed; the text holds what it printed.
        """
        result = subprocess.run([self.cc, *arguments], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise KvxferError(
                f"{self.cc} failed with status {result.returncode}:\n{result.stderr}",
                next_step="This is a fault of the sources or the compiler: please report it",
            )


def find_toolchain(environment: Mapping[str, str] | None = None) -> Toolchain:
    """Find the tools, and check that the verbs headers are there.

    ``CC`` names another compiler; it must take gcc's options.

    Raises:
        MissingDependencyError: Something is missing; the text says how to install it.
    """
    environment = os.environ if environment is None else environment
    path = environment.get("PATH")
    wanted = environment.get("CC") or "gcc"
    compiler = shutil.which(wanted, path=path)
    if compiler is None:
        raise MissingDependencyError(
            f"no C compiler: {wanted!r} is not on PATH", next_step=_INSTALL_COMPILER
        )
    tools = {name: shutil.which(name, path=path) for name in ("nm", "readelf")}
    missing = [name for name, found in tools.items() if found is None]
    if missing:
        raise MissingDependencyError(
            f"not on PATH: {', '.join(missing)} (of binutils)", next_step=_INSTALL_COMPILER
        )
    _check_headers(compiler)
    return Toolchain(cc=compiler, nm=str(tools["nm"]), readelf=str(tools["readelf"]))


def _check_headers(compiler: str) -> None:
    # port_cap_flags2 came with rdma-core 26; the sources need to know where it lies.
    program = (
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n"
        "int main(void) { return !offsetof(struct ibv_port_attr, port_cap_flags2); }\n"
    )
    result = subprocess.run(
        [compiler, "-x", "c", "-fsyntax-only", "-"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        first = next((line for line in result.stderr.splitlines() if "error" in line), "")
        raise MissingDependencyError(
            f"the header <infiniband/verbs.h> is missing or older than rdma-core 26 ({first})",
            next_step=_INSTALL_HEADERS,
        )


def sources_digest() -> str:
    """SHA-256 over everything that decides what gets built."""
    digest = hashlib.sha256(repr(VERBS_FLAGS).encode())
    here = Path(__file__).parent
    for path in [*sorted(SOURCE_DIRECTORY.glob("*.[ch]")), here / "stubs.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_verbs_library(tools: Toolchain, output: Path) -> None:
    """Compile the software verbs library to ``output``.

    Raises:
        KvxferError: The compiler failed.
    """
    sources = [str(SOURCE_DIRECTORY / name) for name in VERBS_SOURCES]
    tools.compile([*VERBS_FLAGS, "-o", str(output), *sources])
