"""What the scoring kernels share: parts of the normalisers in the first pass, checks, and the second pass.

A scoring kernel writes the log-mass per query row and block, and for each split of the blocks its part of each row's
log-sum-exp; `rank_blocks` puts them together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import KERNEL_DTYPES, MAX_DIM
from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, unit_stride
from oasis_cache.kernels.triton_ops.tiles import finite

MAX_SPLITS = 64


@triton.jit
def add_split(b_log_mass, b_max, b_sum):
    """Enter a tile [blocks, rows] in the rows' running maximum and sum."""
    b_new = tl.maximum(b_max, tl.max(b_log_mass, 0))
    b_safe = finite(b_new)
    b_sum = b_sum * tl.exp(b_max - b_safe) + tl.sum(tl.exp(b_log_mass - b_safe[None, :]), 0)
    return b_new, b_sum


@triton.jit
def store_split(p_lse, i_head, i_split, splits, o_row, query_rows, b_max, b_sum):
    b_lse = finite(b_max) + tl.log(b_sum)
    tl.store(p_lse + (i_head * splits + i_split) * query_rows + o_row, b_lse, mask=o_row < query_rows)


def check_scoring(
    queries: torch.Tensor,
    group: int,
    num_blocks: int,
    block_size: int | None,
    visible: torch.Tensor | None,
    arrays: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Raise `ValueError` for what the kernels cannot take; queries and visible with contiguous last dimensions, and rows."""
    check_devices(queries=queries, visible=visible, **arrays)
    if queries.dim() != 4 or queries.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"queries must be [batch, kv_heads, group * rows, key_dim] in {KERNEL_DTYPES}, got {queries.dtype} "
            f"{tuple(queries.shape)}"
        )
    batch, kv_heads, query_rows, key_dim = queries.shape
    if key_dim > MAX_DIM:
        raise ValueError(f"key_dim {key_dim} is above {MAX_DIM}")
    if group < 1 or query_rows == 0 or query_rows % group:
        raise ValueError(f"{query_rows} query rows are no multiple of the group, {group}")
    if num_blocks < 1:
        raise ValueError("there must be at least one block to score")
    for name, array in arrays.items():
        if array.shape[:2] != (batch, kv_heads):
            raise ValueError(f"{name} has shape {tuple(array.shape)}; expected ({batch}, {kv_heads}, ...)")
        dense = 1
        for size, stride in zip(reversed(array.shape[2:]), reversed(array.stride()[2:]), strict=True):
            if size > 1 and stride != dense:
                raise ValueError(f"{name} must be contiguous within a KV head, got strides {array.stride()}")
            dense *= size
    if visible is not None:
        check_shape("visible", visible, (batch, num_blocks, block_size))
        if visible.dtype != torch.bool:
            raise ValueError(f"visible must be bool, got {visible.dtype}")
        if visible.shape[2] > MAX_DIM:
            raise ValueError(f"blocks of {visible.shape[2]} tokens are above {MAX_DIM}")
        if not visible[0].is_contiguous():
            visible = visible.contiguous()
    return unit_stride(queries), visible, query_rows // group
