"""The disk tier and saved caches on this machine, with the packaged SmolLM2-135M-Instruct.

    python -m eval.bench.tiers disk DIR      # ways to read pages at random from a file in DIR
    python -m eval.bench.tiers answer DIR    # a number hidden in 7,700 tokens, with an eighth of the KV in host memory
    python -m eval.bench.tiers limit DIR     # the same share at 32k tokens under a hard limit of memory, where the dense cache dies
    python -m eval.bench.tiers saved DIR     # a file of 32k tokens: load and first token, against a shorter prefill

Each adds what it measured, with what it was measured on, to eval/bench/results/tiers.json. `limit` and `saved` fill caches with
random keys.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.bench.gpu.ledger import environment
from eval.quality.needle import fill, prefill, snapshot_of
from oasis_cache import OasisCache
from oasis_cache.demo import cache_argument, generate
from oasis_cache.haystack import hide_number
from oasis_cache.packaged import load_model

RESULTS = Path(__file__).resolve().parent / "results" / "tiers.json"
BUDGET = 512
SHARE = 8  # the KV is so many times the cap on host memory
CHUNK = 1024


def record(part: str, **measured: Any) -> None:
    """Add a result to the file, and print it."""
    row = {"part": part, **environment("cpu"), **measured}
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*rows, row], indent=1) + "\n")
    print(json.dumps(row, indent=1))


def fill_randomly(model: PreTrainedModel, cache: Cache, tokens: int) -> None:
    """Random keys and values for all layers, a piece at a time, the same for every cache."""
    config = model.config
    sizes = (1, config.num_key_value_heads, CHUNK, config.head_dim)
    generators = [torch.Generator().manual_seed(layer_idx) for layer_idx in range(config.num_hidden_layers)]
    for _ in range(tokens // CHUNK):
        for layer_idx, generator in enumerate(generators):
            cache.update(torch.randn(sizes, generator=generator), torch.randn(sizes, generator=generator), layer_idx)


@torch.no_grad()
def decode(model: PreTrainedModel, cache: Cache, count: int) -> tuple[list[torch.Tensor], float]:
    """Logits of `count` greedy steps behind what the cache holds, and the seconds they took."""
    token, logits, started = torch.tensor([[11]]), [], time.perf_counter()
    for _ in range(count):
        logits.append(model(token, use_cache=True, **cache_argument(model, cache)).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
    return logits, time.perf_counter() - started


def kv_bytes(model: PreTrainedModel, tokens: int) -> int:
    config = model.config
    return tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4


def spill_options(model: PreTrainedModel, tokens: int, directory: str) -> dict[str, Any]:
    return {"spill": directory, "max_host_bytes": kv_bytes(model, tokens) // SHARE}


def disk_counters(cache: OasisCache, seconds: float) -> dict[str, Any]:
    """What the disk did, and the share of `seconds` that steps stalled."""
    stats = cache.stats()
    names = (
        "host_bytes",
        "disk_bytes",
        "disk_bytes_read",
        "disk_bytes_written",
        "page_hits",
        "page_misses",
        "stall_seconds",
    )
    return {**{name: getattr(stats, name) for name in names}, "stall_share": stats.stall_seconds / seconds}


def disk(options: argparse.Namespace) -> None:
    """Random pages of 24 KiB (a block of SmolLM2 in float32), cold: the page cache is emptied before each way."""
    page, count, asked = 24576, 40_000, 2000
    path = os.path.join(options.directory, "pages.bin")
    with open(path, "wb") as file:
        file.writelines(os.urandom(page * 500) for _ in range(0, count, 500))
        os.fsync(file.fileno())
    memory = mmap.mmap(-1, 64 * page)
    frames = [memoryview(memory)[i * page : (i + 1) * page] for i in range(64)]
    random.seed(1)
    keys = list(enumerate(random.sample(range(count), asked)))

    def pread(flags: int, threads: int) -> None:
        fd = os.open(path, os.O_RDONLY | flags)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda each: os.preadv(fd, [frames[each[0] % 64]], each[1] * page), keys))
        os.close(fd)

    def mapped() -> None:
        fd = os.open(path, os.O_RDONLY)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view:
            for number, key in keys:
                frames[number % 64][:] = view[key * page : (key + 1) * page]
        os.close(fd)

    ways: dict[str, Callable[[], None]] = {"mmap": mapped}
    for threads in (1, 4):
        ways[f"pread, {threads} threads"] = lambda threads=threads: pread(0, threads)
        ways[f"pread O_DIRECT, {threads} threads"] = lambda threads=threads: pread(os.O_DIRECT, threads)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            started = time.perf_counter()
            way()
            rates[name].append(asked * page / (time.perf_counter() - started) / 2**20)
    os.unlink(path)
    record(
        "disk", page_bytes=page, pages=asked, mib_per_second={name: sorted(map(round, r)) for name, r in rates.items()}
    )


def answer(options: argparse.Namespace) -> None:
    model, tokenizer = load_model()
    task = hide_number(tokenizer, options.tokens or 7700, depth=0.5, seed=options.seed)
    ids = task.prompt_ids
    dense = DynamicCache(config=model.config)
    started = time.perf_counter()
    prefill(model, ids[:, :-1], dense)
    prefill_seconds, snapshot = time.perf_counter() - started, snapshot_of(dense)
    answers = {"dense": tokenizer.decode(generate(model, ids, dense, 12))}
    del dense
    tokens, measured = {}, {}
    for name, where in (("memory", {}), ("spilled", spill_options(model, ids.shape[1], options.directory))):
        with OasisCache(model_config=model.config, budget=BUDGET, **where) as cache:
            fill(model, cache, ids[:, :-1], snapshot)
            started = time.perf_counter()
            tokens[name] = generate(model, ids, cache, 12)
            seconds = time.perf_counter() - started
            measured[name] = {"seconds": seconds, **disk_counters(cache, seconds)}
            answers[name] = tokenizer.decode(tokens[name])
    record(
        "answer",
        tokens=ids.shape[1],
        seed=options.seed,
        prefill_seconds=prefill_seconds,
        kv_bytes=kv_bytes(model, ids.shape[1]),
        max_host_bytes=kv_bytes(model, ids.shape[1]) // SHARE,
        found={name: task.found_in(text) for name, text in answers.items()},
        equal=tokens["memory"] == tokens["spilled"],
        **measured,
    )


def limit(options: argparse.Namespace) -> None:
    model, _ = load_model()
    tokens = options.tokens or 32768
    options_of_spilled = spill_options(model, tokens, options.directory)
    expected = None
    if not options.skip_memory:  # needs what the limit forbids
        with OasisCache(model_config=model.config, budget=BUDGET) as cache:
            fill_randomly(model, cache, tokens)
            expected, memory_seconds = decode(model, cache, options.steps)
    decode(model, OasisCache(model_config=model.config), 1)  # what is compiled and made once is not counted
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    allowed = options_of_spilled["max_host_bytes"] + options.working_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (held + allowed, resource.RLIM_INFINITY))
    with OasisCache(model_config=model.config, budget=BUDGET, **options_of_spilled) as cache:
        fill_randomly(model, cache, tokens)
        logits, seconds = decode(model, cache, options.steps)
        counters, index_bytes = disk_counters(cache, seconds), cache.stats().index_bytes
    try:
        dense = DynamicCache(config=model.config)
        fill_randomly(model, dense, tokens)
        dense_end = "lived"
    except (MemoryError, RuntimeError) as error:
        dense_end = (
            f"died at layer {len([layer for layer in dense.layers if layer.is_initialized])}: {str(error)[:100]}"
        )
    record(
        "limit",
        tokens=tokens,
        steps=options.steps,
        kv_bytes=kv_bytes(model, tokens),
        max_host_bytes=options_of_spilled["max_host_bytes"],
        limit_beyond_the_model=allowed,
        index_bytes=index_bytes,
        seconds=seconds,
        equal_to_memory=None if expected is None else all(map(torch.equal, expected, logits)),
        seconds_in_memory=None if expected is None else memory_seconds,
        dense=dense_end,
        **counters,
    )


def saved(options: argparse.Namespace) -> None:
    model, _ = load_model()
    tokens, path = options.tokens or 32768, os.path.join(options.directory, "saved.safetensors")
    with OasisCache(model_config=model.config, budget=BUDGET) as cache:
        fill_randomly(model, cache, tokens)
        started = time.perf_counter()
        cache.save(path, model=model)
        save_seconds = time.perf_counter() - started
        expected, _ = decode(model, cache, 3)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    started = time.perf_counter()
    with OasisCache.load(path, model) as cache:
        load_seconds = time.perf_counter() - started
        first, first_seconds = decode(model, cache, 1)
        read = cache.stats().disk_bytes_read
    with OasisCache.load(path, model) as cache:
        again, _ = decode(model, cache, 3)
    size = os.path.getsize(path)
    os.unlink(path)
    prompt = torch.randint(5, 1000, (1, options.prefill_tokens))
    started = time.perf_counter()
    prefill(model, prompt, OasisCache(model_config=model.config, budget=BUDGET))
    prefill_seconds = time.perf_counter() - started
    record(
        "saved",
        tokens=tokens,
        file_bytes=size,
        save_seconds=save_seconds,
        load_seconds=load_seconds,
        first_token_seconds=first_seconds,
        bytes_of_blocks_read=read,
        equal=all(map(torch.equal, [*expected, expected[0]], [*again, *first])),
        prefill_tokens=options.prefill_tokens,
        prefill_seconds=prefill_seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["disk", "answer", "limit", "saved"])
    parser.add_argument("directory", help="where files are made; nothing is left there")
    parser.add_argument("--tokens", type=int, help="context")
    parser.add_argument("--seed", type=int, default=5, help="of the hidden number")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="of the prefill that `saved` compares with")
    parser.add_argument("--working-bytes", type=int, default=500 << 20, help="what the limit allows besides the cap")
    parser.add_argument("--skip-memory", action="store_true", help="do not compare with a cache in memory")
    options = parser.parse_args()
    if not os.path.isdir(options.directory):
        raise OSError(errno.ENOENT, f"no such directory: {options.directory}")
    {"disk": disk, "answer": answer, "limit": limit, "saved": saved}[options.part](options)


if __name__ == "__main__":
    main()
