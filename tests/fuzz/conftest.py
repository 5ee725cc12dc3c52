"""Victims that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fuzz_rig import Victim


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    made: list[Victim] = []

    def build(**options: Any) -> Victim:
        made.append(Victim(**options))
        return made[-1]

    yield build
    for each in made:
        each.agent.close(0.5)
