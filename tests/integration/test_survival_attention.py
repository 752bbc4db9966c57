"""Survival cases, section F: the hook into attention."""

from __future__ import annotations

import copy
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from oasis_cache import OasisCache, OasisConfig, OasisWarning
from oasis_cache.attention import refusal
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SPARSE,
    assert_close,
    case,
    dynamic,
    oasis_layers,
    selections,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


@case(67)
@CONFIGS
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_survive_the_hook(attention, config):
    """A plain causality test is not enough, since sdpa has a causal flag of its own: padding, and rows on a filled cache."""
    model, truth = models.build("llama-deep", attention), models.build("llama-deep", oracle.NAME)
    for first, rows, pads in ((14, 6, (0,)), (14, 6, (0, 9)), (60, 6, (0,)), (60, 6, (0, 33)), (60, 20, (0, 33))):
        ids, mask = models.left_padded(first + rows, pads)
        cache, complete = OasisCache(config, model_config=model.config), DynamicCache()
        for part in (slice(0, first), slice(first, first + rows)):
            seen = mask[:, : part.stop]
            out = models.forward(model, ids[:, part], cache, seen)
            with oracle.rules(config, blind_mean=attention == "eager"):
                expected = models.forward(truth, ids[:, part], complete, seen)
            real = mask[:, part].bool()
            assert_close(out[real], expected[real], 2e-5)
    for name in ("sdpa", "eager", "flash_attention_2", "flex_attention"):
        assert name in AttentionMaskInterface._global_mapping
    assert AttentionInterface()._global_mapping["sdpa"].__module__.startswith("transformers")


@case(68)
@CONFIGS
def test_sinks_are_applied_once(config):
    """gpt-oss: equal to its eager attention, with a sink of +20 that takes much attention, and one of +200 that takes all."""
    ids = models.prompt(64)
    outputs = []
    for sink in (None, 20.0, 200.0):
        ours, theirs = (copy.deepcopy(models.build("gpt-oss-deep", attention)) for attention in ("eager", oracle.NAME))
        for layer in [*ours.model.layers, *theirs.model.layers] if sink is not None else []:
            layer.self_attn.sinks.fill_(sink)
        cache, complete = OasisCache(config, model_config=ours.config), dynamic(theirs)
        heard: list[torch.Tensor] = []
        projection = ours.model.layers[3].self_attn.o_proj
        handle = projection.register_forward_pre_hook(lambda _, args, heard=heard: heard.append(args[0]))
        for part in (slice(0, 60), slice(60, 61), slice(61, 64)):
            out = models.forward(ours, ids[:, part], cache)
            with oracle.rules(config, frozenset({1, 3}), blind_mean=True):
                assert_close(out, models.forward(theirs, ids[:, part], complete), 2e-5)
        handle.remove()
        outputs.append(heard[-1].norm().item())
        assert (cache.stats().sparse_steps == 2) == (config is not EXACT)
    assert outputs[1] < 0.7 * outputs[0] and outputs[2] < 1e-6


@case(68)
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["without", "with"])
def test_layers_without_sinks_need_none_passed(sinks):
    """One attention function serves layers with sinks and without (MiMo-V2-Flash): only a layer that has some must pass them."""
    eager = sys.modules[type(models.build("gpt-oss-deep", "eager")).__module__].eager_attention_forward
    layer = SimpleNamespace(sinks=sinks, config=SimpleNamespace())
    assert (refusal(eager, layer, {"s_aux": None}, 1, 61) is None) == (sinks is None)
    assert refusal(eager, layer, {"s_aux": torch.zeros(4)}, 1, 61) is None


@case(70)
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_attention_weights_have_the_width_of_the_context(rows):
    """Asked for, they are whole, of an exact dense step; never k * block wide."""
    model = models.build("llama-deep", "eager")
    cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(model)
    ids = models.prompt(60 + rows)
    for each in (cache, complete):
        models.forward(model, ids[:, :60], each)
    with pytest.warns(OasisWarning, match="output_attentions"):
        out = model(ids[:, 60:], output_attentions=True, **{models.CACHE_ARGUMENT: cache})
    expected = model(ids[:, 60:], output_attentions=True, **{models.CACHE_ARGUMENT: complete})
    assert len(out.attentions) == 4
    for mine, theirs in zip(out.attentions, expected.attentions, strict=True):
        assert mine.shape == (1, 4, rows, 60 + rows)
        assert_close(mine, theirs)
    assert_close(out.logits, expected.logits)
    assert cache.stats().fallback_steps == 1


@case(70)
def test_attention_weights_under_sdpa_are_refused_by_transformers_or_whole(model):
    cache, ids = OasisCache(SPARSE, model_config=model.config), models.prompt(61)
    models.forward(model, ids[:, :60], cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            out = model(ids[:, 60:], output_attentions=True, **{models.CACHE_ARGUMENT: cache})
        except ValueError as error:
            weights, refused = (), str(error)
        else:
            weights, refused = out.attentions or (), ""
    assert not refused or "output_attentions" in refused or "eager" in refused
    assert all(each is None or each.shape[-1] == 61 for each in weights)


@case(71)
def test_counters_prove_that_it_is_sparse(model):
    """One retrieved block changes the logits; blocks and bytes are counted; a budget over the context changes nothing."""
    ids = models.prompt(201)
    exact = dynamic(model)
    models.forward(model, ids[:, :200], exact)
    expected = models.forward(model, ids[:, 200:], exact)
    one_block = OasisConfig(budget=16, block_size=8, sink_blocks=0, recent_blocks=1, sparse_rows=1)
    for config, engaged in ((one_block, True), (EXACT, False)):
        cache = OasisCache(config, model_config=model.config)
        models.forward(model, ids[:, :200], cache)
        error = models.relative_error(models.forward(model, ids[:, 200:], cache), expected)
        stats = cache.stats()
        assert (error > 0.05) == engaged and (error < 1e-5) == (not engaged)
        assert (stats.sparse_steps, stats.dense_steps) == ((1, 0) if engaged else (0, 1))
        assert (stats.blocks_read > 0) == (stats.bytes_fetched > 0) == engaged
    assert oasis_layers(cache)


@case(71)
@pytest.mark.parametrize("name", ["deepseek-v32", "mistral-window", "bloom"])
def test_models_that_gain_nothing_say_so_once(name):
    model = models.build(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OasisWarning)
        cache = OasisCache(SPARSE)
        for rows in (60, 1, 1, 20):
            models.forward(model, models.prompt(rows), cache)
    messages = {str(warning.message) for warning in caught if warning.category is OasisWarning}
    assert len(messages) == sum(warning.category is OasisWarning for warning in caught) == 1
    assert set(cache.stats().warnings) == messages and cache.stats().sparse_steps == 0


@case(72)
@pytest.mark.parametrize("index", ["int2", "minmax", "exact"])
def test_where_blocks_come_from_changes_nothing(model, index):
    """Fetched at once, by a thread, as late as allowed, or prefetched: the same selections and logits for 32 steps."""
    ids = models.prompt(90)
    runs: list[tuple[Any, torch.Tensor]] = []
    for changes in (
        {"engine": "sync", "lookahead": "off"},
        {"engine": "sync", "lookahead": "draft", "max_fetch": 2},
        {"engine": "threads", "lookahead": "draft", "max_fetch": 2},
        {"engine": "simulated", "lookahead": "previous", "max_fetch": None},
    ):
        cache = OasisCache(SPARSE, **changes, index=index, trace=True)
        out = models.generate(model, ids, cache, 33)
        assert cache.stats().sparse_steps == 32
        runs.append((selections(cache), torch.stack(out.logits)))
    for selected, logits in runs[1:]:
        assert selected == runs[0][0]
        assert torch.equal(logits, runs[0][1])


@case(73)
def test_positions_stay_true(model):
    """Three of twenty blocks are read: the next token's position is 160, and the keys in slots are the original bytes."""
    config = OasisConfig(budget=32, block_size=8, sink_blocks=1, recent_blocks=1, sparse_rows=1, index="exact")
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    ids, positions = models.prompt(161), []
    for each in (cache, complete):
        models.forward(model, ids[:, :160], each)
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1]),
        with_kwargs=True,
    )
    models.forward(model, ids[:, 160:], cache)
    handle.remove()
    assert [part.flatten().tolist() for part in positions] == [[160]]
    assert cache.get_seq_length() == 161
    for layer, whole in zip(cache.layers[:1], complete.layers, strict=False):
        assert layer.config.num_slots == 3
        where = layer.working_set.token_positions()[0]
        for head in range(2):
            read = where[head][where[head] < 160]
            assert read.numel() <= 32
            held = layer.working_set.kv[0, head, : where.shape[-1]][where[head] < 160]
            assert torch.equal(held[:, :16], whole.keys[0, head, read])
            assert torch.equal(held[:, 16:], whole.values[0, head, read])
