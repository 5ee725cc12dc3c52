"""Keys, agents and liars that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from security_rig import QUICK, Keyring, Mallory, Node

from kvxfer.core.control import ControlConfig, ZmqChannel


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


@pytest.fixture
def node(keys: Keyring) -> Iterator[Callable[..., Node]]:
    """Makes agents; all keys must be made before the first, or be reloaded."""
    made: list[Node] = []

    def build(name: str, *, allowed: bool = True, security: Any = None, **options: Any) -> Node:
        control = {**QUICK, **options.pop("control", {})}
        security = security or keys.security(name, allowed=allowed)
        new = Node(name, ControlConfig(security=security, **control), **options)
        made.append(new)
        return new

    yield build
    for each in made:
        each.agent.close(1.0)


@pytest.fixture
def mallory(keys: Keyring) -> Iterator[Callable[..., Mallory]]:
    made: list[Mallory] = []

    def build(name: str = "mallory", *, allowed: bool = True, plain: bool = False) -> Mallory:
        security = None if plain else keys.security(name, allowed=allowed)
        new = Mallory(ControlConfig(security=security, **QUICK))
        made.append(new)
        return new

    yield build
    for each in made:
        each.channel.close()


@pytest.fixture
def channel(keys: Keyring) -> Iterator[Callable[..., ZmqChannel]]:
    made: list[ZmqChannel] = []

    def build(name: str, **config: Any) -> ZmqChannel:
        config.setdefault("security", keys.security(name))
        new = ZmqChannel(ControlConfig(**{**QUICK, **config}))
        made.append(new)
        return new

    yield build
    for each in made:
        each.close()
