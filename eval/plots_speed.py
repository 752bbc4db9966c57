"""Plots of the ledger: step time and device bytes against the context, tokens per second against the batch.

Needs matplotlib (the `eval` extra). Reads rows only. `python -m eval.plots` draws them with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from eval.bench import reporting
from eval.bench.providers import DYNAMIC, FP8, OASIS, QUANTO, QUEST, STATIC, TWO_LEVELS

# Okabe and Ito's colours, told apart by people with any colour vision, and a marker each; a cache keeps its own in all plots.
STYLES = {
    OASIS: ("#0072B2", "o"),
    TWO_LEVELS: ("#56B4E9", "P"),
    DYNAMIC: ("#D55E00", "s"),
    STATIC: ("#009E73", "^"),
    QUEST: ("#CC79A7", "D"),
    FP8: ("#E69F00", "v"),
    QUANTO: ("#000000", "x"),
}
Point = tuple[float, float, float, float]  # where, and 20th, 50th and 80th percentile
Row = reporting.Row


def points(
    rows: list[Row], kind: str, dtype: str, value: Callable[[Row], tuple[float, float, float] | None]
) -> dict[str, list[Point]]:
    """For each cache, in the order of `STYLES`, what the newest rows of a kind and type give, by the number in the case's name."""
    lines: dict[str, list[Point]] = {provider: [] for provider in STYLES}
    for case, group in reporting.newest(rows, kind).items():
        if not case.endswith(dtype):
            continue
        for row in group:
            measured = value(row)
            if measured is not None and row["provider"] in lines:
                lines[row["provider"]].append((int(case.split("-")[1]), *measured))
    return {provider: sorted(line) for provider, line in lines.items() if line}


def milliseconds(row: Row) -> tuple[float, float, float]:
    low, middle, high = (float(row[name]) for name in ("p20_ms", "p50_ms", "p80_ms"))
    return low, middle, high


def tokens_per_second(row: Row) -> tuple[float, float, float]:
    low, middle, high = (1e3 * int(row["case"].split("-")[1]) / each for each in reversed(milliseconds(row)))
    return low, middle, high


def device_megabytes(row: Row) -> tuple[float, float, float] | None:
    return (int(row["device_bytes"]) / 1e6,) * 3 if row["device_bytes"] else None


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """All plots that the rows have something for, into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = (
        ("step_time", "step", milliseconds, "context, tokens", "ms per step", True),
        ("device_bytes", "step", device_megabytes, "context, tokens", "MB where the model computes", True),
        ("batch", "batch", tokens_per_second, "sequences", "tokens per second", False),
    )
    drawn = []
    for name, kind, value, below, beside, of_context in plots:
        panels = {dtype: points(rows, kind, dtype, value) for dtype in ("float32", "bfloat16")}
        panels = {dtype: lines for dtype, lines in panels.items() if lines}
        if panels:
            drawn.append(folder / f"{name}.png")
            _panels(panels, drawn[-1], below, beside, of_context)
    return drawn


def _panels(panels: dict[str, dict[str, list[Point]]], path: Path, below: str, beside: str, of_context: bool) -> None:
    figure, axes_of = pyplot.subplots(
        1, len(panels), figsize=(5.6 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for axes, (dtype, lines) in zip(axes_of[0], panels.items(), strict=True):
        ticks = sorted({int(point[0]) for line in lines.values() for point in line})
        for provider, line in lines.items():
            colour, marker = STYLES[provider]
            where, low, middle, high = zip(*line, strict=True)
            axes.plot(where, middle, color=colour, marker=marker, label=provider)
            axes.fill_between(where, low, high, color=colour, alpha=0.15)
        axes.set(xscale="log", xlabel=below, ylabel=beside, title=dtype)
        axes.set_xticks(ticks, [f"{tick // 1024}k" if of_context else str(tick) for tick in ticks])
        axes.minorticks_off()
        if of_context:
            _decades(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _decades(axes: Any) -> None:
    """A logarithmic scale upwards, with plain numbers at 1, 2 and 5 of each power of ten in sight."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10**power for power in range(-1, 7) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:,g}" for tick in shown])
    axes.minorticks_off()
    axes.set_ylim(low, high)
