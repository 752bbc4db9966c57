"""Plots of committed results, for the docs: `python -m eval.plots`. Reads result files only.

Needs matplotlib (the `eval` extra).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "quality" / "results"
IMAGES = ROOT / "docs" / "img"
# Okabe and Ito's colours, told apart by people with any colour vision, and a marker each for print without colour.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#000000", "x"))
CAPS = {0.01: "1 %", 0.05: "5 %", 0.1: "10 %", None: "none"}


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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    prediction(json.loads((RESULTS / "prediction.json").read_text()), IMAGES / "prediction.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
