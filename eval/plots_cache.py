"""Plots of one cache: what its steps found and waited for, what it wanted over time, and where its bytes lie.

Each function takes what `eval.timeline` gives and returns a figure of pyplot, so that a notebook shows it and a script saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.timeline import Timeline

# Okabe and Ito's colours, told apart by people with any colour vision; hatches and markers tell the same in print without colour.
_FOUND = {
    "in_slots": ("in slots", "#0072B2", ""),
    "staged": ("staged: prefetched, or just left", "#56B4E9", "//"),
    "late": ("prefetched, but late", "#E69F00", "xx"),
    "fetched": ("absent: fetched now", "#D55E00", ".."),
}
_PARTS = {
    "dense buffer": ("dense buffer (within the budget)", "#999999", ""),
    "slots": ("slots", "#0072B2", ""),
    "window": ("window", "#009E73", "\\\\"),
    "staging": ("staging", "#56B4E9", "//"),
    "index": ("index", "#CC79A7", ".."),
}
_TIERS = {"host": ("host memory", "#E69F00", ""), "disk": ("disk", "#F0E442", "//")}
_SPANS = (("#0072B2", "o", "-"), ("#D55E00", "s", "-"), ("#009E73", "^", "-"), ("#CC79A7", "D", "--"))
_MARKS = 12  # markers on a line, about


def timeline(recorded: Timeline, title: str = "") -> Figure:
    """What steps found where, and which layer waited for what in which step.

    Above, by step: where the blocks were that it wanted, and MB that came from the host tier. Below, by layer and step: blocks
    that it had to wait for, and how long it waited; colours end at the most that a step after the first had, which fills the slots.
    """
    steps = range(1, len(recorded.context_tokens) + 1)
    figure, ((found, moved), (blocks, waits)) = pyplot.subplots(
        2, 2, figsize=(11, 7), sharex=True, layout="constrained", gridspec_kw={"height_ratios": (2, 3)}
    )
    bottom = [0.0] * len(steps)
    for name, (label, colour, hatch) in _FOUND.items():
        counts = recorded.by_step(name)
        if name == "in_slots" or any(counts):
            style = dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.0, label=label)
            found.bar(steps, counts, 0.85, bottom, **style)
            bottom = [total + count for total, count in zip(bottom, counts, strict=True)]
    found.set(ylabel="blocks, all layers", title="Where the wanted blocks were")
    found.set_ylim(0, 1.45 * max(bottom))  # room for the legend
    found.legend(fontsize=8, loc="upper center", ncols=2)
    moved.bar(steps, [count / 1e6 for count in recorded.by_step("bytes_fetched")], 0.85, color="#0072B2")
    moved.set(ylabel="MB", title="Traffic from the host tier, prefetches included")
    for axes in (found, moved):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    waited_for = [
        [late + fetched for late, fetched in zip(*rows, strict=True)]
        for rows in zip(recorded.late, recorded.fetched, strict=True)
    ]
    milliseconds = [[1000 * seconds for seconds in row] for row in recorded.stall_seconds]
    for axes, values, label, words in (
        (blocks, waited_for, "blocks, all KV heads", "Blocks waited for, by layer"),
        (waits, milliseconds, "ms", "Time waited, by layer"),
    ):
        extent = (0.5, len(steps) + 0.5, len(recorded.layers) - 0.5, -0.5)
        most = max(map(max, values[1:] or values)) or 1.0
        columns = list(zip(*values, strict=True))  # [layers][steps]
        image = axes.imshow(
            columns, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0, vmax=most, extent=extent
        )
        shown = range(0, len(recorded.layers), max(1, len(recorded.layers) // 6))
        axes.set_yticks(shown, [recorded.layers[row] for row in shown])
        axes.set(xlabel="sparse step", ylabel="layer", title=words)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes, label=label, extend="max" if max(values[0]) > most else "neither")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def working_set(sizes: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Distinct blocks that a KV head selected in its last steps, against the blocks there are.

    Args:
        sizes: What `eval.timeline.working_set` gives.
    """
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = [name for name in sizes if name != "blocks"]
    steps = range(1, len(sizes["blocks"]) + 1)
    every = max(1, len(steps) // _MARKS)
    for name, (colour, marker, line) in zip(names, _SPANS, strict=False):
        label = {"all": "all steps so far", "last 1": "this step"}.get(name, f"{name} steps")
        axes.plot(steps, sizes[name], line, color=colour, marker=marker, markersize=5, markevery=every, label=label)
    axes.plot(steps, sizes["blocks"], ":", color="black", label="all blocks before the window")
    axes.set(xlabel="sparse step", ylabel="distinct blocks per KV head", title=title or "Working set over time")
    axes.set_ylim(0, 1.08 * max(sizes["blocks"]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(title="selected in", fontsize=8)
    return figure


def bytes_by_tier(rows: Sequence[Mapping[str, int]], title: str = "", labels: Sequence[str] | None = None) -> Figure:
    """Bytes on the device by part (left) and of the complete KV by tier (right), a bar for each context; the dense KV as a line.

    Args:
        rows: What `eval.timeline.bytes_by_tier` gave at several lengths, or of several caches.
        labels: What the rows are, if it is not their lengths that tell them apart.
    """
    figure, (device, tiers) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    places = range(len(rows))
    for axes, parts, words in (
        (device, _PARTS, "On the device"),
        (tiers, _TIERS, "Where the complete KV rests"),
    ):
        bottom = [0.0] * len(rows)
        for name, (label, colour, hatch) in parts.items():
            sizes = [row[name] / 1e6 for row in rows]
            if any(sizes):
                style = dict(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.0, label=label)
                axes.bar(places, sizes, 0.7, bottom, **style)
                bottom = [total + size for total, size in zip(bottom, sizes, strict=True)]
        dense = [row["dense"] / 1e6 for row in rows]
        line = "x--" if labels is None else "x"
        axes.plot(places, dense, line, color="black", markersize=6, label="DynamicCache, on the device")
        highest = max(bottom) * 1.9 if axes is device else (1.08 if labels is None else 1.5) * max(*bottom, *dense)
        axes.set(xlabel="context, tokens" if labels is None else "", ylabel="MB", title=words, ylim=(0, highest))
        axes.set_xticks(places, labels or [f"{row['context_tokens']:,}" for row in rows])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, loc="upper left")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure
