"""What a cache holds beside its pages, as named tensors and values that JSON can carry, and a cache made of both.

Pages are large and immutable, and stay where they are. All else (windows, tables, indexes, dense buffers, states of other layers)
is small and goes along. It comes from another process: every size, type and number is checked before it is used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from oasis_cache.blocks import LayerShape, as_blocks
from oasis_cache.cache import OasisCache
from oasis_cache.hybrid import OasisHybridLayer
from oasis_cache.layer import OasisLayer
from oasis_cache.mixed_store import Store

Tensors = dict[str, torch.Tensor]
STRUCTURE = (
    "block_size", "budget", "sink_blocks", "recent_blocks", "index", "tier_dtype", "dense_below", "sparse_rows",
)  # fmt: skip
"""Settings that what a layer holds depends on: they go with it. All others may differ from cache to cache."""
_SIZES = ("batch", "kv_heads", "key_dim", "value_dim")
_TABLES = ("block_of_slot", "last_wanted")
# Of a model's config, what does not say what its keys and values are.
_NOT_OF_THE_MODEL = frozenset(
    "transformers_version architectures dtype torch_dtype use_cache output_attentions output_hidden_states return_dict "
    "chunk_size_feed_forward problem_type id2label label2id bos_token_id eos_token_id pad_token_id".split()
)


class StateError(ValueError):
    """What should be a cache's state is damaged, or of another model, release or setting than is wanted here."""


def describe_model(config: PretrainedConfig) -> dict[str, Any]:
    """What identifies the model whose keys and values a cache holds: the text config's fields, less those that do not matter to it.

    Weights are not looked at: two models of one architecture and size look the same.
    """
    fields = config.get_text_config(decoder=True).to_dict()
    kept = {name: value for name, value in fields.items() if name not in _NOT_OF_THE_MODEL and not name.startswith("_")}
    # as JSON would carry it, so that what was carried compares equal; infinities and what JSON has no word for as text
    described: dict[str, Any] = json.loads(
        json.dumps(kept, sort_keys=True, default=lambda value: type(value).__name__), parse_constant=str
    )
    return described


def check_model(described: Any, config: PretrainedConfig) -> None:
    """Raise `StateError` naming the fields in which `describe_model` differs from that of `config`."""
    here = describe_model(config)
    if not isinstance(described, dict):
        raise StateError(f"a model's description must be a table of fields, got {type(described).__name__}")
    differing = sorted(name for name in here.keys() & described.keys() if here[name] != described[name])
    if described.get("model_type") != here.get("model_type"):
        differing = ["model_type"]
    if differing:
        listed = ", ".join(
            f"{name}={described[name]!r} (here {here[name]!r})" for name in differing[:6] if name in described
        )
        raise StateError(f"the cache is of another model than this one: {listed}")


def describe(cache: OasisCache) -> tuple[dict[str, Any], Tensors]:
    """Everything in a cache but its pages: values for JSON, and tensors (copies in host memory) by name.

    Raises:
        ValueError: The cache has no model config, or a forward broke off in it, or a layer holds something unknown.
    """
    if cache.model_config is None:
        raise ValueError(
            "the cache does not know its model: use it with the model first, or make it with model_config="
        )
    cache._check_complete()
    tensors: Tensors = {}
    layers = [_describe_layer(layer, f"{number}.", tensors) for number, layer in enumerate(cache.layers)]
    return {
        "model": describe_model(cache.model_config),
        "settings": {name: getattr(cache.config, name) for name in STRUCTURE},
        "layers": layers,
    }, tensors


def _describe_layer(layer: Any, prefix: str, tensors: Tensors) -> dict[str, Any]:
    if not isinstance(layer, OasisLayer):
        return {"kind": type(layer).__name__, "values": _take_apart(vars(layer), prefix, tensors)}
    layer.settle()
    described: dict[str, Any] = {"kind": type(layer).__name__, "length": layer.length}
    if isinstance(layer, OasisHybridLayer):
        own = vars(OasisLayer(layer.runtime))
        others = {name: value for name, value in vars(layer).items() if name not in own}
        described["values"] = _take_apart(others, prefix, tensors)
    if layer.length == 0:
        return described
    assert layer.shape is not None
    described["shape"] = {
        **{name: getattr(layer.shape, name) for name in _SIZES},
        "dtype": _name(layer.shape.dtype),
        "latent": layer.shape.latent,
    }
    if layer.residency is None:
        assert layer.dense is not None
        tensors[prefix + "dense"] = _copy(layer.dense[:, :, : layer.length])
        return described
    assert layer.index is not None
    assert layer.store is not None
    working_set = layer.residency.working_set
    described["pages"] = {
        "num_blocks": layer.store.num_blocks,
        "window_start": working_set.window_start,
        "clock": working_set.clock,
        "has_empty_slots": working_set.has_empty_slots,
    }
    tensors[prefix + "window"] = _copy(working_set.window)
    for name in _TABLES:
        tensors[prefix + name] = _copy(getattr(working_set, name))
    for name in layer.index.arrays:
        tensors[f"{prefix}index.{name}"] = _copy(layer.index.held(name, layer.store.num_blocks))
    return described


def _take_apart(values: dict[str, Any], prefix: str, tensors: Tensors) -> dict[str, Any]:
    """Attributes of one of transformers' layers; tensors go to `tensors`, and their names stand in their places."""
    described: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            parts = _take_apart({str(key): part for key, part in value.items()}, f"{prefix}{name}.", tensors)
            described[name] = {"by number": parts}
        elif isinstance(value, torch.Tensor):
            tensors[prefix + name] = _copy(value)
            described[name] = {"tensor": prefix + name}
        elif isinstance(value, torch.dtype):
            described[name] = {"dtype": _name(value)}
        elif isinstance(value, torch.device):
            described[name] = {"device": None}  # that of the new cache's layer
        elif value is None or isinstance(value, bool | int | float | str):
            described[name] = {"value": value}
        else:
            raise ValueError(f"a {type(value).__name__} in {prefix}{name} cannot leave this process")
    return described


def rebuild(
    cache: OasisCache,
    described: dict[str, Any],
    tensors: Tensors,
    adopt: Callable[[int, Store], None],
    devices: Sequence[torch.device],
) -> None:
    """Fill an empty cache with what `describe` gave of another one.

    Args:
        cache: Made with the model's config, and with `STRUCTURE` of `described["settings"]`.
        adopt: Called as adopt(layer number, empty store) where a layer has pages: enters those of the blocks before the window.
            Slots are filled from there afterwards.
        devices: One for each layer.

    Raises:
        StateError: Something is missing, has another shape or type than it must have, or names another kind of layer. The cache
            is reset.
    """
    try:
        layers = _required(described, "layers", list)
        if len(layers) != len(cache.layers):
            raise StateError(f"{len(layers)} layers for a model that has {len(cache.layers)}")
        for number, (layer, part) in enumerate(zip(cache.layers, layers, strict=True)):
            if not isinstance(part, dict) or part.get("kind") != type(layer).__name__:
                raise StateError(f"layer {number} must be a {type(layer).__name__}")
            _rebuild_layer(layer, part, f"{number}.", tensors, devices[number], functools.partial(adopt, number))
        cache._check_complete()
    except RuntimeError as error:
        cache.reset()
        raise StateError(f"the layers do not fit each other: {error}") from error
    except BaseException:
        cache.reset()
        raise


def _rebuild_layer(
    layer: Any,
    described: dict[str, Any],
    prefix: str,
    tensors: Tensors,
    device: torch.device,
    adopt: Callable[[Store], None],
) -> None:
    if "values" in described:
        put = _put_together(_required(described, "values", dict), tensors, device)
        for name, value in put.items():
            if not name.isidentifier() or name.startswith("__") or callable(getattr(type(layer), name, None)):
                raise StateError(f"{prefix}{name} is nothing that a {type(layer).__name__} holds")
            setattr(layer, name, value)
    if not isinstance(layer, OasisLayer):
        return
    length = _count(described, "length")
    if length == 0:
        return
    shape = _shape(_required(described, "shape", dict), device)
    config = layer.config
    layer.open(shape, length)
    layer.stores_latents = shape.latent
    heads = (shape.batch, shape.kv_heads)
    if "pages" not in described:
        if length > config.dense_tokens:
            raise StateError(f"{prefix}dense holds {length} tokens, more than the settings' {config.dense_tokens}")
        layer.dense = _tensor(tensors, prefix + "dense", (*heads, length, shape.kv_dim), shape.dtype).to(device)
        return
    pages = _required(described, "pages", dict)
    num_blocks, start = _count(pages, "num_blocks"), _count(pages, "window_start")
    window_block, rest = divmod(start, config.block_size)
    tokens = length - start
    if (
        rest
        or not config.num_slots <= window_block <= num_blocks <= length // config.block_size
        or tokens > config.window_tokens
    ):
        raise StateError(
            f"{prefix}window: {num_blocks} blocks and a window from token {start} do not make {length} tokens"
        )
    # what came is checked before memory is taken for sizes that only were said
    window = _tensor(tensors, prefix + "window", (*heads, tokens, shape.kv_dim), shape.dtype)
    tables = {name: _tensor(tensors, prefix + name, (*heads, config.num_slots), torch.int64) for name in _TABLES}
    held = tables["block_of_slot"]
    if bool(((held < -1) | (held >= window_block)).any()):
        raise StateError(f"{prefix}block_of_slot names blocks that are not before the window")
    layer.open_pages()
    index, store, residency = layer.index, layer.store, layer.residency
    assert index is not None
    assert store is not None
    assert residency is not None
    like = index.summarise(torch.zeros(*heads, 1, config.block_size, shape.query_dim, dtype=shape.dtype, device=device))
    names = {name.removeprefix(prefix + "index.") for name in tensors if name.startswith(prefix + "index.")}
    if names != like.keys():
        raise StateError(
            f"the block index consists of {sorted(names)}, but is kept as {sorted(like)} on {device} here: both sides must score "
            "by the same means (both on a GPU, or numba, the `cpu` extra, on both or on neither)"
        )
    index.num_blocks, index.block_size = num_blocks, config.block_size
    index.arrays = {
        name: _tensor(tensors, f"{prefix}index.{name}", (*heads, num_blocks, *one.shape[3:]), one.dtype).to(device)
        for name, one in like.items()
    }
    working_set = residency.working_set
    working_set.replace_window(window.to(device), start)
    for name, table in tables.items():
        getattr(working_set, name).copy_(table)
    working_set.clock = _count(pages, "clock")
    working_set.has_empty_slots = _required(pages, "has_empty_slots", bool) or bool((held < 0).any())
    adopt(store)
    if store.num_blocks != window_block:
        raise StateError(f"layer {prefix}: {store.num_blocks} blocks are named, {window_block} are before the window")
    sealed = working_set.window[:, :, : num_blocks * config.block_size - start]
    store.append(as_blocks(sealed, config.block_size))
    residency.fill_slots()
    layer.phase = "sparse"


def _put_together(described: dict[str, Any], tensors: Tensors, device: torch.device) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, part in described.items():
        if not isinstance(part, dict) or len(part) != 1:
            raise StateError(f"{name}: one value with its kind expected, got {part!r:.60}")
        ((kind, value),) = part.items()
        if kind == "by number" and isinstance(value, dict) and all(key.isdecimal() for key in value):
            values[name] = {int(key): one for key, one in _put_together(value, tensors, device).items()}
        elif kind == "tensor" and isinstance(value, str) and value in tensors:
            values[name] = tensors[value].to(device)
        elif kind == "dtype":
            values[name] = _dtype(value)
        elif kind == "device":
            values[name] = device
        elif kind == "value" and (value is None or isinstance(value, bool | int | float | str)):
            values[name] = value
        else:
            raise StateError(f"{name}: {kind!r} {value!r:.60} is no value of a layer")
    return values


def _required(described: dict[str, Any], name: str, kind: type) -> Any:
    value = described.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StateError(f"{name} must be a {kind.__name__}, got {value!r:.60}")
    return value


def _count(described: dict[str, Any], name: str) -> int:
    value: int = _required(described, name, int)
    if value < 0:
        raise StateError(f"{name}={value} must not be negative")
    return value


def _shape(described: dict[str, Any], device: torch.device) -> LayerShape:
    sizes = [_count(described, name) for name in _SIZES]
    if 0 in sizes:
        raise StateError(f"no layer has sizes {sizes}")
    batch, kv_heads, key_dim, value_dim = sizes
    latent = _required(described, "latent", bool)
    return LayerShape(batch, kv_heads, key_dim, value_dim, _dtype(described.get("dtype")), device, latent)


def _tensor(tensors: Tensors, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if name not in tensors:
        raise StateError(f"{name} is missing")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise StateError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shape}")
    return tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{name!r:.60} is no dtype")
    return dtype
