"""The host tier: slabs, shared immutable pages, caps and fallbacks."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch

from oasis_cache import OasisCache, OasisWarning, kernels, store
from oasis_cache.blocks import LayerShape
from oasis_cache.store import HostMemory, HostStore, PageAllocator
from tests import models

SHAPE = LayerShape(2, 3, 4, 6, torch.float32, torch.device("cpu"))


def blocks_of(count, batch=2):
    return torch.randn(batch, 3, count, 8, 10)


def flat(blocks):
    return blocks.flatten(2, 3)


def test_blocks_come_back_as_written_over_many_slabs():
    memory = HostMemory()
    host = HostStore(memory, SHAPE, 8)
    written = [blocks_of(n) for n in (1, 37, 2, 1, 64, 5)]
    moved = sum(host.append(part) for part in written)
    everything = torch.cat(written, 2)
    assert len(host.pages.slabs) > 1
    assert moved == everything.numel() * 4 == host.used_bytes
    assert torch.equal(host.read_range(0, 110), flat(everything))
    assert torch.equal(host.read_range(33, 70), flat(everything[:, :, 33:70]))
    numbers = torch.stack([torch.randperm(110)[:50] for _ in range(6)]).view(2, 3, 50)
    target = torch.full((2, 3, 50, 8, 10), float("nan"))
    for gather in (kernels.gather_blocks, kernels.gather_blocks_by_host):
        gather(
            numbers, torch.arange(50).expand(2, 3, -1), torch.ones(2, 3, 50, dtype=torch.bool), host.addresses, target
        )
        assert torch.equal(target, everything.gather(2, numbers[..., None, None].expand_as(target)))
        target.fill_(float("nan"))
    host.check_integrity()


def test_copies_and_rows_share_pages_and_free_them_once():
    memory = HostMemory()
    host = HostStore(memory, SHAPE, 8)
    content = blocks_of(20)
    host.append(content)
    before = memory.reserved_bytes
    twin = copy.deepcopy(host)
    host.select_rows(torch.tensor([1, 1, 0]))
    assert memory.reserved_bytes == before
    assert torch.equal(host.read_range(0, 20), flat(content[[1, 1, 0]]))
    host.truncate(4)
    host.append(blocks_of(3, batch=3))
    assert torch.equal(twin.read_range(0, 20), flat(content))
    host.check_integrity()
    twin.check_integrity()
    del host
    assert torch.equal(twin.read_range(0, 20), flat(content))
    del twin
    gc.collect()
    assert memory.reserved_bytes == 0


def test_double_free_is_an_error():
    pages = PageAllocator(HostMemory(), (3, 8, 10), torch.float32, pin=False)
    slab_ids, offsets = pages.allocate(2)
    pages.allocate(1)
    pages.release(slab_ids, offsets)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.release(slab_ids, offsets)
    with pytest.raises(AssertionError, match="free page was shared"):
        pages.share(slab_ids, offsets)


def test_slabs_are_powers_of_two_and_waste_little():
    memory = HostMemory()
    pages = PageAllocator(memory, (8, 16, 256), torch.float32, pin=False)
    pages.allocate(129 * 2**20 // pages.page_bytes)
    assert all(raw.numel() & (raw.numel() - 1) == 0 for raw in pages._raw.values())
    assert memory.reserved_bytes <= 1.25 * pages.num_pages_used * pages.page_bytes


def test_decoding_allocates_rarely():
    pages = PageAllocator(HostMemory(), (3, 8, 10), torch.float32, pin=False)
    pages.allocate(100)
    slabs = len(pages.slabs)
    for _ in range(256):
        pages.allocate(1)
    assert len(pages.slabs) - slabs <= 256 / 8


def test_emptied_slabs_go_back():
    memory = HostMemory()
    pages = PageAllocator(memory, (3, 8, 10), torch.float32, pin=False)
    pages.release(*pages.allocate(64))
    assert memory.reserved_bytes == 0
    assert pages.slabs == {}


def test_a_cap_refuses_before_anything_is_written():
    model = models.build("llama")
    cache = OasisCache(budget=128, block_size=8, recent_blocks=2, sparse_rows=8, max_host_bytes=10_000)
    with pytest.raises(MemoryError, match=r"max_host_bytes=10,000"):
        models.forward(model, models.prompt(600), cache)
    stats = cache.stats()
    assert (stats.context_tokens, stats.host_bytes, stats.steps) == (0, 0, 0)
    models.forward(model, models.prompt(60), cache)  # the cache is still good for what fits
    assert cache.get_seq_length() == 60


def test_a_cgroup_limit_counts_as_available_memory(tmp_path, monkeypatch):
    real = store._read_int
    fake = {"/sys/fs/cgroup/memory.max": 2**30, "/sys/fs/cgroup/memory.current": 2**30 - 5000}
    monkeypatch.setattr(store, "_read_int", lambda path: fake.get(path))
    assert store.available_host_bytes() == 5000
    with pytest.raises(MemoryError, match="5,000"):
        HostMemory().require(6000, "a test")
    (tmp_path / "limit").write_text("max\n")
    assert real(str(tmp_path / "limit")) is None
    assert real(str(tmp_path / "absent")) is None


def test_failed_pinning_falls_back_and_says_so_once(monkeypatch):
    empty = torch.empty

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("cudaHostAlloc: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    memory = HostMemory()
    pages = PageAllocator(memory, (3, 8, 10), torch.float32, pin=True)
    pages.allocate(3)
    assert memory.pinned_bytes == 0 < memory.reserved_bytes
    assert "ordinary memory" in memory.pin_failure
    cache = OasisCache(budget=128, block_size=8, recent_blocks=2, sparse_rows=8)
    cache.runtime.memory.pin_failure = memory.pin_failure
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OasisWarning)
        models.forward(models.build("llama"), models.prompt(200), cache)
    assert sum("ordinary memory" in str(w.message) for w in caught) == 1
    assert cache.stats().pinned is False


def test_many_caches_leave_nothing_behind():
    model = models.build("llama")
    ids = models.prompt(200)
    accounts = []
    for _ in range(20):
        cache = OasisCache(budget=128, block_size=8, recent_blocks=2, sparse_rows=8)
        models.forward(model, ids, cache)
        models.forward(model, ids[:, :1], cache)
        accounts.append(cache.runtime.memory)
        assert accounts[-1].reserved_bytes > 0
    cache.close()
    del cache
    gc.collect()
    assert [account.reserved_bytes for account in accounts] == [0] * 20
