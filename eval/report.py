"""README's table of measured results, made from the committed results: `python -m eval.report` rewrites it in place.

Reads eval/quality/results/needle.json (`python -m eval.quality.needle --out ...`); no number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "quality" / "results"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
NAMES = {"dense": "DynamicCache", "recency": "sink + recent tokens only"}


def needle_table(needle: dict[str, Any]) -> str:
    """Numbers found of numbers hidden, per method and length, with the budget and how the question was read."""
    rows = needle["summary"]
    lengths = sorted({row["length"] for row in rows})
    ways = {"": "exactly", "answer": "exactly", "question": "sparsely"}
    cells: dict[tuple[str, int | None, str], dict[int, str]] = {}
    for row in rows:
        key = (row["method"], row["budget"], row["way"])
        cells.setdefault(key, {})[row["length"]] = f"{row['found']}/{row['samples']}"
    lines = [
        "| cache | tokens read per step | question read | "
        + " | ".join(f"{length:,} tokens" for length in lengths)
        + " |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for (method, budget, way), found in cells.items():
        name = NAMES.get(method, f"OasisCache, `{method}`")
        read = "all" if budget is None else f"at most {budget}"
        lines.append(
            f"| {name} | {read} | {ways[way]} | " + " | ".join(found.get(length, "") for length in lengths) + " |"
        )
    return "\n".join(lines)


def describe(environment: dict[str, Any]) -> str:
    """One line on what ran where."""
    return (
        f"{environment['model']}, {environment['dtype']}, {environment['device_name']}, {environment['threads']} threads, "
        f"torch {environment['torch']}, transformers {environment['transformers']}; text: {environment['text']}"
    )


def readme_block() -> str:
    """What stands between the markers."""
    needle = json.loads((RESULTS / "needle.json").read_text())
    first = needle["arguments"]["first_seed"]
    return (
        "A seven-digit number hidden in a long text at five depths: how often the answer is right. The seeds (from "
        f"{first} on) were chosen because the dense model answers all; the last two rows retrieve nothing, as a control.\n\n"
        f"{needle_table(needle)}\n\n{describe(needle['environment'])}. Made by `python -m eval.quality.needle` and\n"
        "`python -m eval.report`; the answers are in eval/quality/results/."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="only say whether README.md is up to date (exit code 1 if not)"
    )
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}\n{readme_block()}\n{END}{after}"
    if options.check:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
