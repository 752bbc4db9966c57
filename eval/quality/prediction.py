"""Are the next step's blocks there before attention asks? Predictors, indexes and fetch caps on a real model and real text.

    python -m eval.quality.prediction --lengths 2048,4096 --steps 48 --out eval/quality/results/prediction.json

Two tables. *Ranking*: at each step of a forced continuation of the text, the blocks that an index chooses with the step's own
query (what a right draft row gives) or with the query one token before, against the blocks that get most attention mass: overlap
with the exact top-k and mass kept (of sink + recent + chosen blocks), mean and 5th percentile over layers, KV heads and steps.

*Residency*: decoding the continuation through `OasisCache` with `on_miss="fetch"`: the share of selected blocks that sat in a slot
or had been prefetched when attention asked. "the text, n": each forward carries the current token and n right drafts, which are
then rejected, as in the paper; "none": the newest query predicts. The first step, which fills all slots, is counted too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from oasis_cache import OasisCache
from oasis_cache.demo import describe_environment
from oasis_cache.haystack import text
from oasis_cache.index import make_index
from oasis_cache.kernels import reference
from oasis_cache.packaged import PACKAGED, load_model

BLOCK, RECENT_BLOCKS = 16, 4
INDEXES = ("exact", "int2", "int1", "minmax")
CHOSEN = (8, 16, 32)
CAPS = (0.01, 0.05, 0.1, None)


@dataclass(frozen=True)
class Ranking:
    """One row of the ranking table: means over layers, KV heads and steps."""

    length: int
    index: str
    predictor: str
    chosen_blocks: int
    overlap: float
    mass: float
    mass_p5: float


@dataclass(frozen=True)
class Residency:
    """One row of the residency table."""

    length: int
    budget: int
    drafter: str
    lookahead: str
    max_fetch: float | None
    hit_rate: float
    prefetched_used: float
    tokens_per_step: float


class Recorder:
    """Keeps the queries that attention gets, layer by layer, while it is on."""

    def __init__(self) -> None:
        self.queries: dict[int, list[torch.Tensor]] = defaultdict(list)

    def attention(self, module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.queries[module.layer_idx].append(query[0])  # [query_heads, rows, key_dim]
        return sdpa_attention_forward(module, query, *args, **kwargs)


def recorded_queries(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> dict[int, torch.Tensor]:
    """Queries of `ids` [1, rows] behind a filled cache, per layer [query_heads, rows, key_dim]; the cache grows."""
    recorder = Recorder()
    AttentionInterface.register("recorder", recorder.attention)
    AttentionMaskInterface.register("recorder", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("recorder")
    try:
        with torch.inference_mode():
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop("recorder")
        AttentionMaskInterface._global_mapping.pop("recorder")
    return {layer: torch.cat(parts, dim=1) for layer, parts in recorder.queries.items()}


def ranking_table(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> list[Ranking]:
    """Overlap and mass kept by each index, for the step's own query and the one before: ids [1, length + steps + 1]."""
    length = ids.shape[1] - steps - 1
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :length], past_key_values=cache, use_cache=True, logits_to_keep=1)
    queries = recorded_queries(model, ids[:, length:], cache)
    kv_heads = cache.layers[0].keys.shape[1]
    num_blocks = length // BLOCK - RECENT_BLOCKS
    scaling = model.model.layers[0].self_attn.scaling
    sums: dict[tuple[str, str, int], list[torch.Tensor]] = defaultdict(list)
    for layer, rows in queries.items():
        keys = cache.layers[layer].keys[:, :, :length]
        blocks = keys[:, :, : num_blocks * BLOCK].unflatten(2, (num_blocks, BLOCK))
        grouped = rows.unflatten(0, (kv_heads, -1)).unsqueeze(0)  # [1, kv_heads, group, rows, key_dim]
        group = grouped.shape[2]
        flat = grouped.flatten(2, 3)
        tokens = (flat @ keys.transpose(-1, -2) * scaling).softmax(-1).unflatten(2, (group, -1)).mean(2)
        always = tokens[..., num_blocks * BLOCK :].sum(-1)[:, :, 1:]  # [1, kv_heads, steps]
        mass = tokens[..., : num_blocks * BLOCK].unflatten(-1, (num_blocks, BLOCK)).sum(-1)[:, :, 1:]
        for name in INDEXES:
            index = make_index(name)
            index.append(blocks)
            scores = reference.rank_rows(index.log_mass(flat, num_blocks, scaling), group)
            scores[..., 0] = float("inf")
            for predictor, guess in (("own query", scores[:, :, 1:]), ("previous", scores[:, :, :-1])):
                for count in CHOSEN:
                    chosen = guess.topk(count + 1, -1).indices  # the sink and `count` more
                    ideal = mass.clone()
                    ideal[..., 0] = float("inf")
                    best = ideal.topk(count + 1, -1).indices
                    member = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, best, True)
                    overlap = (member.gather(-1, chosen).sum(-1) - 1) / count
                    kept = always + mass.gather(-1, chosen).sum(-1)
                    sums[name, predictor, count].append(torch.stack([overlap, kept]))
    table = []
    for (name, predictor, count), parts in sums.items():
        overlap, kept = torch.cat([part.flatten(1) for part in parts], 1)
        p5 = float(kept.quantile(0.05))
        table.append(Ranking(length, name, predictor, count, float(overlap.mean()), float(kept.mean()), p5))
    return table


def residency_table(model: PreTrainedModel, ids: torch.Tensor, steps: int, budget: int) -> list[Residency]:
    """Hit rates of real decoding: ids [1, length + steps + 1], whose end is the text to continue."""
    length = ids.shape[1] - steps - 1
    prompt = ids[:, :length]
    filled = OasisCache(model_config=model.config, budget=budget)
    with torch.inference_mode():
        model(prompt[:, :-1], past_key_values=filled, use_cache=True, logits_to_keep=1)
    kv = [layer.dense_kv() for layer in filled.layers]
    key_dim = filled.layers[0].shape.key_dim
    table = []
    for drafter, rows in (("none", 1), ("the text, 1", 2), ("the text, 2", 3), ("the text, 4", 5)):
        for cap in CAPS:
            lookahead = "previous" if rows == 1 else "draft"
            cache = OasisCache(
                model_config=model.config, budget=budget, lookahead=lookahead, max_fetch=cap, engine="sync"
            )
            for layer, part in enumerate(kv):
                cache.update(part[..., :key_dim], part[..., key_dim:], layer)
            position = length - 1
            forwards = 0
            with torch.inference_mode():
                while position + rows <= ids.shape[1]:
                    # The current token and its drafts, all right; rejected, as in the paper: the next step starts one further.
                    model(ids[:, position : position + rows], past_key_values=cache, use_cache=True, logits_to_keep=1)
                    cache.crop(-(rows - 1))
                    position, forwards = position + 1, forwards + 1
            stats = cache.stats()
            used = stats.prefetched_used / stats.prefetched if stats.prefetched else 0.0
            table.append(
                Residency(
                    length, budget, drafter, lookahead, cap, stats.hit_rate, used, (position - length + 1) / forwards
                )
            )
    return table


def show(rankings: list[Ranking], residencies: list[Residency], console: Console) -> None:
    """Print both tables."""
    table = Table(title="Ranking: what is chosen against what the step wants")
    for name in ("tokens", "index", "query", "blocks", "overlap", "mass kept", "mass, 5th percentile"):
        table.add_column(name, justify="right")
    for r in rankings:
        table.add_row(
            str(r.length),
            r.index,
            r.predictor,
            str(r.chosen_blocks),
            f"{r.overlap:.3f}",
            f"{r.mass:.3f}",
            f"{r.mass_p5:.3f}",
        )
    console.print(table)
    table = Table(title='Residency: there before attention asks (on_miss="fetch")')
    for name in ("tokens", "budget", "drafts", "cap", "hit rate", "prefetched and used"):
        table.add_column(name, justify="right")
    for r in residencies:
        cap = "none" if r.max_fetch is None else f"{r.max_fetch:.0%}"
        table.add_row(str(r.length), str(r.budget), r.drafter, cap, f"{r.hit_rate:.3f}", f"{r.prefetched_used:.3f}")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--lengths", default="2048,4096,8000", help="tokens of context, comma-separated")
    parser.add_argument("--steps", type=int, default=32, help="decode steps per length")
    parser.add_argument("--budget", type=int, default=512, help="tokens per KV head in the residency table")
    parser.add_argument("--out", type=Path, help="write both tables as JSON")
    options = parser.parse_args(arguments)
    console = Console()
    model, tokenizer = load_model(options.model, torch.float32)[:2]
    rankings: list[Ranking] = []
    residencies: list[Residency] = []
    for length in (int(part) for part in options.lengths.split(",")):
        wanted = length + options.steps + 1
        ids = tokenizer(text(wanted + 200, tokenizer), return_tensors="pt", add_special_tokens=False).input_ids[
            :, :wanted
        ]
        console.print(f"{length} tokens: ranking, then residency at budget {options.budget}")
        rankings += ranking_table(model, ids, options.steps)
        residencies += residency_table(model, ids, options.steps, options.budget)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            result: dict[str, Any] = {
                "ranking": [asdict(r) for r in rankings],
                "residency": [asdict(r) for r in residencies],
            }
            result |= {"steps": options.steps, "environment": describe_environment(model, options.model or PACKAGED)}
            options.out.write_text(json.dumps(result, indent=1))
    show(rankings, residencies, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
