"""The two forms in which a batch holds its pieces: vectors, and members times shared pieces.

Both answer the same questions in the same words; ``Batch`` puts them together.
"""

from __future__ import annotations

from typing import Any, Union

import numpy as np
import numpy.typing as npt

from kvxfer.core.pieces import (
    INT64,
    Int32Array,
    Int64Array,
    Members,
    Pieces,
    chop,
    exact_sum,
    greatest,
    least,
    stretches,
    used,
    vector,
)
from kvxfer.errors import InvalidInputError

__all__ = ["Flat", "Repeated", "Term", "Vectors"]

Vectors = tuple[Int32Array, Int64Array, Int64Array, Int64Array]
"""``(pair, local, remote, size)``."""


class Flat:
    """Pieces as four vectors."""

    __slots__ = ("count", "max_size", "min_size", "nbytes", "vectors")

    def __init__(self, vectors: Vectors, *, min_size: int = 0) -> None:
        """``min_size`` may be left at 0 where it is not known."""
        size = vectors[3]
        self.vectors = vectors
        self.count = len(size)
        self.min_size = min_size
        self.max_size = greatest(size) if self.count else 0
        if min_size == self.max_size:
            self.nbytes = min_size * self.count
        else:
            self.nbytes = exact_sum(size, self.max_size)

    @classmethod
    def of(cls, *vectors: Any) -> Flat:
        """Vectors that were checked before."""
        return cls(vectors)

    @classmethod
    def checked(
        cls,
        pair: npt.ArrayLike,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> Flat:
        """Raises: InvalidInputError: see ``Batch``."""
        checked: list[npt.NDArray[Any]] = [
            vector("pair", pair, np.int32),
            vector("local", local, np.int64),
            vector("remote", remote, np.int64),
            vector("size", size, np.int64),
        ]
        n, *others = map(len, checked)
        if others != [n, n, n]:
            raise InvalidInputError(
                f"pair, local, remote and size have lengths {n}, {others[0]}, "
                f"{others[1]} and {others[2]}: they must be equal"
            )
        lowest = 0
        if n:
            for name, values, low in zip(_NAMES, checked, _LEAST, strict=True):
                lowest = least(values)
                if lowest < low:
                    raise _below(name, int(values.argmin()), lowest, low)
        pairs, here, there, sizes = checked
        return cls((pairs, here, there, sizes), min_size=lowest)

    @property
    def one_size(self) -> int:
        """The size that all pieces have; 0 if they differ or it is not known."""
        return self.max_size if self.min_size == self.max_size else 0

    def reach(self) -> tuple[int, int, int] | None:
        """As ``Batch.reach``; not for an empty term."""
        pair, local, remote, _ = self.vectors
        one = greatest(pair)
        if one != least(pair):
            return None
        return one, greatest(local) + self.max_size, greatest(remote) + self.max_size

    def part(self, start: int, stop: int) -> list[Term]:
        return [Flat.of(*(v[start:stop] for v in self.vectors))] if start < stop else []

    def cut(self, max_pieces: int, max_nbytes: int) -> list[Term]:
        whole = self
        if self.max_size > max_nbytes:
            pair, local, remote, size = self.vectors
            index, step, size = chop(size, max_nbytes)
            whole = Flat.of(pair[index], local[index] + step, remote[index] + step, size)
        if whole.count <= max_pieces and whole.nbytes <= max_nbytes:
            return [whole]
        found: list[Term] = []
        for start, stop in stretches(whole.vectors[3], max_pieces, max_nbytes):
            found += whole.part(start, stop)
        return found

    def used_pairs(self) -> list[int]:
        return used(self.vectors[0])

    def top_pair(self) -> tuple[int, int]:
        """``(greatest pair, its first index)``; not for an empty term."""
        i = int(self.vectors[0].argmax())
        return int(self.vectors[0][i]), i

    def of_pairs(self, wanted: set[int]) -> Term:
        mask = np.isin(self.vectors[0], list(wanted))
        return Flat.of(*(v[mask] for v in self.vectors))

    def beyond(self, side: str, nbytes: Int64Array) -> int | None:
        """The first piece that ends behind its region, whose sizes by pair are ``nbytes``."""
        pair, local, remote, size = self.vectors
        # offset <= limit - size cannot overflow, offset + size could.
        bad = (local if side == "local" else remote) > nbytes[pair] - size
        i = int(bad.argmax())
        return i if bad[i] else None


class Repeated:
    """Every member's own copy of the shared pieces, members outermost."""

    __slots__ = ("count", "members", "nbytes", "pieces")

    def __init__(self, members: Members, pieces: Pieces) -> None:
        count = len(members)
        self.members = members
        self.pieces = pieces
        self.count = count * len(pieces)
        self.nbytes = count * pieces.nbytes

    @classmethod
    def checked(cls, members: Members, pieces: Pieces) -> Repeated:
        """Raises: InvalidInputError: in the words that ``Flat.checked`` has for the same pieces."""
        if len(members) and len(pieces):
            cls._check(members, pieces)
        return cls(members, pieces)

    @staticmethod
    def _check(members: Members, pieces: Pieces) -> None:
        lowest, highest = members.extremes
        lows = [("pair", lowest[0])]
        for column, name in ((1, "local"), (2, "remote")):
            low, high = pieces.extremes(name)
            least = lowest[column] + low
            if least < INT64.min or highest[column] + high > INT64.max:
                raise InvalidInputError(f"{name} holds values outside int64")
            lows.append((name, least))
        lows.append(("size", pieces.extremes("size")[0]))
        for (name, value), bound in zip(lows, _LEAST, strict=True):
            if value < bound:
                columns: dict[str, tuple[npt.NDArray[Any] | None, Int64Array | None]] = {
                    "pair": (members.pair, None),
                    "local": (members.local_base, pieces.local),
                    "remote": (members.remote_base, pieces.remote),
                    "size": (None, pieces.size),
                }
                of_member, of_piece = columns[name]
                member = 0 if of_member is None else int(of_member.argmin())
                piece = 0 if of_piece is None else int(of_piece.argmin())
                raise _below(name, member * len(pieces) + piece, value, bound)

    @property
    def vectors(self) -> Vectors:
        members, pieces = self.members, self.pieces
        shape = (len(members), len(pieces))
        return (
            np.repeat(members.pair, len(pieces)),
            np.add.outer(members.local_base, pieces.local).reshape(-1),
            np.add.outer(members.remote_base, pieces.remote).reshape(-1),
            np.broadcast_to(pieces.size, shape).reshape(-1),
        )

    @property
    def max_size(self) -> int:
        return self.pieces.extremes("size")[1]

    def part(self, start: int, stop: int) -> list[Term]:
        """A stretch: the end of one member, whole ones, the beginning of another."""
        n = len(self.pieces)
        found: list[Term] = []
        while start < stop:
            m, first = divmod(start, n)
            last = min(first + stop - start, n)
            if first or last < n:
                found.append(Repeated(self.members.part(m, m + 1), self.pieces.part(first, last)))
                start += last - first
            else:
                whole = (stop - start) // n
                found.append(Repeated(self.members.part(m, m + whole), self.pieces))
                start += whole * n
        return found

    def cut(self, max_pieces: int, max_nbytes: int) -> list[Term]:
        n, nbytes, m = len(self.pieces), self.pieces.nbytes, len(self.members)
        if not n or not m:
            return []
        _ = self.members.rows  # now, so that the parts need not make their own
        if n > max_pieces or nbytes > max_nbytes:
            parts = self.pieces.cut(max_pieces, max_nbytes)
            one = [self.members.part(i, i + 1) for i in range(m)]
            return [Repeated(member, part) for member in one for part in parts]
        step = min(max_pieces // n, max_nbytes // nbytes)
        return [Repeated(self.members.part(i, i + step), self.pieces) for i in range(0, m, step)]

    def used_pairs(self) -> list[int]:
        return sorted({row[0] for row in self.members.rows}) if self.count else []

    def top_pair(self) -> tuple[int, int]:
        """As ``Flat.top_pair``."""
        top = self.members.extremes[1][0]
        m = next(i for i, row in enumerate(self.members.rows) if row[0] == top)
        return top, m * len(self.pieces)

    @property
    def one_size(self) -> int:
        """As ``Flat.one_size``."""
        return self.pieces.one_size

    def of_pairs(self, wanted: set[int]) -> Term:
        members = self.members
        mask = np.isin(members.pair, list(wanted))
        chosen = Members(members.pair[mask], members.local_base[mask], members.remote_base[mask])
        return Repeated(chosen, self.pieces)

    def beyond(self, side: str, nbytes: Int64Array) -> int | None:
        """As ``Flat.beyond``, at the cost of the members plus, once, that of the pieces."""
        end = self.pieces.end(side)
        which = 1 if side == "local" else 2
        for m, row in enumerate(self.members.rows):
            base, limit = row[which], nbytes.item(row[0])
            if base + end > limit:
                start: Int64Array = getattr(self.pieces, side)
                bad = start + base > limit - self.pieces.size
                return m * len(self.pieces) + int(bad.argmax())
        return None


Term = Union[Flat, Repeated]  # noqa: UP007 - evaluated at run time on 3.10

_NAMES = ("pair", "local", "remote", "size")
_LEAST = (0, 0, 0, 1)


def _below(name: str, index: int, value: int, least: int) -> InvalidInputError:
    return InvalidInputError(f"{name}[{index}] is {value}, below {least}")
