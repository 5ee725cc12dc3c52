"""Spans: one trace shows both workers, what went wrong is in them, and none is left open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from observe_rig import agent, at, drive
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvxfer import Agent, Offer, SchedulerAgent
from kvxfer.core.events import Drained, Failed, Quarantined
from kvxfer.core.observations import Outcome, PostFailed, TransferBegan, TransferEnded, Verb
from kvxfer.core.verdict import Action, EngineError, Op
from kvxfer.errors import ErrorKind, InvalidInputError
from kvxfer.observe.tracing import AgentTracing, current_traceparent
from kvxfer.testing.faults import Fault, FaultKind, FaultPlan

FULL = EngineError(
    backend="moriio", code=13, message="SQ full (batch): ep=0 depth=60 requested=8 max=64"
)


class Exporter:
    """A provider of its own for each test, and the spans that have ended."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._memory = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.tracer = self.provider.get_tracer("test")

    def spans(self, name: str = "kvxfer.") -> list[ReadableSpan]:
        return [s for s in self._memory.get_finished_spans() if s.name.startswith(name)]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


@pytest.fixture
def otel() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    exporter.provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def test_one_trace_shows_both_workers(otel: Exporter) -> None:
    """The request's span is the parent of the hold's and of the pull's, across the offer as JSON;
    the spans lie within the time between the calls and the ends."""
    with agent("p", trace_context=current_traceparent) as p, agent("c") as c:
        AgentTracing(p, provider=otel.provider)
        AgentTracing(c, provider=otel.provider)
        with otel.tracer.start_as_current_span("request") as request:
            offer = p.hold("t", at(0, 5)).to_json()
        handle = c.pull(Offer.from_json(offer), at(0, 1))
        drive(p, c, until=lambda: handle.done and not p.snapshot().holds)
    hold, pull = otel.one("kvxfer.hold"), otel.one("kvxfer.pull")
    parent = request.get_span_context()
    for span in (hold, pull):
        assert span.context.trace_id == parent.trace_id
        assert span.parent is not None
        assert span.parent.span_id == parent.span_id
        assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET
        assert attributes(span)["kvxfer.outcome"] == "done"
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time < span.end_time
    assert attributes(pull)["kvxfer.nbytes"] == handle.nbytes
    assert 0 < attributes(pull)["kvxfer.queued_seconds"] < 60
    assert attributes(hold)["kvxfer.agent"] == "p"


def test_the_readers_own_span_comes_first_and_is_linked(otel: Exporter) -> None:
    """A pull that is given a context of its own is a child of that, with a link to the offer's."""
    with agent("p") as p, agent("c") as c:
        AgentTracing(c, provider=otel.provider)
        with otel.tracer.start_as_current_span("prefill") as prefill:
            offer = p.hold("t", at(0, 5), traceparent=current_traceparent())
        with otel.tracer.start_as_current_span("decode") as decode:
            handle = c.pull(offer, at(0, 1), traceparent=current_traceparent())
        drive(p, c, until=lambda: handle.done)
    pull = otel.one("kvxfer.pull")
    assert pull.parent is not None
    assert pull.parent.span_id == decode.get_span_context().span_id
    assert [link.context.span_id for link in pull.links] == [prefill.get_span_context().span_id]


def test_writes_have_spans(otel: Exporter) -> None:
    """Push and accept, each under its own caller's span."""
    with (
        agent("p", trace_context=current_traceparent) as p,
        agent("c", trace_context=current_traceparent) as c,
    ):
        AgentTracing(p, provider=otel.provider)
        AgentTracing(c, provider=otel.provider)
        with otel.tracer.start_as_current_span("request") as request:
            accepted = c.accept("t", at(0, 1))
            p.push("t", at(0, 5), to=c.endpoint)
        p.seal("t")
        drive(p, c, until=lambda: accepted.done and not p.snapshot().pushes)
    for name in ("kvxfer.push", "kvxfer.accept"):
        span = otel.one(name)
        assert span.context.trace_id == request.get_span_context().trace_id
        assert attributes(span)["kvxfer.nbytes"] == accepted.nbytes > 0


def test_retries_are_events(otel: Exporter) -> None:
    """Each refused post is an event with kind, rule and what was done; of a storm the first 64 are
    listed, and all are counted."""
    refuse = Fault(kind=FaultKind.REFUSE_VALUE, error=FULL)
    with agent("p") as p, agent("c", FaultPlan(posts=[refuse, refuse])) as c:
        tracing = AgentTracing(c, provider=otel.provider)
        handle = c.pull(p.hold("t", at(0, 5)), at(0, 1))
        drive(p, c, until=lambda: handle.done)
        pull = otel.one("kvxfer.pull")
        assert events(pull) == ["post retried", "post retried"]
        event = dict(pull.events[0].attributes or {})
        assert event["kvxfer.kind"] == "backpressure"
        assert event["kvxfer.action"] == "repost"
        assert event["kvxfer.rule"]
        assert "SQ full" in str(event["exception.message"])
        assert attributes(pull)["kvxfer.posts_failed"] == 2
        storm = c.pull(p.hold("storm", at(0, 6)), at(0, 2))
        told: list[PostFailed] = []
        c.add_observer(lambda seen: told.append(seen) if isinstance(seen, TransferBegan) else None)
        drive(p, c, until=lambda: bool(told))
        sample = PostFailed(
            transfer_id="storm",
            backend="moriio",
            op=Op.READ,
            kind=ErrorKind.BACKPRESSURE,
            refused=True,
            action=Action.REPOST,
            again=True,
            delay=0.0,
            rule="r",
            message="m" * 10_000,
        )
        for _ in range(1000):
            tracing._observe(sample)
        drive(p, c, until=lambda: storm.done)
    pull = otel.spans("kvxfer.pull")[1]
    assert len(pull.events) == 64
    assert attributes(pull)["kvxfer.posts_failed"] == 1000
    assert max(len(str((e.attributes or {})["exception.message"])) for e in pull.events) == 512


def test_a_failure_stays_open_until_it_is_drained(otel: Exporter) -> None:
    """Not drained, quarantined, out of quarantine, drained: all in one span, which has ended in
    error and ends when the blocks are free."""
    plan = FaultPlan(posts=[Fault(kind=FaultKind.NEVER)], fences=[Fault(kind=FaultKind.FAIL)] * 9)
    with agent("p") as p, agent("c", plan) as c:
        AgentTracing(c, provider=otel.provider)
        handle = c.pull(p.hold("t", at(0, 5)), at(0, 1))
        drive(p, c, until=lambda: c.snapshot().in_flight_pieces > 0)
        handle.abort()
        seen: list[Any] = []
        while not any(isinstance(e, Quarantined) for e in seen):
            seen += drive(p, c, until=lambda: True) + c.poll() + p.poll()
        assert otel.spans() == []
        c.reclaim("t")
        while not any(isinstance(e, Drained) for e in seen):
            seen += c.poll()
        assert any(isinstance(e, Failed) for e in seen)
        pull = otel.one("kvxfer.pull")
    assert events(pull) == ["not drained", "quarantined", "quarantine left", "drained"]
    assert pull.status.status_code is trace.StatusCode.ERROR
    assert attributes(pull)["kvxfer.kind"] == "aborted"
    assert attributes(pull)["kvxfer.drained"] is True
    assert "kvxfer.left_open" not in attributes(pull)


def test_nothing_is_left_open(otel: Exporter) -> None:
    """Both tables are bounded, by count and by time; ``close`` ends the rest and says so."""
    with agent("p") as p:
        tracing = AgentTracing(p, provider=otel.provider, most_open=3, patience=0.0)
        for i in range(5):
            p.hold(f"t{i}", at(0, i))
        p.poll()
        assert len(otel.spans("kvxfer.hold")) == 2
        assert all(attributes(s)["kvxfer.left_open"] for s in otel.spans())
        for name in ("a", "b"):
            tracing._observe(_undrained(name))
        tracing._observe(_undrained("c"))  # looks at those that waited long enough
        assert len(otel.spans("kvxfer.pull")) == 2
        tracing.close()
        tracing.close()
        assert len(otel.spans("kvxfer.hold")) == 5
        assert len(otel.spans("kvxfer.pull")) == 3
        assert not p._ctx.observers


def _undrained(name: str) -> TransferEnded:
    return TransferEnded(
        verb=Verb.PULL, transfer_id=name, outcome=Outcome.FAILED, drained=False, seconds=0.1
    )


def test_refused_before_it_began(otel: Exporter) -> None:
    """It has a span all the same, in error, with the reason."""
    with agent("p") as p:
        AgentTracing(p, provider=otel.provider)
        p.hold("t", at(0, 5), readers=[])
        drive(p, until=lambda: bool(otel.spans()))
    hold = otel.one("kvxfer.hold")
    assert attributes(hold)["kvxfer.kind"] == "invalid"
    assert hold.status.status_code is trace.StatusCode.ERROR


def test_without_a_current_span() -> None:
    """No context is an empty text, which ``trace_context`` may return."""
    assert current_traceparent() == ""
    with agent("p", trace_context=current_traceparent) as p:
        assert p.hold("t", at(0, 5)).traceparent == ""


def test_a_trace_context_that_is_none(otel: Exporter) -> None:
    """What a user's own function returns is checked on the caller's thread; nothing is held."""
    with agent("p", trace_context=lambda: "nonsense") as p:
        with pytest.raises(InvalidInputError, match="what trace_context returns must be a W3C"):
            p.hold("t", at(0, 5))
        assert p.snapshot().holds == 0
        assert isinstance(p, Agent)


def test_through_the_scheduler_half(otel: Exporter) -> None:
    """A trace context travels from the scheduler half of prefill to its workers and into the offer,
    and from there to the workers of decode."""
    with agent("p") as p, agent("c") as c:
        AgentTracing(p, provider=otel.provider)
        AgentTracing(c, provider=otel.provider)
        prefill = SchedulerAgent([p.info], trace_context=current_traceparent)
        decode = SchedulerAgent([c.info])
        with otel.tracer.start_as_current_span("request") as request:
            offer = Offer.from_json(prefill.hold("t", at(0, 5)).to_json())
        p.execute(prefill.take_orders())
        decode.pull(offer, at(0, 1))
        c.execute(decode.take_orders())
        drive(p, c, until=lambda: len(otel.spans()) == 2)
    for name in ("kvxfer.hold", "kvxfer.pull"):
        parent = otel.one(name).parent
        assert parent is not None
        assert parent.span_id == request.get_span_context().span_id
