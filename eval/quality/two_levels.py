"""What the coarse level (`candidates`) loses against ranking all blocks: of the attention mass, and of a hidden number's.

    python -m eval.quality.two_levels --length 7900 --budgets 512,1024 --out eval/quality/results/two_levels.json

A text is read exactly, and at each step of its true continuation the blocks that a full ranking by `int2` would choose are held
against those that a ranking of the candidates would choose, by the exact attention weights. The same with a number hidden in the
first part of the text and asked for at the end, for the blocks in which it lies: that is where a coarse level fails first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.quality.files import write_json
from eval.quality.prediction import recorded_queries
from oasis_cache import OasisConfig
from oasis_cache.demo import describe_environment, hide_number, prefill
from oasis_cache.haystack import text
from oasis_cache.index import make_index
from oasis_cache.packaged import PACKAGED, load_model


@dataclass(frozen=True)
class Kept:
    """Attention mass kept by one choice of candidates, relative to what a ranking of all blocks keeps.

    Attributes:
        what: "text": all blocks of natural text; "number": the blocks of a hidden number.
        candidates: Most blocks ranked, besides the newest ones; of `blocks`.
        mean: Over layers, KV heads and steps.
        worst_layer: The mean of the layer that loses most.
    """

    what: str
    length: int
    blocks: int
    budget: int
    candidates: int
    mean: float
    worst_layer: float


def compare(
    model: PreTrainedModel,
    ids: torch.Tensor,
    steps: int,
    budgets: Sequence[int],
    times: Sequence[float],
    spot: range | None = None,
) -> list[Kept]:
    """A row for each budget and number of candidates.

    Args:
        ids: [1, length + steps]; the last `steps` tokens are fed.
        times: Candidates as a multiple of the slots.
        spot: Positions whose blocks alone count.
    """
    length = ids.shape[1] - steps
    cache = DynamicCache(config=model.config)
    prefill(model, ids[:, :length], cache)
    queries = recorded_queries(model, ids[:, length:], cache)
    scaling = model.model.layers[0].self_attn.scaling
    rows = []
    for budget in budgets:
        config = OasisConfig(budget=budget)
        block, num_blocks = config.block_size, length // config.block_size - config.recent_blocks
        for factor in times:
            kept: list[tuple[float, float]] = []  # by layer: of all blocks ranked, of candidates
            for layer, recorded in queries.items():
                keys = cache.layers[layer].keys[:, :, :length]
                index = make_index("int2", max(config.num_slots, round(factor * config.num_slots)))
                index.append(keys[:, :, : num_blocks * block].unflatten(2, (num_blocks, block)))
                grouped = recorded.unflatten(0, (keys.shape[1], -1)).unsqueeze(
                    0
                )  # [1, kv_heads, group, steps, key_dim]
                group = grouped.shape[2]
                weights = (grouped.flatten(2, 3) @ keys.transpose(-1, -2) * scaling).softmax(-1)
                weights = weights.unflatten(2, (group, -1)).mean(2)
                mass = weights[..., : num_blocks * block].unflatten(-1, (num_blocks, block)).sum(-1)
                if spot is not None:
                    inside = torch.zeros(num_blocks, dtype=torch.bool)
                    inside[spot.start // block : (spot.stop - 1) // block + 1] = True
                    inside[: config.sink_blocks] = False
                    mass = mass * inside
                sums = [0.0, 0.0]
                for step in range(steps):
                    query = grouped[:, :, :, step]
                    candidates = index.candidates(query, group, num_blocks, scaling, config.sink_blocks)
                    if candidates is None:
                        raise ValueError(f"{num_blocks} blocks are too few for a coarse level with budget={budget}")
                    scores = index.score(query, group, num_blocks, scaling)[1]
                    scores[..., : config.sink_blocks] = float("inf")
                    ranked = torch.full_like(scores, -1.0).scatter(2, candidates, scores.gather(2, candidates))
                    for place, part in enumerate((scores, ranked)):
                        chosen = part.topk(config.num_slots, -1).indices
                        sums[place] += float(mass[:, :, step].gather(2, chosen).sum())
                kept.append((sums[0], sums[1]))
            whole, found = (sum(part) for part in zip(*kept, strict=True))
            least = min(two / one for one, two in kept if one > 0.01 * whole)
            what = "text" if spot is None else "number"
            candidates = max(config.num_slots, round(factor * config.num_slots))
            rows.append(Kept(what, length, num_blocks, budget, candidates, round(found / whole, 4), round(least, 4)))
    return rows


def number_ids(tokenizer: PreTrainedTokenizerBase, length: int, depth: float, seed: int) -> tuple[torch.Tensor, range]:
    """A prompt that ends in its true answer, [1, tokens], and where the number was hidden."""
    task = hide_number(tokenizer, length, depth, seed)
    answer = tokenizer(f" {task.number}", add_special_tokens=False)["input_ids"]
    ids = [*task.prompt_ids[0].tolist(), *answer]
    digits = answer[-len(tokenizer(str(task.number), add_special_tokens=False)["input_ids"]) :]
    places = [at for at in range(len(ids) - 2 * len(digits)) if ids[at : at + len(digits)] == digits]
    assert places, "the number is not where it was hidden"
    return torch.tensor([ids]), range(places[0], places[0] + len(digits))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.quality.two_levels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--length", type=int, default=7900, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--budgets", default="512", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--times", default="1,2,3", metavar="X,X", help="candidates as multiples of the slots")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps of text (default: %(default)s)")
    parser.add_argument("--depths", default="0.1,0.3,0.5", metavar="X,X", help="where numbers are hidden")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model)
    budgets = [int(part) for part in options.budgets.split(",")]
    times = [float(part) for part in options.times.split(",")]
    encoded = tokenizer(text(options.length + options.steps + 64, tokenizer), add_special_tokens=False)["input_ids"]
    rows = compare(model, torch.tensor([encoded[: options.length + options.steps]]), options.steps, budgets, times)
    for seed, depth in enumerate(float(part) for part in options.depths.split(",")):
        ids, spot = number_ids(tokenizer, options.length, depth, seed + 5)
        rows += compare(model, ids, 8, budgets, times, spot)
    report = {
        "length": options.length,
        "environment": describe_environment(model, options.model),
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, report)
    for row in rows:
        ranked = f"{row.candidates} of {row.blocks} blocks ranked"
        print(f"{row.what:<8} budget {row.budget}, {ranked}: {row.mean:.4f}, worst layer {row.worst_layer:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
