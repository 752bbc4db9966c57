"""A batch of questions about texts of different lengths, decoded with drafts.

Each forward carries, for every text, its newest token and guesses of what follows. They come from the texts themselves (prompt
lookup), and show the cache which blocks the next step will want.

    python examples/lookahead_batch.py
    python examples/lookahead_batch.py --context 4000 --questions 4 --drafts 6
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.haystack import hide_number
from oasis_cache.lookahead import LookaheadDecoding, PromptLookupDrafter
from oasis_cache.packaged import PACKAGED, load_model


def left_padded(rows: list[torch.Tensor], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Rows [1, tokens] of different lengths as `input_ids` and `attention_mask`, int64 [batch, longest]."""
    longest = max(row.shape[1] for row in rows)
    pads = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=pad_token_id) for row in rows]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]  # 0: padding
    return {"input_ids": torch.cat(pads), "attention_mask": torch.cat(masks)}


def answer(options: argparse.Namespace) -> dict[str, Any]:
    """Ask all questions at once."""
    model, tokenizer = load_model(options.model)
    lengths = [options.context - 100 * number for number in range(options.questions)]
    tasks = [hide_number(tokenizer, length, depth=0.5, seed=seed) for seed, length in enumerate(lengths, 5)]
    inputs = left_padded([task.prompt_ids for task in tasks], tokenizer.pad_token_id)
    decoding = LookaheadDecoding(PromptLookupDrafter(), num_drafts=options.drafts)
    with OasisCache(model_config=model.config, budget=options.budget) as cache:
        output = model.generate(
            **inputs,
            custom_generate=decoding,
            max_new_tokens=options.new_tokens,
            do_sample=False,
            **cache_argument(model, cache),
        )
        stats = cache.stats()
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    report = decoding.report
    return {
        "answers": [{"number": task.number, "answer": text} for task, text in zip(tasks, texts, strict=True)],
        "found": sum(task.found_in(text) for task, text in zip(tasks, texts, strict=True)),
        "forwards": report.forwards,
        "drafted": report.drafted,
        "accepted": report.accepted,
        "new_tokens": report.tokens,
        "sparse_steps": stats.sparse_steps,
        "hit_rate": stats.hit_rate,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2000, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--drafts", type=int, default=4, help="guesses per forward (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write a report there")
    options = parser.parse_args(arguments)
    transformers_logging.disable_progress_bar()
    report = answer(options)
    for each in report["answers"]:
        print(f"{each['number']}: {each['answer']!r}")
    print(
        f"{report['found']} of {options.questions} numbers found; {report['new_tokens']} tokens in {report['forwards']} forwards, "
        f"{report['accepted']} of {report['drafted']} drafts kept"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
