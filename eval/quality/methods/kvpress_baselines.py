"""kvpress's methods (github.com/NVIDIA/kvpress) on the same samples and within the same budget: `make kvpress-baselines`.

kvpress 0.5 needs transformers below 5.3, which oasis_cache does not run on. So this file is a script with two halves: `export`, in
the project's environment, writes the samples of a run as token ids; `run`, in an environment with kvpress and nothing of this
project, answers them. A press drops keys and values once, as the prompt is read: those that it keeps are the budget, and every
later token comes on top, as the unsealed newest ones do in an OasisCache.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTROL = "kvpress-none"  # drops nothing: what it loses would be this script's fault
PRESSES = {
    "kvpress-snapkv": "SnapKVPress",
    "kvpress-expected": "ExpectedAttentionPress",
    "kvpress-knorm": "KnormPress",
    CONTROL: "KnormPress",
}


def export(options: argparse.Namespace) -> int:
    """Samples of one family and length as JSON lines."""
    from eval.quality.runner import budget_of
    from eval.quality.tasks import FAMILIES
    from oasis_cache.packaged import load_model

    _, tokenizer = load_model()
    with options.samples.open("w", encoding="utf-8") as file:
        for sample in FAMILIES[options.family](tokenizer, options.length, options.contexts):
            row = {
                "task": sample.task,
                "length": sample.length,
                "name": sample.name,
                "context": sample.context,
                "way": sample.way,
                "depth": sample.depth,
                "share": options.share,
                "budget": budget_of(sample.length, options.share),
                "exact_ids": sample.exact_ids,
                "question_ids": sample.turns[0].question_ids,
                "references": sample.turns[0].references,
                "new_tokens": sample.turns[0].new_tokens,
            }
            if len(sample.turns) == 1:  # what a press dropped for one question is gone for the next
                file.write(json.dumps(row) + "\n")
    return 0


def answer(model: Any, cache: Any, fed: Sequence[int], position: int, new_tokens: int) -> list[int]:
    """Greedy tokens behind a compressed cache: `fed` stands at `position` of the text, wherever the cache ends."""
    import torch

    generated: list[int] = []
    fed = list(fed)
    while True:
        ids = torch.tensor([fed])
        positions = torch.arange(position, position + len(fed)).unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[0, -1]
        position += len(fed)
        generated.append(int(logits.argmax()))
        if len(generated) == new_tokens:
            return generated
        fed = generated[-1:]


def run(options: argparse.Namespace) -> int:
    """Answer exported samples with each press, one line a sample and press."""
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    rows = [json.loads(line) for line in options.samples.read_text(encoding="utf-8").splitlines()]
    done = set()
    if options.out.exists():
        held = (json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines())
        done = {(row["task"], row["length"], row["name"], row["way"], row["method"], row["share"]) for row in held}
    held_for, filled = None, None
    for method in options.presses.split(","):
        for row in rows:
            if (row["task"], row["length"], row["name"], row["way"], method, row["share"]) in done:
                continue
            started = time.perf_counter()
            exact = row["exact_ids"]
            if held_for != (method, exact):
                dropped = 0.0 if method == CONTROL else 1 - row["budget"] / len(exact)
                press = getattr(kvpress, PRESSES[method])(compression_ratio=dropped)
                filled = DynamicCache()
                with torch.no_grad(), press(model):
                    model.model(input_ids=torch.tensor([exact]), past_key_values=filled, use_cache=True)
                held_for = (method, exact)
            kept = filled.get_seq_length()
            first = row["question_ids"][-1:] if row["way"] == "answer" else row["question_ids"]
            ids = answer(model, copy.deepcopy(filled), first, len(exact), row["new_tokens"])
            text = tokenizer.decode(ids, skip_special_tokens=True)
            found = sum(reference.lower() in text.lower() for reference in row["references"])
            line = {
                name: row[name] for name in ("task", "length", "name", "context", "way", "depth", "share", "budget")
            }
            line |= {"method": method, "answers": [text], "scores": [found / len(row["references"])]}
            line["counters"] = {"sparse_steps": len(ids), "other_steps": 0, "tokens_read": float(kept)}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(method, row["name"], row["way"], repr(text), f"{time.perf_counter() - started:.0f} s", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export")
    exporting.add_argument("--family", default="needle")
    exporting.add_argument("--length", type=int, default=1024)
    exporting.add_argument("--contexts", type=int, default=5)
    exporting.add_argument("--share", type=float, default=1 / 8)
    running = commands.add_parser("run")
    running.add_argument("--model", required=True, metavar="FOLDER")
    running.add_argument("--presses", default=",".join(PRESSES), help=f"of {', '.join(PRESSES)}")
    running.add_argument("--out", type=Path, required=True, metavar="FILE")
    for command in (exporting, running):
        command.add_argument("--samples", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    return {"export": export, "run": run}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
