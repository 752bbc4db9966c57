"""Device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def head_of_program(kv_heads):
    """The second program index as batch row times KV head, batch row, and KV head, for 64-bit offsets."""
    i_head = tl.program_id(1)
    return i_head.to(tl.int64), (i_head // kv_heads).to(tl.int64), (i_head % kv_heads).to(tl.int64)


@triton.jit
def dot(b_left, b_right, b_sum):
    """b_left @ b_right + b_sum in float32; float32 operands are not rounded."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers; products are exact in float32
        return tl.dot(b_left.to(tl.float32), b_right.to(tl.float32), b_sum, input_precision="ieee")
    return tl.dot(b_left, b_right, b_sum, input_precision="ieee")


@triton.jit
def finite(b_max):
    """A maximum to subtract: 0 where it is -inf, where all terms are -inf themselves."""
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def narrow(b_value, DTYPE: tl.constexpr):
    """A float32 tile in another floating type, rounded to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # the interpreter cuts the low bits off instead
        b_bits = b_value.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -65536
        b_value = b_bits.to(tl.float32, bitcast=True)
    return b_value.to(DTYPE)
