"""The compiled kernels against the reference at the sizes of real decode steps.

`make gpu-check` also runs tests/kernels, whose many small shapes are compiled where there is a GPU.
"""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, torch_ops, triton_ops
from tests.kernels.comparing import TOLERANCE, relative_error, same

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [((128, 128), 1), ((128, 128), 5), ((64, 64), 8), ((256, 256), 2), ((192, 128), 1)]
BATCH, KV_HEADS, GROUP, BLOCK = 2, 8, 4, 16


def draw(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "rows"), SHAPES)
def test_attention(dtype, dims, rows, device):
    key_dim, value_dim = dims
    slots, window = 124, 95
    num_tokens = slots * BLOCK + window
    queries = draw(device, BATCH, KV_HEADS, GROUP * rows, key_dim, dtype=dtype, seed=1)
    kv = draw(device, BATCH, KV_HEADS, num_tokens + 32, key_dim + value_dim, dtype=dtype, seed=2)
    kv[:, :, num_tokens:] = float("nan")
    inputs = (queries, kv, key_dim, num_tokens, rows, key_dim**-0.5)
    table = torch.arange(slots, device=device).expand(BATCH, KV_HEADS, slots).clone()
    table[:, :, 5:9] = -1
    for options in ({}, {"block_of_slot": table, "block_size": BLOCK, "window_start": slots * BLOCK}):
        out, lse, mass = triton_ops.sparse_attention(*inputs, **options, mass_block=BLOCK)
        want, want_lse, want_mass = reference.sparse_attention(*inputs, **options, mass_block=BLOCK)
        assert relative_error(out, want) <= TOLERANCE[dtype]
        assert relative_error(lse, want_lse) <= TOLERANCE[dtype]
        assert relative_error(mass, want_mass) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("diagonal", [None, 1500, 700, -100])
def test_attention_of_a_chunk(dtype, diagonal, device):
    rows, tokens, dim = 600, 1500, 128
    queries, keys, values = (
        draw(device, BATCH, KV_HEADS, count, dim, dtype=dtype, seed=count) for count in (rows, tokens, tokens)
    )
    mask = None
    if diagonal is not None:
        mask = torch.arange(tokens, device=device) <= torch.arange(rows, device=device).unsqueeze(-1) + diagonal
    out, lse = torch_ops.attention(queries, keys, values, dim**-0.5, None, None, diagonal)
    want, want_lse = reference.attention(queries, keys, values, dim**-0.5, mask)
    assert relative_error(out, want) <= TOLERANCE[dtype]
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert relative_error(lse.nan_to_num(neginf=0.0), want_lse.nan_to_num(neginf=0.0)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int2", "int1", "minmax"])
@pytest.mark.parametrize("rows", [1, 5])
def test_scores(dtype, kind, rows, device):
    blocks, dim = 2048, 128
    keys = draw(device, BATCH, KV_HEADS, blocks, BLOCK, dim, dtype=dtype, seed=3)
    queries = draw(device, BATCH, KV_HEADS, GROUP * rows, dim, dtype=dtype, seed=4)
    if kind == "minmax":
        arrays = (keys.amin(3), keys.amax(3))
    else:
        arrays = getattr(reference, f"quantise_{kind}")(keys)
    inputs = (queries, *arrays, GROUP, dim**-0.5)
    got = getattr(triton_ops, f"score_{kind}")(*inputs)
    want = getattr(reference, f"score_{kind}")(*inputs)
    for name, left, right in zip(("rows", "best", "log_mass"), got, want, strict=True):
        assert relative_error(left, right) <= TOLERANCE[dtype], name


def test_residency_over_many_steps(device):
    blocks, slots = 8192, 124
    tables = [torch.full((BATCH, KV_HEADS, slots), -1, dtype=torch.int64, device=device) for _ in range(4)]
    generator = torch.Generator(device).manual_seed(5)
    scores = torch.rand(BATCH, KV_HEADS, blocks, generator=generator, device=device)
    for clock in range(1, 20):
        scores += 0.3 * torch.rand(scores.shape, generator=generator, device=device)
        wanted = scores.topk(slots, dim=-1).indices
        plan = triton_ops.delta_select(wanted, *tables[:2], blocks, slots, clock)
        want = reference.delta_select(wanted, *tables[2:], blocks, slots, clock)
        assert all(torch.equal(left, right) for left, right in zip(plan, want, strict=True))
        assert all(torch.equal(left, right) for left, right in zip(tables[:2], tables[2:], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sealed_blocks_come_back_bit_for_bit(dtype, device):
    blocks, dim = 64, 128
    kv = draw(device, BATCH, KV_HEADS, blocks, BLOCK, 2 * dim, dtype=dtype, seed=6)
    pages = torch.full((BATCH * blocks, KV_HEADS, BLOCK, 2 * dim), float("nan"), dtype=dtype).pin_memory()
    page_bytes = pages[0].numel() * pages.element_size()
    order = torch.randperm(BATCH * blocks, generator=torch.Generator().manual_seed(7)).view(BATCH, blocks)
    addresses = (pages.data_ptr() + order * page_bytes).to(device)
    shape = (BATCH, KV_HEADS, blocks)
    summaries = {
        "codes": torch.full((*shape, BLOCK, dim // 4), 119, dtype=torch.uint8, device=device),
        "low": torch.full((*shape, dim), float("nan"), dtype=torch.bfloat16, device=device),
        "step": torch.full((*shape, dim), float("nan"), dtype=torch.bfloat16, device=device),
    }
    triton_ops.seal_blocks(kv, dim, addresses, summaries, 0)
    for array, want in zip(summaries.values(), reference.quantise_int2(kv[..., :dim]), strict=True):
        assert same(array, want)
    target = torch.full((BATCH, KV_HEADS, blocks, BLOCK, 2 * dim), float("nan"), dtype=dtype, device=device)
    numbers = torch.arange(blocks, device=device).expand(*shape)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    triton_ops.gather_blocks(numbers, numbers.flip(2), mask, addresses, target)
    assert same(target.flip(2), kv)
    torch.cuda.synchronize()
    written = pages[order.flatten()].to(device).view(BATCH, blocks, KV_HEADS, BLOCK, 2 * dim)
    assert same(written.transpose(1, 2).contiguous(), kv)
