"""Seal blocks in one pass: write each block's host page, and its summaries into the block index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_cache.kernels.limits import KERNEL_DTYPES, MAX_DIM
from oasis_cache.kernels.triton_ops.gather_blocks import block_constants, check_block_layout, copy_block
from oasis_cache.kernels.triton_ops.launch import check_devices, check_shape, launch, tile
from oasis_cache.kernels.triton_ops.tiles import head_of_program, narrow

PAGES_ONLY, INT2, MINMAX = 0, 1, 2
SUMMARIES = {frozenset(): PAGES_ONLY, frozenset(("codes", "low", "step")): INT2, frozenset(("low", "high")): MINMAX}


@triton.jit
def _round_to_even(b_value):
    """Round to the nearest integer, halves to even, for values between 0 and 2**22."""
    return (b_value + 8388608.0) - 8388608.0


@triton.jit(do_not_specialize=["first_block"])
def _seal_kernel(
    p_kv,  # [batch, kv_heads, blocks, BLOCK_SIZE, KV_DIM]
    p_addresses,  # [batch, blocks] int64: where each page begins, [kv_heads, BLOCK_SIZE, KV_DIM]
    p_codes,  # [batch, kv_heads, capacity, BLOCK_SIZE, PLANE_DIM] uint8
    p_low,  # [batch, kv_heads, capacity, KEY_DIM]: channel minima
    p_high,  # [batch, kv_heads, capacity, KEY_DIM]: steps (int2) or channel maxima (min/max)
    stride_kb,
    stride_kh,
    stride_kn,
    stride_ab,
    stride_cb,
    stride_ch,
    stride_sb,
    stride_sh,
    kv_heads,
    first_block,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KV_DIM: tl.constexpr,
    PLANE_DIM: tl.constexpr,
    PLANE_PAD: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
):
    i_block = tl.program_id(0).to(tl.int64)
    _, i_batch, i_kv = head_of_program(kv_heads)
    p_kv += i_batch * stride_kb + i_kv * stride_kh + i_block * stride_kn
    i_address = tl.load(p_addresses + i_batch * stride_ab + i_block)
    p_page = i_address.to(tl.pointer_type(p_kv.dtype.element_ty)) + i_kv * ELEMENTS
    copy_block(tl.multiple_of(p_kv, ALIGNMENT), tl.multiple_of(p_page, ALIGNMENT), ELEMENTS, CHUNK)
    if KIND != 0:
        o_summary = i_batch * stride_sb + i_kv * stride_sh + (first_block + i_block) * KEY_DIM
        o_token = tl.arange(0, BLOCK_PAD)
        o_byte = tl.arange(0, PLANE_PAD)
        m_token = o_token < BLOCK_SIZE
        # [BLOCK_PAD, PLANE_PAD]
        b_packed = tl.zeros([BLOCK_PAD, PLANE_PAD], tl.int32)
        for plane in tl.static_range(4):
            o_channel = plane * PLANE_DIM + o_byte
            m_channel = (o_byte < PLANE_DIM) & (o_channel < KEY_DIM)
            m_key = m_token[:, None] & m_channel[None, :]
            b_keys = tl.load(p_kv + o_token[:, None] * KV_DIM + o_channel[None, :], mask=m_key, other=0.0).to(
                tl.float32
            )
            # [PLANE_PAD]
            b_low = tl.min(tl.where(m_token[:, None], b_keys, float("inf")), 0)
            b_high = tl.max(tl.where(m_token[:, None], b_keys, float("-inf")), 0)
            if KIND == 1:
                b_low = narrow(b_low, tl.bfloat16).to(tl.float32)
                b_high = narrow(tl.maximum(tl.div_rn(b_high - b_low, 3.0), 1e-8), tl.bfloat16).to(tl.float32)
                b_code = tl.div_rn(b_keys - b_low[None, :], tl.broadcast_to(b_high[None, :], [BLOCK_PAD, PLANE_PAD]))
                b_code = tl.minimum(tl.maximum(_round_to_even(tl.maximum(b_code, 0.0)), 0.0), 3.0).to(tl.int32)
                b_packed = b_packed | (tl.where(m_key, b_code, 0) << (2 * plane))
            tl.store(p_low + o_summary + o_channel, narrow(b_low, p_low.dtype.element_ty), mask=m_channel)
            tl.store(p_high + o_summary + o_channel, narrow(b_high, p_high.dtype.element_ty), mask=m_channel)
        if KIND == 1:
            o_code = i_batch * stride_cb + i_kv * stride_ch + (first_block + i_block) * (BLOCK_SIZE * PLANE_DIM)
            tl.store(
                p_codes + o_code + o_token[:, None] * PLANE_DIM + o_byte[None, :],
                b_packed.to(tl.uint8),
                mask=m_token[:, None] & (o_byte < PLANE_DIM)[None, :],
            )


def _launch(
    kv: torch.Tensor,
    key_dim: int,
    addresses: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    first_block: int,
    kind: int,
) -> None:
    batch, kv_heads, num_blocks, block_size, kv_dim = kv.shape
    low = summaries.get("low", kv)
    codes = summaries.get("codes", kv)
    plane_dim = -(-key_dim // 4)
    launch(
        _seal_kernel,
        (num_blocks, batch * kv_heads),
        kv.device,
        p_kv=kv,
        p_addresses=addresses,
        p_codes=codes,
        p_low=low,
        p_high=summaries["step"] if kind == INT2 else summaries.get("high", kv),
        stride_kb=kv.stride(0),
        stride_kh=kv.stride(1),
        stride_kn=kv.stride(2),
        stride_ab=addresses.stride(0),
        stride_cb=codes.stride(0),
        stride_ch=codes.stride(1),
        stride_sb=low.stride(0),
        stride_sh=low.stride(1),
        kv_heads=kv_heads,
        first_block=first_block,
        BLOCK_SIZE=block_size,
        BLOCK_PAD=tile(block_size, at_least=1),
        KEY_DIM=key_dim,
        KV_DIM=kv_dim,
        PLANE_DIM=plane_dim,
        PLANE_PAD=tile(plane_dim, at_least=1),
        KIND=kind,
        **block_constants(block_size, kv_dim, kv.dtype),
        num_warps=4 if block_size <= 64 else 8,
    )


def seal_blocks(
    kv: torch.Tensor, key_dim: int, addresses: torch.Tensor, summaries: dict[str, torch.Tensor], first_block: int
) -> None:
    """`reference.seal_blocks`: write blocks to their host pages and into the block index, on the current stream.

    Args:
        kv: [batch, kv_heads, blocks, block_size, key_dim + value_dim], each block contiguous.
        key_dim: Width of the keys.
        addresses: [batch, blocks] int64: the device-visible address of each block's new page, [kv_heads, block_size, kv_dim] in
            kv's dtype, page-locked and aligned to 16 bytes.
        summaries: Arrays [batch, kv_heads, capacity, ...] of the index, changed in place from `first_block` on: "codes", "low" and
            "step" as `reference.quantise_int2` makes them, or "low" and "high" in kv's dtype, or none.
        first_block: Number of the first block.

    Raises:
        ValueError: A shape, dtype or layout is none of these, or the arrays have no room.
    """
    check_devices(kv=kv, addresses=addresses, **summaries)
    kind = SUMMARIES.get(frozenset(summaries))
    if kind is None:
        raise ValueError(f"summaries {sorted(summaries)} are none of codes, low, step; low, high; or nothing")
    if kv.dim() != 5 or kv.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"kv must be [batch, kv_heads, blocks, block_size, kv_dim] in {KERNEL_DTYPES}, got {kv.dtype} {tuple(kv.shape)}"
        )
    batch, kv_heads, num_blocks, block_size, kv_dim = kv.shape
    check_block_layout("kv", kv)
    check_shape("addresses", addresses, (batch, num_blocks))
    if addresses.dtype != torch.int64 or (addresses.stride(1) != 1 and num_blocks > 1):
        raise ValueError(
            f"addresses must be int64 with contiguous rows, got {addresses.dtype}, strides {addresses.stride()}"
        )
    if not 1 <= key_dim <= kv_dim or not 1 <= block_size <= MAX_DIM or first_block < 0:
        raise ValueError(
            f"key_dim={key_dim} must lie in [1, {kv_dim}], block_size={block_size} in [1, {MAX_DIM}], "
            f"first_block={first_block} must not be negative"
        )
    widths = {"codes": (block_size, -(-key_dim // 4)), "low": (key_dim,), "step": (key_dim,), "high": (key_dim,)}
    strides = {array.stride() for name, array in summaries.items() if name != "codes"}
    for name, array in summaries.items():
        check_shape(name, array, (batch, kv_heads, None, *widths[name]))
        dtype = torch.uint8 if name == "codes" else torch.bfloat16 if kind == INT2 else kv.dtype
        if array.dtype != dtype or not array[0, 0].is_contiguous() or len(strides) > 1:
            raise ValueError(
                f"{name} must be {dtype}, contiguous within a KV head and laid out as the others, got {array.dtype}, "
                f"strides {array.stride()}"
            )
        if array.shape[2] < first_block + num_blocks:
            raise ValueError(f"{name} holds {array.shape[2]} blocks; {first_block + num_blocks} are needed")
    if num_blocks > 0:
        _launch(kv, key_dim, addresses, summaries, first_block, kind)
