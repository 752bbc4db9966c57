"""Exchange of blocks between the slots and a buffer beside them: planned by one program per KV head, then moved.

Like in `delta_select` each program compares everything with everything and sorts by counting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import MAX_SLOTS
from oasis_cache.kernels.triton_ops.gather_blocks import swap_blocks
from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, launch, tile

TILE_PAIRS = 2048  # comparisons that a program holds at a time
NEVER = tl.constexpr(2**31 - 1)


@triton.jit
def _load_blocks(p_blocks, p_mask, o_entry, m_entry):
    """Planned blocks; what is not planned meets nothing: -2 is no block."""
    m_planned = m_entry & (tl.load(p_mask + o_entry, mask=m_entry, other=0) != 0)
    return tl.load(p_blocks + o_entry, mask=m_planned, other=-2).to(tl.int32)


@triton.jit(do_not_specialize=["entries", "num_held", "clock"])
def _exchange_kernel(
    p_blocks,  # [batch * kv_heads, entries] int64
    p_mask,  # [batch * kv_heads, entries] uint8
    p_evicted,  # [batch * kv_heads, entries] int64
    p_held,  # [batch * kv_heads, num_held] int64
    p_last,  # [batch * kv_heads, num_held] int64
    p_taken,  # [batch * kv_heads, entries] int64
    p_put,  # [batch * kv_heads, entries] int64
    p_left,  # [batch * kv_heads, entries] uint8
    entries,
    num_held,
    clock,
    ENTRIES_PAD: tl.constexpr,
    HELD_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    i_head = tl.program_id(0).to(tl.int64)
    p_blocks += i_head * entries
    p_mask += i_head * entries
    p_evicted += i_head * entries
    p_held += i_head * num_held
    p_last += i_head * num_held
    o_all = tl.arange(0, ENTRIES_PAD)
    o_place = tl.arange(0, HELD_PAD)
    m_place = o_place < num_held
    # [ENTRIES_PAD] and [HELD_PAD]
    b_blocks = _load_blocks(p_blocks, p_mask, o_all, o_all < entries)
    b_held = tl.load(p_held + o_place, mask=m_place, other=-3).to(tl.int32)
    b_last = tl.load(p_last + o_place, mask=m_place, other=0).to(tl.int32)

    # [HELD_PAD]: whether a place's block leaves
    b_leaves = tl.zeros([HELD_PAD], tl.int32)
    for start in range(0, entries, TILE):
        o_entry = start + tl.arange(0, TILE)
        b_block = _load_blocks(p_blocks, p_mask, o_entry, o_entry < entries)
        b_leaves = tl.maximum(b_leaves, tl.max((b_held[:, None] == b_block[None, :]).to(tl.int32), 1))
    m_stays = m_place & (b_leaves == 0)
    num_staying = tl.sum(m_stays.to(tl.int32), 0)
    # Places are given away in the order of when they were entered; those whose block leaves come last.
    b_age = tl.where(m_stays, b_last, NEVER)

    # [HELD_PAD]: a place's turn
    b_turn = tl.zeros([HELD_PAD], tl.int32)
    for start in range(0, num_held, TILE):
        o_other = start + tl.arange(0, TILE)
        m_other = o_other < num_held
        b_other = tl.load(p_held + o_other, mask=m_other, other=-3).to(tl.int32)
        b_match = (b_blocks[:, None] == b_other[None, :]).to(tl.int32)
        b_other_age = tl.load(p_last + o_other, mask=m_other, other=0).to(tl.int32)
        b_other_age = tl.where(m_other & (tl.max(b_match, 0) == 0), b_other_age, NEVER)
        b_before = (b_other_age[None, :] < b_age[:, None]) | (
            (b_other_age[None, :] == b_age[:, None]) & (o_other[None, :] < o_place[:, None])
        )
        b_turn += tl.sum((b_before & m_other[None, :]).to(tl.int32), 1)

    # [HELD_PAD]: what places hold afterwards
    b_new, b_new_last = b_held, b_last
    num_homeless = 0
    for start in range(0, entries, TILE):
        o_entry = start + tl.arange(0, TILE)
        m_entry = o_entry < entries
        # [TILE]
        b_block = _load_blocks(p_blocks, p_mask, o_entry, m_entry)
        m_planned = b_block >= 0
        b_evicted = tl.load(p_evicted + o_entry, mask=m_planned, other=-1).to(tl.int32)
        b_taken = tl.max(tl.where(b_held[:, None] == b_block[None, :], o_place[:, None], -1), 0)
        m_moves = m_planned & (b_evicted >= 0)
        m_homeless = m_moves & (b_taken < 0)
        b_rank = num_homeless + tl.cumsum(m_homeless.to(tl.int32), 0) - 1
        m_housed = m_homeless & (b_rank < num_staying)
        m_turn = m_stays[:, None] & (b_turn[:, None] == b_rank[None, :])
        b_home = tl.sum(tl.where(m_turn, o_place[:, None], 0), 0)
        b_put = tl.where(m_housed, b_home, tl.where(m_moves, b_taken, -1))
        num_homeless += tl.sum(m_homeless.to(tl.int32), 0)
        # [HELD_PAD, TILE]: at most one entry changes a place
        b_changed = tl.where(m_housed, b_home, b_taken)
        m_hit = o_place[:, None] == b_changed[None, :]
        m_new = tl.max(m_hit.to(tl.int32), 1) != 0
        b_content = tl.where(m_moves, b_evicted, -1)
        b_time = tl.where(m_moves, clock, -1)
        b_new = tl.where(m_new, tl.sum(tl.where(m_hit, b_content[None, :], 0), 1), b_new)
        b_new_last = tl.where(m_new, tl.sum(tl.where(m_hit, b_time[None, :], 0), 1), b_new_last)
        tl.store(p_taken + i_head * entries + o_entry, b_taken.to(tl.int64), mask=m_entry)
        tl.store(p_put + i_head * entries + o_entry, b_put.to(tl.int64), mask=m_entry)
        tl.store(p_left + i_head * entries + o_entry, (m_planned & (b_taken < 0)).to(tl.uint8), mask=m_entry)
    tl.debug_barrier()  # the tables are read by everyone before anyone writes them
    tl.store(p_held + o_place, b_new.to(tl.int64), mask=m_place)
    tl.store(p_last + o_place, b_new_last.to(tl.int64), mask=m_place)


def _launch(
    blocks: torch.Tensor,
    mask: torch.Tensor,
    evicted: torch.Tensor,
    held: torch.Tensor,
    last_held: torch.Tensor,
    clock: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, kv_heads, entries = blocks.shape
    num_held = held.shape[2]
    taken, put = (blocks.new_empty(batch, kv_heads, entries) for _ in range(2))
    left = blocks.new_empty(batch, kv_heads, entries, dtype=torch.uint8)
    entries_pad, held_pad = tile(entries, at_least=1), tile(num_held, at_least=1)
    launch(
        _exchange_kernel,
        (batch * kv_heads,),
        blocks.device,
        p_blocks=blocks.contiguous(),
        p_mask=mask.contiguous().view(torch.uint8),
        p_evicted=evicted.contiguous(),
        p_held=held,
        p_last=last_held,
        p_taken=taken,
        p_put=put,
        p_left=left,
        entries=entries,
        num_held=num_held,
        clock=clock,
        ENTRIES_PAD=entries_pad,
        HELD_PAD=held_pad,
        TILE=max(1, min(64, TILE_PAIRS // max(entries_pad, held_pad))),
        num_warps=4,
    )
    return taken, put, left.view(torch.bool)


def plan_exchange(
    blocks: torch.Tensor,
    mask: torch.Tensor,
    evicted: torch.Tensor,
    held: torch.Tensor,
    last_held: torch.Tensor,
    clock: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.plan_exchange`, without a wait for the device.

    Args:
        blocks, evicted: [batch, kv_heads, entries] int64, block numbers below 2**31; planned ones are distinct within a head.
        mask: [batch, kv_heads, entries] bool.
        held, last_held: [batch, kv_heads, num_held] int64, contiguous. Changed in place.
        clock: The time to enter now, below 2**31.

    Returns:
        taken and put as the reference, int64, and what is left of `mask`: planned blocks that were not held.

    Raises:
        ValueError: A shape, dtype, layout or size is none of these.
    """
    check_devices(blocks=blocks, mask=mask, evicted=evicted, held=held, last_held=last_held)
    if blocks.dim() != 3 or held.dim() != 3:
        raise ValueError(f"blocks {tuple(blocks.shape)} and held {tuple(held.shape)} must have 3 dimensions")
    check_shape("held", held, (*blocks.shape[:2], None))
    for name, tensor, shape, dtype in (
        ("blocks", blocks, blocks.shape, torch.int64),
        ("mask", mask, blocks.shape, torch.bool),
        ("evicted", evicted, blocks.shape, torch.int64),
        ("held", held, held.shape, torch.int64),
        ("last_held", last_held, held.shape, torch.int64),
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(f"{name} must be {dtype} {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if not (held.is_contiguous() and last_held.is_contiguous()):
        raise ValueError("held and last_held are changed in place and must be contiguous")
    if max(blocks.shape[2], held.shape[2]) > MAX_SLOTS or not 0 <= clock < 2**31:
        raise ValueError(
            f"{blocks.shape[2]} entries and {held.shape[2]} places: at most {MAX_SLOTS}; clock={clock} must lie in [0, 2**31)"
        )
    if blocks.numel() == 0 or held.numel() == 0:
        none = torch.full_like(blocks, -1)
        return none, none.clone(), mask.clone()
    return _launch(blocks, mask, evicted, held, last_held, clock)


def exchange_blocks(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    evicted: torch.Tensor,
    held: torch.Tensor,
    last_held: torch.Tensor,
    clock: int,
    buffer: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    """`plan_exchange` and then `swap_blocks`: two launches. Returns what is left of `mask`, [batch, kv_heads, entries] bool.

    Raises:
        ValueError: As the two.
    """
    taken, put, left = plan_exchange(blocks, mask, evicted, held, last_held, clock)
    swap_blocks(slots, taken, put, buffer, target)
    return left
