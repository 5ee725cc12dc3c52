"""What NIXL needs of its environment is checked, with a next step, before it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.backends._machine import Level, Machine
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.nixl.environment import check, this_machine

WHEELS = {"nixl": "1.5.1", "nixl-cu12": "1.5.1", "nixl-cu13": "1.5.1"}
PLAIN = Machine(net_devices=frozenset({"lo", "eth0"}), distributions=WHEELS)
RDMA = Machine(
    rdma_devices=frozenset({"mlx5_0"}),
    net_devices=frozenset({"lo", "eth0"}),
    distributions=WHEELS,
)


@pytest.mark.parametrize("machine", [PLAIN, RDMA])
@pytest.mark.parametrize(
    "environ", [{}, {"UCX_TLS": "all"}, {"UCX_NET_DEVICES": "eth0"}, {"UCX_NET_DEVICES": "all"}]
)
def test_nothing_to_say(machine: Machine, environ: dict[str, str]) -> None:
    """A usual machine, with and without an RDMA device, has no findings."""
    assert check(NixlConfig(), environ, machine) == []


@pytest.mark.parametrize(
    ("machine", "environ", "level", "word"),
    [
        (PLAIN, {"UCX_TLS": "cma,shm"}, Level.ERROR, "UCX_TLS"),
        (PLAIN, {"UCX_MODULES": "ib"}, Level.ERROR, "SIGSEGV"),
        (PLAIN, {"UCX_MODULES": "^cuda"}, Level.ERROR, "SIGSEGV"),
        (PLAIN, {"UCX_NET_DEVICES": "mlx5_0:1"}, Level.ERROR, "mlx5_0:1"),
        (RDMA, {"UCX_MODULES": "^ib"}, Level.WARNING, "mlx5_0"),
        (RDMA, {"UCX_TLS": "tcp"}, Level.WARNING, "mlx5_0"),
        (Machine(distributions={"nixl": "1.5.1"}), {}, Level.ERROR, "nixl-cu12"),
        (Machine(), {}, Level.MISSING, "not installed"),
        (
            Machine(distributions={"nixl": "1.5.2", "nixl-cu12": "1.5.1"}),
            {},
            Level.ERROR,
            "do not belong together",
        ),
        (
            Machine(rdma_devices=frozenset({"mlx5_0"}), memlock=8 << 20, distributions=WHEELS),
            {},
            Level.ERROR,
            "RLIMIT_MEMLOCK",
        ),
    ],
)
def test_findings(machine: Machine, environ: dict[str, str], level: Level, word: str) -> None:
    """Each says what is wrong, how bad it is, and what to do."""
    (found,) = check(NixlConfig(), environ, machine)
    assert (found.backend, found.level) == ("nixl", level)
    assert word in str(found)
    assert found.next_step


@pytest.mark.parametrize(
    ("machine", "environ"),
    [
        (PLAIN, {"UCX_MODULES": "^ib"}),
        (RDMA, {"UCX_MODULES": "ib,cuda"}),
        (RDMA, {"UCX_TLS": "rc,tcp"}),
        (RDMA, {"UCX_TLS": "^cma"}),
        (PLAIN, {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}),
    ],
)
def test_settings_that_are_fine(machine: Machine, environ: dict[str, str]) -> None:
    """No finding for what works."""
    assert check(NixlConfig(), environ, machine) == []


def test_plugin_folder_and_progress(tmp_path: Path) -> None:
    """A folder without the UCX plug-in is an error and comes first; without NIXL's thread peers
    wait for our ``progress``."""
    config = NixlConfig(enable_prog_thread=False)
    found = check(config, {"NIXL_PLUGIN_DIR": str(tmp_path)}, PLAIN)
    assert [f.level for f in found] == [Level.ERROR, Level.WARNING]
    (tmp_path / "libplugin_UCX.so").touch()
    assert len(check(config, {"NIXL_PLUGIN_DIR": str(tmp_path)}, PLAIN)) == 1
    assert check(config, {"UCX_TLS": "rc,ib"}, PLAIN) == []


def test_this_machine_is_looked_at() -> None:
    """The real machine: its loopback device is found."""
    assert "lo" in this_machine().net_devices
