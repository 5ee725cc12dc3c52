"""Catches chosen frames of one node on their way out, to lose, delay or reorder them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_rig import Node

from kvxfer.core import wire
from kvxfer.errors import WireError

__all__ = ["Intercepted", "intercept", "mails", "sniff"]


class Intercepted:
    """The frames caught so far; lost unless ``deliver`` is called."""

    def __init__(self, node: Node, catch: Callable[[wire.Message], bool]) -> None:
        self._channel = node.agent._channel
        self._send = self._channel.send
        self._catch = catch
        self.frames: list[tuple[Any, bytes]] = []
        self.active = True
        self._channel.send = self.send  # type: ignore[method-assign]

    def send(self, route: Any, data: bytes) -> bool:
        if self.active and self._catch(body_of(data)):
            self.frames.append((route, data))
            return True
        return self._send(route, data)

    def deliver(self) -> int:
        """Send everything that was caught, and catch nothing more."""
        self.active = False
        frames, self.frames = self.frames, []
        for route, data in frames:
            self._send(route, data)
        return len(frames)


def body_of(frame: bytes) -> Any:
    try:
        return wire.decode(frame).body
    except WireError:
        return None


def intercept(node: Node, *kinds: type, when: Callable[[Any], bool] | None = None) -> Intercepted:
    """Catch what ``node`` sends of these message types, if ``when`` agrees."""
    return Intercepted(node, lambda b: isinstance(b, kinds) and (when is None or when(b)))


def sniff(node: Node) -> list[bytes]:
    """Every frame that ``node`` sends from now on; nothing is held up."""
    seen: list[bytes] = []
    send = node.agent._channel.send

    def record(route: Any, data: bytes) -> bool:
        seen.append(data)
        return send(route, data)

    node.agent._channel.send = record  # type: ignore[method-assign]
    return seen


def mails(frames: list[bytes], kind: type) -> list[Any]:
    """The messages of one type among ``frames``."""
    return [body for frame in frames if isinstance(body := body_of(frame), kind)]
