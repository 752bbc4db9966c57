"""`oasis-cache generate`: an answer to a prompt and, if given, about a file, streamed as it comes."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging as transformers_logging

from oasis_cache.cache import OasisCache, cache_argument
from oasis_cache.demo import pick_device, pick_dtype, prefill, refuse_model
from oasis_cache.packaged import PACKAGED, load_model
from oasis_cache.reports import STDOUT, check_report_file, write_report

LEAST_TEMPERATURE = 1e-6  # logits divided by less may leave the range of float32


@dataclass(frozen=True)
class GenerateOptions:
    """What `oasis-cache generate` can be told.

    Attributes:
        prompt: The question; "" if the file says everything, "-" reads the standard input.
        file: A text that goes before the question, or None.
        model: Folder or hub name, or "packaged".
        settings: Fields of `OasisConfig`.
        new_tokens: Most tokens to generate.
        temperature: 0.0: the most likely token each time; above: sampling.
        seed: What sampling begins with.
        raw: Leave the text as it is, although the model has a chat template.
        device, dtype: As in `DemoOptions`.
        json_file: Where a report goes: a path, "-" for the standard output in place of the streamed text, or None.
    """

    prompt: str
    file: Path | None
    model: str
    settings: dict[str, Any]
    new_tokens: int
    temperature: float
    seed: int
    raw: bool
    device: str
    dtype: str
    json_file: str | None


def run_generate(options: GenerateOptions) -> int:
    """Stream the answer to the standard output and a summary of the cache to the standard error.

    Returns:
        The exit status, 0.

    Raises:
        MemoryError: Host memory, the disk or the device did not suffice.
        ValueError: An option is wrong, a file cannot be read, or the prompt and the answer exceed the model's positions.
        ModuleNotFoundError: The packaged model is asked for and not installed.
    """
    text = _read(options)
    _refuse_early(options)
    transformers_logging.disable_progress_bar()
    device, dtype = pick_device(options.device), pick_dtype(options.dtype)
    console = Console(stderr=True)
    note = " (the first time it is converted, which takes longer)" if options.model == PACKAGED else ""
    with console.status(f"Loading {options.model}{note}"):
        try:
            model, tokenizer = load_model(options.model, dtype, device)
        except OSError as error:
            refuse_model(options.model, error)
    ids = _encode(text, tokenizer, options).to(device)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + options.new_tokens > limit:
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens with {options.new_tokens} new ones exceed the model's {limit} positions: give a "
            "part of the text, fewer --new-tokens, or a --model for longer texts"
        )
    with OasisCache(model_config=model.config, **options.settings) as cache:
        try:
            report = _answer(model, tokenizer, ids, cache, options, console)
        except (MemoryError, OSError) as error:
            raise MemoryError(
                f"{error}. --tier-dtype int8 takes half of the host memory, --max-host-memory with --spill DIR sends the rest to "
                "disk"
            ) from error
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"the device has not enough memory ({error}). --dtype bfloat16 halves weights and KV, a lower --budget than "
                f"{cache.config.budget} the working set; docs/out_of_memory.md has the rest"
            ) from error
        console.print(repr(cache), highlight=False, markup=False, soft_wrap=True)
    write_report(report, options.json_file)
    return 0


def is_text(words: str) -> bool:
    """Whether words can be written in UTF-8, and so be taken by a tokenizer: half of a surrogate pair cannot."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_early(options: GenerateOptions) -> None:
    """Raise `ValueError` for what would fail only after the model has taken its time."""
    if options.new_tokens < 1:
        raise ValueError(f"new_tokens={options.new_tokens} must be at least 1")
    if options.temperature != 0 and not LEAST_TEMPERATURE <= options.temperature < math.inf:
        raise ValueError(f"temperature={options.temperature} must be 0, or a number of at least {LEAST_TEMPERATURE}")
    if not is_text(options.prompt):
        raise ValueError("the prompt is no text in UTF-8: is the terminal set to another encoding?")
    try:
        OasisCache(**options.settings).close()
    except OSError as error:
        raise ValueError(str(error)) from error
    check_report_file(options.json_file)


def _read(options: GenerateOptions) -> str:
    """File and question as one text."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    parts = [prompt]
    if options.file is not None:
        try:
            parts.insert(0, options.file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"file={str(options.file)!r} cannot be read as text: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"file={str(options.file)!r} cannot be read as text: {error}. Save it as plain text in UTF-8; a PDF or a word "
                "processor's file has to be converted first"
            ) from error
    text = "\n\n".join(part.strip() for part in parts if part.strip())
    if not text:
        raise ValueError(
            'nothing to answer: oasis-cache generate "YOUR QUESTION", with --file YOUR_TEXT if it is about a text'
        )
    return text


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, options: GenerateOptions) -> torch.Tensor:
    """Token ids, int64 [1, tokens], in the model's chat format if it has one."""
    if options.raw or not tokenizer.chat_template:
        return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    messages = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(chat, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]


def _answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    cache: OasisCache,
    options: GenerateOptions,
    console: Console,
) -> dict[str, Any]:
    """Read the prompt, generate, and report."""
    started = time.perf_counter()
    tokens = ids.shape[1]
    if tokens > 1:  # the last one is left to `generate`
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(f"Reading {tokens:,} tokens", total=tokens - 1)
            prefill(model, ids[:, :-1], cache, on_progress=lambda count: progress.advance(bar, count))
    filled = time.perf_counter()
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        torch.manual_seed(options.seed)
        sampling = {"do_sample": True, "temperature": options.temperature}
    silent = options.json_file == STDOUT
    with console.status("Generating") if silent else contextlib.nullcontext():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            streamer=None if silent else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
            **cache_argument(model, cache),
        )
    done = time.perf_counter()
    new = output[0, tokens:]
    return {
        "model": options.model,
        "settings": options.settings,
        "prompt_tokens": tokens,
        "new_tokens": len(new),
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "prefill_seconds": filled - started,
        "decode_seconds": done - filled,
        "stats": cache.stats().as_dict(),
    }
