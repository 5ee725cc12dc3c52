"""The host is broken for real, and the doctor names what is wrong and the next step."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from doctor_rig import environment_without, run_doctor

from kvxfer.core.control import ControlConfig, Security, ZmqChannel
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import allow, write_key_pair

CAP_IPC_LOCK = 14
PR_CAPBSET_DROP = 24


def test_a_whole_host() -> None:
    """The default run: shm and loopback move bytes; what is not installed does not count."""
    told = run_doctor()
    assert told.status == 0
    assert told.report["usable"] is True
    for name in ("shm", "loopback"):
        assert told.backend(name)["state"] == "usable"
        assert "every byte is right" in told.one("transfer", name)["what"]
    for backend in told.report["backends"]:
        assert backend["state"] in ("usable", "not installed"), backend


@pytest.mark.parametrize(
    ("removed", "distribution"),
    [(("zmq", "pyzmq"), "pyzmq"), (("msgspec",), "msgspec"), (("entrypoints",), "entrypoints")],
)
def test_library_removed(tmp_path: Path, removed: tuple[str, ...], distribution: str) -> None:
    """A library that kvxfer needs is gone from the environment: it is named, with pip's command,
    and no backend is called usable."""
    python = environment_without(tmp_path / "environment", *removed)
    told = run_doctor("--backend", "shm", python=python)
    assert told.status == 1
    found = told.one("libraries")
    assert (found["level"], found["next_step"]) == ("error", f"pip install {distribution}")
    assert found["what"] == f"{distribution} is not installed, which kvxfer requires"
    assert told.backend("shm")["state"] == "not usable"


def test_library_removed_that_the_command_needs(tmp_path: Path) -> None:
    """Without attrs nothing of kvxfer loads: the command says so in one line."""
    python = environment_without(tmp_path / "environment", "attr")
    done = run_doctor(python=python, json_only=False)
    assert done.returncode == 1
    assert "attrs is not installed" in done.stderr or "attr is not installed" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_backend_that_is_not_there() -> None:
    """Asked for by name, a backend that is not there is a failure, with what to install."""
    told = run_doctor("--backend", "loopback", "--backend", "nowhere")
    assert told.status == 1
    assert told.backend("loopback")["state"] == "usable"
    found = told.one("plug-in", "nowhere")
    assert "no plug-in 'nowhere'" in found["what"]
    assert "install the distribution" in found["next_step"]


def test_busy_port() -> None:
    """A port that somebody listens on: the port, the process that holds it, what to do."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        told = run_doctor("--host-only", "--ports", str(port))
    assert told.status == 1
    found = told.one("control port")
    assert found["level"] == "error"
    assert f"{port} is held by pid {os.getpid()} " in found["what"]
    assert "choose another port" in found["next_step"]


def lower_memlock() -> None:
    """64 KiB, and no privilege that would lift it."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))


def test_memlock_lowered() -> None:
    """RLIMIT_MEMLOCK too low for the cache: the limit, what needs it, the command. shm, which
    pins nothing, stays usable."""
    told = run_doctor("--backend", "shm", before=lower_memlock)
    found = told.one("memlock")
    assert found["level"] in ("warning", "error")  # an error where there is an RDMA device
    assert "RLIMIT_MEMLOCK is 64 KiB: 1 GiB of KV cache cannot be pinned" in found["what"]
    assert "ulimit -l unlimited" in found["next_step"]
    assert "LimitMEMLOCK=infinity" in found["next_step"]
    assert told.backend("shm")["state"] == "usable"
    little = run_doctor("--host-only", "--cache-bytes", "16K", before=lower_memlock)
    assert little.one("memlock")["level"] == "ok"


# ---- keys ----------------------------------------------------------------------------------


class Keys:
    """Two workers that allow each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("prefill-0", "decode-0"):
            write_key_pair(folder / name, generate_key_pair(name))
        allow(folder / "prefill-allows", str(folder / "decode-0.pub"))
        allow(folder / "decode-allows", str(folder / "prefill-0.pub"))

    def doctor(self, *more: str, secret: str = "prefill-0", allowed: str = "prefill-allows") -> Any:
        files = ("--secret-key-file", self.folder / secret, "--allowed-keys", self.folder / allowed)
        return run_doctor("--host-only", *map(str, files), *more)

    def channel(self) -> ZmqChannel:
        """What decode-0 listens with."""
        security = Security(
            secret_key_file=self.folder / "decode-0", allowed_keys=self.folder / "decode-allows"
        )
        return ZmqChannel(ControlConfig(security=security))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_right_keys(keys: Keys) -> None:
    """Files that fit, and a running peer that lets us in."""
    with keys.channel() as channel, Served(channel):
        told = keys.doctor("--peer", channel.address)
    assert told.status == 0
    assert told.one("keys")["level"] == "ok"
    assert told.one("peer")["what"] == f"{channel.address}: connected"


def test_wrong_key_of_another_pair(keys: Keys) -> None:
    """The public half of another pair in the secret file: nobody would let us in."""
    secret = keys.folder / "prefill-0"
    other = generate_key_pair("prefill-0")
    lines = [
        f"public-key = {other.public.hex()}" if line.startswith("public-key") else line
        for line in secret.read_text().splitlines()
    ]
    secret.write_text("\n".join(lines) + "\n")
    told = keys.doctor()
    assert told.status == 1
    wrong = [f for f in told.of("keys") if f["level"] == "error"]
    assert "wrong key: the public key in" in wrong[0]["what"]
    assert "kvxfer keys generate" in wrong[0]["next_step"]
    assert "wrong key" in wrong[1]["what"]  # nor is the .pub file that of this pair


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_wrong_key_to_a_running_peer(keys: Keys, side: str) -> None:
    """Either side allows another key than the one the other has: the real handshake fails."""
    folder = keys.folder
    other = generate_key_pair("prefill-0" if side == "ours" else "decode-0")
    write_key_pair(folder / "other", other)
    if side == "ours":
        with keys.channel() as channel, Served(channel):
            told = keys.doctor("--peer", channel.address, secret="other")
    else:
        allow(folder / "mistaken", str(folder / "other.pub"))
        with keys.channel() as channel, Served(channel):
            told = keys.doctor("--peer", channel.address, allowed="mistaken")
    assert told.status == 1
    found = told.one("peer")
    assert found["level"] == "error"
    assert "wrong key" in found["what"]
    assert "kvxfer keys show" in found["next_step"]


def test_keys_that_others_can_read(keys: Keys) -> None:
    """A secret file with too wide a mode, and an allow-list that is not there."""
    (keys.folder / "prefill-0").chmod(0o644)
    told = keys.doctor(allowed="nowhere")
    assert told.status == 1
    steps = " ".join(f["next_step"] for f in told.of("keys"))
    assert "chmod 0600" in steps
    assert "kvxfer keys allow" in steps


def test_nobody_at_the_address(keys: Keys) -> None:
    """A peer that is not up is told from one that refuses."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}#decode-0"
        told = keys.doctor("--peer", address)
    assert told.status == 1
    assert told.one("peer")["what"] == f"{address}: nobody answers"


def test_beyond_loopback_without_keys() -> None:
    """Listening for everybody needs keys."""
    told = run_doctor("--host-only", "--bind-host", "0.0.0.0")
    assert told.status == 1
    first = told.of("control port")[0]
    assert first["level"] == "error"
    assert "kvxfer keys generate" in first["next_step"]


class Served:
    """Somebody drives the channel while the doctor talks to it."""

    def __init__(self, channel: ZmqChannel) -> None:
        self._channel = channel
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self._channel.receive()
            self._channel.wait(0.05)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
