"""Sizes of a model's cache layers, found out without memory.

The model is built on PyTorch's meta device and reads a few tokens with an `OasisCache`: so each layer knows its shape, whatever the
architecture. Where a model does not run there, the sizes come from its config's fields.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from oasis_cache.blocks import LayerShape
from oasis_cache.cache import OasisCache, cache_argument, other_bytes
from oasis_cache.config import OasisConfig
from oasis_cache.layer import OasisLayer

_PROBED = (3, 5)  # tokens that the model reads, to tell what grows with them
_META = torch.device("meta")


@dataclass(frozen=True)
class OtherLayer:
    """Device bytes of a layer that is no OasisLayer, or of the states beside one, per batch row.

    Attributes:
        fixed_bytes: Whatever the context.
        token_bytes: For each token.
        most_tokens: Tokens beyond which it does not grow; None: it does.
        shared_bytes: Once, whatever the batch.
    """

    fixed_bytes: int
    token_bytes: int
    most_tokens: int | None = None
    shared_bytes: int = 0

    def num_bytes(self, batch: int, tokens: int) -> int:
        held = tokens if self.most_tokens is None else min(tokens, self.most_tokens)
        return batch * (self.fixed_bytes + self.token_bytes * held) + self.shared_bytes


@dataclass(frozen=True)
class ModelSizes:
    """What of a model decides on the needs of its cache.

    Attributes:
        layers: The cache's OasisLayers, each knowing its shape, for one batch row.
        others: What is beside them.
        weight_elements: Numbers in the model's parameters; None: unknown.
        source: "model" or "config", where the sizes come from.
    """

    layers: list[OasisLayer]
    others: list[OtherLayer]
    weight_elements: int | None
    source: str


def model_sizes(model_config: PretrainedConfig, config: OasisConfig, dtype: torch.dtype) -> ModelSizes:
    """Ask the model, or else its config.

    Raises:
        ValueError: The config is none, or says too little and the model cannot be built without memory.
    """
    if not isinstance(model_config, PretrainedConfig):
        raise ValueError(f"model_config must be a model's config (model.config), got {type(model_config).__name__}")
    try:
        return _ask_model(model_config, config, dtype)
    except Exception as error:  # noqa: BLE001 # models of all kinds run here, on a device that not all of their code knows
        try:
            return _ask_config(model_config, config, dtype)
        except AttributeError as missing:
            name = type(model_config).__name__
            raise ValueError(
                f"the sizes of {name} are not known: the model does not run on the meta device ({error}), and its config has "
                f"other fields than those of common models ({missing})"
            ) from error


def _ask_model(model_config: PretrainedConfig, config: OasisConfig, dtype: torch.dtype) -> ModelSizes:
    # In bfloat16, the only type that some kernels of experts take.
    text_config = copy.deepcopy(model_config.get_text_config(decoder=True))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with _META:
            model = AutoModelForCausalLM.from_config(text_config, dtype=torch.bfloat16).eval()
        probes = []
        for tokens in _PROBED:
            cache = OasisCache(replace(config, engine="sync", spill=None), model_config=text_config)
            ids = torch.zeros(1, tokens, dtype=torch.int64, device=_META)
            model(ids, use_cache=True, **cache_argument(model, cache))
            probes.append(cache)
    short, long = probes
    layers = [layer for layer in long.layers if isinstance(layer, OasisLayer)]
    if any(layer.shape is None for layer in layers):
        raise ValueError("a layer got no tokens")
    others = []
    for first, second in zip(short.layers, long.layers, strict=True):
        window = getattr(second, "sliding_window", None)
        most = None if window is None else int(window) - 1
        few, more = (count if most is None else min(count, most) for count in _PROBED)
        small, large = (_bytes_by_type(layer, dtype) for layer in (first, second))
        slope = (large - small) // max(1, more - few)
        shared = _shared_bytes(second)
        if large:
            others.append(OtherLayer(small - slope * few - shared, slope, most, shared))
    return ModelSizes(layers, others, sum(parameter.numel() for parameter in model.parameters()), "model")


def _shared_bytes(layer: Any) -> int:
    """Bytes that a layer of transformers' holds once, whatever the batch: the length of its window, as a tensor."""
    tensor = getattr(layer, "_sliding_window_tensor", None)
    return tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0


def _bytes_by_type(layer: Any, dtype: torch.dtype) -> int:
    """`other_bytes` of a layer filled in bfloat16, in a model of another dtype."""
    return other_bytes(layer, lambda own: dtype.itemsize if own == torch.bfloat16 else own.itemsize)


def _ask_config(model_config: PretrainedConfig, config: OasisConfig, dtype: torch.dtype) -> ModelSizes:
    text = model_config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    latent_dim = getattr(text, "kv_lora_rank", None)
    shape = LayerShape(1, kv_heads, head_dim, getattr(text, "v_head_dim", None) or head_dim, dtype, _META)
    if latent_dim is not None:
        shape = LayerShape(1, 1, latent_dim, text.qk_rope_head_dim, dtype, _META, latent=True)
    layers, others = [], []
    for layer in OasisCache(replace(config, engine="sync", spill=None), model_config=model_config).layers:
        if type(layer) is OasisLayer:
            layer.shape = shape
            layers.append(layer)
        elif isinstance(layer, DynamicLayer) and getattr(layer, "sliding_window", None) is not None:
            shared = _shared_bytes(layer)
            others.append(OtherLayer(0, shape.token_bytes, int(layer.sliding_window) - 1, shared))
        else:
            raise AttributeError(f"nothing for the states of a {type(layer).__name__}")
    return ModelSizes(layers, others, None, "config")
