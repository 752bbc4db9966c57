"""Plots of an accuracy run: losses by task, scores by budget, the needle by depth and length, and attention mass by layer.

Needs matplotlib (the `eval` extra). Reads results only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from eval.quality import metrics
from eval.quality.accuracy import WAYS, Run, cells_of
from eval.quality.accuracy import title as title_in_tables
from eval.quality.suites import HEADLINE

MASS = Path(__file__).resolve().parent / "quality" / "results" / "mass.json"
# Okabe and Ito's colours, told apart by people with any colour vision, and a marker each; a method keeps its own in all plots.
# What has none, kvpress's control, reads everything and is not drawn beside them.
STYLES = {
    "oasis": ("#0072B2", "o"),
    "oasis-minmax": ("#56B4E9", "s"),
    "oasis-skip": ("#009E73", "^"),
    "oasis-skip-25": ("#F0E442", "<"),
    "quest": ("#D55E00", "D"),
    "streaming": ("#CC79A7", "v"),
    "kvpress-snapkv": ("#E69F00", "P"),
    "kvpress-expected": ("#8C6D00", "X"),
    "kvpress-knorm": ("#7F7F7F", "*"),
    "oracle": ("#000000", "x"),
}
MASS_STYLES = {
    "exact": ("exact top-k blocks", "#000000", "x"),
    "int2": ("OasisCache, int2", "#0072B2", "o"),
    "minmax": ("OasisCache, minmax", "#56B4E9", "s"),
    "recency": ("newest blocks (StreamingLLM)", "#CC79A7", "v"),
}

ROW_INCHES = 0.58  # of a task in the plot of tasks
TITLE_ROWS = 1.3  # what a panel's title and ticks take, in rows


def draw(run: Run, folder: Path) -> list[Path]:
    """All plots that the run has results for, into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        (tasks, folder / "accuracy_tasks.png"),
        (needles, folder / "accuracy_needle.png"),
        (budgets, folder / "accuracy_budget.png"),
    ]
    return [path for plot, path in drawn if plot(run, path)]


def title(method: str) -> str:
    """A method's title without the marks of code, which only the tables' language has."""
    return title_in_tables(method).replace("`", "")


def _save(figure: Any, path: Path) -> bool:
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def tasks(run: Run, path: Path) -> bool:
    """Points lost by task, a panel per length with the tasks that it has: a mark per method, its 95 % interval behind it."""
    fails = {(row["task"], row["length"]) for row in run.summary["dense_fails"]}
    cells = [
        cell
        for cell in cells_of(run).values()
        if cell["share"] == HEADLINE and (cell["task"], cell["length"]) not in fails
    ]
    if not cells:
        return False
    rows: dict[int, list[tuple[str, str]]] = {
        length: sorted({(cell["task"], cell["way"]) for cell in cells if cell["length"] == length})
        for length in sorted({cell["length"] for cell in cells})
    }
    columns = _two_columns({length: len(names) for length, names in rows.items()})
    heights = [sum(TITLE_ROWS + len(rows[length]) for length in column) for column in columns]
    figure = pyplot.figure(figsize=(6.2 * len(columns), 1.9 + ROW_INCHES * max(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[ROW_INCHES * max(heights), 1.3])
    lowest = min(-10.0, *(cell["loss_low"] for cell in cells))
    handles: dict[str, Any] = {}
    parts = upper.subfigures(1, len(columns), squeeze=False)[0]
    for part, column, height in zip(parts, columns, heights, strict=True):
        ratios = [TITLE_ROWS + len(rows[length]) for length in column]
        ratios += [max(heights) - height] * (height < max(heights))
        panels = part.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
        for axes, length in zip(panels, column, strict=False):
            here = [cell for cell in cells if cell["length"] == length]
            shown = [method for method in run.methods if method in STYLES and _has(here, method)]
            handles |= _losses(axes, here, rows[length], shown)
            axes.set_title(f"{length:,} tokens", fontsize=14)
            axes.set(xlim=(lowest - 5, 105), xticks=[tick for tick in range(-100, 101, 25) if tick >= lowest - 5])
        for axes in panels[len(column) :]:
            axes.set_visible(False)
        panels[len(column) - 1].set_xlabel("points lost against dense", fontsize=12)
    named = [method for method in run.methods if method in handles]
    lower.legend([handles[method] for method in named], list(map(title, named)), loc="center", ncols=3, fontsize=12)
    figure.suptitle(
        "Loss by task at a budget of 1/8 of the context; the question was read exactly or sparsely\n"
        "(tasks that the dense model fails are left out)",
        fontsize=14,
    )
    return _save(figure, path)


def _two_columns(rows: dict[int, int]) -> list[list[int]]:
    """Lengths in order, in one column or in two whose sums of rows are as even as can be."""
    lengths = list(rows)
    if len(lengths) == 1:
        return [lengths]

    def taller(cut: int) -> float:
        return max(sum(TITLE_ROWS + rows[length] for length in part) for part in (lengths[:cut], lengths[cut:]))

    cut = min(range(1, len(lengths)), key=taller)
    return [lengths[:cut], lengths[cut:]]


def _has(cells: list[dict[str, Any]], method: str) -> bool:
    return any(cell["method"] == method for cell in cells)


def _losses(axes: Any, cells: list[dict[str, Any]], names: list[tuple[str, str]], methods: list[str]) -> dict[str, Any]:
    """One panel of `tasks`; returns a mark of each method for the legend."""
    handles = {}
    for number, method in enumerate(methods):
        colour, marker = STYLES[method]
        shift = (number - (len(methods) - 1) / 2) * 0.8 / len(methods)
        for cell in cells:
            if cell["method"] != method:
                continue
            place = names.index((cell["task"], cell["way"])) + shift
            axes.plot([cell["loss_low"], cell["loss_high"]], [place, place], color=colour, alpha=0.5, linewidth=2)
            (handles[method],) = axes.plot(cell["loss"], place, marker, color=colour, markersize=7, linestyle="none")
    axes.axvline(0, color="0.4", linewidth=1)
    axes.grid(alpha=0.3, axis="x")
    for place in range(len(names) - 1):
        axes.axhline(place + 0.5, color="0.85", linewidth=0.8)
    labels = [f"{task}, {WAYS[way]}" for task, way in names]
    axes.set(yticks=range(len(names)), yticklabels=labels, ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(labelsize=12)
    return handles


def needles(run: Run, path: Path) -> bool:
    """The heat map: needles found by depth and length, a panel per method, both ways of asking together."""
    scores: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for prediction in run.common:
        if prediction.task == "needle" and prediction.share in (HEADLINE, None) and prediction.depth is not None:
            depth = round(5 * prediction.depth)
            scores[prediction.method][prediction.length, depth].append(metrics.score_of(prediction))
    most = max(map(len, scores.values()), default=0)
    methods = [
        method for method in ("dense", *run.methods) if len(scores[method]) > most / 2
    ]  # others are nearly empty
    if not methods:
        return False
    lengths = sorted({length for cells in scores.values() for length, _ in cells})
    depths = sorted({depth for cells in scores.values() for _, depth in cells})
    columns = min(4, len(methods))
    rows = -(-len(methods) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(2.9 * columns + 0.8, 2.5 * rows + 0.6), squeeze=False, sharex=True, sharey=True,
        layout="constrained",
    )  # fmt: skip
    image = None
    for axes, method in zip(panels.flat, methods, strict=False):
        cells = scores[method]
        grid = [
            [
                sum(cells[length, depth]) / len(cells[length, depth]) if (length, depth) in cells else float("nan")
                for length in lengths
            ]
            for depth in depths
        ]
        # cividis is made for people with any colour vision; the numbers say the same
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                if value == value:  # not a number: nothing was measured
                    found = f"{sum(cells[lengths[column], depths[row]]):.0f}/{len(cells[lengths[column], depths[row]])}"
                    axes.text(
                        column, row, found, ha="center", va="center", fontsize=8, color="k" if value > 0.5 else "w"
                    )
        axes.set_title(title(method), fontsize=10)
        axes.set(xticks=range(len(lengths)), xticklabels=[f"{length // 1024}k" for length in lengths])
        axes.set(yticks=range(len(depths)), yticklabels=[f"{20 * depth} %" for depth in depths])
    for axes in list(panels.flat)[len(methods) :]:
        axes.set_visible(False)
    figure.supxlabel("context, tokens", fontsize=10)
    figure.supylabel("depth of the needle", fontsize=10)
    figure.colorbar(image, ax=panels, label="share found", shrink=0.8)
    figure.suptitle("A seven-digit number found, budget 1/8 of the context", fontsize=11)
    return _save(figure, path)


def budgets(run: Run, path: Path) -> bool:
    """Needles found by budget, both ways of asking together: a panel per length that has at least two budgets."""
    points: dict[tuple[int, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    dense: dict[int, list[float]] = defaultdict(list)
    for prediction in run.common:
        if prediction.task == "needle" and prediction.budget is not None:
            points[prediction.length, prediction.method][prediction.budget].append(metrics.score_of(prediction))
        elif prediction.task == "needle":
            dense[prediction.length].append(metrics.score_of(prediction))
    points = {cell: found for cell, found in points.items() if len(found) > 1}
    lengths = sorted({length for length, _ in points})
    if not lengths:
        return False
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(1.5 + 4.5 * len(lengths), 5.2), sharey=True, squeeze=False, layout="constrained"
    )
    handles = {}
    for axes, length in zip(panels[0], lengths, strict=True):
        ticks = sorted({budget for cell, found in points.items() if cell[0] == length for budget in found})
        for number, method in enumerate(name for name in run.methods if name in STYLES):
            found = sorted(points.get((length, method), {}).items())
            if not found:
                continue
            colour, marker = STYLES[method]
            # lines that lie on each other show as bands: earlier ones are wider
            width = 1 + 0.55 * (len(run.methods) - 1 - number)
            (handles[title(method)],) = axes.plot(
                [budget for budget, _ in found],
                [100 * sum(scores) / len(scores) for _, scores in found],
                marker=marker,
                markersize=5 + width,
                linewidth=width,
                color=colour,
            )
        if dense[length]:
            level = 100 * sum(dense[length]) / len(dense[length])
            handles["DynamicCache"] = axes.axhline(level, color="0.4", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(xticks=ticks, xticklabels=[str(tick) for tick in ticks], ylim=(-6, 106))
        axes.minorticks_off()
        axes.set_title(f"{length:,} tokens", fontsize=12)
        axes.set_xlabel("budget, tokens per layer and KV head", fontsize=11)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("needles found, %", fontsize=11)
    figure.legend(
        handles.values(), handles, fontsize=10, loc="outside lower center", ncols=2 if len(lengths) == 1 else 4
    )
    samples = max(len(scores) for found in points.values() for scores in found.values())
    figure.suptitle(f"Accuracy against budget, up to {samples} needles a point", fontsize=13)
    return _save(figure, path)


def mass(results: dict[str, Any], path: Path) -> None:
    """Attention mass that a budget keeps, layer by layer."""
    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for index, (label, colour, marker) in MASS_STYLES.items():
        rows = [row for row in results["rows"] if row["index"] == index]
        kept = [row["mass"] for row in rows]
        axes.plot([row["layer"] for row in rows], kept, marker=marker, color=colour, markersize=4, label=label)
    axes.set(xlabel="layer", ylabel="share of attention mass kept", ylim=(None, 1.01))
    axes.set_title(
        f"Attention mass kept by {results['budget']} of {results['length']:,} tokens, mean over {results['steps']} steps and "
        "all heads",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def main(run: Run, images: Path) -> None:
    """Those of the committed run."""
    draw(run, images)
    mass(json.loads(MASS.read_text(encoding="utf-8")), images / "accuracy_mass.png")
