"""Attention of a decode step over slots and window: flash-decoding, split over tokens and merged by log-sum-exp.

One program attends a tile of query rows (new tokens x query group) of one KV head to one split of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import KERNEL_DTYPES, MASS_BLOCKS, MAX_DIM
from oasis_cache.kernels.triton_ops.launch import (
    check_devices,
    check_shape,
    is_hip,
    launch,
    split,
    stages,
    tile,
    unit_stride,
)
from oasis_cache.kernels.triton_ops.rank_blocks import launch_rank
from oasis_cache.kernels.triton_ops.tiles import LN_2, LOG2_E, dot, finite, head_of_program, narrow

MAX_SPLITS = 32


@dataclass(frozen=True)
class Tiling:
    """How a program of `_attend_kernel` cuts its work: query rows and tokens at a time, and warps."""

    rows: int
    tokens: int
    num_warps: int


WIDTHS = ((64, 64), (128, 128), (256, 128), (256, 256))  # of keys and values, padded


def _tilings() -> dict[tuple[int, int, int, bool], Tiling]:
    """All tilings that can be launched, by padded widths, element size, and whether there are many rows."""
    tilings = {}
    for key_pad, value_pad in WIDTHS:
        tokens = 32768 // (key_pad + value_pad)  # 32 KiB of keys and values in float16 or less
        tokens = min(64, 1 << (tokens // 2).bit_length() - 1)
        tilings[key_pad, value_pad, 2, False] = Tiling(16, tokens, num_warps=4)
        tilings[key_pad, value_pad, 2, True] = Tiling(32, tokens, num_warps=8)
        # Without matrix units the accumulators of 16 rows fill the registers.
        tilings[key_pad, value_pad, 4, False] = Tiling(16, max(16, tokens // 2), num_warps=8)
        tilings[key_pad, value_pad, 4, True] = tilings[key_pad, value_pad, 4, False]
    return tilings


TILINGS = _tilings()
NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2


@triton.jit(
    do_not_specialize=["num_tokens", "slot_tokens", "window_start", "sliding_window", "split_tokens", "mass_blocks"]
)
def _attend_kernel(
    p_query,  # [batch, kv_heads, query_rows, KEY_DIM]
    p_kv,  # [batch, kv_heads, capacity, KEY_DIM + VALUE_DIM]
    p_table,  # [batch, kv_heads, slots] int64
    p_mask,  # [batch, kv_heads, query_rows, num_tokens]
    p_out,  # [batch * kv_heads, splits, query_rows, VALUE_DIM] float32
    p_lse,  # [batch * kv_heads, splits, query_rows] float32
    p_log_mass,  # [batch * kv_heads, query_rows, mass_blocks] float32
    stride_qb,
    stride_qh,
    stride_qr,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_tb,
    stride_th,
    stride_mb,
    stride_mh,
    stride_mr,
    kv_heads,
    query_rows,
    rows,
    num_tokens,
    slot_tokens,
    window_start,
    sliding_window,
    split_tokens,
    mass_blocks,
    scaling,
    softcap,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASS_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MASK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    m_row = o_row < query_rows
    # [TILE_ROWS]: the place of each row's own token among the tokens
    o_own = num_tokens - rows + o_row % rows
    o_row = o_row.to(tl.int64)
    o_key = tl.arange(0, KEY_PAD)
    o_value = tl.arange(0, VALUE_PAD)
    # [TILE_ROWS, KEY_PAD]
    b_query = tl.load(
        p_query + i_batch * stride_qb + i_kv * stride_qh + o_row[:, None] * stride_qr + o_key[None, :],
        mask=m_row[:, None] & (o_key < KEY_DIM)[None, :],
        other=0.0,
    )
    p_kv += i_batch * stride_kb + i_kv * stride_kh
    p_table += i_batch * stride_tb + i_kv * stride_th
    p_mask += i_batch * stride_mb + i_kv * stride_mh
    # [TILE_ROWS]
    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    # [TILE_ROWS, VALUE_PAD]
    b_out = tl.zeros([TILE_ROWS, VALUE_PAD], tl.float32)
    first_token = i_split * split_tokens
    last_token = tl.minimum(first_token + split_tokens, num_tokens)
    for i_token in range(first_token, last_token, TILE_TOKENS):
        o_token = (i_token + tl.arange(0, TILE_TOKENS)).to(tl.int64)
        m_token = o_token < last_token
        # [KEY_PAD, TILE_TOKENS]
        b_keys = tl.load(
            p_kv + o_token[None, :] * stride_kt + o_key[:, None],
            mask=(o_key < KEY_DIM)[:, None] & m_token[None, :],
            other=0.0,
        )
        if HAS_TABLE:
            m_slot = o_token < slot_tokens
            # [TILE_TOKENS]
            b_block = tl.load(p_table + o_token // BLOCK_SIZE, mask=m_slot, other=0)
            m_token &= b_block >= 0
        m_visible = m_token[None, :] & (o_token[None, :] <= o_own[:, None])
        if HAS_WINDOW:
            b_position = window_start + o_token - slot_tokens
            if HAS_TABLE:
                b_position = tl.where(m_slot, b_block * BLOCK_SIZE + o_token % BLOCK_SIZE, b_position)
            m_visible &= b_position[None, :] > (window_start + o_own - slot_tokens)[:, None] - sliding_window
        # [TILE_ROWS, TILE_TOKENS], in units of log 2
        b_s = dot(b_query, b_keys, tl.zeros([TILE_ROWS, TILE_TOKENS], tl.float32))
        if HAS_SOFTCAP:
            b_cap = 1.0 - 2.0 / (1.0 + tl.exp2(b_s * (scaling * 2.0 * LOG2_E / softcap)))  # tanh
            b_s = b_cap * (softcap * LOG2_E)
        else:
            b_s = b_s * (scaling * LOG2_E)
        if MASK != 0:
            b_mask = tl.load(
                p_mask + o_row[:, None] * stride_mr + o_token[None, :], mask=m_row[:, None] & m_token[None, :], other=0
            )
            if MASK == 1:
                m_visible &= b_mask != 0
            else:
                b_s += b_mask.to(tl.float32) * LOG2_E
        b_s = tl.where(m_visible, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_safe = finite(b_new)
        b_weight = tl.exp2(b_s - b_safe[:, None])
        b_shrink = tl.exp2(b_max - b_safe)
        b_sum = b_sum * b_shrink + tl.sum(b_weight, 1)
        b_max = b_new
        # [TILE_TOKENS, VALUE_PAD]; empty slots hold anything, and 0 times NaN is NaN
        b_values = tl.load(
            p_kv + o_token[:, None] * stride_kt + KEY_DIM + o_value[None, :],
            mask=m_token[:, None] & (o_value < VALUE_DIM)[None, :],
            other=0.0,
        )
        b_out = dot(narrow(b_weight, b_values.dtype), b_values, b_out * b_shrink[:, None])
        if MASS_BLOCK > 0:
            # [TILE_ROWS, TILE_TOKENS / MASS_BLOCK]
            b_parts = tl.reshape(b_s, [TILE_ROWS, TILE_TOKENS // MASS_BLOCK, MASS_BLOCK])
            b_top = finite(tl.max(b_parts, 2))
            b_log_mass = (b_top + tl.log2(tl.sum(tl.exp2(b_parts - b_top[:, :, None]), 2))) * LN_2
            o_block = i_token // MASS_BLOCK + tl.arange(0, TILE_TOKENS // MASS_BLOCK)
            tl.store(
                p_log_mass + (i_head * query_rows + o_row[:, None]) * mass_blocks + o_block[None, :],
                b_log_mass,
                mask=m_row[:, None] & (o_block < mass_blocks)[None, :],
            )
    o_part = (i_head * tl.num_programs(0) + i_split) * query_rows + o_row
    b_norm = tl.where(b_sum > 0.0, b_sum, 1.0)
    tl.store(p_lse + o_part, (finite(b_max) + tl.log2(b_sum)) * LN_2, mask=m_row)
    tl.store(
        p_out + o_part[:, None] * VALUE_DIM + o_value[None, :],
        b_out / b_norm[:, None],
        mask=m_row[:, None] & (o_value < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    p_parts,  # [batch * kv_heads, num_splits, query_rows, VALUE_DIM] float32
    p_part_lse,  # [batch * kv_heads, num_splits, query_rows] float32
    p_sinks,  # [kv_heads, group]
    p_out,  # [batch * kv_heads, query_rows, VALUE_DIM]
    p_lse,  # [batch * kv_heads, query_rows] float32
    kv_heads,
    query_rows,
    rows,
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_head, _, i_kv = head_of_program(kv_heads)
    o_split = tl.arange(0, SPLITS_PAD)
    o_value = tl.arange(0, VALUE_PAD)
    m_split = o_split < num_splits
    m_value = o_value < VALUE_DIM
    # [SPLITS_PAD]
    o_part = (i_head * num_splits + o_split) * query_rows + i_row
    b_lse = tl.load(p_part_lse + o_part, mask=m_split, other=float("-inf"))
    b_top = finite(tl.max(b_lse, 0))
    b_weight = tl.exp(b_lse - b_top)
    b_sum = tl.sum(b_weight, 0)
    tl.store(p_lse + i_head * query_rows + i_row, b_top + tl.log(b_sum))
    if HAS_SINKS:
        b_sink = tl.load(p_sinks + i_kv * (query_rows // rows) + i_row // rows).to(tl.float32)
        b_peak = tl.maximum(b_top, b_sink)
        b_weight = b_weight * tl.exp(b_top - b_peak)
        b_sum = b_sum * tl.exp(b_top - b_peak) + tl.exp(b_sink - b_peak)
    b_weight = b_weight / tl.where(b_sum > 0.0, b_sum, 1.0)
    # [SPLITS_PAD, VALUE_PAD]
    b_parts = tl.load(
        p_parts + o_part[:, None] * VALUE_DIM + o_value[None, :], mask=m_split[:, None] & m_value[None, :], other=0.0
    )
    b_out = tl.sum(b_parts * b_weight[:, None], 0)
    tl.store(
        p_out + (i_head * query_rows + i_row) * VALUE_DIM + o_value, narrow(b_out, p_out.dtype.element_ty), mask=m_value
    )


def _launch(
    queries: torch.Tensor,
    kv: torch.Tensor,
    key_dim: int,
    num_tokens: int,
    rows: int,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    block_of_slot: torch.Tensor | None,
    block_size: int,
    window_start: int,
    sliding_window: int | None,
    mass_block: int | None,
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    batch, kv_heads, query_rows, _ = queries.shape
    value_dim = kv.shape[3] - key_dim
    device = queries.device
    key_pad, value_pad = next(width for width in WIDTHS if key_dim <= width[0] and value_dim <= width[1])
    tiling = TILINGS[key_pad, value_pad, kv.element_size(), query_rows > 16 and not is_hip(device)]
    row_tiles = triton.cdiv(query_rows, tiling.rows)
    token_tiles = triton.cdiv(num_tokens, tiling.tokens)
    splits = splits or split(token_tiles, batch * kv_heads * row_tiles, device, MAX_SPLITS)
    parts = queries.new_empty(batch, kv_heads, splits, query_rows, value_dim, dtype=torch.float32)
    part_lse = queries.new_empty(batch, kv_heads, splits, query_rows, dtype=torch.float32)
    log_mass = None
    if mass_block is not None:
        log_mass = queries.new_empty(batch, kv_heads, query_rows, -(-num_tokens // mass_block), dtype=torch.float32)
    launch(
        _attend_kernel,
        (splits, batch * kv_heads, row_tiles),
        device,
        p_query=queries,
        p_kv=kv,
        p_table=block_of_slot if block_of_slot is not None else kv,
        p_mask=kv if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask,
        p_out=parts,
        p_lse=part_lse,
        p_log_mass=log_mass if log_mass is not None else part_lse,
        stride_qb=queries.stride(0),
        stride_qh=queries.stride(1),
        stride_qr=queries.stride(2),
        stride_kb=kv.stride(0),
        stride_kh=kv.stride(1),
        stride_kt=kv.stride(2),
        stride_tb=block_of_slot.stride(0) if block_of_slot is not None else 0,
        stride_th=block_of_slot.stride(1) if block_of_slot is not None else 0,
        stride_mb=mask.stride(0) if mask is not None else 0,
        stride_mh=mask.stride(1) if mask is not None and mask.shape[1] > 1 else 0,
        stride_mr=mask.stride(2) if mask is not None else 0,
        kv_heads=kv_heads,
        query_rows=query_rows,
        rows=rows,
        num_tokens=num_tokens,
        slot_tokens=block_of_slot.shape[2] * block_size if block_of_slot is not None else 0,
        window_start=window_start,
        sliding_window=sliding_window if sliding_window is not None else 0,
        split_tokens=triton.cdiv(token_tiles, splits) * tiling.tokens,
        mass_blocks=log_mass.shape[3] if log_mass is not None else 0,
        scaling=scaling,
        softcap=softcap if softcap is not None else 1.0,
        KEY_DIM=key_dim,
        KEY_PAD=key_pad,
        VALUE_DIM=value_dim,
        VALUE_PAD=value_pad,
        BLOCK_SIZE=block_size if block_of_slot is not None else 1,
        MASS_BLOCK=mass_block or 0,
        TILE_ROWS=tiling.rows,
        TILE_TOKENS=tiling.tokens,
        MASK=NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK,
        HAS_SOFTCAP=softcap is not None,
        HAS_TABLE=block_of_slot is not None,
        HAS_WINDOW=sliding_window is not None,
        num_warps=tiling.num_warps,
        num_stages=stages(device, 3),
    )
    out = queries.new_empty(batch, kv_heads, query_rows, value_dim)
    lse = queries.new_empty(batch, kv_heads, query_rows, dtype=torch.float32)
    launch(
        _merge_kernel,
        (query_rows, batch * kv_heads),
        device,
        p_parts=parts,
        p_part_lse=part_lse,
        p_sinks=sinks if sinks is not None else part_lse,
        p_out=out,
        p_lse=lse,
        kv_heads=kv_heads,
        query_rows=query_rows,
        rows=rows,
        num_splits=splits,
        VALUE_DIM=value_dim,
        VALUE_PAD=value_pad,
        SPLITS_PAD=tile(splits, at_least=1),
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )
    if log_mass is None:
        return out, lse, None
    return out, lse, launch_rank(log_mass, part_lse, rows, unseen=0.0, sinks=sinks)[0]


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
    mass_block: int | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`reference.sparse_attention` (FlashDecoding: Dao et al. 2023), without a wait for the device.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim] float32, float16 or bfloat16, head major.
        kv: [batch, kv_heads, capacity, key_dim + value_dim] in the same dtype; the first `num_tokens` are in use, the last `rows`
            of them are the rows' own tokens.
        mask: None, or [batch, kv_heads or 1, group * rows, num_tokens], bool or additive, on top of causality.
        softcap: Scores become softcap * tanh(score / softcap) before masking.
        sinks: [kv_heads, group] logits, or None.
        block_of_slot: [batch, kv_heads, slots] int64: the block that each of the first `slots * block_size` tokens belongs to,
            -1 for slots to leave out, whatever they hold. None: every token is there.
        block_size: Tokens per slot.
        window_start: Position in the sequence of the first token behind the slots.
        sliding_window: A row sees its own and the `sliding_window` - 1 positions before; None: all.
        mass_block: Also return the attention mass of each `mass_block` tokens; a power of two.
        splits: Parts that the tokens of one KV head are cut into; None: as many as fill the device.

    Returns:
        out [batch, kv_heads, group * rows, value_dim] in the queries' dtype, lse [batch, kv_heads, group * rows] float32 (sinks
        not included), and mass [batch, kv_heads, rows, ceil(num_tokens / mass_block)] float32, mean over the group, or None.

    Raises:
        ValueError: A shape, dtype, layout or size is none of these.
    """
    check_devices(queries=queries, kv=kv, mask=mask, sinks=sinks, block_of_slot=block_of_slot)
    if queries.dim() != 4 or kv.dim() != 4 or queries.dtype not in KERNEL_DTYPES or kv.dtype != queries.dtype:
        raise ValueError(
            f"queries and kv must have 4 dimensions and one dtype of {KERNEL_DTYPES}, got {queries.dtype} "
            f"{tuple(queries.shape)} and {kv.dtype} {tuple(kv.shape)}"
        )
    batch, kv_heads, query_rows, _ = queries.shape
    check_shape("queries", queries, (batch, kv_heads, query_rows, key_dim))
    check_shape("kv", kv, (batch, kv_heads, None, None))
    value_dim = kv.shape[3] - key_dim
    if not (1 <= key_dim <= MAX_DIM and 1 <= value_dim <= MAX_DIM):
        raise ValueError(f"key_dim {key_dim} and value_dim {value_dim} must lie in [1, {MAX_DIM}]")
    if rows < 1 or query_rows % rows:
        raise ValueError(f"{query_rows} query rows are no multiple of rows={rows}")
    if not rows <= num_tokens <= kv.shape[2]:
        raise ValueError(f"num_tokens={num_tokens} must lie in [rows, capacity] = [{rows}, {kv.shape[2]}]")
    if kv.stride(3) != 1:
        raise ValueError(f"kv must be contiguous in its last dimension, got strides {kv.stride()}")
    if mask is not None:
        if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, kv_heads):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}; expected ({batch} or 1, {kv_heads} or 1, {query_rows}, {num_tokens})"
            )
        check_shape("mask", mask, (None, None, query_rows, num_tokens))
        if mask.dtype not in (torch.bool, *KERNEL_DTYPES):
            raise ValueError(f"mask must be bool or one of {KERNEL_DTYPES}, got {mask.dtype}")
        mask = unit_stride(mask).expand(batch, -1, -1, -1)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive")
    if sinks is not None:
        check_shape("sinks", sinks, (kv_heads, query_rows // rows))
        sinks = sinks.contiguous()
    if block_of_slot is not None:
        check_shape("block_of_slot", block_of_slot, (batch, kv_heads, None))
        if block_of_slot.dtype != torch.int64 or block_of_slot.shape[2] * block_size > num_tokens - rows:
            raise ValueError(
                f"block_of_slot must be int64 and its slots end before the rows' own tokens; got {block_of_slot.dtype}, "
                f"{block_of_slot.shape[2]} slots of {block_size} tokens, {num_tokens} tokens and {rows} rows"
            )
        block_of_slot = unit_stride(block_of_slot)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} must be at least 1")
    if mass_block is not None and mass_block not in MASS_BLOCKS:
        raise ValueError(f"mass_block={mass_block} must be one of {MASS_BLOCKS}")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits={splits} must lie in [1, {MAX_SPLITS}]")
    return _launch(
        unit_stride(queries), kv, key_dim, num_tokens, rows, scaling, mask, softcap, sinks, block_of_slot, block_size,
        window_start, sliding_window, mass_block, splits,
    )  # fmt: skip
