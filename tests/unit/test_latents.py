"""Queries that absorb the expansion of latents, against the expansion itself."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import oasis_cache
from oasis_cache import OasisCache, OasisConfig, OasisWarning
from oasis_cache.attention import KVView
from oasis_cache.latents import Expansion
from tests import models, oracle

pytestmark = pytest.mark.contract

LATENT, ROTARY = 16, 8
SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)


class ValuesFirst(torch.nn.Module):
    """Expands as DeepSeek's attention does, but with the rows of each head's values before those of its keys."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.kv_b_proj, self.width, self.value_dim = (
            attention.kv_b_proj,
            attention.qk_nope_head_dim,
            attention.v_head_dim,
        )

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_b_proj(kv_nope).unflatten(-1, (-1, self.width + self.value_dim)).squeeze(1).transpose(1, 2)
        values, keys = both.split([self.value_dim, self.width], dim=-1)
        return torch.cat([keys, k_rot.expand(-1, keys.shape[1], -1, -1)], -1), values


class Wrapped(torch.nn.Linear):
    """No plain matrix: what a quantised layer is to whoever looks at its type."""


def attention_module(kind: str) -> torch.nn.Module:
    attention = copy.deepcopy(models.build("deepseek-v3").model.layers[1].self_attn)
    if kind == "wrapped":
        attention.kv_b_proj.__class__ = Wrapped
    return ValuesFirst(attention) if kind == "values-first" else attention


@pytest.mark.parametrize(("kind", "by_weights"), [("plain", True), ("values-first", False), ("wrapped", False)])
def test_absorbing_equals_expanding(kind, by_weights):
    """Products with expanded keys and sums of expanded values, however the module keeps its weights."""
    module = attention_module(kind)
    expansion = Expansion(module, type(module).expand_kv, LATENT, ROTARY)
    latents, rotary = torch.randn(2, 1, 37, LATENT), torch.randn(2, 1, 37, ROTARY)
    keys, values = expansion.expand(latents, rotary)
    query = torch.randn(2, keys.shape[1], 3, keys.shape[3])
    sizes = expansion.sizes(torch.float32, query.device)
    assert (sizes.query_heads, sizes.key_dim, sizes.value_dim) == (keys.shape[1], keys.shape[3], values.shape[3])
    assert sizes.by_weights == by_weights
    products = expansion.absorb(query) @ torch.cat([latents, rotary], -1).transpose(-1, -2)
    assert models.relative_error(products, query @ keys.transpose(-1, -2)) < 1e-5
    weights = torch.rand(2, keys.shape[1], 3, 37)
    assert models.relative_error(expansion.values_of(weights @ latents), weights @ values) < 1e-5


def test_trained_weights_are_followed():
    """Nothing of the weights is remembered: a model that is trained on, or loaded anew, is read by what it has now."""
    module = attention_module("plain")
    expansion = Expansion(module, type(module).expand_kv, LATENT, ROTARY)
    query = torch.randn(1, 4, 1, 16)
    before = expansion.absorb(query)
    with torch.no_grad():
        module.kv_b_proj.weight.mul_(2)
    assert models.relative_error(expansion.absorb(query)[..., :LATENT], 2 * before[..., :LATENT]) < 1e-6


@pytest.mark.parametrize("change", ["adapter", "hook"])
def test_a_module_that_is_changed_later_is_followed(change):
    """Adapters and hooks come after a model was first used: then its weights alone are not what expands any more."""
    module = attention_module("plain")
    expansion = Expansion(module, type(module).expand_kv, LATENT, ROTARY)
    query = torch.randn(1, 4, 1, 16)
    expansion.absorb(query)
    if change == "adapter":
        module.kv_b_proj = torch.nn.Sequential(module.kv_b_proj, torch.nn.Linear(64, 64, bias=False))
    else:
        module.kv_b_proj.register_forward_hook(lambda linear, inputs, out: 3 * out)
    latents, rotary = torch.randn(1, 1, 9, LATENT), torch.randn(1, 1, 9, ROTARY)
    keys, values = expansion.expand(latents, rotary)
    products = expansion.absorb(query) @ torch.cat([latents, rotary], -1).transpose(-1, -2)
    assert models.relative_error(products, query @ keys.transpose(-1, -2)) < 1e-5
    weights = torch.rand(1, 4, 1, 9)
    assert models.relative_error(expansion.values_of(weights @ latents), weights @ values) < 1e-5


@pytest.mark.parametrize("change", ["bias", "hook", "not linear"])
def test_what_is_added_to_an_expansion_is_not_lost(change):
    """Adapters may have a bias: its share of the values is kept. What no sum of latents expands to is computed densely."""
    model = copy.deepcopy(models.build("deepseek-v3"))
    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        if change == "bias":
            linear.bias = torch.nn.Parameter(torch.randn(linear.out_features), requires_grad=False)
        else:
            linear.register_forward_hook(lambda _, inputs, out: out + 0.5 if change == "hook" else out.tanh())
    config = OasisConfig(budget=64, block_size=8, recent_blocks=2, sparse_rows=8)  # of 66 tokens, it reads all
    cache, complete = OasisCache(config), DynamicCache(config=model.config)
    ids = models.prompt(70)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OasisWarning)
        for part in (ids[:, :66], ids[:, 66:67], ids[:, 67:]):
            assert (
                models.relative_error(models.forward(model, part, cache), models.forward(model, part, complete)) < 1e-5
            )
    dense = [str(each.message) for each in caught if "not linear" in str(each.message)]
    assert (len(dense), cache.stats().fallback_steps) == ((1, 2) if change == "not linear" else (0, 0))


@pytest.mark.parametrize(
    "settings", [{"on_miss": "skip", "lookahead": "draft"}, {"index": "minmax"}, {"index": "exact"}]
)
def test_policies_and_indexes(settings):
    """`skip` at a budget that holds every block reads everything; the other indexes follow the rules."""
    model, truth = models.build("deepseek-v3"), models.build("deepseek-v3", oracle.NAME)
    config = OasisConfig(**{**SMALL.__dict__, **settings})
    cache, complete = OasisCache(config), DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(5)
    worst = 0.0
    with oracle.rules(config):
        for rows in (90, 1, 3, 1, 1):
            ids = torch.randint(2, models.VOCABULARY, (1, rows), generator=generator)
            out, expected = models.forward(model, ids, cache), models.forward(truth, ids, complete)
            worst = max(worst, models.relative_error(out, expected))
    assert cache.stats().sparse_steps == 4
    if config.on_miss == "fetch":
        assert worst < 1e-5
    else:  # reads what was predicted: near the rules, not on them
        assert worst < 1.0 and cache.stats().prefetched > 0


def test_half_precision():
    model = copy.deepcopy(models.build("deepseek-v3")).bfloat16()
    cache, complete = (
        OasisCache(budget=64, block_size=8, recent_blocks=2, sparse_rows=8),
        DynamicCache(config=model.config),
    )
    ids = models.prompt(66)
    for part in (ids[:, :60], ids[:, 60:64]):
        out, expected = models.forward(model, part, cache), models.forward(model, part, complete)
        assert torch.equal(out, expected)
    out = models.forward(model, ids[:, 64:], cache)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())


def test_what_is_no_attention_gets_expanded_tensors():
    """Views of keys that are used otherwise become all keys, warned about and counted; and so do latents themselves."""
    model = models.build("deepseek-v3")
    seen = {}

    cache, complete = OasisCache(SMALL), DynamicCache(config=model.config)
    ids = models.prompt(92)
    models.forward(model, ids[:, :90], cache)
    models.forward(model, ids[:, :90], complete)

    def touching(self, kv_nope, k_rot):
        keys, values = wrapped(self, kv_nope, k_rot)
        seen[self.layer_idx] = type(keys)
        return keys * 1.0, values

    wrapped = modeling_deepseek_v3.DeepseekV3Attention.expand_kv
    modeling_deepseek_v3.DeepseekV3Attention.expand_kv = touching
    try:
        with pytest.warns(OasisWarning, match="complete dense keys"):
            out = models.forward(model, ids[:, 90:], cache)
    finally:
        modeling_deepseek_v3.DeepseekV3Attention.expand_kv = wrapped
    assert models.relative_error(out, models.forward(model, ids[:, 90:], complete)) < 1e-5
    assert issubclass(seen[0], KVView) and cache.stats().fallback_steps == 1 and cache.stats().sparse_steps == 0


def test_uninstall_gives_the_method_back():
    oasis_cache.uninstall()
    owner = modeling_deepseek_v3.DeepseekV3Attention
    own = owner.expand_kv
    model, ids = models.build("deepseek-v3"), models.prompt(91)
    cache = OasisCache(SMALL)
    models.forward(model, ids[:, :90], cache)
    assert owner.expand_kv is not own
    oasis_cache.uninstall()
    assert owner.expand_kv is own
    complete = DynamicCache(config=model.config)  # and the cache works on, densely
    models.forward(model, ids[:, :90], complete)
    with pytest.warns(OasisWarning):
        out = models.forward(model, ids[:, 90:], cache)
    assert models.relative_error(out, models.forward(model, ids[:, 90:], complete)) < 1e-5
