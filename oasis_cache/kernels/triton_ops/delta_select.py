"""Which wanted blocks are absent, which slots they take, and the table brought up to date: one program per KV head.

Sets are at most a few hundred blocks, so each program compares everything with everything and sorts by counting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import MAX_SLOTS
from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, launch, tile, unit_stride

TILE_PAIRS = 4096  # comparisons that a program holds at a time
NEVER = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["count", "slots", "entries", "clock"])
def _delta_kernel(
    p_wanted,  # [batch * kv_heads, count] int64
    p_table,  # [batch * kv_heads, slots] int64
    p_last,  # [batch * kv_heads, slots] int64
    p_blocks,  # [batch * kv_heads, entries] int64
    p_slots,  # [batch * kv_heads, entries] int64
    p_mask,  # [batch * kv_heads, entries] uint8
    stride_table,
    count,
    slots,
    entries,
    clock,
    COUNT_PAD: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    UPDATE: tl.constexpr,
):
    i_head = tl.program_id(0).to(tl.int64)
    p_wanted += i_head * count
    p_table += i_head * stride_table
    p_last += i_head * stride_table
    o_want = tl.arange(0, COUNT_PAD)
    o_slot = tl.arange(0, SLOTS_PAD)
    m_want, m_slot = o_want < count, o_slot < slots
    # [COUNT_PAD] and [SLOTS_PAD]; padding and negative entries meet nothing: -2 and -3 are no blocks
    b_wanted = tl.load(p_wanted + o_want, mask=m_want, other=-2).to(tl.int32)
    b_wanted = tl.where(b_wanted < 0, -2, b_wanted)
    b_held = tl.load(p_table + o_slot, mask=m_slot, other=-3).to(tl.int32)
    b_last = tl.load(p_last + o_slot, mask=m_slot, other=0).to(tl.int32)

    # [SLOTS_PAD]: whether a slot's block is wanted
    b_kept = tl.zeros([SLOTS_PAD], tl.int32)
    for start in range(0, count, TILE):
        o_other = start + tl.arange(0, TILE)
        b_other = tl.load(p_wanted + o_other, mask=o_other < count, other=-2).to(tl.int32)
        b_other = tl.where(b_other < 0, -2, b_other)
        b_kept = tl.maximum(b_kept, tl.max((b_held[:, None] == b_other[None, :]).to(tl.int32), 1))
    # A slot is taken in the order of when it was last wanted; kept ones come last, padding behind them.
    b_age = tl.where(m_slot & (b_kept == 0), b_last, NEVER)

    # [COUNT_PAD]: whether a wanted block is there; [SLOTS_PAD]: the slot's place in the order of taking
    b_resident = tl.zeros([COUNT_PAD], tl.int32)
    b_place = tl.zeros([SLOTS_PAD], tl.int32)
    for start in range(0, slots, TILE):
        o_other = start + tl.arange(0, TILE)
        m_other = o_other < slots
        b_other = tl.load(p_table + o_other, mask=m_other, other=-3).to(tl.int32)
        b_match = (b_wanted[:, None] == b_other[None, :]).to(tl.int32)
        b_resident = tl.maximum(b_resident, tl.max(b_match, 1))
        b_other_age = tl.load(p_last + o_other, mask=m_other, other=0).to(tl.int32)
        b_other_age = tl.where(m_other & (tl.max(b_match, 0) == 0), b_other_age, NEVER)
        b_before = (b_other_age[None, :] < b_age[:, None]) | (
            (b_other_age[None, :] == b_age[:, None]) & (o_other[None, :] < o_slot[:, None])
        )
        b_place += tl.sum((b_before & m_other[None, :]).to(tl.int32), 1)

    b_absent = (m_want & (b_wanted >= 0) & (b_resident == 0)).to(tl.int32)
    num_absent = tl.sum(b_absent, 0)
    num_victims = tl.sum((m_slot & (b_kept == 0)).to(tl.int32), 0)
    pairs = tl.minimum(tl.minimum(num_absent, num_victims), entries)
    # [COUNT_PAD]: a wanted block's place, absent ones first
    b_order = tl.where(b_absent != 0, tl.cumsum(b_absent, 0) - 1, num_absent + o_want - tl.cumsum(b_absent, 0))
    tl.debug_barrier()  # the table is read by everyone before anyone writes it
    if UPDATE:
        m_now = m_slot & ((b_kept != 0) | (b_place < pairs))
        tl.store(p_last + o_slot, tl.zeros([SLOTS_PAD], tl.int64) + clock, mask=m_now)
    for start in range(0, entries, TILE):
        o_entry = start + tl.arange(0, TILE)
        m_entry = o_entry < entries
        # [TILE]
        b_block = tl.sum(tl.where(m_want[:, None] & (b_order[:, None] == o_entry[None, :]), b_wanted[:, None], 0), 0)
        b_slot = tl.sum(tl.where(m_slot[:, None] & (b_place[:, None] == o_entry[None, :]), o_slot[:, None], 0), 0)
        m_pair = m_entry & (o_entry < pairs)
        b_block = tl.maximum(b_block, -1)
        tl.store(p_blocks + i_head * entries + o_entry, b_block.to(tl.int64), mask=m_entry)
        tl.store(p_slots + i_head * entries + o_entry, b_slot.to(tl.int64), mask=m_entry)
        tl.store(p_mask + i_head * entries + o_entry, m_pair.to(tl.uint8), mask=m_entry)
        if UPDATE:
            tl.store(p_table + b_slot, b_block.to(tl.int64), mask=m_pair)


def _launch(
    wanted: torch.Tensor, block_of_slot: torch.Tensor, last_wanted: torch.Tensor, entries: int, clock: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, kv_heads, count = wanted.shape
    slots = block_of_slot.shape[2]
    blocks = wanted.new_empty(batch, kv_heads, entries)
    into = torch.empty_like(blocks)
    mask = torch.empty_like(blocks, dtype=torch.uint8)
    if entries == 0 and clock is None:
        return blocks, into, mask.view(torch.bool)
    count_pad, slots_pad = tile(count, at_least=1), tile(slots, at_least=1)
    launch(
        _delta_kernel,
        (batch * kv_heads,),
        wanted.device,
        p_wanted=wanted,
        p_table=block_of_slot,
        p_last=last_wanted,
        p_blocks=blocks,
        p_slots=into,
        p_mask=mask,
        stride_table=block_of_slot.stride(1),
        count=count,
        slots=slots,
        entries=entries,
        clock=clock or 0,
        COUNT_PAD=count_pad,
        SLOTS_PAD=slots_pad,
        TILE=max(1, min(64, TILE_PAIRS // max(count_pad, slots_pad))),
        UPDATE=clock is not None,
        num_warps=4,
    )
    return blocks, into, mask.view(torch.bool)


def delta_select(
    wanted: torch.Tensor,
    block_of_slot: torch.Tensor,
    last_wanted: torch.Tensor,
    num_blocks: int,
    max_fetch: int,
    clock: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.delta_select`, without a wait for the device.

    Args:
        wanted: [batch, kv_heads, count] int64, distinct block numbers below `num_blocks`, best first, or negative for none;
            count at most the slots.
        block_of_slot: [batch, kv_heads, slots] int64, contiguous; the block in each slot, -1 where empty. Changed in place.
        last_wanted: [batch, kv_heads, slots] int64, contiguous; when a slot's block was last wanted. Changed in place.
        num_blocks: Blocks there are; below 2**31.
        max_fetch: Most pairs per KV head.
        clock: The step to enter for wanted blocks, below 2**31; None leaves the tables as they are.

    Returns:
        blocks, slots (int64) and mask (bool), [batch, kv_heads, min(max_fetch, count)] each.

    Raises:
        ValueError: A shape, dtype, layout or size is none of these.
    """
    check_devices(wanted=wanted, block_of_slot=block_of_slot, last_wanted=last_wanted)
    if wanted.dim() != 3 or block_of_slot.dim() != 3:
        raise ValueError(
            f"wanted {tuple(wanted.shape)} and block_of_slot {tuple(block_of_slot.shape)} must have 3 dimensions"
        )
    batch, kv_heads, count = wanted.shape
    slots = block_of_slot.shape[2]
    check_shape("block_of_slot", block_of_slot, (batch, kv_heads, slots))
    check_shape("last_wanted", last_wanted, (batch, kv_heads, slots))
    for name, tensor in (("wanted", wanted), ("block_of_slot", block_of_slot), ("last_wanted", last_wanted)):
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64, got {tensor.dtype}")
    if not (block_of_slot.is_contiguous() and last_wanted.is_contiguous()):
        raise ValueError("block_of_slot and last_wanted are changed in place and must be contiguous")
    if not 1 <= count <= slots <= MAX_SLOTS:
        raise ValueError(f"{count} wanted blocks and {slots} slots: expected 1 <= wanted <= slots <= {MAX_SLOTS}")
    if not 0 <= num_blocks < 2**31 or max_fetch < 0 or not 0 <= (clock or 0) < 2**31:
        raise ValueError(
            f"num_blocks={num_blocks} and clock={clock} must lie in [0, 2**31), max_fetch={max_fetch} from 0 on"
        )
    return _launch(unit_stride(wanted).contiguous(), block_of_slot, last_wanted, min(max_fetch, count), clock)
