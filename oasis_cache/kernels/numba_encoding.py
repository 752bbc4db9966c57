"""`encoding.gather_encoded` on a CPU, compiled by numba: pages decoded straight into their slots."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from oasis_cache.kernels.encoding import ENCODINGS, NOT_FINITE, Encoding

_INT8, _INT4, _FP8 = (ENCODINGS.index(name) for name in ("int8", "int4", "fp8"))
_FP8_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@intrinsic
def _bytes_at(typing_context: Any, address: Any) -> Any:
    """An address as a pointer, of which `numba.carray` makes an array."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.uint8)(address), generate


@numba.njit(cache=True, nogil=True)
def _read_ranges(page, steps_at, offsets_at, exponent_at, step_bits, step, offset):
    """Steps and offsets of a head's page into step and offset [channels] f32; step_bits [channels] i32 is the memory of step."""
    base = np.int32(page[exponent_at]) << 23
    for c in range(step.size):
        step_bits[c] = base + (np.int32(page[steps_at + c]) << 20)
    for c in range(step.size):
        if page[steps_at + c] == NOT_FINITE:
            step[c] = np.nan
    if exponent_at > offsets_at:
        for c in range(step.size):
            offset[c] = np.float32(np.int8(page[offsets_at + c]))


@numba.njit(cache=True, nogil=True)
def _decode_token(codes, kind, fp8_values, step, offset, out):
    """One token: codes [code_width] u8 -> out [channels] f32."""
    channels = out.size
    if kind == _INT8:
        for c in range(channels):
            out[c] = step[c] * np.float32(np.int8(codes[c]))
    elif kind == _INT4:
        half = codes.size
        for c in range(half):
            out[c] = step[c] * (offset[c] + np.float32(codes[c] & 15))
        for c in range(channels - half):
            out[half + c] = step[half + c] * (offset[half + c] + np.float32(codes[c] >> 4))
    else:
        for c in range(channels):
            out[c] = step[c] * fp8_values[codes[c]]


@numba.njit(cache=True, nogil=True)
def _round_to_bfloat16(bits, out):
    """float32 as bits [channels] u32 -> bfloat16 as out [channels] u16, to nearest, halves to even."""
    for c in range(out.size):
        out[c] = np.uint16((bits[c] + np.uint32(0x7FFF) + ((bits[c] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@numba.njit(cache=True, nogil=True)
def _gather(
    blocks, slots, mask, addresses, block_size, channels, code_width, steps_at, offsets_at, exponent_at, num_bytes, kind,
    fp8_values, narrow, target, strides,
):  # fmt: skip
    """All entries of a plan; `target` is an address and `strides` are bytes; narrow: the target holds bfloat16."""
    batch, kv_heads, entries = blocks.shape
    step_bits = np.empty(channels, np.int32)
    step = step_bits.view(np.float32)
    offset, row = np.empty(channels, np.float32), np.empty(channels, np.float32)
    row_bits = row.view(np.uint32)
    for i in range(batch):
        for head in range(kv_heads):
            for entry in range(entries):
                if not mask[i, head, entry]:
                    continue
                p_page = np.uintp(addresses[i, blocks[i, head, entry]] + head * num_bytes)
                page = numba.carray(_bytes_at(p_page), (num_bytes,), np.uint8)
                p_slot = np.uintp(target + i * strides[0] + head * strides[1] + slots[i, head, entry] * strides[2])
                slot = numba.carray(_bytes_at(p_slot), (block_size * channels * (2 if narrow else 4),), np.uint8)
                _read_ranges(page, steps_at, offsets_at, exponent_at, step_bits, step, offset)
                for token in range(block_size):
                    codes = page[token * code_width : (token + 1) * code_width]
                    if narrow:
                        _decode_token(codes, kind, fp8_values, step, offset, row)
                        _round_to_bfloat16(row_bits, slot.view(np.uint16)[token * channels : (token + 1) * channels])
                    else:
                        out = slot.view(np.float32)[token * channels : (token + 1) * channels]
                        _decode_token(codes, kind, fp8_values, step, offset, out)


def gather_encoded(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    addresses: torch.Tensor,
    target: torch.Tensor,
    encoding: Encoding,
) -> None:
    """`encoding.gather_encoded` into float32 or bfloat16; each block of the target contiguous."""
    size = target.element_size()
    _gather(
        blocks.numpy(),
        slots.numpy(),
        mask.view(torch.uint8).numpy(),
        addresses.contiguous().numpy(),  # one layout, compiled once
        encoding.block_size,
        encoding.kv_dim,
        encoding.code_width,
        encoding.steps_at,
        encoding.offsets_at,
        encoding.exponent_at,
        encoding.num_bytes,
        ENCODINGS.index(encoding.name),
        _FP8_VALUES,
        target.dtype == torch.bfloat16,
        target.data_ptr(),
        tuple(stride * size for stride in target.stride()[:3]),
    )
