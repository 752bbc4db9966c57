"""Scores of all blocks by packed low-bit keys, which are expanded on the way: first pass of `score_int2` and `score_int1`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import MAX_DIM
from oasis_cache.kernels.triton_ops.launch import check_shape, launch, row_tile, split, tile
from oasis_cache.kernels.triton_ops.rank_blocks import launch_rank
from oasis_cache.kernels.triton_ops.scoring import MAX_SPLITS, add_split, check_scoring, store_split
from oasis_cache.kernels.triton_ops.tiles import LN_2, LOG2_E, dot, finite, head_of_program, narrow

TILE_TOKENS = 128  # tokens whose keys a program expands at a time
TILE_ROWS = {2: (8, 16, 32), 4: (8, 16)}  # query rows at a time that can be launched, by element size


@triton.jit
def _add_plane(
    b_scores,
    b_codes,
    b_query,
    p_low,
    p_step,
    o_block,
    m_block,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PLANE_DIM: tl.constexpr,
    PLANE_PAD: tl.constexpr,
):
    """Expand one plane of packed keys and add its part of the scores: [tokens, PLANE_PAD] x [PLANE_PAD, rows]."""
    o_channel = PLANE * PLANE_DIM + tl.arange(0, PLANE_PAD)
    m_channel = (tl.arange(0, PLANE_PAD) < PLANE_DIM) & (o_channel < KEY_DIM)
    m_load = m_block[:, None] & m_channel[None, :]
    o_load = o_block[:, None] * KEY_DIM + o_channel[None, :]
    # [TILE_BLOCKS, PLANE_PAD]
    b_low = tl.load(p_low + o_load, mask=m_load, other=0.0).to(tl.float32)
    b_step = tl.load(p_step + o_load, mask=m_load, other=0.0).to(tl.float32)
    if BITS == 1:  # low holds the mean, step the mean deviation
        b_low -= b_step
        b_step *= 2.0
    # A code put on top of the mantissa of 1.0 reads 1 + code / 2**BITS: cheaper than converting integers.
    b_low -= b_step * (1 << BITS)
    b_step *= 1 << BITS
    # [TILE_BLOCKS, BLOCK_PAD, PLANE_PAD]
    b_ones = ((b_codes << (23 - BITS - PLANE * BITS)) & (((1 << BITS) - 1) << (23 - BITS))) | 0x3F800000
    b_keys = b_low[:, None, :] + b_step[:, None, :] * b_ones.to(tl.float32, bitcast=True)
    b_keys = narrow(b_keys, b_query.dtype)
    return dot(tl.reshape(b_keys, [b_codes.shape[0] * b_codes.shape[1], PLANE_PAD]), b_query, b_scores)


@triton.jit
def _load_plane(
    p_query,
    stride_qr,
    o_row,
    query_rows,
    PLANE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PLANE_DIM: tl.constexpr,
    PLANE_PAD: tl.constexpr,
):
    """One plane's channels of the queries: [PLANE_PAD, rows]."""
    o_channel = PLANE * PLANE_DIM + tl.arange(0, PLANE_PAD)
    m_channel = (tl.arange(0, PLANE_PAD) < PLANE_DIM) & (o_channel < KEY_DIM)
    return tl.load(
        p_query + o_row[None, :] * stride_qr + o_channel[:, None],
        mask=m_channel[:, None] & (o_row < query_rows)[None, :],
        other=0.0,
    )


@triton.jit(do_not_specialize=["num_blocks", "tiles_per_split"])
def _packed_kernel(
    p_query,  # [batch, kv_heads, query_rows, KEY_DIM]
    p_codes,  # [batch, kv_heads, capacity, BLOCK_SIZE, PLANE_DIM] uint8
    p_low,  # [batch, kv_heads, capacity, KEY_DIM]
    p_step,
    p_visible,  # [batch, num_blocks, BLOCK_SIZE] uint8
    p_log_mass,  # [batch * kv_heads, query_rows, num_blocks] float32
    p_lse,  # [batch * kv_heads, splits, query_rows] float32
    stride_qb,
    stride_qh,
    stride_qr,
    stride_cb,
    stride_ch,
    stride_sb,
    stride_sh,
    stride_vb,
    kv_heads,
    query_rows,
    num_blocks,
    tiles_per_split,
    scaling,
    BITS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PLANE_DIM: tl.constexpr,
    PLANE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_row = (tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    p_query += i_batch * stride_qb + i_kv * stride_qh
    p_codes += i_batch * stride_cb + i_kv * stride_ch
    p_low += i_batch * stride_sb + i_kv * stride_sh
    p_step += i_batch * stride_sb + i_kv * stride_sh
    # [PLANE_PAD, TILE_ROWS] each
    b_queries = (
        _load_plane(p_query, stride_qr, o_row, query_rows, 0, KEY_DIM, PLANE_DIM, PLANE_PAD),
        _load_plane(p_query, stride_qr, o_row, query_rows, 1, KEY_DIM, PLANE_DIM, PLANE_PAD),
        _load_plane(p_query, stride_qr, o_row, query_rows, 2, KEY_DIM, PLANE_DIM, PLANE_PAD),
        _load_plane(p_query, stride_qr, o_row, query_rows, 3, KEY_DIM, PLANE_DIM, PLANE_PAD),
    )
    if BITS == 1:
        b_more_queries = (
            _load_plane(p_query, stride_qr, o_row, query_rows, 4, KEY_DIM, PLANE_DIM, PLANE_PAD),
            _load_plane(p_query, stride_qr, o_row, query_rows, 5, KEY_DIM, PLANE_DIM, PLANE_PAD),
            _load_plane(p_query, stride_qr, o_row, query_rows, 6, KEY_DIM, PLANE_DIM, PLANE_PAD),
            _load_plane(p_query, stride_qr, o_row, query_rows, 7, KEY_DIM, PLANE_DIM, PLANE_PAD),
        )
    # [TILE_ROWS]
    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    o_inside = tl.arange(0, BLOCK_PAD)
    m_inside = o_inside < BLOCK_SIZE
    o_byte = tl.arange(0, PLANE_PAD)
    first_tile = i_split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(num_blocks, TILE_BLOCKS))
    for i_tile in range(first_tile, last_tile):
        o_block = (i_tile * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)).to(tl.int64)
        m_block = o_block < num_blocks
        # [TILE_BLOCKS, BLOCK_PAD]
        o_token = o_block[:, None] * BLOCK_SIZE + o_inside[None, :]
        m_token = m_block[:, None] & m_inside[None, :]
        # [TILE_BLOCKS, BLOCK_PAD, PLANE_PAD]
        b_codes = tl.load(
            p_codes + o_token[:, :, None] * PLANE_DIM + o_byte[None, None, :],
            mask=m_token[:, :, None] & (o_byte < PLANE_DIM)[None, None, :],
            other=0,
        ).to(tl.int32)
        # [TILE_BLOCKS * BLOCK_PAD, TILE_ROWS]
        b_s = tl.zeros([TILE_BLOCKS * BLOCK_PAD, TILE_ROWS], tl.float32)
        for plane in tl.static_range(4):
            b_s = _add_plane(
                b_s,
                b_codes,
                b_queries[plane],
                p_low,
                p_step,
                o_block,
                m_block,
                plane,
                BITS,
                KEY_DIM,
                PLANE_DIM,
                PLANE_PAD,
            )
        if BITS == 1:
            for plane in tl.static_range(4):
                b_s = _add_plane(
                    b_s, b_codes, b_more_queries[plane], p_low, p_step, o_block, m_block, 4 + plane, BITS, KEY_DIM, PLANE_DIM,
                    PLANE_PAD,
                )  # fmt: skip
        if HAS_VISIBLE:
            m_token &= tl.load(p_visible + i_batch * stride_vb + o_token, mask=m_token, other=0) != 0
        # [TILE_BLOCKS, BLOCK_PAD, TILE_ROWS] -> [TILE_BLOCKS, TILE_ROWS]
        b_s = tl.reshape(b_s, [TILE_BLOCKS, BLOCK_PAD, TILE_ROWS]) * (scaling * LOG2_E)
        b_s = tl.where(m_token[:, :, None], b_s, float("-inf"))
        b_top = finite(tl.max(b_s, 1))
        b_log_mass = (b_top + tl.log2(tl.sum(tl.exp2(b_s - b_top[:, None, :]), 1))) * LN_2
        tl.store(
            p_log_mass + (i_head * query_rows + o_row[None, :]) * num_blocks + o_block[:, None],
            b_log_mass,
            mask=m_block[:, None] & (o_row < query_rows)[None, :],
        )
        b_max, b_sum = add_split(b_log_mass, b_max, b_sum)
    store_split(p_lse, i_head, i_split, tl.num_programs(0), o_row, query_rows, b_max, b_sum)


def _launch_packed(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    rows: int,
    scaling: float,
    visible: torch.Tensor | None,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, kv_heads, query_rows, key_dim = queries.shape
    num_blocks, block_size, plane_dim = codes.shape[2:]
    block_pad = tile(block_size, at_least=1)
    tile_blocks = max(1, TILE_TOKENS // block_pad)
    tile_rows = row_tile(query_rows, TILE_ROWS[queries.element_size()], queries.device)
    row_tiles = triton.cdiv(query_rows, tile_rows)
    tiles = triton.cdiv(num_blocks, tile_blocks)
    splits = splits or split(tiles, batch * kv_heads * row_tiles, queries.device, MAX_SPLITS)
    log_mass = queries.new_empty(batch, kv_heads, query_rows, num_blocks, dtype=torch.float32)
    lse = queries.new_empty(batch, kv_heads, splits, query_rows, dtype=torch.float32)
    launch(
        _packed_kernel,
        (splits, batch * kv_heads, row_tiles),
        queries.device,
        p_query=queries,
        p_codes=codes,
        p_low=low,
        p_step=step,
        p_visible=visible.view(torch.uint8) if visible is not None else codes,
        p_log_mass=log_mass,
        p_lse=lse,
        stride_qb=queries.stride(0),
        stride_qh=queries.stride(1),
        stride_qr=queries.stride(2),
        stride_cb=codes.stride(0),
        stride_ch=codes.stride(1),
        stride_sb=low.stride(0),
        stride_sh=low.stride(1),
        stride_vb=visible.stride(0) if visible is not None else 0,
        kv_heads=kv_heads,
        query_rows=query_rows,
        num_blocks=num_blocks,
        tiles_per_split=triton.cdiv(tiles, splits),
        scaling=scaling,
        BITS=bits,
        KEY_DIM=key_dim,
        PLANE_DIM=plane_dim,
        PLANE_PAD=tile(plane_dim),
        BLOCK_SIZE=block_size,
        BLOCK_PAD=block_pad,
        TILE_BLOCKS=tile_blocks,
        TILE_ROWS=tile_rows,
        HAS_VISIBLE=visible is not None,
        num_warps=4,
        num_stages=2,
    )
    scores, best = launch_rank(log_mass, lse, rows, unseen=-1.0)
    return scores, best, log_mass


def _score_packed(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    group: int,
    scaling: float,
    visible: torch.Tensor | None,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_blocks, block_size = codes.shape[2:4]
    arrays = {"codes": codes, "low": low, "step": step}
    queries, visible, rows = check_scoring(queries, group, num_blocks, block_size, visible, arrays)
    batch, kv_heads, _, key_dim = queries.shape
    check_shape("codes", codes, (batch, kv_heads, num_blocks, block_size, -(-key_dim * bits // 8)))
    check_shape("low", low, (batch, kv_heads, num_blocks, key_dim))
    check_shape("step", step, (batch, kv_heads, num_blocks, key_dim))
    if codes.dtype != torch.uint8 or low.dtype != torch.bfloat16 or step.dtype != torch.bfloat16:
        raise ValueError(f"codes must be uint8, low and step bfloat16; got {codes.dtype}, {low.dtype}, {step.dtype}")
    if low.stride() != step.stride():
        raise ValueError(f"low and step must have the same strides, got {low.stride()} and {step.stride()}")
    if block_size > MAX_DIM:
        raise ValueError(f"blocks of {block_size} tokens are above {MAX_DIM}")
    return _launch_packed(queries, codes, low, step, bits, rows, scaling, visible, splits)


def score_int2(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_int2`: the mass each row would give to each block, by packed 2-bit keys.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim] float32, float16 or bfloat16.
        codes: [batch, kv_heads, blocks, block_size, ceil(key_dim / 4)] uint8, contiguous within a KV head.
        low, step: [batch, kv_heads, blocks, key_dim] bfloat16, as `reference.quantise_int2` makes them.
        group: Query heads per KV head.
        visible: [batch, blocks, block_size] bool, False for padding; None: all tokens are real.
        splits: Parts that the blocks of one KV head are cut into; None: as many as fill the device.

    Returns:
        scores [batch, kv_heads, rows, blocks], their maximum over rows [batch, kv_heads, blocks], and log_mass
        [batch, kv_heads, group * rows, blocks], all float32; see `reference.rank_rows`.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    return _score_packed(queries, codes, low, step, 2, group, scaling, visible, splits)


def score_int1(
    queries: torch.Tensor,
    codes: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`score_int2` for the one-bit keys of `reference.quantise_int1`: codes [..., block_size, ceil(key_dim / 8)]."""
    return _score_packed(queries, codes, mean, deviation, 1, group, scaling, visible, splits)
