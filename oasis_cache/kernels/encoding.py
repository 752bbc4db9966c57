"""Blocks in 8 or 4 bits per number: what their bytes mean, and the PyTorch versions of all that reads and writes them.

A number of channel c is read back as `step[c] * (offset[c] + code)`, in float32, then rounded to the cache's dtype. Codes and
offsets are small integers (fp8: an e4m3 number, no offset), so there is one rounding, and every implementation gives the same bits.

The step of a channel takes one byte: five bits of exponent above a common one and three of mantissa, rounded up. Its float32 bits
are `(exponent << 23) + (byte << 20)`. The byte 255 marks a channel that held NaN or infinity: it is read back as NaN.

Bytes of one block of one KV head, in this order: codes [block_size, code_width] (int4: channel j and j + code_width share a byte),
steps [kv_dim], offsets [kv_dim] int8 (int4 only), the exponent, and zeros up to a multiple of 16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from oasis_cache.kernels.reference import pack_codes, page_at, unpack_codes

ENCODINGS = ("int8", "int4", "fp8")
ALIGNMENT = 16  # bytes: what a thread of a device loads at once
NOT_FINITE = 255  # the step byte of a channel that cannot be encoded
MAX_INTEGER = 127  # of offset + code
MAX_CODE = {"int8": 127, "int4": 15, "fp8": 448}
_OCTAVES = 30  # between the common exponent and that of a head's largest step


@dataclass(frozen=True)
class Encoding:
    """Sizes of one block of one KV head under an encoding.

    Args:
        name: One of `ENCODINGS`.
        block_size: Tokens.
        kv_dim: Channels, keys and values together.
    """

    name: str
    block_size: int
    kv_dim: int

    def __post_init__(self) -> None:
        if self.name not in ENCODINGS:
            raise ValueError(f"encoding {self.name!r} must be one of {', '.join(map(repr, ENCODINGS))}")

    @property
    def code_width(self) -> int:
        """Bytes of one token's codes."""
        return (self.kv_dim + 1) // 2 if self.name == "int4" else self.kv_dim

    @property
    def steps_at(self) -> int:
        return self.block_size * self.code_width

    @property
    def offsets_at(self) -> int:
        return self.steps_at + self.kv_dim

    @property
    def exponent_at(self) -> int:
        return self.offsets_at + (self.kv_dim if self.name == "int4" else 0)

    @property
    def num_bytes(self) -> int:
        return -(-(self.exponent_at + 1) // ALIGNMENT) * ALIGNMENT


def encode(kv: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Blocks as bytes.

    The error of a number is at most half a step and the rounding to its dtype. A step is at most 9/8 of `absmax / 127` (int8) or of
    `max((max - min) / 15, absmax / 127)` (int4) of the channel in the block. fp8: at most 1/16 of the number, or 2**-10 of a step
    (at most 9/8 of `absmax / 448`) where that is more. Steps below 2**-30 of the head's largest may be as large as that. Within a
    step of its dtype's largest number, a number may lose a whole step, or 1/8 of itself in fp8: it never overflows.

    Args:
        kv: [..., block_size, kv_dim], floating point.

    Returns:
        [..., encoding.num_bytes] uint8.
    """
    largest = torch.finfo(kv.dtype).max  # rounding to it must not overflow
    kv = kv.float()
    low, high = kv.amin(-2), kv.amax(-2)
    lost = ~(low.isfinite() & high.isfinite())
    kv = kv.masked_fill(lost.unsqueeze(-2), 0.0)
    low, high = low.masked_fill(lost, 0.0), high.masked_fill(lost, 0.0)
    absmax = torch.maximum(low.abs(), high.abs())
    wanted = absmax / (MAX_CODE["fp8"] if encoding.name == "fp8" else MAX_INTEGER)
    if encoding.name == "int4":
        wanted = torch.maximum(wanted, high / MAX_CODE["int4"] - low / MAX_CODE["int4"])
    step_bytes, exponent = _step_bytes(wanted)
    step = _steps(step_bytes, exponent).unsqueeze(-2)
    parts = [step_bytes.masked_fill(lost, NOT_FINITE).to(torch.uint8)]
    if encoding.name == "fp8":
        floats = (kv / step).clamp(-MAX_CODE["fp8"], MAX_CODE["fp8"]).to(torch.float8_e4m3fn)
        codes = floats.view(torch.uint8)
        codes = codes - ((floats.float() * step).abs() > largest).to(torch.uint8)  # the next number towards zero
    else:
        most = (largest / step).floor().clamp_max(MAX_INTEGER)
        integers = (kv / step).round().clamp(-most, most)
        if encoding.name == "int4":
            offset = integers.amin(-2)
            codes = pack_codes((integers - offset.unsqueeze(-2)).clamp_max(MAX_CODE["int4"]).to(torch.uint8), 4)
            parts.append(offset.to(torch.int8).view(torch.uint8))
        else:
            codes = integers.to(torch.int8).view(torch.uint8)
    parts = [codes.flatten(-2), *parts, exponent.to(torch.uint8)]
    padding = (0, encoding.num_bytes - encoding.exponent_at - 1)
    return torch.nn.functional.pad(torch.cat(parts, dim=-1), padding)


def _step_bytes(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps [..., kv_dim] float32, finite and not negative -> bytes [..., kv_dim] and exponents [..., 1], int32, rounded up."""
    bits = wanted.contiguous().view(torch.int32)
    exponent = ((bits.amax(-1, keepdim=True) >> 23) - _OCTAVES).clamp_min(1)
    return ((bits - (exponent << 23) + (1 << 20) - 1) >> 20).clamp(0, NOT_FINITE - 1), exponent


def _steps(step_bytes: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """What `_step_bytes` gives -> steps [..., kv_dim] float32."""
    return ((exponent << 23) + (step_bytes << 20)).view(torch.float32)


def decode(pages: torch.Tensor, encoding: Encoding, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`, up to its error: [..., num_bytes] uint8 -> [..., block_size, kv_dim] of `dtype`."""
    codes = pages[..., : encoding.steps_at].unflatten(-1, (encoding.block_size, encoding.code_width))
    step_bytes = pages[..., encoding.steps_at : encoding.offsets_at].to(torch.int32)
    exponent = pages[..., encoding.exponent_at : encoding.exponent_at + 1].to(torch.int32)
    step = _steps(step_bytes, exponent).masked_fill(step_bytes == NOT_FINITE, float("nan")).unsqueeze(-2)
    if encoding.name == "fp8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif encoding.name == "int8":
        numbers = codes.view(torch.int8).float()
    else:
        offset = pages[..., encoding.offsets_at : encoding.exponent_at].view(torch.int8).float()
        numbers = unpack_codes(codes, 4, encoding.kv_dim).float() + offset.unsqueeze(-2)
    return (numbers * step).to(dtype)


def gather_encoded(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    addresses: torch.Tensor,
    target: torch.Tensor,
    encoding: Encoding,
) -> None:
    """`reference.gather_blocks` from encoded pages: by the host, whatever the target's device.

    Args:
        blocks, slots, mask, target: See `reference.gather_blocks`.
        addresses: [batch, num_blocks] int64: where each block's page begins, [kv_heads, encoding.num_bytes] uint8.
    """
    rows, heads, entries = mask.nonzero(as_tuple=True)
    num_bytes = encoding.num_bytes
    sources = (addresses[rows, blocks[rows, heads, entries]] + heads * num_bytes).tolist()
    pages = torch.empty(len(sources), num_bytes, dtype=torch.uint8)
    for number, source in enumerate(sources):
        ctypes.memmove(pages.data_ptr() + number * num_bytes, source, num_bytes)
    target[rows, heads, slots[rows, heads, entries]] = decode(pages.to(target.device), encoding, target.dtype)


def write_pages(pages: torch.Tensor, addresses: torch.Tensor) -> None:
    """Write encoded blocks to their host pages.

    Args:
        pages: [batch, kv_heads, blocks, num_bytes] uint8.
        addresses: [batch, blocks] int64: where each block's page begins, [kv_heads, num_bytes].
    """
    for row in range(pages.shape[0]):
        for block in range(pages.shape[2]):
            page = page_at(int(addresses[row, block]), (pages.shape[1], pages.shape[3]), torch.uint8)
            page.copy_(pages[row, :, block])
