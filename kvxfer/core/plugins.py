"""Plug-ins: backends, error classifiers and retry policies that any distribution can bring.

A distribution announces them in the package metadata, under the groups of ``PluginGroup``::

    [project.entry-points."kvxfer.backends"]
    mine = "my_package.transport:MyTransport"

kvxfer's own are announced in the same way.  Listing reads metadata and imports nothing; a plug-in
is imported when it is loaded.  What is wrong with one (a malformed file, a failing import, a wrong
type, a name that two distributions claim) is reported on that one, with distribution, entry point
and cause, and leaves the others alone.

This is the only module that imports ``entrypoints``.  Its ``get_group_all`` stops at the first
malformed file of anybody, so files are read one by one here, with its parsing and loading.
"""

from __future__ import annotations

import configparser
import enum
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from kvxfer.core.distributions import EntryPointFile, entry_point_files, normal_name
from kvxfer.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from kvxfer.core.transport import Transport

__all__ = [
    "PluginCatalog",
    "PluginGroup",
    "PluginInfo",
    "create_transport",
    "default_catalog",
    "list_plugins",
    "load_backend",
    "load_plugin",
    "refresh_plugins",
]


class PluginGroup(str, enum.Enum):
    """The entry-point groups and what their targets are."""

    BACKENDS = "kvxfer.backends"
    """A concrete subclass of ``kvxfer.core.transport.Transport``."""
    CLASSIFIERS = "kvxfer.classifiers"
    """A callable without arguments; returns rules and rule tables."""
    RETRY_POLICIES = "kvxfer.retry_policies"
    """A callable without arguments; returns a ``RetryPolicy``."""


SOURCE_TREE = "kvxfer (source tree)"
"""The distribution named for our own plug-ins where no installed metadata lists them."""

# What pyproject.toml says, in the form of entry_points.txt, so that the built-in backends are
# found when kvxfer runs from a source tree.  A test keeps the two equal.
OWN_ENTRY_POINTS = """
[kvxfer.backends]
loopback = kvxfer.backends.loopback:LoopbackTransport
shm = kvxfer.backends.shm:ShmTransport
moriio = kvxfer.backends.moriio:MoriioTransport
mooncake = kvxfer.backends.mooncake:MooncakeTransport
nixl = kvxfer.backends.nixl:NixlTransport

[kvxfer.classifiers]
builtin = kvxfer.policies.rules:builtin_rules

[kvxfer.retry_policies]
default = kvxfer.policies.retry:default_policy
"""


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One entry point, or one metadata file that could not be read (then ``name`` is empty).

    ``error`` says why it cannot be used; it is empty as far as is known.
    """

    name: str
    distribution: str
    version: str = ""
    target: str = ""
    error: str = ""

    @property
    def ours(self) -> bool:
        """Whether kvxfer itself brings it."""
        return self.distribution == SOURCE_TREE or normal_name(self.distribution) == "kvxfer"


@attrs.frozen
class _Found:
    """A row of the scan. ``entry`` is an ``entrypoints.EntryPoint``, None where none was parsed."""

    info: PluginInfo
    entry: Any = None


_Rows = dict[PluginGroup, list[_Found]]

Check = Callable[[Any], str]
"""Returns what is wrong with a loaded object, or an empty text."""


class PluginCatalog:
    """The plug-ins that one ``sys.path`` offers. Any thread may use it.

    The first look reads the metadata, later ones use what it found until ``refresh``.  Of a
    distribution that lies on the path twice, the first counts, as it does for imports.

    Args:
        path: what to search instead of ``sys.path``.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: _Rows | None = None
        self._loaded: dict[tuple[PluginGroup, str], Any] = {}

    def refresh(self) -> None:
        """Forget what was found and loaded; modules already imported stay imported."""
        with self._lock:
            self._rows = None
            self._loaded = {}

    def plugins(self, group: PluginGroup | str, *, load: bool = False) -> list[PluginInfo]:
        """All plug-ins of ``group``, ours first, then by distribution and name.

        With ``load``, each is loaded as well and what fails is in its ``error``.  Otherwise
        nothing is imported.

        Raises:
            ConfigError: no such group.
        """
        group = _group(group)
        rows = [row.info for row in self._scan()[group]]
        return [self._tried(group, info) for info in rows] if load else rows

    def load(
        self, group: PluginGroup | str, name: str, *, expect: type | Check | None = None
    ) -> Any:
        """The object that the plug-in ``name`` of ``group`` names.

        Args:
            group: where to look.
            name: the entry point.
            expect: a class that the object must be a subclass of, or a function that returns what
                is wrong with the object (empty: nothing). Default: what ``PluginGroup`` says.

        Raises:
            PluginError: there is no such plug-in, two distributions claim the name, the import
                fails, or the object is of the wrong type.
            ConfigError: no such group.
        """
        group = _group(group)
        rows = self._scan()[group]
        row = next((row for row in rows if name and row.info.name == name), None)
        if row is None:
            raise _missing(group, name, [row.info for row in rows])
        if row.info.error:
            raise PluginError(f"plug-in {name!r} of {group.value} cannot be used: {row.info.error}")
        loaded = self._load(group, row)
        problem = _unfit(group, loaded, expect)
        if problem:
            raise PluginError(f"{_where(group, row.info)} is the wrong thing: {problem}")
        return loaded

    def _tried(self, group: PluginGroup, info: PluginInfo) -> PluginInfo:
        if not info.error:
            try:
                self.load(group, info.name)
            except PluginError as error:
                return attrs.evolve(info, error=str(error))
        return info

    def _load(self, group: PluginGroup, row: _Found) -> Any:
        key = (group, row.info.name)
        with self._lock:
            if key in self._loaded:
                return self._loaded[key]
        # Not under the lock: an import may run code that asks for plug-ins itself.
        try:
            loaded = row.entry.load()
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything
            raise PluginError(
                f"{_where(group, row.info)} cannot be imported: {type(error).__name__}: {error}",
                next_step=getattr(error, "next_step", ""),
            ) from error
        with self._lock:
            return self._loaded.setdefault(key, loaded)

    def _scan(self) -> _Rows:
        with self._lock:
            if self._rows is None:
                self._rows = _scan(sys.path if self._path is None else self._path)
            return self._rows


def _group(group: PluginGroup | str) -> PluginGroup:
    try:
        return PluginGroup(group)
    except ValueError:
        known = ", ".join(g.value for g in PluginGroup)
        raise ConfigError(f"{group!r} is no plug-in group", next_step=f"use {known}") from None


def _where(group: PluginGroup, info: PluginInfo) -> str:
    version = f" {info.version}" if info.version else ""
    return f"{info.name} = {info.target} of {group.value}, from {info.distribution}{version},"


def _missing(group: PluginGroup, name: str, rows: list[PluginInfo]) -> PluginError:
    known = ", ".join(sorted({info.name for info in rows if info.name})) or "none"
    unread = "; ".join(info.error for info in rows if not info.name)
    return PluginError(
        f"no plug-in {name!r} in {group.value}; there are: {known}"
        + (f"; not readable: {unread}" if unread else ""),
        next_step="install the distribution that brings it, or check the spelling",
    )


def _unfit(group: PluginGroup, loaded: Any, expect: type | Check | None) -> str:
    if expect is None:
        return (
            _transport_problem(loaded) if group is PluginGroup.BACKENDS else _call_problem(loaded)
        )
    if not isinstance(expect, type):
        return expect(loaded)
    if isinstance(loaded, type) and issubclass(loaded, expect):
        return ""
    return f"{loaded!r} is no subclass of {expect.__module__}.{expect.__qualname__}"


def _call_problem(loaded: Any) -> str:
    return "" if callable(loaded) else f"{loaded!r} is not callable"


def _transport_problem(loaded: Any) -> str:
    from kvxfer.core.transport import Transport

    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        return f"{loaded!r} is no subclass of kvxfer.core.transport.Transport"
    if inspect.isabstract(loaded):
        return f"{loaded!r} leaves out {', '.join(sorted(loaded.__abstractmethods__))}"
    if not isinstance(getattr(loaded, "name", None), str):
        return f"{loaded!r} has no name"
    return ""


# ---- from files to rows ----------------------------------------------------------------------


def _scan(path: Sequence[str]) -> _Rows:
    rows: _Rows = {group: [] for group in PluginGroup}
    for file in entry_point_files(path):
        for group, found in _parse(file):
            rows[group].append(found)
    listed = {
        group: {row.info.name for row in rows[group] if row.info.ours} for group in PluginGroup
    }
    # Metadata of a source tree is missing, or as old as the last build: what it lacks is added.
    for group, found in _parse(EntryPointFile(distribution=SOURCE_TREE, text=OWN_ENTRY_POINTS)):
        if found.info.name not in listed[group]:
            rows[group].append(found)
    return {group: _arrange(found) for group, found in rows.items()}


def _parse(file: EntryPointFile) -> Iterator[tuple[PluginGroup, _Found]]:
    """The rows of one file. One that cannot be parsed gives a row in every group."""
    import entrypoints

    parser = entrypoints.CaseSensitiveConfigParser(
        # Targets are taken literally, and a [DEFAULT] section is one like any other.
        delimiters=("=",),
        interpolation=None,
        default_section="",
    )
    problem = file.problem
    if not problem:
        try:
            parser.read_string(file.text, source=file.source)
        except configparser.Error as error:
            problem = f"{file.source} is malformed: {' '.join(str(error).split())}"
    for group in PluginGroup:
        if problem:
            error_row = PluginInfo(
                name="", distribution=file.distribution, version=file.version, error=problem
            )
            yield group, _Found(error_row)
        elif parser.has_section(group.value):
            for name, target in parser.items(group.value):
                yield group, _entry(file, name, target)


def _entry(file: EntryPointFile, name: str, target: str) -> _Found:
    import entrypoints

    info = PluginInfo(
        name=name, distribution=file.distribution, version=file.version, target=target
    )
    distribution = entrypoints.Distribution(file.distribution, file.version)
    try:
        return _Found(info, entrypoints.EntryPoint.from_string(target, name, distribution))
    except entrypoints.BadEntryPoint:
        problem = f"{name} = {target} in {file.source} is not of the form module:object"
        return _Found(attrs.evolve(info, error=problem))


def _arrange(rows: list[_Found]) -> list[_Found]:
    """Put ours first, and mark the names that two distributions claim."""
    claims: dict[str, set[str]] = {}
    for row in rows:
        claims.setdefault(row.info.name, set()).add(row.info.distribution)
    arranged = []
    for row in rows:
        info = row.info
        others = sorted(claims[info.name] - {info.distribution})
        if info.name and others:
            problem = (
                f"{info.distribution} and {', '.join(others)} both register {info.name!r}: "
                "uninstall one of them"
            )
            info = attrs.evolve(info, error=problem)
        arranged.append(_Found(info, row.entry))
    return sorted(
        arranged, key=lambda row: (not row.info.ours, row.info.distribution, row.info.name)
    )


# ---- the catalog of this process -------------------------------------------------------------

_catalog = PluginCatalog()


def default_catalog() -> PluginCatalog:
    """The catalog behind the functions below: ``sys.path`` of this process."""
    return _catalog


def list_plugins(group: PluginGroup | str, *, load: bool = False) -> list[PluginInfo]:
    """``PluginCatalog.plugins`` over ``sys.path``. Nothing is imported unless ``load``."""
    return _catalog.plugins(group, load=load)


def load_plugin(group: PluginGroup | str, name: str, *, expect: type | Check | None = None) -> Any:
    """``PluginCatalog.load`` over ``sys.path``.

    Raises:
        PluginError: names the distribution, the entry point and the cause.
    """
    return _catalog.load(group, name, expect=expect)


def refresh_plugins() -> None:
    """Read the metadata again on the next look, after an installation or a change of path."""
    _catalog.refresh()


def load_backend(name: str) -> type[Transport]:
    """The transport class of the backend ``name``.

    Raises:
        PluginError: names the distribution, the entry point and the cause.
    """
    return cast("type[Transport]", load_plugin(PluginGroup.BACKENDS, name))


def create_transport(name: str, config: Any = None, **options: Any) -> Transport:
    """A new transport of the backend ``name``, called with ``config`` and ``options``.

    Args:
        name: the backend.
        config: its configuration object, or a mapping of JSON values. Of a mapping the backend's
            ``config_type`` makes the object; a backend without one takes it as further options.
        options: keyword arguments of the backend.

    Raises:
        PluginError: the backend cannot be loaded.
        ConfigError: it does not take these options; a mapping's unknown key comes with the nearest
            one there is. What the backend itself raises goes through.
    """
    backend = load_backend(name)
    signature = inspect.signature(backend)
    if isinstance(config, Mapping):
        if backend.config_type is not None:
            options["config"] = backend.config_type.from_options(config)
        else:
            options = _merged(name, config, options)
    elif config is not None:
        options["config"] = config
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"backend {name!r}: {error}", next_step=f"it takes {signature}") from None
    return backend(**options)


def _merged(name: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(config.keys() & options.keys())
    if twice:
        raise ConfigError(
            f"backend {name!r}: {', '.join(map(repr, twice))} given twice, in config and by keyword"
        )
    return {**config, **options}
