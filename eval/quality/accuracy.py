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
    "kvpress-none": "kvpress, nothing dropped (control)",
}
WAYS = {"answer": "exactly", "question": "sparsely"}
# What the default configuration is meant to lose at the most, in points, at these lengths.
TARGET_LENGTHS, TARGET_AVERAGE, TARGET_TASK = (4096, 8192), 0.5, 2.0
# The oracle is a bound and no method, and comes last.
ORDER = (*(name for name in METHODS if name not in ("oasis-lookahead", "oracle")), *KVPRESS, "oracle")


def describe(environment: dict[str, Any], commit: str | None = None) -> str:
    """One line on what ran where."""
    threads = "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    return (
        f"{environment['model']}, {environment['dtype']}, {environment['device_name']}, {threads}, torch {environment['torch']}, "
        f"transformers {environment['transformers']}{f', commit {commit}' if commit else ''}; text: {environment['text']}"
    )


class Run:
    """A results folder, read.

    Attributes:
        summary: Of all predictions; see `metrics.summary`.
        compared: Methods that answered in all tasks that any did: those that averages compare.
        common: Predictions of compared methods, and of the dense cache, for the samples that all of them answered.
        shared: Summary of these.
    """

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
        fails = metrics.failed(self.predictions)
        tasks = {
            name: {
                (each.task, each.length, each.way)
                for each in self.predictions
                if (each.method, each.share) == (name, HEADLINE) and (each.task, each.length) not in fails
            }
            for name in self.methods
        }
        # A mean over other tasks than the rest's is no comparison.
        self.compared = [name for name in self.methods if tasks[name] == set().union(*tasks.values())]
        self.common = metrics.common(self.predictions, self.compared, HEADLINE)
        self.shared = metrics.summary(self.common, fails)

    def describe(self) -> str:
        """One line on what ran where."""
        return describe(self.config["environment"], self.config["commit"])


def title(method: str) -> str:
    return KVPRESS[method] if method in KVPRESS else METHODS[method].title


def _points(loss: float, low: float, high: float) -> str:
    return f"{loss:.1f} ({low:.1f} to {high:.1f})"


MORE_SAMPLES = "OasisCache, on more samples"


def _averages(summary: dict[str, Any], methods: list[str]) -> dict[tuple[int | None, str], dict[str, Any]]:
    """Rows of averages by length and method."""
    return {
        (row["length"], row["method"]): row
        for row in summary["averages"]
        if row["share"] == HEADLINE and row["method"] in methods
    }


def _average_rows(run: Run) -> list[tuple[str, dict[int | None, dict[str, Any]]]]:
    """What the tables of averages list: a title, and rows by length. All methods on the same samples, behind the default
    configuration itself on all that it answered."""
    shared, whole = _averages(run.shared, run.compared), _averages(run.summary, run.compared)

    def by_length(rows: dict[tuple[int | None, str], dict[str, Any]], name: str) -> dict[int | None, dict[str, Any]]:
        return {length: row for (length, method), row in rows.items() if method == name}

    listed = [(title(method), by_length(shared, method)) for method in run.compared]
    more = by_length(whole, "oasis")
    if more and any(row["samples"] != shared.get((length, "oasis"), row)["samples"] for length, row in more.items()):
        place = run.compared.index("oasis") + 1
        listed.insert(place, (MORE_SAMPLES, more))
    return listed


def average_table(run: Run) -> str:
    """Mean loss by method and length at the headline budget, with interval, samples and the worst task."""
    listed = _average_rows(run)
    lengths = sorted({length for _, rows in listed for length in rows if length is not None})
    lines = [
        "| method | "
        + " | ".join(f"{length:,} tokens" for length in lengths)
        + " | all lengths | worst task | samples |",
        "|---|" + "---|" * (len(lengths) + 3),
    ]
    for name, rows in listed:
        cells = [rows.get(length) for length in (*lengths, None)]
        shown = ["" if row is None else _points(row["loss"], row["loss_low"], row["loss_high"]) for row in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + f" | {rows[None]['worst']:.1f} | {rows[None]['samples']} |")
    return "\n".join(lines)


def readme_table(run: Run) -> str:
    """Mean loss by method at the lengths of the target, where the run has them, with interval and samples."""
    listed = _average_rows(run)
    lengths = [length for length in TARGET_LENGTHS if any(length in rows for _, rows in listed)]
    lines = [
        "| method | " + " | ".join(f"{length:,} tokens" for length in lengths) + " | samples |",
        "|---|" + "---|" * (len(lengths) + 1),
    ]
    for name, rows in listed:
        cells = [rows.get(length) for length in lengths]
        if any(cells):
            shown = ["" if row is None else _points(row["loss"], row["loss_low"], row["loss_high"]) for row in cells]
            samples = " + ".join(str(row["samples"]) for row in cells if row is not None)
            lines.append(f"| {name} | " + " | ".join(shown) + f" | {samples} |")
    return "\n".join(lines)


def target_text(run: Run) -> str:
    """Whether the default configuration meets the targets, length by length, and the tasks that lose more than they allow."""
    lines = []
    answers = {
        (length, way): pairs
        for (method, length, way), pairs in metrics.pairs(run.predictions, HEADLINE).items()
        if method == "oasis"
    }
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
            f"{', '.join(worse) or 'none'}. {_counted(_of_length(answers, row['length']))}"
        )
    return "\n".join(sorted(lines))


def _counted(pairs: metrics.Pairs) -> str:
    low, high = pairs.lost_interval
    sign = "" if pairs.p_value < 0.001 else "= "
    return (
        f"Answer by answer: of {pairs.dense_right} that the dense cache gets right {pairs.lost} are lost ({low:.1%} to "
        f"{high:.1%}), of {pairs.answers - pairs.dense_right} that it gets wrong {pairs.gained} come out right "
        f"(p {sign}{_p(pairs.p_value)})."
    )


def kept_table(run: Run) -> str:
    """Answers that the dense cache gets right: how many of them each method gets right, by length and way of asking."""
    listed = _pairs(run)
    columns = sorted({(length, way) for _, counts in listed for length, way in counts})
    lines = [
        "| method | " + " | ".join(f"{length:,}, {WAYS[way]}" for length, way in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for name, counts in listed:
        cells = [counts.get(column) for column in columns]
        if any(cells):
            lines.append(
                f"| {name} | "
                + " | ".join("" if cell is None else f"{cell.both}/{cell.dense_right}" for cell in cells)
                + " |"
            )
    return "\n".join(lines)


def _pairs(run: Run) -> list[tuple[str, dict[tuple[int, str], metrics.Pairs]]]:
    """Answers by length and way, method by method: compared ones on the same samples, the default configuration on all of its own
    too, others on theirs."""
    shared, whole = (metrics.pairs(predictions, HEADLINE) for predictions in (run.common, run.predictions))

    def of(counts: dict[tuple[str, int, str], metrics.Pairs], name: str) -> dict[tuple[int, str], metrics.Pairs]:
        return {(length, way): pairs for (method, length, way), pairs in counts.items() if method == name}

    listed = [(title(name), of(shared if name in run.compared else whole, name)) for name in run.methods]
    if "oasis" in run.compared and of(whole, "oasis") != of(shared, "oasis"):
        listed.insert(run.methods.index("oasis") + 1, (MORE_SAMPLES, of(whole, "oasis")))
    return listed


def _of_length(counts: dict[tuple[int, str], metrics.Pairs], length: int) -> metrics.Pairs:
    return sum((pairs for cell, pairs in counts.items() if cell[0] == length), metrics.Pairs())


def paired_table(run: Run) -> str:
    """Answers that only the dense cache, and that only the method gets right, at the lengths of the target."""
    lines = [
        "| method | tokens | answers | right with the dense cache | lost | share lost, 95 % interval | gained | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for length in TARGET_LENGTHS:
        for name, counts in _pairs(run):
            pairs = _of_length(counts, length)
            if pairs.answers:
                low, high = pairs.lost_interval
                lines.append(
                    f"| {name} | {length:,} | {pairs.answers} | {pairs.dense_right} | {pairs.lost} | "
                    f"{low:.0%} to {high:.0%} | {pairs.gained} | {_p(pairs.p_value)} |"
                )
    return "\n".join(lines)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def cells_of(run: Run) -> dict[tuple[str, int, str, str], dict[str, Any]]:
    """Cells by task, length, way and method at the headline budget, of the samples that all compared methods answered; for other
    methods, and for tasks that the dense cache fails, of all that there are."""
    return {
        (cell["task"], cell["length"], cell["way"], cell["method"]): cell
        for summary in (run.summary, run.shared)
        for cell in summary["cells"]
        if cell["share"] in (HEADLINE, None)
    }


def task_table(run: Run) -> str:
    """Scores task by task at the headline budget; a task that the dense cache fails has its score only."""
    cells = cells_of(run)
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
    rows = {(row["length"], row["method"]): row for row in run.shared["prose"] if row["share"] in (HEADLINE, None)}
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
