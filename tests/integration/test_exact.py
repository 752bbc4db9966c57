"""Exactness: with a budget over the context, and in every streamed forward, OasisCache equals DynamicCache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from tests import models

pytestmark = pytest.mark.contract

TOLERANCE = 1e-5
NEW_TOKENS = 64
PROMPT_TOKENS = 50
PADS = (0, 7, 23)
CHUNK = 17
FULL_BUDGET = OasisConfig(budget=1024)
ALL = list(models.ARCHITECTURES)
SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=4, stream_tokens=24)
"""60 tokens at most are dense; a longer forward than 4 rows on more is streamed, 24 past tokens at a time."""


def implementations(name: str) -> list[str]:
    return ["eager"] if models.eager_only(name) else ["sdpa", "eager"]


CASES = [(name, attention) for name in ALL for attention in implementations(name)]


def call(batch: int, chunked: bool, lookup: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and generate arguments of one way to generate."""
    arguments: dict[str, Any] = {}
    if batch == 1:
        ids = models.prompt(PROMPT_TOKENS)
        ids[:, 30:42] = ids[:, 10:22]  # something for prompt lookup to find
    else:
        ids, arguments["attention_mask"] = models.left_padded(PROMPT_TOKENS, PADS)
    if chunked:
        arguments["prefill_chunk_size"] = CHUNK
    if lookup:
        arguments["prompt_lookup_num_tokens"] = 4
    return ids, arguments


def all_full_attention(cache: OasisCache, model) -> OasisCache:
    """The cache with OasisLayers only, as one that is driven by hand and knows no model."""
    cache.layers = [OasisLayer(cache.runtime) for _ in range(model.config.num_hidden_layers)]
    return cache


@functools.cache
def dense_generation(
    name: str, attention: str, batch: int, chunked: bool, lookup: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits [steps, batch, vocabulary] of DynamicCache."""
    model = models.build(name, attention)
    ids, arguments = call(batch, chunked, lookup)
    out = models.generate(model, ids, DynamicCache(config=model.config), NEW_TOKENS, **arguments)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("name", ALL)
def test_models_can_tell_old_tokens_lost(name):
    """The models of these tests notice when old keys are lost, and do not answer with one token over and over."""
    model = models.build(name)
    ids = models.prompt(90)
    whole, damaged = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = models.forward(model, ids, whole)[:, -1]
    models.forward(model, ids[:, :-1], damaged)
    full = [layer for layer in damaged.layers if type(layer) is DynamicLayer]
    assert full or name == "mistral-window"
    for layer in full:
        layer.keys[:, :, 10:40] = 0
    changed = models.relative_error(models.forward(model, ids[:, -1:], damaged)[:, -1], expected)
    assert changed > 100 * TOLERANCE if full else changed < TOLERANCE
    tokens = models.generate(model, ids, DynamicCache(config=model.config), NEW_TOKENS).sequences[0, 90:]
    assert tokens.unique().numel() >= 8


def assert_equals_dense(name, attention, batch, chunked, lookup, cache):
    tokens, logits = dense_generation(name, attention, batch, chunked, lookup)
    ids, arguments = call(batch, chunked, lookup)
    out = models.generate(models.build(name, attention), ids, cache, NEW_TOKENS, **arguments)
    assert torch.equal(out.sequences, tokens)
    assert models.relative_error(torch.stack(out.logits), logits) < TOLERANCE


WAYS = [
    pytest.param(1, False, False, id="one-shot"),
    pytest.param(1, True, False, id="chunked"),
    pytest.param(1, False, True, id="lookup"),
    pytest.param(1, True, True, id="chunked-lookup"),
    pytest.param(3, False, False, id="padded"),
    pytest.param(3, True, False, id="padded-chunked"),
]


@pytest.mark.parametrize(("batch", "chunked", "lookup"), WAYS)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_generation_with_full_budget_equals_dense(name, attention, batch, chunked, lookup):
    model = models.build(name, attention)
    if lookup and model._is_stateful:
        with pytest.raises(ValueError, match="stateful"):  # transformers refuses it, with any cache
            ids, arguments = call(batch, chunked, lookup)
            models.generate(model, ids, OasisCache(FULL_BUDGET, model_config=model.config), 4, **arguments)
        return
    cache = OasisCache(FULL_BUDGET, model_config=model.config)
    assert_equals_dense(name, attention, batch, chunked, lookup, cache)
    stats = cache.stats()
    assert stats.sparse_steps == stats.streamed_steps == stats.fallback_steps == 0
    assert stats.oasis_layers == sum(isinstance(layer, OasisLayer) for layer in cache.layers)
    assert (stats.steps > 1) == (stats.oasis_layers > 0)


@pytest.mark.parametrize(("batch", "chunked", "lookup"), WAYS)
@pytest.mark.parametrize("name", ALL)
def test_generation_without_model_config_equals_dense(name, batch, chunked, lookup):
    """The layer kinds are taken from the model that uses the cache."""
    attention = implementations(name)[0]
    model = models.build(name, attention)
    if lookup and model._is_stateful:
        pytest.skip("transformers refuses assisted decoding of recurrent models, as tested above")
    cache = OasisCache(FULL_BUDGET)
    assert_equals_dense(name, attention, batch, chunked, lookup, cache)
    assert [type(layer) for layer in cache.layers] == [
        type(layer) for layer in OasisCache(model_config=model.config).layers
    ]


@pytest.mark.parametrize(("batch", "chunked", "lookup"), WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_generation_with_every_layer_taken_for_full_attention_equals_dense(name, batch, chunked, lookup):
    attention = implementations(name)[0]
    cache = all_full_attention(OasisCache(FULL_BUDGET), models.build(name, attention))
    assert_equals_dense(name, attention, batch, chunked, lookup, cache)
    assert cache.stats().oasis_layers == 2 and cache.stats().dense_steps > 0


@pytest.mark.parametrize(
    ("name", "oasis_layers"),
    [
        ("llama", 2),
        ("mistral", 2),
        ("mistral-window", 0),
        ("gemma3", 1),
        ("gemma2", 1),
        ("gpt-oss", 1),
        ("deepseek-v3", 2),
        ("qwen3-next", 1),
    ],
)
def test_layer_kinds_follow_model_config(name, oasis_layers):
    model = models.build(name)
    cache = OasisCache(model_config=model.config)
    expected = DynamicCache(config=model.config).layers
    models.generate(model, models.prompt(20), cache, 2)
    stats = cache.stats()
    assert (stats.oasis_layers, stats.other_layers) == (oasis_layers, 2 - oasis_layers)
    for layer, dense in zip(cache.layers, expected, strict=True):
        assert isinstance(layer, OasisLayer) or type(layer) is type(dense)
    assert (stats.other_device_bytes > 0) == (oasis_layers < 2)


# --- Beyond the budget: streamed forwards are exact -----------------------------------------------------------------------

CHUNKS = [33, 29, 5, 40, 21, 12]
"""Prefill, then forwards that cross from dense (60 tokens at most) into paged and stay longer than `sparse_rows`."""


def assert_streams_exactly(model, cache, mask: torch.Tensor | None, chunks: Sequence[int] = CHUNKS) -> None:
    dense = DynamicCache(config=model.config)
    ids = models.prompt(sum(chunks), 1 if mask is None else mask.shape[0], seed=4)
    if mask is not None:
        ids = ids.masked_fill(mask == 0, models.PADDING)
    start = 0
    for count in chunks:
        part = slice(start, start + count)
        seen = None if mask is None else mask[:, : part.stop]
        expected = models.forward(model, ids[:, part], dense, seen)
        out = models.forward(model, ids[:, part], cache, seen)
        if mask is not None:
            out, expected = out[mask[:, part].bool()], expected[mask[:, part].bool()]
        assert models.relative_error(out, expected) < TOLERANCE
        start = part.stop
    stats = cache.stats()
    assert stats.streamed_steps == len(chunks) - 1 and stats.sparse_steps == stats.fallback_steps == 0
    for layer in cache.layers:
        if isinstance(layer, OasisLayer):
            layer.check_integrity()


FULL_ATTENTION = [(name, attention) for name, attention in CASES if name != "mistral-window"]


@pytest.mark.parametrize("padded", [False, True], ids=["one-row", "padded"])
@pytest.mark.parametrize(("name", "attention"), FULL_ATTENTION)
def test_streamed_forwards_equal_dense(name, attention, padded):
    model = models.build(name, attention)
    mask = models.left_padded(sum(CHUNKS), (0, 11, 41))[1] if padded else None
    assert_streams_exactly(model, OasisCache(SMALL, model_config=model.config), mask)


@pytest.mark.parametrize("padded", [False, True], ids=["one-row", "padded"])
@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "gemma2", "gpt-oss"])
def test_streamed_forwards_of_windowed_layers_taken_for_full_attention_keep_the_window(name, padded):
    """The window that the mask states holds although the cache keeps older tokens."""
    model = models.build(name, implementations(name)[0])
    mask = models.left_padded(sum(CHUNKS), (0, 11, 41))[1] if padded else None
    assert_streams_exactly(model, all_full_attention(OasisCache(SMALL), model), mask)


@pytest.mark.parametrize("stream_tokens", [1, 7, 8, 1000])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
def test_streamed_pieces_of_any_size_equal_dense(block_size, stream_tokens):
    model = models.build("llama", "sdpa")
    config = OasisConfig(
        budget=16 * block_size if block_size > 1 else 24,
        block_size=block_size,
        recent_blocks=2,
        sparse_rows=4,
        stream_tokens=stream_tokens,
    )
    first = config.dense_tokens - 2
    mask = models.left_padded(first + 3 * 9, (0, 5))[1]
    assert_streams_exactly(model, OasisCache(config), mask, (first, 9, 9, 9))


@pytest.mark.parametrize("ratio", [1, 3, 4])
def test_streamed_forwards_of_other_gqa_ratios_equal_dense(ratio):
    model = models.build(
        "llama", "sdpa", hidden_size=48, num_attention_heads=2 * ratio, num_key_value_heads=2, head_dim=16
    )
    assert_streams_exactly(model, OasisCache(SMALL), models.left_padded(sum(CHUNKS), (0, 11, 41))[1])


@pytest.fixture
def uncompiled():
    """flex_attention without its compiler, which the CPU build may not have."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # transformers refuses sinks in flex attention on the CPU
def test_flex_attention_streams_exactly(name, uncompiled):
    """flex_attention passes a BlockMask; on a filled cache it is cut into pieces as any other mask."""
    model = models.build(name, "flex_attention")
    mask = models.left_padded(sum(CHUNKS[:4]), (0, 11, 41))[1]
    assert_streams_exactly(model, OasisCache(SMALL, model_config=model.config), mask, CHUNKS[:4])


@pytest.mark.parametrize(("batch", "chunked", "lookup"), [(1, False, True), (3, True, False)])
def test_flex_attention_with_full_budget_equals_dense(batch, chunked, lookup, uncompiled, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "NEW_TOKENS", 12)
    dense_generation.cache_clear()
    assert_equals_dense("llama", "flex_attention", batch, chunked, lookup, OasisCache(FULL_BUDGET))
    dense_generation.cache_clear()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_forward_of_everything_is_exact_and_leaves_pages(attention):
    """A prefill far over the budget is computed by the model's own attention and stored as blocks."""
    model = models.build("llama", attention)
    cache, ids = OasisCache(SMALL), models.prompt(150)
    expected = models.forward(model, ids, DynamicCache(config=model.config))
    assert models.relative_error(models.forward(model, ids, cache), expected) < TOLERANCE
    assert cache.stats().prefill_steps == 1 and cache.stats().host_bytes > 0


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 5, 8])
def test_first_sparse_steps_past_the_budget_still_read_everything(block_size, rows):
    """While the sealed blocks fit the budget, sink + recent + retrieved are all there are: sparse, and exact."""
    config = OasisConfig(budget=24 * block_size, block_size=block_size, recent_blocks=3, sparse_rows=4)
    model = models.build("llama", "sdpa")
    cache, dense = OasisCache(config), DynamicCache(config=model.config)
    past = config.dense_tokens
    assert past // block_size == config.budget_blocks or block_size == 1
    if block_size == 1:  # with blocks of one token, dense ends exactly where the budget does
        past = config.dense_tokens - 1
    ids = models.prompt(past + 4, 2)
    for part in (slice(0, past), slice(past, past + 4)):
        step = ids[:, part] if part.start == 0 else ids[:, part.start : part.start + rows]
        expected, out = models.forward(model, step, dense), models.forward(model, step, cache)
        assert models.relative_error(out, expected) < TOLERANCE
    assert cache.stats().sparse_steps == (1 if past + rows > config.dense_tokens else 0)


def test_generation_in_chunks_over_the_budget_prefills_exactly():
    """`prefill_chunk_size` on a context over the budget: the first new token's logits are the dense ones."""
    model = models.build("llama", "sdpa")
    ids, mask = models.left_padded(170, (0, 3, 60))
    arguments = {"attention_mask": mask, "prefill_chunk_size": 32}
    cache = OasisCache(SMALL, model_config=model.config)
    expected = models.generate(model, ids, DynamicCache(config=model.config), 1, **arguments)
    out = models.generate(model, ids, cache, 1, **arguments)
    assert models.relative_error(out.logits[0], expected.logits[0]) < TOLERANCE
    assert (cache.stats().prefill_steps, cache.stats().streamed_steps) == (
        1,
        5,
    )  # 32, then 64, 96, 128, 160, 170 tokens


def test_half_precision_models_run():
    """bf16 weights and activations: streamed logits stay within bf16's own error of the dense ones."""
    config = models.build("llama", "sdpa").config
    model = type(models.build("llama", "sdpa"))(config).bfloat16().eval()
    model.load_state_dict(models.build("llama", "sdpa").state_dict())
    cache, dense, ids = OasisCache(SMALL), DynamicCache(config=config), models.prompt(140)
    for part in (slice(0, 50), slice(50, 100), slice(100, 140)):
        error = models.relative_error(
            models.forward(model, ids[:, part], cache), models.forward(model, ids[:, part], dense)
        )
        assert error < 0.03
    assert cache.layers[0].dense_kv().dtype == torch.bfloat16
