"""Second pass of scoring and of attention mass: normalise each query row's log-mass per block, mean over the group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.triton_ops.launch import launch, tile
from oasis_cache.kernels.triton_ops.tiles import finite, head_of_program

TILE_BLOCKS = 256  # blocks at a time
TILE_ENTRIES = 4096  # of them and query heads


@triton.jit(do_not_specialize=["rows", "num_blocks", "num_splits"])
def _rank_kernel(
    p_log_mass,  # [batch * kv_heads, group * rows, num_blocks] float32
    p_lse,  # [batch * kv_heads, num_splits, group * rows] float32: parts of each row's log-sum-exp
    p_sinks,  # [kv_heads, group]
    p_scores,  # [batch * kv_heads, rows, num_blocks] float32
    p_best,  # [batch * kv_heads, num_blocks] float32
    kv_heads,
    rows,
    num_blocks,
    num_splits,
    unseen,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WITH_BEST: tl.constexpr,
):
    i_head, _, i_kv = head_of_program(kv_heads)
    o_block = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    o_group = tl.arange(0, GROUP_PAD)
    o_split = tl.arange(0, SPLITS_PAD)
    m_group = o_group < GROUP
    m_block = o_block < num_blocks
    query_rows = GROUP * rows
    # [TILE_BLOCKS]
    b_best = tl.full([TILE_BLOCKS], float("-inf"), tl.float32)
    for row in range(rows):
        o_row = (o_group * rows + row).to(tl.int64)
        # [SPLITS_PAD, GROUP_PAD]
        b_parts = tl.load(
            p_lse + (i_head * num_splits + o_split[:, None]) * query_rows + o_row[None, :],
            mask=(o_split[:, None] < num_splits) & m_group[None, :],
            other=float("-inf"),
        )
        # [GROUP_PAD]
        b_top = finite(tl.max(b_parts, 0))
        b_sum = tl.sum(tl.exp(b_parts - b_top[None, :]), 0)
        if HAS_SINKS:
            b_sink = tl.load(p_sinks + i_kv * GROUP + o_group, mask=m_group, other=0.0).to(tl.float32)
            b_peak = tl.maximum(b_top, b_sink)
            b_sum = b_sum * tl.exp(b_top - b_peak) + tl.exp(b_sink - b_peak)
            b_top = b_peak
        b_sum = tl.where(b_sum > 0.0, b_sum, 1.0)
        # [GROUP_PAD, TILE_BLOCKS]
        b_log_mass = tl.load(
            p_log_mass + (i_head * query_rows + o_row[:, None]) * num_blocks + o_block[None, :],
            mask=m_group[:, None] & m_block[None, :],
            other=float("-inf"),
        )
        b_mass = tl.exp(b_log_mass - b_top[:, None]) / b_sum[:, None]
        # [TILE_BLOCKS]
        b_seen = tl.max(b_log_mass, 0) > float("-inf")
        b_score = tl.where(b_seen, tl.sum(b_mass, 0) / GROUP, unseen)
        tl.store(p_scores + (i_head * rows + row) * num_blocks + o_block, b_score, mask=m_block)
        b_best = tl.maximum(b_best, b_score)
    if WITH_BEST:
        tl.store(p_best + i_head * num_blocks + o_block, b_best, mask=m_block)


def launch_rank(
    log_mass: torch.Tensor,
    partial_lse: torch.Tensor,
    rows: int,
    unseen: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rank_rows`, with the normaliser of each query row given in parts.

    Args:
        log_mass: [batch, kv_heads, group * rows, num_blocks] float32, contiguous.
        partial_lse: [batch, kv_heads, num_splits, group * rows] float32, contiguous: their log-sum-exp is the normaliser.
        rows: New tokens.
        unseen: Score of a block that a row does not see.
        sinks: [kv_heads, group] logits that take their share, contiguous, or None.

    Returns:
        scores [batch, kv_heads, rows, num_blocks] float32, and their maximum over rows [batch, kv_heads, num_blocks].
    """
    batch, kv_heads, query_rows, num_blocks = log_mass.shape
    splits = partial_lse.shape[2]
    group = query_rows // rows
    scores = log_mass.new_empty(batch, kv_heads, rows, num_blocks)
    best = log_mass.new_empty(batch, kv_heads, num_blocks) if rows > 1 else scores[:, :, 0]
    group_pad = tile(group, at_least=1)
    tile_blocks = tile(num_blocks, at_most=min(TILE_BLOCKS, max(16, TILE_ENTRIES // group_pad)))
    launch(
        _rank_kernel,
        (triton.cdiv(num_blocks, tile_blocks), batch * kv_heads),
        log_mass.device,
        p_log_mass=log_mass,
        p_lse=partial_lse,
        p_sinks=sinks if sinks is not None else partial_lse,
        p_scores=scores,
        p_best=best,
        kv_heads=kv_heads,
        rows=rows,
        num_blocks=num_blocks,
        num_splits=splits,
        unseen=unseen,
        GROUP=group,
        GROUP_PAD=group_pad,
        SPLITS_PAD=tile(splits, at_least=1),
        TILE_BLOCKS=tile_blocks,
        HAS_SINKS=sinks is not None,
        WITH_BEST=rows > 1,
        num_warps=4,
    )
    return scores, best
