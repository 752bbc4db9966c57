"""What it costs that sequences of a batch advance unevenly under `LookaheadDecoding`: forwards and query rows, counted.

    python -m eval.bench.uneven --out eval/bench/results/uneven.json

A tiny random model, and drafts that are right with a given probability at each token, independently. Counts depend on nothing
else, so neither the model nor the machine matters. "alone" is the most forwards that any sequence of the batch needs by itself,
which no way to hold the cache can undercut.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_cache.lookahead import LookaheadDecoding, ReplayDrafter

VOCABULARY, PROMPT_TOKENS = 64, 8
BATCHES = {
    "4 alike, 0.5": (0.5,) * 4,
    "4 alike, 0.7": (0.7,) * 4,
    "4 alike, 0.9": (0.9,) * 4,
    "8 alike, 0.7": (0.7,) * 8,
    "0.9 0.7 0.5 0.3": (0.9, 0.7, 0.5, 0.3),
}


@dataclass(frozen=True)
class Cost:
    """One row: means over seeds.

    Attributes:
        batch: Probability that a draft is right, per sequence.
        max_rows: Most query rows per sequence and forward; 0 for sequences alone.
        forwards: Of the model after the prefill.
        rows_per_forward: Query rows per sequence.
        extra_forwards: Relative to the slowest sequence alone.
    """

    batch: str
    max_rows: int
    forwards: float
    rows_per_forward: float
    extra_forwards: float


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def drafts(tokens: torch.Tensor, right: tuple[float, ...], seed: int) -> torch.Tensor:
    """tokens [batch, new tokens] with each token replaced by a wrong one with probability 1 - right."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(tokens.shape, generator=generator) >= torch.tensor(right).unsqueeze(1)
    return torch.where(wrong, (tokens + 1) % VOCABULARY, tokens)


def measure(num_drafts: int, new_tokens: int, seeds: int) -> list[Cost]:
    model = tiny_model()

    def forwards(ids: torch.Tensor, guesses: torch.Tensor, max_rows: int | None) -> tuple[int, int]:
        decoding = LookaheadDecoding(ReplayDrafter(guesses), num_drafts, max_rows=max_rows)
        model.generate(ids, max_new_tokens=new_tokens, do_sample=False, custom_generate=decoding)
        return decoding.report.forwards, decoding.report.query_rows

    costs = []
    for name, right in BATCHES.items():
        ids = torch.randint(1, VOCABULARY, (len(right), PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
        tokens = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)[:, PROMPT_TOKENS:]
        guesses = [drafts(tokens, right, seed) for seed in range(seeds)]
        alone = [max(forwards(ids[i : i + 1], g[i : i + 1], None)[0] for i in range(len(right))) for g in guesses]
        costs.append(Cost(name, 0, sum(alone) / seeds, num_drafts + 1.0, 0.0))
        for max_rows in (num_drafts + 1, 2 * (num_drafts + 1), 4 * (num_drafts + 1)):
            counts = [forwards(ids, g, max_rows) for g in guesses]
            total, rows = (sum(column) for column in zip(*counts, strict=True))
            costs.append(Cost(name, max_rows, total / seeds, rows / total, total / sum(alone) - 1))
    return costs


def table(costs: list[Cost]) -> Table:
    out = Table("drafts right", "max_rows", "forwards", "rows per forward", "more forwards than the slowest alone")
    for cost in costs:
        rows = str(cost.max_rows) if cost.max_rows else "alone"
        out.add_row(
            cost.batch, rows, f"{cost.forwards:.0f}", f"{cost.rows_per_forward:.1f}", f"{cost.extra_forwards:+.0%}"
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-drafts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    costs = measure(options.num_drafts, options.new_tokens, options.seeds)
    Console().print(table(costs))
    if options.out is not None:
        arguments = {name: value for name, value in vars(options).items() if name != "out"}
        result = {**arguments, "transformers": transformers.__version__, "costs": [asdict(cost) for cost in costs]}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
