"""Residency: delta selection against a plain loop, the working set's tables, staging."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.blocks import LayerShape
from oasis_cache.kernels import reference
from oasis_cache.pool import WorkingSet

SHAPE = LayerShape(1, 2, 3, 2, torch.float32, torch.device("cpu"))


def loop_delta_select(wanted, held, last_wanted, max_fetch):
    """One KV head, with lists: (block, slot) pairs."""
    absent = [block for block in wanted if block not in held]
    victims = [slot for slot in range(len(held)) if held[slot] not in wanted or held[slot] < 0]
    victims.sort(key=lambda slot: (last_wanted[slot], slot))
    return list(zip(absent, victims, strict=False))[:max_fetch]


@pytest.mark.parametrize("seed", range(40))
def test_delta_select_equals_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    num_blocks = int(torch.randint(4, 30, (), generator=generator))
    slots = int(torch.randint(1, num_blocks + 1, (), generator=generator))
    count = int(torch.randint(1, slots + 1, (), generator=generator))
    max_fetch = int(torch.randint(0, slots + 1, (), generator=generator))
    wanted, held = (
        torch.stack([torch.randperm(num_blocks, generator=generator)[:n] for _ in range(2)])[None]
        for n in (count, slots)
    )
    held[torch.rand(held.shape, generator=generator) < 0.3] = -1
    last = torch.randint(0, 5, held.shape, generator=generator).masked_fill(held < 0, -1)
    blocks, where, mask = reference.delta_select(wanted, held, last, num_blocks, max_fetch)
    for head in range(2):
        pairs = [(int(b), int(s)) for b, s, m in zip(blocks[0, head], where[0, head], mask[0, head], strict=True) if m]
        assert pairs == loop_delta_select(
            wanted[0, head].tolist(), held[0, head].tolist(), last[0, head].tolist(), max_fetch
        )


def filled(num_staged=0):
    working_set = WorkingSet(SHAPE, 4, 3, 12, num_staged)
    working_set.replace_window(torch.randn(1, 2, 5, 5), 40)
    return working_set


def test_want_keeps_hits_and_evicts_the_least_recently_wanted():
    working_set = filled()
    working_set.want(torch.tensor([[[0, 1, 2], [3, 4, 5]]]), 10, 3, 0)
    working_set.want(torch.tensor([[[0, 1], [3, 5]]]), 10, 3, 0)
    plan = working_set.want(torch.tensor([[[7], [8]]]), 10, 3, 0)
    assert plan.mask.sum() == 2
    assert working_set.block_of_slot[0].sort().values.tolist() == [[0, 1, 7], [3, 5, 8]]
    working_set.check_integrity()


def test_window_appends_advances_and_refuses_to_overflow():
    working_set = filled()
    tokens = working_set.window.clone()
    more = torch.randn(1, 2, 6, 5)
    working_set.append(more)
    working_set.advance_window(44)
    assert (working_set.window_start, working_set.window_length) == (44, 7)
    assert torch.equal(working_set.window, torch.cat([tokens, more], 2)[:, :, 4:])
    with pytest.raises(AssertionError, match="overflows"):
        working_set.append(torch.randn(1, 2, 6, 5))


def test_token_positions_follow_slots_and_window():
    working_set = filled()
    working_set.want(torch.tensor([[[2, 0, 5], [1, 9, 4]]]), 10, 3, 0)
    positions = working_set.token_positions()
    assert positions[0, 1, 4:8].tolist() == [36, 37, 38, 39]
    assert positions[0, 0, 12:].tolist() == [40, 41, 42, 43, 44]


def test_staged_blocks_change_places_with_those_they_evict():
    working_set = filled(num_staged=2)
    working_set.want(torch.tensor([[[0, 1, 2], [0, 1, 2]]]), 10, 3, 0)
    working_set.slots.copy_(torch.randn(1, 2, 3, 4, 5))
    scores = torch.zeros(1, 2, 10)
    scores[0, :, :3] = 9.0  # in slots already: must not be staged
    scores[0, 0, 6], scores[0, 0, 7], scores[0, 1, 4], scores[0, 1, 9] = 2.0, 1.0, 1.0, 2.0
    plan = working_set.want_staged(scores, 2, 0)
    assert plan.mask.all()
    assert plan.blocks[0].tolist() == [[6, 7], [9, 4]]
    content = torch.randn(1, 2, 2, 4, 5)
    working_set.staging.scatter_(2, plan.slots[..., None, None].expand_as(content), content)
    before, slots = working_set.block_of_slot.clone(), working_set.slots.clone()
    demand = working_set.want(torch.tensor([[[0, 1, 6], [0, 9, 3]]]), 10, 3, 0)
    evicted = before.gather(2, demand.slots)
    rest, found = working_set.exchange_staged(demand, evicted)
    assert int(found) == 2
    assert [int(b) for b in rest.blocks[rest.mask]] == [3]
    for head, block, staged in ((0, 6, content[0, 0, 0]), (1, 9, content[0, 1, 0])):
        slot = working_set.block_of_slot[0, head].tolist().index(block)
        assert torch.equal(working_set.slots[0, head, slot], staged)
    # Head 0 evicted block 2 for block 6; head 1 blocks 1 and 2 for blocks 9 and 3, so that block 4 had to go.
    assert sorted(working_set.block_of_staged[0, 0].tolist()) == [2, 7]
    assert sorted(working_set.block_of_staged[0, 1].tolist()) == [1, 2]
    for head, block in ((0, 2), (1, 1), (1, 2)):
        place = working_set.block_of_staged[0, head].tolist().index(block)
        was = before[0, head].tolist().index(block)
        assert torch.equal(working_set.staging[0, head, place], slots[0, head, was])


def test_prefetching_keeps_what_is_staged_and_predicted():
    working_set = filled(num_staged=3)
    working_set.want(torch.tensor([[[0, 1, 2], [0, 1, 2]]]), 10, 3, 0)
    scores = torch.arange(10, 0, -1.0).expand(1, 2, 10)
    assert working_set.want_staged(scores, 1, 0).blocks[0].tolist() == [[3], [3]]
    assert working_set.want_staged(scores, 1, 0).blocks[0].tolist() == [[4], [4]]
    plan = working_set.want_staged(scores, 2, 0)
    assert plan.blocks[plan.mask].tolist() == [5, 5]
    assert working_set.block_of_staged.sort().values[0].tolist() == [[3, 4, 5]] * 2


def test_integrity_check_sees_a_block_in_two_slots():
    working_set = filled()
    working_set.block_of_slot[:] = 3
    with pytest.raises(AssertionError, match="two slots"):
        working_set.check_integrity()
