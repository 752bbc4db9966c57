"""`python -m eval.quality run`: a suite through methods, with progress; goes on where an interrupted run stopped.

In each part of a suite the dense cache answers first. Tasks that it fails (a mean score below one half) are not given to the other
methods: what they would lose says nothing about them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from eval.quality import metrics
from eval.quality.files import write_json
from eval.quality.methods import DENSE, METHODS, methods_of
from eval.quality.methods.base import Method
from eval.quality.runner import DENSE_RIGHT, Prediction, Snapshot, extended, key_of, predict, read_context
from eval.quality.samples import Sample
from eval.quality.suites import SUITES, Part
from eval.quality.tasks import FAMILIES
from oasis_cache.demo import describe_environment, pick_device, pick_dtype
from oasis_cache.packaged import PACKAGED, load_model

DEFAULT_METHODS = "oasis,oasis-minmax,oasis-skip,oasis-skip-25,quest,streaming,oracle"


class Results:
    """A folder with config.json, predictions.jsonl, which grows a line at a time, and metrics.json."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """Open a folder, new or of an earlier run.

        Raises:
            ValueError: The folder holds results of another model or suite, or another run writes to it.
        """
        self.folder = folder
        self.file = folder / "predictions.jsonl"
        config_file = folder / "config.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._held = self.file.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another run writes to {folder}: wait for it, or choose another folder") from error
        if config_file.exists():
            held = json.loads(config_file.read_text(encoding="utf-8"))
            for name in ("suite", "model", "dtype"):
                if held[name] != config[name]:
                    raise ValueError(
                        f"{folder} holds results with {name}={held[name]!r}, this run has {config[name]!r}: choose another folder"
                    )
            commits = dict.fromkeys([*str(held["commit"]).split(", "), str(config["commit"])])
            config = {**config, "seconds": held["seconds"], "commit": ", ".join(commits)}
        self.config = {"seconds": 0.0, **config}
        self.predictions = read_predictions(self.file)
        self.done = {prediction.key for prediction in self.predictions}
        self.save_config()

    def save_config(self) -> None:
        write_json(self.folder / "config.json", self.config)

    def add(self, prediction: Prediction) -> None:
        self.predictions.append(prediction)
        self.done.add(prediction.key)
        self._held.write(json.dumps(asdict(prediction)) + "\n")
        self._held.flush()

    def has(self, sample: Sample, method: Method, share: float | None) -> bool:
        return key_of(sample.task, sample.length, sample.name, sample.way, method.name, share) in self.done


def commit() -> str | None:
    """The commit that the code is of, with a plus if files differ from it; None where git does not know."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def read_predictions(file: Path) -> list[Prediction]:
    """All predictions of a file; a last line that an interrupt cut short is dropped, in the file too."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        file.write_text("".join(lines), encoding="utf-8")
    return [Prediction(**json.loads(line)) for line in lines]


def run_part(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    part: Part,
    methods: Sequence[Method],
    results: Results,
    say: Callable[[str], None],
) -> None:
    """The samples of a part that have no results yet."""
    samples = FAMILIES[part.family](tokenizer, part.length, part.contexts)
    contexts = [list(group) for _, group in groupby(samples, key=lambda sample: sample.context)]
    others = [method for method in methods if method is not DENSE and method.name not in part.without]
    held: dict[str, Snapshot | None] = {}

    def context_of(sample: Sample) -> Snapshot | None:
        if sample.context not in held:
            say(f"{part.family} {part.length}: reading {sample.context}")
            held[sample.context] = read_context(model, sample.context_ids)
        return held[sample.context]

    def work(group: list[Sample], wanted: Sequence[tuple[Method, float | None]]) -> None:
        for sample in group:
            missing = [(method, share) for method, share in wanted if not results.has(sample, method, share)]
            snapshot = extended(model, context_of(sample), sample) if missing else None
            for method, share in missing:
                say(f"{part.family} {part.length}: {sample.task} {sample.name}, {method.name} {share or ''}")
                results.add(predict(model, tokenizer, sample, method, share, snapshot))

    for group in contexts:
        work(group, [(DENSE, None)])
    right = {
        task: metrics.dense_score(results.predictions, task, part.length) >= DENSE_RIGHT
        for task in {sample.task for sample in samples if sample.turns}
    }
    for group in contexts:
        worth = [sample for sample in group if right.get(sample.task, True)]
        work(worth, [(method, share) for share in part.shares for method in others])
        held.pop(group[0].context, None)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[Part],
    methods: Sequence[Method],
    results: Results,
    console: Console,
) -> None:
    """All parts that fit the model's positions; results are written as they come."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, part in enumerate(parts, 1):
        if positions is not None and part.length > positions:
            console.print(f"{part.family} {part.length} left out: the model has {positions} positions")
            continue
        started = time.perf_counter()
        with console.status("") as status:
            run_part(model, tokenizer, part, methods, results, status.update)
        seconds = time.perf_counter() - started
        results.config["seconds"] += seconds
        results.save_config()
        console.print(f"{number}/{len(parts)} {part.family}, {part.length} tokens: {seconds:.0f} s", highlight=False)
        write_json(results.folder / "metrics.json", metrics.summary(results.predictions))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=list(SUITES), default="small", help="default: %(default)s")
    parser.add_argument(
        "--methods",
        default=DEFAULT_METHODS,
        metavar="NAME,NAME",
        help=f"of {', '.join(METHODS)}; dense comes with all (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where results go, or go on")
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """The command; returns the exit status: 0, or 2 for a wrong option."""
    transformers_logging.disable_progress_bar()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        methods = methods_of(options.methods)
        model, tokenizer = load_model(options.model, pick_dtype(options.dtype), pick_device(options.device))
        parts = SUITES[options.suite]
        results = Results(
            options.out,
            {
                "suite": options.suite,
                "model": options.model,
                "dtype": options.dtype,
                "methods": [method.name for method in methods],
                "parts": [asdict(part) for part in parts],
                "commit": commit(),
                "environment": describe_environment(model, options.model),
            },
        )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"eval.quality run: {error}", file=sys.stderr)
        return 2
    try:
        run(model, tokenizer, parts, methods, results, console)
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on from here ({options.out})", file=sys.stderr)
        return 130
    return 0
