"""Hostile messages by the million against a live agent with keys on.

``python -m kvxfer.testing.hostile --messages 1000000``

A victim runs in a process of its own and holds transfers that nobody may touch.  A friend pulls
other transfers from it all the time, and checks every byte.  Meanwhile peers that *have* a key send
lies, bent messages and noise, in their own name and in the friend's; they know every transfer id,
every epoch and every incarnation, and lack only the tickets.  Others without a key knock, and raw
sockets send garbage before and after their greeting.

At the end: the victim holds what it held, told nobody anything, serves the friend, is healthy, and
its memory has not grown with what was sent.  Exit status 0 if so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvxfer.agent import Agent, AgentConfig
from kvxfer.core import wire
from kvxfer.core.control import ControlConfig, Security, ZmqChannel
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import allow, write_key_pair
from kvxfer.core.layout import Blocks, KVLayout
from kvxfer.core.offer import Offer
from kvxfer.errors import KvxferError, WireError
from kvxfer.testing.hostile_messages import HostileMessages

__all__ = ["HostilePlan", "Report", "main", "run"]

BLOCKS = 256
SECRETS = 64
"""Transfers that the victim holds and that nobody was handed."""
ATTACKERS = 4
"""Connections with a key."""
WARM_UP = 0.1
"""Of the messages: until then the victim's memory may settle."""
GROWTH_MIB = 64.0
"""How much it may grow afterwards."""
_LONG = 86400.0
_QUEUE = 64
"""Messages that may wait per route."""
_RAW_EVERY = 2000
"""One raw connection per so many messages."""


@attrs.frozen(kw_only=True)
class HostilePlan:
    """How much, and with which seed."""

    messages: int = 1_000_000
    seed: int = 1
    stall: float = 60.0
    """Seconds without progress after which the run fails."""


@attrs.define(kw_only=True)
class Report:
    """Figures of one run; ``violations`` is empty if every promise held."""

    messages: int = 0
    seconds: float = 0.0
    raw_connections: int = 0
    friend_transfers: int = 0
    friend_slowest: float = 0.0
    """Seconds."""
    rss_before_mib: float = 0.0
    rss_after_mib: float = 0.0
    held_before: int = 0
    held_after: int = 0
    learned: int = 0
    counters: dict[str, int] = attrs.field(factory=dict)
    violations: list[str] = attrs.field(factory=list)


def run(plan: HostilePlan, say: Callable[[str], None] = lambda _: None) -> Report:
    """Run it; blocks until it is over."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-hostile-") as name:
        directory = Path(name)
        for peer in ("victim", "friend", "mallory", "stranger"):
            _, public = write_key_pair(directory / peer, generate_key_pair(peer))
            if peer != "stranger":
                allow(directory / "allowed", str(public))
        with _Victim(directory) as victim:
            return _Siege(plan, victim, directory, say).run()


# ---- the siege --------------------------------------------------------------------------------


class _Siege:
    def __init__(
        self, plan: HostilePlan, victim: _Victim, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._victim = victim
        self._directory = directory
        self._say = say
        self._rng = random.Random(plan.seed)
        self._report = Report()
        self._over = threading.Event()
        self._errors: list[str] = []
        self._told: list[str] = []

    def run(self) -> Report:
        report, victim = self._report, self._victim
        friend = _agent(self._directory, "friend")
        attackers = [self._attacker("mallory", i, friend) for i in range(ATTACKERS)]
        attackers.append(self._attacker("stranger", 100, friend))
        helper = threading.Thread(target=self._friendship, args=(friend,), name="friend")
        began = time.monotonic()
        try:
            self._transfer(friend)
            first = victim.ask("facts")
            report.held_before = first["secrets"]
            helper.start()
            self._attack(attackers)
        finally:
            self._over.set()
            if helper.ident is not None:
                helper.join(self._plan.stall)
            for attacker in attackers:
                attacker.channel.close()
        report.seconds = time.monotonic() - began
        self._transfer(friend)
        friend.close()
        self._judge(victim.ask("facts"), attackers)
        return report

    def _attacker(self, name: str, number: int, friend: Agent) -> _Attacker:
        channel = ZmqChannel(
            ControlConfig(
                security=_security(self._directory, name),
                send_queue_messages=_QUEUE,
                reconnect_min=0.01,
                reconnect_max=0.1,
            )
        )
        facts = self._victim.facts
        messages = HostileMessages(
            self._plan.seed * 1000 + number,
            keeper=facts["incarnation"],
            others=(friend.incarnation, facts["incarnation"], "unknown-1"),
            transfers=tuple(f"secret-{i}" for i in range(SECRETS)),
            me=f"mallory-{number}",
            address=channel.address,
        )
        return _Attacker(channel, facts["address"], facts["incarnation"], messages)

    def _attack(self, attackers: list[_Attacker]) -> None:
        """Send until all are sent, as fast as the victim takes them."""
        report, plan = self._report, self._plan
        keyed = attackers[:ATTACKERS]
        settled = max(1, int(plan.messages * WARM_UP))
        deadline, told = time.monotonic() + plan.stall, 0
        while report.messages < plan.messages:
            sent = 0
            for attacker in keyed:
                sent += attacker.burst(min(_QUEUE, plan.messages - report.messages - sent))
            for attacker in attackers:
                self._told += attacker.listen()
            attackers[-1].burst(1)
            before, report.messages = report.messages, report.messages + sent
            if before // _RAW_EVERY != report.messages // _RAW_EVERY:
                self._raw()
            if before < settled <= report.messages:
                report.rss_before_mib = self._victim.ask("facts")["rss_mib"]
            if sent:
                deadline = time.monotonic() + plan.stall
            elif time.monotonic() > deadline:
                report.violations.append(f"no message was taken for {plan.stall:g} s")
                return
            else:
                keyed[0].channel.wait(0.001)
            if report.messages // 50_000 > told:
                told = report.messages // 50_000
                facts = self._victim.ask("facts")
                self._say(
                    f"{report.messages} sent, {facts['counters']['channel.messages_in']} received, "
                    f"{report.friend_transfers} transfers of the friend, "
                    f"RSS {facts['rss_mib']:.1f} MiB"
                )

    def _raw(self) -> None:
        """Somebody who speaks no ZMTP, or half of it."""
        rng = self._rng
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
        noise = rng.choice(
            [
                rng.randbytes(300),
                greeting[: rng.randrange(64)],
                greeting + b"\x04" + bytes([rng.randrange(256)]) + rng.randbytes(200),
                greeting + b"\x06" + (16 << 20).to_bytes(8, "big") + bytes(100_000),
                greeting + b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(193),
                b"",
            ]
        )
        with contextlib.suppress(OSError):
            raw = socket.create_connection(("127.0.0.1", self._victim.port), 5)
            raw.settimeout(5)
            with raw:
                raw.sendall(noise)
        self._report.raw_connections += 1

    def _friendship(self, friend: Agent) -> None:
        while not self._over.is_set():
            try:
                self._transfer(friend)
            except (KvxferError, AssertionError) as error:
                self._errors.append(f"a friend's transfer failed: {error}")
                return

    def _transfer(self, friend: Agent) -> None:
        """Pull one transfer, and check its bytes."""
        answer = self._victim.ask("offer")
        began = time.monotonic()
        offer = Offer.from_dict(answer["offer"])
        count = len(offer.groups[0].ids)
        first = self._rng.randrange(BLOCKS - count)
        handle = friend.pull(offer, Blocks.at(0, list(range(first, first + count))))
        if not friend.wait(handle, self._plan.stall):
            raise AssertionError(f"not over within {self._plan.stall:g} s")
        handle.result()
        memory = _memory_of(friend).reshape(2, BLOCKS, 1024)[:, first : first + count]
        expected = np.array([i % 251 for i in offer.groups[0].ids.tolist()], dtype=np.uint8)
        if not (memory == expected[None, :, None]).all():
            raise AssertionError("the bytes are not the ones that were held")
        report = self._report
        report.friend_transfers += 1
        report.friend_slowest = max(report.friend_slowest, time.monotonic() - began)

    def _judge(self, facts: dict[str, Any], attackers: list[_Attacker]) -> None:
        report, violations = self._report, self._report.violations
        report.held_after = facts["secrets"]
        report.rss_after_mib = facts["rss_mib"]
        report.counters = {
            name: count
            for name, count in sorted(facts["counters"].items())
            if name.startswith(("messages.", "channel.", "acks.", "grants.", "hellos."))
        }
        violations += self._errors
        if report.held_after != SECRETS or facts["freed"]:
            violations.append(f"{SECRETS - report.held_after} holds were freed: {facts['freed']}")
        report.learned = len(self._told)
        violations += [f"an answer told something: {text}" for text in self._told[:5]]
        if not facts["ready"]:
            violations.append(f"the victim is not ready: {facts['reasons']}")
        growth = report.rss_after_mib - report.rss_before_mib
        if growth > GROWTH_MIB:
            violations.append(f"the victim grew by {growth:.1f} MiB")
        if attackers[-1].channel.counters["dialled_connected"]:
            violations.append("a key that is not allowed was let in")


class _Attacker:
    """One connection, and what came back over it."""

    def __init__(
        self, channel: ZmqChannel, address: str, victim: str, messages: HostileMessages
    ) -> None:
        self.channel = channel
        self._route = channel.dial(address)
        self._messages = messages
        self._victim = victim
        self._next = self._small_enough()

    def burst(self, most: int) -> int:
        """Send as many as there is room for; how many that were."""
        for sent in range(most):
            if not self.channel.send(self._route, self._next):
                return sent
            self._next = self._small_enough()
        return most

    def _small_enough(self) -> bytes:
        while True:
            frame = self._messages.next()
            if len(frame) <= self.channel.config.max_message_nbytes:
                return frame

    def listen(self) -> list[str]:
        """The answers that tell something of a hold or an accept of the victim's."""
        told = []
        for message in self.channel.receive():
            try:
                body = wire.decode(message.data).body
            except WireError:
                continue
            # That something is not its own it says to everybody: that tells nothing.
            refused = isinstance(body, wire.Grant) and any(
                refusal.ref.keeper == self._victim for refusal in body.refused
            )
            granted = isinstance(body, wire.Grant) and bool(body.granted)
            if granted or refused or isinstance(body, wire.Accept):
                told.append(f"{body!r:.200}")
        return told


# ---- the victim -------------------------------------------------------------------------------


class _Victim:
    """The process, asked for facts over its standard input and output."""

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.testing.hostile", "--victim", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.facts = self.ask("facts")
        self.port = int(self.facts["address"].partition("#")[0].rpartition(":")[2])

    def ask(self, what: str) -> dict[str, Any]:
        """One question, one answer. Any thread."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise AssertionError(f"the victim died: status {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> _Victim:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _security(directory: Path, name: str) -> Security:
    return Security(secret_key_file=str(directory / name), allowed_keys=str(directory / "allowed"))


def _layout() -> KVLayout:
    return KVLayout(
        num_blocks=BLOCKS,
        block_stride=1024,
        planes=2,
        plane_stride=BLOCKS * 1024,
        kernel_tokens=16,
        token_stride=64,
        heads=2,
        head_stride=32,
        head_nbytes=32,
        dtype="uint8",
    )


_memories: dict[str, np.ndarray[Any, Any]] = {}


def _memory_of(agent: Agent) -> np.ndarray[Any, Any]:
    return _memories[agent.incarnation]


def _agent(directory: Path, name: str) -> Agent:
    from kvxfer.backends.shm import ShmTransport

    transport = ShmTransport()
    memory = transport.allocate(2 * BLOCKS * 1024, "uint8")
    agent = Agent(
        transport,
        config=AgentConfig(name=name, lease=30.0),
        control=ControlConfig(
            security=_security(directory, name), reconnect_min=0.01, reconnect_max=0.1
        ),
    )
    agent.register_kv_caches({"layer0": memory}, _layout())
    _memories[agent.incarnation] = np.asarray(memory)
    return agent


def _victim(directory: Path) -> int:
    agent = _agent(directory, "victim")
    blocks = _memory_of(agent).reshape(2, BLOCKS, 1024)
    blocks[:] = (np.arange(BLOCKS) % 251).astype(np.uint8)[None, :, None]
    for i in range(SECRETS):
        agent.hold(f"secret-{i}", Blocks.at(0, [i]), lease=_LONG)
    freed: list[str] = []
    serial = 0
    for line in _lines():
        freed += [
            str(event)
            for event in agent.poll()
            if str(getattr(event, "transfer_id", "")).startswith("secret-")
        ]
        answer: dict[str, Any] = {}
        if line == "offer":
            serial += 1
            ids = [(serial * 7 + k) % BLOCKS for k in range(1 + serial % 8)]
            answer["offer"] = agent.hold(f"friend-{serial}", Blocks.at(0, ids)).to_dict()
        else:
            snapshot, health = agent.snapshot(), agent.health()
            leases = agent._engine.producer.leases
            answer = {
                "address": agent.address,
                "incarnation": agent.incarnation,
                "rss_mib": _rss_mib(),
                "secrets": sum(f"secret-{i}" in leases for i in range(SECRETS)),
                "freed": freed[:10],
                "ready": health.ready,
                "reasons": list(health.reasons),
                "peers": len(snapshot.peers),
                "counters": snapshot.counters,
            }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    agent.close()
    return 0


def _lines() -> Iterator[str]:
    """What is asked; ends when nobody can ask any more. Events are collected in between."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable:
            line = sys.stdin.readline()
            if not line:
                return
            yield line.strip()


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# ---- the command ------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if every promise held."""
    parser = argparse.ArgumentParser(description="Hostile messages against an agent with keys on.")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--victim", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.victim:
        return _victim(Path(options.victim))

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    report = run(HostilePlan(messages=options.messages, seed=options.seed), say)
    figures = attrs.asdict(report)
    figures |= {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "seed": options.seed,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    say(
        f"{report.messages} messages in {report.seconds:.1f} s "
        f"({report.messages / max(report.seconds, 1e-9):.0f}/s), {report.raw_connections} raw "
        f"connections; {report.friend_transfers} transfers of the friend, the slowest "
        f"{report.friend_slowest * 1000:.0f} ms; "
        f"RSS {report.rss_before_mib:.1f} MiB after a tenth, {report.rss_after_mib:.1f} MiB at the "
        f"end; {report.held_after} of {report.held_before} holds kept; {report.learned} answers "
        "told anything"
    )
    for name, count in report.counters.items():
        if name.startswith("messages.refused") or name in (
            "messages.rejected",
            "channel.messages_in",
            "channel.keys_refused",
            "channel.inbound_handshakes_failed",
        ):
            say(f"  {name} {count}")
    for violation in report.violations:
        say(f"VIOLATION: {violation}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
