"""Survival cases, section E: prefill, masks and positions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oasis_cache import OasisCache, OasisConfig, OasisWarning
from oasis_cache.layer import OasisLayer
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    case,
    dynamic,
    greedy,
    oasis_layers,
)

pytestmark = pytest.mark.contract

TINY = OasisConfig(budget=8, block_size=2, sink_blocks=1, recent_blocks=2, sparse_rows=3, stream_tokens=4)
"""Twelve tokens are a long context."""


def taken_for_full_attention(config: OasisConfig, model: Any) -> OasisCache:
    """A cache that keeps all tokens of windowed layers too, so that only masks make the window."""
    cache = OasisCache(config)
    cache.layers = [OasisLayer(cache.runtime) for _ in range(model.config.num_hidden_layers)]
    return cache


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, float("-inf")], ids=["lowest", "infinite"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_of_texts_that_do_not_see_each_other(hidden, attention):
    """An additive mask hides whole pieces of the past from some rows, and none of it from others."""
    model = models.build("llama", attention)
    ids, text_of = models.prompt(210), torch.arange(210) // 70
    cache = OasisCache(budget=64, recent_blocks=2, sparse_rows=4, stream_tokens=64, model_config=model.config)
    complete = dynamic(model)
    for start, stop in [(0, 100), (100, 155), (155, 210)]:
        rows = torch.arange(start, stop).unsqueeze(-1)
        visible = (torch.arange(stop) <= rows) & (text_of[:stop] == text_of[rows])
        mask = torch.zeros(1, 1, stop - start, stop).masked_fill(~visible, hidden)
        outs = [models.forward(model, ids[:, start:stop], each, attention_mask=mask) for each in (cache, complete)]
        assert_close(*outs)


@case(58)
@CONFIGS
def test_a_chunk_longer_than_the_window(config):
    model = models.build("gemma3-deep", "sdpa")
    ids = models.prompt(100)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    for each in (cache, complete):
        models.forward(model, ids[:, :20], each)
    window = cache.layers[0]
    assert not isinstance(window, OasisLayer)
    kept = window.keys.shape[2]
    seen: list[int] = []
    update = window.update
    window.update = lambda *args, **kwargs: seen.append((out := update(*args, **kwargs))[0].shape[2]) or out
    for start, stop in [(20, 36), *[(n, n + 1) for n in range(36, 76)]]:
        out = models.forward(model, ids[:, start:stop], cache)
        assert torch.isfinite(out).all()
        if config is EXACT or stop <= 36:
            assert_close(out, models.forward(model, ids[:, start:stop], complete))
    assert seen[0] == kept + 16


@case(59)
@pytest.mark.parametrize("name", ["gemma3-deep", "gpt-oss-deep", "mistral-window"])
@pytest.mark.parametrize("total", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("decoded", [0, 1, 3])
def test_lengths_around_the_window(name, total, decoded):
    """Transformers' windowed layers, ours with the window in the mask, and one forward of everything agree."""
    model = models.build(name, "eager" if models.eager_only(name) else "sdpa")
    ids = models.prompt(total + 1)
    expected = models.forward(model, ids, DynamicCache())
    for cache in (OasisCache(EXACT, model_config=model.config), taken_for_full_attention(EXACT, model)):
        first = total - decoded
        parts = [models.forward(model, ids[:, :first], cache)]
        parts += [models.forward(model, ids[:, n : n + 1], cache) for n in range(first, total + 1)]
        assert_close(torch.cat(parts, 1), expected)


@case(59)
@pytest.mark.parametrize("total", [12, 13, 17])
def test_windows_of_streamed_forwards(total):
    model = models.build("gpt-oss-deep", "eager")
    ids = models.prompt(total + 16)
    cache, complete = taken_for_full_attention(TINY, model), DynamicCache()
    for part in (ids[:, :total], ids[:, total : total + 12], ids[:, total + 12 :]):
        assert_close(models.forward(model, part, cache), models.forward(model, part, complete))
    assert cache.stats().streamed_steps == 2


@case(61)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_chunked_attention_and_left_padding(config):
    """Padding does not shift the borders of Llama 4's chunks."""
    model = models.build("llama4")
    ids, mask = models.left_padded(20, (15, 0))
    cache = OasisCache(config, model_config=model.config)
    assert [isinstance(layer, OasisLayer) for layer in cache.layers] == [False, True, False, True]
    out = models.generate(model, ids, cache, 12, attention_mask=mask)
    for row, pads in enumerate((15, 0)):
        alone = models.generate(model, ids[row : row + 1, pads:], dynamic(model), 12)
        assert torch.equal(out.sequences[row, 20:], alone.sequences[0, 20 - pads :])
        assert_close(torch.stack(out.logits)[:, row], torch.stack(alone.logits)[:, 0])


@case(62)
@CONFIGS
@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_position_biases_keep_their_models_dense(name, config):
    """A bias per key has to move with its key: these models are computed densely, exactly, and a warning says so."""
    model = models.build(name)
    ids = models.prompt(80)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    for part in (ids[:, :60], ids[:, 60:61], ids[:, 61:76], ids[:, 76:]):
        assert_close(models.forward(model, part, cache), models.forward(model, part, complete))
    stats = cache.stats()
    assert stats.sparse_steps == stats.streamed_steps == 0
    if config is not EXACT:
        assert stats.fallback_steps == 3 and any("dense keys and values" in text for text in stats.warnings)


@case(64)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("config", [EXACT, TINY], ids=["exact", "tiny"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_masks_of_four_dimensions(kind, heads, config, rows):
    """Honoured as they are, per row and head, in every phase."""
    model, truth = models.build("llama-deep", "sdpa"), models.build("llama-deep", oracle.NAME)
    generator = torch.Generator().manual_seed(rows)
    ids = models.prompt(12 + rows, 2)
    seen = torch.rand(2, heads, rows, 12 + rows, generator=generator) < 0.6
    seen &= torch.ones(rows, 12 + rows, dtype=torch.bool).tril(12)
    seen[..., 12:] |= torch.eye(rows, dtype=torch.bool)
    mask = seen
    if kind == "float":
        mask = torch.where(seen, torch.randn(seen.shape, generator=generator), torch.finfo(torch.float32).min)
    cache, complete = OasisCache(config, model_config=model.config), DynamicCache()
    models.forward(model, ids[:, :12], cache)
    models.forward(model, ids[:, :12], complete)
    out = model(ids[:, 12:], attention_mask=mask, **{models.CACHE_ARGUMENT: cache}).logits
    with oracle.rules(config):
        expected = truth(ids[:, 12:], attention_mask=mask, **{models.CACHE_ARGUMENT: complete}).logits
    assert_close(out, expected, 2e-5)
    phase = "dense" if config is EXACT else "sparse" if rows <= 3 else "streamed"
    assert cache.layers[0].phase == phase


@pytest.fixture
def masks():
    """A name of an attention function that notes the masks it gets; the list it notes them in."""
    seen: list[tuple[int, Any]] = []

    def noting(module, query, key, value, attention_mask, *args, **kwargs):
        seen.append((module.layer_idx, attention_mask))
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    AttentionInterface.register("noting", noting)
    AttentionMaskInterface.register("noting", sdpa_mask)
    yield "noting", seen
    AttentionInterface._global_mapping.pop("noting")
    AttentionMaskInterface._global_mapping.pop("noting")


@case(65)
@pytest.mark.parametrize("config", [EXACT, SPARSE, SIMULATED], ids=["exact", "sparse", "simulated"])
@pytest.mark.parametrize("border", [60, 52], ids=["whole", "image-over-the-border"])
def test_image_tokens_see_each_other(config, border, masks):
    """The masks are DynamicCache's element by element, also where a chunk's border cuts an image in two."""
    model = models.build_vision("gemma3-vision")
    ids = models.prompt(60) % 90 + 2
    for start in (10, 50):
        ids[0, start : start + 4] = models.IMAGE_TOKEN
    types = (ids == models.IMAGE_TOKEN).long()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    name, seen = masks
    before = model.config.get_text_config()._attn_implementation
    model.config.get_text_config()._attn_implementation = name
    try:
        results = []
        for cache in (OasisCache(config, model_config=model.config), DynamicCache(config=model.config)):
            seen.clear()
            embeds = model.get_input_embeddings()(ids)
            features = model.get_image_features(images)
            features = getattr(features, "pooler_output", features)
            embeds[0, types[0].bool()] = torch.cat(list(features)).reshape(-1, embeds.shape[-1])
            logits = [
                model(
                    inputs_embeds=embeds[:, start:stop],
                    token_type_ids=types[:, start:stop],
                    **{models.CACHE_ARGUMENT: cache},
                ).logits
                for start, stop in ((0, border), (border, 60))
                if start < stop
            ]
            results.append((torch.cat(logits, 1), list(seen)))
    finally:
        model.config.get_text_config()._attn_implementation = before
    (logits, noted), (expected, expected_noted) = results
    assert len(noted) >= 6
    if config is EXACT:
        assert len(noted) == len(expected_noted)
    wanted = dict(enumerate(expected_noted))
    for number, (layer, mask) in enumerate(noted):
        if len(noted) == len(wanted):
            assert wanted[number][0] == layer
            assert (mask is None) == (wanted[number][1] is None)
            assert mask is None or torch.equal(mask, wanted[number][1])
    if border == 60 or config is EXACT:
        assert_close(logits, expected)


@case(65)
def test_an_image_in_a_short_forward_is_read_exactly():
    """Few new tokens that see each other both ways are streamed, not sparse: nothing of the past may be left out for them."""
    model = models.build("llama-deep", "sdpa")
    cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(model)
    ids = models.prompt(66)
    mask = torch.ones(1, 1, 6, 66, dtype=torch.bool).tril(60)
    mask[..., 1:5, 61:65] = True
    for each in (cache, complete):
        models.forward(model, ids[:, :60], each)
    out, expected = (
        model(ids[:, 60:], attention_mask=mask, **{models.CACHE_ARGUMENT: each}).logits for each in (cache, complete)
    )
    assert_close(out, expected)
    assert cache.stats().streamed_steps == 1 and cache.stats().sparse_steps == 0


@case(50, 65)
@CONFIGS
def test_a_model_with_images_chats(config):
    """The language model of a vision model is served like any other: sparse in its full-attention layers."""
    model = models.build_vision("gemma3-vision")
    ids = models.prompt(60) % 90 + 2
    ids[0, 10:14] = models.IMAGE_TOKEN
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"pixel_values": images, "token_type_ids": (ids == models.IMAGE_TOKEN).long()}
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        arguments.pop("token_type_ids")
    cache = OasisCache(config)
    out = greedy(model, ids, cache, 12, **arguments)
    assert len(oasis_layers(cache)) == 1 and len(cache.layers) == 6
    if config is EXACT:
        assert torch.equal(out, greedy(model, ids, DynamicCache(config=model.config), 12, **arguments))
    else:
        assert cache.stats().sparse_steps == 11
        assert not cache.stats().warnings, OasisWarning
