"""The numba versions against the reference, on every shape that changes their path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from oasis_cache.kernels import reference

numba_ops = pytest.importorskip("oasis_cache.kernels.numba_ops")


def packed(keys):
    return reference.quantise_int2(keys), numba_ops.pack_int2(keys)


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 40])
def test_words_survive_packing(block_size):
    codes = torch.randint(0, 4, (2, 3, block_size, 7), dtype=torch.uint8)
    words = numba_ops.pack_words(codes)
    assert words.shape == (2, 3, -(-block_size // 16), 7)
    assert torch.equal(numba_ops.unpack_words(words, block_size), codes)


@pytest.mark.parametrize("dim", [2, 16, 24, 63, 80, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 24])
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_equal_reference(dim, block_size, group, rows, padded):
    generator = torch.Generator().manual_seed(dim * block_size + rows)
    keys = torch.randn(2, 3, 40, block_size, dim, generator=generator)
    queries = torch.randn(2, 3, group * rows, dim, generator=generator) * 3
    visible = torch.rand(2, 37, block_size, generator=generator) > 0.3 if padded else None
    if visible is not None:
        visible[0, :5] = False
    reference_arrays, arrays = packed(keys)
    first = (part[:, :, :37] for part in reference_arrays)
    expected = reference.score_int2(queries, *first, group, 0.25, visible)
    got = numba_ops.score_int2(queries, *arrays, 37, block_size, group, 0.25, visible)
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [1, 5, 40, 300])
@pytest.mark.parametrize("kind", ["distinct", "ties", "hidden", "alike"])
def test_top_blocks_are_the_largest_and_of_equals_the_first(kind, count):
    scores = torch.rand(2, 3, 300, generator=torch.Generator().manual_seed(count)) ** 4
    if kind == "ties":
        scores = (scores * 20).round() / 20
    elif kind == "hidden":
        scores[..., 7:90] = -1.0
        scores[..., 0] = float("inf")
    elif kind == "alike":
        scores = 0.25 + scores * 1e-6
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values
    assert torch.equal(numba_ops.top_blocks(scores, count), expected)


def test_queries_of_any_layout():
    """Attention hands them over transposed; addresses are only right for contiguous ones."""
    keys, queries = torch.randn(2, 3, 10, 16, 32), torch.randn(2, 4, 3, 32).transpose(1, 2)
    assert not queries.is_contiguous()
    reference_arrays, arrays = packed(keys)
    got = numba_ops.score_int2(queries, *arrays, 10, 16, 1, 0.25)
    for mine, right in zip(got, reference.score_int2(queries, *reference_arrays, 1, 0.25), strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-5, atol=2e-5)


def test_a_sequence_of_padding_alone_has_no_mass():
    _, arrays = packed(torch.randn(1, 1, 4, 16, 8))
    rows, best, log_mass = numba_ops.score_int2(
        torch.randn(1, 1, 2, 8), *arrays, 4, 16, 2, 1.0, torch.zeros(1, 4, 16, dtype=torch.bool)
    )
    assert (rows == -1).all()
    assert (best == -1).all()
    assert log_mass.isneginf().all()


@pytest.mark.parametrize("padded", [False, True])
def test_threads_change_nothing(monkeypatch, padded):
    keys, queries = torch.randn(2, 2, 300, 16, 64), torch.randn(2, 2, 3, 64)
    visible = torch.rand(2, 300, 16) > 0.5 if padded else None
    _, arrays = packed(keys)
    serial = numba_ops.score_int2(queries, *arrays, 300, 16, 3, 0.125, visible)
    monkeypatch.setattr(numba_ops, "_PARALLEL_FROM", 0)
    monkeypatch.setattr(numba_ops.torch, "get_num_threads", lambda: 2)
    for mine, right in zip(numba_ops.score_int2(queries, *arrays, 300, 16, 3, 0.125, visible), serial, strict=True):
        assert torch.equal(mine, right)


def test_extreme_scores_stay_finite():
    keys = torch.randn(1, 1, 4, 16, 64)
    queries = torch.randn(1, 1, 2, 64) * 1e4
    reference_arrays, arrays = packed(keys)
    _, _, got = numba_ops.score_int2(queries, *arrays, 4, 16, 2, 1.0)
    expected = reference.log_mass_int2(queries, *reference_arrays, 1.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("max_fetch", [1, 5, 12])
def test_delta_select_equals_reference(max_fetch):
    generator = torch.Generator().manual_seed(max_fetch)
    tables = [torch.full((2, 3, 12), -1, dtype=torch.int64) for _ in range(4)]
    for clock in range(1, 30):
        count = int(torch.randint(1, 13, (1,), generator=generator))
        wanted = torch.rand(2, 3, 40, generator=generator).topk(count, dim=2).indices
        wanted[torch.rand(wanted.shape, generator=generator) < 0.2] = -1
        blocks, slots, mask = numba_ops.delta_select(wanted, tables[0], tables[1], 40, max_fetch, clock)
        expected = reference.delta_select(wanted, tables[2], tables[3], 40, max_fetch, clock)
        assert torch.equal(mask, expected[2])
        assert torch.equal(blocks[mask], expected[0][mask])
        assert torch.equal(slots[mask], expected[1][mask])
        assert torch.equal(tables[0], tables[2])
        assert torch.equal(tables[1], tables[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_equals_reference(dtype):
    pages = torch.randn(2, 9, 3, 4, 10).to(dtype)  # [batch, blocks, kv_heads, block_size, kv_dim]
    starts = torch.arange(18).view(2, 9) * pages[0, 0].numel() * pages.element_size() + pages.data_ptr()
    blocks = torch.rand(2, 3, 9).topk(5, dim=2).indices
    slots = torch.rand(2, 3, 7).topk(5, dim=2).indices
    mask = torch.rand(2, 3, 5) > 0.4
    wide = torch.full((2, 4, 8, 4, 10), float("nan"), dtype=dtype)
    got, expected = wide.clone()[:, 1:, 1:], wide.clone()[:, 1:, 1:]
    numba_ops.gather_blocks(blocks, slots, mask, starts, got)
    reference.gather_blocks(blocks, slots, mask, starts, expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().any()
    assert not got.isnan().all()


def test_exchange_equals_reference():
    """A buffer of random age and content, plans of all lengths: tables, slots, buffer and the rest of the plan."""
    generator = torch.Generator().manual_seed(5)

    def choose(count):
        return torch.rand(2, 3, 20, generator=generator).topk(count, dim=2).indices

    seen = set()
    for entries in (1, 3, 6):
        for clock in range(2, 30):
            blocks, slots, held = choose(entries), choose(entries) % 8, choose(4)
            slots = torch.rand(2, 3, 8, generator=generator).topk(entries, dim=2).indices
            mask = torch.rand(2, 3, entries, generator=generator) > 0.3
            evicted = 100 + slots.masked_fill(torch.rand(slots.shape, generator=generator) < 0.2, -101)
            held = held.masked_fill(torch.rand(held.shape, generator=generator) < 0.2, -1)
            last = torch.randint(0, clock, held.shape, generator=generator).masked_fill(held < 0, -1)
            buffer, target = torch.randn(2, 3, 4, 2, 5), torch.randn(2, 3, 8, 2, 5)
            tables, other = (held, last), (held.clone(), last.clone())
            moved, moved_too = (buffer, target), (buffer.clone(), target.clone())
            left = numba_ops.exchange_blocks(blocks, slots, mask, evicted, *tables, clock, *moved)
            taken, put = reference.plan_exchange(blocks, mask, evicted, *other, clock)
            reference.swap_blocks(slots, taken, put, *moved_too)
            assert torch.equal(left, mask & (taken < 0))
            for got, expected in zip((*tables, *moved), (*other, *moved_too), strict=True):
                assert torch.equal(got, expected)
            seen |= {(bool(a >= 0), bool(b >= 0)) for a, b in zip(taken[mask], put[mask], strict=True)}
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


TWO_THREADS = """
import threading, time
import torch
torch.set_num_threads(1)
from oasis_cache.kernels import numba_ops

def make():
    keys, queries = torch.randn(1, 1, 60, 16, 128), torch.randn(1, 1, 4, 128)
    arrays = numba_ops.pack_int2(keys)
    return queries, arrays, numba_ops.score_int2(queries, *arrays, 60, 16, 4, 0.1)[2].clone()

def work(queries, arrays, expected):
    end = time.time() + 2
    while time.time() < end:
        assert torch.equal(numba_ops.score_int2(queries, *arrays, 60, 16, 4, 0.1)[2], expected)

threads = [threading.Thread(target=work, args=make()) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("done")
"""


def test_scratch_memory_lives_as_long_as_its_addresses_are_used():
    """Two threads that share an arena: memory freed early by one would be the other's next."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    out = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (out.returncode, out.stdout.strip()) == (0, "done"), out.stderr[-2000:]
    assert "AssertionError" not in out.stderr, out.stderr[-2000:]
