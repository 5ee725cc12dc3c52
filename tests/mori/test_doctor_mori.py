"""``kvxfer doctor`` with the real MoRI-IO engine, which ends its process on a broken host."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import subprocess
import sys

PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14


def doctor(*arguments, before=None, **env):
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer", "doctor", "--backend", "moriio", "--json", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        preexec_fn=before,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout)["backends"][0]["findings"]


def errors(findings):
    return [f for f in findings if f["level"] == "error"]


def test_usable(softrdma):
    """It starts, tells the depth of its send queue and its open ports, and moves bytes."""
    status, findings = doctor()
    assert status == 0, findings
    texts = [f["what"] for f in findings]
    assert any("a send queue takes 4096 work requests" in text for text in texts)
    assert any("TCP ports" in text for text in texts)
    assert any("every byte is right" in text for text in texts)


def test_memory_that_cannot_be_pinned(softrdma):
    """RLIMIT_MEMLOCK lowered: an error here, with the command, and no engine is started."""

    def lower():
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    status, findings = doctor(before=lower)
    assert status == 1
    (found,) = errors(findings)
    assert found["check"] == "memlock"
    assert "RLIMIT_MEMLOCK is 64 KiB" in found["what"]
    assert "ulimit -l unlimited" in found["next_step"]
    assert findings[-1] is found


def test_registration_that_ends_the_process(softrdma):
    """``ibv_reg_mr`` refuses: the engine aborts the process that tries it, not the doctor."""
    status, findings = doctor(SOFTIBV_REG_ERRNO=str(errno.ENOMEM))
    assert status == 1
    (found,) = errors(findings)
    assert found["check"] == "registration"
    assert "signal 6" in found["what"]
    assert "ulimit -l" in found["next_step"]


def test_busy_port(softrdma):
    """The engine exits when its control port is taken: the port is named."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        status, findings = doctor("--config", json.dumps({"port": port}))
    assert status == 1
    (found,) = errors(findings)
    assert f"127.0.0.1:{port}" in found["what"]
    assert "leave port at 0" in found["next_step"]
