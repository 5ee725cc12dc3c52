"""``python -m kvxfer.cli.doctor.child OPTIONS``: looks at one backend, in a process of its own.

What it begins and finds goes to the file descriptor ``report``, a line of JSON each, at once: an
engine may end the process.  Standard output and error belong to the engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.core.hostcheck import Finding, HostCheck, HostQuery, Level, size_text
from kvxfer.errors import KvxferError, MissingDependencyError

__all__ = ["main"]

_BAD = (Level.ERROR, Level.MISSING)


class _Look:
    """Reports as it goes. ``wrong`` once something was found that makes the rest pointless."""

    def __init__(self, backend: str, report: Callable[[dict[str, Any]], None]) -> None:
        self.backend = backend
        self.wrong = False
        self.missing = False
        self._report = report

    def check(self, name: str, findings: Callable[[], Sequence[Finding]]) -> None:
        self._report({"begin": name})
        try:
            found = list(findings())
        except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything
            found = [self._raised(error)]
        for each in found:
            self.wrong = self.wrong or each.level in _BAD
            self.missing = self.missing or each.level is Level.MISSING
            words = {"level": each.level.value, "what": each.what, "next_step": each.next_step}
            self._report({**words, "check": each.check or name})

    def finding(self, level: Level, what: str, next_step: str = "") -> Finding:
        return Finding(backend=self.backend, level=level, what=what, next_step=next_step)

    def _raised(self, error: Exception) -> Finding:
        if not isinstance(error, KvxferError):
            return self.finding(Level.ERROR, f"{type(error).__name__}: {error}")
        absent = isinstance(error, MissingDependencyError)
        level = Level.MISSING if absent else Level.ERROR
        return self.finding(level, error.message, error.next_step)


def look(backend: str, query: HostQuery, report: Callable[[dict[str, Any]], None]) -> None:
    """All checks of a backend, from importing it to moving bytes with it."""
    from kvxfer.core.plugins import load_backend

    look = _Look(backend, report)
    own: list[HostCheck] = []

    def load() -> list[Finding]:
        own.extend(load_backend(backend).host_checks())
        return []

    look.check("plug-in", load)
    for each in own:
        if look.missing:
            return
        look.check(each.name, lambda each=each: each.judge(each.gather(query)))  # type: ignore[misc]
    if not look.wrong:
        look.check("start", lambda: _start(look, query))
    if not look.wrong:
        look.check("transfer", lambda: _transfer(look, query))


def _start(look: _Look, query: HostQuery) -> list[Finding]:
    """Start the engine; what it promises, and which ports it opens."""
    from kvxfer.core.capabilities import Capabilities, DataPathAuth
    from kvxfer.core.control_bind import own_ports
    from kvxfer.core.plugins import create_transport

    transport = create_transport(look.backend, dict(query.options))
    try:
        ports = own_ports()
        can: Capabilities = transport.capabilities
    finally:
        transport.close()
    kinds = sorted({f"{op.value} {a.value}" for op, a, b in can.ops if a is b})
    depth = "as many pieces as come" if can.credits is None else f"{can.credits} pieces at once"
    fence = f"fence: {can.fence.value}"
    what = f"starts; {', '.join(kinds)}; a queue takes {depth}; {fence}"
    found = [look.finding(Level.OK, what)]
    if can.data_path_auth is DataPathAuth.NONE and not can.process_local:
        listed = ", ".join(map(str, ports)) or "that we cannot see"
        found.append(
            look.finding(
                Level.NOTE,
                f"its own TCP ports ({listed} in this try) admit whoever reaches them",
                "let only workers reach that network; with keys on, say so: "
                "AgentConfig(data_network_trusted=True)",
            )
        )
    return found


_TOKENS, _HEADS, _SIZE, _BLOCKS = 16, 8, 128, 16


def _transfer(look: _Look, query: HostQuery) -> list[Finding]:
    """Two agents in this process move a megabyte; every byte is compared."""
    import numpy as np

    from kvxfer.agent import Agent, AgentConfig
    from kvxfer.core.layout import Blocks, KVLayout, KVSpec
    from kvxfer.core.plugins import create_transport

    shape = (2, _BLOCKS, _TOKENS, _HEADS, _SIZE)
    spec = KVSpec(tokens_per_block=_TOKENS, heads=_HEADS, head_size=_SIZE, planes=2)
    caches = [np.zeros(shape, np.float16) for _ in range(2)]
    if look.backend == "shm":
        from kvxfer.backends.shm import allocate

        caches = [allocate(shape, "f2") for _ in range(2)]
    source, target = caches
    source[...] = np.random.default_rng(0).random(shape)
    config = AgentConfig(keeper=None)
    # A fixed port is for one worker, and was tried at the start; here are two.
    options = {name: value for name, value in query.options.items() if name != "port"}

    def agent(cache: Any) -> Agent:
        made = Agent(create_transport(look.backend, options), config=config)
        made.register_kv_caches({"layer": cache}, KVLayout.from_tensor(cache, spec))
        return made

    with agent(source) as prefill, agent(target) as decode:
        blocks = Blocks.at(0, range(_BLOCKS))
        handle = decode.pull(prefill.hold("doctor", blocks), blocks)
        decode.wait(handle, timeout=30)
        if handle.error is not None:
            return [
                look.finding(Level.ERROR, f"a READ of {size_text(source.nbytes)}: {handle.error}")
            ]
        prefill.drain(timeout=10)
    if not np.array_equal(source, target):
        return [
            look.finding(
                Level.ERROR, f"{size_text(source.nbytes)} was read, and some bytes are wrong"
            )
        ]
    return [look.finding(Level.OK, f"{size_text(source.nbytes)} was read, and every byte is right")]


def main(argv: Sequence[str]) -> None:
    """See the module."""
    options = json.loads(argv[0])
    with os.fdopen(options["report"], "wb", buffering=0) as report:
        look(
            options["backend"],
            HostQuery(**options["query"]),
            lambda line: (report.write(json.dumps(line).encode() + b"\n"), None)[1],
        )
        sys.stdout.flush()
        # Not through the interpreter's end: an engine that crashes there was found to work.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
