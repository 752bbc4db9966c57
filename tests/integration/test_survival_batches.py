"""Survival cases, section C: beams, batches and padding."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache, OasisConfig
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    by_rules,
    case,
    dynamic,
    greedy,
    oasis_layers,
    selections,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


@case(35)
@CONFIGS
@pytest.mark.parametrize("beams", [3, 4])
def test_beam_search(model, config, beams):
    ids = models.prompt(60)
    cache = OasisCache(config, model_config=model.config)
    out = models.generate(model, ids, cache, 12, num_beams=beams)
    if config is EXACT:
        expected = models.generate(model, ids, dynamic(model), 12, num_beams=beams)
    else:
        expected = by_rules("llama-deep", SPARSE, ids, 12, num_beams=beams)
        assert cache.stats().sparse_steps == 11
    assert torch.equal(out.sequences, expected.sequences)


@case(35)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_beam_index_from_anywhere(model, device):
    """The index may live on another device than what it permutes; int32 is as good as int64."""
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(60, 2), cache)
    before = [layer.dense_kv() for layer in cache.layers]
    index = torch.tensor([1, 0], dtype=torch.int32)
    if device == "meta":
        with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
            cache.reorder_cache(index.to("meta"))  # holds no values: nothing may be permuted by it
        return
    cache.reorder_cache(index)
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.dense_kv(), old[[1, 0]])
        layer.check_integrity()


@case(37)
@pytest.mark.parametrize("length", [20, 90])
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("batch_select_indices", torch.tensor([2, 1]), [2, 1]),
        ("batch_select_indices", torch.tensor([-1]), [2]),
        ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ],
    ids=["reorder", "repeat", "select", "negative", "bool"],
)
def test_keys_stay_keys_and_values_values(length, method, argument, rows):
    cache = OasisCache(SPARSE)
    row_ids = torch.arange(3.0)[:, None, None, None].expand(3, 2, length, 4)
    for layer in range(2):
        cache.update(row_ids, 1000 + row_ids, layer)
    for _ in range(2):
        getattr(cache, method)(argument)
        for layer in cache.layers:
            keys, values = layer.dense_keys_and_values()
            assert keys[:, 0, 0, 0].tolist() == [float(row) for row in rows]
            assert torch.equal(values, 1000 + keys)
            assert (keys == keys[:, :1, :1, :1]).all()
        if len(rows) != 3:
            return
        row_ids = torch.tensor([[2.0, 0.0, 0.0][row] for row in rows])
        rows = [int(number) for number in row_ids]


@case(38)
@CONFIGS
@pytest.mark.parametrize(
    ("arguments", "copies"), [({"num_beams": 4}, 4), ({"num_return_sequences": 4, "do_sample": True}, 4)], ids=str
)
def test_several_sequences_from_one_prefilled_row(model, config, arguments, copies):
    """As it is, one clear error; after `batch_repeat_interleave` it works, rows sharing host pages until they part."""
    ids = models.prompt(60)
    cache = OasisCache(config, model_config=model.config)
    models.forward(model, ids[:, :-1], cache)
    arguments = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": models.PADDING, **arguments}
    with pytest.raises(ValueError, match=r"batch size 4 does not fit this cache.*batch size 1"):
        model.generate(ids, **{models.CACHE_ARGUMENT: cache}, **arguments)
    assert cache.get_seq_length() == 59
    cache.crop(0)
    reserved = cache.stats().host_bytes_reserved
    cache.batch_repeat_interleave(copies)
    assert cache.stats().host_bytes_reserved == reserved
    torch.manual_seed(5)
    out = model.generate(ids, **{models.CACHE_ARGUMENT: cache}, **arguments)
    if config is EXACT:
        complete = dynamic(model)
        models.forward(model, ids[:, :-1], complete)
        complete.batch_repeat_interleave(copies)
        torch.manual_seed(5)
        assert torch.equal(out, model.generate(ids, **{models.CACHE_ARGUMENT: complete}, **arguments))
    for layer in oasis_layers(cache):
        layer.check_integrity()
        keys = layer.dense_keys_and_values()[0]
        assert (keys[:, :, :59] == keys[:1, :, :59]).all()


@case(38)
def test_shared_pages_are_not_written_through(model):
    """What one row appends after it was copied does not show in the other."""
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(61), cache)
    cache.batch_repeat_interleave(2)
    for number in range(20):
        models.forward(model, models.prompt(1, 2, seed=number), cache)
    rows = models.prompt(1, 2, seed=0)
    assert rows[0] != rows[1]
    for layer in cache.layers[1:]:
        keys = layer.dense_keys_and_values()[0]
        assert torch.equal(keys[0, :, :61], keys[1, :, :61])
        assert not torch.equal(keys[0, :, 61:], keys[1, :, 61:])


@case(41)
@pytest.mark.parametrize("name", ["llama-deep", "qwen3", "gemma3-deep", "gpt-oss-deep"])
def test_rows_of_a_left_padded_batch_equal_rows_alone(name):
    model = models.build(name, "eager" if models.eager_only(name) else "sdpa")
    ids, mask = models.left_padded(20, (15, 0))
    out = models.generate(model, ids, OasisCache(EXACT), 16, attention_mask=mask)
    for row, pads in enumerate((15, 0)):
        alone = models.generate(model, ids[row : row + 1, pads:], OasisCache(EXACT), 16)
        assert torch.equal(out.sequences[row, 20:], alone.sequences[0, 20 - pads :])
        assert_close(torch.stack(out.logits)[:, row], torch.stack(alone.logits)[:, 0])


@case(43)
@CONFIGS
def test_a_finished_row_leaves_the_others_alone(model, config):
    """Row 0 ends at its second token and feeds padding from then on; row 1 decodes, and selects, as it does alone."""
    config = OasisConfig(**{**config.__dict__, "trace": True})
    for seed in range(20):  # a pair of rows of which only the first one says its second token
        ids = models.prompt(60, 2, seed=seed)
        whole = greedy(model, ids, OasisCache(config), 30)[:, 60:]
        first = whole[0, 1].item()
        if first != whole[0, 0] and first not in whole[1]:
            break
    cache, alone = OasisCache(config), OasisCache(config)
    out = models.generate(model, ids, cache, 30, eos_token_id=first)
    expected = models.generate(model, ids[1:], alone, 30, eos_token_id=first)
    new = expected.sequences.shape[1]
    assert out.sequences[0, 62:].eq(models.PADDING).all() and new == 90
    assert torch.equal(out.sequences[1, :new], expected.sequences[0])
    for batch, single in zip(selections(cache), selections(alone), strict=True):
        for (tokens, window, selected), (tokens_alone, window_alone, selected_alone) in zip(
            batch, single, strict=False
        ):
            assert (tokens, window, selected[1]) == (tokens_alone, window_alone, selected_alone[0])


@case(44)
@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (EXACT, (4, 13), (6, 1)),
        (SPARSE, (4, 13), (6, 1)),
        (SPARSE, (50, 63), (6, 1)),  # a sparse second turn
        (SIMULATED, (50, 63), (6, 1)),
        (SPARSE, (50, 63), (30, 12)),  # a streamed one
    ],
    ids=["exact", "short", "sparse", "simulated", "streamed"],
)
def test_padding_in_the_middle(model, config, first, second):
    """Turn two of a batch is left-padded too: its padding lies between the turns, and is not read."""
    sizes = max(first), max(second)
    masks = [
        models.left_padded(size, tuple(size - n for n in turn))
        for size, turn in zip(sizes, (first, second), strict=True)
    ]
    ids, mask = torch.cat([part[0] for part in masks], 1), torch.cat([part[1] for part in masks], 1)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], 1)
    ids = torch.cat([ids, models.prompt(6, 2, seed=7)], 1)
    cache, truth, complete = OasisCache(config), models.build("llama-deep", oracle.NAME), DynamicCache()
    borders = [0, sizes[0], sum(sizes), *range(sum(sizes) + 1, sum(sizes) + 7)]
    for start, stop in pairwise(borders):
        real = mask[:, start:stop].bool()
        out = models.forward(model, ids[:, start:stop], cache, mask[:, :stop])
        with oracle.rules(config):
            expected = models.forward(truth, ids[:, start:stop], complete, mask[:, :stop])
        assert_close(out[real], expected[real], 2e-5)
    assert (cache.stats().sparse_steps > 0) == (config is not EXACT and first[0] > 40)
    if config is EXACT:  # and each row is what a row without any padding computes
        for row in range(2):
            alone = models.forward(model, ids[row, mask[row].bool()][None], dynamic(model))
            assert_close(out[row, -1:], alone[0, -1:])


@case(44)
def test_second_turn_through_generate(model):
    """The same by `generate`, with the mask over both turns."""
    ids, mask = models.left_padded(13, (9, 0))
    more, more_mask = models.left_padded(6, (0, 5), seed=2)
    results = []
    for cache in (OasisCache(EXACT), dynamic(model)):
        out = models.generate(model, ids, cache, 8, attention_mask=mask)
        sequence = torch.cat([out.sequences, more], 1)
        whole = torch.cat([mask, torch.ones(2, 8, dtype=mask.dtype), more_mask], 1)
        results.append(models.generate(model, sequence, cache, 8, attention_mask=whole).sequences)
    assert torch.equal(*results)


@case(1, 37)
def test_batches_of_copies_go_separate_ways(model):
    """A copy of a batch, reordered, leaves the original as it was."""
    cache = OasisCache(SIMULATED, model_config=model.config)
    models.forward(model, models.prompt(60, 2), cache)
    models.forward(model, models.prompt(1, 2), cache)
    twin = copy.deepcopy(cache)
    before = [layer.dense_kv() for layer in cache.layers]
    twin.reorder_cache(torch.tensor([1, 1]))
    twin.crop(-30)
    for layer, old, other in zip(cache.layers, before, twin.layers, strict=True):
        assert torch.equal(layer.dense_kv(), old)
        assert torch.equal(other.dense_kv(), old[[1, 1], :, :31])
