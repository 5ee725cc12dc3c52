"""What NIXL and UCX need of a process and a machine, checked before they fail in their own words.

What is set for the user is in ``config.apply_environment``; this tells what the user has to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvxfer.backends._machine import Finding, Level, Machine
from kvxfer.backends.nixl.binding import BACKEND
from kvxfer.backends.nixl.config import NixlConfig, check_transports
from kvxfer.errors import ConfigError

__all__ = ["check", "this_machine"]

_META, _WHEELS = "nixl", ("nixl-cu12", "nixl-cu13")
_RDMA_TLS = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud", "dc", "all"})
_MEMLOCK = 1 << 30
"""Bytes. A KV cache is larger; less than this cannot be meant for one."""


def this_machine() -> Machine:
    """The machine as ``check`` wants it."""
    return Machine.here((_META, *_WHEELS))


def check(
    config: NixlConfig | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> list[Finding]:
    """What would keep a ``NixlTransport(config)`` from working here, errors first.

    Loads neither NIXL nor UCX, and changes nothing.  Left out, ``environ`` is that of the process,
    and ``machine`` this one.
    """
    config = config or NixlConfig()
    environ = os.environ if environ is None else environ
    machine = this_machine() if machine is None else machine
    tls = environ.get("UCX_TLS") or config.ucx_tls or "all"
    found = [
        *_installation(machine, environ),
        *_transports(tls, environ),
        *_modules(machine, environ),
        *_devices(machine, environ),
        *_rdma(machine, tls, environ),
        *_progress(config, tls),
    ]
    return sorted(found, key=lambda finding: finding.level is Level.WARNING)


def _error(what: str, next_step: str) -> Finding:
    return Finding(backend=BACKEND, level=Level.ERROR, what=what, next_step=next_step)


def _warning(what: str, next_step: str) -> Finding:
    return Finding(backend=BACKEND, level=Level.WARNING, what=what, next_step=next_step)


def _installation(machine: Machine, environ: Mapping[str, str]) -> list[Finding]:
    meta = machine.distributions.get(_META)
    wheels = {n: v for n, v in machine.distributions.items() if n in _WHEELS}
    found = []
    if meta is None or not wheels:
        missing = "the nixl package" if meta is None else f"any of {', '.join(_WHEELS)}"
        found.append(
            Finding(
                backend=BACKEND,
                level=Level.ERROR if meta or wheels else Level.MISSING,
                what=f"{missing} is not installed",
                next_step="pip install nixl; without torch: pip install --no-deps nixl nixl-cu12 "
                "nixl-cu13",
            )
        )
    found += [
        _error(
            f"nixl {meta} and {name} {version} do not belong together",
            f"install {name}=={meta}",
        )
        for name, version in sorted(wheels.items())
        if meta is not None and version != meta
    ]
    folder = environ.get("NIXL_PLUGIN_DIR")
    if folder and not (Path(folder) / "libplugin_UCX.so").is_file():
        found.append(
            _error(
                f"NIXL_PLUGIN_DIR is {folder}, where there is no libplugin_UCX.so",
                "unset it, or name the folder with NIXL's plug-ins",
            )
        )
    return found


def _transports(tls: str, environ: Mapping[str, str]) -> list[Finding]:
    name = "the environment's UCX_TLS" if environ.get("UCX_TLS") else "ucx_tls"
    try:
        check_transports(name, tls)
    except ConfigError as error:
        return [_error(error.message, error.next_step)]
    return []


def _modules(machine: Machine, environ: Mapping[str, str]) -> list[Finding]:
    """UCX's ib module without a device ends the process by SIGSEGV when it exits."""
    modules = environ.get("UCX_MODULES")
    if modules is None:
        return []
    names = {name.strip() for name in modules.removeprefix("^").split(",")}
    loads_ib = ("ib" not in names) if modules.startswith("^") else bool(names & {"ib", "all"})
    if loads_ib and not machine.rdma_devices:
        return [
            _error(
                f"UCX_MODULES is {modules!r}, which loads UCX's ib module, but there is no "
                "InfiniBand or RoCE device: the process dies by SIGSEGV when it exits",
                "unset UCX_MODULES, or set it to ^ib",
            )
        ]
    if not loads_ib and machine.rdma_devices:
        return [
            _warning(
                f"UCX_MODULES is {modules!r}, so that {_listed(machine.rdma_devices)} are not used",
                "unset UCX_MODULES",
            )
        ]
    return []


def _devices(machine: Machine, environ: Mapping[str, str]) -> list[Finding]:
    value = environ.get("UCX_NET_DEVICES", "")
    if not value or value == "all" or value.startswith("^"):
        return []
    known = machine.rdma_devices | machine.net_devices
    wanted = [name.strip().partition(":")[0] for name in value.split(",")]
    unknown = [name for name in wanted if name not in known]
    if len(unknown) < len(wanted):  # the others are used; a pattern may be among them
        return []
    return [
        _error(
            f"UCX_NET_DEVICES is {value!r}, and none of these exists here",
            f"choose among {_listed(known)}, or unset it",
        )
    ]


def _rdma(machine: Machine, tls: str, environ: Mapping[str, str]) -> list[Finding]:
    if not machine.rdma_devices:
        return []
    found = []
    chosen = {name.strip() for name in tls.removeprefix("^").split(",")}
    if not tls.startswith("^") and not chosen & _RDMA_TLS:
        found.append(
            _warning(
                f"UCX_TLS is {tls!r}, so that {_listed(machine.rdma_devices)} are not used",
                f"add rc, such as {tls},rc, or unset it",
            )
        )
    if machine.memlock is not None and machine.memlock < _MEMLOCK:
        found.append(
            _error(
                f"the process may pin {machine.memlock} bytes (RLIMIT_MEMLOCK), too few for RDMA "
                "to register a KV cache",
                "ulimit -l unlimited; in a container --ulimit memlock=-1; in systemd "
                "LimitMEMLOCK=infinity",
            )
        )
    return found


def _progress(config: NixlConfig, tls: str) -> list[Finding]:
    chosen = {name.strip() for name in tls.split(",")}
    if config.enable_prog_thread or not chosen & {"tcp", "all"}:
        return []
    return [
        _warning(
            "enable_prog_thread is off: over tcp a peer can READ from us only while our side calls "
            "progress often",
            "leave it on for producers",
        )
    ]


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
