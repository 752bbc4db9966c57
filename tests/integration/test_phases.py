"""Which of prefill, dense, sparse and streamed a forward is, at every edge of the stated rule, and what the counters prove."""

from __future__ import annotations

import html
import json

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache, OasisConfig, kernels
from oasis_cache.stats import PHASES
from tests import models

pytestmark = pytest.mark.contract

BUDGET, ROWS = 96, 8
CONFIG = OasisConfig(budget=BUDGET, block_size=8, sink_blocks=1, recent_blocks=4, sparse_rows=ROWS, stream_tokens=32)
LAYERS, KV_HEADS, HEAD_DIM, FLOAT32 = 2, 2, 8, 4
TOKEN_BYTES = 2 * HEAD_DIM * FLOAT32
"""Keys and values of one token of one KV head of the Llama of tests/models.py."""


def run(forwards: list[int], config: OasisConfig = CONFIG, batch: int = 1, **options) -> OasisCache:
    model = models.build("llama", "sdpa", **options)
    cache = OasisCache(config, model_config=model.config)
    for number, rows in enumerate(forwards):
        models.forward(model, models.prompt(rows, batch, seed=number), cache)
    return cache


def phases(cache: OasisCache) -> dict[str, int]:
    stats = cache.stats()
    return {name: getattr(stats, f"{name}_steps") for name in PHASES}


def test_the_edges_below_lie_where_the_config_says():
    assert CONFIG.dense_tokens == BUDGET
    assert OasisConfig(budget=BUDGET, block_size=8, recent_blocks=0).dense_tokens == BUDGET + 7 + 32


@pytest.mark.parametrize(
    ("forwards", "last"),
    [
        ([1], "prefill"),
        ([BUDGET - 1], "prefill"),
        ([BUDGET], "prefill"),
        ([BUDGET + 1], "prefill"),
        ([5 * BUDGET], "prefill"),
        ([1, 1], "dense"),
        ([1, BUDGET - 1], "dense"),  # exactly the budget
        ([1, BUDGET], "streamed"),  # one over, and longer than sparse_rows
        ([BUDGET - 1, 1], "dense"),
        ([BUDGET, 1], "sparse"),
        ([BUDGET + 1, 1], "sparse"),
        ([BUDGET - ROWS, ROWS], "dense"),
        ([BUDGET - ROWS + 1, ROWS], "sparse"),
        ([BUDGET - ROWS, ROWS + 1], "streamed"),
        ([BUDGET, ROWS], "sparse"),
        ([BUDGET, ROWS + 1], "streamed"),
        ([BUDGET + 1, ROWS], "sparse"),
        ([BUDGET + 1, ROWS + 1], "streamed"),
        ([1, 200], "streamed"),
        ([3 * BUDGET, ROWS, ROWS + 1, ROWS], "sparse"),
        ([64, 64, 64, 1], "sparse"),  # a prefill's last chunk of one token
    ],
)
def test_phase_of_a_forward(forwards, last):
    before = phases(run(forwards[:-1])) if len(forwards) > 1 else dict.fromkeys(PHASES, 0)
    cache = run(forwards)
    after = phases(cache)
    assert {name: after[name] - before[name] for name in PHASES} == {name: int(name == last) for name in PHASES}
    stats = cache.stats()
    assert stats.steps == len(forwards) == sum(after.values())
    assert stats.fallback_steps == 0
    assert stats.context_tokens == sum(forwards)


def test_dense_below_moves_the_edge():
    config = OasisConfig(**{**CONFIG.__dict__, "dense_below": 200})
    assert phases(run([199, 1], config))["dense"] == 1
    assert phases(run([200, 1], config))["sparse"] == 1
    assert phases(run([150, 51], config))["streamed"] == 1


@pytest.mark.parametrize("chunk", [40, 64, 65])
def test_chunked_prefill_of_generate(chunk):
    """Chunks after the first are streamed (or dense, or sparse when the last one is short); decoding is sparse."""
    model = models.build("llama", "sdpa")
    cache, tokens, new = OasisCache(CONFIG, model_config=model.config), 195, 5
    models.generate(model, models.prompt(tokens), cache, new, prefill_chunk_size=chunk)
    expected, past = dict.fromkeys(PHASES, 0), 0
    for rows in [min(chunk, tokens - start) for start in range(0, tokens, chunk)] + [1] * (new - 1):
        if past == 0:
            name = "prefill"
        elif past + rows <= BUDGET:
            name = "dense"
        else:
            name = "sparse" if rows <= ROWS else "streamed"
        expected[name] += 1
        past += rows
    assert phases(cache) == expected


def test_a_crop_back_below_the_budget_is_dense_again():
    model, cache = models.build("llama", "sdpa"), run([150, 1])
    cache.crop(-(151 - BUDGET + 1))
    models.forward(model, models.prompt(1), cache)
    assert phases(cache) == {"prefill": 1, "dense": 1, "sparse": 1, "streamed": 0}
    models.forward(model, models.prompt(1), cache)
    assert phases(cache)["sparse"] == 2
    cache.crop(-1000)
    models.forward(model, models.prompt(1), cache)
    assert phases(cache)["prefill"] == 2


def test_reset_starts_the_counters_anew():
    cache = run([150, 1, 20, 3])
    cache.reset()
    stats = cache.stats()
    assert (
        stats.steps
        == stats.blocks_read
        == stats.misses
        == stats.hits
        == stats.bytes_written
        == stats.bytes_fetched
        == 0
    )
    assert (
        stats.device_bytes
        == stats.host_bytes
        == stats.host_bytes_reserved
        == stats.index_bytes
        == stats.context_tokens
        == 0
    )
    models.forward(models.build("llama", "sdpa"), models.prompt(150), cache)
    assert phases(cache) == {"prefill": 1, "dense": 0, "sparse": 0, "streamed": 0}


# --- What the counters prove ---------------------------------------------------------------------------------------------------


def device_bytes(config: OasisConfig, batch: int) -> int:
    """The formula of docs/architecture.md."""
    slots = config.budget // config.block_size - config.recent_blocks
    window = config.recent_blocks * config.block_size + config.block_size - 1 + 2 * config.sparse_rows
    per_head = (slots * config.block_size + window) * TOKEN_BYTES + slots * 16
    return LAYERS * batch * KV_HEADS * per_head


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_sparse_step_reads_no_more_than_the_budget(rows, block_size, batch):
    config = OasisConfig(**{**CONFIG.__dict__, "block_size": block_size})
    context = 4 * BUDGET
    cache = run([context], config, batch)
    steps = 7
    for number in range(steps):
        models.forward(models.build("llama", "sdpa"), models.prompt(rows, batch, seed=number), cache)
    stats = cache.stats()
    assert stats.sparse_steps == steps
    assert stats.tokens_read_max == BUDGET  # of `context`, which is four times as long
    assert stats.blocks_read == steps * LAYERS * batch * KV_HEADS * (BUDGET // block_size)
    assert stats.blocks_read_per_step == stats.blocks_read / steps
    asked = steps * LAYERS * batch * KV_HEADS * config.num_slots
    assert stats.hits + stats.misses == asked
    assert 0 < stats.misses < asked
    assert stats.hit_rate == stats.hits / asked
    assert stats.bytes_fetched == stats.misses * block_size * TOKEN_BYTES  # every miss once, nothing else


def test_tokens_attention_reads_are_what_the_counter_says():
    """The slots and the window that attention gets hold at most the budget and the tail: looked at, not counted."""
    cache = run([4 * BUDGET, 1, 1, 5])
    for layer in cache.layers:
        positions = layer.working_set.token_positions()
        assert (positions >= 0).all() and all(row.unique().numel() == row.numel() for row in positions.flatten(0, 1))
        sealed = layer.store.num_blocks * CONFIG.block_size
        assert int((positions < sealed).sum(-1).max()) == BUDGET
        assert layer.length - sealed < CONFIG.block_size + 5


@pytest.mark.parametrize("batch", [1, 2])
def test_device_bytes_follow_the_formula_at_any_context(batch):
    def after(context: int, *forwards: int):
        return run([context, *forwards], batch=batch).stats()

    expected = device_bytes(CONFIG, batch)
    for stats in (
        after(2 * BUDGET),
        after(2 * BUDGET, 1),
        after(8 * BUDGET, 1),
        after(8 * BUDGET, 1, ROWS, 1),
        after(100, 200, 100, 400, 1),  # chunks
    ):
        assert stats.device_bytes == expected
        assert stats.other_device_bytes == 0


def test_device_bytes_of_short_contexts_stay_below_dense_ones_limit():
    stats = run([20, 1]).stats()
    assert (
        LAYERS * KV_HEADS * 21 * TOKEN_BYTES
        <= stats.device_bytes
        <= LAYERS * KV_HEADS * CONFIG.dense_tokens * TOKEN_BYTES
    )
    assert stats.host_bytes == stats.index_bytes == stats.host_bytes_reserved == 0
    assert stats.pinned is None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("forwards", [[400, 1], [400, 8, 8, 3, 1], [100, 150, 33, 1]])
def test_host_bytes_are_the_sealed_blocks(forwards, batch):
    stats = run(forwards, batch=batch).stats()
    past = sum(forwards[:-1])  # a sparse step seals what was accepted before it
    sealed = past // CONFIG.block_size * CONFIG.block_size
    assert stats.host_bytes == LAYERS * batch * sealed * KV_HEADS * TOKEN_BYTES
    assert stats.bytes_written == stats.host_bytes  # each block once
    assert stats.host_bytes <= stats.host_bytes_reserved
    assert stats.pinned is False


# Blocks of 8 tokens and 8 channels: numba rounds both up to 16, the others pack 4 channels a byte.
INT2_BYTES = 8 * 2 + 4 * 8 if kernels.numba_for(torch.device("cpu")) is None else 16 * 4 + 4 * 16


@pytest.mark.parametrize(("index", "per_block"), [("int2", INT2_BYTES), ("int1", 8 * 1 + 4 * 8), ("minmax", 2 * 8 * 4)])
def test_index_bytes(index, per_block):
    config = OasisConfig(**{**CONFIG.__dict__, "index": index})
    cache = run([8 * BUDGET, 1], config)
    blocks = 8 * BUDGET // 8
    assert sum(layer.index.num_bytes for layer in cache.layers) == LAYERS * KV_HEADS * blocks * per_block
    exact = LAYERS * KV_HEADS * blocks * per_block
    assert exact <= cache.stats().index_bytes <= 1.25 * exact + LAYERS * KV_HEADS * 64 * per_block


def test_streamed_bytes_are_counted():
    """A streamed forward brings the blocks before the window through once, and reads the rest where it is."""
    cache = run([400, 40])
    stats = cache.stats()
    layer = cache.layers[0]
    sealed = (400 - ROWS) // 8  # a prefill leaves its last sparse_rows unsealed: they may be drafts
    window = (sealed - CONFIG.recent_blocks) * 8
    assert stats.bytes_fetched == LAYERS * KV_HEADS * window * TOKEN_BYTES
    assert stats.misses == stats.hits == stats.blocks_read == 0
    assert layer.get_seq_length() == 440


def test_a_smaller_budget_changes_the_logits():
    """The sparsity is real: one retrieved block gives other logits than the whole context, a budget over it gives the same."""
    model, ids = models.build("llama", "sdpa"), models.prompt(8 * BUDGET)
    next_token = models.prompt(1, seed=9)

    def logits(cache):
        models.forward(model, ids, cache)
        return models.forward(model, next_token, cache)

    exact = logits(DynamicCache())
    tiny = OasisConfig(budget=16, block_size=8, sink_blocks=0, recent_blocks=1, sparse_rows=1)
    assert models.relative_error(logits(OasisCache(tiny)), exact) > 0.1
    assert models.relative_error(logits(OasisCache(budget=16 * BUDGET)), exact) < 1e-5


def test_larger_budgets_come_closer():
    """With the exact index, error falls as the budget grows: what is read is what matters most."""
    model, ids = models.build("llama", "sdpa"), models.prompt(640)
    steps = [models.prompt(1, seed=number) for number in range(6)]
    dense = DynamicCache()
    models.forward(model, ids, dense)
    exact = torch.cat([models.forward(model, step, dense) for step in steps])
    errors = []
    for budget in (32, 128, 320):
        cache = OasisCache(budget=budget, block_size=8, recent_blocks=1, sparse_rows=1, index="exact")
        models.forward(model, ids, cache)
        errors.append(models.relative_error(torch.cat([models.forward(model, step, cache) for step in steps]), exact))
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]


# --- The report ------------------------------------------------------------------------------------------------------------------


def test_stats_print_and_serialise():
    cache = run([4 * BUDGET, 1, 3])
    stats = cache.stats()
    values = json.loads(json.dumps(stats.as_dict()))
    assert values["sparse_steps"] == 2
    assert values["hit_rate"] == stats.hit_rate > 0
    assert values["blocks_read_per_step"] == stats.blocks_read / 2
    lines = str(stats).splitlines()
    assert {line.split()[0] for line in lines} == set(values) - {"layers"}
    for name in ("hits", "misses", "bytes_fetched", "bytes_written", "device_bytes", "index_bytes", "host_bytes"):
        assert sum(layer[name] for layer in values["layers"]) == values[name] > 0
    assert [layer["layer"] for layer in values["layers"]] == list(range(LAYERS))
    assert any(line.split() == ["sparse_steps", "2"] for line in lines)
    text = repr(cache)
    assert f"{4 * BUDGET + 4} tokens" in text and f"budget={BUDGET}" in text and "2 sparse" in text
    for line in text.splitlines()[1:]:
        label, said = line.split(maxsplit=1)
        assert f">{label}<" in cache._repr_html_()
        assert f">{html.escape(said)}<" in cache._repr_html_()
    cache.close()
    assert "closed" in repr(cache)


def test_stats_of_an_unused_cache_are_zero():
    stats = OasisCache().stats()
    assert stats.steps == stats.device_bytes == stats.hit_rate == stats.blocks_read_per_step == 0
    assert stats.warnings == ()


@pytest.mark.slow
def test_five_thousand_tokens_stay_within_the_same_device_bytes():
    """Decoded one by one, with prefetches in flight: slots, window and staging area never grow; only the index does."""
    model = models.build("llama", num_hidden_layers=1, max_position_embeddings=8192)
    cache = OasisCache(CONFIG, model_config=model.config, lookahead="draft", engine="threads")
    ids = models.prompt(8 * BUDGET)
    models.forward(model, ids, cache)
    models.forward(model, ids[:, :1], cache)
    held = cache.stats().device_bytes
    for step in range(5000):
        models.forward(model, ids[:, step % 90 : step % 90 + 1], cache)
        if step % 500 == 499:
            assert cache.stats().device_bytes == held
    stats = cache.stats()
    assert stats.sparse_steps == 5001
    assert stats.context_tokens == 8 * BUDGET + 5001
    assert stats.tokens_read_max <= BUDGET
    cache.layers[0].check_integrity()
