"""``kvxfer sim``: whole systems in virtual time, one seed after another."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.testing.sim import SimConfig

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.description = (
        "Runs the shipped agents against a simulated engine and network with one seed after "
        "another, with every fault this project knows of, and checks every promise at every step. "
        "Equal seeds give equal runs. Exit status 1 if a promise was broken."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--transfers", type=int, default=200, help="requests per seed")
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--consumers", type=int, default=3)
    parser.add_argument(
        "--peers",
        metavar="N or N-M",
        help="processes in all, instead of --producers and --consumers: each seed another number",
    )
    parser.add_argument(
        "--rate", type=float, default=4.0, help="requests per process and simulated second"
    )
    parser.add_argument(
        "--profile",
        default="mixed",
        help="mixed, calm, leases, fences, network, or all: each seed the next one",
    )
    parser.add_argument("--harsh", type=float, default=1.0, help="faults so many times as likely")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a chance or duration of SimConfig, such as abort=0.4; several times if need be",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--table", action="store_true", help="print what struck in which phase")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller run that fails")
    parser.add_argument("--stop", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kvxfer.errors import KvxferError
    from kvxfer.testing.sim import campaign, coverage_table, expected_cells, merge

    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    try:
        configs = {seed: _config(arguments, seed) for seed in seeds}
    except KvxferError as error:
        sys.stderr.write(f"kvxfer sim: {error}\n")
        return 2
    began = time.monotonic()
    reports = []
    jobs = [(seed, config.to_dict()) for seed, config in configs.items()]
    for report in campaign(jobs, processes=arguments.jobs):
        reports.append(report)
        if not arguments.json:
            sys.stdout.write(
                f"seed {report['seed']}: {len(report['violations'])} violations, "
                f"{report['happenings']} events, {report['seconds']:.0f} simulated seconds\n"
            )
            for text in report["violations"]:
                sys.stdout.write(f"  {text}\n")
            sys.stdout.flush()
        if arguments.stop and report["violations"]:
            break
    told = merge(reports)
    seconds = time.monotonic() - began
    told["wall_seconds"] = round(seconds, 1)
    told["events_per_second"] = round(told["happenings"] / seconds)
    faults = told.pop("faults")
    if arguments.json:
        told["faults"] = [[fault, phase, n] for (fault, phase), n in sorted(faults.items())]
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        outcomes = ", ".join(f"{name} {n}" for name, n in told["outcomes"].items())
        sys.stdout.write(
            f"{told['runs']} runs, {told['transfers']} requests, {len(told['violations'])} "
            f"violations; {told['events_per_second']} events per second; {outcomes}\n"
        )
        if arguments.table:
            sys.stdout.write(coverage_table(faults) + "\n")
            rare = [f"{f} in {p} {n}" for f, p in expected_cells() if (n := faults[f, p]) < 100]
            sys.stdout.write(f"hit fewer than 100 times: {', '.join(rare) or 'nothing'}\n")
    if told["violations"] and arguments.shrink:
        seed = min(seed for seed, _ in told["violations"])
        _shrink(seed, configs[seed])
    return 1 if told["violations"] else 0


def _config(arguments: argparse.Namespace, seed: int) -> SimConfig:
    """The world of one seed.

    Raises:
        ConfigError: there is no such profile, ``--peers`` is no number of processes, or ``--set``
            makes no sense.
    """
    import attrs

    from kvxfer.errors import ConfigError
    from kvxfer.testing.sim import PROFILES, SimConfig

    names = list(PROFILES) if arguments.profile == "all" else [arguments.profile]
    name = names[seed % len(names)]
    if name not in PROFILES:
        raise ConfigError(
            f"there is no profile {name!r}", next_step=f"use all, {', '.join(PROFILES)}"
        )
    producers, consumers = arguments.producers, arguments.consumers
    if arguments.peers is not None:
        peers = _peers(arguments.peers, seed)
        producers = peers // 2
        consumers = peers - producers
    config = attrs.evolve(
        PROFILES[name],
        producers=producers,
        consumers=consumers,
        transfers=arguments.transfers,
        rate=arguments.rate * (producers + consumers),
    ).harsher(arguments.harsh)
    numbers = [field.name for field in attrs.fields(SimConfig) if str(field.type) == "float"]
    try:
        for text in arguments.set:
            field, _, value = text.partition("=")
            if field not in numbers:
                raise ValueError(f"{field!r} is none of {', '.join(numbers)}")
            config = SimConfig.from_dict({**config.to_dict(), field: float(value)})
    except ValueError as error:
        raise ConfigError(f"--set {text}: {error}", next_step="give NAME=NUMBER") from None
    return config


def _peers(text: str, seed: int) -> int:
    """How many processes there are with that seed."""
    from kvxfer.errors import ConfigError

    least, _, most = text.partition("-")
    try:
        low, high = int(least), int(most or least)
    except ValueError:
        low = high = 0
    if not 2 <= low <= high:
        raise ConfigError(
            f"--peers is {text!r}", next_step="give a number from 2 on, or two such as 2-20"
        )
    # Not in step with the profiles, which take turns as well.
    return low + random.Random(seed).randrange(high - low + 1)  # noqa: S311 - no secret


def _shrink(seed: int, config: SimConfig) -> None:
    from kvxfer.testing.sim import shrink

    small_seed, small, report = shrink(seed, config)
    sys.stdout.write(f"shrunk: seed {small_seed} of {json.dumps(small.to_dict())}\n")
    for violation in report.violations:
        sys.stdout.write(f"  {violation}\n")
