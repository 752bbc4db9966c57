"""What a saved file says of each layer: tensors by name, and the rest as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from oasis_cache.blocks import LayerShape
from oasis_cache.hybrid import OasisHybridLayer
from oasis_cache.layer import OasisLayer
from oasis_cache.saving.container import Container, Rows
from oasis_cache.store import HostStore
from oasis_cache.tiers import TieredStore

Tensors = dict[str, "torch.Tensor | Rows"]
_TABLES = ("block_of_slot", "last_wanted")
_PLACES = ("window_start", "window_length", "clock", "has_empty_slots")


# --- Layers of ours -------------------------------------------------------------------------------------------------------


def describe_oasis(layer: OasisLayer, prefix: str, tensors: Tensors) -> dict[str, Any]:
    """Enter an OasisLayer's tensors under names that begin with `prefix`, and return the rest."""
    layer.settle()
    state: dict[str, Any] = {"length": layer.length, "stores_latents": layer.stores_latents}
    if isinstance(layer, OasisHybridLayer):
        names = [
            name for name in vars(LinearAttentionLayer(number_of_states=layer.number_of_states)) if name in vars(layer)
        ]
        state["states"] = {
            name: _describe(getattr(layer, name), f"{prefix}{name}", tensors)
            for name in names
            if name not in ("keys", "values")
        }
    shape = layer.shape
    if layer.length == 0 or shape is None:
        return state
    state["shape"] = {
        "batch": shape.batch, "kv_heads": shape.kv_heads, "key_dim": shape.key_dim, "value_dim": shape.value_dim,
        "dtype": _name(shape.dtype), "device": str(shape.device), "latent": shape.latent,
    }  # fmt: skip
    if layer.dense is not None:
        tensors[f"{prefix}dense"] = layer.dense[:, :, : layer.length]
        return state
    assert layer.store is not None
    assert layer.index is not None
    assert layer.working_set is not None
    for number, store in enumerate(layer.store.parts):
        _describe_store(store, f"{prefix}store.{number}.", tensors)
    for name in layer.index.arrays:
        tensors[f"{prefix}index.{name}"] = layer.index.held(name, layer.index.num_blocks)
    window = layer.working_set
    tensors[f"{prefix}working_set"] = window.kv[:, :, : window.num_tokens]
    for name in _TABLES:
        tensors[f"{prefix}{name}"] = getattr(window, name)
    state["index"] = list(layer.index.arrays)  # in the order in which they are scored
    state["working_set"] = {name: getattr(window, name) for name in _PLACES}
    return state


def _describe_store(store: HostStore, prefix: str, tensors: Tensors) -> None:
    ids, table = store.page_ids.unique(return_inverse=True)
    if store.shape.device.type == "cuda":
        torch.cuda.synchronize(store.shape.device)  # which may be writing pages still
    tensors[f"{prefix}pages"] = Rows(
        ids.numel(), store.format.page_bytes, lambda first, stop: store.read_pages(ids[first:stop])
    )
    tensors[f"{prefix}table"] = table.view(store.batch, store.num_blocks)


def restore_oasis(
    layer: OasisLayer, prefix: str, state: dict[str, Any], file: Container, device: torch.device | None
) -> None:
    """Give an empty OasisLayer what `describe_oasis` told of one. Pages stay in the file.

    Args:
        device: Where the layer's tensors shall be; None: where they were.
    """
    layer.stores_latents = state["stores_latents"]
    if isinstance(layer, OasisHybridLayer):
        for name, part in state["states"].items():
            _set(layer, name, _restore(part, file, device))
    if state["length"] == 0:
        return
    sizes = state["shape"]
    shape = LayerShape(
        sizes["batch"], sizes["kv_heads"], sizes["key_dim"], sizes["value_dim"], getattr(torch, sizes["dtype"]),
        torch.device(sizes["device"]) if device is None else device, sizes["latent"],
    )  # fmt: skip
    layer.open(shape, state["length"])
    if f"{prefix}dense" in file:
        layer.dense = file.tensor(f"{prefix}dense").to(shape.device)
        return
    layer.open_pages()
    store, index, window = layer.store, layer.index, layer.working_set
    assert store is not None
    assert index is not None
    assert window is not None
    for number, part in enumerate(store.parts):
        assert isinstance(part, TieredStore)
        table = file.tensor(f"{prefix}store.{number}.table")
        if table.numel():
            part.adopt(file.rows(f"{prefix}store.{number}.pages"), table)
    kv = file.tensor(f"{prefix}working_set").to(shape.device)
    window.kv[:, :, : kv.shape[2]] = kv
    for name in _TABLES:
        getattr(window, name).copy_(file.tensor(f"{prefix}{name}"))
    for name in _PLACES:
        setattr(window, name, state["working_set"][name])
    arrays = {name: file.tensor(f"{prefix}index.{name}").to(shape.device) for name in state["index"]}
    keys = torch.zeros(shape.batch, shape.kv_heads, 1, layer.config.block_size, shape.query_dim, dtype=shape.dtype)
    index.block_size = layer.config.block_size
    if list(index.summarise(keys.to(shape.device))) == state["index"]:
        index.arrays, index.num_blocks = arrays, store.num_blocks
        return
    layer.runtime.warn_once(
        "the file's block index is laid out for another device or without numba: it is made anew of all keys, which reads the "
        "whole file"
    )
    at_once = max(1, layer.config.stream_tokens // layer.config.block_size)
    for first in range(0, store.num_blocks, at_once):
        part_kv = store.read_range(first, min(first + at_once, store.num_blocks))
        index.append(part_kv[..., : shape.query_dim].unflatten(2, (-1, layer.config.block_size)))


# --- Layers of transformers -----------------------------------------------------------------------------------------------


def describe_other(layer: Any, prefix: str, tensors: Tensors) -> dict[str, Any]:
    """Enter the tensors of one of transformers' own layers, and return its other attributes.

    Raises:
        TypeError: The layer holds something that is neither a tensor nor a plain value.
    """
    return {name: _describe(value, f"{prefix}{name}", tensors) for name, value in vars(layer).items()}


def restore_other(layer: Any, state: dict[str, Any], file: Container, device: torch.device | None) -> None:
    """Give a fresh layer of the same type what `describe_other` told of one."""
    for name, part in state.items():
        _set(layer, name, _restore(part, file, device))


def _set(layer: Any, name: str, value: Any) -> None:
    if not name.isidentifier() or callable(getattr(type(layer), name, None)):
        raise ValueError(f"{type(layer).__name__} has no attribute {name!r} to restore")
    setattr(layer, name, value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Any, name: str, tensors: Tensors) -> Any:
    """`value` as JSON; tensors in it go to `tensors` under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name, "device": str(value.device)}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, list | tuple):
        parts = [_describe(part, f"{name}.{number}", tensors) for number, part in enumerate(value)]
        return {"list": parts, "tuple": isinstance(value, tuple)}
    if isinstance(value, dict) and all(isinstance(key, int | str) for key in value):
        return {"dict": [[key, _describe(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    raise TypeError(f"a cache layer whose attribute {name} is a {type(value).__name__} cannot be saved")


def _restore(part: Any, file: Container, device: torch.device | None) -> Any:
    if not isinstance(part, dict):
        return part
    readers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: file.tensor(part["tensor"]).to(torch.device(part["device"]) if device is None else device),
        "dtype": lambda: getattr(torch, part["dtype"]),
        "list": lambda: (tuple if part["tuple"] else list)(_restore(each, file, device) for each in part["list"]),
        "dict": lambda: {key: _restore(each, file, device) for key, each in part["dict"]},
        "device": lambda: torch.device(part["device"]) if device is None else device,
    }
    kind = next(kind for kind in readers if kind in part)
    return readers[kind]()
