"""Two API servers and the example's proxy over HTTP: equal answers, plain and streaming."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Expected, Fleet
from vllm_rig import BLOCK_NBYTES, PROMPTS, ServerProcess, blocks_of, connector

pytestmark = pytest.mark.timeout(900)

PROXY = Path(__file__).parents[2] / "examples" / "vllm_proxy.py"
SECONDS = 400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def servers(fleet: Fleet, model: Path) -> Iterator[dict[str, str]]:
    """Base URLs of a prefill server, a decode server and the proxy before them."""
    ports = {"prefill": free_port(), "decode": free_port()}
    running = [
        ServerProcess(fleet.nursery, model, connector(role, policy="fail"), ports[name])
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    urls["proxy"] = f"http://127.0.0.1:{free_port()}"
    words = ["--prefill", urls["prefill"], "--decode", urls["decode"], "--port"]
    proxy = subprocess.Popen([sys.executable, PROXY, *words, urls["proxy"].rsplit(":", 1)[1]])
    try:
        for name, path in (("prefill", "health"), ("decode", "health"), ("proxy", "nothing")):
            until_it_answers(f"{urls[name]}/{path}", running)
        yield urls
    finally:
        proxy.terminate()
        proxy.wait(30)
        for server in running:
            server.close()


def until_it_answers(url: str, running: list[ServerProcess]) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            httpx.get(url, timeout=10.0)
        except httpx.TransportError:
            assert time.monotonic() < end, [server.tail() for server in running]
            time.sleep(0.2)
        else:
            return


def body(name: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPTS[name],
        "max_tokens": 16,
        "min_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def metric(url: str, name: str) -> float:
    """The sum of one metric over its labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60.0).text.splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((name + "{", name + " "))]
    assert values, name
    return sum(map(float, values))


def test_plain_and_streaming(servers: dict[str, str], expected: Expected) -> None:
    """Tokens equal a single engine's, and /metrics of both servers tell of the transfers."""
    url = f"{servers['proxy']}/v1/completions"
    answer = httpx.post(url, json=body("http_plain100"), timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == expected["http_plain100"]

    tokens: list[int] = []
    pieces = 0
    with httpx.stream(
        "POST", url, json=body("http_stream200", stream=True), timeout=SECONDS
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice["token_ids"] or []
                pieces += 1
    assert tokens == expected["http_stream200"]
    assert pieces > 1

    decode = servers["decode"]
    nbytes = sum(map(blocks_of, (100, 200))) * BLOCK_NBYTES
    assert metric(decode, "vllm:kvxfer_load_bytes_sum") == nbytes
    assert metric(decode, "vllm:kvxfer_load_seconds_count") == 2
    assert metric(decode, "vllm:external_prefix_cache_hits_total") == 300
    assert metric(decode, "vllm:kvxfer_failed_loading_total") == 0
    assert metric(decode, "vllm:kvxfer_quarantined_now") == 0
    end = time.monotonic() + 60.0
    while metric(servers["prefill"], "vllm:kvxfer_sent_total") < 2:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_without_a_prefill_server(servers: dict[str, str], expected: Expected) -> None:
    """Decode computes what nobody prefills; the client sees no difference."""
    port = free_port()
    words = ["--prefill", f"http://127.0.0.1:{free_port()}", "--decode", servers["decode"]]
    proxy = subprocess.Popen([sys.executable, PROXY, *words, "--port", str(port)])
    try:
        until_it_answers(f"http://127.0.0.1:{port}/nothing", [])
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", json=body("http_alone64"), timeout=SECONDS
        )
    finally:
        proxy.terminate()
        proxy.wait(30)
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == expected["http_alone64"]
