"""The shared table of a run: named for one run only, locked while in use, swept when left over.

Processes that find each other through one table in ``/dev/shm`` form one fabric.  Each of them
holds a shared lock on the table's file for as long as it lives, whatever ends it.  So a table that
can be locked exclusively is used by nobody and can be removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from kvxfer.errors import ConfigError

__all__ = ["ENVIRONMENT_VARIABLE", "RunTable", "new_name", "sweep"]

ENVIRONMENT_VARIABLE = "SOFTIBV_SHM"
"""Names the table; inherited by the processes that a run starts."""

DIRECTORY = Path("/dev/shm")  # noqa: S108  shm_open() puts shared memory objects there on Linux
PREFIX = "kvxfer-softrdma."
DEFAULT_PREFIX = "softibv."
"""What the C library uses where nobody named a table."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def new_name() -> str:
    """A name that no other run has."""
    return PREFIX + secrets.token_hex(8)


class RunTable:
    """A table that this process made, holds, and removes.

    Raises:
        ConfigError: The name cannot be a file name.
        FileExistsError: A table of that name exists.
    """

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"table name must be letters, digits, '.', '_' and '-', not {name!r}")
        self.name = name
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(DIRECTORY / name, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if os.fstat(self._fd).st_nlink > 0:
                return
            os.close(self._fd)  # swept between the two calls: make it again

    def remove(self) -> None:
        """Remove the name and let go; processes that are attached keep what they have."""
        if self._fd < 0:
            return
        (DIRECTORY / self.name).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def sweep(directory: Path = DIRECTORY) -> list[str]:
    """Remove the tables of this user that no process uses; returns their names."""
    removed = []
    for path in _tables(directory):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not ours to open
        try:
            if os.fstat(fd).st_uid == os.getuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
        except (BlockingIOError, FileNotFoundError):
            pass  # in use, or another sweep was faster
        finally:
            os.close(fd)
    return removed


def _tables(directory: Path) -> Iterable[Path]:
    for prefix in (PREFIX, DEFAULT_PREFIX):
        yield from directory.glob(f"{prefix}*")
