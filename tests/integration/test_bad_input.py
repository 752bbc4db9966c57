"""Requests that cannot be honoured: a clear error before anything is written, or transformers' own behaviour, pinned."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from oasis_cache.runtime import Runtime
from tests import models

pytestmark = pytest.mark.contract

SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)
STATES = pytest.mark.parametrize("forwards", [(20,), (20, 3), (90,), (90, 1), (90, 30)], ids=str)


def filled(forwards, batch: int = 2, config: OasisConfig = SMALL) -> OasisCache:
    model = models.build("llama", "sdpa")
    cache = OasisCache(config, model_config=model.config)
    for number, rows in enumerate(forwards):
        models.forward(model, models.prompt(rows, batch, seed=number), cache)
    return cache


def snapshot(cache: OasisCache) -> list:
    """Everything that must not change when a request is refused."""
    kv = [layer.dense_kv().clone() for layer in cache.layers if layer.get_seq_length()]
    stats = cache.stats()
    return [kv, stats.steps, stats.context_tokens, stats.host_bytes, stats.device_bytes]


def assert_unchanged(cache: OasisCache, before: list) -> None:
    after = snapshot(cache)
    assert all(torch.equal(a, b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1:] == before[1:]
    for layer in cache.layers:
        layer.check_integrity()


@STATES
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_batch_that_changes_size(forwards, rows, batch):
    cache = filled(forwards)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"batch size {batch} does not fit .* batch size 2"):
        models.forward(models.build("llama", "sdpa"), models.prompt(rows, batch), cache)
    assert_unchanged(cache, before)
    models.forward(models.build("llama", "sdpa"), models.prompt(rows, 2), cache)
    cache.reset()
    models.forward(models.build("llama", "sdpa"), models.prompt(rows, batch), cache)  # a reset cache takes any batch


@pytest.mark.parametrize("rows", [1, 20])
def test_float16_cache_with_a_bfloat16_model(rows):
    model = models.build("llama", "sdpa")
    half, brain = copy.deepcopy(model).half(), copy.deepcopy(model).bfloat16()
    cache = OasisCache(SMALL, model_config=model.config)
    models.forward(half, models.prompt(90), cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"dtype torch\.bfloat16 does not fit .* dtype torch\.float16"):
        models.forward(brain, models.prompt(rows), cache)
    assert_unchanged(cache, before)
    assert torch.isfinite(models.forward(half, models.prompt(rows), cache)).all()


def test_model_with_other_heads():
    cache = filled((90,), batch=1)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"number of KV heads 4 does not fit .* number of KV heads 2"):
        models.forward(models.build("llama", "sdpa", num_key_value_heads=4), models.prompt(1), cache)
    with pytest.raises(ValueError, match=r"key width 16 does not fit .* key width 8"):
        models.forward(models.build("llama", "sdpa", head_dim=16), models.prompt(1), cache)
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, 3, 4), (2, 3, 4)), ((1, 2, 3, 4), (1, 2, 4, 4)), ((1, 2, 3, 4), (1, 1, 3, 4)), ((2, 2, 3, 4), (1, 2, 3, 4))],
)
def test_tensors_that_are_no_keys_and_values(keys, values):
    layer = OasisLayer(Runtime.create(SMALL))
    with pytest.raises(ValueError, match="must be"):
        layer.update(torch.randn(keys), torch.randn(values))
    assert not layer.is_initialized and layer.get_seq_length() == 0


@STATES
def test_closed_cache_used_again(forwards):
    cache, memory = filled(forwards), None
    memory = cache.runtime.memory
    cache.close()
    assert memory.reserved_bytes == 0
    cache.close()  # twice is fine
    with pytest.raises(RuntimeError, match="closed"):
        models.forward(models.build("llama", "sdpa"), models.prompt(1, 2), cache)
    with pytest.raises(RuntimeError, match="closed"):
        models.generate(models.build("llama", "sdpa"), models.prompt(5, 2), cache, 2)
    with pytest.raises(RuntimeError, match="closed"), cache:
        pass
    assert cache.stats().device_bytes == 0
    assert memory.reserved_bytes == 0


def test_with_statement_closes():
    model = models.build("llama", "sdpa")
    with OasisCache(SMALL) as cache:
        models.forward(model, models.prompt(90), cache)
        assert cache.stats().host_bytes > 0
    with pytest.raises(RuntimeError, match="closed"):
        models.forward(model, models.prompt(1), cache)


@pytest.mark.parametrize("implementation", ["static", "dynamic", "offloaded"])
def test_another_cache_implementation_is_refused(implementation):
    cache = filled((90,), batch=1)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="cache_implementation"):
        models.generate(models.build("llama", "sdpa"), models.prompt(91), cache, 2, cache_implementation=implementation)
    assert_unchanged(cache, before)


def test_compiled_generation_runs_uncompiled_and_right():
    """transformers compiles only with caches that say they can: this one says no, so the request is warned about and ignored."""
    model, ids = models.build("llama", "sdpa"), models.prompt(90)
    cache, plain = OasisCache(SMALL), OasisCache(SMALL)
    assert not cache.is_compileable
    expected = models.generate(model, ids, plain, 6)
    out = models.generate(model, ids, cache, 6, compile_config=CompileConfig(backend="eager"))
    assert torch.equal(out.sequences, expected.sequences)
    assert cache.stats().sparse_steps == plain.stats().sparse_steps == 5


def test_use_cache_false_together_with_a_cache():
    """transformers feeds the whole sequence again at every step: that is refused where the mask shows it, and never hidden."""
    model, ids = models.build("llama", "sdpa"), models.prompt(20)
    dense, cache = DynamicCache(), OasisCache(SMALL)
    models.generate(model, ids, dense, 4, use_cache=False)
    assert dense.get_seq_length() == 20 + 21 + 22 + 23
    refusal = ""
    try:
        models.generate(model, ids, cache, 4, use_cache=False)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "a cache needs use_cache=True" in refusal
        assert cache.get_seq_length() == 20
    else:
        assert cache.get_seq_length() == dense.get_seq_length()
    cache = OasisCache(SMALL)
    models.forward(model, ids, cache, use_cache=False)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("crops", [(-5,), (0,), (-1000,), (-91,), (-45, -10)])
def test_crop_takes_what_transformers_takes(crops):
    model = models.build("llama", "sdpa")
    cache, dense = filled((90, 1), batch=1), DynamicCache()
    for number, rows in enumerate((90, 1)):
        models.forward(model, models.prompt(rows, seed=number), dense)
    for count in crops:
        cache.crop(torch.tensor(count))  # as transformers 5.17 does in assisted decoding
        dense.crop(count)
        assert cache.get_seq_length() == dense.get_seq_length()
    models.forward(model, models.prompt(2), cache)
    models.forward(model, models.prompt(2), dense)
    assert cache.get_seq_length() == dense.get_seq_length()


def test_crop_of_a_positive_number_is_what_the_installed_transformers_says():
    cache, dense, model = filled((90,), batch=1), DynamicCache(), models.build("llama", "sdpa")
    models.forward(model, models.prompt(90), dense)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dense.crop(60)
        except ValueError:
            before = snapshot(cache)
            with pytest.raises(ValueError, match=r"crop\(60\)"):
                cache.crop(60)
            assert_unchanged(cache, before)
        else:
            cache.crop(60)
            assert cache.get_seq_length() == dense.get_seq_length() == 60
            cache.crop(200)
            assert cache.get_seq_length() == 60
    with pytest.raises(ValueError, match="negative"):
        cache.layers[0].crop(3)


def test_operations_on_an_empty_cache():
    model = models.build("llama", "sdpa")
    for cache in (OasisCache(SMALL), OasisCache(SMALL, model_config=model.config)):
        cache.crop(0)
        cache.crop(-3)
        cache.reset()
        cache.reorder_cache(torch.tensor([0, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.get_seq_length() == 0
        assert cache.get_mask_sizes(7, 0) == (7, 0)
        assert copy.deepcopy(cache).get_seq_length() == 0
        assert cache.is_croppable
        assert bool(cache)
        cache.activate_past_recording()
        models.forward(model, models.prompt(5, 3), cache)
        assert cache.get_seq_length() == 5


def test_pickling_is_refused_with_the_reason():
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(filled((20,)))


def test_indexing_is_refused_with_the_way_to_do_it():
    cache = filled((20,))
    with pytest.raises(TypeError, match=r"cache\.layers\[i\]\.dense_"):
        cache[0]
    with pytest.raises(TypeError):
        list(cache)


def test_unknown_layer_type_is_refused_by_name():
    config = copy.deepcopy(models.build("gemma3").config)
    config.__dict__["layer_types"] = ["sliding_attention", "telepathic_attention"]
    with pytest.raises(ValueError, match="telepathic_attention"):
        OasisCache(model_config=config)


def test_a_full_host_tier_is_refused_before_anything_is_written():
    """The cap is checked for all layers at the first one: none of them takes a token that another one cannot."""
    model = models.build("llama", "sdpa")
    token_bytes = 2 * 2 * 16 * 4  # layers, KV heads, dims, float32
    cache = OasisCache(SMALL, model_config=model.config, max_host_bytes=200 * token_bytes)
    models.forward(model, models.prompt(90), cache)
    before = snapshot(cache)
    with pytest.raises(MemoryError, match=r"max_host_bytes=51,200"):
        models.forward(model, models.prompt(200), cache)
    assert_unchanged(cache, before)
    models.forward(model, models.prompt(1), cache)
    assert cache.get_seq_length() == 91


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("room", [100, 112, 128, 151, 184])
def test_decoding_into_a_full_host_tier_leaves_every_layer_whole(room, rows):
    """However the cap falls between slabs, a step that does not fit changes no layer, and the cache goes on after crop(0)."""
    model = models.build("llama", "sdpa")
    cache = OasisCache(SMALL, model_config=model.config, max_host_bytes=room * 2 * 2 * 16 * 4)
    models.forward(model, models.prompt(90), cache)
    with pytest.raises(MemoryError, match="max_host_bytes"):
        for number in range(200):
            before = snapshot(cache)
            models.forward(model, models.prompt(rows, seed=number), cache)
    assert 90 < before[2] <= room + SMALL.block_size + rows
    assert_unchanged(cache, before)


@pytest.mark.parametrize("room", range(84, 112, 3))
def test_a_prefill_fits_all_layers_or_none(room):
    """Slabs are larger than what they hold: the check before the first layer counts slabs, not tokens."""
    model = models.build("llama", "sdpa")
    cache = OasisCache(SMALL, model_config=model.config, max_host_bytes=room * 2 * 2 * 16 * 4)
    try:
        models.forward(model, models.prompt(90), cache)
    except MemoryError:
        assert cache.stats().context_tokens == cache.stats().steps == cache.stats().host_bytes_reserved == 0
    else:
        assert {layer.get_seq_length() for layer in cache.layers} == {90}
        assert cache.stats().host_bytes_reserved <= room * 2 * 2 * 16 * 4
