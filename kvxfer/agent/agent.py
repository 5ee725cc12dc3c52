"""``Agent``: the worker half. It owns the transports, the control channel and the transfers.

All methods may be called from any thread.  None but ``open``, ``register_kv_caches``, ``wait``,
``drain`` and ``close`` waits for anything.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from kvxfer.agent import arguments
from kvxfer.agent import orders as o
from kvxfer.agent.accept import destinations
from kvxfer.agent.caches import Caches, LayerCache, as_layers, register_caches, single_rank
from kvxfer.agent.config import AgentConfig, Progress, seconds_of
from kvxfer.agent.context import Context
from kvxfer.agent.datapath import failover_order, refuse_open_data_path
from kvxfer.agent.defaults import (
    make_channel,
    make_classifier,
    make_retry,
    make_timeouts,
    make_transports,
)
from kvxfer.agent.driver import Driver
from kvxfer.agent.engine import Engine
from kvxfer.agent.executing import execute, refusal
from kvxfer.agent.handles import TransferHandle, TransferState
from kvxfer.agent.health import Health, Snapshot, health_of, snapshot_of
from kvxfer.agent.hello import LocalHello
from kvxfer.agent.keeping import keeper_port
from kvxfer.agent.mapping import rank_of, ranks_to_wire
from kvxfer.agent.open_transfers import OpenTransfer, OpenTransfers
from kvxfer.agent.owners import Declines, Owners
from kvxfer.agent.probe import register_scratch
from kvxfer.agent.pull import PullSpec
from kvxfer.agent.pump import Pump
from kvxfer.agent.push import PushSpec, Readiness
from kvxfer.agent.watching import Watching, events_only
from kvxfer.core.clock import Clock, SystemClock
from kvxfer.core.events import Event, Failed, Role
from kvxfer.core.layout import Align, Blocks, KVLayout
from kvxfer.core.observations import Verb
from kvxfer.core.offer import Endpoint, Offer
from kvxfer.core.topology import Ranks
from kvxfer.core.trace import trace_of
from kvxfer.core.wire import MAX_PAYLOAD_NBYTES
from kvxfer.errors import (
    CircuitOpenError,
    ClosedError,
    ErrorKind,
    HandshakeError,
    InvalidInputError,
    KvxferError,
    RegionBusyError,
    TransferError,
)
from kvxfer.keeper.port import recipe_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvxfer.core.channel import Channel
    from kvxfer.core.control_config import ChannelAuth, ControlConfig
    from kvxfer.core.observations import Observer
    from kvxfer.core.transport import Transport
    from kvxfer.keeper.port import KeeperPort
    from kvxfer.policies.classify import ClassifierRegistry
    from kvxfer.policies.retry import RetryPolicy
    from kvxfer.policies.timeouts import Timeouts

__all__ = ["Agent"]

BlocksLike = Blocks | Sequence[Blocks]

_FAREWELL = 0.01
"""Seconds given to good-byes at close."""


class Agent:
    """Moves KV-cache blocks between this rank and its peers.

    Args:
        backend: the name of an installed backend, a ``Transport``, or several in order of
            preference; a peer is reached through the first that both sides have, and with
            ``AgentConfig.failover`` through the next ones while that one fails.
        ranks: this rank and the sizes of its instance. May be left out only for a single rank,
            whose caches hold all heads.
        config, control, timeouts: see their classes.
        retry, classifier: strategies; by default the ones of the entry points.
        auth: configures the control channel's sockets in place of ``control.security``.
        clock, rng, channel, keeper: what the simulator replaces.
        on_event: called with every event on the progress thread as it happens; must not wait.
        observers: told of the events and of more; see ``kvxfer.core.observations`` for what, and
            for the rules of threads.
        trace_context: asked on the caller's thread by ``hold``, ``push`` and ``accept``, and by a
            ``pull`` whose offer has no trace context, for the W3C ``traceparent`` that the transfer
            belongs to; "" for none. ``kvxfer.observe.tracing.current_traceparent`` fits.

    Raises:
        PluginError: the backend cannot be loaded.
        ConfigError: the control channel cannot bind or its keys are not right; or keys are on and
            a backend's own ports are open to strangers (``AgentConfig.data_network_trusted``); or
            failover names backends that the agent does not have, or it has one only.
        MissingDependencyError: keys are on and libzmq was built without CURVE.
    """

    def __init__(
        self,
        backend: str | Transport | Sequence[str | Transport] = "shm",
        *,
        ranks: Ranks | None = None,
        config: AgentConfig | None = None,
        control: ControlConfig | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        classifier: ClassifierRegistry | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        channel: Channel | None = None,
        auth: ChannelAuth | None = None,
        incarnation: str | None = None,
        keeper: KeeperPort | None = None,
        on_event: Callable[[Event], None] | None = None,
        observers: Iterable[Observer] = (),
        trace_context: Callable[[], str] | None = None,
    ) -> None:
        self.config = config or AgentConfig()
        self.clock: Clock = clock or SystemClock()
        self.incarnation = incarnation or secrets.token_hex(8)
        self._given_ranks = ranks
        self._caches = Caches()
        self._lock = threading.Lock()
        self._open = OpenTransfers(
            capacity=self.config.limits.early,
            ttl=self.config.limits.remembered_ttl,
            clock=self.clock,
            check_open=self._check_open,
            abort=self._abort_handle,
            aged=self._aged,
        )
        self._epochs = itertools.count(1)
        self._listeners: dict[object, Callable[[], None]] = {}
        self._closed = False
        self._pump: Pump | None = None
        watching = tuple(arguments.observer(x) for x in observers)
        if on_event is not None:
            watching = (events_only(arguments.observer(on_event)), *watching)
        self._transports = make_transports(backend)
        try:
            order = failover_order(self.config.failover, self._transports)
            refuse_open_data_path(self._transports, self.config, control, auth)
            if channel is None and self.config.keeper is not None:
                recipe_of(auth)  # refused before anything is bound
            self._channel = channel or make_channel(control, auth)
        except BaseException:
            for transport in self._transports:
                transport.close(0.0)
            raise
        self._trace_context = trace_context
        self._ctx = Context(
            incarnation=self.incarnation,
            config=self.config,
            timeouts=timeouts or make_timeouts(),
            retry=retry or self.config.retry or make_retry(),
            classifier=classifier or make_classifier(),
            rng=rng or random.Random(),  # noqa: S311 - spreads retries, guards nothing
            channel=self._channel,
            clock=self.clock,
            observers=watching,
            listener=self._notify,
        )
        self._local = LocalHello(
            name=self.config.name,
            incarnation=self.incarnation,
            address=self._channel.address,
            ranks=ranks or Ranks(tp_size=1, latent=True),
            fingerprint=self.config.fingerprint,
            transports=self._transports,
            caches=self._caches,
            versions=self.config.wire_versions,
            order=order,
        )
        self._engine = Engine(self._ctx, self._local, self._transports)
        self._driver = Driver(self._engine, self.clock)
        limits = self.config.limits
        self._declines = Declines(capacity=limits.early, ttl=limits.early_ttl)
        for table in (self._declines, self._open.failed):
            self._ctx.sweeper.watch(table)
        port = keeper or keeper_port(
            self.config, self._channel, auth, self.clock, incarnation=self.incarnation
        )
        if port is not None:
            self._engine.open_keeper(port, self.clock.now())
        if self.config.progress is Progress.THREAD:
            for transport in self._transports:
                transport.on_change(self._channel.wake)
            self._pump = Pump(self._engine, self.clock, self.config.name)
            self._pump.start()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Agent {self.config.name!r} {self.incarnation} at {self.address}>"

    # ---- facts -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What peers dial."""
        return self._channel.address

    @property
    def ranks(self) -> Ranks:
        return self._local.ranks

    @property
    def endpoint(self) -> Endpoint:
        """How peers name this worker."""
        return Endpoint(
            address=self.address, incarnation=self.incarnation, rank=rank_of(self._local.ranks)
        )

    @property
    def info(self) -> o.WorkerInfo:
        """What the scheduler half needs to know of this worker. Pickles."""
        return o.WorkerInfo(
            endpoint=self.endpoint,
            sizes=ranks_to_wire(self._local.ranks),
            fingerprint=self.config.fingerprint,
            timeouts=self._ctx.timeouts,
            tickets=self._ctx.trust.tickets,
        )

    def reload_keys(self) -> None:
        """Read the key files again, now rather than at their next look. Waits for one round.

        Keys that are new in the allow-list are let in, peers whose keys went are cut off, and a new
        pair of our own is used for new connections.  Without effect if there are no keys.

        Raises:
            ConfigError: a file is not right; the keys of before stay valid.
        """
        self._check_open()
        self._call(lambda _: self._channel.reload_keys())

    def health(self) -> Health:
        """Whether it makes sense to send requests here. Cheap."""
        return health_of(self._engine, self._pump, self.clock.now(), closed=self._closed)

    def snapshot(self) -> Snapshot:
        """Sizes of every table, counters, peers, and the quarantine. For people and metrics."""
        return snapshot_of(self._engine)

    def add_observer(self, observer: Observer) -> Callable[[], None]:
        """Have ``observer`` told of everything from now on; returns what ends that. Any thread.

        One that is added twice is told twice.

        Raises:
            InvalidInputError: it is not callable.
        """
        watching = Watching(arguments.observer(observer))
        with self._lock:
            self._ctx.observers = (*self._ctx.observers, watching)

        def remove() -> None:
            with self._lock:
                self._ctx.observers = tuple(x for x in self._ctx.observers if x is not watching)

        return remove

    # ---- set-up ------------------------------------------------------------------------------

    def register_kv_caches(
        self,
        caches: Mapping[str, Any] | Iterable[LayerCache],
        layout: KVLayout | Mapping[str, KVLayout] | None = None,
        *,
        groups: Mapping[str, int] | None = None,
    ) -> Caches:
        """Register this worker's KV caches: one region per storage, layers as offsets in it.

        May block (registration pins memory): call it at start, not from a step.  Calling it again
        replaces what was registered, which needs that no transfer is under way.

        Args:
            caches: buffers by layer name, or ``LayerCache`` values that carry their layouts.
            layout: with a mapping: one layout of offset 0 for every layer, which begins where its
                buffer begins; or one per layer name, with offsets counted from the storage behind
                the buffer. Left out, it is taken from each tensor (``KVLayout.from_tensor``).
            groups: KV-cache group by layer name; 0 for those not named.

        Raises:
            InvalidInputError: see ``register_caches``.
            TransportError: a transport refused the memory.
        """
        self._check_open()
        layers = as_layers(caches, layout, {} if groups is None else groups)
        self._refuse_while_used()
        if self.config.failover is not None and not self._ctx.scratch:
            self._ctx.scratch = register_scratch(self._transports)
        new = register_caches(layers, self._transports)
        self._replace_caches(new)
        return new

    def unregister_kv_caches(self) -> None:
        """Let go of the registered KV caches, for an engine that gives their memory away.

        Peers are told when caches are registered again. May block, as ``register_kv_caches``.

        Raises:
            InvalidInputError: transfers still use them.
        """
        self._check_open()
        self._refuse_while_used()
        self._replace_caches(Caches())

    def _refuse_while_used(self) -> None:
        if self._moving or self._engine.consumer.drainings or self._engine.producer.drainings:
            raise InvalidInputError(
                "transfers still use the caches registered before", next_step="drain() first"
            )

    def _replace_caches(self, new: Caches) -> None:
        old = self._caches
        self._caches = new

        def change(now: float) -> None:
            self._local.caches = new
            self._local.revision += 1
            if self._given_ranks is None:
                self._local.ranks = single_rank(new)
            self._engine.consumer.caches_changed(new.blocks_per_group)
            self._engine.links.caches_changed(now)

        try:
            self._call(change)
        except BaseException:
            self._caches = old
            self._deregister(new)
            raise
        self._deregister(old)

    def _deregister(self, caches: Caches) -> None:
        for transport in self._transports:
            for region in caches.regions.get(transport.name, ()):
                try:
                    transport.deregister(region)
                except RegionBusyError:
                    # What was reclaimed without proof is still in the engine's hands: so is it.
                    self._ctx.counters.count("regions.left_registered")

    def connect(self, peers: Iterable[str | Endpoint]) -> None:
        """Begin to reach peers before they are needed. Never waits; ``PeerUp`` says it worked.

        Raises:
            InvalidInputError: not an address.
        """
        self._check_open()
        wanted = arguments.endpoints("peers", peers)

        def connect(now: float) -> None:
            for peer in wanted:
                try:
                    link = self._engine.links.reach(peer.address, peer.incarnation or None, now)
                except CircuitOpenError:
                    continue  # counted, and in ``health``; the next transfer tries again
                link.want_path(now)

        self._order(connect)

    # ---- producer, READ ----------------------------------------------------------------------

    def hold(
        self,
        transfer_id: str,
        blocks: BlocksLike,
        *,
        lease: float | None = None,
        readers: Sequence[int] | None = None,
        owner: str | None = None,
        tag: object = None,
        traceparent: str | None = None,
    ) -> Offer:
        """Hold blocks for readers and make the offer to hand to them.

        For an instance of one rank; with several, ``SchedulerAgent.hold`` makes the offer.

        Args:
            blocks: the blocks per group, with positions; one ``Blocks`` if there is one group.
            lease: seconds; ``AgentConfig.lease`` if left out.
            readers: ranks whose ACKs are needed. Left out, it follows from the readers' sizes.
            owner: the request this is for, where several share one transfer (samples of one
                prompt): each holds the same blocks under its own name, and gets the same offer. The
                one event at the end is for all of them (``Event.owners``).
            tag: comes back in all events of this transfer.
            traceparent: the W3C trace context of the request; travels in the offer. Left out: what
                ``Agent(trace_context=...)`` says.

        Raises:
            InvalidInputError: the id is held already and not by owners of the same blocks, or a
                block id is out of range.
        """
        groups = self._groups(blocks)
        self._check_ids(groups)
        seconds = self._lease(lease)
        readers = arguments.rank_list(readers)
        transfer_id = arguments.text_id("transfer_id", transfer_id)
        if owner is not None:
            arguments.text_id("owner", owner)
        trace = self._trace(traceparent)
        shared = self._share_hold(transfer_id, groups, owner)
        if shared is not None:
            return shared
        epoch = next(self._epochs)
        handle = self._hold(transfer_id, epoch, seconds, readers, owner=owner, tag=tag, trace=trace)
        offer = Offer(
            transfer_id=transfer_id,
            epoch=epoch,
            endpoints=(
                attrs.evolve(self.endpoint, ticket=self._ctx.trust.ticket(transfer_id, epoch)),
            ),
            sizes=ranks_to_wire(self._local.ranks),
            lease=seconds,
            groups=groups,
            fingerprint=self.config.fingerprint,
            traceparent=trace,
        )
        self._open.offered(handle, offer)
        return offer

    def _share_hold(
        self, transfer_id: str, groups: tuple[Blocks, ...], owner: str | None
    ) -> Offer | None:
        """The offer of a hold that this owner joins; None if there is none yet."""
        entry = self._open.get(Role.PRODUCER, transfer_id)
        if entry is None or entry.offer is None or owner is None:
            return None
        handle, offer = entry.handle, entry.offer
        if not handle.owners or owner in handle.owners or offer.groups != groups:
            raise InvalidInputError(
                f"transfer {transfer_id!r} is held already, for {list(handle.owners)}; refused: "
                f"owner {owner!r} with {'equal' if offer.groups == groups else 'other'} blocks",
                next_step="use another transfer id, or name each owner once, with equal blocks",
            )
        return offer if handle._join(owner) else None

    def _hold(
        self,
        transfer_id: str,
        epoch: int,
        lease: float,
        readers: Sequence[int] | None = None,
        *,
        owner: str | None = None,
        tag: object = None,
        trace: str = "",
    ) -> TransferHandle:
        handle = self._open.begin(Verb.HOLD, transfer_id, tag=tag, trace=trace)
        if owner is not None:
            handle._join(owner)

        def hold(now: float) -> None:
            self._engine.producer.hold(handle, epoch=epoch, lease=lease, readers=readers, now=now)

        self._order(hold, handle)
        return handle

    # ---- consumer, READ ----------------------------------------------------------------------

    def pull(
        self,
        offer: Offer,
        blocks: BlocksLike,
        *,
        layers: Iterable[str] | None = None,
        last: bool = True,
        align: Align | str | None = None,
        uncovered_local: int = 0,
        owner: str | None = None,
        owners: int = 1,
        tag: object = None,
        traceparent: str | None = None,
    ) -> TransferHandle:
        """Read an offer's blocks into ours. Never waits.

        Args:
            blocks: our blocks per group, with positions. All empty: nothing is read, and the
                producer is released.
            layers: names of the layers to move now; all of them if left out.
            last: False if more submits for this transfer follow; nothing is published before all
                of them are terminal.
            align: how to pair lists without positions; see ``Align``.
            uncovered_local: how many of our last blocks may stay without data.
            owner, owners: the request this is for, and how many requests share the offer (samples
                of one prompt). Each pulls into blocks of its own, or declines; then all are
                published at once (``Event.owners``), and the producer is released. ``last`` follows
                from it.
            tag: comes back in all events of this transfer; with several submits, the first one's.
            traceparent: the W3C trace context of the request here, the first submit's. Left out:
                the one of the offer.

        Raises:
            InvalidInputError: a block id is out of range, listed twice, or still belongs to another
                transfer; the fingerprints differ; the transfer is under way already; the owner is
                none of those that share it.
        """
        offer = arguments.an_offer(offer)
        groups = self._groups(blocks)
        if owner is not None:
            arguments.text_id("owner", owner)
        if offer.fingerprint != self.config.fingerprint:
            raise HandshakeError(
                f"the offer's fingerprint is {offer.fingerprint!r}, ours is "
                f"{self.config.fingerprint!r}",
                next_step="serve the same model, dtype and KV quantisation on both sides",
            )
        spec = PullSpec(
            blocks=groups,
            layers=None if layers is None else self._layer_names(layers),
            align=arguments.alignment(align),
            uncovered_local=arguments.count("uncovered_local", uncovered_local),
        )
        trace = self._trace(traceparent, offer.traceparent)
        entry = self._open.reopen(
            Verb.PULL, offer.transfer_id, tag=tag, trace=trace, offered=offer.traceparent
        )
        with entry.lock:
            if entry.handle.done:
                return self._open.after_the_end(entry, last=last)
            if entry.submits and entry.epoch != offer.epoch:
                raise InvalidInputError(
                    f"transfer {offer.transfer_id!r} is being pulled from epoch {entry.epoch}, "
                    f"this offer has {offer.epoch}"
                )
            if entry.complete:
                raise InvalidInputError(
                    f"transfer {offer.transfer_id!r} is under way and complete already",
                    next_step="submit all parts but the last with last=False",
                )
            shared: Owners | None = None
            try:
                shared = self._check_owner(entry, offer, owner, owners)
                entry.pin = self._engine.consumer.pins.pin(
                    offer.transfer_id, destinations(groups), entry.pin
                )
            except InvalidInputError:
                if not entry.submits:
                    self._open.forget(Role.CONSUMER, offer.transfer_id)
                    if shared is not None:
                        self._declines.put_back(shared, offer.epoch, self.clock.now())
                raise
            if shared is not None and owner is not None:
                entry.owners = shared
                last = shared.add(owner, owners, pulled=True)
                entry.handle._join(owner)
            entry.submits += 1
            entry.complete = last
            entry.epoch = offer.epoch
            handle, pin = entry.handle, entry.pin

            def pull(now: float) -> None:
                consumer = self._engine.consumer
                try:
                    consumer.pull(offer, spec, handle, pin=pin, last=last, now=now)
                except KvxferError:
                    consumer.give_back(offer, now)
                    raise

            self._order(pull, handle, pinned=(pin, groups))
        return handle

    def _check_owner(
        self, entry: OpenTransfer, offer: Offer, owner: str | None, owners: int
    ) -> Owners | None:
        """The owners that ``owner`` may join; None if none are named.

        Raises:
            InvalidInputError: it may not.
        """
        if entry.submits and (owner is None) != (entry.owners is None):
            raise InvalidInputError(
                f"transfer {offer.transfer_id!r} is under way "
                + ("for owners that were named" if owner is None else "without naming owners"),
                next_step="name the owner in every pull of a transfer, or in none",
            )
        if owner is None:
            return None
        shared = entry.owners
        if shared is None:
            shared = self._declines.take(offer.transfer_id, offer.epoch)
        try:
            shared.check(owner, owners)
        except InvalidInputError:
            if entry.owners is None:
                self._declines.put_back(shared, offer.epoch, self.clock.now())
            raise
        return shared

    def decline(self, offer: Offer, *, owner: str | None = None, owners: int = 1) -> None:
        """Say that no rank of this instance will read; the producer frees at once. Never waits.

        Args:
            owner, owners: as for ``pull``: this request will not read. The others may; only if none
                of them does the producer hear of it.

        Raises:
            InvalidInputError: the owner is none of those that share it, or has pulled already.
        """
        self._check_open()
        offer = arguments.an_offer(offer)
        if owner is not None:
            arguments.text_id("owner", owner)
        if owner is not None and not self._decline_of(offer, owner, owners):
            return
        self._order(lambda now: self._engine.consumer.decline(offer, now))

    def _decline_of(self, offer: Offer, owner: str, owners: int) -> bool:
        """One owner declines; True if with it all have, without any pull."""
        entry = self._open.get(Role.CONSUMER, offer.transfer_id)
        if entry is not None:
            with entry.lock:
                if entry.submits and not entry.handle.done and entry.epoch == offer.epoch:
                    shared = self._check_owner(entry, offer, owner, owners)
                    assert shared is not None
                    if shared.add(owner, owners, pulled=False):
                        entry.complete = True
                        handle = entry.handle
                        self._order(lambda _: self._engine.consumer.complete(handle))
                    return False
        now = self.clock.now()
        all_declined = self._declines.add(offer.transfer_id, offer.epoch, owner, owners, now)
        self._order(lambda _: self._ctx.sweeper.arm())
        return all_declined

    def renew(self, offers: Iterable[Offer]) -> None:
        """Keep holds alive for requests that wait; also spares their pulls the round trip."""
        wanted = arguments.items("offers", offers, Offer)
        self._order(lambda now: self._engine.consumer.renew(wanted, now))

    # ---- WRITE -------------------------------------------------------------------------------

    def accept(
        self,
        transfer_id: str,
        blocks: BlocksLike,
        *,
        deadline: float | None = None,
        producers: Iterable[Endpoint] = (),
        uncovered_local: int = 0,
        tag: object = None,
        traceparent: str | None = None,
    ) -> TransferHandle:
        """Consumer: let producers write into these blocks. Never waits.

        Args:
            deadline: seconds from now until it fails; ``Timeouts.transfer`` if left out.
            producers: told our blocks at once, if known; others are told when they ask.
            uncovered_local: how many of our last blocks may stay without data. All other bytes
                must have been written when the producers seal, or it fails.
            tag: comes back in all events of this transfer.
            traceparent: the W3C trace context of the request; stays here.

        Raises:
            InvalidInputError: as ``pull``.
        """
        groups = self._groups(blocks)
        seconds = (
            self._ctx.timeouts.transfer if deadline is None else seconds_of("deadline", deadline)
        )
        known = arguments.endpoints("producers", producers)
        uncovered_local = arguments.count("uncovered_local", uncovered_local)
        trace = self._trace(traceparent)
        handle = self._open.begin(Verb.ACCEPT, transfer_id, tag=tag, trace=trace)
        try:
            pin = self._engine.consumer.pins.pin(transfer_id, destinations(groups))
        except InvalidInputError:
            self._open.forget(Role.CONSUMER, transfer_id)
            raise

        def accept(now: float) -> None:
            self._engine.consumer.accept(
                transfer_id,
                groups,
                handle,
                pin=pin,
                producers=known,
                uncovered_local=uncovered_local,
                duration=seconds,
                now=now,
            )

        self._order(accept, handle, pinned=(pin, groups))
        return handle

    def push(
        self,
        transfer_id: str,
        blocks: BlocksLike,
        *,
        to: Endpoint | Sequence[Endpoint] | str,
        layers: Iterable[str] | None = None,
        ready: Readiness | None = None,
        align: Align | str | None = None,
        tag: object = None,
        traceparent: str | None = None,
    ) -> TransferHandle:
        """Producer: write these blocks into what the consumer accepted. Never waits.

        Args:
            to: the consumer ranks (or the address of the only one); the same in every submit of a
                transfer.
            layers: names of the layers to move now; all of them if left out.
            ready: nothing is posted before ``ready.query()`` is true.
            tag: comes back in all events of this transfer; the first submit's.
            traceparent: the W3C trace context of the request, the first submit's; stays here.

        Raises:
            InvalidInputError: a block id is out of range, or the transfer was sealed.
        """
        groups = self._groups(blocks)
        self._check_ids(groups)
        targets = arguments.endpoints("to", to)
        if not targets:
            raise InvalidInputError("push names no consumer", next_step="pass its endpoint as to=")
        spec = PushSpec(
            blocks=groups,
            layers=None if layers is None else self._layer_names(layers),
            ready=arguments.readiness(ready),
            align=arguments.alignment(align),
        )
        trace = self._trace(traceparent)
        entry = self._open.reopen(Verb.PUSH, transfer_id, tag=tag, trace=trace)
        with entry.lock:
            if entry.handle.done:
                return self._open.after_the_end(entry, last=False)
            if entry.complete:
                raise InvalidInputError(f"transfer {transfer_id!r} was sealed already")
            entry.submits += 1
            handle = entry.handle
            self._order(lambda now: self._engine.producer.push(handle, targets, spec, now), handle)
        return handle

    def seal(self, transfer_id: str, payload: bytes = b"") -> TransferHandle:
        """Producer: no more submits; once all have landed, tell the consumer. Never waits.

        Args:
            payload: up to 64 KiB, such as the first token and its log-probabilities.

        Raises:
            InvalidInputError: nothing is being pushed under this id, or the payload is too large.
        """
        payload = arguments.payload(payload, MAX_PAYLOAD_NBYTES)
        transfer_id = arguments.text_id("transfer_id", transfer_id)
        entry = self._open.find(Role.PRODUCER, transfer_id)
        if entry is None:
            raise InvalidInputError(f"no transfer {transfer_id!r} is being pushed")
        with entry.lock:
            if entry.handle.done:
                return self._open.after_the_end(entry, last=True)
            entry.complete = True
            self._order(lambda now: _ignore(self._engine.producer.seal(transfer_id, payload)))
        return entry.handle

    # ---- any role ----------------------------------------------------------------------------

    def abort(self, transfer_id: str) -> None:
        """Give up whatever is under way with this id. Never waits; unknown ids are ignored.

        A pull, accept or push fails with ABORTED.  A hold is not freed under its readers: its
        lease ends within ``AgentConfig.abort_lease``.
        """
        transfer_id = arguments.text_id("transfer_id", transfer_id)

        def abort(now: float) -> None:
            self._engine.consumer.abort(transfer_id, now)
            if not self._engine.producer.abort_push(transfer_id, now):
                self._engine.producer.abort_hold(transfer_id, now)

        self._order(abort)

    def abort_push(self, transfer_id: str) -> None:
        """Give a push up, done when it returns: from then on it is not sealed as a success.

        For blocks that are about to be overwritten while they are pushed from.  What is being
        copied may go on, into blocks that the consumer does not publish.  Waits for one round of
        the progress thread.
        """
        transfer_id = arguments.text_id("transfer_id", transfer_id)
        self._check_open()
        self._call(lambda now: _ignore(self._engine.producer.abort_push(transfer_id, now)))

    def settle_push(self, transfer_id: str, timeout: float) -> bool:
        """Wait until nothing reads the blocks that were pushed so far; the push goes on after it.

        For blocks that are about to be overwritten, by a request that will be computed again into
        others. What is not out of them after ``timeout`` seconds, or waits for a consumer that has
        not accepted yet, is given up as by ``abort_push``.

        Returns:
            False if it was given up. True for an id that is not being pushed, too.

        Raises:
            InvalidInputError: called on the progress thread, from an observer or a callback.
        """
        transfer_id = arguments.text_id("transfer_id", transfer_id)
        end = self.clock.now() + arguments.timeout("timeout", timeout)
        self._refuse_inside("settle_push")
        self._check_open()
        found: list[bool | None] = []

        def look(_now: float) -> None:
            found.append(self._engine.producer.reading(transfer_id))

        while True:
            self._call(look)
            if found[-1] is False:
                return True
            left = end - self.clock.now()
            if found[-1] is None or left <= 0:
                self.abort_push(transfer_id)
                return False
            if self._pump is not None or not self._driver.drive(lambda: False, left):
                threading.Event().wait(min(left, self.config.pump_interval))

    def _abort_handle(self, handle: TransferHandle) -> None:
        """Only while it is this handle's transfer: the id may be in use again."""
        entry = self._open.get(handle.role, handle.transfer_id)
        if entry is not None and entry.handle is handle:
            self.abort(handle.transfer_id)

    def reclaim(self, transfer_id: str) -> None:
        """Take a transfer's blocks out of quarantine without proof, on your own responsibility."""
        transfer_id = arguments.text_id("transfer_id", transfer_id)

        def reclaim(now: float) -> None:
            for role in (self._engine.consumer, self._engine.producer):
                draining = role.drainings.get(transfer_id)
                if draining is not None and draining.quarantined:
                    draining.reclaim(now)

        self._order(reclaim)

    def poll(self) -> list[Event]:
        """Events since the last call, oldest first. Never waits.

        With manual progress this is also what moves everything on; while another thread does that,
        it only collects.
        """
        if self._pump is None and not self._closed:
            self._driver.step()
        found: list[Event] = []
        try:
            while True:
                found.append(self._ctx.events.popleft())
        except IndexError:  # empty, perhaps because another thread polls as well
            return found

    @property
    def next_wake(self) -> float:
        """Manual progress: when ``poll`` has something to do next, unless a message comes first.

        Seconds of the agent's clock, as the last ``poll`` knew it.
        """
        return self._driver.next_wake

    def wait(
        self, handles: TransferHandle | Iterable[TransferHandle], timeout: float | None = None
    ) -> bool:
        """Block until all handles are terminal. False on timeout, which changes nothing.

        Events stay for ``poll``.  With manual progress several threads may wait and poll: one of
        them drives, the others wait for it.

        Raises:
            InvalidInputError: called on the progress thread, from an observer or a callback.
        """
        self._refuse_inside("wait")
        wanted = (
            (handles,)
            if isinstance(handles, TransferHandle)
            else arguments.items("handles", handles, TransferHandle)
        )
        end = None
        if timeout is not None:
            end = self.clock.now() + arguments.timeout("timeout", timeout)
        for handle in wanted:
            while not handle.done:
                now = self.clock.now()
                left = None if end is None else end - now
                if left is not None and left <= 0:
                    return False
                if self._pump is not None:
                    handle._wait(left)
                    continue
                if not self._driver.drive(lambda h=handle: h.done, left):  # type: ignore[misc]
                    pause = self.config.pump_interval
                    handle._wait(pause if left is None else min(pause, left))
        return True

    def _refuse_inside(self, verb: str) -> None:
        if self._pump is None:
            self._driver.refuse_inside(verb)
        elif self._pump.is_current_thread():
            raise InvalidInputError(
                f"{verb} was called on the progress thread, which it would wait for",
                next_step="return from the observer or callback, and wait elsewhere",
            )

    async def events(self) -> AsyncIterator[Event]:
        """Events as they happen, for asyncio. Ends when the agent is closed.

        With manual progress it also moves everything on, looking every ``pump_interval`` while
        something is under way and less and less often, up to ``idle_interval``, while nothing is.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        key = object()

        def notify() -> None:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                self._listeners.pop(key, None)  # that loop is closed

        self._listeners[key] = notify
        pause = self.config.pump_interval
        try:
            while True:
                news.clear()
                found = self.poll()
                for event in found:
                    yield event
                if self._closed:
                    return
                if self._pump is not None:
                    await news.wait()
                    continue
                busy = bool(found) or self._ctx.in_flight or self._busy
                pause = (
                    self.config.pump_interval if busy else min(pause * 2, self.config.idle_interval)
                )
                await asyncio.sleep(pause)
        finally:
            self._listeners.pop(key, None)

    # ---- the scheduler's orders --------------------------------------------------------------

    def execute(self, orders: Iterable[o.Order]) -> None:
        """Carry out what ``SchedulerAgent.take_orders`` handed down. Never waits.

        An order that cannot be carried out becomes a ``Failed`` event.
        """
        for order in arguments.items("orders", orders, o.Order):
            try:
                execute(self, order)
            except KvxferError as error:
                self._refuse(order, error)

    def _refuse(self, order: o.Order, error: KvxferError) -> None:
        event = refusal(order, error)

        def refuse(now: float) -> None:
            if isinstance(order, o.PullOrder):
                self._engine.consumer.give_back(order.offer, now)
            if isinstance(order, (o.PushOrder, o.SealOrder)):
                entry = self._open.get(Role.PRODUCER, order.transfer_id)
                if entry is not None and self._engine.producer.fail_live(
                    entry.handle, event.error, now
                ):
                    return  # it has pushed before: its end tells of all submits
            self._ctx.emit(event)

        self._order(refuse)

    def report(self) -> o.Report:
        """``poll`` in the form that goes up to ``SchedulerAgent.apply``."""
        return o.Report(rank=rank_of(self._local.ranks), events=tuple(self.poll()))

    # ---- the end -----------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way and every message that matters is confirmed.

        New transfers may still be begun; stop handing them in first.  False on timeout.

        Raises:
            InvalidInputError: called on the progress thread, from an observer or a callback.
        """
        self._refuse_inside("drain")
        end = self.clock.now() + arguments.timeout("timeout", timeout)
        while self._busy:
            left = end - self.clock.now()
            if left <= 0:
                return False
            if self._pump is None:
                if not self._driver.drive(lambda: not self._busy, left):
                    threading.Event().wait(min(left, self.config.pump_interval))
            else:
                pending = self._open.handles()
                if pending:
                    pending[0]._wait(min(left, self.config.idle_interval))
                else:
                    threading.Event().wait(min(left, self.config.pump_interval))
        return True

    @property
    def _busy(self) -> bool:
        return self._moving or bool(self._engine.links.mailboxes.unconfirmed)

    @property
    def _moving(self) -> bool:
        """Whether a transfer is under way."""
        engine = self._engine
        return bool(
            engine.consumer.pulls
            or engine.consumer.accepts
            or engine.producer.pushes
            or len(engine.producer.leases)
            or len(self._open)
        )

    def close(self, deadline: float = 5.0) -> None:
        """Say good-bye and free everything within ``deadline`` seconds. Idempotent.

        What is under way fails as far as this side is concerned; ``drain`` first to avoid that.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end = self.clock.now() + deadline
        if self._pump is None:
            with self._driver.exclusively(deadline) as alone:
                self._close(end, stopped=alone)
            return
        stopped = self._pump.stop(deadline)
        if self._pump.is_current_thread():
            stopped = True  # called from an event's observer: the round ends after us
        self._close(end, stopped=stopped)

    def _close(self, end: float, *, stopped: bool) -> None:
        """``stopped``: nobody runs rounds any more."""
        self._ctx.keeping.close()  # first: what is freed below must not be granted
        if stopped:
            self._engine.farewell()
            # Closing drops what is queued: let the good-byes out. They are a courtesy only.
            self._channel.wait(_FAREWELL)
        for transport in self._transports:
            transport.on_change(None)
            transport.close(max(0.0, end - self.clock.now()))
        for link in self._engine.links:
            link.poster.leave_thread()
        self._fail_open_handles()
        if stopped:
            self._channel.close()
        for notify in tuple(self._listeners.values()):
            notify()
        self._ctx.log.flush()

    def _fail_open_handles(self) -> None:
        for handle in self._open.clear():
            handle.error = TransferError("the agent was closed", kind=ErrorKind.ABORTED)
            event = Failed(
                transfer_id=handle.transfer_id,
                role=handle.role,
                kind=ErrorKind.ABORTED,
                error=handle.error,
                drained=False,
            )
            handle._finish(
                TransferState.FAILED, drained=False, tell=partial(self._ctx.emit, event, handle)
            )

    # ---- inside ------------------------------------------------------------------------------

    def _notify(self) -> None:
        for notify in tuple(self._listeners.values()):
            notify()

    def _aged(self) -> None:
        self._ctx.sweeper.arm()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the agent is closed")

    def _order(
        self,
        order: Callable[[float], None],
        handle: TransferHandle | None = None,
        *,
        pinned: tuple[int, Sequence[Blocks]] | None = None,
    ) -> None:
        """Have the progress thread do it; what it refuses becomes a ``Failed`` event."""
        self._check_open()

        def guarded(now: float) -> None:
            try:
                order(now)
            except KvxferError as error:
                self._ctx.counters.count("orders.refused")
                if handle is not None:
                    self._order_refused(handle, error, pinned, now)

        self._engine.order(guarded)
        if self._pump is not None or self._driver.busy:
            self._channel.wake()

    def _order_refused(
        self,
        handle: TransferHandle,
        error: KvxferError,
        pinned: tuple[int, Sequence[Blocks]] | None,
        now: float,
    ) -> None:
        reason = TransferError(str(error), kind=error.kind)
        engine = self._engine
        live = engine.consumer.fail_live(handle, reason, now) or engine.producer.fail_live(
            handle, reason, now
        )
        if live or handle.done:
            # A later submit of a transfer that has begun: its end tells of all of them.
            if pinned is not None:
                engine.consumer.pins.unpin(pinned[0], destinations(pinned[1]), last=False)
            return
        blocks: tuple[tuple[int, ...], ...] = ()
        if pinned is not None:
            pin, groups = pinned
            ids = destinations(groups)
            self._engine.consumer.pins.unpin(pin, ids)
            blocks = tuple(tuple(g.tolist()) for g in ids)
        handle.error = reason
        event = Failed(
            transfer_id=handle.transfer_id,
            role=handle.role,
            kind=reason.kind,
            error=reason,
            blocks=blocks,
            drained=True,
        )
        handle._finish(
            TransferState.FAILED, drained=True, tell=lambda: self._ctx.emit(event, handle)
        )

    def _call(self, order: Callable[[float], None]) -> None:
        """Like ``_order``, but done when it returns. For set-up only."""
        if self._pump is None:
            with self._driver.exclusively():
                self._call_here(order)
            return
        if self._pump.is_current_thread():
            self._call_here(order)
            return
        done = threading.Event()
        failure: list[BaseException] = []

        def run(now: float) -> None:
            try:
                order(now)
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                failure.append(error)
            finally:
                done.set()

        self._engine.order(run)
        self._channel.wake()
        while not done.wait(0.5):
            if not self._pump.alive:
                raise ClosedError("the progress thread has ended")
        if failure:
            raise failure[0]

    def _call_here(self, order: Callable[[float], None]) -> None:
        now = self.clock.now()
        self._engine.run_orders(now)
        order(now)

    def _trace(self, given: str | None, offered: str = "") -> str:
        """The trace context of a transfer that begins: its own, the offer's, the caller's."""
        return trace_of(given, None if offered else self._trace_context) or offered

    def _groups(self, blocks: BlocksLike) -> tuple[Blocks, ...]:
        groups = arguments.block_lists(blocks)
        if not self._caches.layers:
            raise InvalidInputError(
                "no KV caches are registered", next_step="call register_kv_caches first"
            )
        if len(groups) != self._caches.groups:
            raise InvalidInputError(
                f"{len(groups)} lists of blocks for {self._caches.groups} groups"
            )
        return groups

    def _check_ids(self, groups: Sequence[Blocks]) -> None:
        for group, (blocks, count) in enumerate(
            zip(groups, self._caches.blocks_per_group, strict=True)
        ):
            if blocks.top >= count:
                real = blocks.ids if blocks.holes is None else blocks.ids[~blocks.holes]
                bad = next(int(i) for i in real if not 0 <= int(i) < count)
                raise InvalidInputError(
                    f"block id {bad} of group {group} is outside 0..{count - 1}"
                )

    def _layer_names(self, layers: Iterable[str]) -> frozenset[str]:
        names = frozenset(
            [layers] if isinstance(layers, str) else arguments.items("layers", layers, str)
        )
        known = {layer.name for layer in self._caches.layers}
        unknown = names - known - self._caches.aliases
        if unknown or not names:
            raise InvalidInputError(
                f"layers {sorted(unknown)} are not registered" if unknown else "no layers named"
            )
        return names & known

    def _lease(self, lease: float | None) -> float:
        return self.config.lease if lease is None else seconds_of("lease", lease)


def _ignore(_: object) -> None:
    return None
