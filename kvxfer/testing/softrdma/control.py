"""``SoftRdma``: one run's own fabric, and the faults of this process."""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib.util
import os
import threading
from pathlib import Path
from types import TracebackType

from kvxfer.errors import ClosedError, ConfigError, KvxferError, MissingDependencyError
from kvxfer.testing.softrdma.faults import Faults
from kvxfer.testing.softrdma.tables import ENVIRONMENT_VARIABLE, RunTable, new_name, sweep

__all__ = ["SoftRdma", "find_verbs_library"]

VERBS_LIBRARY = "libibverbs.so.1"
NEXT_STEP = (
    "Run `python -m kvxfer.testing.softrdma setup VENV`, install kvxfer and pytest into VENV, and "
    "use VENV/bin/python"
)


def find_verbs_library() -> Path:
    """The software verbs library beside mori's own, where mori will find it.

    Raises:
        MissingDependencyError: mori or the library is not in this Python's environment.
    """
    spec = importlib.util.find_spec("mori")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError("amd-mori is not installed here", next_step=NEXT_STEP)
    library = Path(next(iter(spec.submodule_search_locations))) / VERBS_LIBRARY
    if not library.exists():
        raise MissingDependencyError(
            f"the software verbs library is missing: {library}", next_step=NEXT_STEP
        )
    return library


def _load(path: Path) -> ctypes.CDLL:
    # The loader knows a library by its file: this is the one that mori opens, or will open.
    library = ctypes.CDLL(str(path))
    try:
        library.softibv_attach.argtypes = [ctypes.c_char_p]
        library.softibv_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        library.softibv_get.argtypes = [ctypes.c_char_p]
        library.softibv_get.restype = ctypes.c_long
        library.softibv_async.argtypes = [ctypes.c_int]
        library.softibv_reset.restype = None
    except AttributeError as error:
        raise MissingDependencyError(
            f"{path} is not the software verbs library of this version ({error})",
            next_step=NEXT_STEP,
        ) from error
    return library


_NO_SUCH_NAME = -(1 << (8 * ctypes.sizeof(ctypes.c_long) - 1))  # LONG_MIN


class SoftRdma(Faults):
    """A fabric of this run's own, and the faults of this process. A context manager.

    Entering makes a table in shared memory, attaches this process to it, and names it in the
    environment (``SOFTIBV_SHM``), so that processes started from then on join it.  Leaving ends all
    faults and removes the table.  Tables of runs that were killed are removed too, by the next run
    that enters.

    A process that was started inside a run joins that run: it does not make or remove a table.

    Args:
        name: The table's name; None makes a new one, or takes the one this process inherited.
        library: The software verbs library; None is the one beside mori in this environment.

    Raises:
        MissingDependencyError: mori or the software verbs library is not installed here.
    """

    def __init__(self, *, name: str | None = None, library: Path | None = None) -> None:
        self._library = _load(find_verbs_library() if library is None else library)
        inherited = os.environ.get(ENVIRONMENT_VARIABLE)
        self._joins = inherited is not None and name in {None, inherited}
        self.name = name or inherited or new_name()
        self._table: RunTable | None = None
        self._lock = threading.Lock()
        self._entered = False

    def __enter__(self) -> SoftRdma:
        """Make or join the table.

        Raises:
            FileExistsError: A table of that name exists already.
            KvxferError: This process still has queue pairs of another table, or the table belongs
                to another version of the library.
        """
        with self._lock:
            if self._entered:
                raise ConfigError(f"SoftRdma {self.name!r} was entered already")
            if not self._joins:
                sweep()
                self._table = RunTable(self.name)
            try:
                self._attach()
            except BaseException:
                self._remove_table()
                raise
            if not self._joins:
                self._outer_name = os.environ.get(ENVIRONMENT_VARIABLE)
                os.environ[ENVIRONMENT_VARIABLE] = self.name
            self._entered = True
            atexit.register(self.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all faults and remove the table. Safe to call twice.

        Engines that still exist keep working on what they are attached to.
        """
        with self._lock:
            if not self._entered:
                return
            self._library.softibv_reset()
            if not self._joins:
                if self._outer_name is None:
                    os.environ.pop(ENVIRONMENT_VARIABLE, None)
                else:
                    os.environ[ENVIRONMENT_VARIABLE] = self._outer_name
            self._remove_table()
            self._entered = False
            atexit.unregister(self.close)

    def reset(self) -> None:
        """End every fault; held work requests go on."""
        self._require_entered()
        self._library.softibv_reset()

    def _attach(self) -> None:
        code = self._library.softibv_attach(self.name.encode())
        if code == errno.EBUSY:
            raise KvxferError(
                f"cannot attach to table {self.name!r}: this process still has "
                f"{self._get_unchecked('queue_pairs')} queue pairs of another table",
                next_step="Close every engine of the earlier run first",
            )
        if code == errno.EPROTO:
            raise KvxferError(
                f"table {self.name!r} was made by another version of the software verbs library",
                next_step="Use one environment for all processes of a run",
            )
        if code != 0:
            raise KvxferError(f"cannot attach to table {self.name!r}: {os.strerror(code)}")

    def _remove_table(self) -> None:
        if self._table is not None:
            self._table.remove()
            self._table = None

    def _require_entered(self) -> None:
        if not self._entered:
            raise ClosedError(
                f"SoftRdma {self.name!r} is not entered", next_step="Use it in a with statement"
            )

    def _set(self, name: str, value: int) -> None:
        self._require_entered()
        if self._library.softibv_set(name.encode(), value) != 0:
            raise ConfigError(f"the software verbs library has no knob {name!r}")

    def _get(self, name: str) -> int:
        self._require_entered()
        return self._get_unchecked(name)

    def _get_unchecked(self, name: str) -> int:
        value = int(self._library.softibv_get(name.encode()))
        if value == _NO_SUCH_NAME:
            raise ConfigError(f"the software verbs library has no counter {name!r}")
        return value

    def _deliver(self, event: int) -> int:
        self._require_entered()
        return int(self._library.softibv_async(event))
