"""What goes wrong, and when: plans for ``FaultyTransport``. Deterministic, no I/O."""

from __future__ import annotations

import enum
import random
import threading
from collections.abc import Mapping, Sequence

import attrs
from attrs import validators as v

from kvxfer.core.verdict import EngineError
from kvxfer.errors import ConfigError, TransportError

__all__ = ["Fault", "FaultKind", "FaultPlan", "FaultPoint", "Injection"]


class FaultPoint(enum.Enum):
    """Where a fault can strike."""

    CONNECT = "connect"
    PREPARE = "prepare"
    POST = "post"
    FENCE = "fence"
    """The answer of ``fence`` and of ``disconnect``."""


class FaultKind(enum.Enum):
    """What happens. All but the last three are for ``FaultPoint.POST`` only."""

    REFUSE = "refuse"
    """``post`` raises; nothing is posted."""
    REFUSE_VALUE = "refuse_value"
    """``post`` returns an attempt that is FAILED with ``accepted`` NONE; nothing is posted."""
    PARTIAL = "partial"
    """``post`` returns an attempt that is FAILED with ``accepted`` UNKNOWN; a part of the pieces
    lands all the same.  Drained once they have landed and the fault is released."""
    FAIL_DRAINED = "fail_drained"
    """A part of the pieces lands; then the attempt fails, with the proof that no more will."""
    LATE_REPORT = "late_report"
    """The bytes land at once; the attempt stays PENDING until the fault is released."""
    DUPLICATE = "duplicate"
    """``progress`` reports the end of the attempt twice."""
    PEER_GONE = "peer_gone"
    """The peer dies with this post: it and all others of that incarnation fail, and so do later
    posts and connects."""
    FAIL = "fail"
    """Post: a part of the pieces lands, the attempt fails without a proof, and is drained once the
    fault is released.  Elsewhere: the answer is an error; a fence cannot be had."""
    LATE = "late"
    """Post: the engine gets the pieces only when the fault is released; they land then, even if
    their owner has given up.  Elsewhere: the answer comes when the fault is released."""
    NEVER = "never"
    """Post: the bytes land, but the attempt stays PENDING for ever.  Elsewhere: no answer comes."""


_ANYWHERE = frozenset({FaultKind.FAIL, FaultKind.LATE, FaultKind.NEVER})


@attrs.frozen(kw_only=True)
class Fault:
    """One thing that goes wrong.

    ``error`` is what the engine says; by default the wrapped transport's name and a message that
    begins with "injected".  ``raises`` is the exception of REFUSE, and the error of a failed
    connect or prepare.  ``after`` releases the fault that many seconds later, by the transport's
    clock; None leaves it to ``FaultyTransport.release``.  ``fraction`` of the pieces, rounded
    down, land where a part of them does; with ``lands_late`` only when the fault is released.
    """

    kind: FaultKind = attrs.field(validator=v.instance_of(FaultKind))
    error: EngineError | None = attrs.field(
        default=None, validator=v.optional(v.instance_of(EngineError))
    )
    raises: type[TransportError] | None = None
    after: float | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    fraction: float = attrs.field(default=0.5, validator=v.and_(v.ge(0), v.le(1)))
    lands_late: bool = False

    def engine_error(self, backend: str) -> EngineError:
        """``error``, or a text of our own."""
        return self.error or EngineError(backend=backend, message=f"injected {self.kind.value}")

    def exception(self, backend: str, default: type[TransportError]) -> TransportError:
        """What is raised, or given as the answer."""
        engine = self.engine_error(backend)
        return (self.raises or default)(engine.message, engine=engine)


@attrs.frozen(kw_only=True)
class Injection:
    """One fault that struck. ``at`` is clock seconds; ``number`` counts the calls at that point."""

    at: float
    point: FaultPoint
    number: int
    fault: Fault


def _check_points(plan: Mapping[FaultPoint, Sequence[Fault | None]]) -> None:
    for point, faults in plan.items():
        for fault in faults:
            if fault is None or point is FaultPoint.POST or fault.kind in _ANYWHERE:
                continue
            raise ConfigError(
                f"a {fault.kind.value} fault cannot strike at {point.value}",
                next_step=f"use one of {sorted(k.value for k in _ANYWHERE)} there",
            )


class FaultPlan:
    """Decides, call by call, what goes wrong. Any thread.

    ``posts``, ``connects``, ``prepares`` and ``fences`` are scripts: entry ``i`` strikes the
    ``i``-th call, None lets it through.  After a script's end, ``chances`` gives the probability
    of each fault per call, drawn from ``rng``: equal seeds and equal calls give equal faults.

    Raises:
        ConfigError: a fault cannot strike where it was planned, probabilities are negative or add
            up to more than 1, or ``chances`` came without ``rng``.
    """

    def __init__(
        self,
        *,
        posts: Sequence[Fault | None] = (),
        connects: Sequence[Fault | None] = (),
        prepares: Sequence[Fault | None] = (),
        fences: Sequence[Fault | None] = (),
        chances: Mapping[FaultPoint, Mapping[Fault, float]] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._scripts = {
            FaultPoint.POST: tuple(posts),
            FaultPoint.CONNECT: tuple(connects),
            FaultPoint.PREPARE: tuple(prepares),
            FaultPoint.FENCE: tuple(fences),
        }
        self._chances = {point: dict(faults) for point, faults in (chances or {}).items()}
        if self._chances and rng is None:
            raise ConfigError("chances need rng, a random.Random with a seed of yours")
        _check_points(self._scripts)
        _check_points({point: tuple(faults) for point, faults in self._chances.items()})
        for point, faults in self._chances.items():
            if any(p < 0 for p in faults.values()) or sum(faults.values()) > 1 + 1e-9:
                raise ConfigError(
                    f"the chances at {point.value} are {list(faults.values())}: they must not be "
                    "negative nor add up to more than 1"
                )
        self._rng = rng or random.Random(0)
        self._calls = dict.fromkeys(FaultPoint, 0)
        self._lock = threading.Lock()

    def draw(self, point: FaultPoint) -> tuple[int, Fault | None]:
        """The number of this call at ``point``, from 0, and what happens to it."""
        with self._lock:
            number = self._calls[point]
            self._calls[point] += 1
            script = self._scripts[point]
            if number < len(script):
                return number, script[number]
            faults = self._chances.get(point)
            if not faults:
                return number, None
            x = self._rng.random()
            for fault, chance in faults.items():
                x -= chance
                if x < 0:
                    return number, fault
            return number, None
