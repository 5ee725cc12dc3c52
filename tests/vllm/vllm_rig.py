"""A tiny random Llama, prompts, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from engine import ENVIRONMENT
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, FFN = 2, 128, 4, 2, 32, 512, 256
BLOCK_TOKENS = 32
BLOCK_NBYTES = LAYERS * KV_HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4
"""One block over all layers: keys and values, float32."""
LENGTHS = (37, 64, 100, 200)
NEW_TOKENS = 16
START_SECONDS = 400.0
ANSWER_SECONDS = 200.0


def make_model(folder: Path) -> Path:
    """Write a random Llama of a fixed seed; no tokenizer is needed."""
    rng = np.random.default_rng(7)

    def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": ones,
            layer + "post_attention_layernorm.weight": ones,
            layer + "self_attn.q_proj.weight": random(HEADS * HEAD_SIZE, HIDDEN),
            layer + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN),
            layer + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN),
            layer + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_SIZE),
            layer + "mlp.gate_proj.weight": random(FFN, HIDDEN),
            layer + "mlp.up_proj.weight": random(FFN, HIDDEN),
            layer + "mlp.down_proj.weight": random(HIDDEN, FFN),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; two seeds share no block."""
    rng = np.random.default_rng([seed, length])
    return [int(t) for t in rng.integers(3, VOCABULARY, size=length)]


SHARED = prompt(64, 11)
PROMPTS = {f"plain{n}": prompt(n, 1) for n in LENGTHS}
PROMPTS |= {f"spoilt{n}": prompt(n, 2) for n in LENGTHS}
PROMPTS |= {f"killed{n}": prompt(n, 3) for n in (100, 200)}
PROMPTS |= {"foreign100": prompt(100, 4), "stopped100": prompt(100, 5)}
PROMPTS |= {"first": SHARED + prompt(36, 12), "second": SHARED + prompt(60, 13)}
"""Every test has its own, so that no prefix is cached by accident."""


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def connector(role: str, *, policy: str = "fail", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvxferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connect_timeout": 4.0, "queue_timeout": 20.0, **extra},
    }


class EngineProcess:
    """One engine. ``call`` waits for the answer, at most ``ANSWER_SECONDS``."""

    def __init__(self, model: Path, config: dict[str, Any] | None, log: Path) -> None:
        options = json.dumps({"model": str(model), "connector": config})
        self.log = log
        self._log_file = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine.py")), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            env={**os.environ, **ENVIRONMENT},
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.start_seconds = 0.0

    def ready(self) -> EngineProcess:
        if not self.start_seconds:
            self.start_seconds = self._answer(START_SECONDS)["ready"]
        return self

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._answer(ANSWER_SECONDS)
        assert "error" not in answer, f"{answer['error']}\n{self.tail()}"
        return answer["value"]

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = NEW_TOKENS,
        kv: list[dict[str, Any] | None] | None = None,
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call(
            "generate", prompts=prompts, max_tokens=max_tokens, kv=kv or [None] * len(prompts)
        )
        return found

    def prefill(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Prefill and hold; returns the params for the decode side.

        The step that tells the worker to hold is only made by a server: see ``Engine.settle``.
        """
        outputs = self.generate(prompts, 1, [{"do_remote_decode": True}] * len(prompts))
        self.settle(seconds=0.0)
        return [output["kv"] for output in outputs]

    def settle(
        self, free: int | None = None, seconds: float = 20.0, ignored: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """See ``Engine.settle``."""
        state: dict[str, Any] = self.call("settle", free=free, seconds=seconds, ignored=ignored)
        return state

    def kill(self) -> None:
        """Without a chance to say anything."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def stop(self) -> None:
        """It answers nothing until ``go_on``."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(10)
        self._process.stdout.close()
        self._log_file.close()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, seconds: float) -> Any:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"no answer within {seconds} s\n{self.tail()}") from None
        assert line, f"the engine has ended\n{self.tail()}"
        return json.loads(line)
