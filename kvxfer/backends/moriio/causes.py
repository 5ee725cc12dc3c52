"""Why a peer cannot be reached: the engine tells it once, beside the status that shows a flush."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvxfer.backends.moriio.calls import Call

__all__ = ["RootCauses"]


class RootCauses:
    """What ``pop_peer_failure`` has told of peers that are known. Progress thread only.

    ``prefixes`` are those of the engine keys of all peers.
    """

    def __init__(self, prefixes: Callable[[], Iterable[str]]) -> None:
        self._prefixes = prefixes
        self._of: dict[str, str] = {}

    def find(self, call: Call) -> str:
        """Why the peer of ``call`` cannot be reached, as far as the engine has told."""
        known = tuple(self._prefixes())
        for failure in call.connection.generation.engine.pop_failures():
            if known and failure.engine_key.startswith(known):
                self._of[failure.engine_key] = failure.detail
        return self._of.get(call.connection.peer_key, "").removeprefix("completion status ")

    def forget(self, prefix: str) -> None:
        """The peer whose engine keys begin like this is gone."""
        for key in [k for k in tuple(self._of) if k.startswith(prefix)]:
            self._of.pop(key, None)
