"""What servers watch: a collector for prometheus_client (the `monitoring` extra).

    collector = CacheCollector()
    prometheus_client.REGISTRY.register(collector)
    with OasisCache(budget=2048) as cache, collector.request(cache):
        model.generate(**inputs, past_key_values=cache)

Counters grow when a request ends, by what its cache counted; gauges show the caches of the requests that run now. A scrape never
waits for a device.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oasis_cache.cache import OasisCache
from oasis_cache.stats import PHASES, OasisStats

_BLOCKS = ("hits", "misses", "spare_hits", "late", "prefetched")
_BYTES = ("bytes_fetched", "bytes_written")


class CacheCollector(Collector):
    """Adds up what the caches of finished requests counted, and shows what those of running ones hold. Thread-safe.

    Args:
        prefix: What the names of all metrics begin with.
    """

    def __init__(self, prefix: str = "oasis_cache") -> None:
        self._prefix = prefix
        self._totals: defaultdict[tuple[str, str], float] = defaultdict(float)  # (metric, label) -> value
        self._running: list[OasisCache] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def request(self, cache: OasisCache) -> Iterator[None]:
        """One request on a cache, which may serve several one after another. Counts what it did inside, also if that ends in an
        exception; close or reset the cache outside."""
        before = cache.stats()
        with self._lock:
            self._running.append(cache)
        outcome = "error"
        try:
            yield
            outcome = "done"
        finally:
            after = cache.stats()
            with self._lock:
                self._running = [other for other in self._running if other is not cache]
                self._totals["requests", outcome] += 1
                for key, value in _counts(after).items():
                    self._totals[key] += max(0, value - _counts(before).get(key, 0))

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus_client asks for them."""
        with self._lock:
            totals, running = dict(self._totals), list(self._running)
        for name, label, text in (
            ("requests", "outcome", "Requests that ended"),
            ("forwards", "phase", "Forwards through the caches"),
            ("tokens", "phase", "Tokens that forwards brought, per sequence"),
            ("phase_seconds", "phase", "Time in forwards, from the first layer's update to the last one's"),
            ("blocks", "kind", "KV blocks by where they were when attention wanted them, and prefetched ones"),
            ("transfer_bytes", "direction", "Bytes fetched from and written to the host tier"),
            ("stall_seconds", "", "Time that the host waited for blocks"),
            ("fallbacks", "", "Forwards computed densely for lack of support"),
        ):
            counter = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=[label] if label else [])
            for (metric, value), total in sorted(totals.items()):
                if metric == name:
                    counter.add_metric([value] if label else [], total)
            yield counter
        held: Counter[str] = Counter()
        for cache in running:
            held.update(cache.bytes_held())
        gauge = GaugeMetricFamily(f"{self._prefix}_bytes", "Bytes held by running requests", labels=["kind"])
        for kind, count in sorted(held.items()):
            gauge.add_metric([kind], count)
        yield gauge
        yield GaugeMetricFamily(f"{self._prefix}_running", "Requests that run now", value=len(running))
        tokens = sum(int(cache.get_seq_length()) for cache in running)
        yield GaugeMetricFamily(
            f"{self._prefix}_context_tokens", "Tokens in the caches of running requests", value=tokens
        )


def _counts(stats: OasisStats) -> dict[tuple[str, str], float]:
    counts: dict[tuple[str, str], float] = {}
    for phase in PHASES:
        counts["forwards", phase] = getattr(stats, f"{phase}_steps")
        counts["tokens", phase] = stats.tokens[phase]
        counts["phase_seconds", phase] = stats.seconds[phase]
    counts.update({("blocks", name): getattr(stats, name) for name in _BLOCKS})
    counts.update({("transfer_bytes", name.removeprefix("bytes_")): getattr(stats, name) for name in _BYTES})
    counts["stall_seconds", ""] = stats.stall_seconds
    counts["fallbacks", ""] = stats.fallback_steps
    return counts
