"""What an agent is made of where its user names it only, or leaves it out.

Imported late: who brings a channel and strategies of his own needs neither sockets nor tenacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.core.channel import Channel
    from kvxfer.core.control_config import ChannelAuth, ControlConfig
    from kvxfer.core.transport import Transport
    from kvxfer.policies.classify import ClassifierRegistry
    from kvxfer.policies.retry import RetryPolicy
    from kvxfer.policies.timeouts import Timeouts

__all__ = [
    "make_channel",
    "make_classifier",
    "make_retry",
    "make_timeouts",
    "make_transports",
]


def make_transports(backend: str | Transport | Sequence[str | Transport]) -> list[Transport]:
    """The transports that are named, in order; nothing stays open if one of them cannot be made.

    Raises:
        PluginError: a backend cannot be loaded.
        InvalidInputError: none is named, or one twice.
    """
    from kvxfer.core.plugins import create_transport
    from kvxfer.core.transport import Transport

    wanted = [backend] if isinstance(backend, (str, Transport)) else list(backend)
    if not wanted:
        raise InvalidInputError("no backend is named")
    made: list[Transport] = []
    try:
        for item in wanted:
            made.append(create_transport(item) if isinstance(item, str) else item)
    except BaseException:
        for transport in made:
            transport.close(0.0)
        raise
    names = [t.name for t in made]
    if len(set(names)) != len(names):
        raise InvalidInputError(f"two transports have one name: {names}")
    return made


def make_channel(control: ControlConfig | None, auth: ChannelAuth | None) -> Channel:
    from kvxfer.core.control import ZmqChannel

    return ZmqChannel(control, auth=auth)


def make_timeouts() -> Timeouts:
    from kvxfer.policies.timeouts import Timeouts

    return Timeouts()


def make_retry() -> RetryPolicy:
    from kvxfer.policies.retry import load_policy

    return load_policy()


def make_classifier() -> ClassifierRegistry:
    from kvxfer.policies.classify import ClassifierRegistry

    return ClassifierRegistry.from_plugins()
