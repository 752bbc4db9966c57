"""The exchange between slots and the buffer beside them, against the reference: plans, tables and blocks, bit for bit."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference
from oasis_cache.kernels.triton_ops.exchange_blocks import exchange_blocks, plan_exchange
from tests.kernels.comparing import label, same, sample
from tests.kernels.recording import as_meta, record

CASES = sample(
    24,
    seed=5,
    sizes=[(1, 1), (1, 5), (6, 3), (12, 12), (31, 64), (40, 7), (124, 124)],  # entries, places
    batch_heads=[(1, 1), (1, 3), (2, 2)],
    present=[0.0, 0.4, 1.0],  # of the planned blocks
    planned=[0.0, 0.6, 1.0],
    empty=[0.0, 0.3, 1.0],
)


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    (entries, places), (batch, kv_heads) = case["sizes"], case["batch_heads"]
    numbers = torch.stack(
        [torch.randperm(4 * (entries + places), generator=generator) for _ in range(batch * kv_heads)]
    )
    numbers = numbers.view(batch, kv_heads, -1)
    held = numbers[..., :places].clone()
    blocks, evicted = numbers[..., places : places + entries].clone(), numbers[..., places + entries :][..., :entries]
    count = min(entries, places)
    order = torch.stack([torch.randperm(entries, generator=generator) for _ in range(batch * kv_heads)])
    order = order.view(batch, kv_heads, entries)[..., :count]
    chosen = torch.rand(batch, kv_heads, count, generator=generator) < case["present"]
    blocks.scatter_(2, order, torch.where(chosen, held[..., :count], blocks.gather(2, order)))
    held[torch.rand(held.shape, generator=generator) < case["empty"] / 2] = -1
    last = torch.randint(0, 5, held.shape, generator=generator).masked_fill(held < 0, -1)
    evicted = evicted.masked_fill(torch.rand(evicted.shape, generator=generator) < case["empty"], -1)
    mask = torch.rand(blocks.shape, generator=generator) < case["planned"]
    return tuple(tensor.to(device) for tensor in (blocks, mask, evicted, held, last))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_plan_equals_reference(case, device):
    blocks, mask, evicted, held, last = arguments(case, device)
    tables, expected_tables = (held.clone(), last.clone()), (held.clone(), last.clone())
    taken, put, left = plan_exchange(blocks, mask, evicted, *tables, 9)
    want_taken, want_put = reference.plan_exchange(blocks, mask, evicted, *expected_tables, 9)
    assert torch.equal(taken, want_taken)
    assert torch.equal(put, want_put)
    assert torch.equal(left, mask & (want_taken < 0))
    assert torch.equal(tables[0], expected_tables[0])
    assert torch.equal(tables[1], expected_tables[1])


def test_cases_reach_every_way(device):
    ways, full = set(), False
    launches = []
    for case in CASES:
        blocks, mask, evicted, held, last = arguments(case, torch.device("cpu"))
        inputs = [as_meta(tensor) for tensor in (blocks, mask, evicted, held, last)]
        launches += record(lambda inputs=inputs: plan_exchange(*inputs, 9))
        taken, put = reference.plan_exchange(blocks, mask, evicted, held, last, 9)
        ways |= set(zip((taken >= 0).flatten().tolist(), (put >= 0).flatten().tolist(), strict=True))
        full |= bool((mask & (evicted >= 0) & (put < 0)).any())
    assert ways == {(True, True), (True, False), (False, True), (False, False)}
    assert full, "somewhere there was no place for what was evicted"
    assert any(launch.arguments["entries"] > launch.constants["TILE"] for launch in launches)
    assert any(launch.constants["HELD_PAD"] > launch.arguments["num_held"] for launch in launches)


def test_a_buffer_in_use_stays_in_step_with_the_reference(device):
    generator = torch.Generator().manual_seed(0)
    entries, places, slots, shape = 5, 7, 9, (1, 2)
    held = [torch.full((*shape, places), -1, dtype=torch.int64, device=device) for _ in range(4)]
    buffers = [torch.zeros(*shape, places, 4, 8, device=device) for _ in range(2)]
    start = torch.randn(*shape, slots, 4, 8, generator=generator).to(device)
    targets = [start.clone(), start.clone()]
    in_slots = torch.stack([torch.randperm(30, generator=generator)[:slots] for _ in range(2)]).view(*shape, slots)
    for clock in range(1, 9):
        where = torch.stack([torch.randperm(slots, generator=generator)[:entries] for _ in range(2)]).view(
            *shape, entries
        )
        evicted = in_slots.gather(2, where)
        free = torch.rand(*shape, 30, generator=generator).scatter(2, in_slots, -1.0)
        blocks = free.topk(entries, dim=2).indices
        mask = torch.rand(blocks.shape, generator=generator) < 0.8
        plan = [tensor.to(device) for tensor in (blocks, where, mask, evicted)]
        left = exchange_blocks(*plan, held[0], held[1], clock, buffers[0], targets[0])
        taken, put = reference.plan_exchange(plan[0], plan[2], plan[3], held[2], held[3], clock)
        reference.swap_blocks(plan[1], taken, put, buffers[1], targets[1])
        assert torch.equal(left, plan[2] & (taken < 0))
        assert torch.equal(held[0], held[2])
        assert torch.equal(held[1], held[3])
        assert same(buffers[0], buffers[1])
        assert same(targets[0], targets[1])
        in_slots = in_slots.scatter(2, where, torch.where(mask, blocks, evicted))


def test_nothing_to_exchange(device):
    blocks, mask, evicted, held, last = arguments(CASES[0] | {"sizes": (6, 3), "planned": 1.0}, device)
    taken, put, left = plan_exchange(blocks, mask, evicted, held[..., :0].contiguous(), last[..., :0].contiguous(), 1)
    assert (taken == -1).all()
    assert (put == -1).all()
    assert torch.equal(left, mask)
    taken, _, _ = plan_exchange(blocks[..., :0], mask[..., :0], evicted[..., :0], held, last, 1)
    assert taken.numel() == 0


def test_refuses_what_it_cannot_take(device):
    blocks, mask, evicted, held, last = arguments(CASES[0] | {"sizes": (6, 3)}, device)
    strided = torch.stack([held, held], -1)[..., 0]
    for message, inputs in {
        "blocks must be torch.int64": (blocks.int(), mask, evicted, held, last, 1),
        "mask must be torch.bool": (blocks, mask.int(), evicted, held, last, 1),
        "evicted must be": (blocks, mask, evicted[..., 1:], held, last, 1),
        "last_held must be": (blocks, mask, evicted, held, last[..., 1:], 1),
        "must be contiguous": (blocks, mask, evicted, strided, last, 1),
        "2\\*\\*31": (blocks, mask, evicted, held, last, 2**31),
        "must have 3 dimensions": (blocks[0], mask, evicted, held, last, 1),
    }.items():
        with pytest.raises(ValueError, match=message):
            plan_exchange(*inputs)
