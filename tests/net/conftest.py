"""What the tests across two hosts need: a backend that crosses, and leave to make the hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from hosts import NotPermitted, TwoHosts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("net")
    group.addoption("--net-backend", default="nixl", help="what moves the bytes: nixl, mooncake")


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--net-backend"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[[int], TwoHosts]]:
    """Makes two hosts that speak IPv4 or IPv6; they go with the module, whatever happened."""
    made: list[TwoHosts] = []

    def make(version: int) -> TwoHosts:
        try:
            made.append(TwoHosts(version))
        except NotPermitted as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"two hosts cannot be made here: {error}")
        return made[-1]

    yield make
    for pair in made:
        pair.close()
