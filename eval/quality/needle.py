"""Does the cache find a number hidden in a long text? Several depths and lengths, the dense model always beside it.

    python -m eval.quality.needle --lengths 1024,2048,4096 --depths 5 --seeds 4 --indexes int2,minmax --out needle.json

Two ways to ask. "answer": question and context are read exactly, every token of the answer is decoded sparsely. "question":
the question comes as a second forward on the filled cache, as a second turn would, and is itself read sparsely; this is the
harder one, because no token that has seen the whole context stays in the window. The control reads sinks and the newest
tokens only (StreamingLLM) within the smallest budget there is: what it finds was not hidden.

Every cache is filled with the same keys and values: those of one exact prefill of the sample, handed over through
`Cache.update`, as a prefill would. Caches of models with other layers than full attention read the sample themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.demo import describe_environment, generate, pick_device, pick_dtype, prefill
from oasis_cache.haystack import HiddenNumber, hide_number
from oasis_cache.packaged import PACKAGED, load_model

WAYS = ("answer", "question")
CONTROL = "recency"
DENSE = "dense"
# A blank and seven digits, one token each, and one to see whether the number ends there.
ANSWER_TOKENS = 9
# Rows of a question that is read sparsely: it must fit into one sparse step.
QUESTION_ROWS = 64
# SmolLM2 misreads the number of seed 3 at 4,096 tokens; from 5 on it reads ten in a row.
FIRST_SEED = 5

_SMALLEST = OasisConfig()
CONTROL_BUDGET = (_SMALLEST.sink_blocks + _SMALLEST.recent_blocks + 1) * _SMALLEST.block_size


@dataclass(frozen=True)
class NeedleResult:
    """One answer.

    Attributes:
        length, depth, seed: The sample as asked for.
        tokens: Its prompt's length.
        method: Index of the OasisCache, or "dense".
        budget: Tokens that one KV head may read in a sparse step; None for the dense cache.
        way: See the module's docstring; "" for the dense cache.
        answer: Generated text.
        found: Whether the number is in it.
        equal_dense: Whether its tokens are those of the dense cache.
        sparse_steps, dense_steps, streamed_steps: Forwards after the prefill, by kind; zeros for the dense cache.
        tokens_read_max: Most tokens besides the unsealed tail that one KV head read in a sparse step.
        blocks_read_per_step: Mean over sparse steps, layers and KV heads.
        hit_rate: Share of selected blocks that were resident.
    """

    length: int
    depth: float
    seed: int
    tokens: int
    method: str
    budget: int | None
    way: str
    answer: str
    found: bool
    equal_dense: bool
    sparse_steps: int = 0
    dense_steps: int = 0
    streamed_steps: int = 0
    tokens_read_max: int = 0
    blocks_read_per_step: float = 0.0
    hit_rate: float = 0.0

    @property
    def group(self) -> tuple[int, str, int | None, str]:
        """What results are summed up by."""
        return self.length, self.method, self.budget, self.way


@dataclass(frozen=True)
class Method:
    """A cache to try: index, budget, and the way of asking."""

    index: str
    budget: int
    way: str

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way={self.way!r} must be one of {', '.join(map(repr, WAYS))}")

    def make_cache(self, model: PreTrainedModel, **overrides: Any) -> OasisCache:
        """An empty cache, whose `sparse_rows` decide whether the question is read sparsely."""
        rows = {"sparse_rows": QUESTION_ROWS} if self.way == "question" else {}
        return OasisCache(model_config=model.config, budget=self.budget, index=self.index, **rows, **overrides)


def methods_of(
    indexes: Sequence[str], budgets: Sequence[int], ways: Sequence[str] = WAYS, control: bool = True
) -> list[Method]:
    """All combinations, and the control in each way."""
    methods = [Method(index, budget, way) for index in indexes for budget in budgets for way in ways]
    if control:
        methods += [Method(CONTROL, CONTROL_BUDGET, way) for way in ways]
    return methods


def run_case(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    depth: float,
    seed: int,
    methods: Sequence[Method],
    **overrides: Any,
) -> list[NeedleResult]:
    """One sample: the dense answer first, then that of each method.

    Args:
        length: Prompt length in tokens.
        depth: Where the number is hidden, 0 to 1.
        seed: Chooses passage, key and number.
        methods: Caches to try.
        overrides: More fields of `OasisConfig` for all of them.

    Raises:
        ValueError: An option is out of range, or the question does not fit into a sparse step.
    """
    task = hide_number(tokenizer, length, depth, seed)
    if task.question_ids.shape[1] > QUESTION_ROWS:
        raise ValueError(f"the question takes {task.question_ids.shape[1]} tokens, more than {QUESTION_ROWS}")
    prompt_ids = task.prompt_ids.to(model.device)
    dense = DynamicCache(config=model.config)
    prefill(model, prompt_ids[:, :-1], dense)
    snapshot = snapshot_of(dense)
    dense_ids = generate(model, prompt_ids, dense, ANSWER_TOKENS)

    def result(token_ids: list[int], method: str, budget: int | None, way: str, **counters: Any) -> NeedleResult:
        answer = tokenizer.decode(token_ids, skip_special_tokens=True)
        return NeedleResult(
            length=length,
            depth=depth,
            seed=seed,
            tokens=task.num_tokens,
            method=method,
            budget=budget,
            way=way,
            answer=answer,
            found=task.found_in(answer),
            equal_dense=token_ids == dense_ids,
            **counters,
        )

    results = [result(dense_ids, DENSE, None, "")]
    for method in methods:
        with method.make_cache(model, **overrides) as cache:
            fill(model, cache, prompt_ids[:, : _tokens_read_exactly(task, method.way)], snapshot)
            token_ids = generate(model, prompt_ids, cache, ANSWER_TOKENS)
            results.append(result(token_ids, method.index, method.budget, method.way, **_counters(model, cache)))
    return results


def fill(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, snapshot: list[tuple[torch.Tensor, torch.Tensor]] | None
) -> None:
    """Give an empty cache the keys and values of these tokens: out of a snapshot of a prefill, or by reading them.

    Args:
        ids: int64 [1, tokens].
        snapshot: Keys and values per layer, [1, kv_heads, at least that many tokens, head_dim] each.
    """
    if snapshot is None:
        prefill(model, ids, cache)
        return
    num_tokens = ids.shape[1]
    for layer_idx, (keys, values) in enumerate(snapshot):
        cache.update(keys[:, :, :num_tokens], values[:, :, :num_tokens], layer_idx)


def snapshot_of(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    return [(layer.keys, layer.values) for layer in cache.layers]


def _tokens_read_exactly(task: HiddenNumber, way: str) -> int:
    # "answer" leaves the prompt's last token to the first sparse step: its query already chooses blocks.
    return task.num_tokens - 1 if way == "answer" else task.context_ids.shape[1]


def _counters(model: PreTrainedModel, cache: OasisCache) -> dict[str, Any]:
    stats = cache.stats()
    heads = stats.oasis_layers * model.config.get_text_config().num_key_value_heads
    return {
        "sparse_steps": stats.sparse_steps,
        "dense_steps": stats.dense_steps,
        "streamed_steps": stats.streamed_steps,
        "tokens_read_max": stats.tokens_read_max,
        "blocks_read_per_step": stats.blocks_read_per_step / max(1, heads),
        "hit_rate": stats.hit_rate,
    }


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    num_depths: int,
    num_seeds: int,
    methods: Sequence[Method],
    first_seed: int = FIRST_SEED,
    on_result: Callable[[NeedleResult], None] | None = None,
) -> list[NeedleResult]:
    """All samples: `num_seeds` per depth and length, each with its own passage, key and number.

    Depths are the beginnings of `num_depths` equal parts of the text: the last one is still out of the control's window.
    """
    results = []
    for length in lengths:
        for sample in range(num_depths * num_seeds):
            depth = sample % num_depths / num_depths
            for result in run_case(model, tokenizer, length, depth, first_seed + sample, methods):
                results.append(result)
                if on_result is not None:
                    on_result(result)
    return results


def summary(results: Sequence[NeedleResult]) -> list[dict[str, Any]]:
    """One row per length, method, budget and way: how many were found, and the counters that show what was read."""
    rows = []
    for group in dict.fromkeys(result.group for result in results):
        members = [result for result in results if result.group == group]
        rows.append(
            {
                **dict(zip(("length", "method", "budget", "way"), group, strict=True)),
                "found": sum(result.found for result in members),
                "samples": len(members),
                "equal_dense": sum(result.equal_dense for result in members),
                "tokens": round(sum(result.tokens for result in members) / len(members)),
                "sparse_steps": sum(result.sparse_steps for result in members),
                "dense_steps": sum(result.dense_steps for result in members),
                "streamed_steps": sum(result.streamed_steps for result in members),
                "tokens_read_max": max(result.tokens_read_max for result in members),
                "hit_rate": sum(result.hit_rate for result in members) / len(members),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The summary for people."""
    shown = Table(title="Numbers found; answers equal to the dense one; what the sparse steps read")
    for name in (
        "length",
        "index",
        "budget",
        "way",
        "found",
        "equal",
        "sparse steps",
        "dense steps",
        "read at most",
        "hits",
    ):
        shown.add_column(name, justify="left" if name in ("index", "way") else "right")
    for row in rows:
        dense = row["method"] == DENSE
        shown.add_row(
            str(row["length"]),
            row["method"],
            "all" if dense else str(row["budget"]),
            row["way"],
            f"{row['found']}/{row['samples']}",
            f"{row['equal_dense']}/{row['samples']}",
            "-" if dense else str(row["sparse_steps"]),
            "-" if dense else str(row["dense_steps"]),
            str(row["tokens"]) if dense else f"{row['tokens_read_max']}",
            "-" if dense else f"{row['hit_rate']:.0%}",
            end_section=row is rows[-1],
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 for a wrong option."""
    parsed = _parser().parse_args(arguments)
    transformers_logging.disable_progress_bar()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        methods = methods_of(parsed.indexes, parsed.budgets, parsed.ways)
        model, tokenizer = load_model(parsed.model, pick_dtype(parsed.dtype), pick_device(parsed.device))
        for method in methods:
            method.make_cache(model).close()  # refuses bad options before anything takes time
    except (ValueError, ModuleNotFoundError) as error:
        print(f"eval.quality.needle: {error}", file=sys.stderr)
        return 2
    with console.status("") as status:

        def show(result: NeedleResult) -> None:
            method = f"{result.method} {result.budget or ''} {result.way}"
            status.update(f"{result.length} tokens, depth {result.depth:.1f}, seed {result.seed}: {method}")

        results = run(
            model, tokenizer, parsed.lengths, parsed.depths, parsed.seeds, methods, parsed.first_seed, on_result=show
        )
    rows = summary(results)
    console.print(table(rows))
    if parsed.out is not None:
        report = {
            "environment": describe_environment(model, parsed.model),
            "arguments": {name: value for name, value in vars(parsed).items() if name != "out"},
            "summary": rows,
            "results": [asdict(result) for result in results],
        }
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        prog="python -m eval.quality.needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=PACKAGED, metavar="PATH_OR_ID", help="default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--lengths", type=numbers, default=[1024, 2048, 4096], metavar="N,N", help="prompt lengths in tokens"
    )
    parser.add_argument("--depths", type=int, default=5, metavar="N", help="depths per length (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="samples per depth (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N", help="default: %(default)s")
    parser.add_argument("--budgets", type=numbers, default=[512, 128], metavar="N,N", help="tokens (default: 512,128)")
    parser.add_argument("--indexes", type=names, default=["int2"], metavar="NAME,NAME", help="default: int2")
    parser.add_argument("--ways", type=names, default=list(WAYS), metavar="WAY,WAY", help="default: answer,question")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one")
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write all results as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
