"""What the survival tests share.

They hold what users of other KV caches reported as broken, one case each; a test's id names its case. Caches are
compared with `DynamicCache`, or where they are sparse with the rules of tests/oracle.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.blocks import as_blocks
from oasis_cache.layer import OasisLayer
from oasis_cache.store import HostMemory
from tests import models, oracle

TOLERANCE = 1e-5
EXACT = OasisConfig(budget=1024)
"""Every context of these tests is within the budget."""
SPARSE = OasisConfig(budget=40, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)
"""Sink, two retrieved and two recent blocks of 8; contexts of more than 40 tokens are sparse."""
SIMULATED = OasisConfig(**{**SPARSE.__dict__, "engine": "simulated", "lookahead": "draft", "max_fetch": 2})
"""The same with prefetching, on an engine that lands copies as late as it may."""
CONFIGS = pytest.mark.parametrize("config", [EXACT, SPARSE, SIMULATED], ids=["exact", "sparse", "simulated"])


def case(*numbers: int) -> pytest.MarkDecorator:
    """Puts case numbers into a test's id, as in "case-17"."""
    ids = ["case-" + "-".join(map(str, numbers))]
    return pytest.mark.parametrize("case", [numbers], ids=ids, indirect=True)


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def oasis_layers(cache: OasisCache) -> list[OasisLayer]:
    return [layer for layer in cache.layers if isinstance(layer, OasisLayer)]


def tokens(out: Any) -> torch.Tensor:
    return out.sequences


def used_cache(out: Any) -> Any:
    """The cache of generate's output object."""
    return out["cache"] if "cache" in out else out["past_key_values"]


def greedy(model: PreTrainedModel, ids: torch.Tensor, cache: Any, count: int, **arguments: Any) -> torch.Tensor:
    """[batch, tokens] sequences of greedy generation."""
    return models.generate(model, ids, cache, count, **arguments).sequences


def by_rules(name: str, config: OasisConfig, ids: torch.Tensor, count: int, **arguments: Any) -> Any:
    """What the stated rules of sparse attention generate, computed from complete keys and values."""
    truth = models.build(name, oracle.NAME)
    cache = dynamic(truth)
    ours = OasisCache(config, model_config=truth.config).layers
    sparse = frozenset(number for number, layer in enumerate(ours) if isinstance(layer, OasisLayer))
    with oracle.rules(config, sparse, models.eager_only(name)):
        return models.generate(truth, ids, cache, count, **arguments)


def assert_same_content(cache: OasisCache, complete: DynamicCache) -> None:
    """Gathered keys and values equal those of `complete` bit for bit, and summaries equal ones made of them."""
    assert cache.get_seq_length() == complete.get_seq_length()
    for layer, expected in zip(cache.layers, complete.layers, strict=True):
        if not isinstance(layer, OasisLayer):
            continue
        keys, values = layer.dense_keys_and_values()
        assert torch.equal(keys, expected.keys)
        assert torch.equal(values, expected.values)
        assert_summaries(layer)
        layer.check_integrity()


def assert_summaries(layer: OasisLayer) -> None:
    """The index of a paged layer is the one that its complete keys make."""
    layer.crop(0)  # stores what a streamed forward left pending
    if layer.working_set is None:
        return
    keys = layer.dense_kv()[..., : layer.shape.query_dim]
    sealed = layer.store.num_blocks
    blocks = as_blocks(keys[:, :, : sealed * layer.config.block_size], layer.config.block_size)
    for name, summary in layer.index.summarise(blocks).items():
        assert torch.equal(layer.index.held(name, sealed), summary), name


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    error = models.relative_error(out, expected)
    assert error < tolerance, f"relative error {error:.2e}"


def selections(cache: OasisCache) -> list[list[tuple]]:
    """What each layer's sparse steps read, with `trace=True`: (context, window block, selected blocks) per step."""
    return [
        [(step.context_tokens, step.window_block, step.selected.tolist()) for step in layer.trace]
        for layer in oasis_layers(cache)
    ]


def all_returned(memory: HostMemory) -> bool:
    """Whether the host tier's memory was given back; a copy in flight keeps its pages until it has ended, which is waited for."""
    end = time.monotonic() + 10
    while memory.reserved_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return memory.reserved_bytes == 0
