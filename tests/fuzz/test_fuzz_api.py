"""Hostile arguments to the public API: a clear ``KvxferError``, and nothing is lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from fuzz_rig import BLOCKS, layout, rounds

from kvxfer.agent import Agent, AgentConfig
from kvxfer.agent.handles import TransferState
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.layout import Blocks
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.errors import InvalidInputError, KvxferError
from kvxfer.policies.timeouts import Timeouts

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    10**400,
    0.0,
    -1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 10_000,
    "\x00",
    "\ud800",
    "tcp://0.0.0.0:1",
    "127.0.0.1:0",
    "127.0.0.1:1#",
    "#",
    b"",
    b"x" * 70_000,
    [],
    [[]],
    [None],
    [-1],
    [2**63],
    ["x"],
    (),
    {},
    {"x": 1},
    set(),
    object(),
    object,
    lambda: None,
    iter(()),
    Blocks.unplaced([0]),
    [Blocks.unplaced([0]), Blocks.unplaced([1])],
    Blocks.at(0, []),
    Blocks.at(0, [BLOCKS]),
    Blocks.at(0, [2**40]),
    np.zeros(3),
    np.zeros((2, 2), dtype=np.int64),
    np.array([1], dtype=object),
    np.float64("nan"),
    np.int8(-1),
)


class Pair:
    """Two agents that move blocks, to see that they still do."""

    def __init__(self) -> None:
        timeouts = Timeouts(connect=5.0, queue=5.0, transfer=10.0, ack=2.0, drain=0.5)
        self.agents = [
            Agent(LoopbackTransport(), config=AgentConfig(lease=2.0), timeouts=timeouts)
            for _ in range(2)
        ]
        self.memory = [np.full(layout().end_offset, fill, dtype=np.uint8) for fill in (17, 0)]
        for agent, memory in zip(self.agents, self.memory, strict=True):
            agent.register_kv_caches({"layer0": memory}, layout())
        self._serial = 0

    def works(self) -> None:
        """One good transfer."""
        self._serial += 1
        producer, consumer = self.agents
        offer = producer.hold(f"good-{self._serial}", Blocks.at(0, [1, 2]), lease=30.0)
        handle = consumer.pull(offer, Blocks.at(0, [14, 15]))
        assert consumer.wait(handle, 20)
        assert handle.state is TransferState.DONE, handle.error
        assert (self.memory[1].reshape(2, BLOCKS, 64)[:, [14, 15]] == 17).all()

    def close(self) -> None:
        for agent in self.agents:
            agent.close(0.5)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def offer_like(rng: random.Random) -> Any:
    """A good offer with one or two fields that are not."""
    good = Offer(
        transfer_id="o",
        epoch=1,
        endpoints=(Endpoint(address="127.0.0.1:1", incarnation="x"),),
        sizes={"tp_size": 1},
        lease=1.0,
        groups=(Blocks.at(0, [1]),),
        fingerprint="",
    )
    names = [a.name for a in attrs.fields(Offer)]
    changes = {rng.choice(names): rng.choice(VALUES) for _ in range(rng.randint(1, 2))}
    return attrs.evolve(good, **changes)


def value(rng: random.Random) -> Any:
    way = rng.random()
    if way < 0.1:
        return offer_like(rng)
    if way < 0.15:
        fields = {"address": rng.choice(VALUES), "incarnation": rng.choice(VALUES)}
        return Endpoint(**fields)
    if way < 0.2:
        return [offer_like(rng)]
    return rng.choice(VALUES)


def some_id(rng: random.Random) -> Any:
    return rng.choice(["a", "b", "c", value(rng)])


def blocks(rng: random.Random) -> Any:
    return rng.choice([Blocks.at(0, [rng.randrange(8)]), value(rng)])


CALLS: dict[str, Callable[[Agent, random.Random], Any]] = {
    "hold": lambda a, r: a.hold(
        some_id(r), blocks(r), lease=r.choice([None, value(r)]), readers=r.choice([None, value(r)])
    ),
    "pull": lambda a, r: a.pull(
        r.choice([offer_like(r), value(r)]),
        blocks(r),
        layers=r.choice([None, value(r)]),
        last=r.choice([True, False]),
        align=r.choice([None, value(r)]),
        uncovered_local=r.choice([0, value(r)]),
    ),
    "decline": lambda a, r: a.decline(r.choice([offer_like(r), value(r)])),
    "renew": lambda a, r: a.renew(r.choice([[offer_like(r)], value(r)])),
    "accept": lambda a, r: a.accept(
        some_id(r),
        blocks(r),
        deadline=r.choice([None, 0.1, value(r)]),
        producers=r.choice([(), value(r)]),
        uncovered_local=r.choice([0, value(r)]),
    ),
    "push": lambda a, r: a.push(
        some_id(r),
        blocks(r),
        to=r.choice(["127.0.0.1:1", value(r)]),
        layers=r.choice([None, value(r)]),
        ready=r.choice([None, value(r)]),
        align=r.choice([None, value(r)]),
    ),
    "seal": lambda a, r: a.seal(some_id(r), r.choice([b"x", value(r)])),
    "abort": lambda a, r: a.abort(some_id(r)),
    "reclaim": lambda a, r: a.reclaim(some_id(r)),
    "connect": lambda a, r: a.connect(r.choice([["127.0.0.1:1"], value(r)])),
    "execute": lambda a, r: a.execute(value(r)),
    "register_kv_caches": lambda a, r: a.register_kv_caches(
        value(r), r.choice([None, layout(), value(r)]), groups=r.choice([None, value(r)])
    ),
    "wait": lambda a, r: a.wait(value(r), r.choice([0.0, value(r)]) if r.random() < 0.5 else 0.0),
    "drain": lambda a, r: a.drain(r.choice([0.0, -1.0, value(r)]) if False else 0.0),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_agent_calls(pair: Pair, name: str) -> None:
    """Whatever the arguments: it works, or it raises a ``KvxferError`` with a text; afterwards good
    transfers work, and once all is over no table holds anything."""
    rng = random.Random(name)
    agent = pair.agents[1]
    said = 0
    for _ in range(rounds(150)):
        try:
            CALLS[name](agent, rng)
        except KvxferError as error:
            assert str(error)  # noqa: PT017
            said += 1
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    agent.poll()
    if name == "register_kv_caches":
        agent.drain(10)
        agent.register_kv_caches({"layer0": pair.memory[1]}, layout())
    for transfer_id in ("a", "b", "c"):
        agent.abort(transfer_id)
    pair.works()
    assert agent.drain(30), agent.snapshot()
    assert agent.health().ready, agent.health()


@pytest.mark.parametrize(
    "bad", VALUES, ids=[f"{type(v).__name__}-{i}" for i, v in enumerate(VALUES)]
)
def test_offers_from_anywhere(bad: Any) -> None:
    """``from_dict`` and ``from_json`` take what a router or a client sent."""
    good = Offer(
        transfer_id="o",
        epoch=1,
        endpoints=(Endpoint(address="127.0.0.1:1", incarnation="x"),),
        sizes={"tp_size": 1},
        lease=1.0,
        groups=(Blocks.at(0, [1]),),
        fingerprint="",
    ).to_dict()
    for wrong in (bad, *({**good, key: bad} for key in good)):
        try:
            Offer.from_dict(wrong)
        except InvalidInputError:
            continue
    for field in ("ids", "positions", "holes", "start"):
        for wrong in (bad, [bad], [1, bad]):
            with contextlib.suppress(InvalidInputError):
                Offer.from_dict({**good, "groups": [{"ids": [1, 2], field: wrong}]})
    for text in (bad, str(bad), b"\xff", "[" * 100_000):
        if isinstance(text, (str, bytes)):
            with pytest.raises(InvalidInputError):
                Offer.from_json(text)


@pytest.mark.parametrize("kind", [AgentConfig, Timeouts], ids=lambda k: k.__name__)
def test_configurations(kind: Any) -> None:
    """Every field of a configuration refuses what it cannot use."""
    for field in attrs.fields(kind):
        for bad in VALUES:
            try:
                kind(**{field.name: bad})
            except (KvxferError, TypeError, ValueError) as error:
                text = str(error)
            else:
                continue
            assert text, (field.name, bad)
