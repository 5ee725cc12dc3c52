"""Arguments and order of ``kvxfer doctor``."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from kvxfer.errors import ConfigError

__all__ = ["add_arguments"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of ``kvxfer doctor``."""
    parser.description = (
        "Looks at this host, and at each backend in a process of its own: library, devices, "
        "environment, memory, ports, keys; then starts it and moves a megabyte. Exit status 0 if "
        "everything that was asked for can be used, 1 if not. A backend whose library is not "
        "installed counts only when --backend names it."
    )
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="only this one; may be repeated"
    )
    parser.add_argument(
        "--host-only", action="store_true", help="look at no backend: host, ports, keys, peers"
    )
    parser.add_argument(
        "--config", metavar="JSON", help="the configuration of the one --backend, as an object"
    )
    parser.add_argument(
        "--cache-bytes",
        default="1G",
        metavar="N",
        help="KV cache of one worker, such as 64G: for the limits of memory (default: 1G)",
    )
    parser.add_argument("--bind-host", default="127.0.0.1", help="where workers will listen")
    parser.add_argument(
        "--ports", metavar="N[-M]", help="the ports that workers of this host will listen on"
    )
    parser.add_argument("--secret-key-file", metavar="FILE", help="this worker's own key")
    parser.add_argument("--allowed-keys", metavar="LIST", help="the allow-list: directory or file")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a running worker, tcp://HOST:PORT#NAME, to try the keys on; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=float, default=90.0, help="seconds for one backend (default: 90)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kvxfer.cli.doctor import facts, judge, keyfacts, portfacts, probe, report
    from kvxfer.core.hostcheck import HostQuery
    from kvxfer.core.plugins import PluginGroup, list_plugins

    options = _options(arguments)
    query = HostQuery(options=options, cache_nbytes=nbytes_of(arguments.cache_bytes))
    keys = (arguments.secret_key_file, arguments.allowed_keys)
    found = judge.host(facts.gather(query.cache_nbytes))
    found += judge.ports(portfacts.gather(arguments.bind_host, arguments.ports, keyed=all(keys)))
    found += judge.keys(keyfacts.gather(*keys, arguments.peer))
    result = report.Report(host=found)
    try:
        known = list_plugins(PluginGroup.BACKENDS)
    except ImportError:  # a library that we require is not there: said above
        known = []
    names = arguments.backend or [info.name for info in known if info.name]
    if arguments.host_only:
        names = []
    for name in dict.fromkeys(names):
        info = next((x for x in known if x.name == name), None)
        asked = bool(arguments.backend)
        result.add(name, info, probe.backend(name, query, arguments.timeout), asked=asked)
    report.show(result, as_json=arguments.json)
    return 0 if result.usable else 1


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.config is None:
        return {}
    if len(arguments.backend or ()) != 1:
        raise ConfigError("--config is for one --backend", next_step="name it with --backend")
    try:
        options = json.loads(arguments.config)
    except ValueError as error:
        raise ConfigError(f"--config is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config must be a JSON object, not {arguments.config!r:.100}")
    return options


def nbytes_of(text: str) -> int:
    """``"64G"`` as bytes.

    Raises:
        ConfigError: not a number of at least 1 with K, M, G, T or nothing after it.
    """
    match = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)", text.upper())
    if match is None:
        raise ConfigError(f"--cache-bytes must be like 64G or 1048576, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]
