from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for node in rig.nodes:
        node.agent.close(0.0)
