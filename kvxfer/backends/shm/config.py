"""What can be set on a ``ShmTransport``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs
from attrs import validators as v

from kvxfer.backends._options import config_from
from kvxfer.backends.shm.copiers import CopierChoice
from kvxfer.core.checks import between, seconds
from kvxfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ShmConfig"]


@attrs.frozen(kw_only=True)
class ShmConfig:
    """Settings of one transport. Times are seconds.

    Raises:
        ConfigError: names the field, what it must be, and the value.
    """

    workers: int = attrs.field(default=2, validator=between(1, 64))
    """Copy threads. Two reach 1.3 to 1.7 times one on two cores from 16 KiB pieces on."""
    workers_max: int = attrs.field(default=8, validator=between(1, 64))
    """Bound on threads when some are stuck in a page fault and were replaced."""
    stuck_after: float = attrs.field(default=1.0, validator=seconds)
    """A chunk (at most 16 MiB and 4096 pieces) that takes longer counts as stuck: its thread is
    replaced."""
    inline_nbytes: int = attrs.field(default=4 << 20, validator=between(0, 1 << 30))
    """Bytes of mapped memory that ``post`` copies itself between two calls of ``progress``, in at
    most 1024 pieces; 0: none. A mebibyte takes 0.1 to 0.2 ms, to hand it to a thread 0.1 ms, or
    milliseconds where processors are scarce."""
    copier: CopierChoice = attrs.field(
        default=CopierChoice.AUTO, validator=v.instance_of(CopierChoice)
    )
    """Compiled where it is built ("auto"), compiled or an error, or Python and numpy."""
    queue_pieces: int = attrs.field(default=1 << 20, validator=between(1, 1 << 30))
    """Pieces in flight per peer before ``post`` refuses with ``BackpressureError``."""
    handshake_timeout: float = attrs.field(default=10.0, validator=seconds)
    """For ``connect`` and ``prepare``, each."""
    fence_timeout: float = attrs.field(default=5.0, validator=seconds)
    """How long a fence waits for the peer's word that it unmapped our memory."""
    max_connections: int = attrs.field(default=1024, validator=between(1, 65536))
    """Peers connected to us at once."""
    allowed_uids: frozenset[int] = attrs.field(
        factory=lambda: frozenset({os.geteuid()}),
        converter=frozenset,
        validator=v.deep_iterable(v.instance_of(int), v.instance_of(frozenset)),
    )
    """Who may connect to us and whom we connect to, by effective uid. Default: our own only."""
    socket_dir: str | None = attrs.field(
        default=None, validator=v.optional(v.and_(v.instance_of(str), v.min_len(1)))
    )
    """Directory for the handover socket, for peers in other network namespaces.

    A private directory is made in it.  None: an abstract socket name, which leaves no file behind.
    """
    admit_readers: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Let processes of our uid read memory that is not in a memfd where Yama forbids it.

    Sets PR_SET_PTRACER to "any" for the whole process, which also admits debuggers of our uid.
    """

    def __attrs_post_init__(self) -> None:
        if self.workers_max < self.workers:
            raise ConfigError(
                f"workers_max must be at least workers ({self.workers}), not {self.workers_max}"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ShmConfig:
        """From JSON values, as a configuration file has them.

        Raises:
            ConfigError: an unknown key, with the nearest one as a hint, or a value that does not
                fit.
        """
        return config_from(cls, options)
