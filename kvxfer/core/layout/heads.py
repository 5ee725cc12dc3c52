"""``HeadSlice``: which heads, or units of a state, move between two ranks."""

from __future__ import annotations

import attrs

from kvxfer.core.layout._checks import is_count, is_nonnegative

__all__ = ["HeadSlice"]


@attrs.frozen
class HeadSlice:
    """``count`` heads: from head ``local`` of our cache, to or from head ``remote`` of theirs.

    Heads are counted inside the rank's own cache, not over the whole model.
    """

    local: int = attrs.field(validator=is_nonnegative)
    remote: int = attrs.field(validator=is_nonnegative)
    count: int = attrs.field(validator=is_count)

    def swapped(self) -> HeadSlice:
        """The same heads as the peer sees them."""
        return HeadSlice(self.remote, self.local, self.count)
