"""OpenTelemetry spans of transfers (extra ``otel``).

One span per hold, pull, push and accept, named ``kvxfer.hold`` and so on, from the user's call to
the end of the transfer.  A pull's span is a child of the trace context in the offer, so that one
trace shows both workers; ``hold(traceparent=...)`` or ``Agent(trace_context=current_traceparent)``
puts it there.  Only what went wrong becomes an event of its span: posts that failed, blocks that
were not drained, quarantine.

After ``Failed(drained=False)`` a span stays open until the blocks are drained, at most ``patience``
seconds of the agent's clock: what happens to blocks belongs to the transfer.  The number of
open spans is bounded as well; what is over either bound ends, with ``kvxfer.left_open`` set.

Only the API of OpenTelemetry is used; without an SDK nothing is recorded.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from kvxfer import __version__
from kvxfer.core.events import Drained, Gone, Observation, Quarantined, Role
from kvxfer.core.observations import (
    Outcome,
    PostFailed,
    QuarantineLeft,
    TransferBegan,
    TransferEnded,
    TransferPosted,
    Verb,
)
from kvxfer.core.trace import read_traceparent
from kvxfer.errors import MissingDependencyError

try:
    from opentelemetry import trace
except ImportError as error:
    raise MissingDependencyError(
        "traces need opentelemetry-api", next_step="pip install 'kvxfer[otel]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from kvxfer.agent import Agent

__all__ = ["AgentTracing", "current_traceparent"]

_MOST_OPEN = 65536
"""As many as transfers may be under way by default (``Limits.transfers``)."""
_PATIENCE = 120.0
"""Seconds: four times the default lease."""
_MOST_EVENTS = 64
"""Failed posts that one span lists; further ones are counted (``kvxfer.posts_failed``)."""
_LONGEST = 512
"""Characters of an error's text."""


def current_traceparent() -> str:
    """The W3C ``traceparent`` of the current span; empty if there is none. Never waits."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


@attrs.define
class _Open:
    span: Span
    verb: Verb
    posts_failed: int = 0
    over_at: float | None = None
    """It has ended and only drains: until when it is waited for."""


class AgentTracing:
    """An observer that makes the spans of one agent.

    Args:
        agent: its spans from now on.
        provider: of the tracer; left out: the global one.
        most_open: spans that may be open.
        patience: seconds for which a span waits for ``Drained``.

    Spans are begun and ended on the agent's progress thread, or where the agent tells its
    observers; with the batch span processor that costs some microseconds and waits for nothing.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        provider: TracerProvider | None = None,
        most_open: int = _MOST_OPEN,
        patience: float = _PATIENCE,
    ) -> None:
        self._tracer = trace.get_tracer("kvxfer", __version__, tracer_provider=provider)
        self._agent = agent.config.name
        self._clock = agent.clock
        self._most = most_open
        self._patience = patience
        self._open: OrderedDict[tuple[Role, str], _Open] = OrderedDict()
        self._draining: OrderedDict[tuple[Role, str], _Open] = OrderedDict()
        """Those that have ended and are not drained: oldest first."""
        self._lock = threading.Lock()
        self._handlers: dict[type[Observation], Callable[[Observation], None]] = {
            TransferBegan: self._began,
            TransferPosted: self._posted,
            PostFailed: self._post_failed,
            TransferEnded: self._ended,
            Quarantined: self._quarantined,
            QuarantineLeft: self._left_quarantine,
            Drained: self._drained,
            Gone: self._gone,
        }
        self._remove = agent.add_observer(self._observe)

    def close(self) -> None:
        """Make no more spans, and end those that are open. Idempotent."""
        self._remove()
        with self._lock:
            for one in (*self._open.values(), *self._draining.values()):
                self._end(one, left_open=True)
            self._open.clear()
            self._draining.clear()

    def _observe(self, seen: Observation) -> None:
        handler = self._handlers.get(type(seen))
        if handler is not None:
            with self._lock:
                handler(seen)

    # ---- a transfer's life -------------------------------------------------------------------

    def _began(self, seen: Observation) -> None:
        assert isinstance(seen, TransferBegan)
        one = self._start(seen.verb, seen.transfer_id, seen.waited, seen.traceparent, seen.offered)
        self._open[(seen.verb.role, seen.transfer_id)] = one
        if len(self._open) > self._most:
            self._end(self._open.popitem(last=False)[1], left_open=True)

    def _start(
        self, verb: Verb, transfer_id: str, waited: float, traceparent: str, offered: str
    ) -> _Open:
        links = [trace.Link(context)] if (context := _context(offered)) is not None else None
        parent = _context(traceparent)
        span = self._tracer.start_span(
            f"kvxfer.{verb.value}",
            context=None
            if parent is None
            else trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind.PRODUCER if verb.role is Role.PRODUCER else trace.SpanKind.CONSUMER,
            attributes={
                "kvxfer.agent": self._agent,
                "kvxfer.verb": verb.value,
                "kvxfer.transfer_id": transfer_id,
            },
            links=links,
            start_time=time.time_ns() - int(waited * 1e9),
        )
        return _Open(span, verb)

    def _posted(self, seen: Observation) -> None:
        assert isinstance(seen, TransferPosted)
        one = self._open.get((seen.verb.role, seen.transfer_id))
        if one is not None:
            one.span.set_attribute("kvxfer.queued_seconds", seen.queued)

    def _post_failed(self, seen: Observation) -> None:
        assert isinstance(seen, PostFailed)
        # Pulls post as consumers, pushes as producers.
        role = Role.CONSUMER if seen.op.value == "read" else Role.PRODUCER
        one = self._open.get((role, seen.transfer_id))
        if one is None:
            return
        one.posts_failed += 1
        if one.posts_failed > _MOST_EVENTS:
            return
        one.span.add_event(
            "post retried" if seen.again else "post failed",
            {
                "kvxfer.kind": seen.kind.value,
                "kvxfer.action": seen.action.value,
                "kvxfer.rule": seen.rule,
                "kvxfer.backend": seen.backend,
                "kvxfer.refused": seen.refused,
                "kvxfer.delay_seconds": seen.delay,
                "exception.message": seen.message[:_LONGEST],
            },
        )

    def _ended(self, seen: Observation) -> None:
        assert isinstance(seen, TransferEnded)
        key = (seen.verb.role, seen.transfer_id)
        one = self._open.pop(key, None)
        if one is None:  # refused before it began
            one = self._start(seen.verb, seen.transfer_id, seen.seconds, "", "")
        span = one.span
        span.set_attribute("kvxfer.outcome", seen.outcome.value)
        span.set_attribute("kvxfer.drained", seen.drained)
        if seen.nbytes:
            span.set_attribute("kvxfer.nbytes", seen.nbytes)
        if one.posts_failed:
            span.set_attribute("kvxfer.posts_failed", one.posts_failed)
        if seen.kind is not None:
            span.set_attribute("kvxfer.kind", seen.kind.value)
        if seen.outcome in (Outcome.FAILED, Outcome.EXPIRED):
            said = seen.message[:_LONGEST] or seen.outcome.value
            span.set_status(trace.Status(trace.StatusCode.ERROR, said))
        self._end_old()
        if seen.drained:
            self._end(one)
            return
        span.add_event("not drained")
        one.over_at = self._clock.now() + self._patience
        self._draining[key] = one
        if len(self._draining) > self._most:
            self._end(self._draining.popitem(last=False)[1], left_open=True)

    # ---- after it failed ---------------------------------------------------------------------

    def _quarantined(self, seen: Observation) -> None:
        assert isinstance(seen, Quarantined)
        self._event(seen.role, seen.transfer_id, "quarantined", reason=seen.reason[:_LONGEST])

    def _left_quarantine(self, seen: Observation) -> None:
        assert isinstance(seen, QuarantineLeft)
        facts: dict[str, AttributeValue] = {"by": seen.by, "seconds": seen.seconds}
        self._event(seen.role, seen.transfer_id, "quarantine left", **facts)

    def _drained(self, seen: Observation) -> None:
        assert isinstance(seen, Drained)
        self._event(seen.role, seen.transfer_id, "drained", by=seen.drained_by)
        one = self._draining.pop((seen.role, seen.transfer_id), None)
        if one is not None:
            one.span.set_attribute("kvxfer.drained", True)
            self._end(one)

    def _gone(self, seen: Observation) -> None:
        assert isinstance(seen, Gone)
        self._event(Role.CONSUMER, seen.transfer_id, "gone", kind=seen.kind.value)

    def _event(self, role: Role, transfer_id: str, name: str, **facts: AttributeValue) -> None:
        key = (role, transfer_id)
        one = self._open.get(key) or self._draining.get(key)
        if one is not None:
            one.span.add_event(name, {f"kvxfer.{fact}": value for fact, value in facts.items()})

    def _end_old(self) -> None:
        now = self._clock.now()
        while self._draining:
            one = next(iter(self._draining.values()))
            if one.over_at is None or one.over_at > now:
                return
            self._draining.popitem(last=False)
            self._end(one, left_open=True)

    def _end(self, one: _Open, *, left_open: bool = False) -> None:
        if left_open:
            one.span.set_attribute("kvxfer.left_open", True)
        one.span.end()


def _context(traceparent: str) -> trace.SpanContext | None:
    read = read_traceparent(traceparent)
    if not read:
        return None
    _, trace_id, span_id, flags = read.split("-")
    return trace.SpanContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(flags, 16)),
    )
