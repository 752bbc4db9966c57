"""Blocks into slots by plan: from host pages through their device-visible address, or from another buffer on the device.

Host pages are page-locked, so that the device reads them itself (unified virtual addressing): no copy call, no host wait.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, launch, tile
from oasis_cache.kernels.triton_ops.tiles import head_of_program

CHUNK_BYTES = 4096  # bytes that a program moves at a time: 32 per thread


@triton.jit
def copy_block(p_source, p_target, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    """Copy ELEMENTS contiguous elements."""
    for start in range(0, ELEMENTS, CHUNK):
        o_element = start + tl.arange(0, CHUNK)
        m_element = o_element < ELEMENTS
        tl.store(p_target + o_element, tl.load(p_source + o_element, mask=m_element), mask=m_element)


@triton.jit(do_not_specialize=["entries"])
def _gather_kernel(
    p_blocks,  # [batch, kv_heads, entries] int64
    p_slots,  # [batch, kv_heads, entries] int64
    p_mask,  # [batch, kv_heads, entries] uint8
    p_addresses,  # [batch, num_blocks] int64: where each page begins, [kv_heads, block_size, kv_dim]
    p_target,  # [batch, kv_heads, slots, block_size, kv_dim]
    stride_ab,
    stride_tb,
    stride_th,
    stride_ts,
    kv_heads,
    entries,
    ELEMENTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_entry = i_head * entries + tl.program_id(0)
    if tl.load(p_mask + o_entry) != 0:
        i_block = tl.load(p_blocks + o_entry)
        i_slot = tl.load(p_slots + o_entry)
        i_address = tl.load(p_addresses + i_batch * stride_ab + i_block)
        p_page = i_address.to(tl.pointer_type(p_target.dtype.element_ty)) + i_kv * ELEMENTS
        p_slot = p_target + i_batch * stride_tb + i_kv * stride_th + i_slot * stride_ts
        copy_block(tl.multiple_of(p_page, ALIGNMENT), tl.multiple_of(p_slot, ALIGNMENT), ELEMENTS, CHUNK)


@triton.jit(do_not_specialize=["entries"])
def _swap_kernel(
    p_slots,  # [batch, kv_heads, entries] int64
    p_taken,  # [batch, kv_heads, entries] int64: place in the buffer, negative: none
    p_put,  # [batch, kv_heads, entries] int64: place in the buffer, negative: none
    p_buffer,  # [batch, kv_heads, num_held, block_size, kv_dim]
    p_target,  # [batch, kv_heads, slots, block_size, kv_dim]
    stride_sb,
    stride_sh,
    stride_ss,
    stride_tb,
    stride_th,
    stride_ts,
    kv_heads,
    entries,
    ELEMENTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_entry = i_head * entries + tl.program_id(0)
    i_taken = tl.load(p_taken + o_entry)
    i_put = tl.load(p_put + o_entry)
    if (i_taken >= 0) | (i_put >= 0):
        i_slot = tl.load(p_slots + o_entry)
        p_buffer += i_batch * stride_sb + i_kv * stride_sh
        p_slot = p_target + i_batch * stride_tb + i_kv * stride_th + i_slot * stride_ts
        p_slot = tl.multiple_of(p_slot, ALIGNMENT)
        p_from = tl.multiple_of(p_buffer + tl.maximum(i_taken, 0) * stride_ss, ALIGNMENT)
        p_to = tl.multiple_of(p_buffer + tl.maximum(i_put, 0) * stride_ss, ALIGNMENT)
        for start in range(0, ELEMENTS, CHUNK):
            o_element = start + tl.arange(0, CHUNK)
            m_element = o_element < ELEMENTS
            b_evicted = tl.load(p_slot + o_element, mask=m_element & (i_put >= 0))
            b_arriving = tl.load(p_from + o_element, mask=m_element & (i_taken >= 0))
            tl.store(p_to + o_element, b_evicted, mask=m_element & (i_put >= 0))
            tl.store(p_slot + o_element, b_arriving, mask=m_element & (i_taken >= 0))


def block_constants(block_size: int, kv_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time sizes of one block of one KV head: its elements, the alignment they allow, elements per chunk."""
    elements = block_size * kv_dim
    return {
        "ELEMENTS": elements,
        "ALIGNMENT": math.gcd(16, kv_dim * dtype.itemsize),
        "CHUNK": min(CHUNK_BYTES // dtype.itemsize, tile(elements)),
    }


def plan_arguments(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, target: torch.Tensor
) -> dict[str, object]:
    """The arguments that stand for a plan and its target, the sizes of a block aside."""
    return {
        "p_blocks": blocks.contiguous(),
        "p_slots": slots.contiguous(),
        "p_mask": mask.contiguous().view(torch.uint8),
        "p_target": target,
        "stride_tb": target.stride(0),
        "stride_th": target.stride(1),
        "stride_ts": target.stride(2),
        "kv_heads": blocks.shape[1],
        "entries": blocks.shape[2],
        "num_warps": 4,
    }


def check_plan(blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> None:
    """Raise `ValueError` unless a plan and its target have the shapes, dtypes and layout of `gather_blocks`."""
    if target.dim() != 5:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; expected [batch, kv_heads, slots, block_size, kv_dim]"
        )
    shape = (*target.shape[:2], None)
    for name, tensor, dtype in (
        ("blocks", blocks, torch.int64),
        ("slots", slots, torch.int64),
        ("mask", mask, torch.bool),
    ):
        check_shape(name, tensor, shape)
        if tensor.dtype != dtype or tensor.shape != blocks.shape:
            raise ValueError(f"{name} must be {dtype} {tuple(blocks.shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    check_block_layout("target", target)


def check_addresses(addresses: torch.Tensor, batch: int) -> None:
    """Raise `ValueError` unless addresses are [batch, num_blocks] int64 with contiguous rows."""
    check_shape("addresses", addresses, (batch, None))
    if addresses.dtype != torch.int64 or addresses.stride(1) != 1:
        raise ValueError(
            f"addresses must be int64 with contiguous rows, got {addresses.dtype}, strides {addresses.stride()}"
        )


def check_block_layout(name: str, blocks: torch.Tensor) -> None:
    """Raise `ValueError` unless each block of [..., block_size, dim] is contiguous and aligned as its size allows."""
    alignment = math.gcd(16, blocks.shape[-1] * blocks.element_size())
    aligned = all(stride * blocks.element_size() % alignment == 0 for stride in blocks.stride()[:-2])
    contiguous = blocks.stride(-1) == 1 and (blocks.shape[-2] == 1 or blocks.stride(-2) == blocks.shape[-1])
    if not contiguous or not aligned or (blocks.device.type != "meta" and blocks.data_ptr() % alignment):
        raise ValueError(
            f"every block of {name} must be contiguous and aligned to {alignment} bytes; strides {blocks.stride()}"
        )


def gather_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, addresses: torch.Tensor, target: torch.Tensor
) -> None:
    """`reference.gather_blocks`: copy planned blocks from host pages into slots, on the current stream, without a host wait.

    Args:
        blocks, slots: [batch, kv_heads, entries] int64: which block goes to which slot.
        mask: [batch, kv_heads, entries] bool; False entries stand for nothing.
        addresses: [batch, num_blocks] int64: the device-visible address of each block's page, [kv_heads, block_size, kv_dim]
            in target's dtype, page-locked, aligned to 16 bytes, and alive until the copy is over.
        target: [batch, kv_heads, slots, block_size, kv_dim], each block contiguous. Changed in place.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    check_devices(blocks=blocks, slots=slots, mask=mask, addresses=addresses, target=target)
    check_plan(blocks, slots, mask, target)
    check_addresses(addresses, target.shape[0])
    if blocks.numel() == 0:
        return
    launch(
        _gather_kernel,
        (blocks.shape[2], blocks.shape[0] * blocks.shape[1]),
        target.device,
        p_addresses=addresses,
        stride_ab=addresses.stride(0),
        **plan_arguments(blocks, slots, mask, target),
        **block_constants(target.shape[3], target.shape[4], target.dtype),
    )


def swap_blocks(
    slots: torch.Tensor, taken: torch.Tensor, put: torch.Tensor, buffer: torch.Tensor, target: torch.Tensor
) -> None:
    """`reference.swap_blocks`: move blocks between slots and a buffer on the same device, without a host wait.

    Args:
        slots: [batch, kv_heads, entries] int64, distinct within a head.
        taken, put: [batch, kv_heads, entries] int64, places in the buffer, negative: none. No place is put to by one entry and
            taken by another.
        buffer: [batch, kv_heads, num_held, block_size, kv_dim], each block contiguous. Changed in place.
        target: [batch, kv_heads, num_slots, block_size, kv_dim], each block contiguous. Changed in place.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    check_devices(slots=slots, taken=taken, put=put, buffer=buffer, target=target)
    if target.dim() != 5:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; expected [batch, kv_heads, slots, block_size, kv_dim]"
        )
    check_shape("slots", slots, (*target.shape[:2], None))
    for name, tensor in (("slots", slots), ("taken", taken), ("put", put)):
        if tensor.dtype != torch.int64 or tensor.shape != slots.shape:
            raise ValueError(f"{name} must be int64 {tuple(slots.shape)}, got {tensor.dtype} {tuple(tensor.shape)}")
    check_shape("buffer", buffer, (*target.shape[:2], None, *target.shape[3:]))
    if buffer.dtype != target.dtype:
        raise ValueError(f"buffer must be {target.dtype}, got {buffer.dtype}")
    check_block_layout("buffer", buffer)
    check_block_layout("target", target)
    if slots.numel() == 0 or buffer.numel() == 0:
        return
    launch(
        _swap_kernel,
        (slots.shape[2], slots.shape[0] * slots.shape[1]),
        target.device,
        p_slots=slots.contiguous(),
        p_taken=taken.contiguous(),
        p_put=put.contiguous(),
        p_buffer=buffer,
        p_target=target,
        stride_sb=buffer.stride(0),
        stride_sh=buffer.stride(1),
        stride_ss=buffer.stride(2),
        stride_tb=target.stride(0),
        stride_th=target.stride(1),
        stride_ts=target.stride(2),
        kv_heads=slots.shape[1],
        entries=slots.shape[2],
        **block_constants(target.shape[3], target.shape[4], target.dtype),
        num_warps=4,
    )
