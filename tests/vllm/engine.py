"""One vLLM engine in a process of its own, told what to do by JSON lines on stdin."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# Set before vLLM is imported: one process per engine, nothing from the network.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class Engine:
    def __init__(self, model: str, connector: dict[str, Any] | None) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            num_gpu_blocks_override=64,
            max_model_len=512,
            max_num_batched_tokens=512,
            seed=0,
            **({"kv_transfer_config": connector} if connector else {}),
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.connected = connector is not None
        self.zeroed: list[int] = []

    def params(self, max_tokens: int, kv: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if kv is None else {"kv_transfer_params": kv},
        )

    def generate(
        self, prompts: list[list[int]], max_tokens: int, kv: list[dict[str, Any] | None]
    ) -> list[dict[str, Any]]:
        began = time.monotonic()
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self.params(max_tokens, each) for each in kv],
            use_tqdm=False,
        )
        seconds = time.monotonic() - began
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "kv": output.kv_transfer_params,
                "seconds": seconds,
            }
            for output in outputs
        ]

    def add(self, request_id: str, prompt: list[int], kv: dict[str, Any]) -> None:
        """Queue a request; nothing is scheduled before the next step."""
        self.llm.llm_engine.add_request(
            request_id, {"prompt_token_ids": prompt}, self.params(16, kv)
        )

    def abort(self, request_id: str) -> None:
        self.llm.llm_engine.abort_request([request_id])

    def settle(self, free: int | None, seconds: float, ignored: list[str]) -> dict[str, Any]:
        """Step until ``free`` blocks are free and nothing is under way, or time is up.

        A server does the same by itself while requests wait for their transfers; the offline
        engine only steps when it is asked to.
        """
        end = time.monotonic() + seconds
        while True:
            self.llm.llm_engine.step()
            state = self.state()
            busy = {name for name, size in state["tables"].items() if size} - set(ignored)
            if (free in (None, state["free"]) and not busy) or time.monotonic() >= end:
                return state
            time.sleep(0.01)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "free": self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        }
        if self.connected:
            snapshot = self.connector.worker.agent.snapshot()
            half = self.core.scheduler.connector.scheduler
            state["counters"] = snapshot.counters
            state["tables"] = {
                **snapshot.tables,
                "worker holds": len(self.connector.worker._holds),
                "worker loads": len(self.connector.worker._loads),
                "scheduler pulls": len(half._pulling),
                "scheduler offers": len(half._remotes),
                "scheduler transfers": len(half.agent),
            }
        return state

    @property
    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def spoil(self, on: bool) -> None:
        """Negative control: zero what was pulled before vLLM hears that it is there."""
        worker = self.connector.worker
        if not on:
            del worker.finished
            return
        honest = worker.finished
        layers = self.core.model_executor.driver_worker.worker.model_runner.kv_caches

        def finished() -> Any:
            loads = {load.request_id: load.block_ids for load in worker._loads.values()}
            sent, loaded = honest()
            for request_id in loaded:
                for layer in layers:
                    for block in loads[request_id]:
                        layer[block].zero_()
                        self.zeroed.append(block)
            return sent, loaded

        worker.finished = finished


def main() -> None:
    # vLLM writes to stdout as it likes: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    began = time.monotonic()
    engine = Engine(options["model"], options["connector"])
    print(json.dumps({"ready": time.monotonic() - began}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"value": getattr(engine, command.pop("op"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    if engine.connected:
        engine.connector.shutdown()
    os._exit(0)  # what vLLM tidies up at exit is of no interest here, and takes its time


if __name__ == "__main__":
    main()
