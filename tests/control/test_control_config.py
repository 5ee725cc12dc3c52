"""Configuration of the control channel, fixed ports, and the warning about open doors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxfer.core.address import Address, PortRange
from kvxfer.core.control_config import ControlConfig, exposure, fixed_port
from kvxfer.core.events import Role
from kvxfer.errors import ConfigError, InvalidInputError


def test_defaults() -> None:
    """Loopback and a port of the system's choice unless told otherwise."""
    config = ControlConfig()
    assert Address(config.bind_host).is_loopback
    assert list(config.ports) == [0]
    assert list(ControlConfig(port=7).ports) == [7]
    assert list(ControlConfig(port_range="7-8").ports) == [7, 8]
    assert list(ControlConfig(port_range=PortRange(7, 8)).ports) == [7, 8]
    assert config.max_message_nbytes == 8 * 1024 * 1024


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port_range", 5),
        ("port_range", "5-4"),
        ("max_message_nbytes", 0),
        ("send_queue_messages", 0),
        ("receive_queue_messages", 0),
        ("max_routes", 0),
        ("max_routes", 2**20),
        ("heartbeat_interval", 0),
        ("heartbeat_interval", "1"),
        ("heartbeat_timeout", float("nan")),
        ("handshake_timeout", float("inf")),
        ("connect_timeout", -1.0),
        ("reconnect_min", 0.0),
        ("reconnect_max", True),
        ("bind_host", "10.0.0.5:1"),
        ("bind_host", None),
        ("advertise_host", "a b"),
    ],
)
def test_refuses(field: str, value: object) -> None:
    """A wrong value is refused with the field or the value in the text."""
    with pytest.raises((ConfigError, InvalidInputError), match=rf"{field}|{value}"):
        ControlConfig(**{field: value})  # type: ignore[arg-type]


def test_contradictions() -> None:
    """Two values that exclude each other are refused, with both in the text."""
    with pytest.raises(ConfigError, match=r"port is 5 and port_range is 1-2"):
        ControlConfig(port=5, port_range="1-2")
    with pytest.raises(ConfigError, match="at least heartbeat_interval"):
        ControlConfig(heartbeat_interval=3.0, heartbeat_timeout=2.0)
    with pytest.raises(ConfigError, match="at least reconnect_min"):
        ControlConfig(reconnect_min=3.0, reconnect_max=2.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_not_advertised(host: str) -> None:
    """Whoever listens everywhere must say what peers dial: nothing is guessed."""
    with pytest.raises(ConfigError, match="advertise_host"):
        ControlConfig(bind_host=host)
    with pytest.raises(ConfigError, match="advertise_host"):
        ControlConfig(advertise_host=host)
    assert ControlConfig(bind_host=host, advertise_host="10.0.0.5").bind_host == host


def test_exposure() -> None:
    """Without keys, whatever others can reach is named; loopback and keys are fine."""

    class Keys:
        pass

    assert exposure(Address("127.0.0.1", 1), None) is None
    assert exposure(Address("::1", 1), None) is None
    assert exposure(Address("10.0.0.5", 1), Keys()) is None  # type: ignore[arg-type]
    assert "10.0.0.5:1 without authentication" in (exposure(Address("10.0.0.5", 1), None) or "")
    assert "every interface" in (exposure(Address("::", 1), None) or "")


def test_fixed_ports_are_distinct() -> None:
    """Report O33: both roles of dp 2, tp 2 on one machine get eight distinct ports."""
    ports = [
        fixed_port(15000, role, dp=2, tp=2, dp_rank=dp_rank, tp_rank=tp_rank)
        for role in (Role.PRODUCER, Role.CONSUMER)
        for dp_rank in range(2)
        for tp_rank in range(2)
    ]
    assert ports == list(range(15000, 15008))


def test_fixed_ports_beyond_the_last() -> None:
    """Report O33: base 65530 with eight ports is refused at start, on the first rank already."""
    with pytest.raises(ConfigError, match=r"up to 65537.*at most 65528"):
        fixed_port(65530, Role.PRODUCER, dp=2, tp=2, dp_rank=0, tp_rank=0)
    assert fixed_port(65528, Role.CONSUMER, dp=2, tp=2, dp_rank=1, tp_rank=1) == 65535


@pytest.mark.parametrize(
    "change",
    [
        {"base": 0},
        {"base": True},
        {"dp": 0},
        {"tp": 0},
        {"dp_rank": 2},
        {"tp_rank": -1},
        {"role": 1},
    ],
)
def test_fixed_port_checks_its_ranks(change: dict[str, object]) -> None:
    """A rank outside its size would take another rank's port: refused, with its name."""
    arguments: dict[str, object] = {
        "base": 15000,
        "role": Role.PRODUCER,
        "dp": 2,
        "tp": 2,
        "dp_rank": 0,
        "tp_rank": 0,
    }
    with pytest.raises(ConfigError, match=next(iter(change))):
        fixed_port(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module", ["kvxfer.core.channel", "kvxfer.core.address", "kvxfer.core.control_config"]
)
def test_loads_no_zmq(module: str) -> None:
    """The abstract channel, addresses and the configuration are usable without loading zmq."""
    code = f"import sys, {module}; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
