"""Which local blocks something may still write into, and what could not be proven drained."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import attrs
import numpy as np

from kvxfer.core.batch import Int64Array
from kvxfer.errors import InvalidInputError

__all__ = ["PinTable", "Quarantine", "QuarantineEntry"]


class PinTable:
    """One owner at most per destination block: two transfers never write into the same one.

    Per group an int64 vector of owners, so that pinning costs a vector operation, not a dictionary
    entry per block.  Callable from any thread: users' threads pin, the progress thread unpins.
    """

    def __init__(self, blocks_per_group: Sequence[int], *, serial: int = 0) -> None:
        self._owner = [np.zeros(n, dtype=np.int64) for n in blocks_per_group]
        self._names: dict[int, str] = {}
        self._serial = serial
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Transfers that have pinned something."""
        return len(self._names)

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned now, all groups. Looks at every block: for snapshots and tests."""
        return sum(int(np.count_nonzero(owner)) for owner in self._owner)

    def pin(self, name: str, groups: Sequence[Int64Array], token: int = 0) -> int:
        """Pin ids per group for ``name``; returns a token for ``unpin``. All or nothing.

        With the ``token`` of an earlier call more blocks join it; its own may be named again.

        Raises:
            InvalidInputError: an id outside its group, twice in the list, or pinned by another
                transfer, which the text names.
        """
        if len(groups) != len(self._owner):
            raise InvalidInputError(
                f"{len(groups)} lists of block ids for {len(self._owner)} groups"
            )
        for group, (ids, owner) in enumerate(zip(groups, self._owner, strict=True)):
            if not len(ids):
                continue
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= len(owner):
                bad = low if low < 0 else high
                raise InvalidInputError(
                    f"block id {bad} of group {group} is outside 0..{len(owner) - 1}"
                )
            if len(np.unique(ids)) != len(ids):
                values, counts = np.unique(ids, return_counts=True)
                raise InvalidInputError(
                    f"block id {int(values[counts > 1][0])} of group {group} is listed twice"
                )
        with self._lock:
            return self._take(name, groups, token)

    def _take(self, name: str, groups: Sequence[Int64Array], token: int) -> int:
        for group, (ids, owner) in enumerate(zip(groups, self._owner, strict=True)):
            taken = owner[ids]
            foreign = (taken != 0) & (taken != token)
            if foreign.any():
                i = int(foreign.argmax())
                raise InvalidInputError(
                    f"block {int(ids[i])} of group {group} belongs to transfer "
                    f"{self._names.get(int(taken[i]))!r}, into which bytes may still land",
                    next_step="wait for that transfer's Received or Drained event",
                )
        if not token:
            self._serial += 1
            token = self._serial
        for ids, owner in zip(groups, self._owner, strict=True):
            owner[ids] = token
        self._names[token] = name
        return token

    @property
    def serial(self) -> int:
        """The last token given out: a table that replaces this one goes on from there."""
        return self._serial

    def unpin(self, token: int, groups: Sequence[Int64Array], *, last: bool = True) -> None:
        """Release those of ``groups`` that belong to ``token``; with ``last`` the token as well.

        Idempotent.
        """
        with self._lock:
            if token not in self._names:
                return
            if last:
                del self._names[token]
            for ids, owner in zip(groups, self._owner, strict=True):
                mine = ids[owner[ids] == token]
                owner[mine] = 0


@attrs.frozen(kw_only=True)
class QuarantineEntry:
    """Blocks that could not be proven drained by their deadline."""

    transfer_id: str
    blocks: tuple[tuple[int, ...], ...]
    since: float
    reason: str

    @property
    def count(self) -> int:
        return sum(len(group) for group in self.blocks)


class Quarantine:
    """The visible list. Nothing leaves it but by proof or by an explicit ``reclaim``.

    ``limit`` does not drop entries (that would hand blocks back silently): it is the number of
    transfers from which on ``full`` tells the agent to turn not-ready and refuse new transfers.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[int, QuarantineEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self.limit

    @property
    def entries(self) -> tuple[QuarantineEntry, ...]:
        return tuple(self._entries.values())

    def add(self, token: int, entry: QuarantineEntry) -> None:
        self._entries[token] = entry

    def remove(self, token: int) -> QuarantineEntry | None:
        """By proof, or by the user's ``reclaim``."""
        return self._entries.pop(token, None)
