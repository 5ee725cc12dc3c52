"""Section 3, before any session: exceptions of ``create_backend`` and of descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.testing.softrdma.engine import mori
from kvxfer.testing.softrdma.samples import Verdict
from kvxfer.testing.softrdma.scenario import Observation, Rig, scenario

NO_DEVICE = (
    "no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
)
NO_DEVICE_AT_ALL = "no active RDMA device and no usable GPU P2P; cannot create any backend"


@scenario(section=3, row=NO_DEVICE, verdict=Verdict.PERMANENT)
def no_device(rig: Rig) -> Observation:
    """create_backend where no RDMA device exists."""
    rig.rdma.device(count=0)
    return rig.raised(rig.engine)


@scenario(section=3, row=NO_DEVICE, verdict=Verdict.PERMANENT)
def port_down(rig: Rig) -> Observation:
    """create_backend where the only port is down."""
    rig.rdma.port_down()
    return rig.raised(rig.engine)


@scenario(
    section=3,
    row=NO_DEVICE_AT_ALL,
    verdict=Verdict.PERMANENT,
    environment={"MORI_DISABLE_AUTO_XGMI": "0"},
)
def no_device_no_gpu(rig: Rig) -> Observation:
    """create_backend where neither an RDMA device nor a GPU exists, with the fallback allowed."""
    rig.rdma.device(count=0)
    return rig.raised(rig.engine)


def _invalid_config(**config: Any) -> Callable[[Rig], Observation]:
    return lambda rig: rig.raised(lambda: rig.engine(**config))


for _name, _row, _config in (
    (
        "config_notif_per_qp",
        "Invalid RDMA config: notifPerQp must be >= 1 when notification is enabled",
        {"enable_notification": True, "notif_per_qp": 0},
    ),
    (
        "config_chunk_bytes",
        "Invalid RDMA config: chunkBytes must be >= 4096 when chunking is enabled",
        {"enable_transfer_chunking": True, "chunk_bytes": 100},
    ),
    (
        "config_max_chunks",
        "Invalid RDMA config: maxChunksPerTransfer must be >= 1",
        {"max_chunks_per_transfer": 0},
    ),
    (
        "config_num_nics",
        "Invalid RDMA config: numNicsPerTransfer must be >= 1",
        {"num_nics_per_transfer": 0},
    ),
):
    scenario(
        section=3,
        row=_row,
        verdict=Verdict.PERMANENT,
        name=_name,
        how=f"create_backend with {', '.join(f'{key}={value}' for key, value in _config.items())}.",
    )(_invalid_config(**_config))


# ---- descriptors ----


@scenario(section=3, row="insufficient bytes", verdict=Verdict.PERMANENT)
def unpack_empty(rig: Rig) -> Observation:
    """EngineDesc.unpack of no bytes."""
    return rig.raised(lambda: mori().EngineDesc.unpack(b""))


@scenario(section=3, row="std::bad_cast", verdict=Verdict.PERMANENT)
def unpack_junk(rig: Rig) -> Observation:
    """MemoryDesc.unpack of bytes that are none."""
    return rig.raised(lambda: mori().MemoryDesc.unpack(b"junk"))
