"""Encoded pages, decoded into slots and written: bit for bit what `encoding.decode` says, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from oasis_cache import kernels
from oasis_cache.kernels import encoding as reference
from oasis_cache.kernels import triton_ops
from oasis_cache.kernels.encoding import ENCODINGS, Encoding, decode, encode
from tests.kernels.comparing import label, same, sample

CASES = sample(
    12,
    seed=5,
    name=list(ENCODINGS),
    batch_heads=[(1, 1), (1, 3), (2, 2)],
    entries=[1, 3, 5],
    block_size=[16, 16, 4, 5],
    kv_dim=[128, 144, 34, 3],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    asked=[0.6, 1.0, 0.0],
)
NUM_BLOCKS, NUM_SLOTS = 9, 7


def rig(case, device):
    """Blocks, their pages (page-locked where there is a GPU) with addresses, a plan, and an empty target."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv_heads = case["batch_heads"]
    how = Encoding(case["name"], case["block_size"], case["kv_dim"])
    kv = torch.randn(batch, kv_heads, NUM_BLOCKS, how.block_size, how.kv_dim, generator=generator)
    kv = kv * 3 + 10 * torch.randn(how.kv_dim, generator=generator)
    kv[:, :, 2, :, 0] = 0.0
    kv[:, :, 3, -1, -1] = float("inf")
    kv = kv.to(case["dtype"])
    slab = torch.full((batch * NUM_BLOCKS, kv_heads, how.num_bytes), 77, dtype=torch.uint8)
    slab = slab.pin_memory() if device.type == "cuda" else slab
    order = torch.randperm(batch * NUM_BLOCKS, generator=generator).view(batch, NUM_BLOCKS)
    addresses = (slab.data_ptr() + order * slab[0].numel()).to(device)
    shape = (batch, kv_heads, case["entries"])
    blocks = torch.rand(*shape[:2], NUM_BLOCKS, generator=generator).topk(case["entries"], dim=2).indices
    slots = torch.stack(
        [torch.randperm(NUM_SLOTS, generator=generator)[: case["entries"]] for _ in range(batch * kv_heads)]
    )
    mask = torch.rand(shape, generator=generator) < case["asked"]
    plan = (blocks.to(device), slots.view(shape).to(device), mask.to(device))
    target = torch.full((batch, kv_heads, NUM_SLOTS, how.block_size, how.kv_dim), 0.125, dtype=case["dtype"])
    return how, kv.to(device), slab, order, addresses, plan, target.to(device)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_pages_are_written_and_come_back(case, device):
    how, kv, slab, order, addresses, plan, target = rig(case, device)
    pages = encode(kv, how)
    triton_ops.write_pages(pages, addresses)
    assert same(slab[order.flatten()].cpu(), pages.transpose(1, 2).flatten(0, 1).cpu())
    expected, by_host = target.clone(), target.clone()
    values = decode(pages, how, case["dtype"])
    blocks, slots, mask = plan
    for row, head, entry in mask.nonzero().tolist():
        expected[row, head, slots[row, head, entry]] = values[row, head, blocks[row, head, entry]]
    triton_ops.gather_encoded(*plan, addresses, target, how)
    reference.gather_encoded(*(part.cpu() for part in plan), addresses.cpu(), by_host, how)
    for got in (target, by_host):
        assert torch.equal(got.isnan(), expected.isnan())
        assert same(got.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_what_serves_on_a_cpu_gives_the_same_bits(case):
    how, kv, slab, _, addresses, plan, target = rig(case, torch.device("cpu"))
    expected = target.clone()
    kernels.write_pages(encode(kv, how), addresses)
    kernels.gather_encoded(*plan, addresses, target, how)
    reference.gather_encoded(*plan, addresses, expected, how)
    assert same(target.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert bool((target.nan_to_num(0.5) != 0.125).any()) == bool(plan[2].any())
    del slab


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_code_and_every_step_is_decoded(name, device):
    """All bytes as codes, as steps and as offsets, whether `encode` writes them or not."""
    how = Encoding(name, 16, 32)
    page = torch.zeros(1, 1, 32, how.num_bytes, dtype=torch.uint8)
    page[0, 0, :, : how.steps_at] = torch.arange(32 * how.steps_at).view(32, -1) % 256
    page[0, 0, :, how.steps_at : how.exponent_at] = (
        torch.arange(32 * (how.exponent_at - how.steps_at)).view(32, -1) % 256
    )
    page[0, 0, :, how.exponent_at] = torch.arange(90, 122)
    slab = page.clone().pin_memory() if device.type == "cuda" else page.clone()
    addresses = (slab.data_ptr() + torch.arange(32).view(1, 32) * how.num_bytes).to(device)
    numbers = torch.arange(32, device=device).view(1, 1, 32)
    target = torch.zeros(1, 1, 32, 16, 32, device=device)
    triton_ops.gather_encoded(numbers, numbers, torch.ones_like(numbers, dtype=torch.bool), addresses, target, how)
    expected = decode(page, how, torch.float32)
    assert torch.equal(target.cpu().isnan(), expected.isnan())
    assert same(target.cpu().nan_to_num(0.5), expected.nan_to_num(0.5))
    assert not bool(expected.isnan().all())


def test_empty_plans_do_nothing(device):
    how, _, _, _, addresses, plan, target = rig(CASES[0], device)
    before = target.clone()
    triton_ops.gather_encoded(*(part[..., :0] for part in plan), addresses, target, how)
    triton_ops.write_pages(torch.zeros(1, 1, 0, 16, dtype=torch.uint8, device=device), addresses[:1, :0])
    assert same(target, before)


def test_refuses_what_it_cannot_take(device):
    how, kv, _, _, addresses, plan, target = rig(CASES[0] | {"block_size": 16, "kv_dim": 128}, device)
    pages = encode(kv, how)
    uneven = torch.nn.functional.pad(pages, (0, 1))[..., :-1]
    for message, inputs in {
        "blocks must be torch.int64": (plan[0].int(), *plan[1:], addresses, target, how),
        "addresses must be int64": (*plan, addresses.int(), target, how),
        "addresses has shape": (*plan, addresses[:, None], target, how),
        "target has shape": (*plan, addresses, target, Encoding(how.name, 8, 128)),
        "target must be one of": (*plan, addresses, target.double(), how),
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.gather_encoded(*inputs)
    for message, inputs in {
        "pages must be": (pages.float(), addresses),
        "multiples of 16": (uneven, addresses),
        "addresses has shape": (pages, addresses[:, :1]),
        "addresses must be int64": (pages, addresses.int()),
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.write_pages(*inputs)
