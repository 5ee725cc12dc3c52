"""``kv_connector_extra_config`` is checked before an engine serves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvxfer.errors import ConfigError, InvalidInputError
from kvxfer.integrations.vllm import ConnectorConfig
from kvxfer.integrations.vllm.params import Remote


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
        ({}, "without an offer"),
        ({"kvxfer": []}, "without an offer"),
        ({"kvxfer": {"tokens": 3}}, "without an offer"),
        ({"kvxfer": {"tokens": True, "offer": {}}}, "tokens must be"),
        ({"kvxfer": {"tokens": 3, "offer": {}}}, "not an offer"),
        ({"kvxfer": {"tokens": 3, "offer": None}}, "not an offer"),
    ],
)
def test_params_from_anywhere(params: dict[str, Any], said: str) -> None:
    """What a client or router sends is refused by name, never trusted."""
    with pytest.raises(InvalidInputError, match=said):
        Remote.from_params(params)


def test_settings_need_no_engine() -> None:
    """Configuration and parameters can be checked where vLLM is not installed."""
    program = (
        "import sys, kvxfer.integrations.vllm.params\n"
        "from kvxfer.integrations.vllm import ConnectorConfig\n"
        "ConnectorConfig.from_extra({})\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
