"""Encoded pages (kernels/encoding.py): decoded as they enter a slot, and written as they were encoded on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.encoding import ENCODINGS, NOT_FINITE, Encoding
from oasis_cache.kernels.limits import KERNEL_DTYPES, MAX_DIM
from oasis_cache.kernels.triton_ops.gather_blocks import (
    CHUNK_BYTES,
    check_addresses,
    check_plan,
    copy_block,
    plan_arguments,
)
from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, launch, tile
from oasis_cache.kernels.triton_ops.tiles import head_of_program, narrow

TILE_CHANNELS = 64  # of the bytes of a token's codes that a program decodes at a time
_INT8, _INT4, _FP8 = (tl.constexpr(ENCODINGS.index(name)) for name in ("int8", "int4", "fp8"))
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _signed(b_byte):
    """Bytes, as integers from 0 on, as the signed integers that they stand for."""
    return b_byte - ((b_byte & 128) << 1)


@triton.jit
def _number(b_byte, ENCODING: tl.constexpr):
    """What the bytes of int8 and fp8 stand for, in float32."""
    if ENCODING == _INT8:
        return _signed(b_byte).to(tl.float32)
    # Four bits of exponent and three of mantissa, as a float16 with the exponent 8 too small; subnormal numbers are right too.
    b_half = (((b_byte & 128) << 8) | ((b_byte & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((b_byte & 127) == 127, float("nan"), b_half.to(tl.float32) * 256.0)


@triton.jit(do_not_specialize=["entries"])
def _gather_encoded_kernel(
    p_blocks,  # [batch, kv_heads, entries] int64
    p_slots,  # [batch, kv_heads, entries] int64
    p_mask,  # [batch, kv_heads, entries] uint8
    p_addresses,  # [batch, num_blocks] int64: where each page begins, [kv_heads, NUM_BYTES]
    p_target,  # [batch, kv_heads, slots, BLOCK_SIZE, KV_DIM]
    stride_ab,
    stride_tb,
    stride_th,
    stride_ts,
    kv_heads,
    entries,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    KV_DIM: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    STEPS_AT: tl.constexpr,
    OFFSETS_AT: tl.constexpr,
    EXPONENT_AT: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    ENCODING: tl.constexpr,
):
    i_head, i_batch, i_kv = head_of_program(kv_heads)
    o_entry = i_head * entries + tl.program_id(0)
    if tl.load(p_mask + o_entry) != 0:
        i_address = tl.load(p_addresses + i_batch * stride_ab + tl.load(p_blocks + o_entry))
        p_page = tl.multiple_of((i_address + i_kv * NUM_BYTES).to(tl.pointer_type(tl.uint8)), 16)
        p_slot = p_target + i_batch * stride_tb + i_kv * stride_th + tl.load(p_slots + o_entry) * stride_ts
        i_exponent = tl.load(p_page + EXPONENT_AT).to(tl.int32) << 23
        o_token = tl.arange(0, BLOCK_PAD)
        m_token = o_token < BLOCK_SIZE
        for start in range(0, CODE_WIDTH, TILE):
            o_byte = start + tl.arange(0, TILE)
            # [BLOCK_PAD, TILE]
            m_code = m_token[:, None] & (o_byte < CODE_WIDTH)[None, :]
            b_byte = tl.load(p_page + o_token[:, None] * CODE_WIDTH + o_byte[None, :], mask=m_code, other=0).to(
                tl.int32
            )
            for plane in tl.static_range(2 if ENCODING == _INT4 else 1):
                o_channel = plane * CODE_WIDTH + o_byte
                m_channel = (o_byte < CODE_WIDTH) & (o_channel < KV_DIM)
                b_step_byte = tl.load(p_page + STEPS_AT + o_channel, mask=m_channel, other=0).to(tl.int32)
                b_step = (i_exponent + (b_step_byte << 20)).to(tl.float32, bitcast=True)
                b_step = tl.where(b_step_byte == _NOT_FINITE, float("nan"), b_step)
                if ENCODING == _INT4:
                    b_offset = tl.load(p_page + OFFSETS_AT + o_channel, mask=m_channel, other=0).to(tl.int32)
                    b_number = (((b_byte >> (4 * plane)) & 15) + _signed(b_offset)[None, :]).to(tl.float32)
                else:
                    b_number = _number(b_byte, ENCODING)
                b_value = narrow(b_number * b_step[None, :], p_target.dtype.element_ty)
                o_value = o_token[:, None] * KV_DIM + o_channel[None, :]
                tl.store(p_slot + o_value, b_value, mask=m_token[:, None] & m_channel[None, :])


@triton.jit
def _write_kernel(
    p_pages,  # [batch, kv_heads, blocks, NUM_BYTES] uint8
    p_addresses,  # [batch, blocks] int64
    stride_pb,
    stride_ph,
    stride_pn,
    stride_ab,
    kv_heads,
    NUM_BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_block = tl.program_id(0).to(tl.int64)
    _, i_batch, i_kv = head_of_program(kv_heads)
    p_source = p_pages + i_batch * stride_pb + i_kv * stride_ph + i_block * stride_pn
    i_address = tl.load(p_addresses + i_batch * stride_ab + i_block)
    p_page = (i_address + i_kv * NUM_BYTES).to(tl.pointer_type(tl.uint8))
    copy_block(tl.multiple_of(p_source, 16), tl.multiple_of(p_page, 16), NUM_BYTES, CHUNK)


def gather_encoded(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    addresses: torch.Tensor,
    target: torch.Tensor,
    encoding: Encoding,
) -> None:
    """`encoding.gather_encoded`: decode planned blocks from host pages into slots, on the current stream, without a host wait.

    Args:
        blocks, slots: [batch, kv_heads, entries] int64: which block goes to which slot.
        mask: [batch, kv_heads, entries] bool; False entries stand for nothing.
        addresses: [batch, num_blocks] int64: the device-visible address of each block's page, [kv_heads, encoding.num_bytes]
            uint8, page-locked, aligned to 16 bytes, and alive until the copy is over.
        target: [batch, kv_heads, slots, block_size, kv_dim], each block contiguous. Changed in place.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    check_devices(blocks=blocks, slots=slots, mask=mask, addresses=addresses, target=target)
    check_plan(blocks, slots, mask, target)
    check_shape("target", target, (None, None, None, encoding.block_size, encoding.kv_dim))
    if target.dtype not in KERNEL_DTYPES or encoding.block_size > MAX_DIM:
        raise ValueError(
            f"target must be one of {KERNEL_DTYPES} in blocks of at most {MAX_DIM}, got {target.dtype}, {tuple(target.shape)}"
        )
    check_addresses(addresses, target.shape[0])
    if blocks.numel() == 0:
        return
    launch(
        _gather_encoded_kernel,
        (blocks.shape[2], blocks.shape[0] * blocks.shape[1]),
        target.device,
        p_addresses=addresses,
        stride_ab=addresses.stride(0),
        **plan_arguments(blocks, slots, mask, target),
        BLOCK_SIZE=encoding.block_size,
        BLOCK_PAD=tile(encoding.block_size, at_least=1),
        KV_DIM=encoding.kv_dim,
        CODE_WIDTH=encoding.code_width,
        TILE=tile(encoding.code_width, at_most=TILE_CHANNELS),
        STEPS_AT=encoding.steps_at,
        OFFSETS_AT=encoding.offsets_at,
        EXPONENT_AT=encoding.exponent_at,
        NUM_BYTES=encoding.num_bytes,
        ENCODING=ENCODINGS.index(encoding.name),
    )


def write_pages(pages: torch.Tensor, addresses: torch.Tensor) -> None:
    """`encoding.write_pages`: write encoded blocks to their host pages, on the current stream, without a host wait.

    Args:
        pages: [batch, kv_heads, blocks, num_bytes] uint8, num_bytes a multiple of 16 and contiguous.
        addresses: [batch, blocks] int64: the device-visible address of each block's new page, page-locked and aligned to 16 bytes.

    Raises:
        ValueError: A shape, dtype or layout is none of these.
    """
    check_devices(pages=pages, addresses=addresses)
    if pages.dim() != 4 or pages.dtype != torch.uint8 or pages.shape[3] % 16 or pages.stride(3) != 1:
        raise ValueError(
            "pages must be [batch, kv_heads, blocks, a multiple of 16] uint8 with contiguous rows, got "
            f"{pages.dtype} {tuple(pages.shape)}, strides {pages.stride()}"
        )
    batch, kv_heads, num_blocks, num_bytes = pages.shape
    if any(stride % 16 for stride in pages.stride()[:3]):
        raise ValueError(f"pages must begin at multiples of 16 bytes; strides {pages.stride()}")
    check_shape("addresses", addresses, (batch, num_blocks))
    if addresses.dtype != torch.int64 or (addresses.stride(1) != 1 and num_blocks > 1):
        raise ValueError(
            f"addresses must be int64 with contiguous rows, got {addresses.dtype}, strides {addresses.stride()}"
        )
    if num_blocks == 0:
        return
    launch(
        _write_kernel,
        (num_blocks, batch * kv_heads),
        pages.device,
        p_pages=pages,
        p_addresses=addresses,
        stride_pb=pages.stride(0),
        stride_ph=pages.stride(1),
        stride_pn=pages.stride(2),
        stride_ab=addresses.stride(0),
        kv_heads=kv_heads,
        NUM_BYTES=num_bytes,
        CHUNK=min(CHUNK_BYTES, tile(num_bytes)),
        num_warps=4,
    )
