"""Engines: they move the same bytes; the simulated one catches broken rules; prefetching changes no bit of the output."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from oasis_cache import OasisCache, kernels
from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.residency import Residency
from oasis_cache.store import HostMemory, HostStore
from oasis_cache.transfer import (
    DeviceStreams,
    NoStreams,
    SimulatedStreams,
    ThreadStreams,
    TransferEngine,
    make_engine,
)
from tests import models


def sync_engine():
    return TransferEngine(NoStreams())


def thread_engine():
    return TransferEngine(ThreadStreams())


def simulated_engine(seed=0, early=0.3):
    return TransferEngine(SimulatedStreams(seed, early))


SHAPE = LayerShape(2, 2, 4, 6, torch.float32, torch.device("cpu"))
BASE = dict(budget=128, block_size=8, recent_blocks=2, sparse_rows=8, stream_tokens=32)


def filled_store(num_blocks=12):
    store = HostStore(HostMemory(), SHAPE, 8)
    store.append(torch.randn(SHAPE.batch, SHAPE.kv_heads, num_blocks, 8, SHAPE.kv_dim))
    return store


def plan_of(blocks, slots, mask, generation=0):
    return FetchPlan(torch.tensor(blocks), torch.tensor(slots), torch.tensor(mask), generation)


def small_plan():
    return plan_of(
        [[[3, 1], [0, 11]], [[5, 5], [7, 2]]],
        [[[0, 2], [1, 0]], [[2, 1], [0, 3]]],
        [[[1, 1], [1, 0]], [[1, 0], [1, 1]]],
    )


def with_bool_mask(plan):
    return FetchPlan(plan.blocks, plan.slots, plan.mask.bool(), plan.generation)


@pytest.mark.parametrize(
    "engine", [sync_engine(), thread_engine(), simulated_engine(3)], ids=["sync", "threads", "simulated"]
)
def test_engines_move_the_planned_blocks_and_nothing_else(engine):
    store, plan = filled_store(), with_bool_mask(small_plan())
    target = torch.full((2, 2, 4, 8, SHAPE.kv_dim), 7.0)
    engine.wait(engine.submit(plan, store, target))
    whole = store.read_range(0, 12).unflatten(2, (12, 8))
    expected = torch.full_like(target, 7.0)
    for row, head, entry in plan.mask.nonzero().tolist():
        block, slot = plan.blocks[row, head, entry], plan.slots[row, head, entry]
        expected[row, head, slot] = whole[row, head, block]
    assert torch.equal(target, expected)


def test_simulated_engine_poisons_what_is_in_flight():
    engine, target = simulated_engine(early=0.0), torch.zeros(2, 2, 4, 8, SHAPE.kv_dim)
    transfer = engine.submit(with_bool_mask(small_plan()), filled_store(), target)
    rows, heads, entries = transfer.plan.mask.nonzero(as_tuple=True)
    assert target[rows, heads, transfer.plan.slots[rows, heads, entries]].isnan().all()
    assert not engine.ready(transfer)
    engine.wait(transfer)
    assert not target.isnan().any()


def test_simulated_engine_refuses_a_buffer_still_in_flight():
    engine, store, target = simulated_engine(early=0.0), filled_store(), torch.zeros(2, 2, 4, 8, SHAPE.kv_dim)
    engine.submit(with_bool_mask(small_plan()), store, target)
    with pytest.raises(AssertionError, match="rule 3"):
        engine.submit(with_bool_mask(small_plan()), store, target)


@pytest.mark.parametrize("engine", [thread_engine(), simulated_engine(early=0.0)], ids=["threads", "simulated"])
def test_cancelled_transfers_write_nothing_afterwards(engine):
    target = torch.zeros(2, 2, 4, 8, SHAPE.kv_dim)
    transfer = engine.submit(with_bool_mask(small_plan()), filled_store(), target)
    engine.cancel(transfer)
    before = target.clone()
    transfer.land()
    torch.testing.assert_close(target, before, equal_nan=True)


def test_thread_engine_reports_errors_where_it_is_waited_for(monkeypatch):
    def fail(*_):
        raise OSError("the tier is gone")

    monkeypatch.setattr(kernels, "gather_blocks", fail)
    engine, store = thread_engine(), filled_store()
    transfer = engine.submit(with_bool_mask(small_plan()), store, torch.zeros(2, 2, 4, 8, SHAPE.kv_dim))
    with pytest.raises(OSError, match="tier is gone"):
        engine.wait(transfer)


def test_unknown_engine_names_the_accepted_ones():
    with pytest.raises(ValueError, match="'sync'"):
        make_engine("warp")


class SeededCache(OasisCache):
    """An OasisCache on a simulated engine of a given seed."""

    def __init__(self, seed, **options):
        super().__init__(engine="simulated", **options)
        self.runtime.engine = simulated_engine(seed)


def logits_of(cache, model, **options):
    out = models.generate(model, models.prompt(260), cache, 12, **options)
    for layer in cache.layers:
        layer.check_integrity()
    return torch.stack(out.logits)


@pytest.fixture(scope="module")
def model():
    return models.build("llama")


@pytest.mark.parametrize(
    "options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}], ids=["plain", "assisted", "beam"]
)
@pytest.mark.parametrize(
    "settings",
    [
        dict(lookahead="draft", max_fetch=1),
        dict(lookahead="draft", max_fetch=0.3),
        dict(lookahead="draft", max_fetch=None),
        dict(lookahead="previous", max_fetch=0.3),
        dict(lookahead="draft", max_fetch=0.3, engine="threads"),
        dict(lookahead="auto", engine="threads"),
        dict(lookahead="off", engine="threads"),
    ],
    ids=str,
)
def test_prefetching_changes_no_bit(model, options, settings):
    expected = logits_of(OasisCache(**BASE), model, **options)
    cache = OasisCache(**BASE, **settings)
    assert torch.equal(logits_of(cache, model, **options), expected)
    stats = cache.stats()
    assert (stats.prefetched > 0) == (settings["lookahead"] != "off")
    if stats.prefetched and settings.get("max_fetch") != 1:
        assert stats.spare_hits > 0


def test_landing_order_changes_no_bit(model):
    """200 seeded orders of landing, assisted: crops, rejected drafts and prefetches in every order the rules allow."""
    options = {"prompt_lookup_num_tokens": 3}
    ids = models.prompt(200)
    settings = dict(BASE, lookahead="draft", max_fetch=0.3)

    def run(cache):
        return torch.stack(models.generate(model, ids, cache, 5, **options).logits)

    expected = run(OasisCache(**BASE))
    for seed in range(200):
        assert torch.equal(run(SeededCache(seed, **settings)), expected), f"seed {seed}"


def test_skip_is_the_same_on_every_engine(model):
    expected = logits_of(OasisCache(**BASE, on_miss="skip", max_fetch=0.3), model)
    for cache in (
        OasisCache(**BASE, on_miss="skip", max_fetch=0.3, engine="threads"),
        SeededCache(1, **BASE, on_miss="skip", max_fetch=0.3),
    ):
        assert torch.equal(logits_of(cache, model), expected)


def test_skip_bounds_what_is_fetched(model):
    cache = OasisCache(**BASE, on_miss="skip", max_fetch=1)
    logits_of(cache, model)
    stats = cache.stats()
    heads = len(cache.layers) * cache.layers[0].shape.kv_heads
    first_fill = heads * cache.config.num_slots
    fetched = stats.bytes_fetched // cache.layers[0].counters.block_bytes
    assert first_fill < fetched <= first_fill + heads * stats.sparse_steps


@pytest.mark.parametrize("on_miss", ["fetch", "skip"])
@pytest.mark.parametrize("missing", ["demand", "prefetched"])
def test_a_missing_wait_is_seen(model, monkeypatch, missing, on_miss):
    """With either wait of the decode step left out, NaN or a broken rule shows: the simulated engine would catch the bug."""
    settings = dict(BASE, on_miss=on_miss, lookahead="draft", max_fetch=0.3)

    if missing == "demand":
        monkeypatch.setattr(SimulatedStreams, "now", lambda streams, transfer: streams.issue(transfer))
    else:
        monkeypatch.setattr(Residency, "_wait", lambda residency, transfer: None)
    cache = OasisCache(**settings, engine="simulated")
    cache.runtime.engine = simulated_engine(early=0.0)
    broken_rule = contextlib.suppress(AssertionError)
    with broken_rule:
        assert not logits_of(cache, model).isnan().any()
        pytest.fail("the missing wait went unseen")


def test_a_transfer_in_flight_is_dropped_by_a_crop(model):
    """A prefetch planned before a crop into sealed blocks never lands afterwards."""
    ids = models.prompt(260)

    def run(cache):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :2], past_key_values=cache)
            cache.crop(-80)
            return model(ids[:, :1], past_key_values=cache).logits

    cache = OasisCache(**BASE, lookahead="draft", max_fetch=0.5, engine="simulated")
    cache.runtime.engine = simulated_engine(early=0.0)
    assert torch.equal(run(cache), run(OasisCache(**BASE)))
    assert cache.stats().dropped == len(cache.layers)


def test_engines_share_one_interface():
    for engine in (sync_engine(), thread_engine(), simulated_engine()):
        assert isinstance(engine, TransferEngine)
        engine.close()
        engine.close()


def test_a_transfer_keeps_its_pages_alive():
    """A cache dropped with a prefetch in flight: the copy that runs later reads pages that are still there."""
    store, target = filled_store(), torch.zeros(2, 2, 4, 8, SHAPE.kv_dim)
    memory, engine = store.pages.memory, simulated_engine(early=0.0)
    expected = store.read_range(0, 12).unflatten(2, (12, 8))
    transfer = engine.submit(with_bool_mask(small_plan()), store, target)
    del store
    assert memory.reserved_bytes > 0
    engine.wait(transfer)
    for row, head, entry in transfer.plan.mask.nonzero().tolist():
        block, slot = transfer.plan.blocks[row, head, entry], transfer.plan.slots[row, head, entry]
        assert torch.equal(target[row, head, slot], expected[row, head, block])
    del transfer
    gc.collect()
    assert memory.reserved_bytes == 0


def test_layers_follow_their_tensors():
    """Where there are CUDA devices, CPU layers copy at once by default, and do not prefetch."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert [TransferEngine(DeviceStreams(NoStreams())).runs_beside(device) for device in (cpu, cuda)] == [False, True]
    assert TransferEngine(DeviceStreams(ThreadStreams())).runs_beside(cpu)
    store, target = filled_store(), torch.zeros(2, 2, 4, 8, SHAPE.kv_dim)
    assert TransferEngine(DeviceStreams(NoStreams())).submit(with_bool_mask(small_plan()), store, target).landed
