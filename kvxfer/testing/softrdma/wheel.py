"""The installed ``amd-mori`` wheel: what it is, and the proof that it is unmodified."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import attrs

from kvxfer.errors import KvxferError

__all__ = ["MORI_VERSION", "InstalledWheel", "find_wheel"]

MORI_VERSION = "1.2.4"
"""The version that the samples and the rules were recorded with."""

MAIN_LIBRARY = "mori/libmori_io.so"


@attrs.frozen(kw_only=True)
class InstalledWheel:
    """An installation of the wheel in one site-packages directory."""

    site_packages: Path
    version: str
    tag: str
    """For instance ``cp310-cp310-manylinux_2_35_x86_64``."""
    record: tuple[tuple[str, str], ...]
    """The wheel's own files with their SHA-256 as RECORD gives them (URL-safe base 64), sorted.

    What the installer adds or writes (scripts, byte code, its own notes) is left out, so that the
    list is the same wherever the wheel is installed.
    """

    @property
    def directory(self) -> Path:
        """The package directory, where the libraries are."""
        return self.site_packages / "mori"

    @property
    def libraries(self) -> tuple[Path, ...]:
        """The wheel's own shared libraries."""
        return tuple(
            self.site_packages / name
            for name, _ in self.record
            if Path(name).parent == Path("mori") and name.endswith(".so")
        )

    @property
    def record_digest(self) -> str:
        """SHA-256 over the record: one number for "exactly this wheel"."""
        text = "".join(f"{name},{digest}\n" for name, digest in self.record)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def main_library_digest(self) -> str:
        """SHA-256 of the library with the engine in it, as ``sha256sum`` prints it."""
        digest = dict(self.record)[MAIN_LIBRARY]
        return base64.urlsafe_b64decode(digest + "=").hex()

    def verify(self) -> int:
        """Compare every file with the record; returns how many were compared.

        Raises:
            KvxferError: A file is missing or differs; the text names the first ones.
        """
        wrong = [name for name, digest in self.record if self._digest(name) != digest]
        if wrong:
            raise KvxferError(
                f"{len(wrong)} files of amd-mori {self.version} are not as the wheel shipped "
                f"them: {', '.join(wrong[:3])}",
                next_step=f"Remove the virtual environment around {self.site_packages} and "
                "run the setup again",
            )
        return len(self.record)

    def _digest(self, name: str) -> str:
        try:
            content = (self.site_packages / name).read_bytes()
        except OSError:
            return ""
        return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def find_wheel(site_packages: Iterable[Path]) -> InstalledWheel | None:
    """The wheel in the first of these directories that has it."""
    for directory in site_packages:
        for information in directory.glob("amd_mori-*.dist-info"):
            record = information / "RECORD"
            if record.is_file():
                return InstalledWheel(
                    site_packages=directory,
                    version=information.name.removeprefix("amd_mori-").removesuffix(".dist-info"),
                    tag=_tag(information / "WHEEL"),
                    record=_own_files(record),
                )
    return None


def _own_files(record: Path) -> tuple[tuple[str, str], ...]:
    files = []
    for name, digest, _size in csv.reader(io.StringIO(record.read_text(encoding="utf-8"))):
        if name.startswith("mori/") and digest.startswith("sha256="):
            files.append((name, digest.removeprefix("sha256=")))
    return tuple(sorted(files))


def _tag(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("Tag: "):
            return line.removeprefix("Tag: ").strip()
    return "unknown"
