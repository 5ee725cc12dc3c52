"""KV-cache groups: which of a request's blocks have to move at all."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.core.layout._checks import is_count
from kvxfer.core.layout.blocks import Blocks
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupKind", "GroupSpec", "block_groups", "prompt_is_computed"]


class GroupKind(enum.Enum):
    """The kinds of group that can be moved. Another kind is refused when it is registered."""

    FULL = "full"
    """Attention over all tokens: grouped, latent or key-only."""
    SLIDING_WINDOW = "swa"
    """Attention over the last tokens only."""
    STATE = "mamba"
    """Recurrent state: one slot per request."""


def _kind(value: object) -> object:
    if isinstance(value, GroupKind):
        return value
    try:
        return GroupKind(value)
    except ValueError:
        known = ", ".join(repr(kind.value) for kind in GroupKind)
        raise InvalidInputError(
            f"groups of kind {value!r} cannot be moved",
            next_step=f"supported are {known}; leaving a group out would leave its memory stale",
        ) from None


@attrs.frozen(kw_only=True)
class GroupSpec:
    """One group: its kind, block size and, for a sliding window, the window in tokens.

    Raises:
        InvalidInputError: the kind is unknown, or a window is missing or out of place.
    """

    kind: GroupKind = attrs.field(converter=_kind)
    tokens_per_block: int = attrs.field(default=1, validator=is_count)
    window_tokens: int | None = attrs.field(default=None, validator=v.optional(is_count))

    def __attrs_post_init__(self) -> None:
        if (self.kind is GroupKind.SLIDING_WINDOW) is not (self.window_tokens is not None):
            raise InvalidInputError(
                f"window_tokens is for sliding windows: kind {self.kind.value!r} with "
                f"window_tokens={self.window_tokens}"
            )

    @property
    def window_blocks(self) -> int | None:
        """Blocks at the end of a request that the window can still reach; None without a window.

        One more than the window fills, because it need not begin at a block's start.
        """
        if self.window_tokens is None:
            return None
        return -(-self.window_tokens // self.tokens_per_block) + 1

    def needed(self, blocks: Blocks, prompt_tokens: int) -> Blocks:
        """The part of a request's blocks that has to move for a prompt of that many tokens.

        Full attention: the blocks the prompt fills, without those allocated ahead.  A sliding
        window: the last ``window_blocks``.  State: as given.
        """
        if prompt_tokens < 0:
            raise InvalidInputError(f"prompt_tokens must be at least 0, not {prompt_tokens}")
        if self.kind is GroupKind.STATE:
            return blocks
        if self.window_blocks is not None:
            return blocks[max(len(blocks) - self.window_blocks, 0) :]
        filled = -(-prompt_tokens // self.tokens_per_block)
        return blocks[: max(filled - (blocks.start or 0), 0)]


def prompt_is_computed(computed_tokens: int, prompt_tokens: int) -> bool:
    """Whether a chunked prefill is through: blocks are held ahead of the tokens in them."""
    return computed_tokens >= prompt_tokens


def block_groups(ids: Sequence[Any], start: int | Sequence[int] = 0) -> list[Blocks]:
    """Lists of ids as ``Blocks``: one flat list is one group, a list of lists one group each.

    Args:
        start: position of the first block, for all groups or for each.

    Raises:
        InvalidInputError: ids and lists are mixed, or starts and groups are not equally many.
    """
    lists = list(ids)
    nested = [not isinstance(entry, int) and hasattr(entry, "__len__") for entry in lists]
    if any(nested) and not all(nested):
        raise InvalidInputError("ids and lists of ids are mixed: pass one list, or one per group")
    groups: list[Any] = lists if lists and all(nested) else [lists]
    starts = [start] * len(groups) if isinstance(start, int) else list(start)
    if len(starts) != len(groups):
        raise InvalidInputError(f"{len(starts)} start positions for {len(groups)} groups")
    return [Blocks.at(first, group) for first, group in zip(starts, groups, strict=True)]
