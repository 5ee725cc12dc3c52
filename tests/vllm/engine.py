"""One vLLM engine, driven by hand: each method is a command that a test can send."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterable
from typing import Any

PATIENCE = 120.0
"""Seconds for what takes one on a machine that has nothing else to do."""


def rank_state(_: Any) -> dict[str, Any]:
    """What one worker knows. Runs in its process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().worker
    snapshot = worker.agent.snapshot()
    tables = {
        **snapshot.tables,
        "worker holds": len(worker.outcomes.holds),
        "worker loads": len(worker.outcomes.loads),
    }
    return {"address": worker.agent.address, "counters": snapshot.counters, "tables": tables}


def spoil_rank(worker: Any, how: str) -> None:
    """See ``Engine.spoil``. Runs in the process of one rank."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group().worker
    vars(half).pop("finished", None)
    if not how:
        return
    honest, layers = half.finished, worker.model_runner.kv_caches

    def finished() -> Any:
        loads = {load.request_id: load for load, _ in half.outcomes.loads.values()}
        found = honest()
        for request_id in found.finished_recving:
            (blocks,) = loads[request_id].blocks
            for layer in layers:
                if how == "zero":
                    for block in blocks:
                        layer[block].zero_()
                else:
                    layer[blocks[0]].copy_(layer[blocks[-1]])
        return found

    half.finished = finished


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total


class Engine:
    def __init__(
        self, model: str, connector: dict[str, Any] | None, arguments: dict[str, Any]
    ) -> None:
        from vllm import LLM
        from vllm.v1.executor import multiproc_executor

        # vLLM spawns its ranks on CPU, and each imports it anew for 15 s of a core. This process
        # is young and has no threads yet: its ranks may be forks of it.
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        options: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": 64,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "seed": 0,
            **arguments,
        }
        if connector:
            options["kv_transfer_config"] = connector
        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connected = connector is not None and "kv_connector_module_path" in connector
        self.preemptions = 0
        self._numbers = itertools.count()
        self._outputs: dict[str, dict[str, Any]] = {}
        self._first: dict[str, float] = {}
        """By vLLM's request id: when it was first computed."""
        self._ended = 0.0
        """The last step."""
        self._computed = 0
        """Tokens in the last step."""
        self._stats: Any = None
        self.in_process = options.get("tensor_parallel_size", 1) == 1
        if self.connected and self.in_process:
            self._collect_stats()
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> Any:
            self.preemptions += 1
            return preempt(*arguments, **more)

        self.scheduler._preempt_request = counted
        schedule = self.scheduler.schedule

        def watched(*arguments: Any, **more: Any) -> Any:
            output = schedule(*arguments, **more)
            self._computed = output.total_num_scheduled_tokens
            now = time.monotonic()
            for request_id in output.num_scheduled_tokens:
                self._first.setdefault(request_id, now)
            return output

        self.scheduler.schedule = watched

    def close(self) -> None:
        if not self.in_process:
            self.core.shutdown()
        elif self.connected:
            self.connector.shutdown()

    # ---- requests ----------------------------------------------------------------------------

    def add(
        self,
        *,
        prompt: list[int],
        kv: dict[str, Any] | None = None,
        max_tokens: int = 16,
        n: int = 1,
        seed: int | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request; nothing is scheduled before the next step."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request_id = request_id or f"request-{next(self._numbers)}"
        params = SamplingParams(
            n=n,
            seed=seed,
            temperature=0.0 if seed is None else 1.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if kv is None else {"kv_transfer_params": kv},
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        return request_id

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        outputs = self.engine.step()
        self._ended = time.monotonic()
        if not self._computed:
            time.sleep(0.001)  # as vLLM's own loop does: other threads have something to do
        for output in outputs:
            if output.finished:
                samples = sorted(output.outputs, key=lambda sample: sample.index)
                self._outputs[output.request_id] = {
                    "tokens": list(samples[0].token_ids),
                    "samples": [list(sample.token_ids) for sample in samples],
                    "finish": samples[0].finish_reason,
                    "kv": output.kv_transfer_params,
                    "cached": output.num_cached_tokens,
                    **self._when(output.request_id),
                }

    def _when(self, request_id: str) -> dict[str, float]:
        """Of a request that has just finished; seconds of a clock that all processes share."""
        ours = [name for name in self._first if name.startswith(request_id)]
        first = [self._first.pop(name) for name in ours]
        return {"first": min(first, default=0.0), "ended": self._ended}

    def finish(self, ids: list[str]) -> list[dict[str, Any]]:
        """Step until these have finished."""
        began = time.monotonic()
        while not self._outputs.keys() >= set(ids):
            self._step()
            if time.monotonic() > began + PATIENCE:
                raise TimeoutError(f"not finished: {ids}; {self.state()}")
        seconds = time.monotonic() - began
        return [{**self._outputs.pop(request_id), "seconds": seconds} for request_id in ids]

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.finish([self.add(**request) for request in requests])

    def most_used(self, requests: list[dict[str, Any]]) -> list[int]:
        """Ids of all blocks that these requests, computed together, have had."""
        ids = [self.add(**request) for request in requests]
        before, used = set(self.allocated()), set[int]()
        while not self._outputs.keys() >= set(ids):
            self._step()
            used |= set(self.allocated()) - before
        for request_id in ids:
            del self._outputs[request_id]
        return sorted(used)

    def pump(self, requests: list[dict[str, Any]], seconds: float) -> dict[str, dict[str, Any]]:
        """Add requests, and step for a while, until some have finished: what a server does."""
        for request in requests:
            self.add(**request)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._outputs:
            self._step()
        found, self._outputs = self._outputs, {}
        return found

    def free(self) -> int:
        """Blocks that nobody has."""
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    def serve_until(self, free: int, seconds: float) -> None:
        """Step until so many blocks are free, under whatever connector."""
        end = time.monotonic() + seconds
        while self.free() != free:
            self._step()
            if time.monotonic() > end:
                raise TimeoutError(f"{self.free()} blocks are free, not {free}")

    def pace(self, seconds: float, pause: float) -> int:
        """Step for that long, at that pace; returns how many requests are under way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._step()
            time.sleep(pause)
        return len(self.scheduler.running)

    def settle(self, free: int | None, seconds: float, ignored: list[str]) -> dict[str, Any]:
        """Step until ``free`` blocks are free and nothing is under way, or time is up.

        A server does the same by itself while requests wait for their transfers; the offline
        engine only steps when it is asked to.
        """
        end = time.monotonic() + seconds
        while True:
            self._step()
            state = self.state()
            busy = {name for name, size in state["tables"].items() if size} - set(ignored)
            if (free in (None, state["free"]) and not busy) or time.monotonic() >= end:
                return state
            time.sleep(0.01)

    # ---- looking inside ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "free": self.free(),
            "preemptions": self.preemptions,
            "waiting": self.scheduler.get_request_counts()[1],
            "running": len(self.scheduler.running),
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
        }
        if self.connected:
            ranks = self.core.model_executor.collective_rpc(rank_state)
            half = self.scheduler.connector.scheduler
            state["addresses"] = [rank["address"] for rank in ranks]
            state["counters"] = added(rank["counters"] for rank in ranks)
            state["bytes"] = [
                sum(rank["counters"].get(name, 0) for name in ("pull.bytes", "push.bytes"))
                for rank in ranks
            ]
            state["tables"] = {
                **added(rank["tables"] for rank in ranks),
                "scheduler loads": len(half.loads.loading),
                "scheduler queue": len(half.loads.waiting),
                "scheduler leads": len(half.loads.leads),
                "scheduler prefills": len(half.pushes.prompts),
                "scheduler pushes": len(half.pushes.moving),
                "scheduler aside": len(half.aside),
                "scheduler transfers": len(half.agent),
                "scheduler renewals": len(half.agent._kept),
            }
        return state

    @property
    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def worker(self) -> Any:
        return self.connector.worker

    def landed(self, transfer_id: str) -> bool:
        """Whether all that was pushed so far is out of its blocks."""
        push = self.worker.agent._engine.producer.pushes.get(transfer_id)
        return push is not None and push.granted and not push.reading

    def pushed(self, transfer_id: str) -> int:
        """Blocks of a prompt that have been pushed so far."""
        prompts = self.scheduler.connector.scheduler.pushes.prompts.values()
        return sum(p.pushed for p in prompts if p.push.transfer_id == transfer_id)

    def injected(self) -> dict[str, int]:
        found: dict[str, int] = self.connector.injected()
        return found

    def inject(self, **faults: Any) -> None:
        self.connector.inject(**faults)

    def allocated(self) -> list[int]:
        """Ids of the blocks that some request has now."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        return [b.block_id for b in pool.blocks if not b.is_null and b.block_id not in free]

    def recompute(self, on: bool) -> None:
        """``kv_load_failure_policy``, changed while it runs."""
        self.scheduler.recompute_kv_load_failures = on

    def release(self) -> int:
        found: int = self.connector.release()
        return found

    def occupy(self, seqs: int) -> None:
        """At most so many requests run at once; others wait in the queue."""
        self.scheduler.max_num_active_reqs = seqs

    def unpin(self) -> None:
        """Let all threads run on every core."""
        cores = range(os.cpu_count() or 1)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    def lease(self, seconds: float) -> None:
        """Holds that begin from now on last that long."""
        import attrs

        agent = self.scheduler.connector.scheduler.agent
        agent.config = attrs.evolve(agent.config, lease=seconds)

    def metrics(self) -> dict[str, int | float]:
        """What vLLM would log of transfers since the last call."""
        stats, self._stats = self._stats, None
        if stats is None:
            return {}
        found: dict[str, int | float] = stats.reduce()
        return found

    def _collect_stats(self) -> None:
        """Keep what the connector hands to vLLM each step."""
        hand_over = self.connector.get_kv_connector_stats

        def kept() -> Any:
            stats = hand_over()
            if stats is not None:
                self._stats = stats if self._stats is None else self._stats.aggregate(stats)
            return stats

        self.connector.get_kv_connector_stats = kept

    def sleep(self, move: bool = False) -> list[str]:
        """What vLLM does around sleep mode; returns the addresses before and after.

        ``move``: the caches lie elsewhere when it wakes up.
        """
        before = self.worker.agent.address
        self.connector.unregister_kv_caches()
        if move:
            layer = self.core.model_executor.driver_worker.worker.model_runner.kv_caches[0]
            was = layer.data_ptr()
            self.worker.transport.share_storage(layer)
            assert layer.data_ptr() != was
        self.connector.restore_kv_caches()
        return [before, self.worker.agent.address]

    def spoil(self, how: str) -> None:
        """Negative controls: in all ranks, spoil what was loaded before vLLM hears of it.

        ``zero`` zeroes all blocks; ``block`` puts the last block of a load in the place of its
        first; an empty text restores honesty.
        """
        self.core.model_executor.collective_rpc(spoil_rank, args=(how,))
