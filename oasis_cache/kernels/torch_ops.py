"""The operations of reference.py with PyTorch's fused attention where it can serve: the versions that run on a CPU."""

from __future__ import annotations

import ctypes

import torch

from oasis_cache.kernels import reference

QUERY_CHUNK = 512  # rows of scores held at a time where no fused attention serves


def sparse_attention(
    queries: torch.Tensor,
    kv: torch.Tensor,
    key_dim: int,
    num_tokens: int,
    rows: int,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_of_slot: torch.Tensor | None = None,
    block_size: int = 16,
    window_start: int = 0,
    sliding_window: int | None = None,
    value_columns: slice | None = None,
) -> torch.Tensor:
    """`reference.sparse_attention` without log-sum-exp and mass: out [batch, kv_heads, group * rows, value_dim], queries' dtype."""
    if softcap is not None or sinks is not None or block_of_slot is not None or sliding_window is not None:
        out, _, _ = reference.sparse_attention(
            queries, kv, key_dim, num_tokens, rows, scaling, mask, softcap, sinks, block_of_slot, block_size, window_start,
            sliding_window, value_columns=value_columns,
        )  # fmt: skip
        return out.to(queries.dtype)
    if rows > 1:
        causal = reference.causal_rows(rows, num_tokens, kv.device).repeat(queries.shape[2] // rows, 1)
        if mask is None:
            mask = causal
        elif mask.dtype == torch.bool:
            mask = mask & causal
        else:
            mask = mask.masked_fill(~causal, torch.finfo(mask.dtype).min)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(queries.dtype)
    used = kv[:, :, :num_tokens]
    return torch.nn.functional.scaled_dot_product_attention(
        queries, used[..., :key_dim], used[..., value_columns or slice(key_dim, None)], attn_mask=mask, scale=scaling
    )


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` in bounded memory: the same arguments and results, query rows taken in chunks."""
    if mask is None and softcap is None and queries.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, scale=scaling)
        return out.float(), lse.float()
    parts = []
    for start in range(0, queries.shape[2], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        parts.append(reference.attention(queries[:, :, rows], keys, values, scaling, part, softcap))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def gather_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, addresses: torch.Tensor, target: torch.Tensor
) -> None:
    """`reference.gather_blocks` by the host, whatever the target's device: each block of the target contiguous."""
    rows, heads, entries = mask.nonzero(as_tuple=True)
    block_bytes = target.shape[3] * target.shape[4] * target.element_size()
    sources = (addresses[rows, blocks[rows, heads, entries]] + heads * block_bytes).tolist()
    slots = slots[rows, heads, entries]
    if target.device.type == "cpu":
        strides = [stride * target.element_size() for stride in target.stride()[:3]]
        places = rows * strides[0] + heads * strides[1] + slots * strides[2]
        destinations = (places + target.data_ptr()).tolist()
        for destination, source in zip(destinations, sources, strict=True):
            ctypes.memmove(destination, source, block_bytes)
        return
    staging = torch.empty(len(sources), *target.shape[3:], dtype=target.dtype)
    for number, source in enumerate(sources):
        ctypes.memmove(staging.data_ptr() + number * block_bytes, source, block_bytes)
    target[rows, heads, slots] = staging.to(target.device)
