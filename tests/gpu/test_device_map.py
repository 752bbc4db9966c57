"""One cache under a device map: layers on the CPU and a GPU, and on two GPUs where there are two."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import dispatch_model

from oasis_cache import OasisCache
from tests.models import build, generate, left_padded, prompt, relative_error

pytestmark = pytest.mark.gpu
SPARSE = {"budget": 256, "recent_blocks": 2, "sparse_rows": 8}
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 128, "num_hidden_layers": 4}
GPUS = torch.cuda.device_count()


def placed(first: str, second: str):
    """A model whose first two layers lie on one device, all behind them on another."""
    model = copy.deepcopy(build("llama", "eager", **SIZES))
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first, "model.layers.1": first}
    behind = ("model.layers.2", "model.layers.3", "model.norm", "lm_head")
    return dispatch_model(model, {**places, **dict.fromkeys(behind, second)}, main_device=first, force_hooks=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cpu", "cuda:0"),
        pytest.param("cuda:0", "cuda:1", marks=pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")),
        pytest.param("cuda:1", "cuda:0", marks=pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}], ids=str)
def test_a_device_map_gives_the_tokens_of_one_device(first, second, arguments):
    """Compared with the model on the second device alone, where its later layers lie in both runs."""
    model, ids = placed(first, second), prompt(700)
    alone = copy.deepcopy(build("llama", "eager", **SIZES)).to(second)
    with OasisCache(**SPARSE) as cache, OasisCache(**SPARSE) as whole:
        got = generate(model, ids.to(first), cache, 24, **arguments)
        want = generate(alone, ids.to(second), whole, 24, **arguments)
        assert [str(layer.shape.device) for layer in cache.layers] == [first, first, second, second]
        assert cache.stats().sparse_steps > 0
        assert cache.stats().fallback_steps == 0
    assert relative_error(got.logits[0].cpu(), want.logits[0].cpu()) <= 1e-4
    if first != "cpu":  # which rounds otherwise
        assert torch.equal(got.sequences.cpu(), want.sequences.cpu())


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_a_padded_batch_on_two_devices():
    model, (ids, mask) = placed("cuda:0", "cuda:1"), left_padded(700, (0, 90))
    alone = copy.deepcopy(build("llama", "eager", **SIZES)).to("cuda:0")
    with OasisCache(**SPARSE) as cache, OasisCache(**SPARSE) as whole:
        got = generate(model, ids.to("cuda:0"), cache, 24, attention_mask=mask.to("cuda:0"))
        want = generate(alone, ids.to("cuda:0"), whole, 24, attention_mask=mask.to("cuda:0"))
    assert torch.equal(got.sequences, want.sequences)
