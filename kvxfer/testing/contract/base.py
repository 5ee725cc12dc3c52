"""What a backend author fills in, and what decides which tests are skipped: capabilities alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from kvxfer.core.capabilities import Capabilities
from kvxfer.core.memory import MemoryKind
from kvxfer.core.transport import Path, Transport
from kvxfer.core.verdict import Op
from kvxfer.testing.contract.rig import Rig
from kvxfer.testing.memory import Memory, load, pattern
from kvxfer.testing.pair import Pair
from kvxfer.testing.peer_process import PeerProcess
from kvxfer.testing.station import Buffer, Far, Station, open_transport

__all__ = ["IN_PROCESS", "TWO_PROCESS", "ContractBase", "Rig", "requires", "two_process"]

F = TypeVar("F", bound=Callable[..., object])

IN_PROCESS = "in_process"
TWO_PROCESS = "two_process"

LARGE = 4 << 20
"""Bytes of a transfer that an asynchronous engine cannot finish in no time."""


def requires(
    reason: str, holds: Callable[[Capabilities, type[ContractBase]], bool]
) -> Callable[[F], F]:
    """Skip the test where ``holds`` is false of the transport's capabilities.

    The suite's class is given for its memory kinds, nothing else.
    """

    def mark(function: F) -> F:
        conditions = getattr(function, "_requires", ())
        function._requires = (*conditions, (reason, holds))  # type: ignore[attr-defined]
        return function

    return mark


def two_process(function: F) -> F:
    """The test needs a peer that can be killed or stopped."""
    function._mode = TWO_PROCESS  # type: ignore[attr-defined]
    return function


class ContractBase:
    """Set ``backend`` in a subclass whose name begins with ``Test``; the rest has defaults."""

    backend: ClassVar[str] = ""
    """Name of an installed plug-in, or ``module:attribute`` of what returns a transport."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments for it. JSON values, since the peer process gets them too."""
    peer_options: ClassVar[Mapping[str, Any] | None] = None
    """The far side's keyword arguments, where they differ."""
    modes: ClassVar[Sequence[str]] = (IN_PROCESS, TWO_PROCESS)
    """Where the far side lives. Two processes are required unless the engine is process-local."""
    memory: ClassVar[str] = "kvxfer.testing.memory:HostMemory"
    """``module:attribute`` of a class like ``kvxfer.testing.memory.Memory``."""
    near_kind: ClassVar[MemoryKind] = MemoryKind.DRAM
    far_kind: ClassVar[MemoryKind] = MemoryKind.DRAM
    peer_env: ClassVar[Mapping[str, str]] = {}
    """Changes to the environment of the peer process."""
    timeout: ClassVar[float] = 20.0
    """Seconds within which everything that must end ends, a lost peer included."""
    quick: ClassVar[float] = 0.1
    """Seconds within which every call that must not wait returns, on a machine that is idle."""

    _spares: ClassVar[dict[type, list[PeerProcess]]] = {}
    _known: ClassVar[dict[type, Capabilities]] = {}

    def make_transport(self) -> Transport:
        """A new transport, bound and reachable, for the near side or an in-process far side."""
        return open_transport(self.backend, self.options)

    def make_far(self, mode: str, pair: Pair) -> Far:
        """A new far side."""
        options = self.options if self.peer_options is None else self.peer_options
        if mode == IN_PROCESS:
            if self.peer_options is None:
                return Station(self.make_transport(), self.memory_class())
            return Station(open_transport(self.backend, options), self.memory_class())
        spares = self._spares.setdefault(type(self), [])
        if spares:
            peer = spares.pop()
            peer.reopen(pump=pair.near.pump)
            return peer
        return PeerProcess(
            self.backend,
            options=options,
            memory=self.memory,
            env=self.peer_env,
            pump=pair.near.pump,
        )

    @contextlib.contextmanager
    def make_pair(self, mode: str) -> Iterator[Pair]:
        """Two sides; closed afterwards, whatever happened."""
        pair = Pair(Station(self.make_transport(), self.memory_class()), self.timeout)
        try:
            pair.fars.append(self.make_far(mode, pair))
            yield pair
        finally:
            spares = [far for far in pair.fars if isinstance(far, PeerProcess) and far.alive]
            try:
                for far in spares:
                    far.close()
            except BaseException:
                spares = []
                raise
            finally:
                pair.fars = [far for far in pair.fars if far not in spares]
                pair.dispose()
            self._spares.setdefault(type(self), []).extend(spares)

    @classmethod
    def teardown_class(cls) -> None:
        """End the peer processes that the tests of this class shared."""
        for peer in cls._spares.pop(cls, []):
            peer.dispose()

    @contextlib.contextmanager
    def hold(self, pair: Pair) -> Iterator[bool]:
        """Keep what is posted inside from ending, if the engine can be made to; yields whether.

        Without it the tests of unfinished attempts use large transfers, which a fast engine may
        finish first.
        """
        yield False

    # ---- which tests run -------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "mode" in metafunc.fixturenames:
            only = getattr(metafunc.function, "_mode", None)
            metafunc.parametrize("mode", self.modes if only is None else (only,))
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", self._ops(), ids=lambda op: op.value)

    @classmethod
    def memory_class(cls) -> type[Memory]:
        """The class that ``memory`` names."""
        found: type[Memory] = load(cls.memory)
        return found

    def capabilities(self) -> Capabilities:
        """Those of the transport under test."""
        if type(self) not in self._known:
            transport = self.make_transport()
            self._known[type(self)] = transport.capabilities
            transport.close()
        return self._known[type(self)]

    @classmethod
    def usable(cls, caps: Capabilities) -> list[Op]:
        """The ops that work between the memories of this suite."""
        return [op for op in cls._ops() if caps.supports(op, cls.near_kind, cls.far_kind)]

    @classmethod
    def _ops(cls) -> list[Op]:
        return [op for op in Op if op in cls.memory_class().ops]

    @classmethod
    def skip_reason(
        cls, function: Callable[..., object], caps: Capabilities, mode: str, op: Op | None
    ) -> str:
        """Why a test does not apply to a transport with these capabilities; empty if it does."""
        if mode == TWO_PROCESS and caps.process_local:
            return "process_local: only peers inside the same process"
        if op is not None and not caps.supports(op, cls.near_kind, cls.far_kind):
            return f"ops: no {op.value} of {cls.near_kind.value} with {cls.far_kind.value}"
        for reason, holds in getattr(function, "_requires", ()):
            if not holds(caps, cls):
                return str(reason)
        return ""

    @classmethod
    def skips(cls, caps: Capabilities) -> dict[str, str]:
        """Every test that these capabilities rule out, as ``name[mode-op]``, with the reason."""
        found = {}
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("test_"):
                continue
            only = getattr(function, "_mode", None)
            takes_op = "op" in inspect.signature(function).parameters
            ops: Sequence[Op | None] = cls._ops() if takes_op else [None]
            for mode in cls.modes if only is None else (only,):
                for op in ops:
                    reason = cls.skip_reason(function, caps, mode, op)
                    if reason:
                        found[f"{name}[{mode}-{op.value}]" if op else f"{name}[{mode}]"] = reason
        return found

    @pytest.fixture
    def pair(self, mode: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
        caps = self.capabilities()
        op = request.getfixturevalue("op") if "op" in request.fixturenames else None
        if reason := self.skip_reason(request.function, caps, mode, op):
            pytest.skip(f"by capability: {reason}")
        assert caps.process_local or TWO_PROCESS in self.modes, (
            "this engine reaches other processes: modes must include two_process"
        )
        with self.make_pair(mode) as pair:
            yield pair
            stray = [a for a in pair.reports if not any(a is p for p in pair.posted)]
            assert not stray, f"progress reported attempts that nobody posted: {stray}"

    # ---- helpers ---------------------------------------------------------------------------

    def rig(
        self,
        pair: Pair,
        near: Sequence[int],
        far: Sequence[int] | None = None,
        *,
        side: Far | None = None,
        seed: int = 0,
    ) -> Rig:
        """Register, fill, connect and prepare. Sizes in bytes; ``side`` defaults to the first."""
        side = side or pair.far
        peer = pair.connect(side)
        buffers = self.buffers(pair, side, near, far)
        path = pair.prepare(peer, buffers)
        return self.fill(pair, side, buffers, path, seed)

    def buffers(
        self, pair: Pair, side: Far, near: Sequence[int], far: Sequence[int] | None = None
    ) -> list[tuple[Buffer, Buffer]]:
        """Registered buffers on both sides."""
        return [
            (
                pair.near.register(here, kind=self.near_kind),
                side.register(there, kind=self.far_kind),
            )
            for here, there in zip(near, far or near, strict=True)
        ]

    def fill(
        self,
        pair: Pair,
        side: Far,
        buffers: Sequence[tuple[Buffer, Buffer]],
        path: Path,
        seed: int = 0,
    ) -> Rig:
        """Give every buffer contents of its own."""
        near_bytes, far_bytes = [], []
        for i, (here, there) in enumerate(buffers):
            ours, theirs = seed * 1000 + 2 * i, seed * 1000 + 2 * i + 1
            near_bytes.append(pattern(ours, here.nbytes))
            far_bytes.append(pattern(theirs, there.nbytes))
            pair.near.fill(here, ours)
            side.fill(there, theirs)
        return Rig(
            pair=pair,
            far=side,
            buffers=buffers,
            path=path,
            near_bytes=near_bytes,
            far_bytes=far_bytes,
        )
