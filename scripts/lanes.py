"""Run the lanes: every way in which kvxfer is tested, each with its own set-up.

    scripts/lanes.py run LANE...            these, one after the other, output as it comes
    scripts/lanes.py run --all --jobs 2     every lane, two at a time, output when one ends
    scripts/lanes.py run --all --except portable
    scripts/lanes.py report                 the table of this run; fails if a lane did not run
    scripts/lanes.py list
    scripts/lanes.py demo [ARGUMENTS]       set up .venv and run the demo in it

A lane fails if its set-up fails, a check fails, no test ran, a test was skipped for a reason that
the lane does not expect, or its time is up.  Standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import sys
import time

import lane_table
from lane_run import Counts, LaneFailed, LaneRun, end_all
from venvs import HOME, ROOT, SetupError, ensure

RESULTS = HOME / "results"

# Names this run. Set by whoever calls us several times and wants one table.
RUN = os.environ.get("KVXFER_RUN") or str(time.time_ns())


def run_lane(lane: lane_table.Lane, *, live: bool) -> dict[str, object]:
    """Set up and run one lane; writes and returns its result. Never raises for a failing lane."""
    started = time.monotonic()
    counts, problem, notes, setup = Counts(), "", [], 0.0
    log = HOME / f"lane-{lane.name}.log"
    with LaneRun(lane.name, log, live=live, limit=lane.limit) as run:
        run.say(f"== lane {lane.name}: {lane.about}")
        try:
            for step in lane.before:
                step(run)
            ready = [ensure(venv) for venv in lane.venvs]
            setup = time.monotonic() - started
            notes = [note for r in ready for note in r.notes]
            for note in notes:
                run.say(f"-- {note}")
            run.say(f"-- set-up took {setup:.1f} s")
            lane.body(run, ready)
            counts = run.counts
            run.check_counts(lane.expected_skips(notes), lane.skips, lane_table.BY_CAPABILITY)
        except (SetupError, LaneFailed) as error:
            counts = run.counts
            problem = str(error)
            run.say(f"!! {problem}")
        seconds = time.monotonic() - started
        run.say(
            f"== lane {lane.name}: {'FAILED' if problem else 'ok'}, {counts}, "
            f"{seconds:.1f} s ({setup:.1f} s of it set-up)\n"
        )
    result: dict[str, object] = {
        "run": RUN,
        "lane": lane.name,
        "ok": not problem,
        "problem": problem.splitlines()[0] if problem else "",
        "passed": counts.passed,
        "failed": counts.failed,
        "skipped": counts.skipped,
        "setup": round(setup, 1),
        "seconds": round(seconds, 1),
        "notes": notes,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{lane.name}.json").write_text(json.dumps(result, indent=1))
    if not live:
        sys.stdout.write(log.read_text())
        sys.stdout.flush()
    return result


def run_lanes(names: list[str], jobs: int) -> bool:
    """Run lanes in order, ``jobs`` at a time. True when all held."""
    HOME.mkdir(exist_ok=True)
    lanes = [lane_table.LANES[name] for name in names]
    if jobs == 1 or len(lanes) == 1:
        held = [bool(run_lane(lane, live=True)["ok"]) for lane in lanes]
        return all(held)

    def one(lane: lane_table.Lane) -> bool:
        print(f"-- lane {lane.name} starts", flush=True)
        return bool(run_lane(lane, live=False)["ok"])

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            return all(list(pool.map(one, lanes)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def report(names: list[str]) -> bool:
    """Print the table of this run's lanes. True when each of them ran and held."""
    total, held = Counts(), True
    columns = "{:<12}{:<13}{:>8}{:>8}{:>9}{:>10}{:>9}"
    print()
    print(columns.format("lane", "result", "passed", "failed", "skipped", "set-up s", "total s"))
    for name in names:
        path = RESULTS / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        if result.get("run") != RUN:
            print(columns.format(name, "DID NOT RUN", *[""] * 5))
            held = False
            continue
        held = held and result["ok"]
        numbers = [result[key] for key in ("passed", "failed", "skipped")]
        total.add(*numbers)
        verdict = "ok" if result["ok"] else "FAILED"
        print(columns.format(name, verdict, *numbers, result["setup"], result["seconds"]))
        for text in filter(None, [*result["notes"], result["problem"]]):
            print(f"    {text}")
    # The plain closing line that test harnesses look for.
    print(f"\n{total}", flush=True)
    return held and total.passed > 0


def demo(arguments: list[str]) -> int:
    """Set up ``.venv`` and replace this process by the demo."""
    ready = ensure(lane_table.DEMO)
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(ready.python, [str(ready.python), "-m", "kvxfer", "demo", *arguments])


def leave(*_: object) -> None:
    """Make SIGTERM an ordinary exit, so that running programs are ended with us."""
    sys.exit(143)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, leave)
    parser = argparse.ArgumentParser(prog="lanes.py", description="Run the lanes.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run lanes")
    run.add_argument("lanes", nargs="*", metavar="LANE", choices=[[], *lane_table.LANES])
    run.add_argument("--all", action="store_true", help="every lane of test-all")
    run.add_argument("--except", dest="leave", action="append", default=[], metavar="LANE")
    run.add_argument("--jobs", type=int, default=1)
    commands.add_parser("report", help="print the table of this run")
    commands.add_parser("list", help="print the lanes")
    commands.add_parser("demo", help="run the demo").add_argument("rest", nargs="*")
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "demo":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        if arguments.command == "demo":
            return demo(argv[1:])
        if arguments.command == "list":
            for lane in lane_table.LANES.values():
                print(f"{lane.name:<12}{lane.about}")
            return 0
        if arguments.command == "report":
            return 0 if report(list(lane_table.CI)) else 1
        names = list(lane_table.ALL) if arguments.all else list(arguments.lanes)
        names = [name for name in names if name not in arguments.leave]
        if not names:
            parser.error("name a lane, or give --all")
        held = run_lanes(names, arguments.jobs)
        if len(names) > 1 and "KVXFER_RUN" not in os.environ:
            held = report(names) and held
        return 0 if held else 1
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
