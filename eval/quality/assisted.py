"""Assisted generation on a sparse budget: the same answers as without drafts, and what the drafts gain.

    python -m eval.quality.assisted --length 4096 --budget 512 --out eval/quality/results/assisted.json

A number hidden at several depths of a long text is asked for, and generation goes on behind the answer. Each way decodes the same
prompts: plainly; with transformers' own prompt lookup; with `LookaheadDecoding`, drafts kept or always rejected. Tokens per second
are those behind the prefill; ways take turns, so that a drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.demo import describe_environment
from oasis_cache.haystack import HiddenNumber, hide_number
from oasis_cache.lookahead import EarlyExitDrafter, LookaheadDecoding, PromptLookupDrafter
from oasis_cache.packaged import PACKAGED, load_model

DRAFTS = 4
DEPTHS = (0.1, 0.5, 0.9)
Options = Callable[[], dict[str, Any]]
WAYS: dict[str, tuple[str, Options]] = {
    "plain": ("oasis", dict),
    "prompt lookup (transformers)": ("oasis", lambda: {"prompt_lookup_num_tokens": DRAFTS}),
    "LookaheadDecoding, prompt lookup": (
        "oasis",
        lambda: {"custom_generate": LookaheadDecoding(PromptLookupDrafter(), DRAFTS)},
    ),
    "LookaheadDecoding, early exit, rejected": (
        "oasis",
        lambda: {"custom_generate": LookaheadDecoding(EarlyExitDrafter(10), 1, accept=False)},
    ),
    "plain, dense": ("dense", dict),
    "prompt lookup (transformers), dense": ("dense", lambda: {"prompt_lookup_num_tokens": DRAFTS}),
}


@dataclass(frozen=True)
class Row:
    """One way on one prompt: `equal` counts the leading tokens that are those of the same cache decoded plainly."""

    way: str
    depth: float
    found: bool
    equal: int
    new_tokens: int
    tokens_per_forward: float
    tokens_per_second: float
    tokens_read_max: int | None


def decode(
    model: PreTrainedModel, task: HiddenNumber, way: str, budget: int, new_tokens: int
) -> tuple[list[int], float, float, int | None]:
    """New tokens, tokens per forward and per second behind the prefill, and the most tokens read in a sparse step."""
    kind, options = WAYS[way]
    cache = (
        DynamicCache(config=model.config) if kind == "dense" else OasisCache(model_config=model.config, budget=budget)
    )
    forwards: list[float] = []
    arguments = options()
    hook = model.register_forward_hook(lambda *_: forwards.append(time.perf_counter()))
    try:
        with torch.inference_mode():
            out = model.generate(
                task.prompt_ids,
                attention_mask=torch.ones_like(task.prompt_ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                **cache_argument(model, cache),
                **arguments,
            )
    finally:
        hook.remove()
    seconds = time.perf_counter() - forwards[0]
    tokens = out[0, task.prompt_ids.shape[1] :].tolist()
    read = cache.stats().tokens_read_max if isinstance(cache, OasisCache) else None
    decoding = arguments.get("custom_generate")
    count = len(forwards) - 1 if decoding is None else decoding.report.forwards  # early exit's own forwards left out
    return tokens, (len(tokens) - 1) / count, (len(tokens) - 1) / seconds, read


def run(model: PreTrainedModel, tokenizer: Any, length: int, budget: int, new_tokens: int, seed: int) -> list[Row]:
    rows = []
    for depth in DEPTHS:
        task = hide_number(tokenizer, length, depth, seed)
        plain: dict[str, list[int]] = {}
        for way, (kind, _) in WAYS.items():
            tokens, per_forward, per_second, read = decode(model, task, way, budget, new_tokens)
            plain.setdefault(kind, tokens)
            pairs = list(zip(tokens, plain[kind], strict=True))
            equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            found = task.found_in(tokenizer.decode(tokens))
            rows.append(Row(way, depth, found, equal, len(tokens), per_forward, per_second, read))
    return rows


def table(rows: list[Row]) -> list[dict[str, Any]]:
    """Medians over prompts, one line per way."""
    lines = []
    for way in WAYS:
        mine = [row for row in rows if row.way == way]
        base = {row.depth: row for row in rows if row.way == ("plain, dense" if WAYS[way][0] == "dense" else "plain")}
        lines.append(
            {
                "way": way,
                "found": f"{sum(row.found for row in mine)}/{len(mine)}",
                "tokens equal to plain": f"{sum(row.equal for row in mine)}/{sum(row.new_tokens for row in mine)}",
                "tokens per forward": round(statistics.median(row.tokens_per_forward for row in mine), 2),
                "speed against plain": round(
                    statistics.median(row.tokens_per_second / base[row.depth].tokens_per_second for row in mine), 2
                ),
            }
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--length", type=int, default=4096, help="tokens of context")
    parser.add_argument("--budget", type=int, default=512, help="tokens per KV head")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    console = Console()
    model, tokenizer = load_model(options.model, torch.float32)[:2]
    rows = run(model, tokenizer, options.length, options.budget, options.new_tokens, options.seed)
    lines = table(rows)
    shown = Table(title=f"Assisted generation, {options.length} tokens, budget {options.budget}")
    for name in lines[0]:
        shown.add_column(name)
    for line in lines:
        shown.add_row(*map(str, line.values()))
    console.print(shown)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"rows": [asdict(row) for row in rows], "summary": lines}
        result |= {
            "arguments": {"length": options.length, "budget": options.budget, "new_tokens": options.new_tokens},
            "environment": describe_environment(model, options.model or PACKAGED),
        }
        options.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
