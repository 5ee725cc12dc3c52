"""``python -m kvxfer.backends.moriio.rehearse OPTIONS``: the child of a rehearsal.

Exits with 0 where all went well, with ``UNABLE`` where it could not try, with ``IMPOSSIBLE`` where
it knows that the engine would end the process; the engine ends it otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import sys
from typing import Any, NoReturn

from kvxfer.backends.moriio.binding import Engine, read_remote
from kvxfer.backends.moriio.config import MoriioConfig
from kvxfer.backends.moriio.rehearsal import IMPOSSIBLE, UNABLE
from kvxfer.core.memory import MemoryKind, Span
from kvxfer.errors import KvxferError

__all__ = ["main"]

TILES = 16384
"""Mappings of one tile that make up the memory: well below ``vm.max_map_count`` (65530)."""

_MAP_SHARED_FIXED = 0x01 | 0x10


def _dram(nbytes: int) -> Span:
    """Address space of that size over a few megabytes: locking it is counted in full."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    tile = max(1 << 21, -(-size // TILES // page) * page)
    fd = os.memfd_create("kvxfer-rehearsal")
    os.ftruncate(fd, tile)
    whole = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    for offset in range(0, size, tile):
        length = min(tile, size - offset)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = libc.mmap(start + offset, length, protection, _MAP_SHARED_FIXED, fd, 0)
        if address != start + offset:
            raise OSError(ctypes.get_errno(), "mmap")
    return Span(address=start, nbytes=nbytes, owner=whole)


_NORESERVE = 0x4000


def _vram(nbytes: int, device: int) -> Span:
    """Never run on hardware."""
    hip = ctypes.CDLL(None)  # the engine's library has brought HIP along
    count = ctypes.c_int()
    if hip.hipGetDeviceCount(ctypes.byref(count)) or not 0 <= device < count.value:
        _give_up(f"HIP sees {count.value} devices, not device {device}", IMPOSSIBLE)
    pointer = ctypes.c_void_p()
    size = min(nbytes, 1 << 21)
    if hip.hipSetDevice(device) or hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)):
        raise OSError(f"device {device} gives no memory")
    address = int(pointer.value or 0)
    return Span(address=address, nbytes=size, kind=MemoryKind.VRAM, device=device)


def _memory(options: dict[str, Any]) -> None:
    config = MoriioConfig.from_options(options["config"])
    engine = Engine(f"kvxfer-rehearsal-{secrets.token_hex(8)}", options["host"], config)
    try:
        if options["kind"] == MemoryKind.DRAM.value:
            span = _dram(options["nbytes"])
        else:
            span = _vram(options["nbytes"], options["device"])
    except (OSError, AttributeError) as error:
        _give_up(f"no memory to try with: {error}")
    engine.add_remote(read_remote(engine.descriptor))
    memory = engine.register(span)
    # Registered with the device on the first session only; one with itself will do.
    engine.open_session(memory, memory)


def _give_up(why: str, status: int = UNABLE) -> NoReturn:
    sys.stdout.write(why + "\n")
    sys.stdout.flush()
    os._exit(status)


def main(argv: list[str]) -> None:
    """See the module."""
    options = json.loads(argv[0])
    try:
        if options["what"] == "port":
            key = f"kvxfer-rehearsal-{secrets.token_hex(8)}"
            Engine(key, options["host"], MoriioConfig(), port=options["port"])
        else:
            _memory(options)
    except KvxferError as error:
        # The process itself will meet and explain it.
        with contextlib.suppress(OSError):
            _give_up(str(error))
    # Not through the interpreter's end: nothing of the engine's own is to be waited for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
