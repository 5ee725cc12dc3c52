"""Bind first, then publish."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from control_rig import descriptors, tasks

from kvxfer.core.address import Address, PortRange
from kvxfer.core.control import ControlConfig, ZmqChannel
from kvxfer.core.control_bind import Listener, bind_first_free, listeners, port_holder
from kvxfer.errors import ConfigError

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:38F3 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31337 1
   1: 0100007F:38F4 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000        0 31338 1
   2: garbage
   3: 0100007F:zzzz 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31339 1
"""


class Ports:
    """Stands for the kernel: some ports are taken."""

    def __init__(self, taken: set[int], error: int = errno.EADDRINUSE) -> None:
        self.taken = taken
        self.error = error
        self.tried: list[str] = []

    def bind(self, endpoint: str) -> None:
        self.tried.append(endpoint)
        port = endpoint.rpartition(":")[2]
        if port != "*" and int(port) in self.taken:
            raise OSError(self.error, os.strerror(self.error))


def test_goes_on_to_the_next_port() -> None:
    """Report O34: in use twice, then free: the third port of the range is taken."""
    ports = Ports({20013, 20014})
    bind_first_free(ports.bind, "10.0.0.5", PortRange(20013, 20016))
    assert ports.tried == [f"tcp://10.0.0.5:{p}" for p in (20013, 20014, 20015)]


def test_all_busy_names_range_and_holders() -> None:
    """Report O34: all ports busy is an error that names the range and who holds the ports."""
    ports = Ports({20013, 20014, 20015, 20016, 20017})
    with pytest.raises(ConfigError) as caught:
        bind_first_free(
            ports.bind,
            "::1",
            PortRange(20013, 20017),
            holder=lambda port: "pid 7 (python3), uid 0" if port == 20013 else None,
        )
    text = str(caught.value)
    assert "all ports 20013-20017 are in use on ::1" in text
    assert "20013 is held by pid 7 (python3), uid 0" in text
    assert "20014 is held by unknown" in text
    assert "1 more" in text
    assert ports.tried[0] == "tcp://[::1]:20013"


@pytest.mark.parametrize(
    ("code", "hint"),
    [(errno.EADDRNOTAVAIL, "no address of this machine"), (errno.EACCES, "privilege")],
)
def test_other_errors_end_at_once(code: int, hint: str) -> None:
    """What the next port cannot cure is reported at once, with the next step."""
    ports = Ports({80, 81}, code)
    with pytest.raises(ConfigError, match=hint):
        bind_first_free(ports.bind, "10.0.0.5", PortRange(80, 81))
    assert len(ports.tried) == 1


def test_port_zero_lets_the_system_choose() -> None:
    """Port 0 is written as libzmq wants it, with brackets around IPv6."""
    ports = Ports(set())
    bind_first_free(ports.bind, "::1", (0,))
    assert ports.tried == ["tcp://[::1]:*"]


def test_reads_the_kernels_table() -> None:
    """Only listening sockets count; lines that cannot be read are skipped."""
    assert listeners(TABLE) == [Listener(port=0x38F3, uid=1000, inode=31337)]
    assert listeners("") == []


def test_holder_from_a_proc_directory(tmp_path: Path) -> None:
    """Report O33: the holder is named by pid and name if we may look, else by uid, else not."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TABLE)
    assert port_holder(14579, tmp_path) == "a process of uid 1000"
    fd = tmp_path / "4711" / "fd"
    fd.mkdir(parents=True)
    (fd / "3").symlink_to("socket:[31337]")
    (fd.parent / "comm").write_text("vllm\n")
    assert port_holder(14579, tmp_path) == "pid 4711 (vllm), uid 1000"
    assert port_holder(14580, tmp_path) is None
    assert port_holder(14579, tmp_path / "absent") is None


def _neighbours() -> tuple[socket.socket, socket.socket]:
    """Two sockets bound to a port and the next one; other processes may hold any of them."""
    for _ in range(50):
        first, second = socket.socket(), socket.socket()
        first.bind(("127.0.0.1", 0))
        try:
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
        except (OSError, OverflowError):
            first.close()
            second.close()
        else:
            return first, second
    pytest.fail("no two neighbouring ports are free")


def test_real_ports() -> None:
    """A taken port is passed over; all taken is an error naming us, and nothing stays open."""
    first, second = _neighbours()
    with first, second:
        port = first.getsockname()[1]
        first.listen()
        with ZmqChannel(ControlConfig(port_range=PortRange(port, port + 3))) as channel:
            taken = Address.parse(channel.address).port
            assert taken is not None
            # The next port is bound but does not listen: the kernel refuses it all the same,
            # because that socket did not ask to share.
            assert port + 2 <= taken <= port + 3
        second.listen()
        before, running = descriptors(), tasks()
        for _ in range(3):
            with pytest.raises(ConfigError) as caught:
                ZmqChannel(ControlConfig(port_range=PortRange(port, port + 1)))
        assert f"all ports {port}-{port + 1} are in use" in str(caught.value)
        assert f"{port} is held by pid {os.getpid()} (" in str(caught.value)
        assert descriptors() == before
        assert tasks() == running


def test_not_our_address() -> None:
    """An address of another machine cannot be bound: said so, nothing stays open."""
    before, running = descriptors(), tasks()
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1 is no address of this machine"):
        ZmqChannel(ControlConfig(bind_host="203.0.113.1", insecure=True))
    assert descriptors() == before
    assert tasks() == running
