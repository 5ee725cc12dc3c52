"""Keepers that are processes: held GILs, kill -9, and what is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from agent_rig import at, layout

from kvxfer.agent import Agent, AgentConfig
from kvxfer.backends.loopback import LoopbackTransport
from kvxfer.core.control_config import ControlConfig
from kvxfer.core.control_curve import generate_key_pair
from kvxfer.core.keyfiles import allow, write_key_pair
from kvxfer.core.keys import Security
from kvxfer.errors import ConfigError
from kvxfer.keeper.config import KeeperConfig
from kvxfer.keeper.port import control_of

LEASE = 4.0
HERE = Path(__file__).parent


class Worker:
    """A ``keeper_worker`` process."""

    def __init__(self, name: str, **options: Any) -> None:
        paths = [str(HERE), *(os.path.abspath(p) for p in sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "keeper_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )
        options = {"name": name, "lease": LEASE, "lease_margin": 0.3, "min_lease": 0.01, **options}
        self._write(options)

    def _write(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def begin(self, what: str, **args: Any) -> None:
        self._write([what, args])

    def ask(self, what: str, **args: Any) -> Any:
        self.begin(what, **args)
        return self.read()

    @property
    def state(self) -> Any:
        return self.ask("state")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def until(condition: Callable[[], object], seconds: float = 90.0) -> Any:
    """Look again and again; the deadline is for a machine that is very busy."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def workers() -> Iterator[Callable[..., tuple[Worker, Worker]]]:
    made: list[Worker] = []

    def make(**options: Any) -> tuple[Worker, Worker]:
        made.extend([Worker("prefill", **options), Worker("decode", **options)])
        for worker in made:
            assert worker.read() == "up"
        p, c = made
        c.ask("connect", address=p.ask("address"))
        until(lambda: know_each_other(p, c))
        return p, c

    yield make
    for worker in made:
        worker.end()


def know_each_other(p: Worker, c: Worker) -> bool:
    """Both keepers are up, and each side knows where to reach the other's."""
    left, right = p.state, c.state
    return (
        left["ready"]
        and right["ready"]
        and left["peers"] == {right["incarnation"]: right["address"]}
        and right["peers"] == {left["incarnation"]: left["address"]}
    )


def finish(p: Worker, c: Worker, offer: str) -> None:
    c.ask("pull", offer=offer, ids=[1, 2], layer="second", last=True)
    state = until(lambda: (s := c.state)["states"]["t"] != "pending" and s)
    assert state["states"]["t"] == "done", state["errors"]
    assert c.ask("digest", ids=[1, 2]) == p.ask("digest", ids=[5, 6])
    until(lambda: "Sent" in p.state["events"])


@pytest.mark.parametrize("held", ["producer", "consumer", "both"])
def test_a_gil_held_for_twice_the_lease(
    workers: Callable[..., tuple[Worker, Worker]], held: str
) -> None:
    """A C call that keeps the GIL for twice the lease ends no lease; every byte is right."""
    p, c = workers()
    offer = p.ask("hold", transfer_id="t", ids=[5, 6])
    c.ask("pull", offer=offer, ids=[1, 2], layer="first", last=False)
    until(lambda: c.ask("granted_until", transfer_id="t") > 0)
    held_ones = [w for w, name in ((p, "producer"), (c, "consumer")) if held in ("both", name)]
    for worker in held_ones:
        worker.begin("hold_gil", seconds=2.1 * LEASE)
    for worker in held_ones:
        assert worker.read() >= 2 * LEASE
    finish(p, c, offer)


def test_without_keepers_such_a_lease_ends(
    workers: Callable[..., tuple[Worker, Worker]],
) -> None:
    """What the test above would show of agents alone: EXPIRED."""
    made = [Worker("prefill", keeper=None), Worker("decode", keeper=None)]
    try:
        p, c = made
        assert [w.read() for w in made] == ["up", "up"]
        offer = p.ask("hold", transfer_id="t", ids=[5, 6])
        c.ask("pull", offer=offer, ids=[1, 2], layer="first", last=False)
        until(lambda: c.ask("granted_until", transfer_id="t") > 0)
        c.ask("hold_gil", seconds=2.1 * LEASE)
        until(lambda: "Expired" in p.state["events"])
        c.ask("pull", offer=offer, ids=[1, 2], layer="second", last=True)
        until(lambda: c.state["states"]["t"] == "failed")
    finally:
        for worker in made:
            worker.end()


def test_a_killed_worker_takes_its_keeper_along(
    workers: Callable[..., tuple[Worker, Worker]],
) -> None:
    """kill -9: when the worker is reaped its keeper is dead, and nothing is granted any more."""
    p, c = workers()
    offer = p.ask("hold", transfer_id="t", ids=[5, 6])
    c.ask("pull", offer=offer, ids=[1, 2], layer="first", last=False)
    until(lambda: c.ask("granted_until", transfer_id="t") > 0)
    keeper = p.state["keeper"]
    assert alive(keeper)
    p.process.kill()
    p.process.wait()
    until(lambda: not alive(keeper), seconds=20.0)
    granted = c.ask("granted_until", transfer_id="t")
    until(lambda: c.state["states"]["t"] == "failed" or time.monotonic() > granted)
    assert c.ask("granted_until", transfer_id="t") <= granted
    until(lambda: "PeerDown" in c.state["events"])


def test_a_killed_keeper_is_named_and_replaced(
    workers: Callable[..., tuple[Worker, Worker]],
) -> None:
    """Its death is a reason of ``health``; the next one knows what is held, and leases hold."""
    p, c = workers(keeper={"restart_min": 0.5})
    offer = p.ask("hold", transfer_id="t", ids=[5, 6])
    c.ask("pull", offer=offer, ids=[1, 2], layer="first", last=False)
    until(lambda: c.ask("granted_until", transfer_id="t") > 0)
    first = p.state["keeper"]
    os.kill(first, signal.SIGKILL)
    until(lambda: any("was killed by signal 9" in r for r in p.state["reasons"]))
    until(lambda: not p.state["reasons"] and know_each_other(p, c))
    assert p.state["keeper"] != first
    given = p.state["counters"].get("keeper.grants.given", 0)
    p.ask("hold_gil", seconds=2.1 * LEASE)
    until(lambda: p.state["counters"].get("keeper.grants.given", 0) > given)
    finish(p, c, offer)
    assert p.state["counters"]["keeper.died"] == 1


def test_a_stopped_keeper_holds_nothing_up(
    workers: Callable[..., tuple[Worker, Worker]],
) -> None:
    """SIGSTOP: it is killed once it has not answered for ``hang_timeout``, and holds end."""
    p, _ = workers(keeper={"hang_timeout": 1.0})
    first = p.state["keeper"]
    os.kill(first, signal.SIGSTOP)
    p.ask("hold", transfer_id="t", ids=[5])
    until(lambda: "Expired" in p.state["events"])
    until(lambda: p.state["ready"] and p.state["keeper"] != first)
    assert p.state["counters"]["keeper.hung"] == 1
    assert not alive(first)


def test_keepers_speak_under_the_keys_of_their_agents(tmp_path: Path) -> None:
    """With keys on, the keepers' own channel has them too, and grants go over it."""
    pairs = {name: generate_key_pair(name) for name in ("prefill", "decode")}
    agents = []
    try:
        for name, pair in pairs.items():
            secret, _ = write_key_pair(tmp_path / f"{name}.key", pair)
            allowed = tmp_path / f"{name}.allowed"
            for other in pairs.values():
                allow(allowed, other.public.hex(), name=other.name)
            security = Security(secret_key_file=secret, allowed_keys=allowed)
            agent = Agent(
                LoopbackTransport(),
                config=AgentConfig(name=name, data_network_trusted=True),
                control=ControlConfig(security=security),
            )
            agents.append(agent)
            agent.register_kv_caches({"layer": np.zeros((2, 4, 4, 2, 8), np.uint8)}, layout(4))
        p, c = agents
        c.connect([p.endpoint])
        until(lambda: all(len(a._ctx.keeping._alive) == 1 for a in agents))
        c.renew([p.hold("t", at(0, 1))])
        until(lambda: c.snapshot().counters.get("keeper.grants.obtained", 0) >= 1)
        until(lambda: p.snapshot().counters.get("keeper.grants.given", 0) >= 1)
        assert all(a.snapshot().counters.get("keeper.died", 0) == 0 for a in agents)
    finally:
        for agent in agents:
            agent.close()


def test_closing_leaves_nothing_behind() -> None:
    """No process, no descriptor, no thread, no file."""
    here = set(os.listdir("/"))

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> int:
        with Agent(LoopbackTransport(), config=AgentConfig(name="x")) as agent:
            until(lambda: agent._ctx.keeping.address)
            pid: int = agent._ctx.keeping._port.pid  # type: ignore[union-attr]
            assert alive(pid)
        return pid

    once()
    before, threads = descriptors(), threading.active_count()
    pid = once()
    assert not os.path.exists(f"/proc/{pid}")
    assert descriptors() == before
    assert threading.active_count() == threads
    assert set(os.listdir("/")) == here


def test_closing_while_it_starts() -> None:
    """An agent that is closed at once leaves no keeper that comes up later."""
    agents = [Agent(LoopbackTransport(), config=AgentConfig(name="x")) for _ in range(3)]
    ports: list[Any] = [agent._ctx.keeping._port for agent in agents]
    for agent in agents:
        agent.close()
    for port in ports:
        assert not port._thread.is_alive()
        assert port.pid is None


def test_signals_of_a_terminal_do_not_end_it() -> None:
    """Ctrl-C and SIGTERM to the whole group: the agent may still have transfers to finish."""
    with Agent(LoopbackTransport(), config=AgentConfig(name="x")) as agent:
        until(lambda: agent._ctx.keeping.address)
        pid: int = agent._ctx.keeping._port.pid  # type: ignore[union-attr]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        rounds = agent._ctx.keeping._syncs
        until(lambda: agent._ctx.keeping._syncs >= rounds + 2)
        assert alive(pid)
        assert agent._ctx.keeping.deaths == 0


def test_off_where_the_channel_is_not_the_real_one() -> None:
    """No process for a simulated channel, nor where it was switched off."""
    from kvxfer.testing.clock import FakeClock
    from kvxfer.testing.sim import SimConfig, SimNetwork

    clock = FakeClock()
    network = SimNetwork(clock, random.Random(0), SimConfig())
    for options in (
        {"channel": network.channel(), "clock": clock},
        {"config": AgentConfig(keeper=None)},
    ):
        with Agent(LoopbackTransport(), **options) as agent:  # type: ignore[arg-type]
            assert agent._ctx.keeping._port is None
            assert agent._local.keeper.address == ""


def test_it_listens_beside_the_agent() -> None:
    """The keeper's channel is the agent's, with keys and limits, on a port of its own."""
    control = ControlConfig(bind_host="127.0.0.1", port_range="41000-41009", max_routes=7)
    fields = control_of(control, KeeperConfig())
    assert ControlConfig(**fields) == control
    fields = control_of(control, KeeperConfig(port=41500))
    assert (fields["port"], fields["port_range"]) == (41500, None)
    fields = control_of(ControlConfig(port=41000), KeeperConfig())
    assert (fields["port"], fields["port_range"]) == (0, None)
    secured = ControlConfig(security={"secret_key_file": "/k", "allowed_keys": "/a"})  # type: ignore[arg-type]
    assert ControlConfig(**control_of(secured, KeeperConfig())) == attrs.evolve(secured, port=0)


def test_auth_that_cannot_be_handed_over_is_refused() -> None:
    """A keeper without the agent's keys would be a hole in the wall: nothing is started."""

    class Own:
        def start(self, context: object) -> None: ...
        def configure_listener(self, socket: object) -> None: ...
        def configure_dialled(self, socket: object, address: object) -> None: ...
        def stop(self) -> None: ...

    with pytest.raises(ConfigError, match="keeper_recipe"):
        Agent(LoopbackTransport(), auth=Own())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70000}, "KeeperConfig.port"),
        ({"beat_interval": 0}, "KeeperConfig.beat_interval"),
        ({"peer_timeout": 2.0}, "at least four times"),
        ({"restart_min": 5, "restart_max": 1}, "restart_max"),
        ({"patience": 1.0}, "patience"),
    ],
)
def test_values_are_checked(options: dict[str, Any], words: str) -> None:
    """Errors name the field and the value."""
    with pytest.raises(ConfigError, match=words):
        KeeperConfig(**options)
