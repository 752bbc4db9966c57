"""The ledger: measured rows with what they were measured on, appended to a CSV file; none is ever changed."""

from __future__ import annotations

import csv
import datetime
import importlib
import platform
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers

from eval.bench.gpu.measure import Row

ROOT = Path(__file__).resolve().parents[3]
LEDGER = ROOT / "eval" / "bench" / "results" / "ledger.csv"
ENVIRONMENT = (
    "date", "commit", "dirty", "tests", "hardware", "driver", "python", "torch", "triton", "transformers", "numba",
)  # fmt: skip
COLUMNS = (*ENVIRONMENT, *(field.name for field in fields(Row)))


def environment(device: str, commit: str | None = None) -> dict[str, Any]:
    """What a row was measured on, `tests` aside; `commit` where the tree is a copy without its history."""
    head = commit or _output("git", "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "status", "--porcelain", "--", ".", ":!eval/bench/results")
    driver = ""
    hardware = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
        driver = f"{driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": head or "unknown",
        "dirty": "unknown" if commit is not None or not head else "yes" if changes else "no",
        "hardware": hardware,
        "driver": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": transformers.__version__,
        "numba": _version("numba"),
    }


def _version(package: str) -> str:
    try:
        return importlib.import_module(package).__version__
    except ModuleNotFoundError:
        return "none"


def _cpu_name() -> str:
    """The processor's name where Linux tells it, and its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"{platform.machine()} CPU" + (f" ({names[0]})" if names else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows, numbers shortened to six digits; the file is begun with its header.

    Where columns came since the file was begun, it is written anew with empty cells in the older rows.

    Raises:
        ValueError: The file has columns that no row has.
    """
    held: list[dict[str, str]] = []
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or [])
            if set(header) - set(COLUMNS):
                raise ValueError(f"{path.name} has the columns {header}; expected {list(COLUMNS)}")
            is_new = tuple(header) != COLUMNS
            held = list(reader) if is_new else []
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".new") if held else path
    with begun.open("w" if is_new else "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
            writer.writerows(held)
        for row in rows:
            writer.writerow({name: _short(row.get(name)) for name in COLUMNS})
    if begun != path:
        begun.replace(path)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text, for the terminal."""
    lines = [("part", "case", "provider", "ms (p20-p80)", "GB/s", "% copy", "% link", "x", "note")]
    for row in rows:
        lines.append(
            (
                row["part"],
                row["case"],
                row["provider"],
                f"{row['p50_ms']:.4g} ({row['p20_ms']:.4g}-{row['p80_ms']:.4g})" if row["p50_ms"] is not None else "",
                *(f"{row[name]:.3g}" if row[name] is not None else "" for name in ("gb_per_s", "copy_percent")),
                *(f"{row[name]:.3g}" if row[name] is not None else "" for name in ("link_percent", "ratio")),
                row["note"],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(8)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[8]]).rstrip()
        for line in lines
    )
