"""Control messages as somebody hostile would send them: valid ones, bent, and noise.

Equal seeds give equal messages.  The bent ones start from a valid message of every type, so that
they get past the decoder's first look and into the code behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvxfer.core import wire
from kvxfer.core.layout import KVLayout

__all__ = ["HOSTILE_VALUES", "HostileMessages", "bend", "hostile_layout"]

_RANKS = {
    "tp_size": 1,
    "tp_rank": 0,
    "dp_size": 1,
    "dp_rank": 0,
    "pp_size": 1,
    "pp_rank": 0,
    "dcp_size": 1,
    "interleave": 1,
    "total_kv_heads": 2,
    "latent": 0,
}
_DEEP = 2000
"""Levels of nesting: beyond Python's recursion limit."""

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**20,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.0,
    1e308,
    -1e9,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 513,
    "x" * 5000,
    "\x00",
    "../../etc/passwd",
    "tcp://0.0.0.0:0",
    "é" * 300,
    b"",
    b"\x04",
    b"\x08" + bytes(7),
    b"\xff" * 1000,
    [],
    [[]],
    {},
    {"": {}},
    [0] * 1000,
    ["x"] * 33,
)


def hostile_layout(rng: random.Random) -> dict[str, Any]:
    """A layout in wire form with one to three fields that make no sense."""
    layout = KVLayout(
        num_blocks=8,
        block_stride=64,
        planes=2,
        plane_stride=512,
        kernel_tokens=4,
        token_stride=16,
        heads=2,
        head_stride=8,
        head_nbytes=8,
        dtype="uint8",
    ).to_wire()
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(sorted(layout))
        layout[key] = rng.choice(HOSTILE_VALUES)
    if rng.random() < 0.1:
        layout.pop(rng.choice(sorted(layout)))
    if rng.random() < 0.1:
        layout[rng.choice(["x", "parts", "offset "])] = rng.choice(HOSTILE_VALUES)
    return layout


def bend(value: Any, rng: random.Random) -> Any:
    """``value`` with one place in it replaced, removed or doubled."""
    place = rng.random()
    if isinstance(value, dict) and value and place < 0.9:
        key = rng.choice(sorted(value, key=str))
        bent = dict(value)
        if place < 0.08:
            del bent[key]
        elif place < 0.12:
            bent["more"] = rng.choice(HOSTILE_VALUES)
        else:
            bent[key] = bend(value[key], rng)
        return bent
    if isinstance(value, list) and value and place < 0.85:
        index = rng.randrange(len(value))
        bent_list = list(value)
        if place < 0.1:
            del bent_list[index]
        elif place < 0.2:
            bent_list += [value[index]] * rng.choice([1, 40, 2000])
        else:
            bent_list[index] = bend(value[index], rng)
        return bent_list
    return rng.choice(HOSTILE_VALUES)


class HostileMessages:
    """An endless supply of frames.

    Args:
        seed: of the generator.
        keeper: the incarnation that is attacked.
        others: incarnations in whose name lies are told.
        transfers: ids that are under way and must stay so.
        me: our own incarnation.
        address: where we say that we are.
    """

    def __init__(
        self,
        seed: int,
        *,
        keeper: str,
        others: tuple[str, ...] = ("somebody",),
        transfers: tuple[str, ...] = ("t0",),
        me: str = "mallory",
        address: str = "tcp://127.0.0.1:1#mallory",
    ) -> None:
        self._rng = random.Random(seed)
        self._keeper = keeper
        self._others = others
        self._transfers = transfers
        self._me = me
        self._address = address
        self._makers: tuple[Callable[[], wire.Message], ...] = (
            self._hello,
            lambda: wire.HelloRefused((1, 1), "no"),
            wire.Who,
            lambda: wire.Open(self._number(), [self._ref() for _ in range(self._few())]),
            lambda: wire.Grant(self._number(), [wire.Granted(self._ref(), 5.0)], []),
            lambda: wire.Release(self._ref(), self._ranks(), self._rng.random() < 0.5),
            lambda: wire.Decline(self._ref(), self._ranks()),
            lambda: wire.Gone(self._ref(), "stale", "gone"),
            lambda: wire.Ask(self._transfer()),
            lambda: wire.Accept(self._ref(), [wire.BlocksWire(b"\x04" + bytes(8))], 5.0),
            lambda: wire.Seal(self._ref(), self._ranks(), 64, b"token"),
            lambda: wire.PushFailed(self._ref(), "unknown", "", True, True),
            lambda: wire.Cancel(self._ref(), "stale", "no"),
            wire.Bye,
            self._last_words,
            lambda: wire.Confirm([self._number() for _ in range(self._few())]),
        )

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self.next()

    def next(self) -> bytes:
        """One frame: half of them bent, a quarter valid lies, the rest damaged or noise."""
        rng = self._rng
        frame = self.valid()
        way = rng.random()
        if way < 0.25:
            return frame
        if way < 0.75:
            tree = bend(msgspec.msgpack.decode(frame[4:]), rng)
            try:
                return frame[:4] + msgspec.msgpack.encode(tree)
            except (OverflowError, ValueError, RecursionError):  # what msgpack cannot say
                return frame[:-1]
        if way < 0.85:
            damaged = bytearray(frame)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return bytes(damaged)
        if way < 0.90:
            return frame[: rng.randrange(len(frame) + 1)]
        if way < 0.92:
            return frame[:4] + b"\x91" * _DEEP + b"\x00"
        if way < 0.97:
            return frame[:4] + rng.randbytes(rng.randrange(200))
        return rng.randbytes(rng.randrange(400))

    def valid(self) -> bytes:
        """A well-formed message with a lie in it: about others' transfers, or in others' names."""
        rng = self._rng
        sender = self._me if rng.random() < 0.4 else rng.choice(self._others)
        mid = rng.choice([0, 1, rng.randrange(1, 1000), 2**63 - 1])
        body = rng.choice(self._makers)()
        return wire.encode(sender, body, mid, version=wire.WIRE_MAX)

    # ---- parts -------------------------------------------------------------------------------

    def _number(self) -> int:
        return self._rng.choice([0, 1, self._rng.randrange(100), 2**53, 2**63 - 1])

    def _few(self) -> int:
        return self._rng.choice([0, 1, 1, 2, 30])

    def _transfer(self) -> str:
        if self._rng.random() < 0.6:
            return self._rng.choice(self._transfers)
        return f"unknown-{self._rng.randrange(10**6)}"

    def _ref(self) -> wire.Ref:
        rng = self._rng
        keeper = rng.choice([self._keeper, self._keeper, self._me, *self._others])
        ticket = rng.choice(["", "", rng.randbytes(16).hex()])
        return wire.Ref(self._transfer(), keeper, rng.randrange(1, 20), ticket)

    def _ranks(self) -> dict[str, int]:
        """Now and then more of them than anybody could count out."""
        rng = self._rng
        if rng.random() < 0.8:
            return dict(_RANKS)
        sizes = (2, 1024, 2**20, 2**40, 2**62)
        return dict(_RANKS, **{rng.choice(["tp_size", "pp_size", "dp_size"]): rng.choice(sizes)})

    def _hello(self) -> wire.Hello:
        rng = self._rng
        layers = [wire.LayerWire("layer0", 0, 0, hostile_layout(rng))] if rng.random() < 0.5 else []
        transports = []
        if rng.random() < 0.5:
            region = wire.DescriptorWire(0, 2 ** rng.randint(1, 62), "dram", -1, b"")
            name = rng.choice(["loopback", "shm", "moriio"])
            data = rng.randbytes(rng.randrange(64))
            transports = [wire.TransportWire(name, rng.choice(self._others), data, [region])]
        return wire.Hello(
            versions=rng.choice([(1, 1), (1, 2), (2, 1), (0, 0), (9, 2**20)]),
            answer=rng.random() < 0.5,
            session=self._number(),
            revision=self._number(),
            name="hostile",
            address=rng.choice([self._address, "", "tcp://0.0.0.0:1", "nonsense", "a#b#c"]),
            ranks=self._ranks(),
            fingerprint="",
            transports=transports,
            layers=layers,
            keeper=rng.choice([None, wire.KeeperWire("", 0), wire.KeeperWire(self._address, 5)]),
        )

    def _last_words(self) -> wire.Bye:
        release = wire.Release(self._ref(), self._ranks(), True)
        last = wire.encode(self._rng.choice(self._others), release, 3, version=wire.WIRE_MAX)
        return wire.Bye([1, 2, 3], [last, b"", self._rng.randbytes(30)])
