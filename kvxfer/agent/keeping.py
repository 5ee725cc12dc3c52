"""The agent's side of its keeper: what it is told, and what is believed of it.

Agent and keeper grant the same holds.  They must not disagree in the dangerous direction, so:

- A hold the keeper knows is not freed before the keeper said that it closed it, and until when it
  had granted it (``lets_go``, ``judges``).  After the GIL was held the agent thus hears first, and
  judges then.
- The keeper tells of a new reader before it grants (``Opened``), and its news are read between the
  receiving and the handling of messages: nobody's release is known before its reading is.
- A keeper that died has granted nothing after its death, and never for longer than a lease: until
  then every hold that it knew counts as granted to those who read it.
- One that does not answer is killed after ``KeeperConfig.hang_timeout``.  So nothing waits for it
  for ever.
- A lease that seems over for us as a reader is not over before the keeper was heard (``knows``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

from kvxfer.core.clock import SystemClock
from kvxfer.core.control_config import ControlConfig
from kvxfer.core.observations import KeeperDied, KeeperStarted
from kvxfer.core.timers import Timers
from kvxfer.errors import WireError
from kvxfer.keeper import messages as m
from kvxfer.keeper.port import Died, ProcessPort, Started, control_of, recipe_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvxfer.agent.config import AgentConfig
    from kvxfer.agent.context import Context, Steppable
    from kvxfer.agent.links import Link
    from kvxfer.core import wire
    from kvxfer.core.channel import Channel
    from kvxfer.core.clock import Clock
    from kvxfer.core.control_config import ChannelAuth
    from kvxfer.core.leases import Hold, LeaseTable
    from kvxfer.keeper.config import KeeperConfig
    from kvxfer.keeper.port import KeeperPort

__all__ = ["Keeping", "KeepingHooks", "keeper_port", "timing"]

_SYNC_EVERY = 1.0
"""Seconds: how often each side hears that the other lives."""
_STALL = 0.5
"""Seconds between two rounds, beyond what is usual, after which this side was held up: then it
judges nobody by the clock."""
_RETRY = 0.01
"""Seconds until orders that the keeper's full buffer refused are tried again."""
_NEAR = 1 / 8
"""The part of a lease by which a hold may last longer than the keeper knows: it has granted it by
then, or asks the agent."""
_TELL = 2048
"""Holds per round that a new keeper is told of."""


@attrs.frozen(kw_only=True)
class KeepingHooks:
    """Where news go. All are called on the progress thread."""

    leases: LeaseTable
    opened: Callable[[Hold, str, int, float], None]
    """A reader was granted a hold that it was not reading."""
    closed: Callable[[Hold, float], None]
    """The keeper let a hold go, or goes on with it; its times are up to date."""
    renewed: Callable[[wire.Ref, float, float, float], None]
    """A peer's hold: until when it is granted now, and when that was asked for."""
    quiet: Callable[[str, float], None]
    """A peer was not heard of for too long."""
    address_changed: Callable[[str, float], None]
    links: Callable[[], Iterator[Link]]
    next_seq: Callable[[], int]


def keeper_port(
    config: AgentConfig,
    channel: Channel,
    auth: ChannelAuth | None,
    clock: Clock,
    *,
    incarnation: str,
) -> KeeperPort | None:
    """A real keeper for an agent over the real control channel and clock; None for any other.

    Raises:
        ConfigError: ``auth`` cannot be handed to another process.
    """
    control = getattr(channel, "config", None)
    keeper = config.keeper
    real = isinstance(control, ControlConfig) and isinstance(clock, SystemClock)
    if keeper is None or not real or not isinstance(control, ControlConfig):
        return None
    setup = m.Setup(
        incarnation=incarnation,
        control=control_of(control, keeper),
        auth=recipe_of(auth),
        **timing(config, keeper),
    )
    return ProcessPort(keeper, setup, clock, config.name)


def timing(config: AgentConfig, keeper: KeeperConfig) -> dict[str, float]:
    """The durations of a ``Setup``."""
    return {
        "retry": config.grant_interval,
        "beat_interval": keeper.beat_interval,
        "quiet_after": keeper.peer_timeout / 2,
        "patience": keeper.patience,
    }


@attrs.define
class _Watched:
    since: float
    bound: float
    granted_until: float


class Keeping:
    """Progress thread only. Without a port it does nothing, quickly."""

    def __init__(self, ctx: Context, port: KeeperPort | None, config: KeeperConfig | None) -> None:
        self._ctx = ctx
        self._port = port
        self._config = config
        self._hooks: KeepingHooks | None = None
        self.generation = 0
        """Which life of the keeper can be spoken to; 0: none."""
        self.address = ""
        """Where peers reach it; empty while it is not ready."""
        self.counters: dict[str, int] = {}
        """The keeper's own, as it told them last."""
        self.deaths = 0
        self._died_at = -math.inf
        self._why = ""
        self._ready = False
        self._ready_at = -math.inf
        self._began = 0.0
        self._questions = 0
        self._asked: dict[str, Hold] = {}
        """Holds that wait for the answer to a ``Close``."""
        self._orders: list[m.Order] = []
        self._frames: list[bytes] = []
        self._untold: Iterator[Hold] | None = None
        self._watched: dict[wire.Ref, _Watched] = {}
        self._bounds: Timers[wire.Ref] = Timers()
        self._alive: dict[str, bool] = {}
        """Peers with keepers, and whether they are heard of."""
        self._syncs = 0
        self._sync_sent = -math.inf
        self._sync_open = False
        self._heard_at = -math.inf
        """When that ``Sync`` was sent which was answered last."""
        self._last_round = 0.0
        self._fair_since = 0.0
        """Since when this side was not held up while it waits for an answer."""
        self._curious: dict[Steppable, None] = {}

    def open(self, hooks: KeepingHooks, now: float) -> None:
        """Begin. Returns at once; the keeper comes up by itself."""
        self._hooks = hooks
        self._last_round = self._fair_since = self._began = now
        if self._port is not None:
            self._port.open(self._ctx.channel)
            self._ctx.at(self, now + _SYNC_EVERY)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()

    # ---- holds of ours -----------------------------------------------------------------------

    def held(self, hold: Hold) -> None:
        """A hold was begun or extended by the agent."""
        if self._ready and not hold.closing:
            self._tell_hold(hold)

    def reads_again(self, hold: Hold, reader: str) -> None:
        """The agent granted it to a reader that had finished."""
        if hold.shared == self.generation != 0:
            self._orders.append(m.Again(hold.transfer_id, hold.epoch, reader))

    def finished(self, hold: Hold, reader: str) -> None:
        """A reader said that it is finished."""
        if hold.shared == self.generation != 0:
            self._orders.append(m.Finished(hold.transfer_id, hold.epoch, reader))

    def lets_go(self, hold: Hold) -> bool:
        """Whether the keeper grants this no more; if it may, it is told not to, and answers."""
        self._bury(hold)
        if hold.shared:
            self._close(hold, math.inf)
        return not hold.shared and self._ctx.clock.now() >= hold.promised

    def judges(self, hold: Hold) -> bool:
        """Whether a hold that seems over is; if the agent cannot know, it asks.

        The keeper closes it only if it did not grant it further than the agent knows.
        """
        if self._bury(hold):
            return False
        if hold.shared:
            self._close(hold, hold.ends_at if hold.reading else math.inf)
        return not hold.shared

    def _close(self, hold: Hold, unless_after: float) -> None:
        if hold.asked >= unless_after:
            return  # asked for this already: the answer will come
        self._questions += 1
        hold.asked, hold.question = unless_after, self._questions
        self._asked[hold.transfer_id] = hold
        self._orders.append(m.Close(hold.transfer_id, hold.epoch, hold.question, unless_after))
        self._ctx.counters.count("keeper.asked")

    def _answered(self, hold: Hold) -> None:
        hold.asked, hold.question = -math.inf, 0
        if self._asked.get(hold.transfer_id) is hold:
            del self._asked[hold.transfer_id]

    def _bury(self, hold: Hold) -> bool:
        """If who knew this hold is dead: it may have promised a lease at its last moment.

        True if the hold lasts longer by that.
        """
        if not hold.shared or hold.shared == self.generation:
            return False
        hold.shared = 0
        self._answered(hold)
        if not hold.opened:
            return False  # it would have told of a first reader
        assert self._hooks is not None
        hold.promised = self._died_at + hold.lease + self._hooks.leases.margin
        return self._hooks.leases.granted(hold, self._died_at + hold.lease)

    def _tell_hold(self, hold: Hold) -> None:
        self._bury(hold)
        if hold.question:
            self._answered(hold)  # somebody reads it after all: that question is void
        elif hold.shared and hold.ends_at - hold.told < hold.lease * _NEAR:
            return  # it knows enough
        hold.shared, hold.told = self.generation, hold.ends_at
        ticket = self._ctx.trust.ticket(hold.transfer_id, hold.epoch)
        self._orders.append(m.Held(hold.transfer_id, hold.epoch, ticket, hold.lease, hold.ends_at))

    # ---- holds of peers ----------------------------------------------------------------------

    def watch(self, ref: wire.Ref, *, bound: float, granted_until: float = -math.inf) -> None:
        """Have a peer's hold kept granted until ``bound``; ``granted_until`` is what we know."""
        if self._port is None:
            return
        watched = self._watched.get(ref)
        if watched is None:
            self._watched[ref] = _Watched(self._ctx.clock.now(), bound, granted_until)
        else:
            watched.bound = bound
            watched.granted_until = granted_until = max(granted_until, watched.granted_until)
        self._bounds.set(ref, bound)
        self._ctx.at(self, bound)
        if self._ready:
            assert self._hooks is not None
            self._orders.append(m.Watch(ref, bound, granted_until, self._hooks.next_seq()))

    def granted(self, ref: wire.Ref, until: float) -> None:
        """The agent itself obtained a grant for what is watched."""
        watched = self._watched.get(ref)
        if watched is not None:
            self.watch(ref, bound=watched.bound, granted_until=until)

    def unwatch(self, ref: wire.Ref) -> None:
        """It is read, or given up."""
        if self._watched.pop(ref, None) is not None:
            self._bounds.cancel(ref)
            if self._ready:
                self._orders.append(m.Unwatch(ref))

    def knows(self, since: float, now: float, curious: Steppable) -> bool:
        """Whether all renewals up to ``since`` are heard of; ``curious`` is stepped once they are.

        Never false for longer than ``KeeperConfig.hang_timeout``: then the keeper is killed.
        """
        if not self._ready or self._heard_at >= since:
            return True
        self._curious[curious] = None
        self._sync(now)
        self._ctx.at(curious, now + _SYNC_EVERY)
        return False

    # ---- peers -------------------------------------------------------------------------------

    def met(self, link: Link) -> None:
        """A peer said hello, first or again."""
        hello = link.hello
        if self._port is None or hello is None:
            return
        keeper = link.keeper.address if link.keeper is not None and link.version >= 2 else ""
        if keeper:
            self._alive[link.incarnation] = True
        else:
            self._alive.pop(link.incarnation, None)
        if self._ready:
            self._tell_peer(link, keeper)

    def _tell_peer(self, link: Link, keeper: str) -> None:
        assert link.hello is not None
        self._orders.append(
            m.PeerIs(
                link.incarnation,
                link.version,
                link.hello.address,
                keeper,
                self._ctx.channel.peer_of(link.mailbox.route),
            )
        )

    def parted(self, incarnation: str) -> None:
        """The link to a peer has ended."""
        self._alive.pop(incarnation, None)
        if self._ready and incarnation:
            self._orders.append(m.PeerGone(incarnation))

    def hears(self, incarnation: str) -> bool:
        """Whether a peer's keeper is heard of: then its process lives, however busy it is."""
        return self._ready and self._alive.get(incarnation, False)

    # ---- rounds ------------------------------------------------------------------------------

    def collect(self, now: float) -> None:
        """Take the keeper's news. Between the receiving and the handling of messages."""
        if self._port is None:
            return
        if now - self._last_round > _STALL + self._ctx.config.idle_interval:
            self._fair_since = now
        self._last_round = now
        for event in self._port.poll():
            if isinstance(event, Started):
                self._on_started(event, now)
            elif isinstance(event, Died):
                self._on_died(event, now)
            else:
                self._on_news(event, now)

    def flush(self, now: float) -> None:
        """Hand over what has come together in this round."""
        if self._port is None or not (self._orders or self._frames):
            return
        orders, self._orders = self._orders, []
        for begin in range(0, len(orders), m.CHUNK):
            self._frames.append(m.encode(orders[begin : begin + m.CHUNK]))
        sent = 0
        while sent < len(self._frames) and self._port.send(self._frames[sent]):
            sent += 1
        del self._frames[:sent]
        if self._frames:
            self._ctx.at(self, now + _RETRY)

    def step(self, now: float) -> None:
        """What is due by the clock."""
        if self._config is None or self._port is None:
            return
        for ref in self._bounds.pop_due(now):
            self._watched.pop(ref, None)  # the keeper forgets it by itself
        if self.generation:
            self._tell_some(now)
            self._watch_health(now, self._config)
        times = [now + _SYNC_EVERY]
        bound = self._bounds.next_at()
        if bound is not None:
            times.append(bound)
        self._ctx.at(self, min(times))

    def _watch_health(self, now: float, config: KeeperConfig) -> None:
        if self._ready:
            if now >= self._sync_sent + _SYNC_EVERY:
                self._sync(now)
            silent = now - max(self._sync_sent, self._fair_since) if self._sync_open else 0.0
            hung = silent > config.hang_timeout
        else:
            hung = now - max(self._began, self._fair_since) > config.start_timeout
        if hung:
            self._ctx.counters.count("keeper.hung")
            self._fair_since = now  # not again at once: it is dying
            assert self._port is not None
            self._port.kill()

    def _sync(self, now: float) -> None:
        """Ask for all news; one question at a time."""
        if self._sync_open:
            return
        assert self._hooks is not None
        self._syncs += 1
        self._sync_open, self._sync_sent = True, now
        self._orders.append(m.Sync(self._syncs, self._hooks.next_seq()))

    # ---- events ------------------------------------------------------------------------------

    def _on_started(self, event: Started, now: float) -> None:
        self.generation = event.generation
        self._began = now
        self._ready = self._sync_open = False
        self._orders.clear()
        self._frames.clear()

    def _on_ready(self, address: str, now: float) -> None:
        assert self._hooks is not None
        self._ready = True
        self.address = address
        self._ctx.counters.count("keeper.started")
        if self._ctx.observers:
            self._ctx.observe(KeeperStarted())
        self._ready_at = self._heard_at = now  # it knows of no renewals from before
        for link in self._hooks.links():
            self.met(link)
        seq = self._hooks.next_seq()
        for ref, watched in self._watched.items():
            self._orders.append(m.Watch(ref, watched.bound, watched.granted_until, seq))
        self._untold = iter(tuple(self._hooks.leases))
        self._ctx.soon(self)
        self._hooks.address_changed(address, now)

    def _tell_some(self, now: float) -> None:
        """Tell a new keeper what is held, some of it in each round."""
        if self._untold is None or not self._ready:
            return
        assert self._hooks is not None
        leases = self._hooks.leases
        for _ in range(_TELL):
            hold = next(self._untold, None)
            if hold is None:
                self._untold = None
                return
            known = hold.closing or hold.shared == self.generation
            if not known and leases.get(hold.transfer_id) is hold:
                self._tell_hold(hold)
        self._ctx.at(self, now)

    def _on_died(self, event: Died, now: float) -> None:
        assert self._hooks is not None
        self.deaths += 1
        self._ctx.counters.count("keeper.died")
        if self._ctx.observers:
            self._ctx.observe(KeeperDied(reason=event.why))
        self._died_at, self._why = event.at, event.why
        self.generation = 0
        had, self.address = self.address, ""
        self._ready = self._sync_open = False
        self._orders.clear()
        self._frames.clear()
        self._untold = None
        self._satisfy()
        asked, self._asked = self._asked, {}
        for hold in asked.values():
            hold.asked, hold.question = -math.inf, 0
            self._hooks.closed(hold, now)  # it waits for an answer that will not come
        if had:
            self._hooks.address_changed("", now)

    def _on_news(self, frame: bytes, now: float) -> None:
        assert self._hooks is not None
        try:
            news = m.decode_news(frame)
        except WireError:
            self._ctx.counters.count("keeper.malformed")
            return
        leases = self._hooks.leases
        if news.ready:
            self._on_ready(news.ready, now)
        for renewed in news.renewed:
            watched = self._watched.get(renewed.ref)
            # What was asked for an earlier pull of the same hold is over with it.
            if watched is not None and renewed.sent >= watched.since:
                watched.granted_until = max(watched.granted_until, renewed.until)
                self._hooks.renewed(renewed.ref, renewed.until, renewed.sent, now)
        for opened in news.opened:
            hold = leases.get(opened.transfer)
            if hold is not None and hold.epoch == opened.epoch:
                self._hooks.opened(hold, opened.reader, opened.seq, now)
        for answer in news.closed:
            hold = leases.get(answer.transfer)
            if hold is None or hold.epoch != answer.epoch:
                continue
            leases.granted(hold, answer.granted_until)
            for reader, seq in answer.readers.items():
                self._hooks.opened(hold, reader, seq, now)
            if hold.question != answer.number:
                continue  # it was told since that the hold goes on, or has died
            self._answered(hold)
            if answer.closed:
                hold.shared = 0
            self._hooks.closed(hold, now)
        for incarnation in news.heard:
            if incarnation in self._alive:
                self._alive[incarnation] = True
        for incarnation in news.quiet:
            if incarnation in self._alive:
                self._alive[incarnation] = False
                self._hooks.quiet(incarnation, now)
        if news.synced:
            self.counters = news.counters
            if news.synced == self._syncs and self._sync_open:
                self._sync_open = False
                self._heard_at = self._sync_sent
                self._satisfy()

    def _satisfy(self) -> None:
        for curious in self._curious:
            self._ctx.soon(curious)
        self._curious.clear()

    # ---- for people --------------------------------------------------------------------------

    def reasons(self, now: float) -> list[str]:
        """Why leases depend on the GIL of this process at present; empty if they do not."""
        if self._port is None or self._config is None:
            return []
        if self._ready:
            return []
        times = "once" if self.deaths == 1 else f"{self.deaths} times"
        if self.deaths:
            return [f"keeper: {self._why}; it died {times} and is being started again"]
        if now - self._began > self._config.start_timeout:
            return [f"keeper: not ready {now - self._began:.1f} s after it was started"]
        return []
