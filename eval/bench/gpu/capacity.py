"""The longest context and the largest batch that fit a fixed amount of device memory: by account, and by really filling caches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from transformers import Cache, DynamicCache, LlamaConfig

from eval.bench.gpu.llama import config, fill
from eval.bench.gpu.measure import Bench, Row
from oasis_cache import OasisCache

LAYERS, CAP_BYTES = 8, 2 << 30  # of an 8B model's 32 layers: as 8 GiB for all of them
BATCH_CONTEXT = 16384


def run(bench: Bench) -> None:
    sizes = config(bench.tiny, 2 if bench.tiny else LAYERS)
    cap = 1 << 20 if bench.tiny else CAP_BYTES
    budget = 128 if bench.tiny else 2048
    base = 0
    if bench.on_gpu:
        torch.cuda.init()
        torch.ones(1, device=bench.device)
        base = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(bench.device).total_memory
        # Room for what a chunk and attention need on the way; the cap itself is on what the cache holds.
        torch.cuda.set_per_process_memory_fraction(min(1.0, (2 * cap + (3 << 30)) / total))
    made: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=sizes),
        "OasisCache": lambda: OasisCache(model_config=sizes, budget=budget),
    }
    shape = (
        f"{sizes.num_hidden_layers} layers of {sizes.num_key_value_heads} KV heads of {sizes.head_dim}, {cap >> 20} MiB"
    )
    for place, (name, make) in enumerate(made.items()):
        contexts(bench, name, make, sizes, cap, base, shape, bench.left * (0.3, 0.6)[place])
    for name, make in made.items():
        batches(bench, name, make, sizes, cap, base, shape, bench.left / 2)


def held_bytes(bench: Bench, cache: Cache, base: int) -> int:
    """Device bytes of a cache: what the allocator gave out, or on a CPU what the account says."""
    if bench.on_gpu:
        bench.synchronize()
        return torch.cuda.memory_allocated() - base
    if isinstance(cache, OasisCache):
        stats = cache.stats()
        return stats.device_bytes + stats.index_bytes
    return sum(layer.keys.numel() * layer.keys.element_size() * 2 for layer in cache.layers)


def drop(bench: Bench, cache: Cache) -> None:
    if isinstance(cache, OasisCache):
        cache.close()
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def step(bench: Bench, cache: Cache, sizes: LlamaConfig, batch: int = 1) -> None:
    """One new token through all layers: what the cache gives is attended to."""
    for layer in range(sizes.num_hidden_layers):
        keys, values = (bench.random(batch, sizes.num_key_value_heads, 1, sizes.head_dim) for _ in range(2))
        query = bench.random(batch, sizes.num_attention_heads, 1, sizes.head_dim)
        keys, values = cache.update(keys, values, layer)
        if isinstance(keys, torch.Tensor) and type(keys) is torch.Tensor:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        else:
            cache.layers[layer].attend(
                query, None, scaling=sizes.head_dim**-0.5, sliding_window=None, softcap=None, sinks=None, is_causal=True
            )


def contexts(
    bench: Bench,
    name: str,
    make: Callable[[], Cache],
    sizes: LlamaConfig,
    cap: int,
    base: int,
    shape: str,
    seconds: float,
) -> None:
    """Fill one cache until it holds more than the cap."""
    chunk = 512 if bench.tiny else 16384
    stop, cache, points = time.monotonic() + seconds, make(), []
    reason = "more would exceed the cap"
    try:
        while True:
            if time.monotonic() > stop:
                reason = "the time was up"
                break
            fill(bench, cache, sizes, chunk, chunk=chunk)
            step(bench, cache, sizes)
            held = held_bytes(bench, cache, base)
            if held > cap:
                break
            points.append((int(cache.get_seq_length()), held))
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error)[:120]
    tokens, held = points[-1] if points else (0, 0)
    note = f"{tokens} tokens were held in {held} bytes; {reason}"
    if (
        len(points) >= 3
    ):  # what holds whatever the context, and what each token adds, from the second half of the points
        middle = points[len(points) // 2]
        per_token = (held - middle[1]) / (tokens - middle[0])
        by_account = int((cap - (held - per_token * tokens)) / per_token) if per_token > 0 else None
        note += f"; {per_token:.0f} bytes per token, so {by_account} tokens by account"
    bench.record(Row("capacity", "longest context", shape, name, bytes_moved=held, note=note))
    drop(bench, cache)


def batches(
    bench: Bench,
    name: str,
    make: Callable[[], Cache],
    sizes: LlamaConfig,
    cap: int,
    base: int,
    shape: str,
    seconds: float,
) -> None:
    """Fill caches of twice the batch until one holds more than the cap."""
    context = 256 if bench.tiny else BATCH_CONTEXT
    stop, batch, best, reason = time.monotonic() + seconds, 1, (0, 0), "the next one would exceed the cap"
    while True:
        cache = make()
        try:
            fill(bench, cache, sizes, context, batch=batch, chunk=context)
            step(bench, cache, sizes, batch)
            held = held_bytes(bench, cache, base)
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error)[:120]
            break
        finally:
            drop(bench, cache)
        if held > cap:
            break
        best = (batch, held)
        if time.monotonic() > stop:
            reason = "the time was up"
            break
        batch *= 2
    per_row = best[1] / max(1, best[0])
    by_account = int(cap / per_row) if per_row else 0
    note = (
        f"batches of 1, 2, 4, ...: {best[0]} rows were held in {best[1]} bytes; {reason}; {by_account} rows by account"
    )
    bench.record(Row("capacity", f"largest batch at {context} tokens", shape, name, bytes_moved=best[1], note=note))
