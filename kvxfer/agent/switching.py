"""Failover of one link: counts faults, moves the link to its next backend, and probes the way back.

The decisions are ``kvxfer.policies.failover``'s.  A part that has something in flight over the
backend that was left is posted over the next one only when nothing of it can touch its memory any
more: by the engine's own proof, or by a fence of the connection that was left (``proof``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvxfer.agent.probe import Probe
from kvxfer.core.events import BackendChanged
from kvxfer.core.verdict import Op
from kvxfer.policies.failover import BackendState, Standing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.agent.context import Context
    from kvxfer.agent.links import Link
    from kvxfer.core.pollable import Pollable
    from kvxfer.core.transport import Fence, Peer, Transport
    from kvxfer.errors import KvxferError
    from kvxfer.policies.failover import Change, Failover

__all__ = ["Switching"]


class Switching:
    """Progress thread only. ``transports``: those both sides have, the preferred one first."""

    def __init__(
        self, ctx: Context, link: Link, policy: Failover, transports: Sequence[Transport]
    ) -> None:
        self._ctx = ctx
        self._link = link
        self._policy = policy
        self._transports = {t.name: t for t in transports}
        self._standing = Standing(policy, [t.name for t in transports])
        self._probe: Probe | None = None
        self._stuck: dict[str, Probe] = {}
        """Probes whose thread did not come back: before it does, there is no other."""
        self._fences: dict[Peer, Pollable[Fence]] = {}

    @property
    def order(self) -> tuple[str, ...]:
        """Names, the preferred one first."""
        return self._standing.order

    def state(self, now: float) -> BackendState | None:
        """None while the preferred backend is used. Any thread."""
        standing = self._standing
        if standing.current == standing.preferred:
            return None
        return BackendState(
            peer=self._link.incarnation,
            backend=standing.current,
            preferred=standing.preferred,
            wait=standing.wait(now),
            reason=standing.reason,
        )

    # ---- the way down ------------------------------------------------------------------------

    def fault(self, error: KvxferError, now: float, *, final: bool = False) -> bool | None:
        """The backend in use failed. True: the link has moved; False: that was merely counted.

        None: there is no other one to move to, and nothing was counted.
        """
        transport = self._link.transport
        assert transport is not None
        if self._standing.alternative() is None:
            self._ctx.counters.count("failover.no_alternative")
            return None
        self._ctx.counters.count("failover.faults")
        change = self._standing.fault(
            transport.name, now, str(error), final=final or transport.closed
        )
        if change is None:
            return False
        self._move(change, now)
        return True

    @property
    def patience(self) -> float:
        """Seconds for which a backend that was in use is waited for, if there is another one."""
        if self._standing.alternative() is None:
            return math.inf
        return self._policy.window

    def arrived(self) -> None:
        """Something arrived over the backend in use."""
        self._standing.arrived(self._standing.current)

    def _move(self, change: Change, now: float) -> None:
        count = self._ctx.counters.count
        count("failover.downgrades" if change.down else "failover.upgrades")
        count(f"failover.to.{change.after}")
        log = self._ctx.log.problem if change.down else self._ctx.log.news
        log(
            "backend_changed",
            "peer %s is reached over %s instead of %s: %s",
            self._link.incarnation,
            change.after,
            change.before,
            change.reason,
            peer=self._link.incarnation,
            backend=change.after,
        )
        self._ctx.emit(
            BackendChanged(
                peer=self._link.incarnation,
                before=change.before,
                backend=change.after,
                down=change.down,
                reason=change.reason,
            )
        )
        self._drop_probe()
        # A connection of that backend may be used again: what was proven of it is void.
        for peer in [p for p in self._fences if p.transport.name == change.after]:
            del self._fences[peer]
        self._link.use(self._transports[change.after], now, broken=change.down)
        self._schedule(now)

    # ---- what may still land -----------------------------------------------------------------

    def proof(self, peer: Peer, op: Op) -> tuple[bool | None, str]:
        """Whether nothing of ours lands over a connection that was left; None: not known yet.

        The first question asks for the fence, which serves everybody.  The text says why not.
        """
        fence = self._fences.get(peer)
        if fence is None:
            self._ctx.counters.count("failover.fences")
            fence = self._fences[peer] = peer.transport.fence(peer)
        answer, error = fence.poll()
        if error is not None:
            return False, str(error)
        if answer is None:
            return None, ""
        return (answer.done if op is Op.WRITE else answer.ours_done), answer.reason

    # ---- the way up --------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Probe what is due."""
        if not self._link.usable:
            return
        self._link.close_unwanted()
        if self._probe is None:
            self._begin(now)
        if self._probe is not None:
            self._look(self._probe, now)
        self._schedule(now)

    def _schedule(self, now: float) -> None:
        if not self._link.usable:
            return
        if self._probe is not None:
            self._ctx.at(self, now + self._ctx.config.pump_interval)
            return
        at = self._standing.next_at()
        if at is not None:
            self._ctx.at(self, max(at, now + self._ctx.config.pump_interval))

    def _begin(self, now: float) -> None:
        hello = self._link.hello
        name = self._standing.due(now)
        if name is None or hello is None:
            return
        stuck = self._stuck.get(name)
        transport = self._transports[name]
        why = ""
        if transport.closed:
            why = "it was closed"
        elif name not in hello.infos:
            why = "the peer does not offer it any more"
        elif stuck is not None and stuck.stuck:
            why = "the thread of a probe is stuck in it"
        if why:
            self._standing.probed(name, now, ok=False, reason=why)
            return
        self._ctx.counters.count("failover.probes")
        remotes = self._link.descriptors_of(name)
        self._probe = Probe(
            transport,
            hello.infos[name],
            peer=self._link.kept(name),
            remote=remotes[0] if remotes else None,
            scratch=self._ctx.scratch.get(name),
            deadline=now + self._ctx.timeouts.connect,
            nudge=lambda: self._ctx.nudge(self),
        )

    def _look(self, probe: Probe, now: float) -> None:
        answer = probe.poll(now)
        if answer is None:
            return
        ok, reason = answer
        name = probe.transport.name
        self._probe = None
        if probe.stuck:
            self._stuck[name] = probe
            self._ctx.counters.count("failover.probes_stuck")
        if ok and probe.peer is not None:
            self._link.keep(probe.peer)
        else:
            self._ctx.counters.count("failover.probes_failed")
            self._link.drop_kept(name)
            probe.drop()
        change = self._standing.probed(name, now, ok=ok, reason=reason)
        if change is not None:
            self._move(change, now)

    def peer_changed(self, now: float) -> None:
        """The peer's addresses or memory are new: what was learnt of them is void."""
        self._drop_probe()
        for name in self._transports:
            if name != self._standing.current:
                self._link.drop_kept(name)
        self._schedule(now)

    def _drop_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is not None:
            self._standing.unproven(probe.transport.name, self._ctx.clock.now())
            self._link.drop_kept(probe.transport.name)
            probe.drop()

    def close(self) -> None:
        """The link has ended."""
        self._drop_probe()
        self._fences.clear()
        self._ctx.forget(self)
