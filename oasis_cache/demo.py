"""The main job in one run: a number hidden in a long text, asked for with the dense cache and with OasisCache."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from oasis_cache.cache import OasisCache, cache_argument
from oasis_cache.config import OasisConfig
from oasis_cache.haystack import TEXT_NAME, HiddenNumber, hide_number
from oasis_cache.packaged import MODEL_NAME, PACKAGED, load_model, why_not_found
from oasis_cache.reports import STDOUT, check_report_file, write_report

_LEAST_BUDGET = (OasisConfig.sink_blocks + OasisConfig.recent_blocks + 1) * OasisConfig.block_size
PREFILL_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class DemoOptions:
    """What `oasis-cache demo` can be told.

    Args:
        context: Prompt length in tokens, reached but for a few.
        budget, index: See `OasisConfig`.
        model: Folder or hub name; `"packaged"`: SmolLM2-135M-Instruct out of a PyPI package.
        new_tokens: Tokens to generate; generation goes on after the answer, so that speed and equality say something.
        depth: Where in the text the number is hidden, 0 (beginning) to 1 (end).
        seed: Chooses passage, key and number.
        device: Where the model runs; `"auto"`: a GPU if there is one.
        dtype: Type of weights and KV, a name in torch.
        json_file: Where the report goes as JSON: a path, "-" for the standard output in place of the words, or None.
    """

    context: int = 4096
    budget: int = 512
    index: str = "int2"
    model: str = PACKAGED
    new_tokens: int = 24
    depth: float = 0.5
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    json_file: str | None = None


@dataclass(frozen=True)
class CacheRun:
    """One generation with one cache.

    Attributes:
        cache: Class name of the cache.
        answer: The generated text.
        found: Whether the hidden number is in it.
        token_ids: The generated tokens.
        tokens_equal: How many of them equal the dense cache's, up to the first that differs.
        prefill_seconds, decode_seconds: Wall time of reading the prompt and of generating.
        device_kv_bytes: Keys and values on the model's device.
        index_bytes: Block index on the device.
        host_kv_bytes: Keys and values in the host tier.
        blocks_read_per_step: Blocks of the context that one KV head's attention reads in one step, on average.
        hit_rate: Share of selected blocks that were resident already; None if nothing was selected.
        stats: All of `OasisCache.stats()`; None for the dense cache.
    """

    cache: str
    answer: str
    found: bool
    token_ids: list[int]
    tokens_equal: int
    prefill_seconds: float
    decode_seconds: float
    device_kv_bytes: int
    index_bytes: int
    host_kv_bytes: int
    blocks_read_per_step: float
    hit_rate: float | None
    stats: dict[str, Any] | None

    @property
    def decode_tokens_per_second(self) -> float:
        return len(self.token_ids) / self.decode_seconds

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "decode_tokens_per_second": self.decode_tokens_per_second}


def run_demo(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo, print the table, write the report.

    Returns:
        0 if the dense cache and OasisCache both found the number, else 1.

    Raises:
        ValueError: an option is out of range.
        ModuleNotFoundError: the packaged model or text is not installed.
    """
    console = console or Console(stderr=options.json_file == STDOUT)
    transformers_logging.disable_progress_bar()
    device = pick_device(options.device)
    check_report_file(options.json_file)
    with console.status(f"Loading {_model_name(options.model)} (the first time it is converted, which takes longer)"):
        dtype = pick_dtype(options.dtype)
        try:
            model, tokenizer = load_model(options.model, dtype, device)
        except OSError as error:
            refuse_model(options.model, error)
        _check_context(model, options)
        task = hide_number(tokenizer, options.context, options.depth, options.seed)
    environment = describe_environment(model, options.model)
    console.print(
        "{model}, {dtype}, on {device_name} with {threads} CPU threads; complete KV in main memory. "
        "oasis-cache {oasis_cache}, torch {torch}, transformers {transformers}, Python {python}.".format(**environment),
        highlight=False,
        soft_wrap=True,
    )

    def make_oasis() -> OasisCache:
        return OasisCache(model_config=model.config, budget=options.budget, index=options.index)

    make_oasis().close()  # refuses bad options before anything takes time
    with console.status("Compiling for this machine (kept for the next time)"):
        _warm_up(model, options.index)
    with _progress(console) as progress:
        dense = run_cache(model, tokenizer, task, DynamicCache(config=model.config), options.new_tokens, None, progress)
        with make_oasis() as cache:
            oasis = run_cache(model, tokenizer, task, cache, options.new_tokens, dense.token_ids, progress)

    report = {
        "environment": environment,
        "options": {name: value for name, value in asdict(options).items() if name != "json_file"},
        "context_tokens": task.num_tokens,
        "depth": task.depth,
        "number": task.number,
        "dense": dense.as_dict(),
        "oasis": oasis.as_dict(),
    }
    write_report(report, options.json_file)
    console.print(_table(task, dense, oasis, options))
    console.print(_verdict(task, dense, oasis), highlight=False, soft_wrap=True)
    return 0 if dense.found and oasis.found else 1


def _warm_up(model: PreTrainedModel, index: str) -> None:
    """Let everything that is compiled at its first use be compiled before times are taken: a sparse step on a short context."""
    with OasisCache(model_config=model.config, budget=_LEAST_BUDGET, index=index) as cache:
        ids = torch.zeros(
            1, cache.config.dense_tokens + cache.config.sparse_rows + 1, dtype=torch.int64, device=model.device
        )
        prefill(model, ids, cache)
        for _ in range(2):
            with torch.no_grad():
                model(ids[:, :1], use_cache=True, **cache_argument(model, cache))


def run_cache(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: HiddenNumber,
    cache: Cache,
    new_tokens: int,
    dense_ids: list[int] | None,
    progress: Progress,
) -> CacheRun:
    """Read the prompt and generate greedily with one cache; `dense_ids`: the tokens to compare with, None for itself.

    The prompt's last token is left to `generate`, so that every generated token comes out of a decode step.
    """
    prompt_ids = task.prompt_ids.to(model.device)
    name = type(cache).__name__
    bar = progress.add_task(f"{name}: reading the prompt", total=task.num_tokens - 1)
    started = _now(model)
    prefill(model, prompt_ids[:, :-1], cache, on_progress=lambda tokens: progress.advance(bar, tokens))
    filled = _now(model)
    progress.update(bar, description=f"{name}: generating", completed=task.num_tokens - 1)
    token_ids = generate(model, prompt_ids, cache, new_tokens, min_new_tokens=new_tokens)
    done = _now(model)
    progress.update(bar, description=f"{name}: done")

    answer = tokenizer.decode(token_ids, skip_special_tokens=True)
    shared = 0 if dense_ids is not None else len(token_ids)
    for ours, theirs in zip(token_ids, dense_ids or [], strict=False):
        if ours != theirs:
            break
        shared += 1
    return CacheRun(
        cache=name,
        answer=answer,
        found=task.found_in(answer),
        token_ids=token_ids,
        tokens_equal=shared,
        prefill_seconds=filled - started,
        decode_seconds=done - filled,
        **_measure(cache, model),
    )


def prefill(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    on_progress: Callable[[float], None] | None = None,
) -> None:
    """Read tokens into a cache in chunks of nearly equal size, none of which is small enough to be a sparse step.

    Args:
        ids: int64 [batch, tokens].
        chunk_tokens: Most tokens of a chunk.
        on_progress: Called with the tokens read since the last call; a layer counts as its share of a chunk.
    """
    layers = list(model.get_decoder().layers)
    hooks = []
    for chunk in ids.tensor_split(-(-ids.shape[1] // chunk_tokens), dim=1):
        if on_progress is not None:
            # Per layer and not per chunk, because long chunks are the fast ones and would let the bar stand still.
            report = partial(_report, on_progress, chunk.shape[1] / len(layers))
            hooks = [layer.register_forward_hook(report) for layer in layers]
        try:
            with torch.no_grad():
                model(chunk, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
        finally:
            for hook in hooks:
                hook.remove()


def _report(on_progress: Callable[[float], None], tokens: float, *_: Any) -> None:
    on_progress(tokens)


def generate(
    model: PreTrainedModel, prompt_ids: torch.Tensor, cache: Cache, new_tokens: int, min_new_tokens: int = 0
) -> list[int]:
    """Greedy tokens after a prompt of which the cache may hold a beginning. prompt_ids: int64 [1, tokens]."""
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=min_new_tokens,
        **cache_argument(model, cache),
    )
    return output[0, prompt_ids.shape[1] :].tolist()


def describe_environment(model: PreTrainedModel, model_option: str) -> dict[str, Any]:
    """What ran where, in which versions."""
    device = model.device
    return {
        "model": _model_name(model_option),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        "threads": torch.get_num_threads(),
        "oasis_cache": installed_version("oasis-cache"),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "python": platform.python_version(),
        "text": TEXT_NAME,
    }


def installed_version(package: str) -> str:
    """Version of an installed distribution, `"source"` for one that runs without being installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def pick_device(name: str) -> str:
    """`"auto"` resolved to a GPU if there is one, else to the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"device={name!r} cannot be used here: {first} (oasis-cache doctor says what there is)"
        ) from error
    return name


def pick_dtype(name: str) -> torch.dtype:
    """The floating point type of that name in torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} must be a floating point type, such as float32, bfloat16 or float16")
    return dtype


def _check_context(model: PreTrainedModel, options: DemoOptions) -> None:
    if options.new_tokens < 1:
        raise ValueError(f"new_tokens={options.new_tokens} must be at least 1")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and options.context + options.new_tokens > limit:
        raise ValueError(
            f"context={options.context} with {options.new_tokens} new tokens exceed the model's {limit} positions: choose a "
            "shorter --context, or a --model for longer texts"
        )


def _measure(cache: Cache, model: PreTrainedModel) -> dict[str, Any]:
    """The cache's part of a `CacheRun`."""
    if not isinstance(cache, OasisCache):
        return {
            "device_kv_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
            "index_bytes": 0,
            "host_kv_bytes": 0,
            "blocks_read_per_step": cache.get_seq_length() / OasisConfig().block_size,
            "hit_rate": None,
            "stats": None,
        }
    stats = cache.stats()
    heads = stats.oasis_layers * model.config.get_text_config().num_key_value_heads
    blocks = (
        stats.blocks_read_per_step / heads if stats.sparse_steps else stats.context_tokens / OasisConfig().block_size
    )
    return {
        "device_kv_bytes": stats.device_bytes + stats.other_device_bytes,
        "index_bytes": stats.index_bytes,
        "host_kv_bytes": stats.host_bytes,
        "blocks_read_per_step": blocks,
        "hit_rate": stats.hit_rate if stats.sparse_steps else None,
        "stats": stats.as_dict(),
    }


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def refuse_model(model: str, error: OSError) -> NoReturn:
    """Raise `ValueError` with what to do when transformers found no model of that name."""
    raise ValueError(
        f"model={model!r} cannot be loaded: {why_not_found(model, error)} Give a folder with config.json, weights and a tokenizer, "
        "or a hub name that can be downloaded from here or was before"
    ) from error


def _model_name(model: str) -> str:
    return MODEL_NAME if model == PACKAGED else model


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def _table(task: HiddenNumber, dense: CacheRun, oasis: CacheRun, options: DemoOptions) -> Table:
    table = Table(
        title=f"A number hidden in {task.num_tokens} tokens of the {TEXT_NAME}, budget {options.budget} tokens"
    )
    table.add_column("")
    for run in (dense, oasis):
        table.add_column(run.cache, justify="right", overflow="fold", max_width=36)

    def row(name: str, show: Callable[[CacheRun], str]) -> None:
        table.add_row(name, show(dense), show(oasis))

    table.add_row("context tokens", str(task.num_tokens), str(task.num_tokens))
    row("answer", lambda run: " ".join(run.answer.split()))
    row("tokens equal to dense", lambda run: f"{run.tokens_equal} of {len(run.token_ids)}")
    row("decode tokens/s", lambda run: f"{run.decode_tokens_per_second:.1f}")
    row("prefill seconds", lambda run: f"{run.prefill_seconds:.1f}")
    row("KV on the device", lambda run: _mebibytes(run.device_kv_bytes))
    row("block index on the device", lambda run: _mebibytes(run.index_bytes))
    row("KV in the host tier", lambda run: _mebibytes(run.host_kv_bytes))
    row("blocks read per step and KV head", lambda run: f"{run.blocks_read_per_step:.1f}")
    row("hit rate", lambda run: "-" if run.hit_rate is None else f"{run.hit_rate:.1%}")
    return table


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes else "-"


def _verdict(task: HiddenNumber, dense: CacheRun, oasis: CacheRun) -> str:
    def clause(run: CacheRun) -> str:
        return f"{run.cache} {'found' if run.found else 'did not find'} it"

    return f"The hidden number is {task.number}: {clause(dense)}, {clause(oasis)}."
