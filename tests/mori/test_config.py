"""The configuration covers what the wheel has, and the environment what it reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from mori import cpp

from kvxfer.backends.moriio import MoriioConfig, MoriioTransport, PollMode
from kvxfer.backends.moriio.variables import UNRELATED, VARIABLES
from kvxfer.core.plugins import create_transport
from kvxfer.errors import ConfigError, TransportError
from kvxfer.testing.two_sides import scattered

HERE = Path(cpp.__file__).parents[1]


def settings(kind):
    return {name for name in dir(kind()) if not name.startswith("_")}


def test_every_setting_of_the_wheel_is_ours():
    """All fields of the engine's backend configurations can be set by the same names."""
    ours = {field.name for field in attrs.fields(MoriioConfig)}
    assert settings(cpp.RdmaBackendConfig) <= ours
    for prefix, kind in (("xgmi", cpp.XgmiBackendConfig), ("fabric", cpp.FabricBackendConfig)):
        assert {f"{prefix}_{name}" for name in settings(kind)} <= ours
    assert settings(cpp.IOEngineConfig) <= ours


def test_every_variable_of_the_wheel_is_listed():
    """Every ``MORI_*`` name in the libraries of the transfer engine is in our list, or is known to
    belong to another part of the wheel; and nothing is listed that the wheel has not."""
    found = set()
    for library in ("libmori_io.so", "libmori_application.so", "libmori_metrics.so"):
        data = (HERE / library).read_bytes()
        found |= {m.decode() for m in re.findall(rb"\0(MORI_[A-Z0-9_]+)\0", data)}
    found |= set(
        re.findall(r"MORI_IO_LOG_LEVEL", (HERE / "libmori_pybinds.so").read_text("latin-1"))
    )
    ours = {variable.name for variable in VARIABLES}
    numbered = {f"MORI_GOR_PORT{i}" for i in range(1, 5)}
    # Names that the compiler keeps in registers are not found as strings.
    assert found - ours - UNRELATED - numbered == set()
    assert len(ours & found) > 30
    assert len(ours) == len(VARIABLES)
    assert not ours & UNRELATED


def test_every_variable_is_documented():
    """The how-to names each of them."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "moriio.md"
    text = page.read_text(encoding="utf-8")
    assert [v.name for v in VARIABLES if f"`{v.name}`" not in text] == []
    assert [f.name for f in attrs.fields(MoriioConfig) if f"`{f.name}`" not in text] == []


ENVIRONMENT = """
import json, os, sys
from kvxfer.backends.moriio import MoriioConfig, MoriioTransport
from kvxfer.testing.softrdma import SoftRdma

def seen():
    return {k: v for k, v in os.environ.items() if k.startswith("MORI_")}

with SoftRdma():
    found = [seen()]
    first = MoriioTransport(MoriioConfig(qp_timeout=15))
    found.append(seen())
    second = MoriioTransport(MoriioConfig(qp_timeout=16))
    found.append(seen())
    second.close()
    first.close()
    print("\\n" + json.dumps(found))
"""


def test_the_environment_around_an_engine():
    """Log levels are set while the first engine is made and put back. What is read later stays, and
    a variable of the user's is left alone."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MORI_")}
    environ["MORI_IO_CP_TIMEOUT_MS"] = "1234"
    environ["PYTHONPATH"] = os.pathsep.join(p or "." for p in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT], capture_output=True, text=True, env=environ, check=True
    )
    before, first, second = json.loads(done.stdout.splitlines()[-1])
    user = {"MORI_IO_CP_TIMEOUT_MS": "1234"}
    assert before == user
    kept = {"MORI_IO_SQ_BACKOFF_TIMEOUT_US": "1000", "MORI_IO_QP_RETRY_CNT": "7"}
    assert first == {**user, **kept, "MORI_IO_QP_TIMEOUT": "15"}
    assert second == {**user, **kept, "MORI_IO_QP_TIMEOUT": "16"}
    assert done.stdout.strip().count("\n") == 0, "the engine logs nothing"


def test_from_json(softrdma):
    """A transport can be made from what a configuration file holds."""
    transport = create_transport("moriio", {"poll_cq_mode": "event", "qp_per_transfer": 2})
    try:
        assert transport.config.poll_cq_mode is PollMode.EVENT
        assert transport.capabilities.credits == 2 * transport.config.max_send_wr
    finally:
        transport.close()
    with pytest.raises(ConfigError, match="did you mean 'poll_cq_mode'"):
        create_transport("moriio", {"poll_mode": "event"})


@pytest.mark.parametrize(
    "config",
    [
        {"enable_notification": True, "notif_per_qp": 64},
        {"max_cqe_num": 9000, "max_msg_sge": 1},
        {"enable_transfer_chunking": True, "chunk_bytes": 8192, "max_chunks_per_transfer": 8},
        {"num_worker_threads": 2, "qp_per_transfer": 2, "post_batch_size": 8},
        {"num_nics_per_transfer": 2},
    ],
    ids=lambda c: next(iter(c)),
)
def test_settings_reach_the_engine(rig, config):
    """With every group of settings pieces arrive whole: also where the engine cuts and spreads
    them, and then an overload is refused by our own count before the engine posts a part of it."""
    r = rig(max_send_wr=64, **config)
    far = r.far(**{k: v for k, v in config.items() if k.startswith(("enable", "notif"))})
    far.connect()
    for _ in range(3):
        attempt = r.read(far.path, scattered(20))
        assert attempt.error is None
    assert r.landed(scattered(20)) == 20
    atomic = {"enable_notification", "max_cqe_num"}
    assert r.transport.config.one_queue_pair_per_call is (next(iter(config)) in atomic)


@pytest.mark.parametrize("backend", ["xgmi", "fabric"])
def test_gpu_backends_leave_host_memory_alone(rig, backend):
    """With the engine's XGMI or FABRIC backend made as well, host memory still goes over RDMA. That
    they move GPU memory has never been run."""
    r = rig(**{backend: True, f"{backend}_num_streams": 2, f"{backend}_num_events": 2})
    far = r.far()
    far.connect()
    assert r.read(far.path, scattered(8)).error is None
    assert r.landed(scattered(8)) == 8


def test_refused_settings_say_why(softrdma):
    """What the engine refuses when its backend is made is an error with its words."""
    softrdma.device(count=0)
    with pytest.raises(TransportError, match="ibv_devinfo") as caught:
        MoriioTransport(MoriioConfig(rehearse=False))
    assert caught.value.engine.message.startswith("no active RDMA device")
