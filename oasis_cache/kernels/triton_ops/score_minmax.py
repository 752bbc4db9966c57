"""Scores of all blocks by channel-wise minimum and maximum of their keys (Quest, section 3.3; OasisKV)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.triton_ops.launch import check_shape, launch, row_tile, split, tile
from oasis_cache.kernels.triton_ops.rank_blocks import launch_rank
from oasis_cache.kernels.triton_ops.scoring import MAX_SPLITS, add_split, check_scoring, store_split
from oasis_cache.kernels.triton_ops.tiles import dot, head_of_program

TILE_ROWS = {2: (8, 16, 32), 4: (8, 16)}  # query rows at a time that can be launched, by element size
# Blocks at a time, by padded key width and element size: 32 KiB of bounds or less.
TILE_BLOCKS = {(64, 2): 64, (128, 2): 64, (256, 2): 32, (64, 4): 64, (128, 4): 32, (256, 4): 16}


@triton.jit(do_not_specialize=["num_blocks", "tiles_per_split"])
def _minmax_kernel(
    p_query,  # [batch, kv_heads, query_rows, KEY_DIM]
    p_low,  # [batch, kv_heads, capacity, KEY_DIM]
    p_high,
    p_visible,  # [batch, num_blocks, BLOCK_SIZE] uint8
    p_log_mass,  # [batch * kv_heads, query_rows, num_blocks] float32
    p_lse,  # [batch * kv_heads, splits, query_rows] float32
    stride_qb,
    stride_qh,
    stride_qr,
    stride_sb,
    stride_sh,
    stride_vb,
    kv_heads,
    query_rows,
    num_blocks,
    tiles_per_split,
    scaling,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_row = (tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    o_channel = tl.arange(0, KEY_PAD)
    m_channel = o_channel < KEY_DIM
    # [KEY_PAD, TILE_ROWS]
    b_query = tl.load(
        p_query + i_batch * stride_qb + i_kv * stride_qh + o_row[None, :] * stride_qr + o_channel[:, None],
        mask=m_channel[:, None] & (o_row < query_rows)[None, :],
        other=0.0,
    )
    b_positive = tl.maximum(b_query.to(tl.float32), 0.0).to(b_query.dtype)
    b_negative = tl.minimum(b_query.to(tl.float32), 0.0).to(b_query.dtype)
    p_low += i_batch * stride_sb + i_kv * stride_sh
    p_high += i_batch * stride_sb + i_kv * stride_sh
    # [TILE_ROWS]
    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    first_tile = i_split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_blocks, TILE_BLOCKS))
    for i_tile in range(first_tile, last_tile):
        o_block = (i_tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)).to(tl.int64)
        m_block = o_block < num_blocks
        m_load = m_block[:, None] & m_channel[None, :]
        # [TILE_BLOCKS, KEY_PAD]
        b_low = tl.load(p_low + o_block[:, None] * KEY_DIM + o_channel[None, :], mask=m_load, other=0.0)
        b_high = tl.load(p_high + o_block[:, None] * KEY_DIM + o_channel[None, :], mask=m_load, other=0.0)
        # [TILE_BLOCKS, TILE_ROWS]
        b_s = dot(b_high, b_positive, tl.zeros([TILE_BLOCKS, TILE_ROWS], tl.float32))
        b_s = dot(b_low, b_negative, b_s)
        if HAS_VISIBLE:
            o_inside = tl.arange(0, BLOCK_PAD)
            # [TILE_BLOCKS, BLOCK_PAD]
            b_visible = tl.load(
                p_visible + i_batch * stride_vb + o_block[:, None] * BLOCK_SIZE + o_inside[None, :],
                mask=m_block[:, None] & (o_inside < BLOCK_SIZE)[None, :],
                other=0,
            )
            m_block &= tl.max(b_visible.to(tl.int32), 1) != 0
        b_log_mass = tl.where(m_block[:, None], b_s * scaling, float("-inf"))
        tl.store(
            p_log_mass + (i_head * query_rows + o_row[None, :]) * num_blocks + o_block[:, None],
            b_log_mass,
            mask=(o_block < num_blocks)[:, None] & (o_row < query_rows)[None, :],
        )
        b_max, b_sum = add_split(b_log_mass, b_max, b_sum)
    store_split(p_lse, i_head, i_split, tl.num_programs(0), o_row, query_rows, b_max, b_sum)


def _launch_minmax(
    queries: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    rows: int,
    scaling: float,
    visible: torch.Tensor | None,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, kv_heads, query_rows, key_dim = queries.shape
    num_blocks = low.shape[2]
    block_size = visible.shape[2] if visible is not None else 1
    tile_rows = row_tile(query_rows, TILE_ROWS[queries.element_size()], queries.device)
    row_tiles = triton.cdiv(query_rows, tile_rows)
    key_pad = tile(key_dim, 64)
    tile_blocks = TILE_BLOCKS[key_pad, queries.element_size()]
    tiles = triton.cdiv(num_blocks, tile_blocks)
    splits = splits or split(tiles, batch * kv_heads * row_tiles, queries.device, MAX_SPLITS)
    log_mass = queries.new_empty(batch, kv_heads, query_rows, num_blocks, dtype=torch.float32)
    lse = queries.new_empty(batch, kv_heads, splits, query_rows, dtype=torch.float32)
    launch(
        _minmax_kernel,
        (splits, batch * kv_heads, row_tiles),
        queries.device,
        p_query=queries,
        p_low=low,
        p_high=high,
        p_visible=visible.view(torch.uint8) if visible is not None else low,
        p_log_mass=log_mass,
        p_lse=lse,
        stride_qb=queries.stride(0),
        stride_qh=queries.stride(1),
        stride_qr=queries.stride(2),
        stride_sb=low.stride(0),
        stride_sh=low.stride(1),
        stride_vb=visible.stride(0) if visible is not None else 0,
        kv_heads=kv_heads,
        query_rows=query_rows,
        num_blocks=num_blocks,
        tiles_per_split=triton.cdiv(tiles, splits),
        scaling=scaling,
        KEY_DIM=key_dim,
        KEY_PAD=key_pad,
        BLOCK_SIZE=block_size,
        BLOCK_PAD=tile(block_size, at_least=1),
        TILE_BLOCKS=tile_blocks,
        TILE_ROWS=tile_rows,
        HAS_VISIBLE=visible is not None,
        num_warps=4,
        num_stages=2,
    )
    scores, best = launch_rank(log_mass, lse, rows, unseen=-1.0)
    return scores, best, log_mass


def score_minmax(
    queries: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_minmax`: the same by channel-wise bounds (Quest, section 3.3).

    Args:
        low, high: [batch, kv_heads, blocks, key_dim] in the queries' dtype, contiguous within a KV head.

    Returns:
        As `score_int2`; log_mass is the upper bound of the scaled scores.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    num_blocks = low.shape[2]
    block_size = visible.shape[2] if visible is not None and visible.dim() == 3 else None
    queries, visible, rows = check_scoring(queries, group, num_blocks, block_size, visible, {"low": low, "high": high})
    check_shape("low", low, (*queries.shape[:2], num_blocks, queries.shape[3]))
    check_shape("high", high, (*queries.shape[:2], num_blocks, queries.shape[3]))
    if low.dtype != queries.dtype or high.dtype != queries.dtype:
        raise ValueError(f"low and high must be {queries.dtype} as the queries, got {low.dtype} and {high.dtype}")
    if low.stride() != high.stride():
        raise ValueError(f"low and high must have the same strides, got {low.stride()} and {high.stride()}")
    return _launch_minmax(queries, low, high, rows, scaling, visible, splits)
