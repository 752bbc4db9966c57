"""The residency kernel against the reference: plans and tables, entry by entry."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, triton_ops
from tests.kernels.comparing import label, sample
from tests.kernels.recording import as_meta, assert_all_branches, record

CASES = sample(
    24,
    seed=2,
    sizes=[(1, 1), (1, 5), (5, 5), (7, 12), (31, 31), (64, 64), (100, 124), (124, 124)],
    blocks=[1, 2, 10],  # in multiples of the slots
    batch_heads=[(1, 1), (1, 3), (2, 2)],
    empty=[0.0, 0.2, 1.0],
    none=[0.0, 0.0, 0.3],
    max_fetch=[0, 1, 6, 1000],
    clock=[None, 9, 9],
)


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    (count, slots), (batch, kv_heads) = case["sizes"], case["batch_heads"]
    num_blocks = case["blocks"] * slots

    def draw(size):
        rows = [torch.randperm(num_blocks, generator=generator)[:size] for _ in range(batch * kv_heads)]
        return torch.stack(rows).view(batch, kv_heads, size)

    wanted, held = draw(count), draw(slots)
    wanted[torch.rand(wanted.shape, generator=generator) < case["none"]] = -1
    last = torch.randint(0, 5, held.shape, generator=generator)
    empty = torch.rand(held.shape, generator=generator) < case["empty"]
    held[empty] = last[empty] = -1
    return wanted.to(device), held.to(device), last.to(device), num_blocks, case["max_fetch"], case["clock"]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_reference(case, device):
    wanted, held, last, *rest = arguments(case, device)
    tables, expected_tables = (held.clone(), last.clone()), (held.clone(), last.clone())
    plan = triton_ops.delta_select(wanted, *tables, *rest)
    expected = reference.delta_select(wanted, *expected_tables, *rest)
    for name, got, want in zip(("blocks", "slots", "mask"), plan, expected, strict=True):
        assert torch.equal(got, want), name
    for name, got, want in zip(("block_of_slot", "last_wanted"), tables, expected_tables, strict=True):
        assert torch.equal(got, want), name


def test_cases_reach_every_branch(device):
    launches = []
    for case in CASES:
        inputs = [as_meta(value) for value in arguments(case, torch.device("cpu"))]
        launches += record(lambda inputs=inputs: triton_ops.delta_select(*inputs))
    assert_all_branches(launches, "delta", {"UPDATE": {False, True}})
    assert any(launch.arguments["slots"] > launch.constants["TILE"] for launch in launches)
    assert any(launch.constants["SLOTS_PAD"] > launch.arguments["slots"] for launch in launches)


def test_a_working_set_in_use_stays_in_step_with_the_reference(device):
    generator = torch.Generator().manual_seed(0)
    tables = [torch.full((2, 2, 12), -1, dtype=torch.int64, device=device) for _ in range(4)]
    for clock in range(1, 9):
        wanted = torch.stack([torch.randperm(40, generator=generator)[:12] for _ in range(4)]).view(2, 2, 12).to(device)
        plan = triton_ops.delta_select(wanted, tables[0], tables[1], 40, 5, clock)
        expected = reference.delta_select(wanted, tables[2], tables[3], 40, 5, clock)
        assert all(torch.equal(got, want) for got, want in zip(plan, expected, strict=True))
        assert torch.equal(tables[0], tables[2])
        assert torch.equal(tables[1], tables[3])
        held = tables[0].sort(dim=2).values
        assert not ((held[..., 1:] == held[..., :-1]) & (held[..., 1:] >= 0)).any()


def test_refuses_what_it_cannot_take(device):
    wanted, held, last, num_blocks, max_fetch, clock = arguments(CASES[0] | {"sizes": (5, 5), "clock": 1}, device)
    for message, inputs in {
        "must be int64": (wanted.int(), held, last, num_blocks, max_fetch, clock),
        "must be contiguous": (wanted, torch.stack([held, held], -1)[..., 0], last, num_blocks, max_fetch, clock),
        "wanted <= slots": (torch.cat([wanted, wanted], 2), held, last, num_blocks, max_fetch, clock),
        "last_wanted has shape": (wanted, held, last[:, :, 1:], num_blocks, max_fetch, clock),
        "2\\*\\*31": (wanted, held, last, num_blocks, max_fetch, 2**31),
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.delta_select(*inputs)
