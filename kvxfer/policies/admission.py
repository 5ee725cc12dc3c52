"""How much may be in flight: credits, so that a post neither waits in the engine nor is refused.

An engine counts the pieces of a send queue and refuses what does not fit.  An ``AdmissionPolicy``
says how many of ours may be in it at a time; each queue gets a ``CreditLimit`` of its own.
``FixedAdmission`` goes by what the engine says of itself, ``AimdAdmission`` finds out, and
``NoAdmission`` lets the engine refuse and the retry policy deal with it.

Whose turn it is when credits are short is decided by the ``CreditQueue`` (``credit_queue``).
Nothing here waits, reads a clock or knows a transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import attrs

from kvxfer.core.checks import at_least
from kvxfer.errors import ConfigError

__all__ = ["AdmissionPolicy", "AimdAdmission", "CreditLimit", "FixedAdmission", "NoAdmission"]

_MOST = 65535
"""Where ``AimdAdmission`` begins if neither it nor the engine names a limit: the deepest send queue
that a verbs device can have."""


class CreditLimit:
    """The credits of one queue. One thread at a time.

    Attributes:
        limit: pieces that may be in flight; None: no bound.
        largest: most pieces of one call; None: no bound. Larger ones are cut.
        epoch: rises whenever ``limit`` falls: a refusal of what was granted before says nothing
            about the new limit.
    """

    __slots__ = ("epoch", "largest", "limit")

    def __init__(self, limit: int | None, largest: int | None) -> None:
        self.limit = limit
        self.largest = largest
        self.epoch = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.limit}, calls of at most {self.largest}>"

    def succeeded(self, pieces: int) -> None:
        """That many pieces have arrived."""

    def refused(self, epoch: int) -> None:
        """The engine had no room for a call that was granted in ``epoch``."""


class _AimdLimit(CreditLimit):
    __slots__ = ("_arrived", "_most", "_policy")

    def __init__(self, policy: AimdAdmission, start: int, most: int) -> None:
        self._policy = policy
        self._most = most
        self._arrived = 0
        super().__init__(start, _part_of(start, policy.share))

    def succeeded(self, pieces: int) -> None:
        assert self.limit is not None
        self._arrived += pieces
        if self._arrived >= self.limit:  # once per full queue, like once per round trip
            self._arrived = 0
            self._set(min(self._most, self.limit + self._policy.increase))

    def refused(self, epoch: int) -> None:
        if epoch != self.epoch:
            return  # of the same overload as the last decrease
        assert self.limit is not None
        self.epoch += 1
        self._arrived = 0
        least = min(self._policy.least, self._most)
        self._set(max(least, int(self.limit * self._policy.decrease)))

    def _set(self, limit: int) -> None:
        self.limit = limit
        self.largest = _part_of(limit, self._policy.share)


def _part_of(limit: int, share: float) -> int:
    return max(1, int(limit * share))


def _none_or_count(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        at_least(1)(instance, attribute, value)


def _fraction(
    instance: object, attribute: attrs.Attribute[Any], value: object, *, one: bool
) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (0 < value <= 1 if one else 0 < value < 1)
    ):
        raise ConfigError(
            f"{type(instance).__name__}.{attribute.name} must be above 0 and "
            f"{'at most' if one else 'below'} 1, not {value!r}"
        )


def _share(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    _fraction(instance, attribute, value, one=True)


def _factor(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    _fraction(instance, attribute, value, one=False)


class AdmissionPolicy(ABC):
    """A strategy: immutable, for any number of queues and agents.

    ``most_waiting`` bounds the calls that wait for one queue; a part that would exceed it fails
    with RESOURCE at once.
    """

    most_waiting: int

    @abstractmethod
    def begin(self, capability: int | None) -> CreditLimit:
        """The credits of a queue that is used for the first time.

        ``capability`` is ``Capabilities.credits``: what the engine takes before it refuses, in
        pieces; None where it does not refuse.
        """


@attrs.frozen(kw_only=True)
class FixedAdmission(AdmissionPolicy):
    """As many pieces as the engine takes, or fewer. Without a limit nothing is held back.

    Attributes:
        credits: pieces per queue; None goes by the engine. The engine's own limit is never
            exceeded.
        share: the largest part of the credits that one call may take. With half of them the next
            call is in the queue before the last has left it, so that the wire never idles.
        most_waiting: see ``AdmissionPolicy``.

    Raises:
        ConfigError: names the field and the value.
    """

    credits: int | None = attrs.field(default=None, validator=_none_or_count)
    share: float = attrs.field(default=0.5, validator=_share)
    most_waiting: int = attrs.field(default=65536, validator=at_least(1))

    def begin(self, capability: int | None) -> CreditLimit:
        known = [n for n in (self.credits, capability) if n is not None]
        if not known:
            return CreditLimit(None, None)
        return CreditLimit(min(known), _part_of(min(known), self.share))


@attrs.frozen(kw_only=True)
class AimdAdmission(AdmissionPolicy):
    """Finds the limit: additive increase on success, multiplicative decrease on BACKPRESSURE.

    For queues that somebody else fills as well, or whose engine does not say how deep they are.
    The limit rises by ``increase`` whenever as many pieces as it allows have arrived, and falls by
    the factor ``decrease`` once per overload: refusals of calls that were granted before the last
    decrease do not count.

    Attributes:
        least, most: bounds of the limit, in pieces. ``most`` None: the engine's own limit, 65535
            where it names none.
        start: the limit at first; None: ``most``.
        increase: pieces.
        decrease: a factor between 0 and 1.
        share: the largest part of the current limit that one call may take.
        most_waiting: see ``AdmissionPolicy``.

    Raises:
        ConfigError: names the field and the value.
    """

    least: int = attrs.field(default=16, validator=at_least(1))
    most: int | None = attrs.field(default=None, validator=_none_or_count)
    start: int | None = attrs.field(default=None, validator=_none_or_count)
    increase: int = attrs.field(default=16, validator=at_least(1))
    decrease: float = attrs.field(default=0.5, validator=_factor)
    share: float = attrs.field(default=0.5, validator=_share)
    most_waiting: int = attrs.field(default=65536, validator=at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.most is not None and self.most < self.least:
            raise ConfigError(
                f"AimdAdmission.most is {self.most}, below least, which is {self.least}"
            )

    def begin(self, capability: int | None) -> CreditLimit:
        known = [n for n in (self.most, capability) if n is not None]
        most = min(known) if known else _MOST
        start = most if self.start is None else self.start
        return _AimdLimit(self, max(min(self.least, most), min(start, most)), most)


@attrs.frozen(kw_only=True)
class NoAdmission(AdmissionPolicy):
    """Nothing is held back: the engine refuses, and the retry policy posts again.

    Calls are still cut to what the engine takes at most: a larger one would never get in.
    """

    most_waiting: int = attrs.field(default=65536, validator=at_least(1))
    """See ``AdmissionPolicy``."""

    def begin(self, capability: int | None) -> CreditLimit:
        return CreditLimit(None, capability)
