"""Moving blocks into slots, from host pages and from another buffer: bit for bit, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, triton_ops
from tests.kernels.comparing import label, same, sample
from tests.kernels.recording import as_meta, record

CASES = sample(
    12,
    seed=3,
    batch_heads=[(1, 1), (1, 3), (2, 2)],
    entries=[1, 3, 5],
    block_size=[16, 16, 4, 5],
    kv_dim=[128, 256, 34, 3],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    slabs=[1, 2, 3],
    asked=[0.6, 1.0, 0.0],
)
CASES.append(CASES[0] | {"block_size": 5, "kv_dim": 3, "dtype": torch.float16, "asked": 1.0, "seed": 12})
# An odd number of narrow tokens behind the slots: heads begin where only a token's size is aligned.
CASES.append(
    CASES[0] | {"batch_heads": (2, 2), "block_size": 16, "kv_dim": 12, "dtype": torch.bfloat16, "behind": 7, "seed": 13}
)
NUM_BLOCKS, NUM_SLOTS, NUM_HELD = 9, 7, 4


def host_pages(case, device):
    """Slabs of pages, page-locked where there is a GPU, and the address of each block's page [batch, blocks]."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv_heads = case["batch_heads"]
    page_shape = (kv_heads, case["block_size"], case["kv_dim"])
    slabs = [
        torch.empty(batch * NUM_BLOCKS, *page_shape, dtype=case["dtype"], pin_memory=device.type == "cuda")
        for _ in range(case["slabs"])
    ]
    for slab in slabs:
        slab.copy_(torch.randn(slab.shape, generator=generator))
    page_bytes = slabs[0][0].numel() * slabs[0].element_size()
    which = torch.randint(0, len(slabs), (batch, NUM_BLOCKS), generator=generator)
    offsets = torch.randperm(batch * NUM_BLOCKS, generator=generator).view(batch, NUM_BLOCKS)
    bases = torch.tensor([slab.data_ptr() for slab in slabs])
    return slabs, (bases[which] + offsets * page_bytes).to(device)


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"] + 1000)
    batch, kv_heads = case["batch_heads"]
    shape = (batch, kv_heads, case["entries"])
    blocks = torch.rand(*shape[:2], NUM_BLOCKS, generator=generator).topk(case["entries"], dim=2).indices
    slots = torch.stack(
        [torch.randperm(NUM_SLOTS, generator=generator)[: case["entries"]] for _ in range(batch * kv_heads)]
    )
    mask = torch.rand(shape, generator=generator) < case["asked"]
    capacity = NUM_SLOTS * case["block_size"] + case.get("behind", 8)
    kv = torch.full((batch, kv_heads, capacity, case["kv_dim"]), float("nan"), dtype=case["dtype"], device=device)
    target = kv[:, :, : NUM_SLOTS * case["block_size"]].unflatten(2, (NUM_SLOTS, case["block_size"]))
    return blocks.to(device), slots.view(shape).to(device), mask.to(device), kv, target


@pytest.mark.parametrize("case", CASES, ids=label)
def test_gathers_what_the_reference_gathers(case, device):
    slabs, addresses = host_pages(case, device)
    before = [slab.clone() for slab in slabs]
    *plan, kv, target = arguments(case, device)
    *_, expected_kv, expected = arguments(case, device)
    reference.gather_blocks(*plan, addresses, expected)
    triton_ops.gather_blocks(*plan, addresses, target)
    assert same(kv, expected_kv)
    assert int((~kv.isnan()).sum()) == int(plan[2].sum()) * case["block_size"] * case["kv_dim"]
    assert all(same(slab, copy) for slab, copy in zip(slabs, before, strict=True))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_swaps_what_the_reference_swaps(case, device):
    generator = torch.Generator().manual_seed(case["seed"] + 2000)
    batch, kv_heads = case["batch_heads"]
    blocks, slots, mask, kv, target = arguments(case, device)
    *_, expected_kv, expected = arguments(case, device)
    heads = batch * kv_heads
    held = torch.stack([torch.randperm(NUM_BLOCKS, generator=generator)[:NUM_HELD] for _ in range(heads)])
    held[torch.rand(held.shape, generator=generator) < 0.2] = -1
    held = held.view(batch, kv_heads, NUM_HELD).to(device)
    evicted = torch.arange(NUM_BLOCKS, NUM_BLOCKS + blocks.shape[2], device=device).expand_as(blocks).clone()
    evicted[(torch.rand(evicted.shape, generator=generator) < 0.2).to(device)] = -1
    last_held = torch.randint(0, 9, held.shape, generator=generator).to(device).masked_fill(held < 0, -1)
    taken, put = reference.plan_exchange(blocks, mask, evicted, held, last_held, 9)
    buffer = torch.randn(batch, kv_heads, NUM_HELD, case["block_size"], case["kv_dim"], generator=generator)
    buffer = buffer.to(case["dtype"]).to(device)
    expected_buffer = buffer.clone()
    reference.swap_blocks(slots, taken, put, expected_buffer, expected)
    triton_ops.swap_blocks(slots, taken, put, buffer, target)
    assert same(kv, expected_kv)
    assert same(buffer, expected_buffer)


def test_cases_reach_every_size(device):
    launches = []
    for case in CASES:
        _, addresses = host_pages(case, torch.device("cpu"))
        *plan, _, target = arguments(case, torch.device("cpu"))
        inputs = [as_meta(value) for value in (*plan, addresses, target)]
        launches += record(lambda inputs=inputs: triton_ops.gather_blocks(*inputs))
    assert {launch.constants["ALIGNMENT"] for launch in launches} >= {2, 16}
    assert any(launch.constants["ELEMENTS"] > launch.constants["CHUNK"] for launch in launches)


def test_empty_plans_do_nothing(device):
    case = CASES[0]
    _, addresses = host_pages(case, device)
    blocks, slots, mask, kv, target = arguments(case, device)
    triton_ops.gather_blocks(blocks[..., :0], slots[..., :0], mask[..., :0], addresses, target)
    triton_ops.swap_blocks(slots, slots, slots, target[:, :, :0], target)
    assert kv.isnan().all()


def test_refuses_what_it_cannot_take(device):
    case = CASES[0] | {"block_size": 16, "kv_dim": 128}
    _, addresses = host_pages(case, device)
    blocks, slots, mask, _, target = arguments(case, device)
    scattered = target.transpose(3, 4).contiguous().transpose(3, 4)
    for message, inputs in {
        "blocks must be torch.int64": (blocks.int(), slots, mask, addresses, target),
        "mask must be torch.bool": (blocks, slots, mask.int(), addresses, target),
        "addresses must be int64": (blocks, slots, mask, addresses.int(), target),
        "must be contiguous and aligned": (blocks, slots, mask, addresses, scattered),
        "addresses has shape": (blocks, slots, mask, addresses[:, None], target),
        "target has shape": (blocks, slots, mask, addresses, target[0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.gather_blocks(*inputs)
    with pytest.raises(ValueError, match="taken must be int64"):
        triton_ops.swap_blocks(slots, slots.int(), slots, target.clone(), target)
    with pytest.raises(ValueError, match="buffer must be"):
        triton_ops.swap_blocks(slots, slots, slots, target.double(), target)
