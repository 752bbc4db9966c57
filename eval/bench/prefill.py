"""One prefill in a process of its own, so that its peak of memory is nobody else's: prints a line of JSON.

    python -m eval.bench.prefill OasisCache --tokens 8192 --chunk 4096

Seconds run from the call to the first token. The peak is the most resident memory (VmHWM of /proc/self/status, Linux) beyond what
was resident before, when the model had been loaded and used.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Cache, PreTrainedModel

from eval.bench.cases import DTYPES
from eval.bench.generation import make_cache, prompt
from eval.bench.providers import DYNAMIC, OASIS, device_bytes
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.packaged import load_model

STATUS = Path("/proc/self/status")
WARM_UP_TOKENS, WARM_UP_BUDGET = 256, 128


def resident(name: str) -> int:
    """Bytes by a name of /proc/self/status: VmRSS now, VmHWM at most so far."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    """Let VmHWM begin anew at what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


@torch.inference_mode()
def first_token(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, chunk: int) -> int:
    """Read all of `ids`, int64 [1, tokens], in chunks of about that size (0: at once), and choose the next token."""
    for part in ids.tensor_split(-(-ids.shape[1] // (chunk or ids.shape[1])), dim=1):
        logits = model(part, use_cache=True, logits_to_keep=1, **cache_argument(model, cache)).logits
    return int(logits[0, -1].argmax())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", choices=[OASIS, DYNAMIC])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens read at a time; 0: all at once")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model, DTYPES[options.dtype])
    ids = prompt(tokenizer, options.tokens)
    # What is compiled, allocated and read from the file once is no part of a prefill.
    first_token(model, ids[:, :WARM_UP_TOKENS], make_cache(options.cache, model, WARM_UP_BUDGET), WARM_UP_TOKENS // 2)
    forget_peak()
    before = resident("VmRSS")
    cache = make_cache(options.cache, model, options.budget)
    begin = time.perf_counter()
    token = first_token(model, ids, cache, options.chunk)
    seconds = time.perf_counter() - begin
    sizes = model.config.get_text_config()
    token_bytes = (
        2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * DTYPES[options.dtype].itemsize
    )
    measured = {
        "seconds": seconds,
        "token": token,
        "resident_bytes": before,
        "peak_bytes": resident("VmHWM") - before,
        "device_bytes": device_bytes(cache)[0],
        "kv_bytes": options.tokens * token_bytes,
    }
    if isinstance(cache, OasisCache):
        cache.close()
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
