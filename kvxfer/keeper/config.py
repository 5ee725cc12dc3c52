"""How an agent's keeper is set up. Durations are seconds."""

from __future__ import annotations

from typing import Any

import attrs

from kvxfer.core.checks import seconds
from kvxfer.errors import ConfigError

__all__ = ["KeeperConfig"]


def _port(_: Any, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65535:
        raise ConfigError(
            f"KeeperConfig.{attribute.name} must be an integer from 0 to 65535, not {value!r}"
        )


@attrs.frozen(kw_only=True)
class KeeperConfig:
    """The process that answers for an agent whose GIL is held.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    port: int = attrs.field(default=0, validator=_port)
    """Where it listens, on the interface of the control channel. 0: where
    ``ControlConfig.port_range`` has room, or the operating system's choice."""

    beat_interval: float = attrs.field(default=1.0, validator=seconds)
    """A peer that was not heard of for so long is asked for a sign of life."""

    peer_timeout: float = attrs.field(default=10.0, validator=seconds)
    """``PeerDown`` comes when neither a peer's keeper nor the peer itself was heard of for so
    long. After half of it the peer itself is asked, because only its keeper may have died."""

    hang_timeout: float = attrs.field(default=5.0, validator=seconds)
    """A keeper that answers its agent nothing for so long is killed and started anew. Until then
    an expired hold may have to wait for its answer."""

    patience: float = attrs.field(default=300.0, validator=seconds)
    """How long it speaks for an agent that does not speak to it. The longest that the GIL may be
    held; a worker that hangs for longer is no worker any more."""

    start_timeout: float = attrs.field(default=30.0, validator=seconds)
    """A keeper that is not ready by then is killed and started anew."""

    restart_min: float = attrs.field(default=0.1, validator=seconds)
    """Pause before a keeper that died is started again; doubled each time."""

    restart_max: float = attrs.field(default=30.0, validator=seconds)
    """The longest pause."""

    def __attrs_post_init__(self) -> None:
        if self.peer_timeout < 4 * self.beat_interval:
            raise ConfigError(
                f"KeeperConfig.peer_timeout must be at least four times beat_interval "
                f"({self.beat_interval!r} s), not {self.peer_timeout!r}",
                next_step="A single lost message must not look like a lost peer",
            )
        if self.restart_max < self.restart_min:
            raise ConfigError(
                f"KeeperConfig.restart_max must be at least restart_min ({self.restart_min!r} s), "
                f"not {self.restart_max!r}"
            )
        if self.patience <= self.hang_timeout:
            raise ConfigError(
                f"KeeperConfig.patience must be more than hang_timeout ({self.hang_timeout!r} s), "
                f"not {self.patience!r}"
            )
