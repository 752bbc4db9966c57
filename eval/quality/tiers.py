"""What a compressed host tier saves and what it changes: bytes, logits and answers, `tier_dtype` by `tier_dtype`.

    python -m eval.quality.tiers --out eval/quality/results/tiers.json

All caches are filled with the keys and values of one exact prefill. *Bytes*: what the tier holds of a long text, in bf16 and fp32.
*Logits*: the text goes on, one given token after another, decoded sparsely; the Kullback-Leibler divergence of the next token's
distribution from that of the uncompressed tier, and, for comparison, the uncompressed tier's own from the dense cache's. *Answers*:
the numbers of eval.quality.needle, word for word against the uncompressed tier.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from eval.quality import needle
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.config import TIER_DTYPES
from oasis_cache.demo import describe_environment, pick_device, prefill
from oasis_cache.haystack import text
from oasis_cache.packaged import PACKAGED, load_model

PLAIN = "none"  # tier_dtype=None in tables
NAMES = {tier_dtype: tier_dtype or PLAIN for tier_dtype in TIER_DTYPES}
PASSAGE_STRIDE = 500  # sentences between the beginnings of two passages


@dataclass(frozen=True)
class TierMethod(needle.Method):
    """A way of asking, with a tier."""

    tier_dtype: str | None = None

    def make_cache(self, model: PreTrainedModel, **overrides: Any) -> OasisCache:
        return super().make_cache(model, tier_dtype=self.tier_dtype, **overrides)


def host_bytes(snapshot: list[tuple[torch.Tensor, torch.Tensor]], budget: int) -> list[dict[str, Any]]:
    """Bytes in the host tier for the same keys and values, by dtype of the cache and of the tier."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        plain = 0
        for tier_dtype, name in NAMES.items():
            with OasisCache(budget=budget, tier_dtype=tier_dtype) as cache:
                for layer_idx, (keys, values) in enumerate(snapshot):
                    cache.update(keys.to(dtype), values.to(dtype), layer_idx)
                held = cache.stats().host_bytes
            plain = plain or held
            row = {"cache": str(dtype).removeprefix("torch."), "tier": name, "bytes": held, "ratio": held / plain}
            rows.append(row | {"tokens": snapshot[0][0].shape[2]})
    return rows


def next_logits(model: PreTrainedModel, ids: torch.Tensor, cache: OasisCache | DynamicCache) -> torch.Tensor:
    """Log-probabilities of the token after each of ids [1, tokens], which the cache gets one by one: [tokens, vocabulary]."""
    parts = []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            logits = model(token, use_cache=True, **cache_argument(model, cache)).logits
            parts.append(logits[0, -1].float().log_softmax(-1))
    return torch.stack(parts)


def divergence(want: torch.Tensor, got: torch.Tensor) -> dict[str, float]:
    """KL(want || got) in nats, and how often the likeliest token is the same; log-probabilities [tokens, vocabulary]."""
    kl = (want.exp() * (want - got)).sum(-1)
    return {
        "kl_mean": float(kl.mean()),
        "kl_p95": float(kl.quantile(0.95)),
        "kl_max": float(kl.max()),
        "top1": float((want.argmax(-1) == got.argmax(-1)).float().mean()),
    }


def logits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, new_tokens: int, passages: int, budget: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows for logits, and for bytes (of the first passage)."""
    sizes: list[dict[str, Any]] = []
    collected: dict[str, list[torch.Tensor]] = {}
    for passage in range(passages):
        words = text(length + new_tokens + 64, tokenizer, start=passage * PASSAGE_STRIDE)
        ids = tokenizer(words, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        prompt, rest = ids[:, :length], ids[:, length : length + new_tokens]
        dense = DynamicCache(config=model.config)
        prefill(model, prompt, dense)
        snapshot = needle.snapshot_of(dense)
        sizes = sizes or (host_bytes(snapshot, budget) if snapshot is not None else [])
        for tier_dtype, name in NAMES.items():
            with OasisCache(model_config=model.config, budget=budget, tier_dtype=tier_dtype) as cache:
                needle.fill(model, cache, prompt, snapshot)
                collected.setdefault(name, []).append(next_logits(model, rest, cache))
                assert cache.stats().sparse_steps == new_tokens
        collected.setdefault("dense", []).append(next_logits(model, rest, dense))
    all_logits = {name: torch.cat(parts) for name, parts in collected.items()}
    rows = [{"tier": NAMES[None], "against": "dense"} | divergence(all_logits["dense"], all_logits[PLAIN])]
    for name in list(NAMES.values())[1:]:
        rows.append({"tier": name, "against": PLAIN} | divergence(all_logits[PLAIN], all_logits[name]))
    return [row | {"positions": passages * new_tokens} for row in rows], sizes


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    depths: int,
    budgets: Sequence[int],
) -> list[dict[str, Any]]:
    """The needle set: how many numbers are found, and how many answers are those of the uncompressed tier."""
    methods = [
        TierMethod("int2", budget, way, tier_dtype) for budget in budgets for way in needle.WAYS for tier_dtype in NAMES
    ]
    rows: dict[tuple[int, TierMethod], dict[str, Any]] = {}
    for length in lengths:
        for sample in range(depths):
            case = needle.run_case(model, tokenizer, length, sample / depths, needle.FIRST_SEED + sample, methods)
            found = dict(zip(methods, case[1:], strict=True))
            for method, result in found.items():
                plain = found[TierMethod(method.index, method.budget, method.way)]
                start = {"samples": 0, "found": 0, "unchanged": 0, "equal_dense": 0}
                row = rows.setdefault((length, method), start)
                row["samples"] += 1
                row["found"] += result.found
                row["unchanged"] += result.answer == plain.answer
                row["equal_dense"] += result.equal_dense
    return [
        {"length": length, "budget": method.budget, "way": method.way, "tier": NAMES[method.tier_dtype]} | row
        for (length, method), row in rows.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    transformers_logging.disable_progress_bar()
    try:
        model, tokenizer = load_model(parsed.model, torch.float32, pick_device(parsed.device))
    except (ValueError, ModuleNotFoundError) as error:
        print(f"eval.quality.tiers: {error}", file=sys.stderr)
        return 2
    rows, sizes = logits(model, tokenizer, parsed.length, parsed.new_tokens, parsed.passages, parsed.budget)
    report = {
        "environment": describe_environment(model, parsed.model),
        "arguments": {name: value for name, value in vars(parsed).items() if name != "out"},
        "bytes": sizes,
        "logits": rows,
        "answers": answers(model, tokenizer, parsed.lengths, parsed.depths, parsed.budgets),
    }
    written = json.dumps(report, indent=2) + "\n"
    if parsed.out is None:
        print(written)
    else:
        parsed.out.write_text(written, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    def numbers(words: str) -> list[int]:
        return [int(part) for part in words.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m eval.quality.tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--length", type=int, default=4096, metavar="N", help="tokens before those whose logits are compared"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=48, metavar="N", help="of each passage (default: %(default)s)"
    )
    parser.add_argument("--passages", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=512, metavar="N", help="for logits (default: %(default)s)")
    parser.add_argument("--lengths", type=numbers, default=[1024, 4096], metavar="N,N", help="of the needle set")
    parser.add_argument("--depths", type=int, default=5, metavar="N", help="of the needle set (default: %(default)s)")
    parser.add_argument("--budgets", type=numbers, default=[512, 128], metavar="N,N", help="of the needle set")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the results; else they are printed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
