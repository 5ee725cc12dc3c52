"""Arguments and dispatch; each command's work is in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvxfer.cli import doctor, health, keys, plugins, sim
from kvxfer.cli.bench import command as bench
from kvxfer.cli.demo.geometry import GEOMETRIES
from kvxfer.cli.demo.plan import FAULT_LEVELS, Sabotage
from kvxfer.errors import KvxferError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 all held, 1 something did not, 2 bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KvxferError as error:
        sys.stderr.write(f"kvxfer: {error}\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvxfer", description="Moves KV-cache blocks between prefill and decode workers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="move blocks between two processes, with faults"))
    bench.add_arguments(
        commands.add_parser("bench", help="measure the backends of this host beside baselines")
    )
    doctor.add_arguments(
        commands.add_parser("doctor", help="what this host can do, what is missing, the next step")
    )
    plugins.add_arguments(
        commands.add_parser("plugins", help="list backends, classifiers and retry policies")
    )
    health.add_arguments(commands.add_parser("health", help="ask a worker what is wrong with it"))
    keys.add_arguments(
        commands.add_parser("keys", help="keys and allow-list of the control channel")
    )
    sim.add_arguments(
        commands.add_parser("sim", help="simulate agents in virtual time, one seed after another")
    )
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.description = (
        "Starts a prefill and a decode process with KV caches of a real model's geometry, sends a "
        "stream of requests through them while faults are injected, checks every byte and every "
        "block, and says whether all promises held: exit status 0 if so. Ctrl-C ends it early: "
        "what is under way is finished and judged."
    )
    demo.add_argument("--backend", default="shm", help="an installed backend (kvxfer plugins)")
    demo.add_argument(
        "--failover",
        nargs="?",
        const="shm",
        metavar="NEXT",
        help="prefill's engine dies half-way; what is under way goes on over NEXT (shm)",
    )
    demo.add_argument("--requests", type=int, default=400)
    demo.add_argument("--model", choices=sorted(GEOMETRIES), default="llama-3.1-8b")
    demo.add_argument("--faults", choices=sorted(FAULT_LEVELS), default="default")
    demo.add_argument("--seed", type=int, default=1)
    demo.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    demo.add_argument(
        "--metrics-port",
        type=int,
        help="serve metrics and health: prefill on this port, decode on the next (0: any two)",
    )
    demo.add_argument(
        "--sabotage",
        choices=[s.value for s in Sabotage],
        help="break one promise on purpose: the demo must notice and exit non-zero",
    )
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from kvxfer.cli.demo.driver import run
    from kvxfer.cli.demo.plan import DemoPlan

    sabotage = None if arguments.sabotage is None else Sabotage(arguments.sabotage)
    plan = DemoPlan(
        backend=arguments.backend,
        failover=arguments.failover,
        requests=arguments.requests,
        model=arguments.model,
        faults=arguments.faults,
        seed=arguments.seed,
        sabotage=sabotage,
        metrics_port=arguments.metrics_port,
        # Where releases are lost on purpose, the run lasts as long as a lease.
        lease=3.0 if sabotage is Sabotage.DROP_RELEASE else 10.0,
    )
    return run(plan, as_json=arguments.json)
