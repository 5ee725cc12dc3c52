"""Engines are started once and shared; a killed one is started again when it is next needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_rig import (
    PROMPTS,
    EngineProcess,
    connector,
    make_model,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


class Fleet:
    """Engines by name; all that were named start at once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._engines: dict[str, EngineProcess] = {}
        self._all: list[EngineProcess] = []

    def start(self, name: str) -> None:
        known = self._engines.get(name)
        if known is None or not known.alive:
            log = self._folder / f"{name}-{len(self._all)}.log"
            engine = EngineProcess(self._model, ROLES[name], log)
            self._engines[name] = engine
            self._all.append(engine)

    def get(self, name: str) -> EngineProcess:
        self.start(name)
        return self._engines[name].ready()

    def close(self) -> None:
        for engine in self._all:
            engine.close()


ROLES: dict[str, dict[str, Any] | None] = {
    "single": None,
    "prefill": connector("kv_producer", lease=30.0, lease_margin=0.5),
    "decode": connector("kv_consumer", policy="recompute"),
    "strict": connector("kv_consumer", policy="fail"),
}


@pytest.fixture(scope="session")
def fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(model, folder)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="session")
def expected(fleet: Fleet) -> dict[str, list[int]]:
    """Tokens of every prompt from one engine without a connector, which then ends."""
    for name in ("single", "prefill"):
        fleet.start(name)
    single = fleet.get("single")
    outputs = single.generate(list(PROMPTS.values()))
    single.close()
    return {name: out["tokens"] for name, out in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture
def engine(fleet: Fleet, expected: dict[str, list[int]]) -> Callable[[str], EngineProcess]:
    """An engine by name, with nothing under way."""
    for name in ("prefill", "decode", "strict"):
        fleet.start(name)
    return fleet.get
