"""A batch: the pieces of one engine call, as equal-length vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvxfer.core.pieces import Int32Array, Int64Array, Members, Pieces, as_list
from kvxfer.core.terms import Flat, Repeated, Term, Vectors
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Batch", "Int32Array", "Int64Array", "Members", "Pieces"]

T = TypeVar("T")


class Batch:
    """Pieces to move over one path.

    Piece ``i`` moves ``size[i]`` bytes between offset ``local[i]`` of the local region and offset
    ``remote[i]`` of the remote region of pair ``pair[i]`` of the path.  Offsets and sizes are
    bytes.  Immutable by convention; ``lists`` is cached: hand the same batch to a retry.

    Layers of equal geometry move the same pieces from bases of their own: ``Batch.repeated`` keeps
    such pieces factored.  Everything here works on that form too, and the vectors are made when
    they are asked for; what an engine can do with one list for all layers it finds in ``members``
    and ``shared_lists``.

    Raises:
        InvalidInputError: lengths differ, a size is not positive, or an offset is negative.
    """

    __slots__ = (
        "_count",
        "_kept",
        "_lists",
        "_reach",
        "_terms",
        "_used",
        "_vectors",
        "members",
        "nbytes",
        "shared",
    )

    members: Members | None
    """Where the shared pieces are repeated; None unless all of the batch has that one form."""
    shared: Pieces | None
    """The pieces that the members share; None where ``members`` is."""

    def __init__(
        self,
        pair: npt.ArrayLike,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> None:
        self._set((Flat.checked(pair, local, remote, size),))

    def _set(self, terms: tuple[Term, ...]) -> None:
        self._terms = terms
        self.members = self.shared = None
        if len(terms) == 1:
            term = terms[0]
            self._count = term.count
            self.nbytes = term.nbytes
            if isinstance(term, Repeated):
                self.members = term.members
                self.shared = term.pieces
        else:
            self._count = sum(term.count for term in terms)
            self.nbytes = sum(term.nbytes for term in terms)
        self._vectors: Vectors | None = None
        self._lists: tuple[list[int], list[int], list[int], list[int]] | None = None
        self._used: list[int] | None = None
        self._reach: tuple[int, int, int] | None = _UNKNOWN
        self._kept: tuple[Any, Any] | None = None

    @classmethod
    def _of(cls, terms: Sequence[Term]) -> Batch:
        batch = cls.__new__(cls)
        batch._set(tuple(terms))
        return batch

    @classmethod
    def repeated(  # noqa: PLR0917 - three vectors of the members, three of the pieces
        cls,
        pair: npt.ArrayLike,
        local_base: npt.ArrayLike,
        remote_base: npt.ArrayLike,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> Batch:
        """The same pieces once for every member, kept factored.

        For each member ``m`` in order, all pieces ``i`` in order: ``size[i]`` bytes between offset
        ``local_base[m] + local[i]`` of the local and ``remote_base[m] + remote[i]`` of the remote
        region of pair ``pair[m]``.  Checking costs the members plus the pieces, not their product.

        Raises:
            InvalidInputError: lengths differ, a size is not positive, or an offset is negative or
                beyond int64; an index in the text counts the pieces of the whole batch.
        """
        members = Members(pair, local_base, remote_base)
        return cls.repeated_pieces(members, Pieces(local, remote, size))

    @classmethod
    def repeated_pieces(cls, members: Members, pieces: Pieces) -> Batch:
        """As ``repeated``, of members and pieces that several batches have in common.

        What is worked out of them, such as lists, is then worked out once for all of the batches.
        """
        return cls._of([Repeated.checked(members, pieces)])

    # ---- the pieces --------------------------------------------------------------------------

    @property
    def vectors(self) -> Vectors:
        """``(pair, local, remote, size)``. Made on first use where the batch is factored."""
        if self._vectors is None:
            parts = [term.vectors for term in self._terms]
            if len(parts) == 1:
                self._vectors = parts[0]
            else:
                pair, local, remote, size = (
                    np.concatenate(columns) for columns in zip(*(parts or [_NOTHING]), strict=True)
                )
                self._vectors = (pair, local, remote, size)
        return self._vectors

    @property
    def pair(self) -> Int32Array:
        """int32[n]."""
        return self.vectors[0]

    @property
    def local(self) -> Int64Array:
        """int64[n], bytes."""
        return self.vectors[1]

    @property
    def remote(self) -> Int64Array:
        """int64[n], bytes."""
        return self.vectors[2]

    @property
    def size(self) -> Int64Array:
        """int64[n], bytes."""
        return self.vectors[3]

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        members = f" for each of {len(self.members)} members" if self.members is not None else ""
        count = len(self) // max(len(self.members or ()), 1)
        return f"Batch({count} pieces{members}, {self.nbytes} bytes)"

    def lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """``(pair, local, remote, size)`` as Python lists: what pybind11 takes fastest. Cached."""
        if self._lists is None:
            pair, local, remote, size = self.vectors
            n, one = len(size), self._terms[0].one_size if len(self._terms) == 1 else 0
            self._lists = (
                as_list(pair),
                local.tolist(),
                remote.tolist(),
                [one] * n if one else as_list(size),
            )
        return self._lists

    # ---- the factored form -------------------------------------------------------------------

    def shared_lists(self) -> tuple[list[int], list[int], list[int]]:
        """``(local, remote, size)`` of the shared pieces as Python lists.

        Made once, also for all batches that ``cut`` makes of one.  Without ``members``: those of
        all pieces.
        """
        shared = self.shared
        return self.lists()[1:] if shared is None else shared.lists()

    # ---- facts -------------------------------------------------------------------------------

    @property
    def used_pairs(self) -> list[int]:
        """The pair indices that occur, rising. Cached."""
        if self._used is None:
            if self.reach is not None:
                self._used = [self.reach[0]]
            else:
                found = [term.used_pairs() for term in self._terms]
                self._used = found[0] if len(found) == 1 else sorted(set().union(*found))
        return self._used

    @property
    def max_size(self) -> int:
        """The size of the largest piece; 0 if there is none."""
        return max((term.max_size for term in self._terms if term.count), default=0)

    @property
    def reach(self) -> tuple[int, int, int] | None:
        """``(pair, local, remote)``: all pieces are of that pair, and end at these bytes or before.

        None if that cannot be said in a hurry: of several pairs, factored, or empty. Cached.
        """
        if self._reach is _UNKNOWN:
            self._reach = self._find_reach()
        return self._reach

    def _find_reach(self) -> tuple[int, int, int] | None:
        term = self._terms[0] if len(self._terms) == 1 else None
        if not isinstance(term, Flat) or not self._count:
            return None
        return term.reach()

    def keep(self, make: Callable[[Batch], T]) -> T:
        """``make(self)``; the last one that was made is kept, for posts that are repeated.

        ``make`` must be equal each time.  What it returns must not hold the batch.
        """
        if self._kept is None or self._kept[0] != make:
            self._kept = (make, make(self))
        found: T = self._kept[1]
        return found

    def top_pair(self) -> tuple[int, int]:
        """``(greatest pair index, first piece with it)`` of a batch that is not empty."""
        top, at, start = -1, 0, 0
        for term in self._terms:
            if term.count:
                pair, i = term.top_pair()
                if pair > top:
                    top, at = pair, start + i
            start += term.count
        return top, at

    def first_beyond(self, side: str, nbytes: Int64Array) -> int | None:
        """The first piece that ends behind its region, or None.

        Args:
            side: ``"local"`` or ``"remote"``.
            nbytes: int64, sizes of that side's regions by pair, for every pair that occurs.
        """
        start = 0
        for term in self._terms:
            if term.count:
                i = term.beyond(side, nbytes)
                if i is not None:
                    return start + i
            start += term.count
        return None

    def piece(self, index: int) -> tuple[int, int, int, int]:
        """``(pair, local, remote, size)`` of one piece."""
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        pair, local, remote, size = self.slice(index, index + 1).vectors
        return int(pair[0]), int(local[0]), int(remote[0]), int(size[0])

    # ---- parts -------------------------------------------------------------------------------

    def slice(self, start: int, stop: int) -> Batch:
        """Pieces ``start`` to ``stop``, without copying or checking again."""
        start, stop, _ = slice(start, stop).indices(len(self))
        found: list[Term] = []
        at = 0
        for term in self._terms:
            found += term.part(max(start - at, 0), min(stop - at, term.count))
            at += term.count
        return Batch._of(found)

    def of_pairs(self, pairs: Sequence[int]) -> Batch:
        """The pieces of these pairs, in order. A factored batch stays so."""
        wanted = set(pairs)
        return Batch._of([term.of_pairs(wanted) for term in self._terms])

    def cut(self, *, max_pieces: int, max_nbytes: int) -> Sequence[Batch]:
        """This batch in order, as batches of at most that many pieces and bytes.

        A single piece above ``max_nbytes`` is split at multiples of it.  A factored batch is cut
        between members where several of them fit; otherwise every member's pieces are cut into the
        same stretches, which share their lists.
        """
        if max_pieces < 1 or max_nbytes < 1:
            raise InvalidInputError(
                f"max_pieces={max_pieces} and max_nbytes={max_nbytes} must be at least 1"
            )
        if len(self) <= max_pieces and self.nbytes <= max_nbytes:
            return [self] if len(self) else []
        return [
            Batch._of([part])
            for term in self._terms
            if term.count
            for part in term.cut(max_pieces, max_nbytes)
        ]

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """All pieces of ``batches``, in order. Factored ones stay so, and ``cut`` keeps them."""
        if len(batches) == 1:
            return batches[0]
        terms = [term for batch in batches for term in batch._terms if term.count]
        first = terms[0] if terms else None
        if isinstance(first, Repeated) and all(
            isinstance(term, Repeated) and term.pieces is first.pieces for term in terms
        ):
            members = [term.members for term in terms if isinstance(term, Repeated)]
            joined = Members(
                np.concatenate([m.pair for m in members]),
                np.concatenate([m.local_base for m in members]),
                np.concatenate([m.remote_base for m in members]),
            )
            return cls._of([Repeated(joined, first.pieces)])
        if all(isinstance(term, Flat) for term in terms):
            columns = zip(*([term.vectors for term in terms] or [_NOTHING]), strict=True)
            return cls._of([Flat.of(*map(np.concatenate, columns))])
        return cls._of(terms)


_UNKNOWN = (-1, -1, -1)
_EMPTY = np.empty(0, np.int64)
_NOTHING: Vectors = (np.empty(0, np.int32), _EMPTY, _EMPTY, _EMPTY)
