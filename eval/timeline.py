"""What each layer of a cache found, fetched and waited for in each step, what it wanted over time, and where its bytes lie.

    recorder = Recorder(cache)
    model.generate(**inputs, past_key_values=cache, stopping_criteria=[recorder])
    recorder.timeline()

`eval.plots_cache` draws it. `python -m eval.timeline` records the packaged model for the docs, into
eval/bench/results/timeline.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria

from oasis_cache import LayerStats, OasisCache, OasisStats, StepTrace
from oasis_cache.layer import OasisLayer

RESULTS = Path(__file__).resolve().parent / "bench" / "results" / "timeline.json"
FOUND = ("in_slots", "staged", "late", "fetched")
PARTS = ("dense buffer", "slots", "window", "staging", "index")  # on the device
SPANS = (1, 4, 16)


@dataclass(frozen=True)
class Timeline:
    """The sparse steps of a cache, layer by layer. Lists are [steps] or [steps][layers]; blocks are summed over rows and KV heads.

    Attributes:
        layers: Numbers of the layers in the model.
        context_tokens: Tokens in the cache after each step.
        in_slots: Wanted blocks that were in slots.
        staged: Those that were on the device beside the slots: prefetched, or out of the selection only lately.
        late: Those that were prefetched and had not arrived, so that the step waited for them.
        fetched: Those that were absent, so that the step fetched them.
        bytes_fetched: Bytes from the host tier, prefetches of the step included.
        stall_seconds: Time that the host waited for blocks.
    """

    layers: list[int]
    context_tokens: list[int]
    in_slots: list[list[int]]
    staged: list[list[int]]
    late: list[list[int]]
    fetched: list[list[int]]
    bytes_fetched: list[list[int]]
    stall_seconds: list[list[float]]

    def by_step(self, name: str) -> list[float]:
        """One of the lists [steps][layers], summed over layers."""
        return [sum(row) for row in getattr(self, name)]


class Recorder(StoppingCriteria):
    """Keeps `cache.stats()` of every forward of `generate`, and stops nothing.

    For models called by hand: `record()` once before the steps of interest, and after each.
    """

    def __init__(self, cache: OasisCache) -> None:
        self.cache = cache
        self.snapshots: list[OasisStats] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.record()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def record(self) -> None:
        """Keep what the cache reports now."""
        self.snapshots.append(self.cache.stats())

    def timeline(self) -> Timeline:
        """The forwards that were sparse steps.

        Raises:
            ValueError: There was none between two snapshots.
        """
        pairs = [
            (before, after)
            for before, after in zip(self.snapshots, self.snapshots[1:], strict=False)
            if after.sparse_steps > before.sparse_steps
        ]
        if not pairs:
            raise ValueError(
                f"no sparse step between {len(self.snapshots)} snapshots: the context is within the budget, or generate had no "
                "stopping_criteria=[recorder]"
            )
        steps = [
            [_difference(*layers) for layers in zip(before.layers, after.layers, strict=True)]
            for before, after in pairs
        ]
        return Timeline(
            [layer.layer for layer in pairs[0][1].layers],
            [after.context_tokens for _, after in pairs],
            *(
                [[layer[name] for layer in step] for step in steps]
                for name in (*FOUND, "bytes_fetched", "stall_seconds")
            ),
        )


def _difference(before: LayerStats, after: LayerStats) -> dict[str, Any]:
    """What a layer did between two snapshots."""
    names = ("hits", "misses", "spare_hits", "late", "bytes_fetched", "stall_seconds")
    new = {name: getattr(after, name) - getattr(before, name) for name in names}
    staged = new["spare_hits"] - new["late"]
    found = (new["hits"] - staged, staged, new["late"], new["misses"] - new["late"])
    return {**new, **dict(zip(FOUND, found, strict=True))}


def working_set(trace: Mapping[int, Sequence[StepTrace]], spans: Sequence[int] = SPANS) -> dict[str, list[float]]:
    """Distinct blocks that a KV head selected within its last steps (Denning's working set), mean over layers, rows and heads.

    Args:
        trace: `cache.trace` of a cache with `trace=True`.
        spans: Numbers of steps to look back over.

    Returns:
        By name, a number per step: "last k" for each of `spans`, "all" for all steps so far, and "blocks" that there were to
        select from, before the window.

    Raises:
        ValueError: The trace is empty.
    """
    if not trace:
        raise ValueError("the trace is empty: the cache needs trace=True and a sparse step")
    steps = min(len(layer) for layer in trace.values())
    sizes: dict[str, list[float]] = {}
    for name, span in [(f"last {span}", span) for span in spans] + [("all", steps)]:
        sizes[name] = [
            sum(_distinct(layer[max(0, step + 1 - span) : step + 1]) for layer in trace.values()) / len(trace)
            for step in range(steps)
        ]
    sizes["blocks"] = [float(step.window_block) for step in next(iter(trace.values()))[:steps]]
    return sizes


def _distinct(steps: Sequence[StepTrace]) -> float:
    """Distinct blocks over some steps of one layer, mean over batch rows and KV heads."""
    together = torch.cat([step.selected for step in steps], dim=-1).sort(dim=-1).values  # [batch, kv_heads, entries]
    new = torch.ones_like(together, dtype=torch.bool)
    new[..., 1:] = together[..., 1:] != together[..., :-1]
    return float((new & (together >= 0)).sum(-1).float().mean())


def bytes_by_tier(cache: OasisCache) -> dict[str, int]:
    """Where a cache's bytes lie now: its tokens, the parts on the device (`PARTS`), "host", "disk", and "dense", what it would
    take to hold all of it on the device. Tables of slots are counted with the slots, layers of transformers' own left out."""
    layers = [layer for layer in cache.layers if isinstance(layer, OasisLayer)]
    parts = dict.fromkeys(PARTS, 0)
    dense = 0
    for layer in layers:
        layer.settle()
        dense += layer.get_seq_length() * layer.shape.batch * layer.shape.token_bytes if layer.shape is not None else 0
        parts["index"] += layer.index_bytes
        held = layer.working_set
        if held is None:
            parts["dense buffer"] += layer.device_bytes
            continue
        window, staging = held.kv.nbytes - held.slots.nbytes, held.staging.nbytes
        parts["window"] += window
        parts["staging"] += staging
        parts["slots"] += layer.device_bytes - window - staging
    stats = cache.stats()
    return {
        "context_tokens": stats.context_tokens,
        **parts,
        "host": stats.host_bytes,
        "disk": stats.disk_bytes,
        "dense": dense,
    }


def record_steps(context: int, new_tokens: int, budget: int, share: int, directory: str) -> dict[str, Any]:
    """A number asked for behind a text, with the part `1 / share` of the KV in host memory and the rest on disk."""
    from oasis_cache.haystack import hide_number
    from oasis_cache.packaged import load_model

    model, tokenizer = load_model()
    task = hide_number(tokenizer, num_tokens=context, depth=0.5, seed=5)
    sizes = model.config
    kv_bytes = 2 * 4 * context * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    options = {"budget": budget, "spill": directory, "max_host_bytes": kv_bytes // share}
    with OasisCache(model_config=sizes, trace=True, **options) as cache:
        recorder = Recorder(cache)
        output = model.generate(
            task.prompt_ids,
            attention_mask=torch.ones_like(task.prompt_ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=[recorder],
        )
        return {
            "budget": budget,
            "block_size": cache.config.block_size,
            "recent_blocks": cache.config.recent_blocks,
            "host_share": 1 / share,
            "found": task.found_in(tokenizer.decode(output[0, context:])),
            "hit_rate": cache.stats().hit_rate,
            "timeline": asdict(recorder.timeline()),
            "working_set": working_set(cache.trace),
        }


def record_bytes(contexts: Sequence[int], budget: int, max_host_bytes: int, directory: str) -> dict[str, Any]:
    """Bytes by tier of a cache of the packaged model's shape in bfloat16, as random keys and values fill it."""
    from transformers import AutoConfig

    from oasis_cache.packaged import packaged_model_dir

    sizes = AutoConfig.from_pretrained(packaged_model_dir())
    generator = torch.Generator().manual_seed(0)
    rows = []
    options = {"budget": budget, "spill": directory, "max_host_bytes": max_host_bytes}
    with OasisCache(model_config=sizes, **options) as cache:
        for context in contexts:
            for layer_idx in range(sizes.num_hidden_layers):
                shape = (
                    1,
                    sizes.num_key_value_heads,
                    context - cache.layers[layer_idx].get_seq_length(),
                    sizes.head_dim,
                )
                new = [torch.randn(shape, generator=generator).bfloat16() for _ in ("keys", "values")]
                cache.update(*new, layer_idx)
            rows.append(bytes_by_tier(cache))
    return {"budget": budget, "max_host_bytes": max_host_bytes, "dtype": "bfloat16", "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    from eval.bench.gpu.ledger import environment

    parser = argparse.ArgumentParser(
        prog="python -m eval.timeline", description="Record the packaged model for the docs."
    )
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=33)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        recorded = {
            **environment("cpu"),
            "model": "SmolLM2-135M-Instruct",
            "steps": record_steps(options.context, options.new_tokens, 512, 8, directory),
            "bytes": record_bytes([1024 * 2**power for power in range(6)], 2048, 256 << 20, directory),
        }
    options.out.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
