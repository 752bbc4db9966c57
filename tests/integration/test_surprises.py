"""What new users ran into: each was a wrong answer, a crash where DynamicCache works, or a message that misled."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache, OasisWarning
from tests import models

pytestmark = pytest.mark.contract
SMALL = dict(budget=64, block_size=8, recent_blocks=2, sparse_rows=8)
HIDDEN = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def model():
    return models.build("llama")


def dense(model, *parts, **arguments):
    cache = DynamicCache(config=model.config)
    for part in parts[:-1]:
        models.forward(model, part, cache)
    return model(parts[-1], **{models.CACHE_ARGUMENT: cache}, **arguments).logits


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 50], ids=["sparse", "streamed"])
def test_model_code_that_looks_at_values_before_attention_gets_exact_attention(model, rows, monkeypatch):
    update = OasisCache.update

    def looking(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        values.sum()
        return keys, values

    monkeypatch.setattr(OasisCache, "update", looking)
    cache, ids, more = OasisCache(**SMALL), models.prompt(200), models.prompt(rows)
    models.forward(model, ids, cache)
    close(models.forward(model, more, cache), dense(model, ids, more))
    stats = cache.stats()
    assert (stats.fallback_steps, stats.sparse_steps, stats.streamed_steps, stats.tokens_read_max) == (1, 0, 0, 0)


def test_rows_that_see_each_other_both_ways_do(model):
    """A 4D mask that is not causal among few new tokens (image tokens) is honoured, exactly."""
    ids, more = models.prompt(200), models.prompt(6)
    mask = torch.zeros(1, 1, 6, 206)
    cache = OasisCache(**SMALL)
    models.forward(model, ids, cache)
    got = model(more, **{models.CACHE_ARGUMENT: cache}, attention_mask=mask).logits
    close(got, dense(model, ids, more, attention_mask=mask))


def test_a_mask_changed_in_place_is_read_again(model):
    ids, more = models.prompt(200), models.prompt(20)
    mask = torch.zeros(1, 1, 20, 220)
    mask[..., 200:] = torch.full((20, 20), HIDDEN).triu(1)
    cache = OasisCache(**SMALL)
    models.forward(model, ids, cache)
    model(more, **{models.CACHE_ARGUMENT: cache}, attention_mask=mask)
    cache.crop(-20)
    mask[..., :100] = HIDDEN
    got = model(more, **{models.CACHE_ARGUMENT: cache}, attention_mask=mask).logits
    close(got, dense(model, ids, more, attention_mask=mask))


@pytest.mark.parametrize("settings", [SMALL, {"budget": 4096}], ids=["sparse", "dense"])
def test_autograd_modes_may_alternate(model, settings):
    ids, cache = models.prompt(200), OasisCache(**settings)
    twin = OasisCache(**settings)
    for number, part in enumerate((ids, ids[:, :1], ids[:, :30], ids[:, :2], ids[:, 3:4])):
        with torch.no_grad():
            want = models.forward(model, part, twin)
        with torch.inference_mode(number % 2 == 0):
            close(models.forward(model, part, cache).clone(), want)
        if number == 1:
            cache.reorder_cache(torch.tensor([0]))
            cache = copy.deepcopy(cache)


def test_decoding_without_no_grad_works_and_says_what_it_means(model):
    trainable = copy.deepcopy(model).requires_grad_(True).eval()
    ids, cache = models.prompt(200), OasisCache(**SMALL)
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always", OasisWarning)
        trainable(ids, **{models.CACHE_ARGUMENT: cache})
        got = trainable(ids[:, :1], **{models.CACHE_ARGUMENT: cache}).logits
    assert sum("torch.no_grad()" in str(w.message) for w in caught) == 1
    twin = OasisCache(**SMALL)
    models.forward(model, ids, twin)
    close(got.detach(), models.forward(model, ids[:, :1], twin).detach())
    for layer in cache.layers:
        assert not layer.working_set.kv.requires_grad


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-next"])
@pytest.mark.parametrize("past", [0, 110])
def test_memory_is_refused_before_any_layer_takes_tokens(name, past):
    other, cache = models.build(name), OasisCache(**SMALL, max_host_bytes=1 if past == 0 else 9000)
    if past:
        cache.runtime.memory.max_bytes = None
        models.forward(other, models.prompt(past), cache)
        cache.runtime.memory.max_bytes = cache.runtime.memory.reserved_bytes
    with pytest.raises(MemoryError, match=r"Raise max_host_bytes"):
        for _ in range(200):
            models.forward(other, models.prompt(300), cache)
    assert {layer.get_seq_length() for layer in cache.layers if type(layer).__name__ == "OasisLayer"} == {past}
    for layer in cache.layers:
        if type(layer).__name__ == "OasisLayer":
            layer.check_integrity()


def test_a_model_without_full_attention_is_named(model):
    with pytest.warns(OasisWarning, match="MistralConfig has no full-attention layer"):
        models.forward(models.build("mistral-window"), models.prompt(20), OasisCache())


def test_reset_forgets_the_model(model):
    cache = OasisCache(**SMALL)
    models.forward(models.build("gemma3"), models.prompt(40), cache)
    cache.reset()
    models.forward(model, models.prompt(200), cache)
    assert cache.stats().other_layers == 0
    given = OasisCache(**SMALL, model_config=models.build("gemma3").config)
    given.layers.pop()
    with pytest.raises(ValueError, match="another model's"):
        models.forward(model, models.prompt(20), given)


def test_keys_and_values_come_apart(model):
    cache, twin = OasisCache(**SMALL), DynamicCache(config=model.config)
    for each in (cache, twin):
        models.forward(model, models.prompt(200), each)
    keys, values = cache.layers[1].dense_keys_and_values()
    assert torch.equal(keys, twin.layers[1].keys)
    assert torch.equal(values, twin.layers[1].values)
