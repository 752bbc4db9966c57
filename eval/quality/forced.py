"""How near sparse steps come to dense ones when both are fed the same tokens: what is lost, and to what.

    python -m eval.quality.forced --length 4096 --contexts 12 --out eval/quality/results/forced.json

Each sample is answered by the dense cache. Its tokens are then fed to every variant, whatever the variant itself would have said,
so that one wrong token does not spoil those behind it, and each step's distribution is held against the dense one. That separates
what the budget costs from what the index costs (`index="exact"`) more finely than right and wrong answers do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.quality.files import write_json
from eval.quality.methods.oasis import Oasis
from eval.quality.runner import SMALLEST_BUDGET, Snapshot, budget_of, extended, fill, forward, read_context
from eval.quality.samples import Sample
from eval.quality.tasks import FAMILIES
from oasis_cache.demo import describe_environment
from oasis_cache.packaged import PACKAGED, load_model

PROSE_CONTEXTS = 3


@dataclass(frozen=True)
class Variant:
    """A configuration, and its budget as a share of the context."""

    title: str
    share: float
    options: dict[str, Any]


VARIANTS = (
    Variant("default", 1 / 8, {}),
    Variant('index="exact"', 1 / 8, {"index": "exact"}),
    Variant("block_size=8", 1 / 8, {"block_size": 8}),
    Variant('index="minmax"', 1 / 8, {"index": "minmax"}),
    Variant("default", 1 / 4, {}),
    Variant('index="exact"', 1 / 4, {"index": "exact"}),
)


@dataclass(frozen=True)
class Step:
    """Tokens to feed, and what the dense cache makes of them.

    Attributes:
        turn: Number of the answer that the step belongs to.
        right: Whether the dense cache's answer is right; True for a text to go on with.
        log_probs: [vocabulary] float32, of the token behind those fed.
    """

    fed: tuple[int, ...]
    turn: int
    right: bool
    log_probs: torch.Tensor


@dataclass
class Nearness:
    """Sums over the steps of one variant and task.

    Attributes:
        tokens: Steps.
        divergence: Kullback-Leibler divergence from the dense distribution, nats, summed.
        same: Steps whose likeliest token is the dense one's.
        answers: Answers that the dense cache gets right.
        kept: Those of them of which the likeliest token is the same in every step.
        tokens_read_max: See `Counters.as_dict`.
    """

    title: str
    share: float
    task: str
    tokens: int = 0
    divergence: float = 0.0
    same: int = 0
    answers: int = 0
    kept: int = 0
    tokens_read_max: int = 0


def log_probs_behind(model: PreTrainedModel, cache: Cache, ids: Sequence[int]) -> torch.Tensor:
    """Of the token behind `ids`, which are fed: [vocabulary] float32."""
    return forward(model, cache, ids)[-1].float().log_softmax(-1)


def dense_steps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sample: Sample, snapshot: Snapshot | None
) -> list[Step]:
    """The sample on the dense cache: greedy answers, or the true continuation of a text."""
    cache = DynamicCache(config=model.config)
    fill(model, cache, sample, snapshot)

    if sample.target_ids:
        return [Step((token,), 0, True, log_probs_behind(model, cache, [token])) for token in sample.fed_ids]
    steps: list[Step] = []
    last: tuple[int, ...] = ()
    for number, turn in enumerate(sample.turns):
        ids, answer, mine = (*last, *sample.asked_ids(number)), [], []
        for _ in range(turn.new_tokens):
            log_probs = log_probs_behind(model, cache, ids)
            mine.append((ids, log_probs))
            answer.append(int(log_probs.argmax()))
            ids = (answer[-1],)
        last = ids
        right = turn.score(tokenizer.decode(answer, skip_special_tokens=True)) == 1.0
        steps += [Step(tuple(fed), number, right, log_probs) for fed, log_probs in mine]
    return steps


def follow(
    model: PreTrainedModel,
    sample: Sample,
    snapshot: Snapshot | None,
    steps: Sequence[Step],
    variant: Variant,
    sums: Nearness,
) -> None:
    """Feed the steps to a variant and add to its sums.

    Raises:
        RuntimeError: A step was not sparse.
    """
    method = Oasis("forced", variant.title, "", **variant.options)
    same: dict[int, bool] = {}
    with method.session(model, budget_of(sample.length, variant.share), sample.sparse_rows) as (cache, counters):
        fill(model, cache, sample, snapshot)
        others = counters.as_dict()["other_steps"]  # a long text is filled in several forwards
        for step in steps:
            log_probs = log_probs_behind(model, cache, step.fed)
            sums.divergence += float((step.log_probs.exp() * (step.log_probs - log_probs)).sum())
            agrees = bool(step.log_probs.argmax() == log_probs.argmax())
            sums.same += agrees
            if step.right:
                same[step.turn] = same.get(step.turn, True) and agrees
        counted = counters.as_dict()
    if counted["other_steps"] != others or counted["sparse_steps"] != len(steps):
        raise RuntimeError(
            f"{sample.name}, {variant.title}: {counted['sparse_steps']} of {len(steps)} steps were sparse"
        )
    sums.tokens_read_max = max(sums.tokens_read_max, counted["tokens_read_max"])
    sums.tokens += len(steps)
    if not sample.target_ids:
        sums.answers += len(same)
        sums.kept += sum(same.values())


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    variants: Sequence[Variant] = VARIANTS,
) -> list[Nearness]:
    """A row for each task and variant; questions are read sparsely, so that all steps are sparse ones."""
    tasks = dict.fromkeys(sample.task for sample in samples)
    rows = {(task, number): Nearness(v.title, v.share, task) for task in tasks for number, v in enumerate(variants)}
    contexts: dict[str, Snapshot | None] = {}
    for sample in samples:
        if sample.context not in contexts:
            contexts = {sample.context: read_context(model, sample.context_ids)}
        snapshot = extended(model, contexts[sample.context], sample)
        steps = dense_steps(model, tokenizer, sample, snapshot)
        for number, variant in enumerate(variants):
            follow(model, sample, snapshot, steps, variant, rows[sample.task, number])
    return list(rows.values())


def draw(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """Lists of records, one number of several, and prose."""
    numbers = FAMILIES["numbers"](tokenizer, length, contexts)
    return [
        *FAMILIES["lookup"](tokenizer, length, contexts),
        *(sample for sample in numbers if sample.task == "multikey" and sample.way == "question"),
        *FAMILIES["prose"](tokenizer, length, min(contexts, PROSE_CONTEXTS)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.quality.forced", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--contexts", type=int, default=12, metavar="N", help="of each task (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.contexts < 1:
        parser.error(f"--contexts={options.contexts} must be at least 1")
    shortest = round(SMALLEST_BUDGET / min(variant.share for variant in VARIANTS))
    model, tokenizer = load_model(options.model)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or options.length
    if not shortest <= options.length <= longest:
        parser.error(f"--length={options.length} must be from {shortest} to {longest}, the positions of the model")
    rows = compare(model, tokenizer, draw(tokenizer, options.length, options.contexts))
    report = {
        "length": options.length,
        "contexts": options.contexts,
        "environment": describe_environment(model, options.model),
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, report)
    print(table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    """A line per variant, in markdown: divergence, agreement and answers kept, by task."""
    rows = report["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    heads = [
        f"{task}: {what}"
        for task in tasks
        for what in ("KL", "same token", *(["answers"] if any(r["answers"] for r in rows if r["task"] == task) else []))
    ]
    lines = ["| | budget | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
    for title, share in dict.fromkeys((row["title"], row["share"]) for row in rows):
        cells = []
        for row in rows:
            if (row["title"], row["share"]) != (title, share):
                continue
            cells += [f"{row['divergence'] / row['tokens']:.4f}", f"{row['same'] / row['tokens']:.1%}"]
            if row["answers"]:
                cells.append(f"{row['kept']}/{row['answers']}")
        name = title if title == "default" else f"`{title}`"
        lines.append(f"| {name} | 1/{round(1 / share)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
