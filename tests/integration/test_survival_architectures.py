"""Survival cases, section G: architectures with layers of other kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, T5PreTrainedModel
from transformers.cache_utils import DynamicLayer

from oasis_cache import OasisCache, OasisConfig, OasisWarning
from oasis_cache.layer import OasisLayer
from oasis_cache.runtime import Runtime
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    assert_summaries,
    case,
    dynamic,
    greedy,
    oasis_layers,
)

pytestmark = pytest.mark.contract

HYBRIDS = ["qwen3-next-deep", "lfm2", "falcon-h1"]


@case(75)
@CONFIGS
@pytest.mark.parametrize("name", [*HYBRIDS, "gemma3-deep", "llama4", "deepseek-v3"])
def test_every_call_on_a_filled_cache(name, config):
    model = models.build(name)
    ids = models.prompt(26)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    for part in (ids[:, :20], ids[:, 20:25], ids[:, 25:]):
        out, expected = (models.forward(model, part, each) for each in (cache, complete))
        assert (out - expected).abs().max() < 1e-4
        assert_close(out, expected)


class IndexedLayer(OasisLayer):
    """Keeps a tensor of its own per token beside keys and values, as layers with a learned indexer do."""

    extra: torch.Tensor | None = None

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        self.extra = states if self.extra is None else torch.cat([self.extra, states], 1)
        return self.extra


@case(76)
@pytest.mark.parametrize("update_first", [True, False], ids=["update-then-index", "index-then-update"])
@pytest.mark.parametrize("config", [SPARSE, SIMULATED], ids=["sparse", "simulated"])
def test_what_a_layer_keeps_besides_stays_resident(config, update_first):
    """Nothing that moves keys and values to the host tier moves what is none of its own."""
    model = models.build("llama-deep", "sdpa")
    cache, twin = OasisCache(config, model_config=model.config), OasisCache(config, model_config=model.config)
    cache.layers = [IndexedLayer(cache.runtime) for _ in range(4)]
    whole: list[torch.Tensor] = []
    for number, rows in enumerate((60, 1, 4, 30, 1)):
        ids = models.prompt(rows, seed=number)
        states = torch.randn(1, rows, 6)
        whole.append(states)
        if not update_first:
            cache.layers[1].update_indexer(states)
        out = models.forward(model, ids, cache)
        if update_first:
            cache.layers[1].update_indexer(states)
        assert torch.equal(cache.layers[1].extra, torch.cat(whole, 1))
        assert torch.equal(out, models.forward(model, ids, twin))
    kept = copy.deepcopy(cache).layers[1].extra
    assert torch.equal(kept, torch.cat(whole, 1))


@case(76)
@CONFIGS
def test_models_with_an_indexer(config):
    """DeepSeek-V3.2 ranks tokens with keys of its own: transformers' layers keep them, densely by statement."""
    model = models.build("deepseek-v32")
    ids = models.prompt(60)
    with pytest.warns(OasisWarning, match="DeepseekV32Config"):
        cache = OasisCache(config, model_config=model.config)
    complete = dynamic(model)
    for part in (ids[:, :40], ids[:, 40:41], ids[:, 41:46], ids[:, 46:]):
        assert_close(models.forward(model, part, cache), models.forward(model, part, complete))
    for each in (cache, complete):
        each.crop(-9)
    assert_close(models.forward(model, ids[:, :3], cache), models.forward(model, ids[:, :3], complete))


@case(77)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (4, 20)])
@pytest.mark.parametrize("engine", ["sync", "simulated"])
def test_keys_and_values_of_different_widths(key_dim, value_dim, engine):
    """Storing, attention, crop, reorder, copy: each goes by the two widths."""
    config = OasisConfig(**{**SPARSE.__dict__, "engine": engine, "lookahead": "draft", "max_fetch": 2})
    layer, complete = OasisLayer(Runtime.create(config)), DynamicLayer()

    def feed(rows: int) -> None:
        batch = complete.keys.shape[0] if complete.is_initialized else 2
        keys, values = torch.randn(batch, 2, rows, key_dim), torch.randn(batch, 2, rows, value_dim)
        got = layer.update(keys, values)
        expected = complete.update(keys, values)
        assert [part.shape for part in got] == [part.shape for part in expected]
        if layer.phase in ("sparse", "streamed"):
            query = torch.randn(batch, 4, rows, key_dim)
            out = layer.attend(query, None, 0.3, None, None, None, True)
            assert_close(out, oracle.attention(query, complete.keys, complete.values, None, config, 0.3))

    for step in (60, 1, 4, 30, "crop", 2, "deep-crop", 1, "reorder", 5, "repeat", 1, "select", 3, "copy", 1):
        if isinstance(step, int):
            feed(step)
        elif step.endswith("crop"):
            count = -3 if step == "crop" else -44
            for each in (layer, complete):
                each.crop(count)
        elif step == "copy":
            layer = copy.deepcopy(layer)
        else:
            method, argument = {
                "reorder": ("reorder_cache", torch.tensor([1, 0])),
                "repeat": ("batch_repeat_interleave", 2),
                "select": ("batch_select_indices", torch.tensor([3, 0])),
            }[step]
            for each in (layer, complete):
                getattr(each, method)(argument)
        keys, values = layer.dense_keys_and_values()
        assert torch.equal(keys, complete.keys) and torch.equal(values, complete.values)
        layer.crop(0)
        layer.check_integrity()
        assert_summaries(layer)


@case(77)
@CONFIGS
def test_latent_attention_through_all_operations(config):
    """DeepSeek-V3: what is cached is no key yet, and the widths differ."""
    model, truth = models.build("deepseek-v3"), models.build("deepseek-v3", oracle.NAME)
    ids = models.prompt(60, 2)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    with oracle.rules(config):
        models.forward(model, ids, cache)
        models.forward(truth, ids, complete)
        for each in (cache, complete):
            each.crop(-5)
            each.reorder_cache(torch.tensor([1, 0]))
        cache, complete = copy.deepcopy(cache), copy.deepcopy(complete)
        for rows in (1, 4, 20, 1):
            assert_close(models.forward(model, ids[:, :rows], cache), models.forward(truth, ids[:, :rows], complete))
        assert torch.equal(
            greedy(model, ids, OasisCache(config), 8, num_beams=2), greedy(truth, ids, dynamic(model), 8, num_beams=2)
        )
    assert cache.stats().oasis_layers == 2 and cache.stats().fallback_steps == 0
    for layer in cache.layers:
        layer.check_integrity()
        assert_summaries(layer)


@case(79)
@CONFIGS
@pytest.mark.parametrize("name", [*HYBRIDS, "jamba", "gemma3-deep"])
def test_the_length_is_that_of_attention(name, config):
    model = models.build(name)
    for given in (model.config, None):
        cache = OasisCache(config, model_config=given)
        assert cache.get_seq_length() == 0
        models.forward(model, models.prompt(60), cache)
        assert cache.get_seq_length() == 60
        models.forward(model, models.prompt(1), cache)
        assert cache.get_seq_length() == 61 == cache.stats().context_tokens or not oasis_layers(cache)
        assert type(cache.get_seq_length()) is int


@case(80)
@pytest.mark.parametrize(
    "config", [EXACT, OasisConfig(budget=8, block_size=2, recent_blocks=1, sparse_rows=2)], ids=["exact", "sparse"]
)
def test_cross_attention_stays_whole(config):
    """All 40 encoder positions, whatever the decoder's window or budget, in every step."""
    model = models.build_encoder_decoder("whisper")
    features = torch.randn(1, 8, 80, generator=torch.Generator().manual_seed(3))
    encoded = model.model.encoder(features)
    own = OasisCache(config, model_config=model.config)
    cache, complete = EncoderDecoderCache(own, DynamicCache()), EncoderDecoderCache(DynamicCache(), DynamicCache())
    for number, rows in enumerate((12, 1, 1, 9, 1)):
        ids = models.prompt(rows, seed=number)
        logits = [
            model(encoder_outputs=encoded, decoder_input_ids=ids, **{models.CACHE_ARGUMENT: each}).logits
            for each in (cache, complete)
        ]
        if config is EXACT or number == 0:
            assert_close(*logits)
        for layer, whole in zip(cache.cross_attention_cache.layers, complete.cross_attention_cache.layers, strict=True):
            assert type(layer) is DynamicLayer and layer.keys.shape[2] == 40
            assert torch.equal(layer.keys, whole.keys) and torch.equal(layer.values, whole.values)
    assert own.get_seq_length() == 24 and own.stats().oasis_layers == 2
    assert (own.stats().sparse_steps > 0) == (config is not EXACT)
    cache.crop(-4)
    assert own.get_seq_length() == 20
    assert {layer.keys.shape[2] for layer in cache.cross_attention_cache.layers} == {40}


@case(80)
@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=str)
def test_encoder_decoders_generate(name, arguments):
    model = models.build_encoder_decoder(name)
    inputs: dict[str, Any] = {"input_ids": models.prompt(30)}
    if name == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 80, generator=torch.Generator().manual_seed(3))}

    def run(own: Any) -> torch.Tensor:
        cache = EncoderDecoderCache(own, DynamicCache())
        return model.generate(
            **inputs,
            max_new_tokens=30,
            min_new_tokens=30,
            do_sample=False,
            **{models.CACHE_ARGUMENT: cache},
            **arguments,
        )

    expected = run(DynamicCache())
    for settings in ({}, {"engine": "simulated", "lookahead": "draft"}):
        assert torch.equal(run(OasisCache(EXACT, **settings)), expected)
        small = OasisCache(budget=8, block_size=2, recent_blocks=1, sparse_rows=2, **settings)
        assert run(small).shape == expected.shape
        stats = small.stats()
        assert stats.sparse_steps > 0 and stats.fallback_steps == 0


@case(80)
@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("index", ["int2", "exact", "recency"])
def test_decoders_of_encoder_decoders_follow_the_rules(name, attention, index):
    """T5's positions raise scores, so they rank blocks too; forwards of every kind, with and without padding in the encoder."""
    if name == "t5" and attention == "sdpa" and not T5PreTrainedModel._supports_sdpa:
        pytest.skip("this release of transformers has no other attention for T5")
    config = OasisConfig(**{**SPARSE.__dict__, "index": index})
    model, truth = (models.build_encoder_decoder(name, each) for each in (attention, oracle.NAME))
    inputs: dict[str, Any] = {"input_ids": models.prompt(30)}
    if name == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 80, generator=torch.Generator().manual_seed(3))}
    own = OasisCache(config, model_config=model.config)
    ours, theirs = EncoderDecoderCache(own, DynamicCache()), EncoderDecoderCache(DynamicCache(), DynamicCache())
    for number, rows in enumerate((60, 1, 3, 1, 20, 1, 8)):
        ids = models.prompt(rows, seed=number)
        out = model(**inputs, decoder_input_ids=ids, **{models.CACHE_ARGUMENT: ours}).logits
        with oracle.rules(config):
            expected = truth(**inputs, decoder_input_ids=ids, **{models.CACHE_ARGUMENT: theirs}).logits
        assert_close(out, expected)
    assert own.stats().sparse_steps == 5 and own.stats().streamed_steps == 1 and own.stats().fallback_steps == 0


@case(82)
@CONFIGS
@pytest.mark.parametrize("name", HYBRIDS)
def test_several_tokens_on_a_filled_hybrid(name, config):
    model = models.build(name)
    ids = models.prompt(26)
    whole = models.forward(model, ids, dynamic(model))
    cache = OasisCache(config, model_config=model.config)
    parts = [models.forward(model, ids[:, part], cache) for part in (slice(0, 20), slice(20, 26))]
    assert_close(torch.cat(parts, 1), whole)


@case(82)
@CONFIGS
def test_jamba_on_a_filled_cache_is_as_wrong_as_with_any_cache(config):
    """transformers restarts Jamba's recurrence at a forward of several tokens: not ours to mend, and documented."""
    model = models.build("jamba")
    ids = models.prompt(26)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    for part in (ids[:, :20], ids[:, 20:]):
        assert_close(models.forward(model, part, cache), models.forward(model, part, complete))


@case(83)
@CONFIGS
@pytest.mark.parametrize("name", [*HYBRIDS, "llama4"])
def test_padding_does_not_leak_into_states(name, config):
    """A left-padded batch in chunks of 7: every row as it is without padding."""
    model = models.build(name)
    ids, mask = models.left_padded(28, (12, 0))
    cache = OasisCache(config, model_config=model.config)
    parts = [models.forward(model, ids[:, n : n + 7], cache, mask[:, : n + 7]) for n in range(0, 28, 7)]
    out = torch.cat(parts, 1)
    for row, pads in enumerate((12, 0)):
        alone = models.forward(model, ids[row : row + 1, pads:], dynamic(model))
        assert_close(out[row : row + 1, pads:], alone)


@case(75, 83)
@pytest.mark.parametrize("name", ["qwen3-next-deep", "lfm2", "jamba", "falcon-h1"])
def test_hybrids_are_sparse_where_they_attend(name):
    """Their full-attention layers follow the rules of sparse attention."""
    model, truth = models.build(name), models.build(name, oracle.NAME)
    cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(truth)
    sparse = frozenset(n for n, layer in enumerate(cache.layers) if isinstance(layer, OasisLayer))
    for number, rows in enumerate((60, 1, 1, 1)):
        ids = models.prompt(rows, seed=number)
        with oracle.rules(SPARSE, sparse):
            expected = models.forward(truth, ids, complete)
        assert_close(models.forward(model, ids, cache), expected, 2e-5)
    assert cache.stats().sparse_steps == 3 and cache.stats().fallback_steps == 0


@case(79, 82)
@pytest.mark.parametrize("config", [SPARSE, SIMULATED], ids=["sparse", "simulated"])
def test_attention_and_state_in_one_layer(config):
    """Falcon-H1: every operation reaches keys, values and states; what cannot go back says so."""
    model = models.build("falcon-h1")
    ids = models.prompt(62, 2)
    cache = OasisCache(config, model_config=model.config)
    assert cache.stats().oasis_layers == 2
    models.forward(model, ids[:, :60], cache)
    models.forward(model, ids[:, 60:61], cache)
    assert cache.stats().sparse_steps == 1 and cache.stats().other_device_bytes > 0
    alone = OasisCache(config, model_config=model.config)
    models.forward(model, ids[1:, :60], alone)
    models.forward(model, ids[1:, 60:61], alone)
    expected = models.forward(model, ids[1:, 61:], alone)
    for operations in (
        [("reorder_cache", torch.tensor([1, 0]))],
        [("batch_select_indices", torch.tensor([1]))],
        [("batch_select_indices", torch.tensor([False, True])), ("batch_repeat_interleave", 3)],
    ):
        twin = copy.deepcopy(cache)
        for name, argument in operations:
            getattr(twin, name)(argument)
        rows = twin.layers[0].shape.batch
        assert_close(models.forward(model, ids[1:, 61:].repeat(rows, 1), twin)[:1], expected, 2e-5)
    with pytest.raises(RuntimeError, match=r"cannot go back"):
        cache.crop(-1)
    cache.crop(0)
    assert_close(models.forward(model, ids[:, 61:], cache)[1:], expected, 2e-5)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats().other_device_bytes == 0
    assert torch.equal(greedy(model, ids, cache, 5), greedy(model, ids, OasisCache(config), 5))
