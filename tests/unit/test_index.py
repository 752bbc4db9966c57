"""Indexes: what their estimates promise, and that growth, truncation and row changes lose nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from oasis_cache import kernels
from oasis_cache.index import INDEXES, make_index
from oasis_cache.kernels import reference


def keys_of(blocks=20, batch=2, heads=2, block_size=16, dim=24, seed=0):
    return torch.randn(batch, heads, blocks, block_size, dim, generator=torch.Generator().manual_seed(seed))


def filled(name, keys):
    index = make_index(name)
    index.append(keys)
    return index


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", [1, 2, 7, 16, 24, 80])
def test_codes_survive_packing(bits, dim):
    codes = torch.randint(0, 2**bits, (3, 5, dim), dtype=torch.uint8)
    packed = reference.pack_codes(codes, bits)
    assert packed.shape[-1] == -(-dim * bits // 8)
    assert torch.equal(reference.unpack_codes(packed, bits, dim), codes)


def test_int2_keys_are_within_half_a_step():
    keys = keys_of() * torch.rand(24) * 30 + torch.randn(24) * 40
    codes, low, step = reference.quantise_int2(keys)
    restored = low.float().unsqueeze(3) + step.float().unsqueeze(3) * reference.unpack_codes(codes, 2, 24)
    rounding = (low.float().abs() + 3 * step.float()).unsqueeze(3) * 2**-8
    assert ((restored - keys).abs() <= step.float().unsqueeze(3) / 2 + rounding).all()


def test_int1_keys_are_mean_and_deviation():
    keys = keys_of(blocks=1, dim=4)
    codes, mean, deviation = reference.quantise_int1(keys)
    sign = 2.0 * reference.unpack_codes(codes, 1, 4) - 1
    torch.testing.assert_close(mean.float(), keys.mean(3), rtol=1e-2, atol=1e-2)
    assert torch.equal(sign > 0, keys - mean.float().unsqueeze(3) > 0)
    assert (deviation >= 0).all()


def test_minmax_bounds_every_token():
    keys, queries = keys_of(), torch.randn(2, 2, 6, 24)
    bound = filled("minmax", keys).log_mass(queries, 20, 0.3)
    scores = torch.einsum("bhrd,bhntd->bhrnt", queries, keys) * 0.3
    assert (bound >= scores.amax(-1) - 1e-4).all()


@pytest.mark.parametrize(("name", "error"), [("exact", 1e-5), ("int2", 0.35), ("int1", 0.9)])
def test_estimates_are_near_the_true_mass(name, error):
    keys, queries = keys_of(), torch.randn(2, 2, 6, 24)
    true = (torch.einsum("bhrd,bhntd->bhrnt", queries, keys) * 0.2).logsumexp(-1)
    estimate = filled(name, keys).log_mass(queries, 20, 0.2)
    assert (estimate - true).abs().mean() < error


@pytest.mark.parametrize("name", INDEXES)
def test_appending_in_pieces_equals_at_once(name):
    keys, queries = keys_of(blocks=150), torch.randn(2, 2, 3, 24)
    whole, pieces = filled(name, keys), make_index(name)
    for part in keys.split([1, 70, 0, 3, 76], dim=2):
        pieces.append(part)
    assert pieces.num_blocks == 150
    assert torch.equal(pieces.log_mass(queries, 150, 0.2), whole.log_mass(queries, 150, 0.2))
    pieces.truncate(40)
    pieces.append(keys[:, :, 40:60])
    if name != "recency":  # whose scores count from the newest block
        torch.testing.assert_close(pieces.log_mass(queries, 60, 0.2), whole.log_mass(queries, 150, 0.2)[..., :60])


@pytest.mark.parametrize("name", INDEXES)
def test_rows_and_copies(name):
    keys, queries = keys_of(), torch.randn(3, 2, 3, 24)
    index = filled(name, keys)
    twin = copy.deepcopy(index)
    index.replace_arrays(index.selected_rows(torch.tensor([1, 0, 1])))
    expected = filled(name, keys[[1, 0, 1]]).log_mass(queries, 20, 0.2)
    assert torch.equal(index.log_mass(queries, 20, 0.2), expected)
    assert torch.equal(twin.log_mass(queries[:2], 20, 0.2), filled(name, keys).log_mass(queries[:2], 20, 0.2))


@pytest.mark.parametrize("name", INDEXES)
def test_hidden_tokens_do_not_count(name):
    keys, queries = keys_of(), torch.randn(2, 2, 3, 24)
    visible = torch.ones(2, 20, 16, dtype=torch.bool)
    visible[0, :3] = False
    visible[1, 5, :7] = False
    log_mass = filled(name, keys).log_mass(queries, 20, 0.2, visible)
    assert log_mass[0, :, :, :3].isneginf().all()
    assert log_mass[0, :, :, 3:].isfinite().all()
    assert log_mass[1].isfinite().all()
    assert (reference.rank_blocks(log_mass, 3)[0, :, :3] == -1).all()


# 24 channels: numba pads them to 32.
INT2_BYTES = 16 * 6 + 4 * 24 if kernels.numba_for(torch.device("cpu")) is None else 4 * 32 + 4 * 32


@pytest.mark.parametrize(("name", "per_block"), [("int2", INT2_BYTES), ("int1", 16 * 3 + 4 * 24), ("minmax", 8 * 24)])
def test_bytes_are_accounted(name, per_block):
    assert filled(name, keys_of()).num_bytes == 2 * 2 * 20 * per_block


def test_ranking_is_mean_over_the_group_and_maximum_over_rows():
    log_mass = torch.randn(1, 1, 6, 5)  # group 2, rows 3
    mass = log_mass.softmax(-1)
    expected = torch.stack([(mass[0, 0, r] + mass[0, 0, 3 + r]) / 2 for r in range(3)]).amax(0)
    torch.testing.assert_close(reference.rank_blocks(log_mass, 2)[0, 0], expected)


def test_recency_ranks_thousands_of_blocks_by_age():
    """The shares of old blocks must not vanish, or a large budget would choose among them at random."""
    blocks = 5000
    index = filled("recency", torch.zeros(1, 1, blocks, 1, 1))
    scores = reference.rank_blocks(index.log_mass(torch.randn(1, 1, 2, 1), blocks, 1.0), 2)[0, 0]
    assert (scores[1:] > scores[:-1]).all()
