"""Which code copies: a compiled loop where there is one, Python and numpy otherwise.

Both do the same, byte for byte, and the same tests hold both to it.  The compiled one is built with
the package where a C compiler and Python's headers are, from ``_copy.c``; nothing needs it.  Bulk
that no cache holds goes past the cache there: ahead of a loop of memcpy by a fifth to a third.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.backends.shm.copying import copy_pieces
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from kvxfer.core.batch import Int64Array

__all__ = ["ENVIRONMENT", "Copier", "CopierChoice", "CopyPieces", "copier"]

ENVIRONMENT = "KVXFER_SHM_COPIER"
"""Names the copier for transports whose configuration leaves it open."""
REVISION = 2
"""Of ``_copy.c``: a build of another revision is not used."""

CopyPieces = Callable[["Int64Array", "Int64Array", "Int64Array", Any], None]
"""``(target, source, size, scratch)``, as ``kvxfer.backends.shm.copying.copy_pieces``."""


class CopierChoice(enum.Enum):
    """What a transport copies with."""

    AUTO = "auto"
    """Compiled where it is built. The environment variable ``KVXFER_SHM_COPIER`` may name one of
    the others."""
    COMPILED = "compiled"
    """The compiled one, or an error."""
    PYTHON = "python"
    """Python and numpy, also where the compiled one is built."""


@attrs.frozen(kw_only=True)
class Copier:
    """The code that copies."""

    name: str
    """``"compiled"`` or ``"python"``."""
    copy_pieces: CopyPieces = attrs.field(repr=False)
    reason: str
    """Why it is this one, for people to read."""


def copier(choice: CopierChoice = CopierChoice.AUTO) -> Copier:
    """The code that a transport with ``choice`` copies with. Any thread; loads it once.

    Raises:
        ConfigError: the compiled one is asked for and not there, or the environment names none.
    """
    by = "the configuration"
    if choice is CopierChoice.AUTO and os.environ.get(ENVIRONMENT):
        by = ENVIRONMENT
        choice = _named(os.environ[ENVIRONMENT])
    if choice is CopierChoice.PYTHON:
        return Copier(name="python", copy_pieces=copy_pieces, reason=f"{by} asks for it")
    compiled, problem = _compiled()
    if compiled is not None:
        return Copier(name="compiled", copy_pieces=compiled, reason="it is built")
    if choice is CopierChoice.COMPILED:
        raise ConfigError(
            f"{by} asks for shm's compiled copier: {problem}",
            next_step="install kvxfer where a C compiler and Python's headers are, or use 'auto'",
        )
    return Copier(name="python", copy_pieces=copy_pieces, reason=problem)


def _named(value: str) -> CopierChoice:
    try:
        return CopierChoice(value)
    except ValueError:
        names = ", ".join(repr(c.value) for c in CopierChoice)
        raise ConfigError(
            f"{ENVIRONMENT} must be one of {names}, not {value!r}", next_step=f"unset {ENVIRONMENT}"
        ) from None


@functools.cache
def _compiled() -> tuple[CopyPieces | None, str]:
    """The compiled function, or why there is none."""
    try:
        module: Any = importlib.import_module("kvxfer.backends.shm._copy")
    except ImportError as error:
        return None, f"the compiled one cannot be loaded ({error})"
    if module.REVISION != REVISION:
        return None, (
            f"the compiled one is of revision {module.REVISION}, this version needs {REVISION}: "
            "install kvxfer again"
        )
    return functools.partial(_copy_compiled, module.copy), ""


def _copy_compiled(
    copy: Callable[[Int64Array, Int64Array, Int64Array], None],
    target: Int64Array,
    source: Int64Array,
    size: Int64Array,
    scratch: Any,  # the other one's
) -> None:
    copy(target, source, size)
