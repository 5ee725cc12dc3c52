"""The environment variables that the MoRI-IO engine reads: when it does, and what we do about it.

Read out of amd-mori 1.2.4 by tracing ``getenv``.  Two facts decide how they may be set:

* ``setenv`` of a new name while another thread is inside ``getenv`` can crash the process, and the
  engine's own threads call ``getenv`` whenever a peer connects.  So new names are added before the
  first engine of the process exists, and only values of names that are there are changed later.
* What is read while an engine is made is put back afterwards.  What the engine's threads read later
  (handshakes, queue pairs, the first full queue) has to stay.

A variable that the user has set is never changed, and wins over ``MoriioConfig``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.backends.moriio.variables import VARIABLES, Moment
from kvxfer.core.limitedlog import LimitedLog
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from kvxfer.backends.moriio.config import MoriioConfig

__all__ = ["effective", "environment_for"]

_log = LimitedLog(logging.getLogger("kvxfer.backends.moriio"))


_BY_FIELD_DEFAULTS = {
    # Set even where the configuration says nothing, so that a later transport can change them: see
    # the module about new names. These are the engine's own defaults.
    "MORI_IO_CP_TIMEOUT_MS": "5000",
    "MORI_IO_QP_TIMEOUT": "14",
    "MORI_IO_QP_RETRY_CNT": "7",
}
_FALLBACKS = {
    "MORI_IO_QP_TIMEOUT": "MORI_RDMA_QP_TIMEOUT",
    "MORI_IO_QP_RETRY_CNT": "MORI_RDMA_QP_RETRY_CNT",
    "MORI_IO_LOG_LEVEL": "MORI_GLOBAL_LOG_LEVEL",
    "MORI_APP_LOG_LEVEL": "MORI_GLOBAL_LOG_LEVEL",
}
"""Where the second is set the first is left alone: it would hide it."""

_OURS = (
    "MORI_IO_LOG_LEVEL",
    "MORI_APP_LOG_LEVEL",
    "MORI_IO_CP_TIMEOUT_MS",
    "MORI_IO_QP_TIMEOUT",
    "MORI_IO_QP_RETRY_CNT",
    "MORI_IO_SQ_BACKOFF_TIMEOUT_US",
)
"""Those that the engine takes from the environment only."""

_ONCE = (Moment.FIRST_HANDSHAKE, Moment.FIRST_FULL_QUEUE)
_BY_NAME = {variable.name: variable for variable in VARIABLES}

_set_by_us: dict[str, str] = {}
"""What we put into this process's environment, and have left there."""
_lock = threading.Lock()


def effective(config: MoriioConfig, environ: Mapping[str, str]) -> MoriioConfig:
    """``config`` as the engine will see it: the environment wins over its arguments.

    Raises:
        ConfigError: a variable has a value that the engine would ignore.
    """
    changes: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if not text or _set_by_us.get(variable.name) == text:
            continue
        value = variable.parse(text)
        if variable.field:
            changes[variable.field] = value
    if not changes:
        return config
    fields = {f.name: getattr(config, f.name) for f in attrs.fields(type(config)) if f.init}
    try:
        return type(config).from_options({**fields, **changes})
    except ConfigError as error:
        raise ConfigError(
            f"the environment's MORI_* variables give {error.message}", next_step="unset them"
        ) from error


@contextlib.contextmanager
def environment_for(
    config: MoriioConfig, environ: MutableMapping[str, str], *, first: bool
) -> Iterator[None]:
    """Around the making of an engine: what it reads from the environment only is there.

    ``first``: no engine of this process exists yet, so that names may be added.
    """
    with _lock:
        before: dict[str, str | None] = {}
        for name in _OURS:
            wanted = _wanted(config, name, environ)
            present = environ.get(name)
            if wanted is None or wanted == present:
                continue
            if present is not None and _set_by_us.get(name) != present:
                continue  # the user's
            moment = _BY_NAME[name].moment
            if present is None and not first:
                continue
            if not first and moment in _ONCE:
                _log.problem(
                    "setting_kept",
                    "%s stays %s in this process: the engine reads it once (%s was asked for)",
                    name,
                    present,
                    wanted,
                )
                continue
            if moment is Moment.FIRST_ENGINE:
                if not first:
                    continue
                before[name] = present
            else:
                _set_by_us[name] = wanted
            environ[name] = wanted
        try:
            yield
        finally:
            for name, text in before.items():
                if text is None:
                    del environ[name]
                else:
                    environ[name] = text


def _wanted(config: MoriioConfig, name: str, environ: Mapping[str, str]) -> str | None:
    if environ.get(_FALLBACKS.get(name, "")):
        return None
    value = getattr(config, _BY_NAME[name].field)
    return _BY_FIELD_DEFAULTS.get(name) if value is None else str(value)
