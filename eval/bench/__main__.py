"""Decode speed on this machine: cases, interleaved repeats, rows of the ledger, and the table made of them.

    python -m eval.bench run                       # all cases that fit the memory
    python -m eval.bench run --cases step-32768-float32 --rounds 9
    python -m eval.bench report                    # docs/performance.md's table from the ledger

A case is one decode step of the packaged SmolLM2-135M-Instruct behind a context of so many tokens, with several caches: one step of
each in turn, `--rounds` times. Caches are filled with the keys and values of a real text of 4,096 tokens, again and again with a
little noise, so that neighbouring steps want alike blocks as they do in use; the tokens fed are the text that follows.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.bench.gpu.ledger import LEDGER, append, environment
from eval.bench.gpu.measure import Row, percentiles
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.haystack import text
from oasis_cache.packaged import load_model

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
PART = "cpu step"
SEED_TOKENS = 4096
SPARE_TOKENS = 64
NOISE = 0.02  # of the keys' and values' own deviation
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One step behind `context` tokens."""

    context: int
    dtype: str
    budget: int = 2048

    @property
    def name(self) -> str:
        return f"step-{self.context}-{self.dtype}"


CASES = [
    *(Case(context, "float32") for context in (1024, 4096, 8192, 32768, 65536, 131072)),
    *(Case(context, "bfloat16") for context in (8192, 32768)),
]


class Source:
    """Keys and values of a real text, layer by layer, and the tokens that follow it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        wanted = SEED_TOKENS + SPARE_TOKENS
        ids = tokenizer(text(wanted + 200, tokenizer), return_tensors="pt", add_special_tokens=False).input_ids
        self.following = ids[:, SEED_TOKENS:wanted]
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids[:, :SEED_TOKENS], **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        self.layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def fill(self, cache: Cache, context: int) -> Cache:
        """Give a cache `context` tokens, a piece of the text at a time; every cache gets the same."""
        for number, (keys, values) in enumerate(self.layers):
            generator = torch.Generator().manual_seed(number)
            whole = isinstance(cache, DynamicCache)  # it copies all that it holds with every piece
            pieces = []
            for start in range(0, context, SEED_TOKENS):
                count = min(SEED_TOKENS, context - start)
                piece = []
                for part in (keys, values):
                    noise = torch.randn(part.shape, generator=generator).to(part.dtype) * (NOISE * part.std())
                    piece.append((part + noise)[:, :, :count] if start else part[:, :, :count])
                pieces.append(piece)
                if not whole:
                    cache.update(*piece, number)
            if whole:
                cache.update(*(torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True)), number)
        return cache


def caches(model: PreTrainedModel, case: Case) -> dict[str, Callable[[], Cache]]:
    """How to make the caches that are compared."""
    config = model.config
    makers: dict[str, Callable[[], Cache]] = {
        "OasisCache": lambda: OasisCache(model_config=config, budget=case.budget),
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=case.context + SPARE_TOKENS),
    }
    return makers


def bytes_needed(source: Source, case: Case) -> int:
    """Host memory that all caches of a case take together, at most."""
    keys, values = source.layers[0]
    per_token = len(source.layers) * keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
    return 4 * per_token * case.context  # DynamicCache holds two copies while it grows


def measure(model: PreTrainedModel, source: Source, case: Case, rounds: int) -> list[Row]:
    """Rows of one case, a row for each cache."""
    made = {name: source.fill(make(), case.context) for name, make in caches(model, case).items()}
    samples: dict[str, list[float]] = {name: [] for name in made}
    with torch.inference_mode():
        for step in range(rounds + 2):
            for name, cache in made.items():
                position = torch.tensor([[min(case.context, SEED_TOKENS) + step]])  # rotations that the model knows
                ids = source.following[:, step : step + 1]
                begin = time.perf_counter()
                model(ids, **cache_argument(model, cache), position_ids=position, use_cache=True, logits_to_keep=1)
                if step >= 2:  # the first fills the slots, the second settles
                    samples[name].append(1e3 * (time.perf_counter() - begin))
    oasis = made["OasisCache"]
    assert isinstance(oasis, OasisCache)
    stats = oasis.stats()
    dense_bytes = bytes_needed(source, case) // 4
    on_device = stats.device_bytes + stats.index_bytes
    note = (
        f"hit rate {stats.hit_rate:.2f}, device bytes with the index 1/{dense_bytes / on_device:.1f} of the dense KV"
        if stats.sparse_steps
        else "dense: the context is within the budget"
    )
    medians = {name: statistics.median(values) for name, values in samples.items()}
    rows = []
    for name, values in samples.items():
        p20, p50, p80 = percentiles(values)
        # Pair by pair, so that a drift of the machine cancels.
        ratio = statistics.median(theirs / own for theirs, own in zip(samples["DynamicCache"], values, strict=True))
        rows.append(
            Row(
                PART,
                case.name,
                f"context {case.context}, budget {case.budget}",
                name,
                p20,
                p50,
                p80,
                len(values),
                ratio=ratio,
                baseline="DynamicCache",
                note=note if name == "OasisCache" else "",
            )
        )
    assert all(map(math.isfinite, medians.values()))
    oasis.close()
    return rows


def run(options: argparse.Namespace, console: Console) -> int:
    wanted = {name.strip() for name in options.cases.split(",")} if options.cases else None
    unknown = (wanted or set()) - {case.name for case in CASES}
    if unknown:
        console.print(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}")
        return 2
    known = environment("cpu") | {"tests": "make test"}
    for dtype in DTYPES:
        chosen = [case for case in CASES if case.dtype == dtype and (wanted is None or case.name in wanted)]
        if not chosen:
            continue
        model, tokenizer = load_model(options.model, DTYPES[dtype])[:2]
        source = Source(model, tokenizer)
        for case in chosen:
            needed, available = bytes_needed(source, case), psutil.virtual_memory().available
            if needed > available:
                console.print(f"{case.name} skipped: needs {needed:,} bytes of memory, {available:,} are available")
                continue
            rows = measure(model, source, case, options.rounds)
            append(options.ledger, [known | asdict(row) for row in rows])
            for row in rows:
                console.print(f"{row.case:<24} {row.provider:<14} {row.p50_ms:8.1f} ms  {row.ratio:5.2f}x  {row.note}")
            gc.collect()
    return 0


def latest(ledger: Path) -> list[dict[str, str]]:
    """The newest rows of each case."""
    with ledger.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["part"] == PART]
    newest: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        group = newest.setdefault(row["case"], [])
        if row["provider"] in {other["provider"] for other in group}:  # a newer run begins
            group.clear()
        group.append(row)
    order = {case.name: number for number, case in enumerate(CASES)}
    return [row for case in sorted(newest, key=lambda name: order.get(name, 99)) for row in newest[case]]


def markdown(rows: list[dict[str, str]]) -> str:
    """The table of docs/performance.md."""
    lines = [
        "| context | type | cache | ms per step (20th to 80th percentile) | against DynamicCache | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        _, context, dtype = row["case"].split("-")
        spread = f"{float(row['p50_ms']):.0f} ({float(row['p20_ms']):.0f} to {float(row['p80_ms']):.0f})"
        lines.append(
            f"| {int(context):,} | {dtype} | {row['provider']} | {spread} | {float(row['ratio']):.2f}x | {row['note']} |"
        )
    first = rows[0]
    lines += [
        "",
        f"SmolLM2-135M-Instruct, budget 2,048, {first['hardware']}, torch {first['torch']}, transformers {first['transformers']}, "
        f"medians of {first['samples']} steps in turns. Made by `python -m eval.bench run` and `report`.",
    ]
    return "\n".join(lines)


def report(options: argparse.Namespace, console: Console) -> int:
    rows = latest(options.ledger)
    if not rows:
        console.print("the ledger has no rows of decode steps on a CPU")
        return 1
    page = PERFORMANCE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PERFORMANCE.write_text(f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}")
    table = Table()
    for name in ("case", "cache", "ms", "x DynamicCache"):
        table.add_column(name)
    for row in rows:
        table.add_row(row["case"], row["provider"], row["p50_ms"], row["ratio"])
    console.print(table)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("run", run), ("report", report)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--ledger", type=Path, default=LEDGER, help="the CSV file of results")
        if name == "run":
            command.add_argument("--cases", help="comma-separated; default: all")
            command.add_argument("--rounds", type=int, default=9, help="measured steps per cache")
            command.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    options = parser.parse_args(arguments)
    result: int = options.function(options, Console(width=160))
    return result


if __name__ == "__main__":
    raise SystemExit(main())
