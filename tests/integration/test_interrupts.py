"""A forward that breaks off in the middle: the cache says so, and goes on after crop(0) or reset()."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache
from oasis_cache.index import BlockIndex
from oasis_cache.pool import WorkingSet
from tests import models

pytestmark = pytest.mark.contract
SMALL = dict(budget=64, block_size=8, recent_blocks=2, sparse_rows=8, stream_tokens=32)


class Interrupt(Exception):
    """What a user's Ctrl-C stands for here."""


def interrupted(model, ids, cache, layer):
    def stop(*_):
        raise Interrupt

    handle = model.model.layers[layer].mlp.register_forward_pre_hook(stop)
    try:
        with pytest.raises(Interrupt):
            models.forward(model, ids, cache)
    finally:
        handle.remove()


@pytest.mark.parametrize("new_tokens", [1, 5, 40], ids=["step", "draft", "streamed"])
@pytest.mark.parametrize("past", [0, 20, 200], ids=["empty", "dense", "paged"])
@pytest.mark.parametrize("settings", [{}, {"lookahead": "draft", "engine": "simulated"}], ids=["sync", "prefetching"])
def test_crop_zero_goes_back_to_the_last_complete_forward(past, new_tokens, settings):
    model, ids = models.build("llama"), models.prompt(260)
    cache, twin = OasisCache(**SMALL, **settings), OasisCache(**SMALL)
    for each in (cache, twin):
        if past:
            models.forward(model, ids[:, :past], each)
    more = ids[:, past : past + new_tokens]
    interrupted(model, more, cache, layer=0)
    assert cache.get_seq_length() == past + new_tokens
    cache.crop(0)
    assert [layer.get_seq_length() for layer in cache.layers] == [past] * len(cache.layers)
    for part in (more, ids[:, :1]):
        expected = models.forward(model, part, twin)
        torch.testing.assert_close(models.forward(model, part, cache), expected, rtol=1e-5, atol=1e-5)
    for layer in cache.layers:
        layer.check_integrity()


def test_going_on_without_is_refused_in_words():
    model, ids = models.build("llama"), models.prompt(100)
    cache = OasisCache(**SMALL)
    models.forward(model, ids, cache)
    interrupted(model, ids[:, :1], cache, layer=0)
    with pytest.raises(RuntimeError, match=r"interrupted.*crop\(0\)"):
        models.forward(model, ids[:, :1], cache)
    cache.reset()
    assert torch.equal(models.forward(model, ids, cache), models.forward(model, ids, OasisCache(**SMALL)))


def test_other_layers_cannot_go_back():
    model, ids = models.build("gemma3"), models.prompt(40)
    cache = OasisCache(**SMALL)
    models.forward(model, ids, cache)
    interrupted(model, ids[:, :1], cache, layer=0)
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        cache.crop(0)
    cache.reset()
    assert torch.equal(models.forward(model, ids, cache), models.forward(model, ids, OasisCache(**SMALL)))


@pytest.mark.parametrize("name", ["gemma3", "gemma3-deep", "gpt-oss-deep"])
@pytest.mark.parametrize("place", ["first", "last but one"])
def test_interruptions_among_windowed_layers_are_noticed(name, place):
    """Before the first full-attention layer, and behind the last one."""
    model, ids = models.build(name), models.prompt(200)
    cache = OasisCache(**SMALL)
    models.forward(model, ids, cache)
    layer = 0 if place == "first" else model.config.get_text_config().num_hidden_layers - 2
    interrupted(model, ids[:, :1], cache, layer=layer)
    with pytest.raises(RuntimeError, match=r"interrupted.*[Cc]all reset\(\)"):
        models.forward(model, ids[:, :1], cache)
    cache.reset()
    assert torch.equal(models.forward(model, ids, cache), models.forward(model, ids, OasisCache(**SMALL)))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_memory_that_does_not_suffice_is_said_before_any_layer_takes_tokens(name):
    model, ids = models.build(name), models.prompt(300)
    cache = OasisCache(**SMALL, max_host_bytes=1000)
    with pytest.raises(MemoryError, match="max_host_bytes"):
        models.forward(model, ids, cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    few = ids[:, :40]
    assert torch.equal(models.forward(model, few, cache), models.forward(model, few, OasisCache(**SMALL)))


@pytest.mark.parametrize("part", ["index", "window"])
@pytest.mark.parametrize("past", [0, 200], ids=["prefill", "decode"])
def test_a_failure_while_blocks_are_sealed_leaves_store_and_index_in_step(monkeypatch, part, past):
    """Out of memory where a device allocates: the same forward after crop(0) gives what an undisturbed cache gives."""
    model, ids = models.build("llama"), models.prompt(330)
    cache, twin = OasisCache(**SMALL), OasisCache(**SMALL)
    owner, name = (BlockIndex, "_room") if part == "index" else (WorkingSet, "append")
    original, failures, armed = getattr(owner, name), [2], [False]

    def fail(self, *args):
        failures[0] -= armed[0]
        if armed[0] and failures[0] == 0:
            raise torch.OutOfMemoryError("no memory is left")
        return original(self, *args)

    if past:
        for each in (cache, twin):
            models.forward(model, ids[:, :past], each)
    monkeypatch.setattr(owner, name, fail)
    position, failed = past, 0
    while position < ids.shape[1]:
        rows = 1 if past else ids.shape[1]
        armed[0] = True
        try:
            logits = models.forward(model, ids[:, position : position + rows], cache)
        except torch.OutOfMemoryError:
            failed += 1
            cache.crop(0)
            continue
        finally:
            armed[0] = False
        torch.testing.assert_close(
            logits, models.forward(model, ids[:, position : position + rows], twin), rtol=1e-5, atol=1e-5
        )
        position += rows
        if past and position == past + 40:
            break
    assert failed == 1
    for layer in cache.layers:
        layer.check_integrity()


def test_a_streamed_forward_keeps_nothing_on_the_device_once_it_was_read():
    model, ids = models.build("llama"), models.prompt(900)
    cache = OasisCache(**SMALL)
    models.forward(model, ids[:, :200], cache)
    before = cache.stats().device_bytes
    models.forward(model, ids[:, 200:], cache)
    assert cache.stats().streamed_steps == 1
    assert cache.stats().device_bytes == before
    assert all(layer.pending is None for layer in cache.layers)


def test_another_batch_may_follow_a_first_forward_that_failed(monkeypatch):
    model, ids = models.build("llama"), models.left_padded(200, (0, 0, 0), seed=1)[0]
    cache, original, armed = OasisCache(**SMALL), BlockIndex.append, [True]

    def fail(self, keys):
        if armed[0]:
            raise torch.OutOfMemoryError("no memory is left")
        return original(self, keys)

    monkeypatch.setattr(BlockIndex, "append", fail)
    with pytest.raises(torch.OutOfMemoryError):
        models.forward(model, ids, cache)
    armed[0] = False
    cache.crop(0)
    expected = models.forward(model, ids[:2], OasisCache(**SMALL))
    assert torch.equal(models.forward(model, ids[:2], cache), expected)
    assert cache.layers[0].store.batch == 2


@pytest.mark.parametrize("part", ["index", "slots"])
def test_a_reorder_that_fails_changes_nothing_in_its_layer(monkeypatch, part):
    model, ids = models.build("llama", num_hidden_layers=1), models.left_padded(200, (0, 0), seed=1)[0]
    cache, twin = OasisCache(**SMALL), OasisCache(**SMALL)
    for each in (cache, twin):
        models.forward(model, ids, each)
        models.forward(model, ids[:, :1], each)
    owner = BlockIndex if part == "index" else WorkingSet

    def fail(*_):
        raise torch.OutOfMemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(owner, "selected_rows", fail)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reorder_cache(torch.tensor([1, 0]))
    for layer in cache.layers:
        layer.check_integrity()
    assert torch.equal(models.forward(model, ids[:, :1], cache), models.forward(model, ids[:, :1], twin))


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([1, 0])),
    ],
)
def test_rows_that_only_some_layers_rearranged_are_not_read(method, argument, monkeypatch):
    """Memory that runs out in the second layer: what follows is refused until a reset."""
    model = models.build("llama")
    cache = OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=4)
    ids = models.prompt(80, 2)
    models.forward(model, ids, cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "_select_rows", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(cache, method)(argument)
    for batch in (2, 4):
        with pytest.raises(RuntimeError, match=f"{method} broke off.*reset"):
            models.forward(model, models.prompt(1, batch), cache)
    cache.reset()
    expected = models.forward(model, ids, DynamicCache(config=model.config))
    assert models.relative_error(models.forward(model, ids, cache), expected) < 1e-5
