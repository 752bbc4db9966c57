"""Are the next step's blocks there before attention asks? Predictors, indexes and fetch caps on a real model and real text.

    python -m eval.quality.prediction --lengths 2048,4096 --steps 48 --out eval/quality/results/prediction.json

Two tables. *Ranking*: at each step of a forced continuation of the text, the blocks that an index chooses with the step's own
query (what a right draft row gives) or with the query one token before, against the blocks that get most attention mass: overlap
with the exact top-k and mass kept (of sink + recent + chosen blocks), mean and 5th percentile over layers, KV heads and steps.

*Residency*: decoding the continuation through `OasisCache` with `on_miss="fetch"`: the share of selected blocks that were on the
device when attention asked, from the third step on. Each forward carries the current token and drafts, which are then rejected, as
in the paper: "the text, n": n drafts that are right; "prompt lookup" and "early exit": what those drafters say of the text so far;
"none": the newest query predicts. `spare` is the number of blocks kept beside those that are read (`OasisConfig.spare_blocks`).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.demo import describe_environment
from oasis_cache.drafters import DraftRequest, EarlyExitDrafter, PromptLookupDrafter
from oasis_cache.haystack import text
from oasis_cache.index import make_index
from oasis_cache.kernels import reference
from oasis_cache.packaged import PACKAGED, load_model

BLOCK, RECENT_BLOCKS = 16, 4
INDEXES = ("exact", "int2", "int1", "minmax")
CHOSEN = (8, 16, 32)
# Caps on prefetches, and spare blocks as a share of the slots (at least what a step may prefetch).
SETTINGS = ((0.05, 1.0), (0.01, 1.0), (0.1, 1.0), (None, 1.0), (0.05, 0.5), (0.05, 0.0))
WARM_STEPS = 2  # not counted: the first one fills all slots


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
    """One row of the residency table: `hit_rate` is the share of selected blocks that were there, `drafts_right` that of drafts."""

    length: int
    budget: int
    drafter: str
    max_fetch: float | None
    spare: int
    hit_rate: float
    fetched_per_step: float
    drafts_right: float | None


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


def log_mass_of(name: str, blocks: torch.Tensor, queries: torch.Tensor, scaling: float) -> torch.Tensor:
    """Log-mass of blocks [1, kv_heads, blocks, block_size, dim] by an index, or by one that the library has not."""
    if name in INDEXES:
        index = make_index(name)
        index.append(blocks)
        return index.log_mass(queries, blocks.shape[2], scaling)
    return reference.log_mass_exact(queries, CANDIDATES[name](blocks), scaling)


def shared_ranges(blocks: torch.Tensor, share: int) -> torch.Tensor:
    """Keys as 2-bit codes restore them whose minimum and step are shared by `share` neighbouring blocks."""
    grouped = torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, -blocks.shape[2] % share), mode="replicate")
    grouped = grouped.unflatten(2, (-1, share)).flatten(3, 4)
    codes, low, step = reference.quantise_int2(grouped)
    restored = low.float().unsqueeze(3) + step.float().unsqueeze(3) * reference.unpack_codes(codes, 2, blocks.shape[4])
    return restored.unflatten(3, (share, -1)).flatten(2, 3)[:, :, : blocks.shape[2]]


def small_ranges(blocks: torch.Tensor) -> torch.Tensor:
    """Keys as 2-bit codes restore them whose minimum, less the channel's mean, and step take a byte each (float8)."""
    mean = blocks.mean((2, 3), keepdim=True)
    low = (blocks.amin(3, keepdim=True) - mean).to(torch.float8_e4m3fn).float() + mean
    step = ((blocks.amax(3, keepdim=True) - low) / 3).clamp_min(2**-9).to(torch.float8_e4m3fn).float()
    return low + step * ((blocks - low) / step).round().clamp(0, 3)


# Smaller indexes that were tried, by the bytes of a block of 16 tokens of D channels (int2: 8 D; a block's KV in bfloat16: 64 D).
CANDIDATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int2, 8-bit ranges (6 D)": small_ranges,
    "int2, ranges of 64 tokens (5 D)": lambda blocks: shared_ranges(blocks, 4),
}


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
        for name in (*INDEXES, *CANDIDATES):
            scores = reference.rank_rows(log_mass_of(name, blocks, flat, scaling), group)
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


def drafts_of(model: PreTrainedModel, ids: torch.Tensor, length: int, steps: int) -> dict[str, list[torch.Tensor]]:
    """Drafts of each kind at each step: ids [1, length + steps + at least 4], whose end is the text to continue."""
    drafts = {
        f"the text, {count}": [ids[0, length + step : length + step + count] for step in range(steps)]
        for count in (1, 2, 4)
    }
    drafts["none"] = [ids[0, :0]] * steps
    for name, drafter in (("prompt lookup, 4", PromptLookupDrafter()), ("early exit, 4", EarlyExitDrafter(10))):
        drafter.start(model)
        drafts[name] = [
            drafter.draft(DraftRequest(ids, (0,), (length + step,), (4,), length))[0] for step in range(steps)
        ]
        drafter.finish()
    return drafts


def residency_table(
    model: PreTrainedModel, ids: torch.Tensor, steps: int, budget: int, settings: Sequence[tuple[float | None, float]]
) -> list[Residency]:
    """Hit rates of real decoding: ids [1, length + steps + 4], whose end is the text to continue.

    Args:
        settings: Caps on prefetches, and spare blocks as a share of the slots.
    """
    length = ids.shape[1] - steps - 4
    filled = OasisCache(model_config=model.config, budget=budget)
    with torch.inference_mode():
        model(ids[:, : length - 1], past_key_values=filled, use_cache=True, logits_to_keep=1)
        drafts = drafts_of(model, ids, length, steps)
    kv = [layer.dense_kv() for layer in filled.layers]
    key_dim = filled.layers[0].shape.key_dim
    table = []
    for drafter, proposals in drafts.items():
        for cap, share in settings:
            lookahead = "previous" if drafter == "none" else "draft"
            config = OasisConfig(budget=budget, lookahead=lookahead, max_fetch=cap, engine="sync")
            config = replace(config, spare_blocks=max(config.max_fetch_blocks, round(share * config.num_slots)))
            cache = OasisCache(config, model_config=model.config)
            for layer, part in enumerate(kv):
                cache.update(part[..., :key_dim], part[..., key_dim:], layer)
            before = None
            with torch.inference_mode():
                for step, proposal in enumerate(proposals):
                    new = torch.cat([ids[0, length - 1 + step : length + step], proposal]).unsqueeze(0)
                    decide = torch.arange(new.shape[1]).unsqueeze(0) == 0
                    with cache.row_roles(decide):
                        model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    cache.crop(1 - new.shape[1])
                    before = cache.stats() if step == WARM_STEPS - 1 else before
            after = cache.stats()
            assert before is not None
            hits, misses = after.hits - before.hits, after.misses - before.misses
            heads = len(kv) * kv[0].shape[1]
            block_bytes = cache.layers[0].counters.block_bytes
            fetched = (after.bytes_fetched - before.bytes_fetched) / block_bytes / heads / (steps - WARM_STEPS)
            right = [
                bool(token == ids[0, length + step + place])
                for step, proposal in enumerate(proposals)
                for place, token in enumerate(proposal)
            ]
            table.append(
                Residency(
                    length,
                    budget,
                    drafter,
                    cap,
                    cache.config.spare_blocks or 0,
                    hits / (hits + misses),
                    fetched,
                    sum(right) / len(right) if right else None,
                )
            )
            cache.close()
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
    for name in ("tokens", "budget", "drafts", "right", "cap", "spare blocks", "hit rate", "blocks fetched per step"):
        table.add_column(name, justify="right")
    for r in residencies:
        cap = "none" if r.max_fetch is None else f"{r.max_fetch:.0%}"
        right = "" if r.drafts_right is None else f"{r.drafts_right:.0%}"
        numbers = (f"{r.hit_rate:.3f}", f"{r.fetched_per_step:.2f}")
        table.add_row(str(r.length), str(r.budget), r.drafter, right, cap, str(r.spare), *numbers)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--lengths", default="2048,4096,8000", help="tokens of context, comma-separated")
    parser.add_argument("--steps", type=int, default=32, help="decode steps per length")
    parser.add_argument("--budget", type=int, default=512, help="tokens per KV head in the residency table")
    parser.add_argument("--settings", type=int, help="try the first so many settings of the residency table only")
    parser.add_argument("--only", choices=["ranking", "residency"], help="make one of the tables only")
    parser.add_argument("--out", type=Path, help="write both tables as JSON")
    options = parser.parse_args(arguments)
    console = Console()
    model, tokenizer = load_model(options.model, torch.float32)[:2]
    rankings: list[Ranking] = []
    residencies: list[Residency] = []
    for length in (int(part) for part in options.lengths.split(",")):
        wanted = length + options.steps + 4
        ids = tokenizer(text(wanted + 200, tokenizer), return_tensors="pt", add_special_tokens=False).input_ids[
            :, :wanted
        ]
        console.print(f"{length} tokens: ranking, then residency at budget {options.budget}")
        if options.only != "residency":
            rankings += ranking_table(model, ids[:, : length + options.steps + 1], options.steps)
        if options.only != "ranking":
            residencies += residency_table(model, ids, options.steps, options.budget, SETTINGS[: options.settings])
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
