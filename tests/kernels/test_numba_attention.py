"""Attention compiled by numba against the reference, and against itself with another number of threads."""

from __future__ import annotations

import pytest
import torch

from oasis_cache import kernels
from oasis_cache.kernels import reference, torch_ops

numba_attention = pytest.importorskip("oasis_cache.kernels.numba_attention")


def inputs(num_tokens, group=3, rows=1, dims=(64, 64), batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens + rows)
    queries = torch.randn(batch, 2, group * rows, dims[0], generator=generator).to(dtype)
    kv = torch.randn(batch, 2, num_tokens + 9, sum(dims), generator=generator).to(dtype)
    kv[:, :, num_tokens:] = float("nan")  # what lies behind is not read
    return queries, kv, dims[0], num_tokens, rows, 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(64, 64), (16, 16), (128, 128), (32, 64)])
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 1), (4, 2), (1, 7), (6, 5)])
@pytest.mark.parametrize("num_tokens", [7, 16, 513, 1040])
def test_attention_equals_the_reference(num_tokens, group, rows, dims, dtype):
    arguments = inputs(num_tokens, group, rows, dims, dtype=dtype)
    expected = reference.sparse_attention(*arguments)[0]
    got = numba_attention.sparse_attention(*arguments)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert float((got.float() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(("group", "rows"), [(3, 11), (3, 32), (1, 128)])
def test_rounds_of_drafts_equal_the_reference(group, rows):
    arguments = inputs(700, group, rows)
    assert numba_attention.serves(*arguments[:3]), "a round of the default 32 rows and a group of 3 is compiled too"
    expected = reference.sparse_attention(*arguments)[0]
    got = numba_attention.sparse_attention(*arguments)
    assert float((got - expected).norm() / expected.norm()) < 2e-6


def test_scores_far_apart_do_not_overflow():
    queries, kv, *rest = inputs(600)
    arguments = (queries * 300, kv, *rest)
    torch.testing.assert_close(
        numba_attention.sparse_attention(*arguments), reference.sparse_attention(*arguments)[0], rtol=1e-4, atol=1e-5
    )


def test_sums_do_not_depend_on_threads(monkeypatch):
    arguments = inputs(1500)
    alone = numba_attention.sparse_attention(*arguments)
    monkeypatch.setattr(numba_attention, "_PARALLEL_FROM", 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(numba_attention.sparse_attention(*arguments), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("serves", [True, False])
def test_what_it_does_not_serve_goes_to_pytorch(serves, monkeypatch):
    calls = []
    monkeypatch.setattr(torch_ops, "sparse_attention", lambda *rest: calls.append(rest))
    dims = (64, 64) if serves else (24, 24)
    queries, kv, key_dim, num_tokens, rows, scaling = inputs(100, dims=dims)
    kernels.sparse_attention(queries, kv, key_dim, num_tokens, rows, scaling)
    assert bool(calls) is not serves
    kernels.sparse_attention(queries, kv, key_dim, num_tokens, rows, scaling, softcap=3.0)
    assert len(calls) == 1 + (not serves)


@pytest.mark.parametrize("group", [1, 3])
def test_queries_of_any_layout(group):
    """Attention hands them over transposed; addresses are only right for contiguous ones."""
    queries, *rest = inputs(100, group, rows=3)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    assert torch.equal(
        numba_attention.sparse_attention(turned, *rest), numba_attention.sparse_attention(queries, *rest)
    )
