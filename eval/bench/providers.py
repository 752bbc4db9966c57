"""The caches that are compared: how each is made and filled, and what it holds and reads."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import QuantoQuantizedLayer

from eval.bench.quest import ATTENTION, QuestCache
from oasis_cache import OasisCache

OASIS, DYNAMIC, STATIC, QUEST = "OasisCache", "DynamicCache", "StaticCache", "Quest"
CANDIDATES = 372  # three times the slots of a budget of 2,048 tokens
TWO_LEVELS = f"OasisCache candidates={CANDIDATES}"
FP8, QUANTO = "QuantizedCache fp8", "QuantizedCache int4"
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")  # transformers 5.17 has none


@dataclass(frozen=True)
class Provider:
    """A cache that takes part.

    Attributes:
        name: As the ledger has it.
        make: An empty one for a model, from the tokens that it shall take at most and the budget.
        host_share: Host memory that it takes, of the dense KV's bytes, at most: by this it is left out where it does not fit.
        whole: See `Source.fill`.
        attention: The attention implementation that it needs; None: the model's own.
    """

    name: str
    make: Callable[[PreTrainedModel, int, int], Cache]
    host_share: float
    whole: bool = False
    attention: str | None = None


def providers(names: tuple[str, ...] | None = None) -> list[Provider]:
    """Those of the names, or all that can run here. OasisCache comes first, and so is the last to be left out."""
    everyone = [
        # 1.4 resident at 131,072 tokens: slabs of the host tier, the index, and what it grew from.
        Provider(OASIS, lambda model, _, budget: OasisCache(model_config=model.config, budget=budget), host_share=1.6),
        Provider(
            TWO_LEVELS,
            lambda model, _, budget: OasisCache(model_config=model.config, budget=budget, candidates=CANDIDATES),
            host_share=1.6,
        ),
        # One layer at a time is copied, and repeated for the query heads where attention asks for that.
        Provider(DYNAMIC, lambda model, *_: DynamicCache(config=model.config), host_share=1.3, whole=True),
        Provider(STATIC, lambda model, room, _: StaticCache(config=model.config, max_cache_len=room), host_share=1.2),
        Provider(
            QUEST,
            lambda model, room, budget: QuestCache(model.config, room, budget),
            host_share=1.3,
            attention=ATTENTION,
        ),
    ]
    if HAS_FP8:
        everyone.append(
            Provider(FP8, lambda model, *_: QuantizedCache("fp8", model.config), host_share=0.5, whole=True)
        )
    if quanto_is_ready():
        quanto = Provider(
            QUANTO, lambda model, *_: QuantizedCache("quanto", model.config, nbits=4), host_share=0.4, whole=True
        )
        everyone.append(quanto)
    return [provider for provider in everyone if names is None or provider.name in names]


def quanto_is_ready() -> bool:
    """Whether optimum-quanto is installed and no process holds, or left behind, the lock under which it compiles its extension.

    It would wait for that lock without end.
    """
    spec = importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto")
    return bool(spec) and not any(Path(spec.origin).parent.glob("library/extensions/cpp/build/lock"))


def compile_quanto() -> None:
    """Let optimum-quanto compile its extension before anything is timed: a minute or more, once."""
    layer, keys = QuantoQuantizedLayer(nbits=4), torch.randn(1, 1, 128, 64)
    for _ in range(2):
        layer.update(keys, keys)


def device_bytes(cache: Cache) -> tuple[int, int | None]:
    """Bytes that a cache holds where the model computes, and those of an index among them, where it has one."""
    if isinstance(cache, OasisCache):
        stats = cache.stats()
        return stats.device_bytes + stats.index_bytes, stats.index_bytes
    held, index = 0, 0
    for layer in cache.layers:
        stored = [layer.keys, layer.values]
        for encoded in (getattr(layer, "_quantized_keys", None), getattr(layer, "_quantized_values", None)):
            if isinstance(encoded, tuple):
                stored.append(encoded[0])
            elif encoded is not None:  # quanto's
                stored += [encoded._data._data, encoded._scale, encoded._shift]
        index += getattr(layer, "index_bytes", 0)
        held += sum(tensor.nbytes for tensor in stored)
    return held + index, index if isinstance(cache, QuestCache) else None


def kv_bytes_read(cache: Cache) -> int:
    """Bytes of keys and values that one step of a cache that is no OasisCache reads."""
    if isinstance(cache, QuestCache):
        return cache.read_bytes()
    return device_bytes(cache)[0]


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Let the model's next forward use an attention implementation that is registered."""
    model.config._attn_implementation = name
