"""What the engine's bare -1 means, as far as we can find out. Classifier rules match the texts.

Of the engine's public calls: ``initialize`` returns 0 whatever happened; ``register_memory`` -7 for
memory that overlaps a registered one; ``unregister_memory`` -3 for an unknown one; the status of a
piece is 0 (under way), 1 (done) or -1; a submit returns 0 instead of an id when it cannot begin.
"""

from __future__ import annotations

import attrs

from kvxfer.core.verdict import EngineError
from kvxfer.errors import ErrorKind

__all__ = ["ALL", "BACKEND", "Message"]

BACKEND = "mooncake"
FAILED = -1


@attrs.frozen(kw_only=True)
class Message:
    """``text`` is the stable start, ``kind`` the verdict a rule should reach."""

    text: str
    kind: ErrorKind

    def engine(self, detail: str = "", code: int | None = FAILED) -> EngineError:
        """As a value. ``code`` is the engine's."""
        message = f"{self.text}: {detail}" if detail else self.text
        return EngineError(backend=BACKEND, code=code, message=message)


PEER_GONE = Message(text="nobody listens at the peer's address", kind=ErrorKind.PEER_LOST)
OTHER_LIFE = Message(text="another incarnation answers at the peer's address", kind=ErrorKind.STALE)
PEER_SILENT = Message(text="the peer's engine does not answer", kind=ErrorKind.TIMEOUT)
NOT_REGISTERED = Message(
    text="the peer has not registered the memory, or not any more", kind=ErrorKind.STALE
)
BROKEN = Message(
    text="the engine failed, though the peer answers and has the memory", kind=ErrorKind.CONNECTION
)
UNREACHABLE = Message(text="the peer's address cannot be reached", kind=ErrorKind.CONNECTION)
NOT_SUBMITTED = Message(text="the engine does not take the piece", kind=ErrorKind.CONNECTION)
QUEUE_FULL = Message(text="the engine's queue to this peer is full", kind=ErrorKind.BACKPRESSURE)
NOT_TAKEN = Message(
    text="the engine does not register or unregister the memory", kind=ErrorKind.RESOURCE
)
NOT_STARTED = Message(text="the engine does not start", kind=ErrorKind.RESOURCE)

ALL: tuple[Message, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Message)
)
"""For the classifier: one rule per message, matched by the start of the text."""
