"""Figures of the docs: `python -m eval.plots`. Plots of committed results, read from their files, and one drawing.

Those of one cache, for notebooks too, are in `eval.plots_cache`.

Needs matplotlib (the `eval` extra).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure

from eval import plots_cache, plots_speed
from eval.bench import reporting
from eval.bench.gpu.ledger import LEDGER
from eval.timeline import RESULTS as RECORDED
from eval.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "quality" / "results"
IMAGES = ROOT / "docs" / "img"
# Okabe and Ito's colours, told apart by people with any colour vision, and a marker each for print without colour.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#000000", "x"))
CAPS = {0.01: "1 %", 0.05: "5 %", 0.1: "10 %", None: "none"}


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def prediction(results: dict[str, Any], path: Path) -> None:
    """Left: mass that the chosen blocks keep, by index. Right: selected blocks that were on the device, by cap on prefetches."""
    length = max(row["length"] for row in results["ranking"])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    ranking = [row for row in results["ranking"] if row["length"] == length]
    indexes = [
        name for name in dict.fromkeys(row["index"] for row in ranking) if "(" not in name
    ]  # those that the library has
    for (colour, marker), index in zip(STYLES, indexes, strict=False):
        for predictor, line in (("own query", "-"), ("previous", ":")):
            rows = [row for row in ranking if row["index"] == index and row["predictor"] == predictor]
            label = f"{index}, {'query of the step' if predictor == 'own query' else 'query before'}"
            left.plot(
                [row["chosen_blocks"] for row in rows],
                [row["mass"] for row in rows],
                line,
                color=colour,
                marker=marker,
                label=label,
            )
    left.margins(y=0.35)  # room for the legend
    left.set(
        xlabel="retrieved blocks per KV head",
        ylabel="share of attention mass kept",
        title=f"What an index keeps, {length:,} tokens",
        xticks=sorted({row["chosen_blocks"] for row in ranking}),
    )
    budget = min(row["budget"] for row in results["residency"])  # the one that all lengths and caps were tried with
    residency = [row for row in results["residency"] if row["length"] == length and row["budget"] == budget]
    most = max(row["spare"] for row in residency)
    drafters = list(dict.fromkeys(row["drafter"] for row in residency))
    places = range(len(CAPS))
    for (colour, marker), drafter in zip(STYLES, drafters, strict=False):
        shares = [
            next(
                row["hit_rate"]
                for row in residency
                if row["drafter"] == drafter and row["max_fetch"] == cap and row["spare"] == most
            )
            for cap in CAPS
        ]
        right.plot(places, shares, color=colour, marker=marker, label=drafter)
    right.axhline(0.98, color="0.5", linewidth=1, linestyle="--")
    right.annotate("0.98", (1.5, 0.98), xytext=(0, 3), textcoords="offset points", ha="center", color="0.35")
    right.set(
        xlabel="most blocks prefetched per step and KV head, share of the budget",
        ylabel="selected blocks on the device when asked for",
        title=f"Residency by drafts, budget {residency[0]['budget']}, {length:,} tokens",
        xticks=list(places),
        xticklabels=list(CAPS.values()),
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    save(figure, path)


def data_path(path: Path) -> None:
    """The one picture of what rests where, and what a decode step moves and reads. A drawing: its blocks are no measurement."""
    count, recent, tail = 38, 3, 2
    chosen = (0, 4, 5, 12, 18, 19, 27, 31)  # the sink and the best blocks
    fetched = 27  # the one of them that is not on the device yet
    ranked, read, moved, plain = STYLES[0][0], STYLES[2][0], STYLES[1][0], "#E4E4E4"
    figure, axes = pyplot.subplots(figsize=(10.6, 5.5), layout="constrained")
    axes.set(xlim=(-0.5, count + 3.8), ylim=(0.2, 14.2))
    axes.axis("off")

    def cell(x: float, y: float, colour: str, height: float = 1.0, **style: Any) -> None:
        axes.add_patch(
            pyplot.Rectangle((x, y), 0.86, height, facecolor=colour, edgecolor="0.35", linewidth=0.8, **style)
        )

    def room(y: float, height: float, title: str, colour: str) -> None:
        axes.add_patch(pyplot.Rectangle((-0.4, y), count + 4.1, height, facecolor=colour, edgecolor="0.6", zorder=-2))
        axes.text(-0.1, y + height - 0.25, title, fontsize=12, fontweight="bold", va="top")

    def arrow(start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0) -> None:
        style = dict(arrowstyle="-|>", mutation_scale=16, color=colour, linewidth=2, connectionstyle=f"arc3,rad={bend}")
        axes.annotate("", end, start, arrowprops=style)

    room(
        10.2,
        3.8,
        "Host memory: the complete KV, every block of every layer (and a file for what exceeds it)",
        "#F7F7F7",
    )
    room(0.4, 8.2, "Device: a working set of fixed size, and the index", "#EFF5FA")
    for block in range(count):
        colour = moved if block == fetched else read if block in chosen or block >= count - recent else plain
        cell(block, 11.2, colour)
        cell(block, 5.9, ranked, 0.45)
    axes.text(0, 10.45, "first tokens", fontsize=9, color="0.35")
    axes.text(count, 10.45, "newest sealed tokens", fontsize=9, color="0.35", ha="right")
    axes.text(0, 6.65, "index: the keys in 2 bits a number, one entry for each block", fontsize=10, color=ranked)

    slots = [12 + place for place in range(len(chosen))]
    for place, block in zip(slots, chosen, strict=True):
        cell(place, 2.6, moved if block == fetched else read)
    window = [slots[-1] + 2 + place for place in range(recent + tail)]
    for place in window[:recent]:
        cell(place, 2.6, read)
    for place in window[recent:]:
        cell(place, 2.6, "white", hatch="////")
    axes.text(slots[0] - 0.2, 2.2, "slots: sink + best blocks", fontsize=10, va="top")
    axes.text(window[0] - 0.2, 2.2, "window: recent blocks + tail", fontsize=10, va="top")
    axes.text(0, 3.1, "queries of the step\n(token + drafts)", fontsize=10, va="center")

    arrow((6.6, 3.4), (9.6, 5.75), ranked, 0.25)
    axes.text(0, 4.75, "1  rank all blocks", fontsize=11, color=ranked, fontweight="bold")
    fetched_slot = slots[chosen.index(fetched)]
    arrow((fetched + 0.43, 11.1), (fetched_slot + 0.5, 3.75), moved, 0.12)
    axes.text(
        fetched - 3.2,
        9.4,
        "2  fetch what is chosen and absent (early, if foreseen)",
        fontsize=11,
        color=moved,
        fontweight="bold",
        ha="right",
        va="center",
    )
    left, right = slots[0] - 0.2, window[-1] + 1.1
    axes.plot([left, left, right, right], [1.45, 1.2, 1.2, 1.45], color=read, linewidth=2)
    axes.text(
        (left + right) / 2,
        0.95,
        "3  attention reads only these",
        fontsize=11,
        color=read,
        fontweight="bold",
        ha="center",
        va="top",
    )
    arrow((window[-1] + 1.2, 3.1), (count + 0.4, 11.1), "0.25", 0.25)
    axes.text(
        count - 1.2,
        9.4,
        "4  write a full block once",
        fontsize=11,
        color="0.25",
        fontweight="bold",
        ha="right",
        va="center",
    )
    save(figure, path)


def recorded(results: dict[str, Any], folder: Path) -> None:
    """What the packaged model's cache found, waited for, wanted and held."""
    steps, sizes = results["steps"], results["bytes"]
    timeline = Timeline(**steps["timeline"])
    prompt = f"{timeline.context_tokens[0] - 1:,} tokens, budget {steps['budget']}"
    prompt += f", {steps['host_share']:.1%} of the KV in host memory, the rest on disk"
    save(plots_cache.timeline(timeline, f"A number asked for behind {prompt}"), folder / "timeline.png")
    title = f"Working set over time, {timeline.context_tokens[0] - 1:,} tokens, budget {steps['budget']}"
    save(plots_cache.working_set(steps["working_set"], title), folder / "working_set.png")
    cap = f"max_host_bytes {sizes['max_host_bytes'] / 1e6:.0f} MB"
    title = f"SmolLM2-135M's shape in {sizes['dtype']}, budget {sizes['budget']:,}, {cap}, spilling to disk"
    save(plots_cache.bytes_by_tier(sizes["rows"], title), folder / "bytes_by_tier.png")


def main() -> int:
    data_path(IMAGES / "data_path.png")
    plots_speed.draw(reporting.read(LEDGER), IMAGES)
    prediction(json.loads((RESULTS / "prediction.json").read_text()), IMAGES / "prediction.png")
    recorded(json.loads(RECORDED.read_text()), IMAGES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
