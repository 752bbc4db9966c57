"""A cache that spills to disk gives the bits of one in memory, whatever the cap, and survives what disks do."""

from __future__ import annotations

import copy
import errno
import os
import resource

import pytest
import torch

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.tiers import TieredStore, spill
from tests import models
from tests.integration.survival import all_returned, oasis_layers

CONFIG = OasisConfig(budget=40, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)
BLOCK_BYTES = 2 * 8 * 16 * 4  # of one layer of the tiny Llama: 2 KV heads, 8 tokens, keys and values of 8 channels


def spilled(tmp_path, max_host_bytes, config=CONFIG, **overrides):
    return OasisCache(config, spill=str(tmp_path), max_host_bytes=max_host_bytes, **overrides)


def check(cache):
    for layer in oasis_layers(cache):
        layer.check_integrity()
    assert cache.runtime.memory.reserved_bytes <= cache.config.max_host_bytes


@pytest.mark.parametrize("engine", ["auto", "sync", "simulated"])
@pytest.mark.parametrize("num_blocks", [5, 13, 80])
def test_output_is_that_of_the_cache_in_memory(tmp_path, num_blocks, engine):
    model, ids = models.build("llama"), models.prompt(400, batch=2)
    plain = OasisCache(CONFIG)
    expected = models.generate(model, ids, plain, 12)
    with spilled(tmp_path, num_blocks * (BLOCK_BYTES + 512), engine=engine) as cache:
        out = models.generate(model, ids, cache, 12)
        assert torch.equal(out.sequences, expected.sequences)
        assert all(map(torch.equal, out.logits, expected.logits))
        more = models.prompt(70, batch=2, seed=3)  # a second turn, streamed
        assert torch.equal(models.forward(model, more, cache), models.forward(model, more, plain))
        stats = cache.stats()
        assert stats.host_bytes + stats.disk_bytes == plain.stats().host_bytes
        assert stats.host_bytes <= num_blocks * (BLOCK_BYTES + 512)
        assert stats.disk_bytes > 0 and stats.disk_bytes_written >= stats.disk_bytes
        assert stats.page_misses > 0 and stats.disk_bytes_read >= stats.page_misses * BLOCK_BYTES
        assert (stats.prefetched > 0) == (engine != "sync")
        check(cache)
        memory, spill = cache.runtime.memory, cache.runtime.pools.spill
    assert all_returned(memory) and spill.capacity_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_every_operation_works_on_pages_that_are_on_disk(tmp_path):
    model, ids = models.build("llama"), models.prompt(300, batch=2)
    plain, cache = OasisCache(CONFIG), spilled(tmp_path, 8 * (BLOCK_BYTES + 512))
    step = models.prompt(1, batch=2, seed=5)

    def both(operation, batch=2, new=step):
        results = []
        for each in (plain, cache):
            operation(each)
            results.append(models.forward(model, new[:1].expand(batch, -1), each))
        assert torch.equal(*results)
        check(cache)

    both(lambda each: models.forward(model, ids, each))
    both(lambda each: each.crop(-3))
    both(lambda each: each.crop(-100))  # reaches into sealed blocks
    both(lambda each: each.reorder_cache(torch.tensor([1, 0])))
    both(lambda each: each.batch_repeat_interleave(2), batch=4)
    both(lambda each: each.batch_select_indices(torch.tensor([0, 3, 1])), batch=3)
    twins = [copy.deepcopy(each) for each in (plain, cache)]
    both(lambda each: None, batch=3, new=models.prompt(40, seed=6))  # streamed
    results = [models.forward(model, models.prompt(5, batch=3, seed=7), twin) for twin in twins]
    assert torch.equal(*results)
    check(twins[1])
    both(lambda each: each.crop(-cache.get_seq_length() + 30), batch=3)  # dense again
    both(lambda each: models.forward(model, models.prompt(300, batch=3, seed=8), each), batch=3)
    cache.close()
    models.forward(model, models.prompt(5, batch=3, seed=9), twins[1])  # shares the file, and outlives its closing
    check(twins[1])
    pools = twins[1].runtime.pools
    twins[1].close()
    assert all_returned(pools.memory) and pools.spill.capacity_bytes == 0
    assert not pools.spill._close.alive


@pytest.mark.parametrize("tier_dtype", ["int8", "int4", "fp8"])
def test_compressed_pages_spill_as_others_do(tmp_path, tier_dtype):
    model, ids = models.build("llama"), models.prompt(300, batch=2)
    config = OasisConfig(**{**CONFIG.__dict__, "tier_dtype": tier_dtype})
    expected = models.generate(model, ids, OasisCache(config), 8)
    with spilled(tmp_path, 20_000, config) as cache:
        out = models.generate(model, ids, cache, 8)
        assert all(map(torch.equal, out.logits, expected.logits))
        assert cache.stats().disk_bytes > 0
        check(cache)


@pytest.mark.parametrize("name", ["falcon-h1", "gemma3", "deepseek-v3"])
def test_layers_with_states_and_windows_spill_what_they_keep_whole(tmp_path, name):
    model, ids = models.build(name), models.prompt(200)
    expected = models.generate(model, ids, OasisCache(CONFIG), 8)
    with spilled(tmp_path, 30_000) as cache:
        out = models.generate(model, ids, cache, 8)
        assert all(map(torch.equal, out.logits, expected.logits))
        assert cache.stats().disk_bytes > 0
        check(cache)


def test_skipping_misses_reads_what_the_disk_brought(tmp_path):
    model, ids = models.build("llama"), models.prompt(300)
    config = OasisConfig(**{**CONFIG.__dict__, "on_miss": "skip", "engine": "sync"})
    expected = models.generate(model, ids, OasisCache(config), 20)
    with spilled(tmp_path, 6 * (BLOCK_BYTES + 512), config) as cache:
        out = models.generate(model, ids, cache, 20)
        assert all(map(torch.equal, out.logits, expected.logits))


@pytest.mark.parametrize("max_host_bytes", [44_000, 48_000, 52_000])
def test_frames_that_are_free_count_as_room(tmp_path, max_host_bytes):
    """A cap of which nearly all is reserved, and not all of that in use, while a context grows past it token by token."""
    model, ids = models.build("llama"), models.prompt(150)
    expected = models.generate(model, ids, OasisCache(CONFIG, model_config=model.config), 24).sequences
    with OasisCache(CONFIG, model_config=model.config, spill=str(tmp_path), max_host_bytes=max_host_bytes) as cache:
        assert torch.equal(models.generate(model, ids, cache, 24).sequences, expected)
        assert cache.stats().host_bytes_reserved <= max_host_bytes


def test_a_disk_without_room_refuses_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "EXTENT_BYTES", 4096)
    model, cache = models.build("llama"), spilled(tmp_path, 20 * BLOCK_BYTES)
    models.forward(model, models.prompt(90), cache)
    held, state = cache.get_seq_length(), os.fstatvfs(cache.runtime.pools.spill._fd)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result((*state[:4], 1, *state[5:])))
    with pytest.raises(OSError, match=r"a context of 2,090 tokens in 2 layers needs .* sends to disk") as error:
        models.forward(model, models.prompt(2000), cache)
    assert error.value.errno == errno.ENOSPC and cache.get_seq_length() == held
    models.forward(model, models.prompt(1), cache)
    check(cache)


def test_a_disk_that_fills_up_leaves_the_cache_with_what_it_held(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "EXTENT_BYTES", 4096)
    model, ids = models.build("llama"), models.prompt(193)
    plain, cache = OasisCache(CONFIG), spilled(tmp_path, 20 * BLOCK_BYTES)
    for each in (plain, cache):
        models.forward(model, ids, each)
        models.forward(model, ids[:, :1], each)  # five more tokens fill no block
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (cache.runtime.pools.spill.capacity_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot take .* more bytes"):
            models.forward(model, models.prompt(2000), cache)
        cache.crop(0)
        check(cache)
        step = models.prompt(1, seed=4)
        for _ in range(5):
            assert torch.equal(models.forward(model, step, cache), models.forward(model, step, plain))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fails_to_read_breaks_off_one_forward(tmp_path, monkeypatch):
    model, ids = models.build("llama"), models.prompt(300)
    plain, cache = OasisCache(CONFIG), spilled(tmp_path, 6 * (BLOCK_BYTES + 512), lookahead="off")
    steps = models.prompt(20, seed=2)
    for each in (plain, cache):
        models.forward(model, ids, each)
        models.forward(model, steps[:, :1], each)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        failures = []
        for token in steps[:, 1:].T:  # sooner or later one needs a block that is not in memory
            try:
                models.forward(model, token[None], cache)
            except OSError as error:
                failures.append(error)
                cache.crop(0)
            else:
                models.forward(model, token[None], plain)
    assert failures and {error.errno for error in failures} == {errno.EIO}
    assert "reading the spill file" in str(failures[0])
    models_agree = [models.forward(model, steps[:, -1:], each) for each in (cache, plain)]
    assert models.relative_error(*models_agree) < 1e-5  # blocks came into other slots, so sums have another order
    check(cache)


@pytest.mark.parametrize("engine", ["threads", "sync"])
def test_a_prefetch_that_fails_changes_nothing(tmp_path, monkeypatch, engine):
    model, ids = models.build("llama"), models.prompt(300)
    expected = models.generate(model, ids, OasisCache(CONFIG), 12)
    gather, failures = TieredStore.gather, []

    def fail_into_staging(self, plan, addresses, target):
        if target.shape[2] == 5 and len(failures) % 3 < 2:
            failures.append(plan)
            raise OSError(errno.EIO, "a test")
        failures.append(None)
        gather(self, plan, addresses, target)

    monkeypatch.setattr(TieredStore, "gather", fail_into_staging)
    with spilled(tmp_path, 20_000, engine=engine, lookahead="draft", spare_blocks=5) as cache:
        out = models.generate(model, ids, cache, 12)
        assert models.relative_error(torch.stack(out.logits), torch.stack(expected.logits)) < 1e-5
        assert torch.equal(out.sequences, expected.sequences)
        assert sum(plan is not None for plan in failures) > 5
        check(cache)


def test_a_directory_that_vanishes_takes_nothing_with_it(tmp_path):
    directory = tmp_path / "spill"
    with pytest.raises(OSError, match="no spill file can be made"):
        OasisCache(CONFIG, spill=directory, max_host_bytes=10_000)
    directory.mkdir()
    model, ids = models.build("llama"), models.prompt(300)
    cache = spilled(directory, 6 * (BLOCK_BYTES + 512))
    models.forward(model, ids, cache)
    directory.rmdir()
    plain = OasisCache(CONFIG)
    models.forward(model, ids, plain)
    more = models.prompt(80, seed=1)
    assert torch.equal(models.forward(model, more, cache), models.forward(model, more, plain))


def test_a_cap_below_two_blocks_is_refused(tmp_path):
    model, cache = models.build("llama"), spilled(tmp_path, BLOCK_BYTES)
    with pytest.raises(MemoryError, match=r"max_host_bytes=1,024 is too small: blocks of 1,024 bytes need"):
        models.forward(model, models.prompt(200), cache)
    cache.crop(0)
    assert cache.get_seq_length() == 0
    models.forward(model, models.prompt(30), cache)
