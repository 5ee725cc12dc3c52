"""Channels and peers that end with the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from control_rig import Peer

from kvxfer.core.control import ControlConfig, ZmqChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqChannel]]:
    made: list[ZmqChannel] = []

    def build(auth: Any = None, **config: Any) -> ZmqChannel:
        channel = ZmqChannel(ControlConfig(**config), auth=auth)
        made.append(channel)
        return channel

    yield build
    for channel in made:
        channel.close()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(port: int = 0) -> Peer:
        peer = Peer(port)
        started.append(peer)
        return peer

    yield start
    for peer in started:
        peer.kill()
