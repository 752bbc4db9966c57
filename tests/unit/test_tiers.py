"""Pages beyond host memory: the spill file, pools of frames under a cap, and stores over them."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import os
import resource
import signal
import threading
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.store import HostMemory, HostStore
from oasis_cache.tiers import Backing, PagePools, SpillFile, TieredStore, spill

SHAPE = LayerShape(2, 3, 4, 6, torch.float32, torch.device("cpu"))
PAGE = 3 * 8 * 10 * 4


def pages(count, length=4096):
    """Page-aligned random pages."""
    raw = np.empty((count + 1) * length + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    rows = raw[start : start + count * length].reshape(count, length)
    rows[:] = np.random.default_rng(count).integers(0, 256, rows.shape)
    return rows


@contextmanager
def largest_file(num_bytes):
    """Within, files cannot become larger: what a full disk does, for one process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("direct", [True, False])
def test_a_spill_file_gives_back_what_was_written(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(spill, "_use_direct_access", lambda fd: 1)
    file, written = SpillFile(str(tmp_path)), pages(700)
    file.promise(700, 4096)
    keys = np.concatenate([file.allocate(count, 4096) for count in (1, 600, 99)])
    for part in (slice(0, 1), slice(1, 601), slice(601, 700)):
        file.write(keys[part], list(written[part]))
    chosen = np.sort(np.random.default_rng(0).permutation(700)[:300])
    out = pages(300)
    out[:] = 0
    file.read(keys[chosen], list(out))
    assert (out == written[chosen]).all()
    file.free(keys[5:15], 4096)
    file.promise(12, 4096)
    again = file.allocate(12, 4096)
    assert again[:10].tolist() == keys[5:15].tolist() and set(again[10:]).isdisjoint(keys.tolist())
    held = file.capacity_bytes
    file.free(np.concatenate([keys[:5], again, keys[15:]]), 4096)
    assert held >= 700 * 4096 and file.capacity_bytes == os.fstat(file._fd).st_size == 0


def test_a_full_disk_is_noticed_before_anything_is_promised(tmp_path):
    file = SpillFile(str(tmp_path))
    with largest_file(1 << 20):
        file.promise(200, 4096)  # too much for a whole extent, but not for this file
        with pytest.raises(OSError, match=r"spill='.*' cannot take 409,600 more bytes besides the 819,200"):
            file.promise(100, 4096)
        assert file.capacity_bytes == os.fstat(file._fd).st_size == 819_200
        keys = file.allocate(200, 4096)
        file.write(keys, list(pages(200)))
    file.promise(100, 4096)
    assert file.allocate(100, 4096)[0] == 819_200


def test_a_spill_file_has_no_name_and_orphans_are_removed(tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text("not ours")
    orphan, held = (tmp_path / f"oasis-cache-{name}.spill" for name in (f"{2**22 + 1}-x", f"{2**22 + 2}-y"))
    for path in (orphan, held):
        path.write_bytes(b"left behind")
    with open(held, "rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        named = monkeypatch.context()
        with named as patch:
            patch.delattr(os, "O_TMPFILE", raising=False)
            files = [SpillFile(str(tmp_path)), SpillFile(str(tmp_path))]
        files.append(SpillFile(str(tmp_path)))
        assert sorted(path.name for path in tmp_path.iterdir()) == [held.name, "other.txt"]
    endings = [file._close for file in files]
    files[0].close()
    files[0].close()
    del files
    assert not any(ending.alive for ending in endings)


def test_a_process_killed_while_it_makes_its_file_leaves_an_orphan_for_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(spill.os, "unlink", lambda path: os.kill(os.getpid(), signal.SIGKILL))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # other threads of this process do not matter to what the child does
        child = os.fork()
    if child == 0:
        spill._open_and_unlink(str(tmp_path))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.undo()
    assert len(list(tmp_path.glob("oasis-cache-*.spill"))) == 1
    SpillFile(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_failures_of_the_disk_are_said_in_words(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"no spill file can be made in spill='.*absent'"):
        SpillFile(str(tmp_path / "absent"))
    file = SpillFile(str(tmp_path))
    file.promise(4, 4096)
    keys, written = file.allocate(4, 4096), pages(4)
    file.write(keys, list(written))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, offset: 100)
        with pytest.raises(OSError, match=r"reading the spill file .* failed: 100 of 16384 bytes"):
            file.read(keys, list(written))
    file._pid += 1
    with pytest.raises(OSError, match="forked"):
        file.write(keys, list(written))


class Recorded(Backing):
    """Pages computed from their keys; counts what it was asked for, and can fail."""

    def __init__(self, rereads=True):
        self.rereads, self.asked, self.fails = rereads, [], False

    def content(self, key):
        return np.random.default_rng(int(key)).integers(0, 256, PAGE).astype(np.uint8)

    def read(self, keys, out):
        if self.fails:
            raise OSError(errno.EIO, "a test")
        assert (np.diff(keys) > 0).all()
        self.asked += keys.tolist()
        for key, row in zip(keys, out, strict=True):
            row[:PAGE] = self.content(key)


def make_pools(tmp_path, num_frames, page_bytes=PAGE):
    stride = -(-page_bytes // 512) * 512
    return PagePools(HostMemory(num_frames * (stride + 512)), SpillFile(str(tmp_path)))


def leased(pool, ids):
    """Contents of pages by id, as a reader of frames sees them."""
    seen = {}
    for taken, addresses in pool.lease(ids):
        for page, address in zip(taken.tolist(), addresses.tolist(), strict=True):
            assert page not in seen
            seen[page] = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * PAGE).from_address(address)).copy()
    return seen


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "lease", "read", "share", "release"]), st.integers(1, 30), st.integers(0, 2**16)
    ),
    min_size=1,
    max_size=25,
)


@given(steps=STEPS, num_frames=st.integers(3, 20), rereads=st.booleans())
@settings(max_examples=60)
def test_pages_keep_their_content_whatever_happens(tmp_path_factory, steps, num_frames, rereads):
    pools = make_pools(tmp_path_factory.getbasetemp(), num_frames)
    pool, backing = pools.pool(PAGE), Recorded(rereads)
    known, references, next_key = {}, {}, 0
    for step, count, seed in steps:
        draw = np.random.default_rng(seed)
        chosen = draw.permutation(sorted(known))[:count].astype(np.int64)
        if step == "create" and seed % 3:
            rows = draw.integers(0, 256, (count, PAGE)).astype(np.uint8)
            ids = pool.create(count)
            pool.write(ids, rows)
        elif step == "create":
            keys = np.arange(next_key, next_key + count)
            next_key += count
            ids, rows = pool.register(backing, keys), [backing.content(key) for key in keys]
        elif step == "lease":
            seen = leased(pool, chosen)
            assert seen.keys() == set(chosen.tolist())
            assert all((seen[page] == known[page]).all() for page in seen)
        elif step == "read":
            assert all((row == known[page]).all() for page, row in zip(chosen.tolist(), pool.read(chosen), strict=True))
        elif step == "share":
            pool.share(chosen)
            references.update({page: references[page] + 1 for page in chosen.tolist()})
        else:
            pool.release(chosen)
            for page in chosen.tolist():
                references[page] -= 1
                if not references[page]:
                    del references[page], known[page]
        if step == "create":
            assert not known.keys() & set(ids.tolist())
            known.update(zip(ids.tolist(), rows, strict=True))
            references.update(dict.fromkeys(ids.tolist(), 1))
        pools.check_integrity()
        assert pools.memory.reserved_bytes <= pools.memory.max_bytes
        assert pool.num_pages == len(known)
    assert rereads or len(set(backing.asked)) == len(backing.asked), "a page crossed twice"
    pool.release(np.array([page for page, count in references.items() for _ in range(count)], np.int64))
    pools.check_integrity()
    assert pools.memory.reserved_bytes == pools.spill.capacity_bytes == 0


def test_threads_that_want_the_same_few_frames_do_not_block_each_other(tmp_path):
    pools = make_pools(tmp_path, 6)
    pool = pools.pool(PAGE)
    rows = np.random.default_rng(1).integers(0, 256, (40, PAGE)).astype(np.uint8)
    ids = pool.create(40)
    pool.write(ids, rows)
    failures = []

    def work(seed):
        draw = np.random.default_rng(seed)
        for _ in range(60):
            chosen = draw.permutation(40)[: draw.integers(1, 40)]
            for page, content in leased(pool, ids[chosen]).items():
                if not (content == rows[ids.tolist().index(page)]).all():
                    failures.append(page)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    assert failures == []
    pools.check_integrity()
    assert pools.bytes_written == 40 * PAGE, "a page was written twice, or stayed only in memory"


def test_pools_of_two_page_sizes_share_one_cap(tmp_path):
    pools = make_pools(tmp_path, 32)
    small, large = pools.pool(PAGE), pools.pool(4 * PAGE)
    first = small.create(100)
    small.write(first, np.full((100, PAGE), 1, np.uint8))  # takes all of the cap
    second = large.create(100)
    large.write(second, np.full((100, 4 * PAGE), 2, np.uint8))
    assert pools.memory.reserved_bytes <= pools.memory.max_bytes
    assert large.frames.reserved_bytes > small.frames.reserved_bytes > 0
    assert (small.read(first) == 1).all() and (large.read(second) == 2).all()
    assert all((content == 1).all() for content in leased(small, first).values())
    pools.check_integrity()
    with pytest.raises(MemoryError, match=r"max_host_bytes=.* is too small"):
        pools.pool(pools.memory.max_bytes)


def test_a_backing_that_fails_leaves_the_pool_as_it_was(tmp_path):
    pools = make_pools(tmp_path, 8)
    pool, backing = pools.pool(PAGE), Recorded()
    ids = pool.register(backing, np.arange(20))
    leased(pool, ids[:3])
    backing.fails = True
    with pytest.raises(OSError, match="a test"):
        leased(pool, ids[:5])
    with pytest.raises(OSError, match="a test"):
        pool.read(ids)
    pools.check_integrity()
    assert leased(pool, ids[:3]).keys() == set(ids[:3].tolist())  # still there
    backing.fails = False
    assert all((content == backing.content(page)).all() for page, content in leased(pool, ids).items())


def test_without_a_spill_file_only_what_has_a_home_leaves_memory():
    pools = PagePools(HostMemory(10 * PAGE))
    pool, backing = pools.pool(PAGE), Recorded()
    ids = pool.register(backing, np.arange(50))
    leased(pool, ids)
    new = pool.create(8)
    pool.write(new, np.full((8, PAGE), 7, np.uint8))
    assert all((content == 7).all() for content in leased(pool, new).values())
    leased(pool, ids)
    pools.require(PAGE, "a test")
    with pytest.raises(MemoryError, match=r"a test needs 4,800 more bytes .* leaves 1,920.*spill="):
        pools.require(5 * PAGE, "a test")
    more = pool.create(5)
    with pytest.raises(MemoryError, match="no room for one page of 960 bytes"):
        pool.write(more, np.zeros((5, PAGE), np.uint8))
    pool.release(more)
    pools.check_integrity()


def fill(store, seed, count, batch=2):
    content = torch.randn(batch, 3, count, 8, 10, generator=torch.Generator().manual_seed(seed))
    store.append(content)
    return content


def check_equal(tiered, host):
    """Everything that a layer asks of a store."""
    assert tiered.num_blocks == host.num_blocks and tiered.batch == host.batch
    blocks = host.num_blocks
    assert torch.equal(tiered.read_range(0, blocks), host.read_range(0, blocks))
    assert torch.equal(tiered.read_range(blocks // 3, blocks), host.read_range(blocks // 3, blocks))
    entries = min(blocks, 11)
    numbers = torch.stack([torch.randperm(blocks)[:entries] for _ in range(host.batch * 3)]).view(
        host.batch, 3, entries
    )
    mask = torch.rand(numbers.shape) < 0.7
    numbers = torch.where(mask, numbers, -1)
    plan = FetchPlan(numbers, torch.randperm(entries).expand_as(numbers), mask, 0)
    targets = [torch.full((host.batch, 3, entries, 8, 10), 3.0) for _ in range(2)]
    for store, target in zip((tiered, host), targets, strict=True):
        store.gather(plan, store.addresses, target)
    assert torch.equal(*targets) and bool((targets[0] != 3.0).any()) == bool(mask.any())
    tiered.check_integrity()


@pytest.mark.parametrize("num_frames", [3, 20, 500])
def test_a_tiered_store_is_a_host_store(tmp_path, num_frames):
    torch.manual_seed(num_frames)
    pools = make_pools(tmp_path, num_frames)
    tiered, host = TieredStore(pools, SHAPE, 8), HostStore(HostMemory(), SHAPE, 8)
    for seed, count in enumerate((1, 37, 2, 64)):
        fill(tiered, seed, count), fill(host, seed, count)
    check_equal(tiered, host)
    copies = copy.deepcopy(tiered), copy.deepcopy(host)
    rows = torch.tensor([1, 1, 0])
    for store in (tiered, host):
        store.select_rows(rows)
        store.truncate(50)
        fill(store, 9, 5, batch=3)
    check_equal(tiered, host)
    check_equal(*copies)
    assert pools.memory.reserved_bytes <= pools.memory.max_bytes
    assert tiered.used_bytes + tiered.away_bytes == host.used_bytes
    gc.disable()  # nothing may wait for a collection
    try:
        del store
        del tiered, copies
        assert pools.memory.reserved_bytes == pools.live_bytes == pools.spill.capacity_bytes == 0
    finally:
        gc.enable()


def test_blocks_of_another_backing_are_read_when_they_are_wanted(tmp_path):
    pools, backing = make_pools(tmp_path, 10), Recorded(rereads=False)
    store = TieredStore(pools, SHAPE, 8)
    keys = torch.stack([torch.arange(30), torch.arange(30).flip(0)])
    store.adopt(backing, keys)
    assert backing.asked == [] and store.used_bytes == 0
    expected = (
        torch.from_numpy(np.stack([backing.content(key) for key in range(30)])).view(torch.float32).view(30, 3, 8, 10)
    )
    kv = store.read_range(4, 9).view(2, 3, 5, 8, 10)
    assert torch.equal(kv.transpose(1, 2).nan_to_num(), expected[keys[:, 4:9]].nan_to_num())
    assert sorted(backing.asked) == [*range(4, 9), *range(21, 26)]
    store.read_range(0, 30)
    assert sorted(backing.asked) == list(range(30)), "each block crosses once"
    store.check_integrity()


def test_a_cache_of_tiers_vanishes_without_a_collection(tmp_path):
    gc.disable()
    try:
        pools = make_pools(tmp_path, 10)
        store, ending = TieredStore(pools, SHAPE, 8), pools.spill._close
        fill(store, 1, 40)
        del pools, store
        assert not ending.alive
    finally:
        gc.enable()
