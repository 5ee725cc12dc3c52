"""What to make of an engine's words: a registry of rules.

Engines differ in codes, texts and exceptions, and change them between releases.  So rules are data:
each names what it matches and the verdict, and stands beside a captured sample (see ``rules``).
The most specific rule that matches wins (``Rule.rank``), then the higher priority, then the one
registered first.  What no rule matches is UNKNOWN: not retried, not taken for drained, counted,
and kept as a sample, so that the table can be extended.

A plug-in of the group ``kvxfer.classifiers`` is a callable that returns ``Rule`` and ``RuleTable``
objects; ``add`` and ``extend`` do the same at run time.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.verdict import Action, EngineError, Op, Verdict
from kvxfer.errors import ConfigError, ErrorKind, KvxferError, PluginError
from kvxfer.policies.rule import ANY, Proof, Rule, RuleTable

if TYPE_CHECKING:
    from kvxfer.core.attempt import Attempt
    from kvxfer.core.plugins import PluginCatalog

__all__ = ["ClassifierRegistry", "Proof", "Rule", "RuleTable", "UNMATCHED", "Unmatched"]

_log = logging.getLogger(__name__)

UNMATCHED = "unmatched"
"""``Verdict.rule`` where no rule matched."""

_UNKNOWN = Verdict(
    kind=ErrorKind.UNKNOWN, action=Action.FAIL, retryable=False, drained=False, rule=UNMATCHED
)

_CACHE_LIMIT = 1024
"""Verdicts remembered. Messages carry numbers, so the cache is emptied when it is full."""

_CACHED_LENGTH = 512
"""Longer messages are not remembered: 1024 of them are half a megabyte at most."""

_SAMPLE_LIMIT = 32
"""Different unmatched errors kept; more are counted only."""

_SAMPLE_LENGTH = 240


@attrs.frozen(kw_only=True)
class Unmatched:
    """An error that no rule matched, and how often one like it came (numbers do not count)."""

    error: EngineError
    count: int


@attrs.frozen
class _Candidate:
    """A rule whose backend and code fit; ``test`` is what is left to ask, where that is known."""

    rule: Rule
    test: Callable[[str], bool] | None

    @classmethod
    def of(cls, rule: Rule) -> _Candidate:
        simple = type(rule) is Rule and rule.exception is None and rule.ops is None
        return cls(rule, _test(rule.pattern) if simple else None)

    def matches(self, error: EngineError, message: str, op: Op | None) -> bool:
        if self.test is not None:
            return self.test(message)
        return self.rule.matches(error, message, op)


def _test(pattern: str | re.Pattern[str] | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda _: True
    if isinstance(pattern, str):
        return lambda message: message.startswith(pattern)
    match = pattern.match
    return lambda message: match(message) is not None


_Candidates = tuple[_Candidate, ...]


@attrs.frozen
class _Snapshot:
    """What one state of the registry answers from; replaced, never changed, but for the cache."""

    rules: tuple[Rule, ...]
    normalise: Mapping[str, Callable[[str], str]]
    index: Mapping[str, Mapping[tuple[int | None, bool], _Candidates]]
    cache: dict[object, Verdict] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls, rules: tuple[Rule, ...], normalise: Mapping[str, Callable[[str], str]]
    ) -> _Snapshot:
        index = {
            backend: _by_code([rule for rule in rules if rule.backend in {backend, ANY}])
            for backend in {ANY, *(rule.backend for rule in rules)}
        }
        return cls(rules, normalise, index)

    def candidates(self, error: EngineError) -> _Candidates:
        by_code = self.index.get(error.backend) or self.index[ANY]
        raised = bool(error.exception)
        return by_code.get((error.code, raised)) or by_code[None, raised]


def _by_code(rules: list[Rule]) -> dict[tuple[int | None, bool], _Candidates]:
    """The rules that can match each code, for errors with and without an exception.

    The code None stands for every code that no rule names.
    """
    return {
        (code, raised): tuple(
            _Candidate.of(rule)
            for rule in rules
            if rule.code in {None, code} and (raised or rule.exception is None)
        )
        for code in {None, *(rule.code for rule in rules)}
        for raised in (True, False)
    }


class ClassifierRegistry:
    """Rules, and what they say. Any thread may use it.

    A verdict takes about 1 us for an error seen before, some 30 us with the built-in rules for a
    new one.
    """

    def __init__(self, items: Iterable[Rule | RuleTable] = ()) -> None:
        self._lock = threading.Lock()
        self._state = _Snapshot.of((), {})
        self._unmatched: dict[object, Unmatched] = {}
        self._unclassified = 0
        self._broken: dict[str, int] = {}
        self._problems: list[str] = []
        self.extend(items)

    @classmethod
    def from_plugins(cls, catalog: PluginCatalog | None = None) -> ClassifierRegistry:
        """All installed rules, ours first. A plug-in that fails is left out: see ``problems``."""
        from kvxfer.core.plugins import PluginGroup, default_catalog

        catalog = catalog or default_catalog()
        registry = cls()
        for info in catalog.plugins(PluginGroup.CLASSIFIERS):
            origin = f"classifier plug-in {info.name!r} of {info.distribution}"
            if info.error:
                registry._report(f"{origin}: {info.error}")
                continue
            try:
                items = tuple(catalog.load(PluginGroup.CLASSIFIERS, info.name)())
            except PluginError as error:
                registry._report(str(error))
                continue
            except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
                registry._report(f"{origin} raised {type(error).__name__}: {error}")
                continue
            for item in items:
                try:
                    registry.extend([item])
                except ConfigError as error:
                    registry._report(f"{origin}: {error}")
        return registry

    # ---- rules -------------------------------------------------------------------------------

    def add(self, rule: Rule) -> None:
        """Register one rule. It loses against equally specific ones unless its priority is higher.

        Raises:
            ConfigError: no ``Rule``, or its name is taken.
        """
        self.extend([rule])

    def extend(self, items: Iterable[Rule | RuleTable]) -> None:
        """Register rules and tables, all or none.

        Raises:
            ConfigError: an item of another type, a name that is taken, or a second ``normalise``
                for one backend.
        """
        with self._lock:
            rules = {rule.name: rule for rule in self._state.rules}
            normalise = dict(self._state.normalise)
            for item in items:
                for rule in _rules_of(item):
                    if rule.name in rules:
                        raise ConfigError(f"there is a rule {rule.name!r} already")
                    rules[rule.name] = rule
                if isinstance(item, RuleTable) and item.normalise is not None:
                    if normalise.get(item.backend, item.normalise) is not item.normalise:
                        raise ConfigError(f"messages of {item.backend!r} are normalised already")
                    normalise[item.backend] = item.normalise
            self._state = _Snapshot.of(tuple(rules.values()), normalise)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in the order of registration."""
        return self._state.rules

    # ---- verdicts ----------------------------------------------------------------------------

    def classify(
        self, error: EngineError, *, op: Op | None = None, atomic_refusal: bool = False
    ) -> Verdict:
        """The verdict on ``error``. Never raises.

        ``Verdict.drained`` speaks of the one engine call that the error ended.  An attempt that
        may have made several knows better: use ``classify_attempt``.

        Args:
            error: what the engine said.
            op: the direction of the call; None where there was none.
            atomic_refusal: a refused call has posted nothing (``Capabilities.atomic_refusal``).
        """
        verdict = self._judge(error, op, atomic_refusal)
        if verdict is _UNKNOWN:
            self._count_unmatched(error)
        return verdict

    def classify_attempt(self, attempt: Attempt) -> Verdict:
        """The verdict on a failed attempt, drained exactly if the attempt is.

        Its backend has settled it, and knows about every engine call in it.
        """
        error = attempt.error
        if error is None:
            error = EngineError(backend=attempt.path.peer.info.transport)
        verdict = self.classify(error, op=attempt.op)
        if verdict.drained == attempt.drained:
            return verdict
        return attrs.evolve(verdict, drained=attempt.drained)

    def classify_exception(
        self, error: BaseException, backend: str, op: Op | None = None
    ) -> Verdict:
        """The verdict on an exception out of a transport.

        What the engine said (``TransportError.engine``) counts first, then the exception's own
        class and text.  An exception of ours means that nothing was posted, so its verdict is
        drained; of any other only the rule can tell.
        """
        described = EngineError.of(backend, error)
        engine = getattr(error, "engine", None)
        said = engine if isinstance(engine, EngineError) else described
        verdict = self._judge(said, op, False)
        if verdict is _UNKNOWN and said is not described:
            verdict = self._judge(described, op, False)
        if verdict is _UNKNOWN:
            self._count_unmatched(said)
        if isinstance(error, KvxferError) and not verdict.drained:
            return attrs.evolve(verdict, drained=True)
        return verdict

    def matching(self, error: EngineError, *, op: Op | None = None) -> tuple[Rule, ...]:
        """Every rule that matches, the winner first: to explain a verdict. Counts no error."""
        state = self._state
        message = self._normalised(state, error)
        found = []
        for candidate in state.candidates(error):
            try:
                if candidate.matches(error, message, op):
                    found.append((candidate.rule.rank(error), candidate.rule))
            except Exception:  # noqa: BLE001 - may be a user's subclass; the others still count
                self._count_broken(candidate.rule.name)
        # The sort is stable, so that equals stay in the order of registration.
        found.sort(key=lambda pair: pair[0], reverse=True)
        return tuple(rule for _, rule in found)

    # ---- what was counted --------------------------------------------------------------------

    @property
    def unclassified(self) -> int:
        """Errors that no rule matched."""
        return self._unclassified

    @property
    def samples(self) -> tuple[Unmatched, ...]:
        """Different unmatched errors, at most 32, oldest first."""
        with self._lock:
            return tuple(self._unmatched.values())

    @property
    def broken(self) -> Mapping[str, int]:
        """Rules and ``normalise`` functions that raised, and how often each was skipped."""
        with self._lock:
            return dict(self._broken)

    @property
    def problems(self) -> tuple[str, ...]:
        """Plug-ins and rules that ``from_plugins`` left out, with the cause."""
        return tuple(self._problems)

    # ---- inside ------------------------------------------------------------------------------

    def _judge(self, error: EngineError, op: Op | None, atomic_refusal: bool) -> Verdict:
        try:
            cache = self._state.cache
            key = (error.backend, error.code, error.message, error.exception, op, atomic_refusal)
            known = cache.get(key)
            if known is not None:
                return known
            matching = self.matching(error, op=op)
            verdict = _UNKNOWN
            if matching:
                verdict = matching[0].verdict(op, atomic_refusal=atomic_refusal)
                if matching[0].asks_for_sizes:
                    sizes = matching[0].sizes(self._normalised(self._state, error))
                    verdict = attrs.evolve(
                        verdict,
                        most_pieces=sizes.get("most_pieces"),
                        most_nbytes=sizes.get("most_nbytes"),
                    )
            if len(error.message) <= _CACHED_LENGTH:
                if len(cache) >= _CACHE_LIMIT:
                    cache.clear()
                cache[key] = verdict
        except Exception:  # noqa: BLE001 - something odd in the error, or a user's rule
            self._count_broken("engine error")
            return _UNKNOWN
        return verdict

    def _normalised(self, state: _Snapshot, error: EngineError) -> str:
        normalise = state.normalise.get(error.backend)
        if normalise is None:
            return error.message
        try:
            message = normalise(error.message)
            if isinstance(message, str):
                return message
        except Exception:  # noqa: BLE001, S110 - may be a user's; counted below
            pass
        self._count_broken(f"normalise {error.backend}")
        return error.message

    def _report(self, problem: str) -> None:
        _log.warning("%s", problem)
        self._problems.append(problem)

    def _count_broken(self, name: str) -> None:
        with self._lock:
            self._broken[name] = self._broken.get(name, 0) + 1

    def _count_unmatched(self, error: EngineError) -> None:
        if not isinstance(error, EngineError):
            error = EngineError(backend="unknown", message=f"not an EngineError: {error!r}")
        message = str(error.message)[:_SAMPLE_LENGTH]
        exception = str(error.exception)[:_SAMPLE_LENGTH]
        shape = repr((error.backend, error.code, exception, re.sub(r"\d+", "#", message)))
        with self._lock:
            self._unclassified += 1
            known = self._unmatched.get(shape)
            if known is not None:
                self._unmatched[shape] = attrs.evolve(known, count=known.count + 1)
            elif len(self._unmatched) < _SAMPLE_LIMIT:
                kept = attrs.evolve(error, message=message)
                self._unmatched[shape] = Unmatched(error=kept, count=1)


def _rules_of(item: Rule | RuleTable) -> tuple[Rule, ...]:
    if isinstance(item, RuleTable):
        return item.rules
    if isinstance(item, Rule):
        return (item,)
    raise ConfigError(f"a classifier takes Rule and RuleTable objects, not {item!r}")
