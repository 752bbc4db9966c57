"""`oasis-cache bench` and `oasis-cache eval`: the repository's own measurements, eval.bench and eval.quality, by short names."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oasis_cache.demo import refuse_model
from oasis_cache.reports import STDOUT, check_report_file, write_report

ROOT = Path(__file__).resolve().parents[1]
QUICK_CASES = "step-1024-float32,step-4096-float32,step-8192-float32"
ALL_CASES = "all"


@dataclass(frozen=True)
class BenchOptions:
    """What `oasis-cache bench` can be told.

    Attributes:
        cases: Names or beginnings of names, with commas between them; "all": every case. Those that do not fit the memory are
            left out.
        rounds: How often each cache has its turn in a case; None: as the list of cases says.
        model: Folder or hub name, or "packaged".
        list_cases: Print all cases and do nothing else.
        json_file: Where the rows go as JSON: a path, "-" for the standard output in place of the words, or None.
    """

    cases: str
    rounds: int | None
    model: str
    list_cases: bool
    json_file: str | None


@dataclass(frozen=True)
class EvalOptions:
    """What `oasis-cache eval` can be told.

    Attributes:
        suite: Name of a suite of eval/quality/suites.py.
        methods: Names with commas between them; None: the usual ones.
        folder: Where results go, or go on.
        model, device, dtype: As in `DemoOptions`.
        json_file: Where the metrics go as JSON: a path, "-" for the standard output in place of the words, or None.
    """

    suite: str
    methods: str | None
    folder: Path
    model: str
    device: str
    dtype: str
    json_file: str | None


def tool(name: str) -> Any:
    """A module of the repository's folder eval/, which no wheel contains: a top-level package of that name would be rude.

    Raises:
        ModuleNotFoundError: This installation is no clone of the repository.
    """
    if not ROOT.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise ModuleNotFoundError(
            "the measurements are part of the repository, in its folder eval/, and not of an installed package: in a clone (or an "
            "unpacked source distribution) run pip install -e '.[demo-tools]', and this command again"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(name)


def run_bench(options: BenchOptions) -> int:
    """Measure decode steps, generation and prefill beside other caches.

    Returns:
        The exit status: 0; 1 if no case fits the memory; 2 if a case is not known.

    Raises:
        ValueError: A number is out of range, the report cannot be written, or the model cannot be loaded.
        ModuleNotFoundError: See `tool`.
    """
    bench = tool("eval.bench.__main__")
    arguments = ["run", "--model", options.model]
    if options.list_cases:
        return int(bench.main([*arguments, "--list"]))
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"rounds={options.rounds} must be at least 1")
    check_report_file(options.json_file)
    with (
        tempfile.TemporaryDirectory() as folder,
        _words(options.json_file),
        _working("Measuring; a case is shown when done"),
    ):
        ledger = Path(folder) / "ledger.csv"
        names = [case.name for case in bench.CASES]
        arguments += [
            "--ledger",
            str(ledger),
            "--cases",
            ",".join(names) if options.cases == ALL_CASES else options.cases,
        ]
        if options.rounds is not None:
            arguments += ["--rounds", str(options.rounds)]
        try:
            status: int = bench.main(arguments)
        except OSError as error:
            refuse_model(options.model, error)
        rows = [] if not ledger.exists() else list(csv.DictReader(ledger.read_text(encoding="utf-8").splitlines()))
    if status == 0:
        words = tool("eval.bench.gpu.ledger").ENVIRONMENT
        numbers = [{name: text if name in words else _number(text) for name, text in row.items()} for row in rows]
        write_report({"rows": numbers}, options.json_file)
    return status or int(not any(row["case"] in names for row in rows))  # the memory's bandwidth is a row too


def run_eval(options: EvalOptions) -> int:
    """Measure accuracy against the dense cache.

    Returns:
        The exit status: 0; 2 if a method is not known, the folder holds other results, or the model cannot be loaded; 130 if
        interrupted, after which the same command goes on.

    Raises:
        ValueError: The report cannot be written.
        ModuleNotFoundError: See `tool`.
    """
    quality = tool("eval.quality.__main__")
    check_report_file(options.json_file)
    arguments = ["run", "--suite", options.suite, "--out", str(options.folder)]
    arguments += ["--model", options.model, "--device", options.device, "--dtype", options.dtype]
    if options.methods is not None:
        arguments += ["--methods", options.methods]
    with _words(options.json_file):
        status: int = quality.main(arguments)
        if status:
            return status
        accuracy = tool("eval.quality.accuracy")
        print("\nPoints lost against the dense cache, with 95 % intervals:\n")
        print(accuracy.average_table(accuracy.Run(options.folder)))
        print(
            f"\nResults: {options.folder}. All tables and plots: python -m eval.quality report {options.folder}, in {ROOT}"
        )
    metrics = json.loads((options.folder / "metrics.json").read_text(encoding="utf-8"))
    write_report({"folder": str(options.folder), **metrics}, options.json_file)
    return 0


def _words(json_file: str | None) -> contextlib.AbstractContextManager[Any]:
    """Words go to the standard error where the standard output is for JSON."""
    return contextlib.redirect_stdout(sys.stderr) if json_file == STDOUT else contextlib.nullcontext()


@contextlib.contextmanager
def _working(words: str) -> Any:
    """A sign of life on the standard error, with the time."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    together = sys.stdout.isatty()  # else what is printed must not be drawn above the spinner, but go its own way
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=together) as progress:
        progress.add_task(words, total=None)
        yield


def _number(text: str) -> str | int | float | None:
    """A cell of a CSV file as what it is."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or None
