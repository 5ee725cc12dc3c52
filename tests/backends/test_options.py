"""Configuration from JSON values, in the same manner for every backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvxfer.backends.loopback import CopyIn, LoopbackConfig, LoopbackTransport
from kvxfer.backends.mooncake import MooncakeConfig, Protocol
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.shm import ShmConfig
from kvxfer.core.plugins import create_transport, load_backend
from kvxfer.errors import ConfigError, MissingDependencyError
from kvxfer.testing.expected import EXPECTED

CONFIGS: list[Any] = [ShmConfig, LoopbackConfig, NixlConfig, MooncakeConfig]


def test_json_becomes_a_config() -> None:
    """Numbers, texts, null, lists for sets and the values of enums arrive as the class wants them;
    what is left out keeps its default."""
    told = json.loads('{"workers": 1, "stuck_after": 2, "allowed_uids": [0, 7]}')
    shm = ShmConfig.from_options(told)
    assert shm == ShmConfig(workers=1, stuck_after=2, allowed_uids=frozenset({0, 7}))
    loop = LoopbackConfig.from_options({"copy_in": "progress", "credits": None})
    assert loop == LoopbackConfig(copy_in=CopyIn.PROGRESS)
    nixl = NixlConfig.from_options({"ucx_tls": "tcp", "log_level": None})
    assert nixl == NixlConfig(ucx_tls="tcp", log_level=None)
    moon = MooncakeConfig.from_options({"protocol": "rdma", "devices": "mlx5_0", "host": "::1"})
    assert moon == MooncakeConfig(protocol=Protocol.RDMA, devices="mlx5_0", host="::1")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_nothing_given_is_the_default(config: Any) -> None:
    """An empty mapping is the default configuration."""
    assert config.from_options({}) == config()


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (ShmConfig, {"worker": 2}, ["'worker'", "did you mean 'workers'"]),
        (NixlConfig, {"ucx_tsl": "tcp"}, ["'ucx_tsl'", "did you mean 'ucx_tls'"]),
        (MooncakeConfig, {"hots": "a"}, ["'hots'", "did you mean 'host'"]),
        (LoopbackConfig, {3: 1}, ["no option 3", "copy_in"]),
        (ShmConfig, {"workers": True}, ["workers", "an integer", "True"]),
        (ShmConfig, {"workers": "2"}, ["workers", "an integer", "'2'"]),
        (ShmConfig, {"workers": 2.0}, ["workers", "an integer", "2.0"]),
        (ShmConfig, {"workers": None}, ["workers", "an integer", "None"]),
        (ShmConfig, {"workers": 0}, ["workers", "1 to 64", "0"]),
        (ShmConfig, {"stuck_after": "1"}, ["stuck_after", "a number", "'1'"]),
        (ShmConfig, {"allowed_uids": "0"}, ["allowed_uids", "a list", "'0'"]),
        (ShmConfig, {"allowed_uids": [[0]]}, ["allowed_uids", "[[0]]"]),
        (ShmConfig, {"allowed_uids": ["root"]}, ["allowed_uids", "'root'"]),
        (ShmConfig, {"admit_readers": 1}, ["admit_readers", "true or false", "1"]),
        (LoopbackConfig, {"copy_in": "never"}, ["copy_in", "'post', 'progress'", "'never'"]),
        (LoopbackConfig, {"credits": 0}, ["credits", "0"]),
        (NixlConfig, {"ucx_tls": "cma"}, ["ucx_tls", "'cma'", "cma,tcp"]),
        (MooncakeConfig, {"protocol": "udp"}, ["protocol", "'tcp', 'rdma'", "'udp'"]),
        (MooncakeConfig, {"host": "0.0.0.0"}, ["host", "'0.0.0.0'"]),
        (MooncakeConfig, {"host": "node-a:6301"}, ["host", "'node-a:6301'"]),
        (MooncakeConfig, {"max_pieces": 0}, ["max_pieces", "1 to", "0"]),
        (MooncakeConfig, {"connect_timeout": 0}, ["connect_timeout", "more than 0", "0"]),
        (MooncakeConfig, {"lanes_per_peer": 17}, ["lanes_per_peer", "1 to 16", "17"]),
    ],
)
def test_what_does_not_fit_is_named(
    config: Any, options: Mapping[Any, Any], words: list[str]
) -> None:
    """The error names the field, what it must be, the value, and for unknown keys the nearest."""
    with pytest.raises(ConfigError) as caught:
        config.from_options(options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("options", [None, [], "{}", 3])
def test_no_mapping_at_all(options: Any) -> None:
    """Anything but a mapping is refused, with what it was."""
    with pytest.raises(ConfigError, match="takes a mapping"):
        ShmConfig.from_options(options)


# ---- create_transport ------------------------------------------------------------------------

MAPPINGS = {
    "loopback": ({"copy_in": "progress"}, "copyin", "copy_in"),
    "shm": ({"workers": 1}, "wokers", "workers"),
    "moriio": ({"poll_cq_mode": "event", "qp_per_transfer": 2}, "qp_per_transfers", "qp_per_"),
    "nixl": ({"ucx_tls": "tcp"}, "ucx_tsl", "ucx_tls"),
    "mooncake": ({"host": "127.0.0.1", "max_pieces": 64}, "hots", "host"),
}
"""Of each backend: a configuration as a file has it, a slip, and what was meant."""


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_backend_takes_a_mapping(name: str) -> None:
    """Each backend of ours names the class of its configuration, which reads a mapping;
    ``create_transport`` refuses an unknown key with the nearest one, before the engine is even
    looked for.  With the engine there, the mapping is what the transport is made with."""
    options, slip, meant = MAPPINGS[name]
    backend = load_backend(name)
    config = backend.config_type.from_options(options)
    assert {key: getattr(config, key) for key in options} != {
        key: getattr(backend.config_type(), key) for key in options
    }
    with pytest.raises(ConfigError, match=f"no option '{slip}'.*did you mean '{meant}"):
        create_transport(name, {slip: 1})
    try:
        transport = create_transport(name, options)
    except MissingDependencyError:
        assert name in ("moriio", "nixl", "mooncake"), "it needs nothing that could be missing"
        return
    try:
        assert vars(transport)["config"] == config
    finally:
        transport.close()


def test_create_transport_takes_a_mapping_or_an_object() -> None:
    """A mapping of JSON values and a config object make the same transport."""
    for config in ({"copy_in": "progress"}, LoopbackConfig(copy_in=CopyIn.PROGRESS)):
        transport = create_transport("loopback", config, incarnation="a-life-of-its-own")
        try:
            assert isinstance(transport, LoopbackTransport)
            assert transport.config == LoopbackConfig(copy_in=CopyIn.PROGRESS)
            assert transport.incarnation == "a-life-of-its-own"
        finally:
            transport.close()


def test_create_transport_names_an_unknown_key() -> None:
    """A slip in a configuration file is found before anything starts."""
    with pytest.raises(ConfigError, match="did you mean 'copy_in'"):
        create_transport("loopback", {"copyin": "post"})
