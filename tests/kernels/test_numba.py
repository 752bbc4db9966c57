"""The numba version of int2 scoring against the reference, on every shape that changes its path."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference

numba_ops = pytest.importorskip("oasis_cache.kernels.numba_ops")


@pytest.mark.parametrize("dim", [2, 16, 24, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("rows", [1, 12])
def test_log_mass_equals_reference(dim, block_size, rows):
    generator = torch.Generator().manual_seed(dim * block_size + rows)
    keys = torch.randn(2, 3, 40, block_size, dim, generator=generator)
    queries = torch.randn(2, 3, rows, dim, generator=generator) * 3
    codes, low, step = reference.quantise_int2(keys)
    expected = reference.log_mass_int2(queries, codes[:, :, :37], low[:, :, :37], step[:, :, :37], 0.25)
    got = numba_ops.log_mass_int2(queries, codes, low, step, 37, 0.25)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_threads_change_nothing(monkeypatch):
    keys, queries = torch.randn(1, 2, 300, 16, 64), torch.randn(1, 2, 3, 64)
    codes, low, step = reference.quantise_int2(keys)
    serial = numba_ops.log_mass_int2(queries, codes, low, step, 300, 0.125)
    monkeypatch.setattr(numba_ops, "_PARALLEL_FROM", 0)
    assert torch.equal(numba_ops.log_mass_int2(queries, codes, low, step, 300, 0.125), serial)


def test_extreme_scores_stay_finite():
    keys = torch.randn(1, 1, 4, 16, 64)
    queries = torch.randn(1, 1, 2, 64) * 1e4
    codes, low, step = reference.quantise_int2(keys)
    got = numba_ops.log_mass_int2(queries, codes, low, step, 4, 1.0)
    torch.testing.assert_close(got, reference.log_mass_int2(queries, codes, low, step, 1.0), rtol=1e-5, atol=1e-2)
