"""Three pictures of a result, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvxfer.cli.bench.plan import in_words

__all__ = ["plot"]

_SIZE = (8.0, 4.8)
_DPI = 120


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures for which there are measurements; returns their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [c for c in result["contenders"] if c["bandwidth"]]
    written = []
    for name, draw, needed in (
        ("bandwidth", _bandwidth, "bandwidth"),
        ("latency", _latency, "concurrency"),
        ("recovery", _recovery, "recovery"),
    ):
        with_data = [c for c in measured if c[needed]]
        if not with_data:
            continue
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, with_data)
        path = folder / f"{name}.png"
        figure.savefig(path)
        written.append(path)
    return written


def _bandwidth(figure: Any, measured: list[dict[str, Any]]) -> None:
    """Over block size, for the largest number of blocks; one panel per pattern."""
    patterns = list(dict.fromkeys(row["pattern"] for c in measured for row in c["bandwidth"]))
    panels = figure.subplots(1, len(patterns), sharey=True, squeeze=False)[0]
    for panel, pattern in zip(panels, patterns, strict=True):
        for number, contender in enumerate(measured):
            rows = _most_blocks(contender, pattern)
            if not rows:
                continue
            sizes = [row["size"] for row in rows]
            color = f"C{number}"
            label = contender["label"]
            panel.plot(sizes, [r["kvxfer"] for r in rows], "o-", color=color, label=label)
            if "direct" in rows[0]:
                values = [r["direct"] for r in rows]
                panel.plot(
                    sizes, values, "x--", color=color, alpha=0.6, label=f"{label}: engine alone"
                )
            if not number:
                values = [r["memmove"] for r in rows]
                panel.plot(sizes, values, ":", color="black", label="memmove, one thread")
        panel.set_xscale("log", base=2)
        ticks = sorted({row["size"] for c in measured for row in c["bandwidth"]})
        panel.set_xticks(ticks, [in_words(size) for size in ticks], rotation=30)
        panel.minorticks_off()
        panel.set_title(f"{pattern} blocks")
        panel.set_xlabel("block size")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bandwidth (GB/s)")
    panels[0].set_ylim(0, panels[0].get_ylim()[1])  # shared, and now that all curves are there
    figure.suptitle("Bandwidth of one READ, most blocks that were measured")
    # Below the panels: no curve runs through it.
    curves: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        curves.update(zip(labels, handles, strict=True))
    figure.legend(
        list(curves.values()), list(curves), loc="outside lower center", ncols=3, fontsize="small"
    )


def _most_blocks(contender: dict[str, Any], pattern: str) -> list[dict[str, Any]]:
    """One row per block size, rising: that with the most blocks."""
    found: dict[int, dict[str, Any]] = {}
    for row in sorted(contender["bandwidth"], key=lambda r: int(r["count"])):
        if row["pattern"] == pattern:
            found[row["size"]] = row
    return [found[size] for size in sorted(found)]


def _latency(figure: Any, measured: list[dict[str, Any]]) -> None:
    panel = figure.subplots()
    for number, contender in enumerate(measured):
        rows = contender["concurrency"]
        under_way = [row["under_way"] for row in rows]
        for p, style in ((50, "o-"), (90, "s--"), (99, "^:")):
            values = [row[f"p{p}_ms"] for row in rows]
            label = f"{contender['label']}, p{p}"
            panel.plot(under_way, values, style, color=f"C{number}", label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({row["under_way"] for c in measured for row in c["concurrency"]})
    panel.set_xticks(ticks, [str(n) for n in ticks])
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("transfers under way at once")
    panel.set_ylabel("latency (ms)")
    panel.set_title("Latency of one READ of about 1 MiB")
    panel.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")


def _recovery(figure: Any, measured: list[dict[str, Any]]) -> None:
    panel = figure.subplots()
    for number, contender in enumerate(measured):
        told = contender["recovery"]
        color, step = f"C{number}", told["bucket"]
        times = [(i + 0.5) * step - told["killed_at"] for i in range(len(told["gb_per_s"]))]
        after = told["recovered_after"]
        label = f"{contender['label']}: " + (
            "no transfer within 20 s" if after is None else f"again after {after:.2f} s"
        )
        panel.plot(times, told["gb_per_s"], "-", color=color, label=label)
        if after is not None:
            panel.axvline(after, color=color, linestyle=":")
    panel.axvline(0, color="black", linestyle="--", label="the peer is killed")
    panel.set_ylim(bottom=0)
    panel.set_xlabel("time since the peer was killed (s)")
    panel.set_ylabel("bandwidth (GB/s)")
    panel.set_title("A peer is killed, another takes over")
    panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
