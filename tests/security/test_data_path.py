"""Keys close the control channel; what an engine's own ports admit has to be said out loud."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from security_rig import Keyring, Node

from kvxfer.agent import Agent
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.capabilities import Capabilities, DataPathAuth
from kvxfer.core.control_bind import own_ports
from kvxfer.errors import ConfigError, InvalidInputError
from kvxfer.integrations.vllm import ConnectorConfig


class OpenTransport(LoopbackTransport):
    """An engine that hands its memory keys to whoever connects."""

    name = "open_engine"

    @property
    def capabilities(self) -> Capabilities:
        return attrs.evolve(super().capabilities, data_path_auth=DataPathAuth.NONE)


def test_an_open_engine_needs_a_trusted_network(keys: Keyring, node: Callable[..., Node]) -> None:
    """With keys on it is refused, with the backend, the ports of the process and what to do."""
    transport = OpenTransport()
    with socket.create_server(("127.0.0.1", 0)) as engine:
        port = engine.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            node("prefill", transport=transport)
    for said in ("'open_engine'", str(port), "isolate", "data_network_trusted=True"):
        assert said in str(error.value)
    assert transport.closed


def test_trusted(
    keys: Keyring, node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    """With the word given it starts, and the word is in the log."""
    with caplog.at_level(logging.INFO, "kvxfer.agent"):
        node("prefill", transport=OpenTransport(), config={"data_network_trusted": True})
    assert "open_engine" in caplog.text


def test_without_keys_nothing_is_asked() -> None:
    """Whoever has no keys trusts the network anyway."""
    Agent(OpenTransport()).close()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_word_is_a_flag(value: Any) -> None:
    """Anything but True or False is refused."""
    from kvxfer.agent import AgentConfig

    with pytest.raises((TypeError, InvalidInputError)):
        AgentConfig(data_network_trusted=value)


def test_own_ports() -> None:
    """Listening ports of this process, and of no other."""
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        assert port in own_ports()
    assert port not in own_ports()


def test_vllm_configuration(keys: Keyring) -> None:
    """vLLM's configuration names the same files and flags, both halves of the keys or neither."""
    keys.make("prefill")
    files = {
        "secret_key_file": str(keys.directory / "prefill"),
        "allowed_keys": str(keys.list),
    }
    wide = {"bind_host": "0.0.0.0", "advertise_host": "10.0.0.5"}
    config = ConnectorConfig.from_extra({**files, **wide, "data_network_trusted": True})
    assert config.control.security is not None
    assert config.control.security.allowed_keys == str(keys.list)
    assert config.agent("x", "f").data_network_trusted
    assert not ConnectorConfig.from_extra(wide).control.insecure
    assert ConnectorConfig.from_extra({**wide, "insecure": True}).control.insecure
    with pytest.raises(ConfigError, match="allowed_keys is missing"):
        ConnectorConfig.from_extra({"secret_key_file": "x"})
    with pytest.raises(ConfigError, match="secret_key_file is missing"):
        ConnectorConfig.from_extra({"allowed_keys": "x"})
