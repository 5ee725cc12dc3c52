"""``kv_connector_extra_config`` is checked before an engine serves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvxfer.errors import ConfigError, InvalidInputError
from kvxfer.integrations.vllm import ConnectorConfig
from kvxfer.integrations.vllm.params import Push, push_of, source_of


def test_an_unknown_key_is_refused_with_a_hint() -> None:
    """A typing error names the key, the nearest known one, and all others."""
    with pytest.raises(ConfigError, match=r"no key 'laese'.*did you mean 'lease'\?.*backend"):
        ConnectorConfig.from_extra({"laese": 3})


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lease": "long"}, "lease must be"),
        ({"lease": -1.0}, "lease must be"),
        ({"connect_timeout": 0}, "connect must be"),
        ({"port_range": 80}, "port_range"),
        ({"backend": ""}, "backend must be"),
        ({"backend": 7}, "backend must be"),
        ({"admit_readers": "yes"}, "admit_readers must be"),
        ({"admit_readers": True, "backend": "nixl"}, "admit_readers is for"),
        ({"bind_host": "0.0.0.0"}, "advertise_host"),
        ({"model": 3}, "model must be"),
        ({"write": 1}, "write must be"),
        ({"accept_timeout": 0}, "accept_timeout must be"),
        ({"share_caches": True, "backend": "nixl"}, "share_caches is for"),
        ({"peers_from_request_ids": True}, "peers_from_request_ids must be"),
        ({"peers_from_request_ids": -1}, "peers_from_request_ids must be"),
    ],
)
def test_a_wrong_value_names_its_key(extra: dict[str, Any], said: str) -> None:
    """Each value is checked when the configuration is read, not when it is first used."""
    with pytest.raises(ConfigError, match=said):
        ConnectorConfig.from_extra(extra)


def test_values_reach_where_they_work() -> None:
    """Lease, time-outs and addresses arrive in the agent's own configuration."""
    config = ConnectorConfig.from_extra(
        {"lease": 7, "drain_timeout": 3, "port_range": "41000-41003", "bind_host": "::1"}
    )
    assert config.agent("x", "f").lease == 7
    assert config.timeouts.drain == 3
    assert list(config.control.ports) == [41000, 41001, 41002, 41003]
    assert config.control.bind_host == "::1"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "there is no offer"),
        ({"kvxfer": []}, "there is no offer"),
        ({"kvxfer": {"tokens": 3}}, "there is no offer"),
        ({"kvxfer": {"tokens": True, "offer": {}}}, "tokens must be"),
        ({"kvxfer": {"tokens": 3, "offer": {}}}, "not an offer"),
        ({"kvxfer": {"tokens": 3, "offer": None}}, "not an offer"),
    ],
)
def test_params_from_anywhere(params: dict[str, Any], said: str) -> None:
    """What a client or router sends is refused by name, never trusted."""
    with pytest.raises(InvalidInputError, match=said):
        source_of(params)


@pytest.mark.parametrize(
    ("push", "said"),
    [
        ([], "push must be"),
        ({}, "transfer_id must be"),
        ({"transfer_id": "x" * 300, "to": ["tcp://a:1"]}, "transfer_id must be"),
        ({"transfer_id": "x", "to": "tcp://a:1"}, "to must be"),
        ({"transfer_id": "x", "to": [7]}, "address must be"),
        ({"transfer_id": "x", "to": []}, "names no address"),
    ],
)
def test_pushes_from_anywhere(push: Any, said: str) -> None:
    """What a router sends to prefill is refused by name."""
    with pytest.raises(InvalidInputError, match=said):
        push_of({"do_remote_decode": True, "kvxfer": {"push": push}})


def test_pushes_come_back_as_they_were() -> None:
    """Both sides understand what the router's half makes; offers are no pushes."""
    push = Push.to_addresses("abc", ["tcp://a:1", "tcp://a:2"])
    assert push_of(push.for_prefill()) == push
    assert push_of(push.for_decode()) == Push("abc")
    assert push_of({"kvxfer": {"tokens": 1, "offer": {}}}) is None
    assert push_of({}) is None


def test_settings_need_no_engine() -> None:
    """Configuration and parameters can be checked where vLLM is not installed."""
    program = (
        "import sys, kvxfer.integrations.vllm.params\n"
        "from kvxfer.integrations.vllm import ConnectorConfig\n"
        "ConnectorConfig.from_extra({})\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
