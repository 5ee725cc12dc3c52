"""The metric families, as a table: what they are called, what they count, where it comes from.

Names, types and labels are stable: they change only with a major release.  Labels are kinds, never
an id of a request, a transfer or a peer, so that the number of series is fixed: every series exists
from the first scrape on, and ``rate`` sees the first failure.

Every family has the label ``agent`` as well, ``AgentConfig.name``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import attrs

from kvxfer.core import events
from kvxfer.core.acks import AckOutcome
from kvxfer.core.observations import Outcome, Verb
from kvxfer.core.wire import MESSAGES
from kvxfer.errors import ErrorKind

__all__ = [
    "BYTE_BUCKETS",
    "COUNTERS",
    "GAUGES",
    "HISTOGRAMS",
    "INTERNAL",
    "SECOND_BUCKETS",
    "Family",
    "Type",
    "all_families",
    "markdown",
]

KINDS = tuple(kind.value for kind in ErrorKind)
VERBS = tuple(verb.value for verb in Verb)
EVENTS = tuple(
    sorted(
        name.lower()
        for name in events.__all__
        if issubclass(getattr(events, name), events.Event) and name != "Event"
    )
)
OUTCOMES: Mapping[Verb, tuple[Outcome, ...]] = {
    Verb.HOLD: tuple(Outcome),
    Verb.PULL: (Outcome.DONE, Outcome.FAILED),
    Verb.PUSH: (Outcome.DONE, Outcome.FAILED),
    Verb.ACCEPT: (Outcome.DONE, Outcome.FAILED),
}
"""How each can end."""

SECOND_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Half a millisecond, which a pull in shared memory takes, to twice the default lease."""
BYTE_BUCKETS = tuple(float(2 ** (16 + 2 * i)) for i in range(10))
"""64 KiB, which is one block of one layer, to 16 GiB, in steps of four."""


class Type(enum.Enum):
    """As Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@attrs.frozen(kw_only=True)
class Family:
    """One family.

    Attributes:
        name: without ``_total``, which counters get.
        labels: besides ``agent``.
        sources: of a counter: names in ``Snapshot.counters`` to the label values of their series. A
            name that ends with ``*`` stands for all that begin alike; the rest is the last label.
        known: values of that last label that exist before anything was counted.
    """

    name: str
    help: str
    type: Type = Type.COUNTER
    labels: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    known: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return f"kvxfer_{self.name}" + ("_total" if self.type is Type.COUNTER else "")

    def series(self) -> Iterator[tuple[str, ...]]:
        """Label values that are there from the beginning."""
        for source, values in self.sources.items():
            if source.endswith("*"):
                yield from ((*values, last) for last in self.known)
            else:
                yield values


def _counter(name: str, help_: str, *sources: str) -> Family:
    return Family(name=name, help=help_, sources=dict.fromkeys(sources, ()))


def _by(name: str, help_: str, label: str, known: tuple[str, ...], *sources: str) -> Family:
    """One label, which is the rest of the counter's name."""
    return Family(
        name=name,
        help=help_,
        labels=(label,),
        sources={source + "*": () for source in sources},
        known=known,
    )


def _each(name: str, help_: str, label: str, **sources: str) -> Family:
    """One label, with the counters of its values."""
    table = {counter: (value,) for value, counter in sources.items()}
    return Family(name=name, help=help_, labels=(label,), sources=table)


COUNTERS = (
    _each(
        "transfers_begun",
        "Transfers that the agent took up.",
        "verb",
        hold="holds.begun",
        pull="pulls.begun",
        push="pushes.begun",
        accept="accepts.begun",
    ),
    Family(
        name="transfers_failed",
        help="Transfers that failed, by why.",
        labels=("verb", "kind"),
        sources={
            "holds.failed.*": ("hold",),
            "pull.failed.*": ("pull",),
            "push.failed.*": ("push",),
            "accept.failed.*": ("accept",),
        },
        known=KINDS,
    ),
    _each(
        "transfer_bytes",
        "Payload bytes of transfers that are done.",
        "verb",
        pull="pull.bytes",
        push="push.bytes",
        accept="accept.bytes",
    ),
    _by(
        "events",
        "Events for Agent.poll, by type.",
        "event",
        EVENTS,
        "events.",
    ),
    _counter(
        "leases_expired", "Holds whose lease ended before all ranks had read.", "holds.expired"
    ),
    _counter("holds_retried", "Holds that a reader opened again after it failed.", "holds.retried"),
    _counter("posts", "Engine calls that were posted.", "posts"),
    _counter("post_pieces", "Pieces of engine calls that were posted.", "posts.pieces"),
    _counter(
        "post_bytes", "Bytes of engine calls that were posted, repeated ones too.", "posts.bytes"
    ),
    _by(
        "posts_retried",
        "Engine calls that were refused or failed and are made again, by why.",
        "kind",
        KINDS,
        "posts.retried.",
    ),
    _by(
        "posts_failed",
        "Engine calls after which a transfer was given up, by why.",
        "kind",
        KINDS,
        "posts.failed.",
    ),
    _counter("posts_split", "Engine calls made again in smaller pieces.", "posts.split"),
    _counter(
        "paths_rebuilt", "Paths to a peer that were dropped, to be made anew.", "paths.rebuilt"
    ),
    _by(
        "connects_retried",
        "Connects and path preparations that failed and are tried again, by why.",
        "kind",
        KINDS,
        "connect.retried.",
    ),
    _counter("admission_waited", "Calls that had to wait for credits.", "admission.waited"),
    _counter(
        "admission_cut",
        "Calls cut because they needed more credits than there are.",
        "admission.cut",
    ),
    _counter(
        "admission_timeouts",
        "Calls that got no credits within Timeouts.queue.",
        "admission.timeout",
    ),
    _counter("admission_refused", "Calls refused because too many waited.", "admission.refused"),
    _counter("admission_limit_lowered", "Times an adaptive limit fell.", "admission.limit_lowered"),
    _each(
        "posting_threads",
        "Posting threads left alone inside an engine, come back, or not started because of them.",
        "what",
        abandoned="posting_threads.abandoned",
        returned="posting_threads.returned",
        refused="posting_threads.refused",
    ),
    _counter("peers_up", "Peers that came up.", "peers.up"),
    _counter(
        "peers_suspected",
        "Peers whose connection dropped or whose keeper fell silent.",
        "peers.suspected",
    ),
    _counter("peers_busy", "Peers that did not answer while their keeper did.", "peers.busy"),
    _counter("peers_reconnected", "Connections to peers that were made anew.", "peers.reconnected"),
    _by("peers_failed", "Peers given up, by why.", "kind", KINDS, "peers.failed."),
    _counter("breaker_faults", "Faults charged to peers.", "breakers.faults"),
    _counter("breakers_opened", "Circuit breakers that opened.", "breakers.opened"),
    _counter("breakers_closed", "Circuit breakers that closed after a probe.", "breakers.closed"),
    _counter(
        "breaker_rejections",
        "Transfers and connects refused by an open breaker.",
        "breakers.rejected",
    ),
    _each(
        "failovers",
        "Peers moved to their next backend (down) or back (up).",
        "direction",
        down="failover.downgrades",
        up="failover.upgrades",
    ),
    _counter(
        "quarantine_entered", "Transfers whose blocks went into quarantine.", "events.quarantined"
    ),
    _by(
        "quarantine_left",
        "Transfers whose blocks came out of quarantine, by what let them out.",
        "by",
        ("fence", "proof", "reclaim"),
        "quarantine.left.",
    ),
    _counter("fences", "Fences begun to prove that nothing lands any more.", "fences.begun"),
    _each(
        "keeper",
        "What became of keeper processes.",
        "what",
        started="keeper.started",
        died="keeper.died",
        hung="keeper.hung",
    ),
    _counter("grants_given", "Grants to readers, those of the keeper not counted.", "grants.given"),
    _by("grants_refused", "Grants refused to readers, by why.", "kind", KINDS, "grants.refused."),
    _each(
        "acks",
        "Releases of readers, by what they turned out to be.",
        "result",
        **{outcome.value: f"acks.{outcome.value}" for outcome in AckOutcome},
        evicted_ttl="acks.evicted_ttl",
        evicted_capacity="acks.evicted_capacity",
    ),
    _each(
        "messages",
        "Control messages, by what became of them.",
        "result",
        sent="messages.sent",
        not_sent="messages.not_sent",
        given_up="messages.given_up",
        undeliverable="messages.undeliverable",
        duplicate="messages.duplicate",
        rejected="messages.rejected",
        over_capacity="messages.over_capacity",
        from_strangers="messages.from_strangers",
    ),
    _by(
        "messages_received",
        "Control messages received, by type.",
        "type",
        tuple(kind.__name__.lower() for kind in MESSAGES),
        "received.",
    ),
    _by(
        "messages_refused",
        "Control messages refused because of who sent them, by why.",
        "why",
        (),
        "messages.refused.",
    ),
    _each(
        "control_bytes",
        "Bytes of control messages.",
        "direction",
        **{"in": "channel.bytes_in", "out": "channel.bytes_out"},
    ),
    _by(
        "control_dropped",
        "Control messages dropped by the channel, by why.",
        "why",
        (),
        "channel.dropped_",
    ),
    _counter("transport_failures", "Times the progress of a backend raised.", "transports.failed"),
    _counter("observer_failures", "Times an observer raised.", "observers.failed"),
)

INTERNAL = Family(
    name="internal",
    help="Every other counter of Agent.snapshot; these names may change with any release.",
    labels=("counter",),
    sources={"*": ()},
)


def _gauge(name: str, help_: str, *labels: str) -> Family:
    return Family(name=name, help=help_, type=Type.GAUGE, labels=labels)


GAUGES = (
    _gauge("info", "1; which release it is.", "version"),
    _gauge("ready", "1 if new requests make sense here, else 0; see kvxfer_problems."),
    _gauge("problems", "Problems that Agent.health names, blocking or not.", "problem"),
    _gauge("transfers_open", "Transfers under way.", "verb"),
    _gauge("pinned_blocks", "Blocks that something is being written into, quarantine included."),
    _gauge("in_flight_pieces", "Pieces posted and not drained."),
    _gauge("unconfirmed_messages", "Messages that are sent again until they are confirmed."),
    _gauge("draining_transfers", "Failed transfers whose blocks something may still touch."),
    _gauge("early_messages", "Messages that came before our own orders."),
    _gauge("peers", "Peers that are up."),
    _gauge("peers_left_alone", "Peers whose circuit breaker is not closed."),
    _gauge("peers_failed_over", "Peers reached over another backend than the preferred one."),
    _gauge("stuck_calls", "Engine calls that did not return in time and still have not."),
    _gauge("waiting_calls", "Calls that wait for credits."),
    _gauge("waiting_seconds", "How long ago the call that waits longest asked for its credits."),
    _gauge("queue_fill_ratio", "In flight over limit, of the fullest send queue; 0 if idle."),
    _gauge("quarantine_transfers", "Transfers in quarantine."),
    _gauge("quarantine_limit", "Transfers in quarantine from which on the agent is not ready."),
    _gauge("quarantine_blocks", "Blocks in quarantine."),
    _gauge("quarantine_oldest_seconds", "Age of the oldest entry; 0 if there is none."),
)

HISTOGRAMS = (
    Family(
        name="transfer_seconds",
        help="From the user's call to the end of the transfer.",
        type=Type.HISTOGRAM,
        labels=("verb", "outcome"),
    ),
    Family(
        name="transfer_queued_seconds",
        help="From the user's call to the first post: handshake, grant and credits.",
        type=Type.HISTOGRAM,
        labels=("verb",),
    ),
    Family(
        name="transfer_size_bytes",
        help="Payload bytes of a transfer that is done.",
        type=Type.HISTOGRAM,
        labels=("verb",),
    ),
)


def all_families() -> tuple[Family, ...]:
    """In the order in which they are exported."""
    return (*GAUGES, *HISTOGRAMS, *COUNTERS, INTERNAL)


def markdown() -> str:
    """The table of docs/reference/metrics.md."""
    lines = ["| metric | type | labels | what it says |", "|---|---|---|---|"]
    for family in all_families():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.full_name}` | {family.type.value} | {labels} | {family.help} |")
    return "\n".join(lines) + "\n"
