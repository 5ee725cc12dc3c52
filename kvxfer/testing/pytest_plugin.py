"""``pytest --pyargs kvxfer.testing --kvxfer-backend NAME``: the conformance suite, by name.

Installed as a pytest plug-in, so that its options are known wherever kvxfer is installed.  They
select what ``kvxfer.testing.test_backend`` runs; without ``--kvxfer-backend`` they do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

__all__ = ["Selection", "options_of", "pytest_addoption", "pytest_configure", "selected"]

_HOST_MEMORY = "kvxfer.testing.memory:HostMemory"
_MEMORIES = {"shm": "kvxfer.testing.memory:MappedMemory"}
"""Backends of ours that need memory of their own for a WRITE, and a class that provides it."""


@attrs.frozen(kw_only=True)
class Selection:
    """What is tested. ``options`` is the configuration as a mapping of JSON values."""

    backend: str
    options: Mapping[str, Any] = attrs.field(factory=dict)
    peer_options: Mapping[str, Any] | None = None
    memory: str = _HOST_MEMORY
    timeout: float | None = None

    @property
    def as_it_comes(self) -> bool:
        """Nothing but the backend was named."""
        return not self.options and self.peer_options is None


_selection: list[Selection] = []


def selected() -> Selection:
    """What the command line asks for.

    Raises:
        pytest.UsageError: no backend was named.
    """
    if not _selection:
        raise pytest.UsageError(
            "which backend? Say --kvxfer-backend NAME (`kvxfer.core.plugins.list_plugins"
            '("kvxfer.backends")` lists what is installed), or module:attribute of a class'
        )
    return _selection[0]


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """``key=value`` texts as a mapping. A value is JSON where it reads as JSON, else a text.

    Raises:
        pytest.UsageError: a text has no key or no ``=``, or a key comes twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise pytest.UsageError(f"an option must be written key=value, not {word!r}")
        if key in options:
            raise pytest.UsageError(f"option {key!r} given twice")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the command line."""
    group = parser.getgroup("kvxfer", "the conformance suite of kvxfer (--pyargs kvxfer.testing)")
    group.addoption(
        "--kvxfer-backend",
        metavar="NAME",
        help="the backend to test: an installed plug-in, or module:attribute",
    )
    group.addoption(
        "--kvxfer-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one option of its configuration; the value is JSON or a text; may be repeated",
    )
    group.addoption(
        "--kvxfer-peer-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="the same for the far side, where that differs: then it gets only these",
    )
    group.addoption(
        "--kvxfer-memory",
        metavar="MODULE:CLASS",
        help="what allocates, reads and writes the memory that is moved, such as a device's "
        "(see kvxfer.testing.memory.Memory)",
    )
    group.addoption(
        "--kvxfer-timeout",
        type=float,
        metavar="SECONDS",
        help="within which everything that must end ends, a lost peer included",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep what was asked for where ``test_backend`` finds it."""
    backend = config.getoption("--kvxfer-backend")
    if backend is None:
        return
    peer = options_of(config.getoption("--kvxfer-peer-option"))
    _selection[:] = [
        Selection(
            backend=backend,
            options=options_of(config.getoption("--kvxfer-option")),
            peer_options=peer or None,
            memory=config.getoption("--kvxfer-memory") or _MEMORIES.get(backend, _HOST_MEMORY),
            timeout=config.getoption("--kvxfer-timeout"),
        )
    ]
    # The suite's asserts then show the values they compared, also where kvxfer is a wheel.
    for name in ("contract", "pair", "station"):
        config.pluginmanager.rewrite_hook.mark_rewrite(f"kvxfer.testing.{name}")


def pytest_unconfigure() -> None:
    """A second run in the same process starts anew."""
    _selection.clear()
