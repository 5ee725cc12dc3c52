"""``LayerTally``: when is a push of several layers complete?"""

from __future__ import annotations

from kvxfer.errors import InvalidInputError

__all__ = ["LayerTally"]


class LayerTally:
    """Counts the layers of one push: scheduled at most once each, complete once.

    Completion follows what was *scheduled*, not how many caches happen to be registered.  Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}
        self._done: set[str] = set()
        self._sealed = False
        self._completed = False

    def schedule(self, layer: str, pieces: int = 1) -> bool:
        """Note a layer with that many pieces; False if it was scheduled before.

        Raises:
            InvalidInputError: the tally is sealed.
        """
        if layer in self._pieces:
            return False
        if self._sealed:
            raise InvalidInputError(f"layer {layer!r} comes after the seal")
        if pieces < 0:
            raise InvalidInputError(f"pieces must be at least 0, not {pieces}")
        self._pieces[layer] = pieces
        return True

    def seal(self) -> bool:
        """No more layers follow. True if that completes the push."""
        self._sealed = True
        return self._check()

    def done(self, layer: str) -> bool:
        """A layer has arrived. True exactly once: when that completes the push.

        Raises:
            InvalidInputError: the layer was never scheduled.
        """
        if layer not in self._pieces:
            raise InvalidInputError(f"layer {layer!r} was never scheduled")
        self._done.add(layer)
        return self._check()

    def _check(self) -> bool:
        if self._completed or not self._sealed or len(self._done) < len(self._pieces):
            return False
        self._completed = True
        return True

    @property
    def expected_layers(self) -> int:
        """Layers scheduled so far."""
        return len(self._pieces)

    @property
    def expected_pieces(self) -> int:
        """Pieces of all layers scheduled: what both sides must agree on."""
        return sum(self._pieces.values())

    @property
    def pending_pieces(self) -> int:
        """Pieces of layers that have not arrived."""
        return sum(n for layer, n in self._pieces.items() if layer not in self._done)
