"""Engines are started once and shared; a killed one is started again when it is next needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from vllm_rig import (
    CROWD,
    CROWD_TOKENS,
    PROMPTS,
    SAMPLES,
    EngineProcess,
    Nursery,
    connector,
    make_model,
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@attrs.frozen
class Kind:
    """How one engine is started."""

    connector: dict[str, Any] | None
    arguments: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, str] = attrs.field(factory=dict)


FAULTY = {"name": "FaultyConnector", "module": "faulty_connector"}
MANY = {"num_gpu_blocks_override": 256, "max_num_seqs": 32}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Two ranks spin while they wait for each other: the rest of a small machine starves.
PATIENT = {"connect_timeout": 60.0, "queue_timeout": 60.0}
# Without InfiniBand, a process that loaded UCX's ib module dies at its exit.
NIXL = {"UCX_MODULES": "^ib", "UCX_TLS": "tcp"}
ENGINES = {
    "single": Kind(None),
    # Few tokens per step: longer prompts are prefilled in chunks.
    "prefill": Kind(
        connector("kv_producer", lease=30.0, lease_margin=0.5, write=True),
        {"max_num_batched_tokens": 96, "max_num_seqs": 32},
    ),
    "decode": Kind(connector("kv_consumer", policy="recompute", write=True, share_caches=True)),
    "strict": Kind(connector("kv_consumer", policy="fail", drain_timeout=1.0, **FAULTY), MANY),
    "crowded": Kind(connector("kv_producer", **FAULTY), MANY),
    "prefill_tp2": Kind(connector("kv_producer", write=True, **PATIENT), TWO_RANKS),
    "decode_tp2": Kind(
        connector("kv_consumer", policy="recompute", write=True, share_caches=True, **PATIENT),
        TWO_RANKS,
    ),
    "prefill_nixl": Kind(connector("kv_producer", backend="nixl", write=True), {}, NIXL),
    "decode_nixl": Kind(
        connector("kv_consumer", policy="recompute", backend="nixl", write=True), {}, NIXL
    ),
}


class Fleet:
    """Engines by name; all that were named start at once."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self.nursery = Nursery(folder)
        self._engines: dict[str, EngineProcess] = {}
        self._all: list[EngineProcess] = []

    def start(self, *names: str) -> None:
        for name in names:
            known = self._engines.get(name)
            if known is None or not known.alive:
                kind = ENGINES[name]
                engine = EngineProcess(
                    self.nursery,
                    self._model,
                    kind.connector,
                    arguments=kind.arguments,
                    environment=kind.environment,
                )
                self._engines[name] = engine
                self._all.append(engine)

    def get(self, name: str) -> EngineProcess:
        self.start(name)
        return self._engines[name].ready()

    def close(self) -> None:
        for engine in self._all:
            engine.close()
        self.nursery.close()


@pytest.fixture(scope="session")
def fleet(model: Path, folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(model, folder)
    try:
        yield fleet
    finally:
        fleet.close()


@attrs.frozen
class Expected:
    """What one engine without a connector says."""

    tokens: dict[str, list[int]]
    crowd: list[list[int]]
    samples: list[list[int]]

    def __getitem__(self, name: str) -> list[int]:
        return self.tokens[name]


@pytest.fixture(scope="session")
def expected(fleet: Fleet) -> Expected:
    """Tokens of every prompt from one engine without a connector, which then ends."""
    fleet.start("single", "prefill", "decode")
    single = fleet.get("single")
    outputs = single.generate(list(PROMPTS.values()))
    crowd = single.generate(CROWD, max_tokens=CROWD_TOKENS)
    (samples,) = single.generate([PROMPTS["samples100"]], **SAMPLES)
    single.close()
    return Expected(
        {name: out["tokens"] for name, out in zip(PROMPTS, outputs, strict=True)},
        [out["tokens"] for out in crowd],
        samples["samples"],
    )


@pytest.fixture
def engine(fleet: Fleet, expected: Expected) -> Callable[[str], EngineProcess]:
    """An engine by name, with nothing under way."""
    return fleet.get
