"""What the backends that copy with the CPU share: facts about local spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.core.memory import MemoryKind
from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from kvxfer.core.memory import Span

__all__ = ["check_dram", "is_writable"]


def check_dram(span: Span, backend: str) -> None:
    """Refuse memory that the CPU cannot address.

    Raises:
        InvalidInputError: the span is not DRAM.
    """
    if span.kind is not MemoryKind.DRAM:
        raise InvalidInputError(
            f"{backend} cannot register {span.kind.value} memory of device {span.device}",
            next_step="pass a CPU tensor, or use an engine that reaches device memory",
        )


def is_writable(span: Span) -> bool:
    """Whether the owner says that the span may be written. True where the owner does not say.

    numpy arrays know (``flags.writeable``); a torch tensor is always writable; of a bare
    ``(address, nbytes)`` nobody can tell.
    """
    flags = getattr(span.owner, "flags", None)
    return bool(getattr(flags, "writeable", True))
