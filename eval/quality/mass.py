"""How much attention mass a budget keeps, layer by layer: the figure behind the scores.

    python -m eval.quality.mass --length 4096 --out eval/quality/results/mass.json

Natural prose is read exactly, its true continuation is fed, and at each step the blocks that a method would choose are held against
the attention weights over everything. Mean over steps, KV heads and the query heads of each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from eval.quality.files import write_json
from eval.quality.prediction import log_mass_of, recorded_queries
from eval.quality.runner import budget_of
from oasis_cache import OasisConfig
from oasis_cache.demo import describe_environment, prefill
from oasis_cache.haystack import text
from oasis_cache.kernels import reference
from oasis_cache.packaged import PACKAGED, load_model

INDEXES = ("exact", "int2", "minmax", "recency")


def mass_by_layer(model: PreTrainedModel, ids: torch.Tensor, steps: int, budget: int) -> list[dict[str, Any]]:
    """A row per layer and index: the share of attention mass kept within a budget; ids [1, length + steps]."""
    config = OasisConfig(budget=budget)
    length, block = ids.shape[1] - steps, config.block_size
    cache = DynamicCache(config=model.config)
    prefill(model, ids[:, :length], cache)
    queries = recorded_queries(model, ids[:, length:], cache)
    num_blocks = length // block - config.recent_blocks
    scaling = model.model.layers[0].self_attn.scaling
    rows = []
    for layer, recorded in queries.items():
        keys = cache.layers[layer].keys[:, :, :length]
        blocks = keys[:, :, : num_blocks * block].unflatten(2, (num_blocks, block))
        grouped = recorded.unflatten(0, (keys.shape[1], -1)).unsqueeze(0)  # [1, kv_heads, group, steps, key_dim]
        flat = grouped.flatten(2, 3)
        weights = (flat @ keys.transpose(-1, -2) * scaling).softmax(-1).unflatten(2, (grouped.shape[2], -1)).mean(2)
        always = weights[..., num_blocks * block :].sum(-1)  # [1, kv_heads, steps]
        mass = weights[..., : num_blocks * block].unflatten(-1, (num_blocks, block)).sum(-1)
        for name in INDEXES:
            if name == "recency":
                scores = torch.arange(num_blocks, dtype=torch.float32).expand_as(mass).clone()
            elif name == "exact":
                scores = mass.clone()
            else:
                scores = reference.rank_rows(log_mass_of(name, blocks, flat, scaling), grouped.shape[2])
            scores[..., : config.sink_blocks] = float("inf")
            chosen = scores.topk(min(config.num_slots, num_blocks), -1).indices
            kept = always + mass.gather(-1, chosen).sum(-1)
            rows.append({"layer": layer, "index": name, "mass": round(float(kept.mean()), 4)})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.quality.mass", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--share", type=float, default=1 / 8, help="budget as a share of the length")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    encoded = tokenizer(text(options.length + options.steps + 64, tokenizer), add_special_tokens=False)["input_ids"]
    ids = torch.tensor([encoded[: options.length + options.steps]])
    budget = budget_of(options.length, options.share)
    report = {
        "length": options.length,
        "budget": budget,
        "steps": options.steps,
        "environment": describe_environment(model, options.model),
        "rows": mass_by_layer(model, ids, options.steps, budget),
    }
    write_json(options.out, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
