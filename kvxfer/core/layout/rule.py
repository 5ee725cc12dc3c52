"""``Rule``: how block lists pair, and what may stay unwritten."""

from __future__ import annotations

import enum

import attrs

from kvxfer.errors import InvalidInputError

__all__ = ["Align", "Rule", "Side", "make_rule"]


class Align(enum.Enum):
    """The assumption under which lists without positions are paired."""

    HEAD = "head"
    """Both lists begin at the same token."""
    TAIL = "tail"
    """Both lists end at the same block: a shorter one lacks its beginning (a prefix hit)."""


class Side(enum.Enum):
    """Whose memory."""

    LOCAL = "local"
    REMOTE = "remote"


@attrs.frozen(kw_only=True)
class Rule:
    """How lists pair, and how much of the destination's list may stay unwritten.

    ``tail`` whole blocks after the last one written are let through (a decode side allocates ahead
    of what prefill computed), and any part of a block after the last token written is.  Holes
    before that are refused unless ``gaps``.  What is not written is reported in any case.
    """

    align: Align | None = None
    destination: Side = Side.LOCAL
    tail: int = 0
    gaps: bool = False


_DEFAULT = Rule()


def make_rule(
    *,
    align: Align | str | None,
    destination: Side,
    uncovered_local: int,
    uncovered_remote: int,
    allow_gaps: bool,
) -> Rule:
    """The rule from the planner's keywords.

    Raises:
        InvalidInputError: an unknown ``align``, or an allowance that is negative or given for the
            side that is not written.
    """
    if (
        align is None
        and destination is Side.LOCAL
        and uncovered_local == uncovered_remote == 0
        and not allow_gaps
    ):
        return _DEFAULT
    tail, other = uncovered_local, uncovered_remote
    if destination is Side.REMOTE:
        tail, other = other, tail
    if other:
        raise InvalidInputError(
            f"uncovered_local={uncovered_local} and uncovered_remote={uncovered_remote}: only the "
            f"destination's list, which is {destination.value}, can have an uncovered tail"
        )
    if type(tail) is not int or tail < 0:
        raise InvalidInputError(
            f"uncovered_{destination.value} must be an int of at least 0, not {tail!r}"
        )
    if align is not None and not isinstance(align, Align):
        try:
            align = Align(align)
        except ValueError:
            raise InvalidInputError(
                f'align must be "head", "tail" or None, not {align!r}'
            ) from None
    return Rule(align=align, destination=destination, tail=tail, gaps=allow_gaps)
