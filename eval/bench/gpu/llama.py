"""An 8B Llama-shaped model with random weights, made on the device, and caches filled without a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

from eval.bench.gpu.measure import Bench
from oasis_cache import OasisCache

CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


def config(tiny: bool, num_layers: int | None = None) -> LlamaConfig:
    """The sizes of Llama 3.1 8B, or of a toy."""
    sizes: dict[str, Any] = {
        "hidden_size": 128 if tiny else 4096,
        "intermediate_size": 128 if tiny else 14336,
        "num_hidden_layers": num_layers or (2 if tiny else 32),
        "num_attention_heads": 4 if tiny else 32,
        "num_key_value_heads": 2 if tiny else 8,
        "head_dim": 32 if tiny else 128,
        "vocab_size": 512 if tiny else 128256,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**sizes)


def build(bench: Bench) -> PreTrainedModel:
    """The model, its weights drawn on the device."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config(bench.tiny), dtype=bench.dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def fill(bench: Bench, cache: Cache, sizes: LlamaConfig, tokens: int, batch: int = 1, chunk: int = 32768) -> None:
    """Random keys and values in all layers of a cache, taken in as a prefill in chunks would give them."""
    shape = (batch, sizes.num_key_value_heads, chunk, sizes.head_dim)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        for layer in range(sizes.num_hidden_layers):
            keys, values = (bench.random(*shape)[:, :, :count] for _ in range(2))
            cache.update(keys, values, layer)


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, **arguments: Any) -> torch.Tensor:
    """Logits of the newest token: ids [batch, rows]."""
    return model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1, **arguments).logits


def providers(bench: Bench, sizes: LlamaConfig, context: int, spare: int) -> dict[str, Callable[[], Cache]]:
    """How to make the caches that are compared, in the order of their importance.

    Args:
        context: Tokens that they will hold, and `spare` more for steps.
    """
    budget = 128 if bench.tiny else 2048
    found: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=sizes),
        "OasisCache": lambda: OasisCache(model_config=sizes, budget=budget),
    }
    if bench.on_gpu:  # it is made of CUDA streams
        found["DynamicCache, offloaded"] = lambda: DynamicCache(config=sizes, offloading=True)
    found["StaticCache"] = lambda: StaticCache(config=sizes, max_cache_len=context + spare)
    if context <= 32768:
        found["OasisCache, no lookahead"] = lambda: OasisCache(model_config=sizes, budget=budget, lookahead="off")
        found["OasisCache, skip"] = lambda: OasisCache(model_config=sizes, budget=budget, on_miss="skip")
    return found


def chunk_of(name: str, context: int) -> int:
    """Tokens that a cache is given at a time: transformers' own take all at once, since each chunk moves all that is there."""
    return min(context, 32768) if name.startswith("OasisCache") else context
