"""Probes: whether a backend that was left reaches its peer again.

A probe connects, prepares a path and reads a few bytes of the peer's memory into a scratch buffer.
It never touches blocks of a request, and a thread of its own makes the post where that may block.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.core.attempt import Attempt, AttemptState
from kvxfer.core.batch import Batch
from kvxfer.core.memory import span_of
from kvxfer.core.verdict import Op
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer.core.memory import Descriptor, Region
    from kvxfer.core.pollable import Pollable
    from kvxfer.core.transport import Path, Peer, PeerInfo, Transport

__all__ = ["PROBE_NBYTES", "Probe", "register_scratch"]

PROBE_NBYTES = 64
"""What a probe reads: a cache line."""
_SCRATCH_NBYTES = 4096
"""A page."""

_log = logging.getLogger("kvxfer.agent")


class Probe:
    """One probe. ``poll`` until it says something; progress thread only.

    ``peer``: a connection that is open already.  ``scratch``: where the bytes go; without it, or
    where the engine cannot read that memory, a prepared path has to be proof enough.  ``nudge``: to
    be called, from any thread, when there may be news.
    """

    def __init__(
        self,
        transport: Transport,
        info: PeerInfo,
        *,
        peer: Peer | None,
        remote: Descriptor | None,
        scratch: Region | None,
        deadline: float,
        nudge: Callable[[], None],
    ) -> None:
        self.transport = transport
        self.peer = peer
        self._info = info
        self._remote = remote
        self._scratch = scratch
        self._deadline = deadline
        self._nudge = nudge
        self._connecting: Pollable[Peer] | None = None
        self._preparing: Pollable[Path] | None = None
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Attempt | Exception | None = None
        self.over = False

    def poll(self, now: float) -> tuple[bool, str] | None:
        """Whether it worked, and why not; None: not known yet."""
        try:
            answer = self._advance()
        except KvxferError as error:
            answer = False, str(error)
        if answer is None and now >= self._deadline:
            answer = False, "the probe was not complete in time"
        if answer is not None:
            self._end()
        return answer

    @property
    def stuck(self) -> bool:
        """Its thread has not come back out of the engine."""
        return self._thread is not None and self._thread.is_alive()

    def _advance(self) -> tuple[bool, str] | None:
        if self.peer is None:
            if self._connecting is None:
                self._connecting = self.transport.connect(self._info)
            self.peer, error = self._connecting.poll()
            if error is not None:
                return False, str(error)
            if self.peer is None:
                return None
        if self._scratch is None or self._remote is None:
            return True, ""
        if self._path is None:
            if self._preparing is None:
                pairs = [(self._scratch, self._remote)]
                self._preparing = self.transport.prepare(self.peer, pairs)
            self._path, error = self._preparing.poll()
            if error is not None:
                return False, str(error)
            if self._path is None:
                return None
        if not self._reads(self._scratch, self._remote):
            return True, ""
        return self._read(self._path)

    def _reads(self, scratch: Region, remote: Descriptor) -> bool:
        return self.transport.capabilities.supports(Op.READ, scratch.span.kind, remote.kind)

    def _read(self, path: Path) -> tuple[bool, str] | None:
        if self._outcome is None:
            if not self.transport.capabilities.may_block_in_post:
                self._post(path)
            elif self._thread is None:
                self._thread = threading.Thread(
                    target=self._post, args=(path,), name="kvxfer-probe", daemon=True
                )
                self._thread.start()
        outcome = self._outcome
        if outcome is None:
            return None
        if isinstance(outcome, Exception):
            return False, str(outcome)
        if not outcome.terminal:
            return None
        return outcome.state is AttemptState.DONE, str(outcome.error or "")

    def _post(self, path: Path) -> None:
        nbytes = min(PROBE_NBYTES, path.pairs[0][0].nbytes, path.pairs[0][1].nbytes)
        try:
            self._outcome = self.transport.post(Op.READ, path, Batch([0], [0], [0], [nbytes]))
        except Exception as error:  # noqa: BLE001 - a plug-in's bug is a probe that failed
            self._outcome = error
        self._nudge()

    def _end(self) -> None:
        self.over = True
        if self._path is not None:
            self._path.close()

    def drop(self) -> None:
        """Give it up; its connection is closed."""
        self._end()
        if self.peer is None and self._connecting is not None:
            self.peer, _ = self._connecting.poll()
        if self.peer is not None:
            self.transport.disconnect(self.peer)


def register_scratch(transports: Sequence[Transport]) -> dict[str, Region]:
    """Memory for probes to read into, registered with each engine that takes it. May block.

    One buffer each: two engines never write one block, not even here.
    """
    found: dict[str, Region] = {}
    for transport in transports:
        try:
            found[transport.name] = transport.register(span_of(np.zeros(_SCRATCH_NBYTES, np.uint8)))
        except KvxferError as error:
            _log.info(
                "probes of %s only connect: it does not take memory: %s", transport.name, error
            )
    return found
