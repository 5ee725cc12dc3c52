"""Starting and talking to ``shm_child``, and waiting by polling against a deadline."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path as FilePath

import numpy as np

from kvxfer.backends.shm import ShmConfig, ShmTransport, allocate
from kvxfer.core.memory import span_of

LIMIT = 30.0
"""Seconds within which everything here must end, on a machine that does other things as well."""


class Raised(Exception):
    """A call in the child raised; ``facts`` as ``shm_child.outcome`` gives them."""

    def __init__(self, facts):
        super().__init__(facts["text"])
        self.facts = facts


class ChildProcess:
    """A ``shm_child``: every method of its ``Child`` can be called here."""

    def __init__(self, *, prefix=()):
        script = FilePath(__file__).with_name("shm_child.py")
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __getattr__(self, name):
        return lambda *args, **options: self.ask(name, *args, **options)

    def ask(self, name, *args, **options):
        assert not args, "arguments by keyword only"
        self.send(name, **options)
        line = self.process.stdout.readline()
        assert line, f"the child ended during {name}: {self.process.poll()}"
        answer = json.loads(line)
        if "raised" in answer:
            raise Raised(answer["raised"])
        return answer["result"]

    def send(self, name, **options):
        self.process.stdin.write(json.dumps({"do": name, **options}).encode() + b"\n")
        self.process.stdin.flush()

    def data(self, index):
        return np.frombuffer(base64.b64decode(self.ask("read", index=index)), dtype=np.uint8)

    def answer(self, number):
        return until(lambda: self.ask("poll", number=number), "an answer in the child")

    def connected(self, info):
        return self.answer(self.ask("connect", info=info))

    def prepared(self, peer, pairs):
        return self.answer(self.ask("prepare", peer=peer, pairs=pairs))

    def ended(self, number):
        def over():
            found = self.ask("attempt", number=number)
            return found if found["state"] != "pending" else None

        return until(over, "an attempt in the child")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Stop it, and return once it stands still."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until(lambda: _state(self.process.pid) == "T", "the child stopped")

    def resume(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def dispose(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _state(pid):
    text = FilePath(f"/proc/{pid}/stat").read_text()
    return text[text.rindex(")") + 2]


def until(condition, what, limit=LIMIT):
    """The first true value of ``condition``."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {limit} s"
        time.sleep(0.0005)
    return found


def answer(pollable, *progressing):
    """The value of a pollable; its error is raised."""

    def answered():
        for transport in progressing:
            transport.progress()
        value, error = pollable.poll()
        if error is not None:
            raise error
        return value

    return until(answered, "an answer")


def error_of(pollable):
    """The error of a pollable."""

    def answered():
        value, error = pollable.poll()
        assert value is None, f"no error but {value!r}"
        return error

    return until(answered, "an error")


def over(attempts):
    """Wait until the attempts are terminal and drained."""
    until(lambda: all(a.terminal and a.drained for a in attempts), "attempts over")
    return attempts


def noise(seed, nbytes):
    """The bytes that a child's ``fill=seed`` gives."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Near:
    """A transport in this process, with memory.

    Copies are for its threads unless ``inline_nbytes`` says otherwise: so a test can hold them.
    """

    def __init__(self, **options):
        self.transport = ShmTransport(ShmConfig(**{"inline_nbytes": 0, **options}))
        self.arrays = []
        self.regions = []

    def register(self, nbytes, *, mapped=True, **options):
        array = allocate(nbytes, np.uint8, **options) if mapped else np.zeros(nbytes, np.uint8)
        self.arrays.append(array)
        self.regions.append(self.transport.register(span_of(array)))
        return array, self.regions[-1]

    def connect(self, info):
        return answer(self.transport.connect(info))

    def prepare(self, peer, pairs):
        return answer(self.transport.prepare(peer, pairs))
