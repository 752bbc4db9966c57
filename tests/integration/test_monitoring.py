"""Times by phase, bytes by kind, and what a Prometheus server reads of them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.display import in_bytes
from oasis_cache.monitoring import CacheCollector
from oasis_cache.stats import PHASES
from tests import models

SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)


class SlowLayer:
    """Makes each forward through a layer of a model take at least so long."""

    def __init__(self, module: torch.nn.Module, seconds: float) -> None:
        self.handle = module.register_forward_pre_hook(lambda *_: time.sleep(seconds))


def test_tokens_and_time_by_phase():
    """Each forward's time goes to its own phase; what an interrupted one took goes to none."""
    model = models.build("llama")
    cache = OasisCache(SMALL)
    slow = SlowLayer(model.model.layers[1], 0.05)
    started = time.perf_counter()
    try:
        for rows in (30, 5, 1, 20, 3, 1):
            models.forward(model, models.prompt(rows), cache)
    finally:
        slow.handle.remove()
    elapsed, stats = time.perf_counter() - started, cache.stats()
    assert stats.tokens == {"prefill": 30, "dense": 6, "streamed": 20, "sparse": 4}
    forwards = {"prefill": 1, "dense": 2, "streamed": 1, "sparse": 2}
    for phase in PHASES:
        assert stats.seconds[phase] >= 0.05 * forwards[phase]
    assert sum(stats.seconds.values()) < elapsed
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        models.forward(model, models.prompt(1), cache)
    handle.remove()
    time.sleep(0.2)
    cache.crop(0)
    models.forward(model, models.prompt(1), cache)
    assert cache.stats().seconds["sparse"] < stats.seconds["sparse"] + 0.2
    assert cache.stats().tokens["sparse"] == 5
    cache.reset()
    assert set(cache.stats().seconds.values()) == {0.0}


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "falcon-h1"])
def test_bytes_held_add_up(name):
    """By kind they are what `stats` says in all, and transformers' own layers are named."""
    model = models.build(name)
    cache = OasisCache(SMALL)
    models.forward(model, models.prompt(90), cache)
    held, stats = cache.bytes_held(), cache.stats()
    assert held["working set"] == stats.device_bytes > 0 and held["index"] == stats.index_bytes > 0
    assert held["host tier"] == stats.host_bytes > 0
    others = {kind: count for kind, count in held.items() if kind not in ("working set", "index", "host tier")}
    assert sum(others.values()) == stats.other_device_bytes > 0
    expected = {
        "gemma3": "DynamicSlidingWindowLayer",
        "qwen3-next": "LinearAttentionLayer",
        "falcon-h1": "recurrent state",
    }
    assert set(others) == {expected[name]}


def value(text: str, metric: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(metric + " ")]
    return float(line.split()[-1])


def test_collector_adds_up_requests():
    model, collector, registry = models.build("llama"), CacheCollector(), CollectorRegistry()
    registry.register(collector)

    def scrape() -> str:
        return generate_latest(registry).decode()

    assert value(scrape(), "oasis_cache_running") == 0
    fetched = sparse = 0
    with OasisCache(SMALL) as cache:
        for turn in range(2):  # one cache, two requests: what the first one counted is not counted again
            with collector.request(cache):
                for rows in (60, 1, 1):
                    models.forward(model, models.prompt(rows, seed=turn), cache)
                text = scrape()
                assert value(text, "oasis_cache_running") == 1
                assert value(text, "oasis_cache_context_tokens") == 62 * (turn + 1)
                assert value(text, 'oasis_cache_bytes{kind="host tier"}') == cache.stats().host_bytes > 0
        fetched, sparse = cache.stats().bytes_fetched, cache.stats().sparse_steps
    with pytest.raises(KeyError), collector.request(OasisCache(SMALL)):
        raise KeyError
    text = scrape()
    assert value(text, 'oasis_cache_requests_total{outcome="done"}') == 2
    assert value(text, 'oasis_cache_requests_total{outcome="error"}') == 1
    assert value(text, 'oasis_cache_forwards_total{phase="sparse"}') == sparse == 4
    assert value(text, 'oasis_cache_tokens_total{phase="prefill"}') == 60
    assert value(text, 'oasis_cache_transfer_bytes_total{direction="fetched"}') == fetched > 0
    assert value(text, "oasis_cache_running") == 0 and 'kind="host tier"' not in text


def test_requests_in_several_threads():
    model, collector, registry = models.build("llama"), CacheCollector(prefix="x"), CollectorRegistry()
    registry.register(collector)

    def serve() -> None:
        with OasisCache(SMALL) as cache, collector.request(cache):
            for rows in (60, 1, 1, 1):
                models.forward(model, models.prompt(rows), cache)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        generate_latest(registry)
    text = generate_latest(registry).decode()
    assert (
        value(text, 'x_forwards_total{phase="sparse"}') == 12 and value(text, 'x_requests_total{outcome="done"}') == 4
    )


def test_bytes_are_written_as_people_read_them():
    assert [in_bytes(count) for count in (0, 1023, 1024, 12_345_678, 5 * 1024**4, 3000 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "11.8 MiB",
        "5.0 TiB",
        "3000.0 TiB",
    ]
