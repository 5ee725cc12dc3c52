"""Peers and paths of the NIXL transport: what was loaded and prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvxfer.backends.nixl.binding import device_of
from kvxfer.backends.nixl.pieces import Grid, Int32Array, Side, rows_of
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

    def hold(self, batch: Batch) -> bool:
        return self.local.holds(batch.local) and self.remote.holds(batch.remote)


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

    def lists_for(self, agent: Agent, name: str, size: int, batch: Batch) -> _Lists | None:
        """Prepared lists that hold every piece of ``batch``, made if need be."""
        found = self.lists.get(size)
        if found is not None and found.hold(batch):
            return found
        if not self.lists_work or (found is None and len(self.lists) >= MAX_GRIDS):
            return None
        coarse = (0, 0) if found is None else (found.local.step, found.remote.step)
        local = Grid.over(self.local, size, batch.local, coarse[0])
        remote = Grid.over(self.remote, size, batch.remote, coarse[1])
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
    """``addresses``: address and device of each pair's remote region, at the peer."""

    def __init__(
        self,
        peer: NixlPeer,
        pairs: Sequence[tuple[Region, Descriptor]],
        addresses: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(peer, pairs)
        self.remote = peer.remote
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
        kin = self._kin[0]
        place: Int32Array = batch.pair
        if len(self._kin) > 1:
            kin = self._kin[int(self._kin_of[batch.pair[0]])]
            place = kin.place[batch.pair]
            if bool((place < 0).any()):
                raise InvalidInputError(
                    "the batch mixes pairs of different memory kinds, which NIXL moves in calls of "
                    "their own",
                    next_step="cut the batch by memory kind",
                )
        size: Int64Array = batch.size
        if bool((size == size[0]).all()):
            lists = kin.lists_for(agent, self.remote.name, int(size[0]), batch)
            if lists is not None:
                return agent.pick(
                    op,
                    lists.local_list,
                    lists.local.index(place, batch.local),
                    lists.remote_list,
                    lists.remote.index(place, batch.remote),
                )
        return agent.transfer(
            op,
            kin.kinds,
            rows_of(kin.local, place, batch.local, size),
            rows_of(kin.remote, place, batch.remote, size),
            self.remote.name,
        )

    def forget(self) -> None:
        """Release the prepared lists. What was made from them goes on."""
        for kin in self._kin:
            kin.release()
