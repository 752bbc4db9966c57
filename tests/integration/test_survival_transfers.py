"""Survival cases, section H: transfers, streams and prefetching. What needs a GPU has its CPU half here."""

from __future__ import annotations

import ast
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import oasis_cache
from oasis_cache import OasisCache, OasisConfig
from tests import models
from tests.integration.survival import SIMULATED, SPARSE, all_returned, assert_close, case, greedy, selections
from tests.integration.test_sparse_oracle import Pair

pytestmark = pytest.mark.contract

ENGINES = pytest.mark.parametrize("engine", ["sync", "threads", "simulated"])


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


def prefetching(engine: str, **options: Any) -> OasisConfig:
    return OasisConfig(**{**SIMULATED.__dict__, "engine": engine, **options})


def overwritten(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


@case(84)
@ENGINES
def test_what_is_stored_is_what_was_computed(engine):
    """200 rounds: tokens go to the host tier, and the tensors they came in are overwritten at once."""
    cache = OasisCache(prefetching(engine))
    whole: list[torch.Tensor] = []
    for _ in range(200):
        rows = [torch.randn(1, 2, 8, 4) for _ in range(2)]
        whole.append(torch.cat([part.clone() for part in rows], -1))
        cache.update(*rows, 0)
        if cache.layers[0].phase in ("sparse", "streamed"):
            cache.layers[0].attend(torch.randn(1, 4, 8, 4), None, 0.5, None, None, None, True)
        if cache.layers[0].pending is None:
            overwritten(rows)
        else:
            cache.layers[0].crop(0)
            overwritten(rows)
    assert torch.equal(cache.layers[0].dense_kv(), torch.cat(whole, 2))
    cache.layers[0].check_integrity()


@case(84, 88)
def test_the_simulated_engine_notices_a_missing_wait(model, monkeypatch):
    """The control of all tests with it: without waiting, attention reads NaN or a rule is broken."""
    cache = OasisCache(SIMULATED, model_config=model.config, max_fetch=None)
    models.forward(model, models.prompt(200), cache)
    monkeypatch.setattr(type(cache.runtime.engine), "wait", lambda self, transfer: None)
    with contextlib.suppress(AssertionError):
        for number in range(60):
            out = models.forward(model, models.prompt(1, seed=number), cache)
            if not torch.isfinite(out).all():
                return
        pytest.fail("nothing was noticed")


@case(85)
@ENGINES
@pytest.mark.parametrize("max_fetch", [1, 2, None])
def test_no_slot_is_written_while_it_is_read(engine, max_fetch):
    """Prefetches are under way while the next rows read: what is read is what the rules say, for 40 steps."""
    pair = Pair("llama", prefetching(engine, max_fetch=max_fetch), pads=(0, 5))
    pair.feed(90)
    for number in range(40):
        pair.feed(1 + number % 3)
    pair.check()
    assert pair.cache.stats().prefetched > 40


@case(86)
@ENGINES
def test_results_stand_when_the_next_step_is_under_way(model, engine):
    """A staging area of two blocks, used by step after step: earlier results do not change."""
    cache = OasisCache(prefetching(engine, max_fetch=2), model_config=model.config)
    models.forward(model, models.prompt(200), cache)
    layer = cache.layers[0]
    results = []
    for _ in range(12):
        new = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)
        layer.update(*new)
        out = layer.attend(torch.randn(1, 4, 1, 16), None, 0.25, None, None, None, True)
        results.append((out, out.clone()))
        assert all(torch.equal(kept, copy) for kept, copy in results)


@case(88)
@ENGINES
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_whichever_attention_function_times_it(engine, attention):
    truth = OasisCache(SPARSE)
    models_of = models.build("llama-deep", attention)
    ids = models.prompt(90)
    expected = models.generate(models_of, ids, truth, 20)
    out = models.generate(models_of, ids, OasisCache(prefetching(engine)), 20)
    assert torch.equal(out.sequences, expected.sequences)
    assert_close(torch.stack(out.logits), torch.stack(expected.logits))


@case(89)
@ENGINES
@pytest.mark.parametrize("count", [1, 9, 17, 30, 60])
def test_a_crop_while_blocks_are_on_their_way(engine, count):
    """The cut blocks' places are filled with other tokens at once: nothing of the old ones is read later."""
    pair = Pair("llama", prefetching(engine), pads=(0, 5))
    pair.feed(120)
    for number in range(4):
        pair.feed(2)
        pair.crop(count)
        pair.feed(max(8, count))
        pair.feed(1 + number % 2)
    pair.check()


@case(91)
@pytest.mark.parametrize("engine", ["sync", "threads"])
def test_caches_do_not_bring_threads(model, engine):
    """A hundred caches, one after another: the number of threads stays, and all memory is given back."""
    ids, threads = models.prompt(60), None
    for number in range(100):
        cache = OasisCache(prefetching(engine), model_config=model.config)
        models.forward(model, ids, cache)
        models.forward(model, ids[:, :1], cache)
        memory = cache.runtime.memory
        assert memory.reserved_bytes > 0
        if number % 2:
            cache.close()
        del cache
        assert all_returned(memory)
        threads = threads or threading.active_count()
        assert threading.active_count() == threads


@case(92)
def test_streams_and_events_name_their_device():
    """A new thread's current device is the first one: whatever makes or asks for a stream says which device it means."""
    asked = []
    for path in Path(oasis_cache.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in (
                    "torch.cuda.Stream",
                    "torch.Stream",
                    "torch.cuda.current_stream",
                    "torch.cuda.default_stream",
                ):
                    asked.append((path.name, name, bool(node.args or node.keywords)))
    assert all(given for *_, given in asked), asked
    assert {name for name, *_ in asked} <= {"transfer.py"}


@case(94)
@pytest.mark.parametrize("budget", [512, 4096])
def test_one_request_whatever_the_number_of_blocks(budget):
    """512 blocks travel in one packed copy, not in 512 small ones."""
    config = OasisConfig(budget=budget, block_size=8, recent_blocks=1, sparse_rows=4, max_fetch=8, lookahead="draft")
    cache = OasisCache(config)
    tokens = config.dense_tokens + 200
    cache.update(torch.randn(1, 1, tokens, 4), torch.randn(1, 1, tokens, 4), 0)
    engine, requests = cache.runtime.engine, []
    for name in ("submit", "fetch"):
        method = getattr(engine, name, None)
        if method is not None:
            setattr(engine, name, lambda *args, method=method: requests.append(args[0]) or method(*args))
    cache.update(torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 4), 0)
    cache.layers[0].attend(torch.randn(1, 2, 1, 4), None, 0.5, None, None, None, True)
    assert cache.stats().misses == config.num_slots == budget // 8 - 1
    assert 1 <= len(requests) <= 3


@case(72, 85)
@pytest.mark.parametrize("on_miss", ["fetch", "skip"])
def test_late_copies_change_no_selection(model, on_miss):
    """Where blocks are skipped too, what is read follows from what was asked for, not from when copies land."""
    ids, runs = models.prompt(120), []
    for engine in ("sync", "simulated", "threads"):
        cache = OasisCache(prefetching(engine), on_miss=on_miss, trace=True)
        runs.append((greedy(model, ids, cache, 20).tolist(), selections(cache)))
    assert runs[0] == runs[1] == runs[2]
