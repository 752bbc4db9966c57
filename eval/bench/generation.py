"""A real prompt, end to end: `model.generate` with and without prompt lookup, and the time and memory of reading a long one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from eval.bench.cases import Case
from eval.bench.gpu.ledger import ROOT
from eval.bench.gpu.measure import Row
from eval.bench.measuring import compared, row_of
from eval.bench.providers import DYNAMIC, OASIS
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.haystack import text

LOOKUP = ", prompt lookup"
LOOKUP_TOKENS = 10
QUANTITIES = ("total", "first token", "per further token")


def make_cache(name: str, model: PreTrainedModel, budget: int) -> Cache:
    """A DynamicCache or an OasisCache."""
    return OasisCache(model_config=model.config, budget=budget) if name == OASIS else DynamicCache(config=model.config)


def prompt(tokenizer: Any, tokens: int) -> torch.Tensor:
    """That many tokens of the packaged text: int64 [1, tokens]."""
    ids = tokenizer(text(tokens + 200, tokenizer), return_tensors="pt", add_special_tokens=False).input_ids
    assert ids.shape[1] >= tokens
    return ids[:, :tokens]


class Clock(StoppingCriteria):
    """Never stops; notes when the first round's tokens were there, and how many."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.first: tuple[float, int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.first is None and input_ids.shape[1] > self.prompt_tokens:
            self.first = (time.perf_counter(), input_ids.shape[1] - self.prompt_tokens)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Generation:
    """Seconds of one `generate`, and its tokens.

    Attributes:
        total: All of it.
        first: Until the first round's tokens: the prefill and one step, or with prompt lookup one round of drafts.
        further: Per token after those.
    """

    total: float
    first: float
    further: float
    tokens: tuple[int, ...]


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, new_tokens: int, lookup: bool) -> Generation:
    """Greedy generation of exactly `new_tokens` tokens behind `ids`, int64 [1, tokens], with an empty cache."""
    clock = Clock(ids.shape[1])
    options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
        **cache_argument(model, cache),
    )
    end = time.perf_counter()
    assert clock.first is not None
    first, count = clock.first
    further = (end - first) / max(1, out.shape[1] - ids.shape[1] - count)
    return Generation(end - begin, first - begin, further, tuple(out[0, ids.shape[1] :].tolist()))


def measure_generation(
    model: PreTrainedModel, ids: torch.Tensor, case: Case, rounds: int, new_tokens: int, say: Callable[[str], None]
) -> list[Row]:
    """Three rows (total, first token, per further token) for each cache, with and without prompt lookup, which take turns."""
    ways = {name + LOOKUP * lookup: (name, lookup) for lookup in (False, True) for name in (OASIS, DYNAMIC)}
    runs: dict[str, list[Generation]] = {way: [] for way in ways}
    notes = {}
    for turn in range(rounds):
        for way, (name, lookup) in ways.items():
            cache = make_cache(name, model, case.budget)
            run = generate(model, ids, cache, new_tokens, lookup)
            runs[way].append(run)
            if isinstance(cache, OasisCache):
                stats = cache.stats()
                notes[way] = f"hit rate {stats.hit_rate:.2f}"
                cache.close()
            say(f"{case.name}: turn {turn + 1}, {way}: {run.total:.1f} s, first token {run.first:.1f} s")
    greedy = runs[DYNAMIC][0].tokens
    rows = []
    for quantity, attribute in zip(QUANTITIES, ("total", "first", "further"), strict=True):
        samples = {way: [1e3 * getattr(run, attribute) for run in done] for way, done in runs.items()}
        for way, values in samples.items():
            equal = next((i for i, (a, b) in enumerate(zip(runs[way][0].tokens, greedy, strict=True)) if a != b), None)
            same = "all tokens" if equal is None else f"the first {equal} tokens"
            note = f"{same} those of DynamicCache" + (f", {notes[way]}" if way in notes else "")
            row = _row(case, f"{ids.shape[1]} tokens, {new_tokens} new", way, values, quantity)
            row.note = note if quantity == "total" else ""
            rows.append(compared(row, samples, DYNAMIC))
    return rows


def _row(case: Case, shape: str, provider: str, values: list[float], quantity: str) -> Row:
    return row_of(case, f"{shape}, budget {case.budget}", provider, values, quantity)


def measure_prefill(
    case: Case, rounds: int, tokens: int, chunk: int, model: str | None, say: Callable[[str], None]
) -> list[Row]:
    """A row for each cache: time to the first token and the peak of memory, each time in a process of its own."""
    done: dict[str, list[dict[str, Any]]] = {OASIS: [], DYNAMIC: []}
    for turn in range(rounds):
        for name, results in done.items():
            command = [sys.executable, "-m", "eval.bench.prefill", name, f"--tokens={tokens}", f"--chunk={chunk}"]
            command += [f"--dtype={case.dtype}", f"--budget={case.budget}", *([f"--model={model}"] if model else [])]
            output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if output.returncode:
                say(f"{case.name}: {name} is left out: exit status {output.returncode}, {output.stderr[-300:]}")
                continue
            results.append(json.loads(output.stdout.splitlines()[-1]))
            seconds, peak = results[-1]["seconds"], results[-1]["peak_bytes"]
            say(f"{case.name}: turn {turn + 1}, {name}: {seconds:.1f} s, peak {peak / 1e9:.2f} GB")
    whole = {name: results for name, results in done.items() if len(results) == rounds}
    samples = {name: [1e3 * result["seconds"] for result in results] for name, results in whole.items()}
    how = f"in chunks of {chunk}" if chunk else "at once"
    rows = []
    for name, results in whole.items():
        row = _row(case, f"{tokens} tokens {how}", name, samples[name], "first token")
        row.peak_bytes = max(result["peak_bytes"] for result in results)
        row.device_bytes, row.kv_bytes = results[-1]["device_bytes"], results[-1]["kv_bytes"]
        row.note = f"resident before, weights included: {results[-1]['resident_bytes'] / 1e9:.2f} GB"
        rows.append(compared(row, samples, DYNAMIC))
    return rows
