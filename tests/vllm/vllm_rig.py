"""A tiny random Llama, prompts, and engines in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvxfer.integrations.vllm.params import Push

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, FFN = 2, 128, 4, 2, 32, 512, 256
BLOCK_TOKENS = 32
BLOCK_NBYTES = LAYERS * KV_HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * 4
"""One block over all layers: keys and values, float32."""
LENGTHS = (37, 64, 100, 200)
START_SECONDS = 400.0
ANSWER_SECONDS = 200.0


def make_model(folder: Path, **more: Any) -> Path:
    """Write a random Llama of a fixed seed; no tokenizer is needed. ``more`` is configuration."""
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
        **more,
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
PROMPTS |= {f"wrong{n}": prompt(n, 3) for n in LENGTHS if n > BLOCK_TOKENS * 2}
PROMPTS |= {f"killed{n}": prompt(n, 4) for n in (100, 200)}
PROMPTS |= {f"pushed{n}": prompt(n, 5) for n in LENGTHS}
PROMPTS |= {f"push_spoilt{n}": prompt(n, 6) for n in LENGTHS}
PROMPTS |= {"foreign100": prompt(100, 7), "stopped100": prompt(100, 8), "hung100": prompt(100, 9)}
PROMPTS |= {"first": SHARED + prompt(36, 12), "second": SHARED + prompt(60, 13)}
PROMPTS |= {"push_first": prompt(96, 14)}
PROMPTS["push_second"] = PROMPTS["push_first"][:64] + prompt(70, 15)
PROMPTS |= {"slept100": prompt(100, 16), "leased100": prompt(100, 17), "gone200": prompt(200, 18)}
PROMPTS |= {"samples100": prompt(100, 19), "push_dead100": prompt(100, 20)}
PROMPTS |= {
    f"nixl_{how}{n}": prompt(n, 50 + len(how)) for how in ("", "zero", "block") for n in LENGTHS
}
PROMPTS |= {
    f"nixl_push_{how}{n}": prompt(n, 250 + len(how))
    for how in ("", "zero", "block")
    for n in LENGTHS
}
PROMPTS |= {"slept64": prompt(64, 16), "expired100": prompt(100, 21), "reborn100": prompt(100, 22)}
PROMPTS |= {"preempted480": prompt(480, 260)}
PROMPTS |= {f"quarantine{n}": prompt(n, 261) for n in LENGTHS}
PROMPTS |= {
    f"{how}ranks{ranks}_{n}": prompt(n, 200 + 2 * seed + ranks)
    for seed, how in enumerate(("", "push_", "zero_", "block_"))
    for ranks in (1, 2)
    for n in ((100, 200) if seed > 1 else (64, 200))
}
PROMPTS |= {"http_plain100": prompt(100, 60), "http_stream200": prompt(200, 60)}
PROMPTS |= {"http_alone64": prompt(64, 61)}
"""Every test has its own, so that no prefix is cached by accident."""
CROWD = [prompt(100, seed) for seed in range(100, 116)]
"""So many that they do not fit into the blocks of an engine once they grow."""
CROWD_TOKENS = 64
SAMPLES: dict[str, Any] = {"n": 3, "seed": 5}


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def connector(
    role: str,
    *,
    policy: str = "fail",
    name: str = "KvxferConnector",
    module: str = "kvxfer.integrations.vllm",
    **extra: Any,
) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connect_timeout": 20.0, "queue_timeout": 20.0, **extra},
    }


class Nursery:
    """The process that forks engines: see ``nursery``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = (folder / "nursery.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
        )
        self._count = itertools.count()

    def next_name(self) -> str:
        return f"engine-{next(self._count)}"

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def tail(self) -> str:
        return (self.folder / "nursery.log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


class Forked:
    """A process that the nursery forks. ``order`` says what it becomes."""

    def __init__(self, nursery: Nursery, environment: dict[str, str], **order: Any) -> None:
        self._nursery = nursery
        self.log = nursery.folder / f"{nursery.next_name()}.log"
        self._socket = tempfile.mktemp(prefix="kvxfer-", suffix=".sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._socket)
        self._listener.listen(1)
        nursery.order(log=str(self.log), socket=self._socket, environment=environment, **order)
        self._wire: socket.socket | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self.pid = 0
        self._ended = False

    @property
    def alive(self) -> bool:
        return not self._ended

    def meet(self) -> None:
        """Wait until it is there."""
        if self._wire is not None:
            return
        self._listener.settimeout(START_SECONDS)
        try:
            self._wire, _ = self._listener.accept()
        except TimeoutError:
            raise AssertionError(f"nothing was forked\n{self._nursery.tail()}") from None
        os.unlink(self._socket)
        self._listener.close()
        self._reader.start()
        self.pid = self._answer(START_SECONDS)["pid"]

    def kill(self) -> None:
        """Without a chance to say anything."""
        os.kill(self.pid, signal.SIGKILL)
        self._ended = True
        self._reader.join(30)
        assert not self._reader.is_alive(), "it still holds its socket"

    def close(self) -> None:
        """Ends it, and whatever it has started."""
        if self._wire is None:
            self._listener.close()  # it finds nobody there, and ends
            os.unlink(self._socket)
            return
        if not self._ended:
            self._wire.shutdown(socket.SHUT_WR)
            self._reader.join(self.farewell_seconds)
            self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wire.close()

    farewell_seconds = 30.0

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def _read(self) -> None:
        assert self._wire is not None
        with contextlib.suppress(ConnectionError), self._wire.makefile("r") as lines:
            for line in lines:
                self._answers.put(line)
        self._ended = True
        self._answers.put("")

    def _answer(self, seconds: float) -> Any:
        if self._ended and self._answers.empty():
            raise AssertionError(f"the engine has ended\n{self.tail()}")
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"no answer within {seconds} s\n{self.tail()}") from None
        assert line, f"the engine has ended\n{self.tail()}"
        return json.loads(line)


class ServerProcess(Forked):
    """vLLM's OpenAI server; it answers over HTTP only."""

    farewell_seconds = 0.0

    def __init__(self, nursery: Nursery, model: Path, config: dict[str, Any], port: int) -> None:
        words = ["--model", str(model), "--served-model-name", "tiny", "--skip-tokenizer-init"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        words += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "512"]
        words += ["--num-gpu-blocks-override", "64", "--distributed-executor-backend", "uni"]
        words += ["--kv-transfer-config", json.dumps(config)]
        super().__init__(nursery, {}, server=words)
        self.meet()


class EngineProcess(Forked):
    """One engine. ``call`` waits for the answer, at most ``ANSWER_SECONDS``."""

    def __init__(
        self,
        nursery: Nursery,
        model: Path,
        config: dict[str, Any] | None,
        *,
        arguments: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        engine = {"model": str(model), "connector": config, "arguments": arguments or {}}
        super().__init__(nursery, environment or {}, engine=engine)
        self.start_seconds = 0.0

    def ready(self) -> EngineProcess:
        if not self.start_seconds:
            self.meet()
            self.start_seconds = self._answer(START_SECONDS)["ready"]
        return self

    def send(self, op: str, **arguments: Any) -> None:
        """Give a command; ``take`` its answer later."""
        assert self._wire is not None
        self._wire.sendall((json.dumps({"op": op, **arguments}) + "\n").encode())

    def take(self) -> Any:
        """The answer to the last command."""
        answer = self._answer(ANSWER_SECONDS)
        assert "error" not in answer, f"{answer['error']}\n{self.tail()}"
        return answer["value"]

    def call(self, op: str, **arguments: Any) -> Any:
        self.send(op, **arguments)
        return self.take()

    def generate(
        self,
        prompts: list[list[int]],
        kv: list[dict[str, Any] | None] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Outputs of these prompts, computed together. For ``options`` see ``Engine.add``."""
        requests = [
            {"prompt": prompt, "kv": params, **options}
            for prompt, params in zip(prompts, kv or [None] * len(prompts), strict=True)
        ]
        found: list[dict[str, Any]] = self.call("generate", requests=requests)
        return found

    @contextlib.contextmanager
    def spoilt(self, how: str) -> Iterator[None]:
        """What arrives is spoilt meanwhile: see ``Engine.spoil``."""
        self.call("spoil", how=how)
        try:
            yield
        finally:
            self.call("spoil", how="")

    def prefill(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Prefill and hold; returns the params for the decode side.

        The step that tells the worker to hold is only made by a server: see ``Engine.settle``.
        """
        kv: list[dict[str, Any] | None] = [{"do_remote_decode": True}] * len(prompts)
        outputs = self.generate(prompts, kv, max_tokens=1)
        self.settle(seconds=0.0)
        return [output["kv"] for output in outputs]

    def push(self, decode: EngineProcess, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Have this engine push the prompts' KV to ``decode`` while it computes it."""
        to = decode.call("state")["addresses"]
        pushes = [Push.to_addresses(secrets.token_hex(8), to) for _ in prompts]
        ids = [
            decode.call("add", prompt=prompt, kv=push.for_decode())
            for prompt, push in zip(prompts, pushes, strict=True)
        ]
        decode.call("step")
        self.generate(prompts, [push.for_prefill() for push in pushes], max_tokens=1)
        self.settle(seconds=0.0)
        found: list[dict[str, Any]] = decode.call("finish", ids=ids)
        return found

    def settle(
        self, free: int | None = None, seconds: float = 20.0, ignored: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """See ``Engine.settle``."""
        state: dict[str, Any] = self.call("settle", free=free, seconds=seconds, ignored=ignored)
        return state

    def stop(self) -> None:
        """It answers nothing until ``go_on``."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def step_until(engine: EngineProcess, there: Callable[[], object], *, step: bool = True) -> None:
    """Step until it is so; or, without ``step``, wait until it is."""
    end = time.monotonic() + ANSWER_SECONDS
    while not there():
        assert time.monotonic() < end, engine.call("state")
        if step:
            engine.call("step")
