"""A full decode step of an 8B Llama-shaped model with each cache, where its time goes, and how many kernels it launches."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from eval.bench.gpu.llama import build, chunk_of, fill, forward, providers
from eval.bench.gpu.measure import Bench, Row, percentiles
from oasis_cache import OasisCache

WARM_STEPS, TURN_STEPS, SPARE = 4, 4, 512


def run(bench: Bench) -> None:
    began = time.monotonic()
    try:
        model = build(bench)
    except torch.OutOfMemoryError as error:
        bench.say(f"decode: the model does not fit the device: {str(error)[:150]}")
        return
    bench.synchronize()
    bench.say(f"decode: the model was made in {time.monotonic() - began:.1f} s")
    contexts = (512,) if bench.tiny else (8192, 32768, 131072)
    compile_kernels(bench, model)
    for place, context in enumerate(contexts):
        weight = 2**place / sum(2**later for later in range(place, len(contexts)))  # longer contexts need longer
        measure(bench, model, context, time.monotonic() + weight * bench.left)


def compile_kernels(bench: Bench, model: PreTrainedModel) -> None:
    """Let every cache run once on a short context, sealing a block: what it compiles is not timed later."""
    context, began = (512 if bench.tiny else 4096), time.monotonic()
    ids = torch.full((1, 1), 7, device=bench.device)
    for name, make in providers(bench, model.config, context, SPARE).items():
        if name.startswith("OasisCache"):
            cache = make()
            fill(bench, cache, model.config, context, chunk=context)
            for _ in range(18):
                forward(model, ids, cache)
            free(bench, {name: cache})
    bench.say(f"decode: compiling took {time.monotonic() - began:.1f} s")


def free(bench: Bench, caches: dict[str, Cache]) -> None:
    for cache in caches.values():
        if isinstance(cache, OasisCache):
            cache.close()
    caches.clear()
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def measure(bench: Bench, model: PreTrainedModel, context: int, stop: float) -> None:
    generator = torch.Generator(bench.device).manual_seed(context)
    vocabulary = model.config.vocab_size
    shape = f"batch 1, {model.config.num_hidden_layers} layers, {context} tokens"

    def changing() -> torch.Tensor:
        return torch.randint(2, vocabulary, (1, 1), generator=generator, device=bench.device)

    caches: dict[str, Cache] = {}
    began = time.monotonic()
    for name, make in providers(bench, model.config, context, SPARE).items():
        if time.monotonic() - began > 0.5 * (stop - began) and len(caches) >= 2 and not bench.tiny:
            bench.say(f"decode, {context} tokens: no time for {name}")
            continue
        cache = make()
        try:
            fill(bench, cache, model.config, context, chunk=chunk_of(name, context))
            for _ in range(WARM_STEPS):
                forward(model, changing(), cache)
            bench.synchronize()
            caches[name] = cache
        except Exception as error:
            no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if "CUDA error" in str(error) or (isinstance(cache, OasisCache) and not no_memory):
                raise
            bench.say(f"decode, {context} tokens: {name} could not run: {str(error)[:200]}")
            free(bench, {name: cache})
    before = {name: cache.stats() for name, cache in caches.items() if isinstance(cache, OasisCache)}
    samplers = {
        name: lambda cache=cache: in_a_row(bench, lambda: forward(model, changing(), cache), TURN_STEPS)
        for name, cache in caches.items()
    }
    began = time.monotonic()
    samples = bench.interleave(samplers, seconds=max(2.0, stop - began - 4), rounds=20)
    elapsed = time.monotonic() - began
    record(bench, f"{context} tokens, a new token each step", shape, samples, caches, before)
    for name, earlier in before.items():
        seconds = sum(samples[name]) * 1e-3 * TURN_STEPS / (TURN_STEPS - 1)
        record_waiting(bench, f"{context} tokens", shape, name, caches[name], earlier, seconds)
    steps = max((len(values) for values in samples.values()), default=0)
    bench.say(f"decode, {context} tokens: {steps} steps of each cache in {elapsed:.1f} s")
    steady(bench, model, context, shape, caches, samples)
    if context == (512 if bench.tiny else 8192):
        launches(bench, model, context, shape, caches, changing())
    free(bench, caches)


def in_a_row(bench: Bench, step: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of consecutive steps, without the first one: its blocks had the time of the other candidates to arrive."""
    bench.synchronize()
    return [bench.step_ms(step) for _ in range(count)][1:]


def record(
    bench: Bench,
    case: str,
    shape: str,
    samples: dict[str, list[float]],
    caches: dict[str, Cache],
    before: dict[str, Any],
) -> None:
    baseline = percentiles(samples["DynamicCache"])[1] if "DynamicCache" in samples else None
    for name, values in samples.items():
        p20, p50, p80 = percentiles(values)
        moved, note = None, ""
        if name in before:
            stats = caches[name].stats()
            steps = stats.sparse_steps - before[name].sparse_steps
            moved = (stats.bytes_fetched - before[name].bytes_fetched) // steps
            asked = stats.hits + stats.misses - before[name].hits - before[name].misses
            hits = stats.hits - before[name].hits
            note = f"bytes moved are those fetched per step; {hits / max(1, asked):.1%} of the blocks were there"
        bench.record(
            Row(
                "decode", case, shape, name, p20, p50, p80, len(values), moved,
                ratio=baseline / p50 if baseline else None, baseline="DynamicCache" if baseline else "", note=note,
            )
        )  # fmt: skip


def record_waiting(
    bench: Bench, case: str, shape: str, name: str, cache: OasisCache, before: Any, seconds: float
) -> None:
    """The share of the steps' time that the host waited for blocks."""
    waited = cache.stats().stall_seconds - before.stall_seconds
    bench.record(
        Row(
            "stall",
            case,
            shape,
            name,
            note=f"the host waited for blocks during {waited / seconds:.2%} of the steps' time",
        )
    )


def steady(
    bench: Bench,
    model: PreTrainedModel,
    context: int,
    shape: str,
    caches: dict[str, Cache],
    changing: dict[str, list[float]],
) -> None:
    """The same token at every step: queries hardly change, so hardly a block has to come. The difference is what fetching costs."""
    ids = torch.full((1, 1), 7, device=bench.device)
    for name, cache in caches.items():
        if not isinstance(cache, OasisCache):
            continue
        for _ in range(3):
            forward(model, ids, cache)
        before = cache.stats()
        samples = {name: in_a_row(bench, lambda c=cache: forward(model, ids, c), 4 if bench.tiny else 12)}
        record(bench, f"{context} tokens, the same token each step", shape, samples, caches, {name: before})
        gain = 1 - percentiles(samples[name])[1] / percentiles(changing[name])[1]
        bench.record(
            Row(
                "stall",
                f"{context} tokens",
                shape,
                name,
                note=f"a step that fetches next to nothing takes {gain:.1%} less time",
            )
        )


def launches(
    bench: Bench, model: PreTrainedModel, context: int, shape: str, caches: dict[str, Cache], ids: torch.Tensor
) -> None:
    """Kernels, copies and waits of one step, by PyTorch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for name, cache in caches.items():
        bench.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            forward(model, ids, cache)
            bench.synchronize()
        counts: Counter[str] = Counter()
        for event in profile.events():
            on_device = event.device_type == torch.autograd.DeviceType.CUDA
            if on_device and not event.name.startswith(("Memcpy", "Memset", "gpu_user_annotation")):
                counts["kernels"] += 1
            elif on_device and event.name.startswith("Memcpy"):
                counts["copies"] += 1
            elif "Synchronize" in event.name:
                counts["waits"] += 1
            elif event.name.startswith("aten::"):
                counts["operators"] += 1
        text = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        bench.record(
            Row("launches", f"{context} tokens", shape, name, note=f"one step: {text} (one wait is the profiler's)")
        )
