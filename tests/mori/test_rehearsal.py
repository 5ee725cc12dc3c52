"""What would end the process is tried in a child: fixed ports, and the first registration."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport, rehearsal
from kvxfer.core.memory import MemoryKind, Span, span_of
from kvxfer.errors import ConfigError, TransportError


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has registered nothing."""
    monkeypatch.setattr(rehearsal, "_rehearsed", set())


@pytest.fixture
def transport(softrdma):
    transport = MoriioTransport(MoriioConfig())
    yield transport
    transport.close()


def test_a_registration_that_would_end_the_process(fresh, transport, monkeypatch):
    """Where ``ibv_reg_mr`` fails the engine aborts the child: ``register`` raises with its last
    words, and works once the cause is gone."""
    monkeypatch.setenv("SOFTIBV_REG_ERRNO", str(errno.ENOMEM))
    array = np.zeros(1 << 20, np.uint8)
    with pytest.raises(TransportError, match=r"signal 6.*ulimit -l") as caught:
        transport.register(span_of(array))
    assert caught.value.engine.message.startswith("rehearsal failed: ")
    monkeypatch.delenv("SOFTIBV_REG_ERRNO")
    transport.deregister(transport.register(span_of(array)))


def test_only_the_first_is_tried(fresh, transport, monkeypatch):
    """One child per memory kind and process."""
    runs = []
    monkeypatch.setattr(rehearsal, "_run", lambda options: runs.append(options) or (0, ""))
    arrays = [np.zeros(4096, np.uint8) for _ in range(3)]
    for array in arrays:
        transport.register(span_of(array))
    assert len(runs) == 1
    assert (runs[0]["kind"], runs[0]["nbytes"]) == ("dram", 4096)


def test_size_costs_no_memory(softrdma):
    """The child locks as much address space as will be registered, over a few megabytes: 64 GiB
    can be tried on a small machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    options = {
        "what": "memory",
        "host": "127.0.0.1",
        "kind": "dram",
        "device": -1,
        "nbytes": (64 << 30) + 4097,
        "config": {},
    }
    assert rehearsal._run(options) == (0, "")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 0) + (1 << 20)


def test_where_nothing_can_be_tried(fresh, transport, monkeypatch, caplog):
    """A child that cannot be started proves nothing: it is said, and the registration goes on."""
    array = np.zeros(4096, np.uint8)
    monkeypatch.setattr(rehearsal.sys, "executable", "/nonexistent/python")
    transport.register(span_of(array))
    assert "dram memory could not be tried" in caplog.text


def test_gpu_memory_without_a_gpu(fresh, transport):
    """The engine ends the process on its first session with GPU memory where HIP has no device:
    the registration is refused."""
    span = Span(address=4096, nbytes=4096, kind=MemoryKind.VRAM, device=0)
    with pytest.raises(TransportError, match="HIP sees 0 devices, not device 0"):
        transport.register(span)


def test_fixed_ports(softrdma):
    """A port that is taken is a ConfigError, not the end of the process; a free one is used, and
    the next generation takes the next port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{taken} .*exit status 255.*in use"):
            MoriioTransport(MoriioConfig(port=taken))
    free = _two_free_ports()
    transport = MoriioTransport(MoriioConfig(port=free, rehearse=False, generation_linger_s=0.1))
    try:
        assert transport._generations.current.engine.port == free
        fence = transport._generations.fence()
        assert fence == 1
        while transport._generations.live[-1].number != 2:
            transport.progress()
        assert transport._generations.current.engine.port == free + 1
    finally:
        transport.close()


def _two_free_ports():
    for _ in range(50):
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two free ports beside each other")


def _orphans():
    """Files of ours in /dev/shm that no process holds: what somebody left behind."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
            maps = (process / "maps").read_text(encoding="utf-8").splitlines()
            held |= {line.split(maxsplit=5)[-1] for line in maps}
            for descriptor in list((process / "fd").iterdir()):
                with contextlib.suppress(OSError):  # closed meanwhile
                    held.add(os.readlink(descriptor))
    return {str(path) for path in Path("/dev/shm").iterdir()} - held


def test_the_child_leaves_nothing(softrdma):
    """A rehearsal leaves no file behind.

    The directory is everybody's, and others come and go in it: what a rehearsal left would be
    there after each one.
    """
    left = []
    for _ in range(3):
        before = _orphans()
        rehearsal.rehearse_port("127.0.0.1", _two_free_ports())
        left.append(_orphans() - before)
        if not left[-1]:
            return
    pytest.fail(f"each of three rehearsals left something: {left}")


def test_what_was_left_would_be_seen():
    """A control: a file that nobody holds is told from one that a process has open."""
    before = _orphans()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kvxfer-test.") as held:
        assert held.name not in _orphans() - before
        forgotten = Path(held.name + ".forgotten")
        forgotten.touch()
        try:
            assert str(forgotten) in _orphans() - before
        finally:
            forgotten.unlink()
