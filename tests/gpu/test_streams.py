"""Races between streams, provoked: the compute stream is stalled, and whatever fails to wait for it is early and shows.

Each race has a control, the same code with all waits between streams taken out, which must go wrong: else the test proves
nothing. In a control nothing but blocks' bytes is in flight, so that it goes wrong without touching memory that is not its own.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from oasis_cache import OasisCache, kernels, transfer
from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.store import HostMemory, HostStore
from oasis_cache.transfer import make_engine
from tests.gpu.driving import Driver
from tests.gpu.stalling import stall, without_waits

pytestmark = pytest.mark.gpu
KV_HEADS, DIM, BLOCK, SLOTS, BLOCKS = 2, 64, 16, 8, 16
LOOPS, CONTROL_LOOPS, STALL = 200, 5, 0.01


class Rig:
    """A store of known blocks, slots on the device, and an engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        shape = LayerShape(1, KV_HEADS, DIM, DIM, torch.float32, device)
        self.store = HostStore(HostMemory(), shape, BLOCK)
        self.addresses = self.store.reserve(BLOCKS)
        self.blocks = self.draw(BLOCKS)
        self.seal(self.blocks, self.addresses)
        self.slots = self.draw(SLOTS)
        self.engine = make_engine("cuda")
        self.queries = torch.randn(1, KV_HEADS, 4, DIM, generator=self.generator, device=device)
        self.attend()  # compiled before anything is stalled
        self.fetch([0, 1], self.slots)
        torch.cuda.synchronize()

    def draw(self, blocks: int) -> torch.Tensor:
        """[1, kv_heads, blocks, block_size, kv_dim]."""
        shape = (1, KV_HEADS, blocks, BLOCK, 2 * DIM)
        return torch.randn(shape, generator=self.generator, device=self.device)

    def seal(self, blocks: torch.Tensor, addresses: torch.Tensor) -> None:
        kernels.seal_blocks(blocks, DIM, addresses, {}, 0)

    def plan(self, blocks: list[int]) -> FetchPlan:
        """Blocks into slots 0, 1, ..., the same for all KV heads."""
        numbers = torch.tensor(blocks, device=self.device).expand(1, KV_HEADS, -1).contiguous()
        slots = torch.arange(len(blocks), device=self.device).expand(1, KV_HEADS, -1).contiguous()
        return FetchPlan(numbers, slots, torch.ones_like(numbers, dtype=torch.bool), 0)

    def fetch(self, blocks: list[int], target: torch.Tensor) -> None:
        self.engine.wait(self.engine.submit(self.plan(blocks), self.store, target))

    def attend(self) -> torch.Tensor:
        return kernels.sparse_attention(self.queries, self.slots.flatten(2, 3), DIM, SLOTS * BLOCK, 1, 0.125)


@pytest.fixture
def rig(device):
    return Rig(device)


def count_wrong(attempt, loops: int) -> int:
    """How many of several attempts give a wrong result."""
    wrong = 0
    for place in range(loops):
        torch.cuda.synchronize()
        wrong += not attempt(place)
        torch.cuda.synchronize()
    return wrong


def check(attempt) -> None:
    """An attempt is always right, and wrong without waits."""
    assert count_wrong(attempt, LOOPS) == 0
    with without_waits():
        assert count_wrong(attempt, CONTROL_LOOPS) > 0, "nothing depends on the waits: the control proves nothing"


def test_a_block_is_fetched_as_it_was_sealed(rig):
    """Sealing writes the host page on the stalled compute stream; the side stream must not read the page before."""

    def attempt(place: int) -> bool:
        new, plan = rig.draw(1), rig.plan([3])
        torch.cuda.synchronize()
        stall(STALL)
        rig.seal(new, rig.addresses[:, 3:4])
        rig.engine.wait(rig.engine.submit(plan, rig.store, rig.slots))
        got = rig.slots[:, :, :1].clone()
        torch.cuda.synchronize()
        return torch.equal(got, new)

    check(attempt)


def test_attention_reads_its_slots_before_a_prefetch_overwrites_them(rig):
    def attempt(place: int) -> bool:
        plans = rig.plan([4, 5]), rig.plan([6, 7])
        rig.engine.wait(rig.engine.submit(plans[0], rig.store, rig.slots))
        torch.cuda.synchronize()
        want = rig.attend()
        torch.cuda.synchronize()
        stall(STALL)
        out = rig.attend()
        rig.engine.wait(rig.engine.submit(plans[1], rig.store, rig.slots))
        torch.cuda.synchronize()
        return torch.equal(out, want) and torch.equal(rig.slots[:, :, :2], rig.blocks[:, :, 6:8])

    check(attempt)


def test_a_staging_buffer_is_not_filled_again_before_it_was_read(rig):
    staging = rig.draw(2)

    def attempt(place: int) -> bool:
        plans = rig.plan([8, 9]), rig.plan([10, 11])
        torch.cuda.synchronize()
        stall(STALL)
        rig.engine.wait(rig.engine.submit(plans[0], rig.store, staging))
        first = staging.clone()
        rig.engine.wait(rig.engine.submit(plans[1], rig.store, staging))
        second = staging.clone()
        torch.cuda.synchronize()
        return torch.equal(first, rig.blocks[:, :, 8:10]) and torch.equal(second, rig.blocks[:, :, 10:12])

    check(attempt)


def test_blocks_are_there_when_the_computation_reads_them(rig):
    """The side stream is stalled instead: what reads the slots must wait for it."""
    side = transfer._side_stream(rig.slots.device)

    def attempt(place: int) -> bool:
        plan = rig.plan([12, 13])
        rig.slots.fill_(0.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            stall(STALL)
        rig.engine.wait(rig.engine.submit(plan, rig.store, rig.slots))
        got = rig.slots[:, :, :2].clone()
        torch.cuda.synchronize()
        return torch.equal(got, rig.blocks[:, :, 12:14])

    check(attempt)


def test_what_follows_a_cancelled_transfer_is_not_overwritten_by_it(rig):
    side = transfer._side_stream(rig.slots.device)

    def attempt(place: int) -> bool:
        plan = rig.plan([14, 15])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            stall(STALL)
        flying = rig.engine.submit(plan, rig.store, rig.slots)
        rig.engine.cancel(flying)
        rig.slots.fill_(7.0)
        torch.cuda.synchronize()
        return bool((rig.slots == 7.0).all())

    check(attempt)


def test_the_current_stream_is_the_one_that_is_waited_for(rig, device):
    """The computation may run on a stream of its own."""
    own = torch.cuda.Stream(device)

    def attempt(place: int) -> bool:
        new, plan = rig.draw(1), rig.plan([2])
        torch.cuda.synchronize()
        with torch.cuda.stream(own):
            stall(STALL)
            rig.seal(new, rig.addresses[:, 2:3])
            rig.engine.wait(rig.engine.submit(plan, rig.store, rig.slots))
            got = rig.slots[:, :, :1].clone()
        torch.cuda.synchronize()
        return torch.equal(got, new)

    check(attempt)


def test_streams_and_memory_do_not_grow_with_caches(device, monkeypatch):
    made = []

    class Counted(torch.cuda.Stream):
        def __new__(cls, *args, **kwargs):
            if "stream_id" not in kwargs:  # else it only names a stream that exists
                made.append(args)
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", Counted)
    reserved = []
    for _ in range(100):
        with contextlib.closing(OasisCache(budget=256, engine="cuda")) as cache:
            driving = Driver(cache, device)
            driving.fill(600)
            for _ in range(3):
                driving.step()
        del cache, driving
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert len(made) <= 1
    assert reserved[-1] == reserved[10]
