"""Survival cases, section A: the contract of cache classes."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    assert_same_content,
    case,
    dynamic,
    greedy,
    oasis_layers,
    used_cache,
)

pytestmark = pytest.mark.contract

TINY = OasisConfig(budget=24, block_size=8, sink_blocks=1, recent_blocks=1, sparse_rows=1, stream_tokens=16)
"""Forty tokens are mostly in the host tier."""


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


@case(1)
@pytest.mark.parametrize("forwards", [(40,), (40, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "operations",
    [
        [("reorder_cache", torch.tensor([1, 0]))],
        [("crop", -5)],
        [("crop", -19)],
        [("batch_select_indices", torch.tensor([1]))],
        [("batch_repeat_interleave", 2)],
        [("reorder_cache", torch.tensor([1, 1])), ("crop", -7), ("batch_repeat_interleave", 2)],
    ],
    ids=["reorder", "crop", "deep-crop", "select", "repeat", "all"],
)
def test_operations_reach_every_store(model, operations, forwards):
    cache, complete = OasisCache(TINY, model_config=model.config), DynamicCache()
    models.forward(model, models.prompt(forwards[0], 2), cache)
    assert all(layer.store.num_blocks >= 4 for layer in oasis_layers(cache))
    for number, rows in enumerate(forwards[1:]):
        models.forward(model, models.prompt(rows, 2, seed=number), cache)
    for number, layer in enumerate(oasis_layers(cache)):
        complete.update(*layer.dense_keys_and_values(), number)
    for name, argument in operations:
        getattr(cache, name)(argument)
        getattr(complete, name)(argument)
    assert_same_content(cache, complete)


@case(2)
@pytest.mark.parametrize(
    ("config", "first"), [(EXACT, (6,)), (SPARSE, (90, 1, 4)), (SIMULATED, (90, 1, 4)), (SIMULATED, (90, 1, 40))]
)
def test_reset_forgets_everything(model, config, first):
    for given in (model.config, None):
        cache = OasisCache(config, model_config=given)
        for rows in first:
            models.forward(model, models.prompt(rows), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        stats = cache.stats()
        assert stats.host_bytes == stats.host_bytes_reserved == stats.device_bytes == stats.index_bytes == 0
        assert stats.steps == stats.prefetched == stats.blocks_read == 0
        for layer in oasis_layers(cache):
            assert layer.working_set is layer.store is layer.index is layer.pending is None and not layer.trace
        keys, values = cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), 0)
        assert keys.shape[2] == values.shape[2] == 3
        cache.reset()
        ids = models.prompt(60, seed=8)
        fresh = OasisCache(config, model_config=model.config)
        assert torch.equal(greedy(model, ids, cache, 8), greedy(model, ids, fresh, 8))


@case(4)
@pytest.mark.parametrize("count", [-200, -60, -7, -1, 0, 5, 200])
@pytest.mark.parametrize("past", [20, 90])
def test_crop_means_what_the_installed_transformers_means(model, past, count):
    cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(model)
    for each in (cache, complete):
        models.forward(model, models.prompt(past), each)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            complete.crop(count)
        except ValueError:
            with pytest.raises(ValueError, match="crop"):
                cache.crop(count)
            return
        cache.crop(count)
    if complete.get_seq_length():
        assert_same_content(cache, complete)
    else:
        assert cache.get_seq_length() == 0


@case(4)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
@pytest.mark.parametrize("full_first", [True, False])
def test_a_crop_reaches_all_layers_or_none(config, full_first):
    """A window that was not recorded cannot go back: then no other layer does, and the cache goes on."""
    kinds = ["full_attention", "sliding_attention"] if full_first else ["sliding_attention", "full_attention"]
    model = models.build.__wrapped__("gpt-oss", "eager", layer_types=kinds)
    ids = models.prompt(60)
    cache, twin = OasisCache(config, model_config=model.config), OasisCache(config, model_config=model.config)
    for each in (cache, twin):
        models.forward(model, ids, each)
    with pytest.raises(
        RuntimeError, match=r"DynamicSlidingWindowLayer, cannot go back 5 tokens but 0: call activate_past_recording"
    ):
        cache.crop(-5)
    cache.crop(0)
    assert {layer.get_seq_length() for layer in cache.layers} == {60}
    assert torch.equal(models.forward(model, ids[:, :1], cache), models.forward(model, ids[:, :1], twin))


@case(4)
def test_nothing_to_crop_is_no_error():
    """Where recurrent states cannot go back, `crop(0)` has nothing to do, also for them."""
    model = models.build("qwen3-next")
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(60), cache)
    cache.crop(0)
    assert cache.get_seq_length() == 60
    with pytest.raises(RuntimeError, match="LinearAttentionLayer, cannot go back"):
        cache.crop(-1)
    assert cache.get_seq_length() == 60


@case(5)
@CONFIGS
@pytest.mark.parametrize("name", ["llama-deep", "gemma3", "lfm2"])
def test_prompt_lookup_needs_no_preparation(name, config):
    """With the hook for recording or without it, and however often it is called."""
    model, ids = models.build(name), models.prompt(60)
    ids[:, 40:55] = ids[:, 10:25]
    cache = OasisCache(config, model_config=model.config)
    for _ in range(2):
        getattr(cache, "activate_past_recording", lambda: None)()
    out = models.generate(model, ids, cache, 10, prompt_lookup_num_tokens=3)
    assert out.sequences.shape == (1, 70)
    if config is EXACT:
        assert torch.equal(out.sequences, greedy(model, ids, dynamic(model), 10))


@case(7)
@CONFIGS
def test_the_callers_cache_is_used(model, config):
    for cache in (OasisCache(config), OasisCache(config, model_config=model.config)):
        assert bool(cache) is True
        out = models.generate(model, models.prompt(60), cache, 4)
        assert used_cache(out) is cache
        assert bool(cache) is True
        assert cache.get_seq_length() == 63
        cache.reset()
        assert bool(cache) is True


@case(8)
def test_number_of_layers(model):
    given, found = OasisCache(model_config=model.config), OasisCache()
    assert len(given) == 4 and len(found) == 0
    for cache in (given, found):
        models.forward(model, models.prompt(5), cache)
        models.forward(model, models.prompt(1), cache)
        assert len(cache) == len(cache.layers) == 4
        assert cache.stats().oasis_layers == 4


@case(10)
@CONFIGS
@pytest.mark.parametrize("given", [60, 50, 3])
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_prompt_that_is_cached_already(model, config, given, chunk):
    """transformers would feed all of it once more, behind itself: refused before anything is written, and the cache goes on."""
    ids, cache = models.prompt(60), OasisCache(config)
    models.forward(model, ids, cache)
    arguments = {} if chunk is None else {"prefill_chunk_size": chunk}
    with pytest.raises(ValueError, match=r"no new tokens are left.*The cache holds 60 tokens: pass .*reset\(\)"):
        greedy(model, ids[:, :given], cache, 6, **arguments)
    assert cache.get_seq_length() == 60
    cache.crop(-1)
    out = models.generate(model, ids, cache, 6)
    if config is EXACT:
        assert torch.equal(out.sequences, greedy(model, ids, dynamic(model), 6))
    assert cache.get_seq_length() == 65


@case(10)
@CONFIGS
def test_assisted_decoding_of_a_cached_prompt_is_refused(model, config):
    """transformers feeds the whole sequence again there; LookaheadDecoding does not, and is named."""
    ids, cache = models.prompt(60), OasisCache(config)
    models.forward(model, ids[:, :50], cache)
    with pytest.raises(ValueError, match=r"feeds all 60 tokens again.*LookaheadDecoding"):
        greedy(model, ids, cache, 6, prompt_lookup_num_tokens=3)
    assert cache.get_seq_length() == 50
    assert greedy(model, ids, cache, 6).shape == (1, 66)


@case(11)
@pytest.mark.parametrize("forwards", [(20,), (90, 1)], ids=str)
def test_indexing_names_the_supported_call(model, forwards):
    cache = OasisCache(SPARSE, model_config=model.config)
    for rows in forwards:
        models.forward(model, models.prompt(rows), cache)
    with pytest.raises(TypeError, match=r"cache\.layers\[i\]\.dense_keys_and_values\(\)"):
        cache[0][0]
    with pytest.raises(TypeError):
        list(cache)
    keys, values = cache.layers[0].dense_keys_and_values()
    assert keys.shape == values.shape == (1, 2, sum(forwards), 16)


@case(13)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_content_goes_through_a_weights_only_file(model, config):
    """Plain tensors out, `torch.load(weights_only=True)`, tensors in: the same tokens from there on."""
    ids = models.prompt(61)
    cache = OasisCache(config, model_config=model.config)
    models.forward(model, ids[:, :60], cache)
    content = {
        f"{part}.{number}": tensor
        for number, layer in enumerate(cache.layers)
        for part, tensor in zip(("keys", "values"), layer.dense_keys_and_values(), strict=True)
    }
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = OasisCache(config, model_config=model.config)
    for number in range(len(cache)):
        again.update(loaded[f"keys.{number}"], loaded[f"values.{number}"], number)
    assert torch.equal(greedy(model, ids, again, 10), greedy(model, ids, cache, 10))


@case(13)
@pytest.mark.parametrize("forwards", [(20,), (90, 1), (90, 40)], ids=str)
def test_pickling_fails_in_words(model, forwards):
    cache = OasisCache(SIMULATED, model_config=model.config)
    for rows in forwards:
        models.forward(model, models.prompt(rows), cache)
    for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be pickled"):
            save(cache)


@case(14)
def test_head_dim_of_its_own():
    model = models.build("qwen3", hidden_size=64, head_dim=32, num_key_value_heads=2)
    ids = models.prompt(20)
    assert torch.equal(greedy(model, ids, OasisCache(EXACT), 10), greedy(model, ids, dynamic(model), 10))
    cache = OasisCache(SPARSE)
    models.forward(model, models.prompt(60), cache)
    assert cache.layers[0].dense_keys_and_values()[0].shape == (1, 2, 60, 32)


@case(16)
def test_sizes_that_collide():
    """Batch, KV heads, block, width and prompt are all 2: no axis can be told from another by its size."""
    model = models.build("llama", "sdpa", hidden_size=8, head_dim=2)
    config = OasisConfig(block_size=2, budget=6, sink_blocks=1, recent_blocks=1, sparse_rows=2, stream_tokens=2)
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    for number, rows in enumerate((2, 2, 2, 2, 5, 3, 4, 2)):
        ids = models.prompt(rows, 2, seed=number)
        models.forward(model, ids, cache)
        for layer in cache.layers:
            layer.check_integrity()
    keys = [layer.dense_keys_and_values() for layer in cache.layers]
    for number, pair in enumerate(keys):
        complete.update(*pair, number)
    assert cache.layers[0].store.num_blocks > 2
    first = OasisCache(config, model_config=model.config)
    truth = dynamic(model)
    for number, rows in enumerate((2, 5, 3, 4)):  # longer than two rows: read exactly, from the host tier
        ids = models.prompt(rows, 2, seed=number)
        assert_close(models.forward(model, ids, first), models.forward(model, ids, truth))
    assert_same_close(first, truth)


def assert_same_close(cache, complete):
    for layer, expected in zip(cache.layers, complete.layers, strict=True):
        keys, values = layer.dense_keys_and_values()
        assert_close(keys, expected.keys)
        assert_close(values, expected.values)


@case(17)
@pytest.mark.parametrize("rows", [1, 20])
def test_fewer_heads_than_the_config_says(model, rows):
    """Under tensor parallelism a rank holds a part of the heads: sizes follow the tensors."""
    cache = OasisCache(SPARSE, model_config=model.config)
    assert model.config.num_key_value_heads == 2
    past, new = [torch.randn(1, 1, 60, 16) for _ in range(2)], [torch.randn(1, 1, rows, 16) for _ in range(2)]
    for number in range(4):
        cache.update(*past, number)
    for number in range(4):
        cache.update(*new, number)
        query = torch.randn(1, 2, rows, 16)
        out = cache.layers[number].attend(query, None, 0.25, None, None, None, True)
        whole = [torch.cat(pair, 2) for pair in zip(past, new, strict=True)]
        assert_close(out, oracle.attention(query, *whole, None, SPARSE, 0.25))


@case(19)
@pytest.mark.parametrize("second", [torch.float16, torch.bfloat16])
def test_dtypes_one_after_another(model, second):
    """Host memory that one dtype gave back is not read as another one."""
    first = torch.bfloat16 if second is torch.float16 else torch.float16
    ids = models.prompt(100)
    for dtype in (first, second, torch.float32):
        narrow = copy.deepcopy(model).to(dtype)
        cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(model)
        parts = []
        for each in (cache, complete):
            models.forward(narrow, ids[:, :60], each)
            parts.append(models.forward(narrow, ids[:, 60:], each))
        assert cache.stats().streamed_steps == 1
        assert_close(*parts, 0.03 if dtype != torch.float32 else 1e-5)
        assert cache.layers[0].dense_kv().dtype == dtype
        assert torch.equal(cache.layers[0].dense_keys_and_values()[0], complete.layers[0].keys)
        cache.close()
        del cache


@case(20)
@pytest.mark.parametrize(
    "kind",
    [
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "linear_attention",
        "mlp",
        "moe",
        "telepathic_attention",
    ],
)
def test_layer_types(kind):
    """What transformers' own cache knows is known here; an unknown one is named."""
    config = copy.deepcopy(models.build("gemma3").config)
    config.__dict__["layer_types"] = ["full_attention", kind]
    config.attention_chunk_size = 8
    try:
        expected = [type(layer) for layer in DynamicCache(config=config).layers]
    except KeyError:
        with pytest.raises(ValueError, match=f"layer type.*{kind}.*not known"):
            OasisCache(model_config=config)
        assert kind == "telepathic_attention"
        return
    got = OasisCache(model_config=config).layers
    assert [
        type(DynamicCache(config=config).layers[number]) if isinstance(layer, OasisLayer) else type(layer)
        for number, layer in enumerate(got)
    ] == expected
    assert isinstance(got[0], OasisLayer)
