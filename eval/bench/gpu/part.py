"""One part of the measurements, in a process of its own, so that its failure takes nothing else along."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from eval.bench.gpu import attention, capacity, ceilings, decode, movement, scoring
from eval.bench.gpu.measure import Bench

PARTS = {
    "ceilings": ceilings.run,
    "attention": attention.run,
    "scoring": scoring.run,
    "movement": movement.run,
    "decode": decode.run,
    "capacity": capacity.run,
}


def run(name: str, device: str, tiny: bool, seconds: float, rows: Path) -> None:
    """Run a part: its rows and statements are appended to `rows`, a line of JSON each; earlier ceilings are read there."""
    known: dict[str, float] = {}
    for line in rows.read_text().splitlines() if rows.exists() else []:
        known |= json.loads(line).get("ceilings", {})
    bench = Bench(torch.device(device), tiny, seconds, rows, known)
    result: Any = PARTS[name](bench)
    if result:
        with rows.open("a") as file:
            file.write(json.dumps({"ceilings": result}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    run(options.name, options.device, options.tiny, options.seconds, options.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
