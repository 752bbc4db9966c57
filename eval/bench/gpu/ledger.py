"""The ledger: measured rows with what they were measured on, appended to a CSV file and never rewritten."""

from __future__ import annotations

import csv
import datetime
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
ENVIRONMENT = ("date", "commit", "dirty", "tests", "hardware", "driver", "python", "torch", "triton", "transformers")
COLUMNS = (*ENVIRONMENT, *(field.name for field in fields(Row)))


def environment(device: str, commit: str | None = None) -> dict[str, Any]:
    """What a row was measured on, `tests` aside; `commit` where the tree is a copy without its history."""
    head = commit or _output("git", "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "status", "--porcelain", "--", ".", ":!eval/bench/results")
    driver = ""
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    if device == "cuda":
        hardware = torch.cuda.get_device_name()
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
        driver = f"{driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}"
    try:
        import triton

        triton_version = triton.__version__
    except ModuleNotFoundError:
        triton_version = "none"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": head or "unknown",
        "dirty": "unknown" if commit is not None or not head else "yes" if changes else "no",
        "hardware": hardware,
        "driver": driver,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "transformers": transformers.__version__,
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows, numbers shortened to six digits; the file is begun with its header.

    Raises:
        ValueError: The file has other columns.
    """
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if tuple(header) != COLUMNS:
            raise ValueError(f"{path.name} has the columns {header}; expected {list(COLUMNS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: _short(row.get(name)) for name in COLUMNS})


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
