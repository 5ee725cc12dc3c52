"""Imports vLLM once, and forks a process for every engine that is asked for.

Importing vLLM takes 15 s of one core, which every engine would pay again.  Requests come as JSON
lines on stdin; each engine connects to the socket it is given and is told what to do there.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
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
IMPORTED = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "kvxfer.integrations.vllm.connector",
    "faulty_connector",
)


def serve(engine: Any, lines: Any, answers: Any) -> None:
    """Do what each line says, until they end."""
    for line in lines:
        command = json.loads(line)
        try:
            answer = {"value": getattr(engine, command.pop("op"))(**command)}
        except Exception as error:
            where = "".join(traceback.format_exception(error))[-2000:]
            answer = {"error": f"{type(error).__name__}: {error}\n{where}"}
        print(json.dumps(answer), file=answers, flush=True)


def serve_http(arguments: list[str]) -> None:
    """Be vLLM's API server, until it is killed. Its engine runs in a process of its own."""
    from vllm.entrypoints.launchers.api_server import entry

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    sys.argv[1:] = arguments
    entry.main()


def raise_engine(order: dict[str, Any]) -> None:
    """In the fork: build the engine, serve, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # so that whatever it starts can be ended with it
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(order["socket"])
    with wire, wire.makefile("r") as lines, wire.makefile("w") as answers:
        print(json.dumps({"pid": os.getpid()}), file=answers, flush=True)
        if "server" in order:
            serve_http(order["server"])
            return
        from engine import Engine

        began = time.monotonic()
        engine = Engine(**order["engine"])
        print(json.dumps({"ready": time.monotonic() - began}), file=answers, flush=True)
        serve(engine, lines, answers)
        engine.close()


def main() -> None:
    os.environ.update(ENVIRONMENT)
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"a fork would copy one of {threads} threads"
        if os.fork() == 0:
            status = 1
            try:
                raise_engine(json.loads(line))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                # What vLLM tidies up at exit is of no interest here, and takes its time.
                os._exit(status)


if __name__ == "__main__":
    main()
