"""The compressed host tier: what is rounded, what is not, and what it costs, for every way in which blocks are read."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache
from oasis_cache.kernels.encoding import ENCODINGS, Encoding, decode, encode
from tests import models

KV_HEADS, GROUP, DIM, BLOCK = 2, 2, 32, 16
SETTINGS = {"budget": 128, "recent_blocks": 2, "sparse_rows": 4, "stream_tokens": 48, "block_size": BLOCK}
PROMPT = 40 * BLOCK + 5


class Driven:
    """A cache of one layer, driven by hand, and the tokens it was given."""

    def __init__(self, batch: int = 1, dtype: torch.dtype = torch.float32, prompt: int = PROMPT, **options) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.batch, self.dtype = batch, dtype
        self.kv = torch.empty(batch, KV_HEADS, 0, 2 * DIM, dtype=dtype)
        self.cache = OasisCache(**SETTINGS | options)
        self.feed(prompt)

    def feed(self, rows: int, attend: bool = False) -> torch.Tensor | None:
        kv = torch.randn(self.batch, KV_HEADS, rows, 2 * DIM, generator=self.generator) * 2 + 1
        kv = kv.to(self.dtype)
        self.kv = torch.cat([self.kv, kv], dim=2)
        self.cache.update(kv[..., :DIM], kv[..., DIM:], 0)
        if not attend:
            return None
        query = torch.randn(self.batch, KV_HEADS * GROUP, rows, DIM, generator=self.generator).to(self.dtype)
        return self.layer.attend(query, None, DIM**-0.5, None, None, None, True)

    @property
    def layer(self):
        return self.cache.layers[0]

    def rounded(self) -> torch.Tensor:
        """The tokens as the tier gives them back: all but the sinks rounded by blocks."""
        name, sinks = self.cache.config.tier_dtype, self.cache.config.sink_blocks
        whole = self.kv.shape[2] // BLOCK * BLOCK
        blocks = self.kv[:, :, :whole].unflatten(2, (-1, BLOCK))
        how = Encoding(name, BLOCK, 2 * DIM)
        blocks = torch.cat([blocks[:, :, :sinks], decode(encode(blocks[:, :, sinks:], how), how, self.dtype)], dim=2)
        return torch.cat([blocks.flatten(2, 3), self.kv[:, :, whole:]], dim=2)

    def check(self) -> None:
        """Everything that the layer holds is what it was given, rounded where it came out of the tier."""
        layer, rounded = self.layer, self.rounded()
        layer.check_integrity()
        if layer.residency is not None:
            layer.residency.land()
        working_set = layer.working_set
        blocks = rounded[:, :, : layer.store.num_blocks * BLOCK].unflatten(2, (-1, BLOCK))
        for table, held in (
            (working_set.block_of_slot, working_set.slots),
            (working_set.block_of_staged, working_set.staging),
        ):
            for row, head, entry in (table >= 0).nonzero().tolist():
                assert torch.equal(held[row, head, entry], blocks[row, head, table[row, head, entry]])
        assert bool((working_set.block_of_slot >= 0).any())
        start = working_set.window_start
        assert torch.equal(working_set.window, self.kv[:, :, start:]), "the window is exact"
        assert torch.equal(layer.dense_kv(), torch.cat([rounded[:, :, :start], self.kv[:, :, start:]], dim=2))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {}),
        ("int4", {"dtype": torch.bfloat16, "batch": 3}),
        ("fp8", {"dtype": torch.float16, "on_miss": "skip"}),
        ("int8", {"engine": "simulated", "lookahead": "draft", "batch": 2}),
        ("fp8", {"engine": "threads", "lookahead": "draft", "dtype": torch.bfloat16}),
        ("int4", {"sink_blocks": 0}),
        ("int8", {"sink_blocks": 3, "lookahead": "draft"}),
        ("int4", {"index": "exact", "spare_blocks": 4}),
    ],
    ids=str,
)
def test_slots_hold_what_the_tier_holds_through_everything(name, options):
    driven = Driven(tier_dtype=name, **options)
    for rows in (1, 1, 3, 1, 4, 1, 1, 4, 4, 1):  # seals a block
        assert driven.feed(rows, attend=True).isfinite().all()
    driven.check()
    twin = copy.deepcopy(driven.cache)
    order = torch.arange(driven.batch).flip(0)
    driven.cache.reorder_cache(order)
    driven.kv = driven.kv[order]
    driven.feed(1, attend=True)
    driven.check()
    driven.feed(37, attend=True)  # streamed
    driven.feed(1, attend=True)
    driven.check()
    del driven.cache
    driven.cache, driven.kv = twin, driven.kv[:, :, :666][order]
    driven.check()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_crop_into_sealed_blocks_brings_them_back_rounded(name):
    driven = Driven(tier_dtype=name)
    driven.feed(1, attend=True)
    keep = 30 * BLOCK + 3
    rounded = driven.rounded()
    driven.cache.crop(keep - driven.kv.shape[2])
    start = driven.layer.working_set.window_start
    assert torch.equal(driven.layer.working_set.window, rounded[:, :, start:keep])
    driven.kv = torch.cat([driven.kv[:, :, :start], rounded[:, :, start:keep]], dim=2)  # what the cache knows of them
    driven.feed(1, attend=True)
    driven.layer.check_integrity()
    driven.cache.crop(100 - driven.kv.shape[2])  # back to a dense context
    assert torch.equal(driven.layer.dense[:, :, :100], rounded[:, :, :100])


@pytest.mark.parametrize(("name", "most"), [("int8", 0.55), ("fp8", 0.55), ("int4", 0.33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_host_memory_and_traffic_shrink(name, most, dtype):
    sizes = {}
    for tier_dtype in (None, name):
        cache = OasisCache(budget=512, tier_dtype=tier_dtype, lookahead="off")
        generator = torch.Generator().manual_seed(1)
        kv = torch.randn(2, 1, 3, 2048, 64, generator=generator).to(dtype)
        cache.update(kv[0], kv[1], 0)
        for _ in range(4):
            step = torch.randn(3, 1, 3, 1, 64, generator=generator).to(dtype)
            cache.update(step[0], step[1], 0)
            cache.layers[0].attend(step[2], None, 0.125, None, None, None, True)
        stats = cache.stats()
        assert stats.bytes_written == stats.host_bytes
        block_bytes = 16 * 128 * dtype.itemsize
        if tier_dtype is not None:  # the sinks of three heads, and as many encoded blocks as were missing besides
            block_bytes, exact = Encoding(name, 16, 128).num_bytes, block_bytes
            assert stats.bytes_fetched == (stats.misses - 3) * block_bytes + 3 * exact
        else:
            assert stats.bytes_fetched == stats.misses * block_bytes
        sizes[tier_dtype] = stats
    limit = most * torch.bfloat16.itemsize / dtype.itemsize
    assert sizes[name].host_bytes <= limit * sizes[None].host_bytes
    assert sizes[name].host_bytes_reserved <= 1.3 * limit * sizes[None].host_bytes_reserved
    per_block = [sizes[key].bytes_fetched / sizes[key].misses for key in (name, None)]
    assert per_block[0] <= 1.05 * limit * per_block[1]


def test_streamed_bytes_are_those_of_the_tier():
    driven = Driven(tier_dtype="int8")
    driven.feed(40, attend=True)
    window = driven.layer.working_set.window_start
    stats = driven.cache.stats()
    blocks = (PROMPT - 4) // BLOCK - 2  # those before the window when the forward began
    encoded = Encoding("int8", BLOCK, 2 * DIM).num_bytes
    assert window > blocks * BLOCK
    assert stats.bytes_fetched == KV_HEADS * ((blocks - 1) * encoded + BLOCK * 2 * DIM * 4)


def test_a_cap_that_is_too_small_for_the_cache_holds_it_compressed():
    kv = torch.randn(2, 1, 4, 4096, 64)
    needed = 4 * 4096 * 128 * 4
    with pytest.raises(MemoryError, match="max_host_bytes"):
        OasisCache(budget=512, max_host_bytes=needed // 2).update(kv[0], kv[1], 0)
    with OasisCache(budget=512, max_host_bytes=needed // 2, tier_dtype="int8") as cache:
        cache.update(kv[0], kv[1], 0)
        assert 0 < cache.stats().host_bytes_reserved <= needed // 2
    assert cache.stats().host_bytes_reserved == 0


def test_an_out_of_memory_forward_leaves_the_blocks_in_step(monkeypatch):
    driven = Driven(tier_dtype="int8")
    blocks = driven.layer.store.num_blocks

    def fail(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(type(driven.layer.store.rest), "append", fail)
    with pytest.raises(MemoryError):
        driven.feed(37, attend=True)
    monkeypatch.undo()
    assert driven.layer.store.num_blocks == driven.layer.index.num_blocks == blocks
    assert driven.layer.store.used_bytes == driven.layer.store.range_bytes(0, blocks)


@pytest.mark.parametrize("name", ENCODINGS)
def test_short_contexts_stay_exact(name):
    model = models.build("llama")
    ids = models.prompt(60)
    want = models.generate(model, ids, DynamicCache(config=model.config), 20)
    cache = OasisCache(budget=128, tier_dtype=name)
    got = models.generate(model, ids, cache, 20)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(left, right) for left, right in zip(got.logits, want.logits, strict=True))
    assert cache.stats().sparse_steps == 0


@pytest.mark.parametrize("name", ["int5", "fp16", 8, True, "INT8"])
def test_unknown_types_are_refused(name):
    with pytest.raises(ValueError, match=r"tier_dtype=.* must be one of None, 'int8', 'int4', 'fp8'"):
        OasisCache(tier_dtype=name)
