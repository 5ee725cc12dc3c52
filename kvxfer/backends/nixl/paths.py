"""Peers and paths of the NIXL transport: what was loaded and prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import attrs
import numpy as np

from kvxfer.backends.nixl.binding import device_of
from kvxfer.backends.nixl.pieces import (
    Grid,
    Int32Array,
    Places,
    Scratch,
    SharedPlaces,
    Side,
    UInt64Array,
    unit_of,
)
from kvxfer.core.transport import Path, Peer, PeerInfo, Transport
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.backends._background import JobThread
    from kvxfer.backends.nixl.binding import Agent
    from kvxfer.backends.nixl.remotes import Remote
    from kvxfer.core.batch import Batch, Int64Array
    from kvxfer.core.memory import Descriptor, MemoryKind, Region
    from kvxfer.core.verdict import Op

__all__ = ["NixlPath", "NixlPeer"]

AnyPlaces = Union[Places, SharedPlaces]  # noqa: UP007 - evaluated at run time on 3.10

MAX_GRIDS = 16
"""Piece sizes that a path keeps prepared lists for. Further ones are described piece by piece."""


class NixlPeer(Peer):
    def __init__(
        self, transport: Transport, info: PeerInfo, remote: Remote, thread: JobThread
    ) -> None:
        super().__init__(transport, info)
        self.remote = remote
        self.thread = thread


@attrs.frozen(kw_only=True, eq=False)
class _Lists:
    """The prepared lists for one piece size."""

    local: Grid
    remote: Grid
    local_list: Any
    remote_list: Any

    def hold(self, local: AnyPlaces, remote: AnyPlaces) -> bool:
        return local.lie_on(self.local) and remote.lie_on(self.remote)


class _Kin:
    """The pairs of a path that NIXL can move in one call: those of equal memory kinds."""

    def __init__(
        self, kinds: tuple[MemoryKind, MemoryKind], place: Int32Array, local: Side, remote: Side
    ) -> None:
        self.kinds = kinds
        self.place = place
        """Place of each pair of the path among these, -1 for the others."""
        self.local = local
        self.remote = remote
        self.lists: dict[int, _Lists] = {}
        self.lists_work = True
        self.retired: list[_Lists] = []
        """Replaced by finer ones; released with the path."""

    def lists_for(
        self, agent: Agent, name: str, size: int, local_at: AnyPlaces, remote_at: AnyPlaces
    ) -> _Lists | None:
        """Prepared lists that hold every piece there, made if need be."""
        found = self.lists.get(size)
        if found is not None and found.hold(local_at, remote_at):
            return found
        if not self.lists_work or (found is None and len(self.lists) >= MAX_GRIDS):
            return None
        coarse = (0, 0) if found is None else (found.local.step, found.remote.step)
        local = Grid.over(self.local, size, local_at.sample, coarse[0])
        remote = Grid.over(self.remote, size, remote_at.sample, coarse[1])
        if local is None or remote is None:
            return None
        try:
            local_list = agent.prepare("", self.kinds[0], local.rows(self.local))
            remote_list = agent.prepare(name, self.kinds[1], remote.rows(self.remote))
        except Exception:  # noqa: BLE001 - NIXL's exceptions share no base class but this one
            # A region that no piece is in may be gone. Described one by one, the pieces tell.
            self.lists_work = False
            return None
        if found is not None:
            self.retired.append(found)
        made = self.lists[size] = _Lists(
            local=local, remote=remote, local_list=local_list, remote_list=remote_list
        )
        return made

    def release(self) -> None:
        for lists in (*self.retired, *self.lists.values()):
            lists.local_list.release()
            lists.remote_list.release()
        self.retired.clear()
        self.lists.clear()


class NixlPath(Path):
    """``addresses``: address and device of each pair's remote region, at the peer.

    ``scratch`` is for the rows of both sides; paths that are used one at a time may share it.
    """

    def __init__(
        self,
        peer: NixlPeer,
        pairs: Sequence[tuple[Region, Descriptor]],
        addresses: Sequence[tuple[int, int]],
        scratch: tuple[Scratch, Scratch] | None = None,
    ) -> None:
        super().__init__(peer, pairs)
        self.remote = peer.remote
        self._scratch = scratch or (Scratch(), Scratch())
        kinds = [(region.span.kind, descriptor.kind) for region, descriptor in pairs]
        self._kin: list[_Kin] = []
        self._kin_of = np.zeros(len(pairs), np.int32)
        for number, both in enumerate(dict.fromkeys(kinds)):
            members = [i for i, k in enumerate(kinds) if k == both]
            self._kin_of[members] = number
            place = np.full(len(pairs), -1, np.int32)
            place[members] = np.arange(len(members))
            local = Side.of(
                [
                    (s.address, s.nbytes, device_of(s.kind, s.device))
                    for s in (pairs[i][0].span for i in members)
                ]
            )
            remote = Side.of(
                [(addresses[i][0], pairs[i][1].nbytes, addresses[i][1]) for i in members]
            )
            self._kin.append(_Kin(both, place, local, remote))

    def describe(self, agent: Agent, op: Op, batch: Batch) -> Any:
        """A transfer handle for ``batch``, not started.

        Raises:
            InvalidInputError: pieces of different memory kinds.
            whatever NIXL raises: nothing was posted.
        """
        kin, local, remote, size = self._places(batch)
        shared = batch.shared
        unit = unit_of(size) if shared is None else shared.one_size or unit_of(size)
        if unit:
            local, remote = local.in_units(size, unit), remote.in_units(size, unit)
            lists = kin.lists_for(agent, self.remote.name, unit, local, remote)
            if lists is not None:
                return agent.pick(
                    op,
                    lists.local_list,
                    local.index(lists.local),
                    lists.remote_list,
                    remote.index(lists.remote),
                )
        return agent.transfer(op, kin.kinds, *self.rows(batch), self.remote.name)

    def rows(self, batch: Batch) -> tuple[UInt64Array, UInt64Array]:
        """Every piece for itself, local and remote: uint64[n, 3] of address, length, device.

        Valid until the next call.

        Raises:
            InvalidInputError: pieces of different memory kinds.
        """
        kin, local, remote, size = self._places(batch)
        ours, theirs = self._scratch
        return local.rows(kin.local, size, ours), remote.rows(kin.remote, size, theirs)

    def _places(self, batch: Batch) -> tuple[_Kin, AnyPlaces, AnyPlaces, Int64Array]:
        """Where the pieces begin on both sides, and the size of each or of each shared one."""
        members, shared = batch.members, batch.shared
        if members is None or shared is None:
            kin, place = self._kin_for(batch.pair)
            local = Places(pair=place, offset=batch.local)
            return kin, local, Places(pair=place, offset=batch.remote), batch.size
        kin, place = self._kin_for(members.pair)
        return (
            kin,
            SharedPlaces(pair=place, base=members.local_base, pieces=shared, side="local"),
            SharedPlaces(pair=place, base=members.remote_base, pieces=shared, side="remote"),
            shared.size,
        )

    def _kin_for(self, pair: Int32Array) -> tuple[_Kin, Int32Array]:
        """The pairs that move together, and the place of each among them."""
        if len(self._kin) == 1:
            return self._kin[0], pair
        kin = self._kin[int(self._kin_of[pair[0]])]
        place = kin.place[pair]
        if bool((place < 0).any()):
            raise InvalidInputError(
                "the batch mixes pairs of different memory kinds, which NIXL moves in calls of "
                "their own",
                next_step="cut the batch by memory kind",
            )
        return kin, place

    def forget(self) -> None:
        """Release the prepared lists. What was made from them goes on."""
        for kin in self._kin:
            kin.release()
