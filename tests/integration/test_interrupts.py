"""A forward that breaks off in the middle: the cache says so, and goes on after crop(0) or reset()."""

from __future__ import annotations

import pytest
import torch

from oasis_cache import OasisCache
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
