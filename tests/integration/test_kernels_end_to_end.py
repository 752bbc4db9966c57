"""Decoding with every operation in its Triton kernel, in the interpreter, against the path that CPUs take."""

from __future__ import annotations

import pytest
import torch

from oasis_cache import OasisCache, kernels
from oasis_cache.kernels import triton_ops
from tests import models

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels"),
    pytest.mark.slow,  # Triton's interpreter
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

BASE = dict(budget=64, block_size=16, recent_blocks=1, sparse_rows=4, stream_tokens=64)
TOLERANCE = 1e-4


@pytest.fixture
def served(monkeypatch):
    """Names of the Triton operations that ran."""
    calls = set()

    def spy(name, function):
        def call(*args, **kwargs):
            calls.add(name)
            return function(*args, **kwargs)

        return call

    for name in triton_ops.__all__:
        monkeypatch.setattr(triton_ops, name, spy(name, getattr(triton_ops, name)))
    return calls


def decode(model, cache, batch, **options):
    ids, mask = models.left_padded(150, (0, 9)[:batch], seed=3)
    out = models.generate(model, ids, cache, 5, attention_mask=mask if batch > 1 else None, **options)
    for layer in cache.layers:
        layer.check_integrity()
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(
    ("settings", "batch", "options"),
    [
        ({}, 1, {}),
        ({}, 2, {}),
        ({"index": "minmax"}, 1, {}),
        ({"index": "int1", "lookahead": "draft", "max_fetch": 2}, 1, {"prompt_lookup_num_tokens": 3}),
        ({"on_miss": "skip", "max_fetch": 2}, 1, {}),
        ({"engine": "simulated", "lookahead": "previous", "max_fetch": 1}, 1, {"num_beams": 2}),
    ],
    ids=str,
)
def test_kernels_give_the_tokens_of_the_reference_path(served, settings, batch, options):
    model = models.build("llama")
    tokens, logits = decode(model, OasisCache(**BASE, **settings), batch, **options)
    assert not served
    before = kernels.fallbacks.copy()
    with kernels.interpreted():
        cache = OasisCache(**BASE, **settings)
        got_tokens, got_logits = decode(model, cache, batch, **options)
    assert cache.stats().sparse_steps >= 2
    index = settings.get("index", "int2")
    expected = {f"score_{index}", "delta_select", "gather_blocks", "sparse_attention", "seal_blocks"}
    assert served >= (expected - {"seal_blocks"} if index == "int1" else expected)
    assert ("exchange_blocks" in served) == ("lookahead" in settings)
    assert kernels.fallbacks == before
    assert torch.equal(got_tokens, tokens)
    assert models.relative_error(got_logits, logits) < TOLERANCE
