"""The operations of reference.py with PyTorch's fused attention where it can serve: the versions that run on a CPU."""

from __future__ import annotations

import ctypes

import torch

from oasis_cache.kernels import reference

QUERY_CHUNK = 128  # rows of scores of every query head held at a time where no fused attention serves


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
    diagonal: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` in bounded memory, by PyTorch's fused attention where that has a log-sum-exp: the same results.

    Args:
        queries, keys, values, scaling, mask, softcap: As those of `reference.attention`.
        diagonal: Without a mask: row r sees the first r + diagonal + 1 tokens only. None: all.
    """
    rows, tokens = queries.shape[2], keys.shape[2]
    if mask is None and diagonal is not None and diagonal < tokens - 1:
        return _below_diagonal(queries, keys, values, scaling, softcap, diagonal)
    if softcap is None and _has_fused(queries, keys, values):
        if mask is None:
            return _fused(queries, keys, values, scaling)
        if queries.device.type == "cpu":
            return _fused_with_mask(queries, keys, values, scaling, mask)
    parts = []
    for start in range(0, rows, QUERY_CHUNK):
        chunk = slice(start, start + QUERY_CHUNK)
        part = mask if mask is None or mask.shape[-2] == 1 else mask[..., chunk, :]
        parts.append(reference.attention(queries[:, :, chunk], keys, values, scaling, part, softcap))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _below_diagonal(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None,
    diagonal: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of rows of which each sees a token more than the one before: a causal square, the tokens before it, which all of
    its rows see, and the rows behind it, which see all tokens."""
    rows, tokens = queries.shape[2], keys.shape[2]
    first, start = max(0, -diagonal), max(0, diagonal)  # of the square: its row and its token
    side = min(rows - first, tokens - start)
    if side <= 0:
        out = queries.new_zeros(*queries.shape[:3], values.shape[3], dtype=torch.float32)
        return out, out.new_full(queries.shape[:3], float("-inf"))
    inside, behind = slice(first, first + side), slice(first + side, rows)
    square = queries[:, :, inside], keys[:, :, start : start + side], values[:, :, start : start + side]
    if softcap is None and _has_fused(*square):
        parts = [_fused(*square, scaling, causal=True)]
    else:
        causal = reference.causal_rows(side, side, queries.device)
        parts = [attention(*square, scaling, causal, softcap)]
    if behind.start < rows:
        parts.append(attention(queries[:, :, behind], keys[:, :, start:], values[:, :, start:], scaling, None, softcap))
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    if first:
        out = torch.nn.functional.pad(out, (0, 0, first, 0))
        lse = torch.nn.functional.pad(lse, (first, 0), value=float("-inf"))
    if start:
        before = attention(queries, keys[:, :, :start], values[:, :, :start], scaling, None, softcap)
        out, lse = reference.merge([before, (out, lse)])
    return out, lse


def _has_fused(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether PyTorch has a fused attention with a log-sum-exp for these: on CPUs, and on NVIDIA GPUs from Ampere on."""
    dim = keys.shape[-1]
    if dim != values.shape[-1] or not queries.dtype == keys.dtype == values.dtype:
        return False
    if queries.device.type == "cpu":
        return True
    return (
        queries.device.type == "cuda"
        and queries.dtype in (torch.float16, torch.bfloat16)
        and dim % 8 == 0
        and dim <= 256
        and torch.version.hip is None
        and torch.cuda.get_device_capability(queries.device) >= (8, 0)
    )


def _fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` without a mask, or of a square with the causal one."""
    if queries.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, is_causal=causal, scale=scaling
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            queries, keys, values, is_causal=causal, scale=scaling
        )[:2]
    return out.float(), lse.float()


def _fused_with_mask(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` with a mask, on a CPU."""
    if mask.dtype == torch.bool and bool(mask.all()):  # most pieces of a padded batch
        return _fused(queries, keys, values, scaling)
    added = mask
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
    added = added.to(queries.dtype).expand(*added.shape[:-2], queries.shape[2], keys.shape[2])
    while added.dim() < 4:
        added = added.unsqueeze(0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=added, scale=scaling
    )
    # Of a row that sees nothing PyTorch's log-sum-exp is 0.
    return out.float(), lse.float().masked_fill(added.isneginf().all(-1), float("-inf"))


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
