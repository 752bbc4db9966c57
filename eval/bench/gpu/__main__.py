"""All checks and measurements of the device path, in one command and a bounded time: `make gpu-check`.

    python -m eval.bench.gpu                       # on a machine with an NVIDIA GPU
    python -m eval.bench.gpu --device cpu --tiny   # the same code with tiny shapes, to see that it runs

Needs python 3.11, torch, triton, transformers, accelerate, psutil and pytest, and nothing else: no network, no installation.
Every part is a process of its own with a share of the time. What does not fit is skipped, what fails is named, and neither hides
the rest. Rows go to eval/bench/results/ledger.csv. The exit status is 1 if a test or a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eval.bench.gpu import ledger, part

# Seconds that a part may take, and without which it is not begun.
BUDGETS = {
    "tests": (170.0, 60.0),
    "sanitizer": (45.0, 25.0),
    "ceilings": (20.0, 12.0),
    "attention": (40.0, 15.0),
    "scoring": (35.0, 15.0),
    "movement": (30.0, 12.0),
    "decode": (130.0, 40.0),
    "capacity": (45.0, 20.0),
}
TOTAL_SECONDS = 465.0
# Bare pytest: no plugins, and no conftest.py above these folders, which would need hypothesis.
PYTEST = ["-m", "pytest", "-q", "-rfE", "-o", "addopts=", "-p", "no:cacheprovider", "--confcutdir=tests/kernels"]
TESTS = {  # each a process; the first ones run side by side, since most of their time is compilation
    "attention kernel": ["tests/kernels/test_sparse_attention.py"],
    "scoring kernels": ["tests/kernels/test_score_blocks.py"],
    "other kernels": [f"tests/kernels/test_{name}.py" for name in ("gather_blocks", "seal_blocks", "delta_select")],
    "large shapes": ["tests/gpu/test_kernels.py"],
    "generation": ["tests/gpu/test_generate.py", "tests/gpu/test_device_map.py"],
    "waits": ["tests/gpu/test_no_sync.py"],
}
ALONE = {"streams": ["tests/gpu/test_streams.py"]}  # timing decides what these see


@dataclass
class Report:
    """What came out.

    Attributes:
        failures: Parts, or groups of tests, that failed.
        skipped: Those that did not run, and why.
        statements: What parts said.
        tests: "passed", "failed" or "not run": the ledger's rows carry it.
    """

    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    tests: str = "not run"


def start(command: list[str], output: Any) -> subprocess.Popen:
    """A child in a process group of its own, whose output goes to a file."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=ledger.ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(child: subprocess.Popen, seconds: float) -> int | None:
    """The child's exit status, or None if it had to be ended because its time was up."""
    try:
        return child.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


def say(text: str) -> None:
    print(text, flush=True)


def run_tests(report: Report, seconds: float, logs: Path) -> None:
    """All GPU tests: groups side by side, then those that time matters to."""
    stop = time.monotonic() + seconds
    results: dict[str, int | None] = {}
    for groups in (TESTS, ALONE):
        running = {}
        for name, files in groups.items():
            log = (logs / f"tests-{name.replace(' ', '-')}.log").open("w+")
            running[name] = (start([sys.executable, *PYTEST, *files], log), log)
        for name, (child, log) in running.items():
            results[name] = finish(child, stop - time.monotonic())
            log.seek(0)
            lines = log.read().splitlines()
            say(f"  {name}: {lines[-1] if lines else 'no output'}")
            if results[name] != 0:
                say("\n".join(f"    {line}" for line in lines[-25:]))
                why = "did not end in its time" if results[name] is None else f"exit status {results[name]}"
                report.failures.append(f"tests of {name} ({why})")
            log.close()
    report.tests = "passed" if all(status == 0 for status in results.values()) else "failed"


def run_sanitizer(report: Report, seconds: float, logs: Path) -> None:
    """compute-sanitizer over each kernel, where it is installed and can watch the device."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        report.skipped.append("sanitizer: compute-sanitizer is not installed")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "eval.bench.gpu.sanitize"]
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that each tensor is an allocation that can be overrun
    try:
        with (logs / "sanitizer.log").open("w+") as log:
            status = finish(start(command, log), seconds)
            log.seek(0)
            text = log.read()
    finally:
        del os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    if status == 0:
        say("  compute-sanitizer memcheck found nothing")
    elif status is None:
        report.skipped.append("sanitizer: it did not end in its time")
    elif "Device not supported" in text or "not supported on this" in text:
        report.skipped.append("sanitizer: compute-sanitizer cannot watch this device")
    else:
        say("\n".join(f"    {line}" for line in text.splitlines()[-25:]))
        report.failures.append(f"sanitizer (exit status {status})")


def run_part(name: str, options: argparse.Namespace, seconds: float, rows: Path, logs: Path) -> str | None:
    """One part of the measurements; what went wrong, or None."""
    if options.in_process:
        try:
            part.run(name, options.device, options.tiny, seconds, rows)
        except Exception as error:  # noqa: BLE001 - a failing part is reported and does not hide the others
            return f"{type(error).__name__}: {error}"
        return None
    command = [sys.executable, "-m", "eval.bench.gpu.part", name, "--device", options.device, "--rows", str(rows)]
    command += ["--seconds", f"{seconds - 5:.0f}", *(["--tiny"] if options.tiny else [])]
    with (logs / f"{name}.log").open("w+") as log:
        status = finish(start(command, log), seconds)
        log.seek(0)
        lines = log.read().splitlines()
    if status == 0:
        return None
    say("\n".join(f"    {line}" for line in lines[-12:]))
    return "did not end in its time" if status is None else f"exit status {status}: {lines[-1] if lines else ''}"


def read_rows(path: Path, report: Report) -> None:
    """Rows and statements that parts left, also those of a part that failed later."""
    report.rows, report.statements = [], []
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        if "row" in entry:
            report.rows.append(entry["row"])
        elif "statement" in entry:
            report.statements.append(entry["statement"])


def run_all(options: argparse.Namespace, logs: Path) -> Report:
    """Everything asked for, one after the other, within the time."""
    report, rows = Report(), logs / "rows.jsonl"
    stop = time.monotonic() + options.seconds
    for name in options.parts:
        budget, needed = BUDGETS[name]
        left = stop - time.monotonic()
        if left < (1.0 if options.tiny else needed):
            report.skipped.append(f"{name}: {left:.0f} s were left, it needs {needed:.0f}")
            continue
        began = time.monotonic()
        say(f"{name} (at most {min(budget, left):.0f} s)")
        checks: dict[str, Callable[[Report, float, Path], None]] = {"tests": run_tests, "sanitizer": run_sanitizer}
        if name not in checks:
            failure = run_part(name, options, min(budget, left), rows, logs)
            if failure is not None:
                report.failures.append(f"{name}: {failure}")
        elif options.device == "cuda":
            checks[name](report, min(budget, left), logs)
        else:
            report.skipped.append(f"{name}: needs a CUDA device")
        say(f"  {time.monotonic() - began:.0f} s")
    read_rows(rows, report)
    return report


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that only show that the code runs; no ledger row")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(BUDGETS), help=", ".join(BUDGETS))
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="the time for everything")
    parser.add_argument("--ledger", type=Path, default=ledger.LEDGER, help="where rows are appended")
    parser.add_argument("--logs", type=Path, help="keep the parts' output here")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    parser.add_argument("--in-process", action="store_true", help="no process per part: faster, less safe")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(BUDGETS))
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(BUDGETS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; --device cpu --tiny shows that the code runs")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu measures nothing of interest: add --tiny")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    environment = ledger.environment(options.device, options.commit)
    say(", ".join(f"{name} {value}" for name, value in environment.items() if value))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        report = run_all(options, logs)
    rows = [environment | {"tests": report.tests} | row for row in report.rows]
    if not options.tiny:
        ledger.append(options.ledger, rows)
    say("\n" + ledger.table(report.rows))
    for title, lines in (
        ("Said", report.statements),
        ("Not run", report.skipped),
        ("FAILED", report.failures),
    ):
        if lines:
            say(f"\n{title}:\n" + "\n".join(f"  {line}" for line in lines))
    say(f"\nTests {report.tests}; {len(rows)} rows; {time.monotonic() - began:.0f} s.")
    return int(bool(report.failures))


if __name__ == "__main__":
    raise SystemExit(main())
