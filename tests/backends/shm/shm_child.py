"""A process with one shm transport that does what it is told: JSON lines in, JSON lines out."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys

import numpy as np

from kvxfer.backends.shm import PeerAccess, ShmConfig, ShmTransport, allocate, share_storage
from kvxfer.core.batch import Batch
from kvxfer.core.memory import Descriptor, span_of, storage_span
from kvxfer.core.transport import PeerInfo
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, SIGKILL = 1, 4, 9


def info_to_json(info):
    return [info.transport, info.incarnation, base64.b64encode(info.data).decode()]


def info_from_json(values):
    return PeerInfo(transport=values[0], incarnation=values[1], data=base64.b64decode(values[2]))


def descriptor_to_json(d):
    return [d.transport, d.incarnation, d.region_id, d.nbytes]


def descriptor_from_json(values):
    names = ("transport", "incarnation", "region_id", "nbytes")
    return Descriptor(**dict(zip(names, values, strict=True)))


def outcome(error):
    """What a test looks at of an exception."""
    engine = getattr(error, "engine", None)
    return {
        "error": type(error).__name__,
        "text": str(error),
        "code": engine.code if engine else None,
        "engine": engine.message if engine else "",
    }


class Child:
    def __init__(self):
        self.transport = None
        self.arrays = []
        self.regions = []
        self.peers = []
        self.paths = []
        self.attempts = []
        self.pollables = []

    def open(self, uid=None, dumpable=None, **options):
        if uid is not None:
            # What is imported late must be there already: the new uid may not read our files.
            ShmTransport().close()
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if dumpable is not None:
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)
        self.transport = ShmTransport(ShmConfig(**options) if options else None)
        return info_to_json(self.transport.local_info())

    def register(self, nbytes, *, mapped=True, fill=0, access="read_write"):
        if mapped:
            array = allocate(nbytes, np.uint8, peers=PeerAccess(access))
        else:
            array = np.empty(nbytes, dtype=np.uint8)
        array[:] = np.random.default_rng(fill).integers(0, 256, nbytes, dtype=np.uint8)
        return self._register(array, span_of(array))

    def register_tensor(self, shape, dtype, *, share):
        import torch

        kind = getattr(torch, dtype)
        tensor = torch.zeros(shape, dtype=kind) if share else allocate(shape, kind)
        tensor.view(torch.uint8).copy_(
            torch.arange(tensor.nbytes, dtype=torch.int64)
            .remainder(251)
            .to(torch.uint8)
            .view(tensor.view(torch.uint8).shape)
        )
        if share:
            share_storage(tensor)
        return self._register(tensor, storage_span(tensor))

    def _register(self, owner, span):
        region = self.transport.register(span)
        self.arrays.append(owner)
        self.regions.append(region)
        return descriptor_to_json(region.descriptor)

    def deregister(self, index):
        self.transport.deregister(self.regions[index])

    def register_again(self, index):
        return self._register(self.arrays[index], self.regions[index].span)

    def read(self, index):
        span = self.regions[index].span
        return base64.b64encode(ctypes.string_at(span.address, span.nbytes)).decode()

    def fill(self, index, value):
        span = self.regions[index].span
        ctypes.memset(span.address, value, span.nbytes)

    def hole(self, index, offset, nbytes):
        """Unmap whole pages of a region that lies in ordinary memory."""
        libc = ctypes.CDLL(None)
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        start = (self.regions[index].span.address + offset + 4095) // 4096 * 4096
        assert libc.munmap(start, nbytes) == 0
        return start - self.regions[index].span.address

    def map_in_place(self, nbytes, fill=0):
        """Register ordinary anonymous memory of its own mapping, which ``hole`` may tear."""
        import mmap

        self.arrays.append(mmap.mmap(-1, nbytes))
        array = np.frombuffer(self.arrays[-1], dtype=np.uint8)
        array[:] = np.random.default_rng(fill).integers(0, 256, nbytes, dtype=np.uint8)
        return self._register(array, span_of(array))

    def connect(self, info):
        self.pollables.append((self.peers, self.transport.connect(info_from_json(info))))
        return len(self.pollables) - 1

    def prepare(self, peer, pairs):
        pairs = [(self.regions[i], descriptor_from_json(d)) for i, d in pairs]
        self.pollables.append((self.paths, self.transport.prepare(self.peers[peer], pairs)))
        return len(self.pollables) - 1

    def fence(self, peer):
        self.pollables.append(([], self.transport.fence(self.peers[peer])))
        return len(self.pollables) - 1

    def disconnect(self, peer):
        self.pollables.append(([], self.transport.disconnect(self.peers[peer])))
        return len(self.pollables) - 1

    def poll(self, number):
        kept, pollable = self.pollables[number]
        value, error = pollable.poll()
        if error is not None:
            return outcome(error)
        if value is None:
            return None
        kept.append(value)
        done = getattr(value, "done", None)
        return {"index": len(kept) - 1, "done": done, "reason": getattr(value, "reason", "")}

    def post(self, op, path, batch):
        self.attempts.append(self.transport.post(Op(op), self.paths[path], Batch(*batch)))
        return len(self.attempts) - 1

    def attempt(self, number):
        self.transport.progress()
        a = self.attempts[number]
        return {
            "state": a.state.value,
            "drained": a.drained,
            "accepted": a.accepted.value,
            "text": a.error.message if a.error else "",
            "code": a.error.code if a.error else None,
        }

    def hang_up(self, peer):
        """Break the connection without a word, as a bug or an exec would."""
        client = self.transport._clients[self.peers[peer]]
        self.transport._loop.call(client._link.close)

    def undump(self):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    def alive(self, peer):
        return self.peers[peer].alive

    def close(self):
        return len(self.transport.close())

    def facts(self):
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:kvxfer" in line for line in maps)
        return {
            "pid": os.getpid(),
            "namespaces": self.transport._process.namespaces,
            "mapped": mapped,
            "holders": len(self.transport._server._holders),
            "counters": self.transport.counters,
        }


def main():
    replies = os.dup(1)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    child = Child()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(child, request.pop("do"))(**request)}
        except KvxferError as error:
            answer = {"raised": outcome(error)}
        os.write(replies, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
