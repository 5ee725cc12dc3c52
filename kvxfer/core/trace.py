"""Trace contexts in the form in which they travel: W3C ``traceparent``, and nothing else of it.

``00-<32 hex digits: trace>-<16 hex digits: parent span>-<2 hex digits: flags>``, lower case,
neither of the two ids all zero.  Versions above 00 are read as the standard says: by their first 55
characters.  ``tracestate`` does not travel.

Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvxfer.errors import InvalidInputError

__all__ = [
    "MAX_TRACEPARENT",
    "TRACEPARENT_LENGTH",
    "checked_traceparent",
    "read_traceparent",
    "trace_of",
]

TRACEPARENT_LENGTH = 55
"""Characters of a version 00 ``traceparent``, and of what is sent on."""
MAX_TRACEPARENT = 256
"""Characters of what is looked at; a longer one, of whatever version, is no trace context."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)


def read_traceparent(value: object) -> str:
    """What came from outside, in version 00; empty if it is no trace context. Never raises.

    A bad one costs a span its parent, no more: the standard says to go on without.
    """
    if not isinstance(value, str) or not TRACEPARENT_LENGTH <= len(value) <= MAX_TRACEPARENT:
        return ""
    found = _FORM.match(value)
    if found is None:
        return ""
    version, trace, span, flags = found.groups()
    rest = value[TRACEPARENT_LENGTH:]
    if version == "ff" or (rest if version == "00" else rest and rest[0] != "-"):
        return ""
    if not trace.strip("0") or not span.strip("0"):
        return ""
    return f"00-{trace}-{span}-{flags}"


def checked_traceparent(name: str, value: object) -> str:
    """What our own user gave, in version 00; empty if it is None or empty.

    Raises:
        InvalidInputError: it is no trace context.
    """
    if value is None or (isinstance(value, str) and not value):
        return ""
    found = read_traceparent(value)
    if not found:
        raise InvalidInputError(
            f"{name} must be a W3C traceparent of {TRACEPARENT_LENGTH} characters, "
            f"not {value!r:.80}",
            next_step="pass what kvxfer.observe.tracing.current_traceparent() returns, or leave it "
            "out",
        )
    return found


def trace_of(given: object, context: Callable[[], str] | None) -> str:
    """The trace context that a call names, or else what ``context`` says; empty if there is none.

    Raises:
        InvalidInputError: one of them is no trace context.
    """
    own = checked_traceparent("traceparent", given)
    if own or context is None:
        return own
    return checked_traceparent("what trace_context returns", context())
