"""Timing decode steps of several caches in turns, and the ledger's rows made of the samples."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch
from transformers import Cache, PreTrainedModel

from eval.bench.cases import FLAT_CONTEXTS, Case
from eval.bench.filling import SPARE_TOKENS, Source
from eval.bench.gpu.measure import Row, percentiles
from eval.bench.providers import (
    DYNAMIC,
    OASIS,
    STATIC,
    TWO_LEVELS,
    Provider,
    device_bytes,
    kv_bytes_read,
    use_attention,
)
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.stats import OasisStats

PART = "cpu"
WARM_UP = 2  # steps that are not counted: the first fills the slots, the second settles
PEERS = {"short": (OASIS, DYNAMIC), "batch": (OASIS, DYNAMIC, STATIC), "flat": (OASIS, TWO_LEVELS)}
BANDWIDTH_BYTES = 1 << 28


@dataclass
class Subject:
    """A filled cache that takes its turns.

    Attributes:
        name: The row's provider.
        context: Tokens that it was filled with.
        samples: Milliseconds per step.
        before: An OasisCache's counters when the counted steps began.
    """

    name: str
    cache: Cache
    provider: Provider
    context: int
    samples: list[float] = field(default_factory=list)
    before: OasisStats | None = None


def bandwidths(rounds: int = 7, num_bytes: int = BANDWIDTH_BYTES) -> list[Row]:
    """What this machine copies (read plus written) and reads at most, with as many threads as a step has: two rows."""
    matrix = torch.ones(1024, num_bytes // 4096)
    target, vector = torch.empty_like(matrix), torch.ones(matrix.shape[1])
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * matrix.nbytes, lambda: target.copy_(matrix)),
        "read": (matrix.nbytes, lambda: matrix @ vector),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, (_, way) in ways.items():
            begin = time.perf_counter()
            way()
            samples[name].append(1e3 * (time.perf_counter() - begin))
    rows = []
    for name, (moved, _) in ways.items():
        p20, p50, p80 = percentiles(samples[name][1:])
        rate = moved / (p50 * 1e6)
        shape = f"{matrix.nbytes >> 20} MiB, float32"
        rows.append(Row(f"{PART} ceilings", name, shape, "torch", p20, p50, p80, rounds, moved, rate, bytes_read=moved))
    return rows


def fill_all(
    model: PreTrainedModel, source: Source, case: Case, rounds: int, wanted: list[Provider], say: Callable[[str], None]
) -> list[Subject]:
    """The caches of a case, filled; what does not fit the memory that is left is left out, and said."""
    chosen = [provider for provider in wanted if provider.name in PEERS.get(case.kind, (provider.name,))]
    subjects = []
    for provider in chosen:
        contexts = FLAT_CONTEXTS if case.kind == "flat" and provider.name == OASIS else (case.context,)
        for context in contexts:
            dense = source.kv_bytes(context, case.batch)
            needed, available = int(provider.host_share * dense), psutil.virtual_memory().available
            name = f"{provider.name} at {context:,}" if case.kind == "flat" else provider.name
            if needed > available:
                say(f"{case.name}: {name} is left out: needs {needed:,} bytes of memory, {available:,} are available")
                continue
            cache = provider.make(model, context + rounds + WARM_UP, case.budget)
            source.fill(cache, context, case.batch, provider.whole)
            subjects.append(Subject(name, cache, provider, context))
    return subjects


def timed_step(model: PreTrainedModel, source: Source, cache: Cache, context: int, step: int, batch: int = 1) -> float:
    """Milliseconds of a decode step behind `context` tokens, at a position that the model knows."""
    ids, given = source.ids_of(step, batch), cache_argument(model, cache)
    positions = torch.full((batch, 1), min(context, source.tokens) + step % SPARE_TOKENS)
    begin = time.perf_counter()
    model(ids, **given, position_ids=positions, use_cache=True, logits_to_keep=1)
    return 1e3 * (time.perf_counter() - begin)


def row_of(case: Case, shape: str, provider: str, samples: list[float], quantity: str = "") -> Row:
    """A row of a case with the percentiles of its samples, in milliseconds."""
    return Row(
        f"{PART} {case.kind}", case.name, shape, provider, *percentiles(samples), len(samples), quantity=quantity
    )


def take_turns(model: PreTrainedModel, source: Source, subjects: list[Subject], batch: int, rounds: int) -> None:
    """Fill the subjects' samples: a step of each in turn, `rounds` times."""
    own = model.config._attn_implementation
    try:
        with torch.inference_mode():
            for step in range(rounds + WARM_UP):
                for subject in subjects:
                    if step == WARM_UP and isinstance(subject.cache, OasisCache):
                        subject.before = subject.cache.stats()
                    use_attention(model, subject.provider.attention or own)
                    milliseconds = timed_step(model, source, subject.cache, subject.context, step, batch)
                    if step >= WARM_UP:
                        subject.samples.append(milliseconds)
    finally:
        use_attention(model, own)


def measure(
    model: PreTrainedModel,
    source: Source,
    case: Case,
    rounds: int,
    wanted: list[Provider],
    read_rate: float | None,
    say: Callable[[str], None],
) -> list[Row]:
    """Rows of a case of decode steps, one for each cache.

    Args:
        read_rate: Bytes per second that the machine reads (see `bandwidths`).
        say: Gets a line for each cache that is left out.
    """
    subjects = fill_all(model, source, case, rounds, wanted, say)
    try:
        take_turns(model, source, subjects, case.batch, rounds)
        return [_row(source, case, subject, subjects, read_rate) for subject in subjects]
    finally:
        for subject in subjects:
            if isinstance(subject.cache, OasisCache):
                subject.cache.close()
        subjects.clear()
        gc.collect()


def ratios(baseline: list[float], own: list[float]) -> tuple[float, float, float]:
    """Percentiles of how many times as fast, pair by pair, so that a drift of the machine cancels."""
    return percentiles([theirs / mine for theirs, mine in zip(baseline, own, strict=True)])


def compared(row: Row, samples: dict[str, list[float]], baseline: str) -> Row:
    """The row with its ratios to the baseline and to StaticCache, where they took part."""
    own = samples[row.provider]
    if baseline in samples:
        row.baseline = baseline
        row.ratio_p20, row.ratio, row.ratio_p80 = ratios(samples[baseline], own)
    if STATIC in samples:
        row.static_ratio = ratios(samples[STATIC], own)[1]
    return row


def _row(source: Source, case: Case, subject: Subject, subjects: list[Subject], read_rate: float | None) -> Row:
    dense = source.kv_bytes(subject.context, case.batch)
    held, index = device_bytes(subject.cache)
    if isinstance(subject.cache, OasisCache):
        assert subject.before is not None
        moved, read, note = _oasis_bytes(source, subject, dense)
    else:
        moved = read = kv_bytes_read(subject.cache)
        note = ""
    read += source.weight_bytes
    shape = case.shape if case.kind != "flat" else f"context {subject.context}, batch 1, budget {case.budget}"
    row = row_of(case, shape, subject.name, subject.samples)
    assert row.p50_ms is not None
    row.bytes_moved, row.bytes_read, row.note = moved, read, note
    row.read_percent = None if read_rate is None else 100 * read / (row.p50_ms * 1e-3) / read_rate
    row.device_bytes, row.index_bytes, row.kv_bytes = held, index, dense
    samples = {each.name: each.samples for each in subjects}
    return compared(row, samples, f"{OASIS} at {min(FLAT_CONTEXTS):,}" if case.kind == "flat" else DYNAMIC)


def _oasis_bytes(source: Source, subject: Subject, dense: int) -> tuple[int, int, str]:
    """Bytes fetched from the host tier per step, bytes of keys and values that attention read, and what to know about them."""
    cache, before = subject.cache, subject.before
    assert isinstance(cache, OasisCache) and before is not None
    now, steps = cache.stats(), len(subject.samples)
    if now.sparse_steps == before.sparse_steps:
        return dense, dense, "dense: the context is within the budget"
    keys, values = source.layers[0]
    block_bytes = cache.config.block_size * (keys.nbytes + values.nbytes) // (keys.shape[1] * source.tokens)
    read = (now.blocks_read - before.blocks_read) * block_bytes // steps
    hits, misses = now.hits - before.hits, now.misses - before.misses
    fetched = (now.bytes_fetched - before.bytes_fetched) // steps
    return fetched, read, f"hit rate {hits / max(1, hits + misses):.2f}"
