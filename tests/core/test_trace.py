"""Trace contexts: what is read, what is passed on, and that older releases are not disturbed."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.core.trace import (
    MAX_TRACEPARENT,
    TRACEPARENT_LENGTH,
    checked_traceparent,
    read_traceparent,
)
from kvxfer.errors import InvalidInputError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GOOD = f"00-{TRACE}-00f067aa0ba902b7-01"


def offer(traceparent: str = "") -> Offer:
    return Offer(
        transfer_id="t",
        epoch=1,
        endpoints=(Endpoint(address="tcp://10.0.0.1:1", incarnation="a"),),
        sizes={"tp_size": 1},
        lease=3.0,
        groups=(Blocks.at(0, [1, 2]),),
        fingerprint="f",
        traceparent=traceparent,
    )


@pytest.mark.parametrize(
    ("given_", "read"),
    [
        (GOOD, GOOD),
        (GOOD[:-2] + "00", GOOD[:-2] + "00"),
        ("cc" + GOOD[2:], GOOD),  # a later version: its first 55 characters, as version 00
        ("cc" + GOOD[2:] + "-what-will-be", GOOD),
        ("cc" + GOOD[2:] + ".what", ""),
        (GOOD + "-more", ""),  # version 00 has no more
        ("ff" + GOOD[2:], ""),
        (GOOD.upper(), ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (GOOD[:-1], ""),
        (GOOD + "\n", ""),
        ("cc" + GOOD[2:] + "-" + "x" * MAX_TRACEPARENT, ""),
        ("", ""),
        (None, ""),
        (7, ""),
        ([GOOD], ""),
        (GOOD.replace("4", "٤"), ""),
    ],
)
def test_what_is_read(given_: object, read: str) -> None:
    """The standard's form and nothing else; the result is version 00 or empty."""
    assert read_traceparent(given_) == read


@given(st.one_of(st.text(max_size=300), st.binary(max_size=100), st.integers()))
def test_reading_never_raises(value: object) -> None:
    """Whatever comes from outside: a trace context of 55 characters, or none."""
    assert len(read_traceparent(value)) in (0, TRACEPARENT_LENGTH)


def test_our_own_users_are_told() -> None:
    """A bad one from our own user is an error that names the argument and the value."""
    assert checked_traceparent("traceparent", None) == ""
    assert checked_traceparent("traceparent", GOOD) == GOOD
    with pytest.raises(InvalidInputError, match=r"traceparent must be a W3C .* not 'bad'"):
        checked_traceparent("traceparent", "bad")
    with pytest.raises(InvalidInputError, match=r"Offer\.traceparent must be"):
        offer("bad")


def test_it_travels_in_the_offer() -> None:
    """As JSON and back; an offer without one is what it was before there was any."""
    assert Offer.from_json(offer(GOOD).to_json()).traceparent == GOOD
    assert "traceparent" not in offer().to_dict()
    assert Offer.from_json(offer().to_json()).traceparent == ""


@pytest.mark.parametrize("damaged", ["", "x" * 100_000, None, 7, {"a": [1]}, [GOOD], GOOD.upper()])
def test_damage_on_the_way_costs_the_trace_alone(damaged: object) -> None:
    """A router that mangles it does not cost the request: the offer is read without it."""
    data = offer(GOOD).to_dict() | {"traceparent": damaged}
    read = Offer.from_dict(json.loads(json.dumps(data)))
    assert read.traceparent == ""
    assert read.transfer_id == "t"


class _OldEndpoint(msgspec.Struct):
    address: str
    incarnation: str
    rank: int
    ticket: str = ""


class _OldGroup(msgspec.Struct):
    ids: list[int]
    start: int | None = None
    positions: list[int] | None = None
    holes: list[int] | None = None


class _OldOffer(msgspec.Struct):
    """How releases before trace contexts read an offer of version 1."""

    version: int
    transfer_id: str
    epoch: int
    endpoints: list[_OldEndpoint]
    sizes: dict[str, int]
    lease: float
    groups: list[_OldGroup]
    fingerprint: str


def test_older_releases_pass_it_by() -> None:
    """An older reader sees every field that it knows, unchanged, and ignores the new one; what it
    sends has no trace context, which we read as none."""
    sent: dict[str, Any] = json.loads(offer(GOOD).to_json())
    old = msgspec.convert(sent, _OldOffer)
    assert old.version == sent["version"] == 1
    back = Offer.from_dict(msgspec.to_builtins(old))
    assert back.traceparent == ""
    assert np.array_equal(back.groups[0].ids, [1, 2])
    assert (back.transfer_id, back.epoch, back.lease) == ("t", 1, 3.0)
