"""`python -m eval.quality report`: tables and plots of a run, from its predictions.

Without a folder: of the committed run, into docs/accuracy.md, README.md and docs/img/ (as `python -m eval.report` and
`python -m eval.plots` do). With one: into that folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from eval.quality import metrics
from eval.quality.methods import METHODS
from eval.quality.run import read_predictions
from eval.quality.runner import DENSE_RIGHT, Prediction
from eval.quality.suites import HEADLINE

COMMITTED = Path(__file__).resolve().parent / "results" / "full"
KVPRESS = {
    "kvpress-snapkv": "kvpress, SnapKV",
    "kvpress-expected": "kvpress, expected attention",
    "kvpress-knorm": "kvpress, key norms",
}
WAYS = {"answer": "exactly", "question": "sparsely"}
# What the default configuration is meant to lose at the most, in points, at these lengths.
TARGET_LENGTHS, TARGET_AVERAGE, TARGET_TASK = (4096, 8192), 0.5, 2.0
# The oracle is a bound and no method, and comes last.
ORDER = (*(name for name in METHODS if name not in ("oasis-lookahead", "oracle")), *KVPRESS, "oracle")


class Run:
    """A results folder, read."""

    def __init__(self, folder: Path) -> None:
        """Read a folder.

        Raises:
            ValueError: There are no results in it.
        """
        self.folder = folder
        files = sorted(folder.glob("*.jsonl"))
        self.predictions: list[Prediction] = [prediction for file in files for prediction in read_predictions(file)]
        if not self.predictions or not (folder / "config.json").exists():
            raise ValueError(f"{folder} holds no results: python -m eval.quality run --out {folder}")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.summary = metrics.summary(self.predictions)
        held = {prediction.method for prediction in self.predictions}
        self.methods = [name for name in ORDER if name in held and name != "dense"]

    def describe(self) -> str:
        """One line on what ran where."""
        environment = self.config["environment"]
        return (
            f"{environment['model']}, {environment['dtype']}, {environment['device_name']}, {environment['threads']} threads, "
            f"torch {environment['torch']}, transformers {environment['transformers']}, commit {self.config['commit']}; "
            f"text: {environment['text']}"
        )


def title(method: str) -> str:
    return KVPRESS[method] if method in KVPRESS else METHODS[method].title


def _points(loss: float, low: float, high: float) -> str:
    return f"{loss:.1f} ({low:.1f} to {high:.1f})"


def _averages(run: Run) -> dict[tuple[int | None, str], dict[str, Any]]:
    """Rows of averages by length and method. A mean over other tasks than the rest is no comparison: methods that ran only some of
    them are left out."""
    rows = {(row["length"], row["method"]): row for row in run.summary["averages"] if row["share"] == HEADLINE}
    most = max((row["tasks"] for row in rows.values()), default=0)
    whole = [method for method in run.methods if (None, method) in rows and rows[None, method]["tasks"] == most]
    return {cell: row for cell, row in rows.items() if cell[1] in whole}


def average_table(run: Run) -> str:
    """Mean loss by method and length at the headline budget, with interval, samples and the worst task."""
    rows = _averages(run)
    lengths = sorted({length for length, _ in rows if length is not None})
    lines = [
        "| method | "
        + " | ".join(f"{length:,} tokens" for length in lengths)
        + " | all lengths | worst task | samples |",
        "|---|" + "---|" * (len(lengths) + 3),
    ]
    for method in run.methods:
        cells = [rows.get((length, method)) for length in (*lengths, None)]
        if cells[-1] is None:
            continue
        shown = ["" if row is None else _points(row["loss"], row["loss_low"], row["loss_high"]) for row in cells]
        lines.append(
            f"| {title(method)} | " + " | ".join(shown) + f" | {cells[-1]['worst']:.1f} | {cells[-1]['samples']} |"
        )
    return "\n".join(lines)


def readme_table(run: Run) -> str:
    """Mean loss by method at the lengths of the target, where the run has them, with interval and samples."""
    rows = _averages(run)
    lengths = [length for length in TARGET_LENGTHS if any(cell[0] == length for cell in rows)]
    lines = [
        "| method | " + " | ".join(f"{length:,} tokens" for length in lengths) + " | samples |",
        "|---|" + "---|" * (len(lengths) + 1),
    ]
    for method in run.methods:
        cells = [rows.get((length, method)) for length in lengths]
        if any(cells):
            shown = ["" if row is None else _points(row["loss"], row["loss_low"], row["loss_high"]) for row in cells]
            samples = " + ".join(str(row["samples"]) for row in cells if row is not None)
            lines.append(f"| {title(method)} | " + " | ".join(shown) + f" | {samples} |")
    return "\n".join(lines)


def target_text(run: Run) -> str:
    """Whether the default configuration meets the targets, length by length, and the tasks that lose more than they allow."""
    lines = []
    for row in run.summary["averages"]:
        if (row["method"], row["share"]) != ("oasis", HEADLINE) or row["length"] not in TARGET_LENGTHS:
            continue
        worse = [
            f"{cell['task']} {cell['loss']:.1f} (question read {WAYS[cell['way']]}, {cell['samples']} samples)"
            for cell in run.summary["cells"]
            if (cell["length"], cell["method"], cell["share"]) == (row["length"], "oasis", HEADLINE)
            and cell["loss"] > TARGET_TASK
        ]
        met = "met" if row["loss"] <= TARGET_AVERAGE and not worse else "missed"
        lines.append(
            f"- {row['length']:,} tokens: {met}. {_points(row['loss'], row['loss_low'], row['loss_high'])} points on average over "
            f"{row['tasks']} tasks and ways of asking, {row['samples']} samples; above {TARGET_TASK:g} points: "
            f"{', '.join(worse) or 'none'}. {_counted(_of_length(run, 'oasis', row['length']))}"
        )
    return "\n".join(sorted(lines))


def _counted(pairs: metrics.Pairs) -> str:
    low, high = pairs.lost_interval
    return (
        f"Answer by answer: of {pairs.dense_right} that the dense cache gets right {pairs.lost} are lost ({low:.1%} to "
        f"{high:.1%}), of {pairs.answers - pairs.dense_right} that it gets wrong {pairs.gained} come out right "
        f"(p = {_p(pairs.p_value)})."
    )


def kept_table(run: Run) -> str:
    """Answers that the dense cache gets right: how many of them each method gets right, by length and way of asking."""
    counts = metrics.pairs(run.predictions, HEADLINE)
    columns = sorted({(length, way) for _, length, way in counts})
    lines = [
        "| method | " + " | ".join(f"{length:,}, {WAYS[way]}" for length, way in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for method in run.methods:
        cells = [counts.get((method, length, way)) for length, way in columns]
        if any(cells):
            lines.append(
                f"| {title(method)} | "
                + " | ".join("" if cell is None else f"{cell.both}/{cell.dense_right}" for cell in cells)
                + " |"
            )
    return "\n".join(lines)


def _of_length(run: Run, method: str, length: int) -> metrics.Pairs:
    counts = metrics.pairs(run.predictions, HEADLINE)
    return sum((pairs for cell, pairs in counts.items() if cell[:2] == (method, length)), metrics.Pairs())


def paired_table(run: Run) -> str:
    """Answers that only the dense cache, and that only the method gets right, at the lengths of the target."""
    lines = [
        "| method | tokens | answers | right with the dense cache | lost | share lost, 95 % interval | gained | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for length in TARGET_LENGTHS:
        for method in run.methods:
            pairs = _of_length(run, method, length)
            if pairs.answers:
                low, high = pairs.lost_interval
                lines.append(
                    f"| {title(method)} | {length:,} | {pairs.answers} | {pairs.dense_right} | {pairs.lost} | "
                    f"{low:.0%} to {high:.0%} | {pairs.gained} | {_p(pairs.p_value)} |"
                )
    return "\n".join(lines)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def task_table(run: Run) -> str:
    """Scores task by task at the headline budget; a task that the dense cache fails has its score only."""
    cells = {
        (cell["task"], cell["length"], cell["way"], cell["method"]): cell
        for cell in run.summary["cells"]
        if cell["share"] in (HEADLINE, None)
    }
    fails = {(row["task"], row["length"]) for row in run.summary["dense_fails"]}
    lines = [
        "| task | tokens | question read | samples | dense | "
        + " | ".join(title(method) for method in run.methods)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(run.methods),
    ]
    for (task, length, way, method), dense in sorted(cells.items()):
        if method != "dense":
            continue
        scores = [cells.get((task, length, way, name)) for name in run.methods]
        shown = ["" if cell is None else f"{100 * cell['score']:.0f}" for cell in scores]
        if (task, length) in fails:
            shown[0] = "dense fails"
        lines.append(
            f"| {task} | {length:,} | {WAYS[way]} | {dense['samples']} | {100 * dense['score']:.0f} | "
            + " | ".join(shown)
            + " |"
        )
    return "\n".join(lines)


def prose_table(run: Run) -> str:
    """Perplexity of a continuation fed token by token, and its ratio to the dense cache's."""
    rows = {(row["length"], row["method"]): row for row in run.summary["prose"] if row["share"] in (HEADLINE, None)}
    lengths = sorted({length for length, _ in rows})
    lines = [
        "| method | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for method in ("dense", *run.methods):
        cells = [rows.get((length, method)) for length in lengths]
        shown = ["" if row is None else f"{row['perplexity']:.2f} ({row['ratio'] - 1:+.1%})" for row in cells]
        if any(shown):
            lines.append(f"| {title(method)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def reading_table(run: Run) -> str:
    """What each method is, and what it read: the counters that show that sparse runs were sparse."""
    lines = [
        "| method | tokens read per step, layer and KV head, beside the newest | sparse steps | other steps | what it is |",
        "|---|---|---|---|---|",
    ]
    for method in ("dense", *run.methods):
        members = [
            prediction
            for prediction in run.predictions
            if prediction.method == method and prediction.share in (HEADLINE, None)
        ]
        by_length = []
        for length in sorted({member.length for member in members}):
            read = [member.counters["tokens_read"] for member in members if member.length == length]
            by_length.append(f"{sum(read) / len(read):.0f} of {length:,}")
        steps = [sum(member.counters.get(name, 0) for member in members) for name in ("sparse_steps", "other_steps")]
        what = METHODS[method].describes if method in METHODS else "keys and values dropped once, as the prompt is read"
        counted = ("", "all") if method == "dense" else steps
        lines.append(f"| {title(method)} | {', '.join(by_length)} | {counted[0]:} | {counted[1]} | {what} |")
    return "\n".join(lines)


def blocks(run: Run) -> dict[str, str]:
    """What stands between the markers of docs/accuracy.md, by their names."""
    return {
        "target": target_text(run),
        "average": average_table(run),
        "paired": paired_table(run),
        "kept": kept_table(run),
        "tasks": task_table(run),
        "prose": prose_table(run),
        "reading": reading_table(run),
        "environment": f"{run.describe()}; {run.config['seconds'] / 60:.0f} minutes.",
    }


def readme_block(run: Run) -> str:
    """README's table: the averages at the lengths of the target."""
    return (
        f"Points lost against the dense cache at a budget of 1/8 of the context, with 95 % intervals: the mean over tasks that "
        f"the dense model can do (at least {DENSE_RIGHT:.0%}).\n\n{readme_table(run)}\n\n{run.describe()}. Made by "
        "`python -m eval.quality run --suite full` and\n`python -m eval.quality report`; more in "
        "[docs/accuracy.md](docs/accuracy.md)."
    )


def page(run: Run) -> str:
    """All tables on a page of their own, for a run that is not the committed one."""
    parts = [f"# Accuracy: {run.config['environment']['model']}"]
    parts += [f"## {name.capitalize()}\n\n{block}" for name, block in blocks(run).items()]
    return "\n\n".join(parts) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", help="results of a run; default: the committed ones, into docs/"
    )


def main(options: argparse.Namespace) -> int:
    """The command; returns the exit status: 0, or 2 if there are no results."""
    from eval import plots_accuracy, report  # here, because plots need matplotlib

    if options.folder is None:
        report.main([])
        plots_accuracy.main(Run(COMMITTED), report.ROOT / "docs" / "img")
        return 0
    try:
        run = Run(options.folder)
    except ValueError as error:
        print(f"eval.quality report: {error}", file=sys.stderr)
        return 2
    (options.folder / "accuracy.md").write_text(page(run), encoding="utf-8")
    plots_accuracy.draw(run, options.folder)
    return 0
