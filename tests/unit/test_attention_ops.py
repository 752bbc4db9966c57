"""Attention operations: reference against a naive softmax, and the fused versions against the reference."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, torch_ops


def naive(queries, keys, values, scaling, mask=None, softcap=None, sinks=None):
    scores = torch.einsum("bhrd,bhtd->bhrt", queries, keys).double() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        logits = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.double()).float(), weights.float()


def inputs(heads=2, rows=5, tokens=40, key_dim=8, value_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, key_dim), (tokens, key_dim), (tokens, value_dim)
    return tuple(torch.randn(2, heads, *shape, generator=generator) for shape in shapes)


def relative(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("function", [reference.attention, torch_ops.attention], ids=["reference", "torch"])
def test_attention_equals_naive_softmax(function, kind, softcap, value_dim):
    queries, keys, values = inputs(value_dim=value_dim)
    mask = {"none": None, "bool": torch.rand(2, 1, 5, 40) < 0.7, "additive": torch.randn(2, 1, 5, 40)}[kind]
    out, lse = function(queries, keys, values, 0.4, mask, softcap)
    want, _ = naive(queries, keys, values, 0.4, mask, softcap)
    assert relative(out, want) < 1e-5
    assert lse.shape == (2, 2, 5)


@pytest.mark.parametrize("function", [reference.attention, torch_ops.attention], ids=["reference", "torch"])
def test_parts_merge_to_the_whole(function):
    queries, keys, values = inputs()
    parts = [function(queries, keys[:, :, s], values[:, :, s], 0.4) for s in (slice(0, 7), slice(7, 8), slice(8, 40))]
    out, lse = reference.merge(parts)
    whole, whole_lse = reference.attention(queries, keys, values, 0.4)
    assert relative(out, whole) < 1e-5
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_are_zero_and_merge_to_nothing():
    queries, keys, values = inputs()
    out, lse = reference.attention(queries, keys, values, 0.4, torch.zeros(5, 40, dtype=torch.bool))
    assert (out == 0).all()
    assert lse.isneginf().all()
    whole = reference.attention(queries, keys, values, 0.4)
    assert torch.equal(reference.merge([(out, lse), whole])[0], whole[0])
    assert (reference.merge([(out, lse), (out, lse)])[0] == 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("diagonal", [-9, -4, -2, 0, 3, 30, 37, 39, 60])
def test_a_diagonal_is_the_causal_mask_that_it_stands_for(diagonal, value_dim, softcap):
    queries, keys, values = inputs(rows=9, value_dim=value_dim)
    mask = torch.arange(40) <= torch.arange(9).unsqueeze(-1) + diagonal
    out, lse = torch_ops.attention(queries, keys, values, 0.4, None, softcap, diagonal)
    want, want_lse = reference.attention(queries, keys, values, 0.4, mask, softcap)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(1, 1, 9, 40), (2, 2, 9, 40), (2, 1, 1, 40), (9, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_attention_is_fused_and_rows_may_see_nothing(shape, dtype, kind, monkeypatch):
    queries, keys, values = (part.to(dtype) for part in inputs(rows=9))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0, :] = False
    if kind == "additive":
        mask = torch.zeros(shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    want, want_lse = reference.attention(queries, keys, values, 0.4, mask)
    monkeypatch.setattr(reference, "attention", None)
    out, lse = torch_ops.attention(queries, keys, values, 0.4, mask)
    torch.testing.assert_close(
        out, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    torch.testing.assert_close(
        lse, want_lse, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("function", [reference.attention, torch_ops.attention], ids=["reference", "torch"])
def test_masks_in_double_precision_are_taken(function):
    queries, keys, values = (part.double() for part in inputs())
    mask = torch.randn(2, 1, 5, 40, dtype=torch.float64)
    for softcap in (None, 2.0):
        out, _ = function(queries, keys, values, 0.4, mask, softcap)
        assert relative(out, naive(queries, keys, values, 0.4, mask, softcap)[0]) < 1e-5


def test_the_fused_attention_of_gpus_takes_and_gives_what_is_passed():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        queries, keys = (torch.empty(2, 4, tokens, 128, device="cuda", dtype=torch.bfloat16) for tokens in (70, 200))
        for others, causal in ((keys, False), (queries, True)):
            out, lse = torch_ops._fused(queries, others, others, 0.1, causal)
            assert (out.shape, out.dtype, out.device.type) == ((2, 4, 70, 128), torch.float32, "cuda")
            assert (lse.shape, lse.dtype) == ((2, 4, 70), torch.float32)


def test_query_chunks_change_nothing(monkeypatch):
    queries, keys, values = inputs(rows=23)
    mask = torch.rand(2, 2, 23, 40) < 0.8
    whole = torch_ops.attention(queries, keys, values, 0.4, mask)
    monkeypatch.setattr(torch_ops, "QUERY_CHUNK", 4)
    torch.testing.assert_close(torch_ops.attention(queries, keys, values, 0.4, mask), whole)


def test_sinks_take_their_share():
    queries, keys, values = inputs()
    sinks = torch.tensor([0.5, 3.0])
    out = reference.apply_sinks(*reference.attention(queries, keys, values, 0.4), sinks)
    assert relative(out, naive(queries, keys, values, 0.4, sinks=sinks)[0]) < 1e-5
    drowned = reference.apply_sinks(*reference.attention(queries, keys, values, 0.4), torch.full((2,), 40.0))
    assert drowned.abs().max() < 1e-6


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_sparse_attention_equals_naive_softmax(group, rows, kind, softcap, with_sinks):
    kv_heads, key_dim, value_dim, tokens = 2, 8, 8, 30
    queries, keys, values = inputs(kv_heads, group * rows, tokens, key_dim, value_dim)
    kv = torch.cat(
        [torch.cat([keys, values], -1), torch.full((2, 2, 9, 16), float("nan"))], 2
    )  # unused room is never read
    mask = {
        "none": None,
        "bool": torch.rand(2, 1, group * rows, tokens) < 0.8,
        "additive": torch.randn(2, 2, group * rows, tokens),
    }[kind]
    sinks = torch.randn(kv_heads, group) if with_sinks else None
    causal = reference.causal_rows(rows, tokens, torch.device("cpu")).repeat(group, 1)
    full = (
        causal
        if mask is None
        else mask & causal
        if mask.dtype == torch.bool
        else mask.masked_fill(~causal, float("-inf"))
    )
    per_row = None if sinks is None else sinks.repeat_interleave(rows, 1)

    def heads(tensor):
        return tensor.reshape(2, kv_heads * group * rows, 1, -1)

    want, weights = naive(
        heads(queries),
        keys.repeat_interleave(group * rows, 1),
        values.repeat_interleave(group * rows, 1),
        0.3,
        heads(full.expand(2, kv_heads, -1, -1)),
        softcap,
        None if per_row is None else per_row.flatten(),
    )
    want, weights = want.view(2, kv_heads, group * rows, -1), weights.view(2, kv_heads, group, rows, tokens)
    arguments = (queries, kv, key_dim, tokens, rows, 0.3, mask, softcap, sinks)
    out, lse, mass = reference.sparse_attention(*arguments)
    assert relative(out, want) < 1e-5
    torch.testing.assert_close(mass, weights.mean(2), rtol=1e-4, atol=1e-6)
    assert lse.isfinite().all()
    assert relative(torch_ops.sparse_attention(*arguments), want) < 1e-5
