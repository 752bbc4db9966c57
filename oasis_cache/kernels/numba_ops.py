"""Scoring on a CPU, compiled by numba (optional): reference.py's meaning without its unpacked intermediate tensors."""

from __future__ import annotations

import numba
import numpy as np
import torch

_PLANES = np.array([[(byte >> shift) & 3 for shift in (0, 2, 4, 6)] for byte in range(256)], dtype=np.float32)
_CHUNK_BLOCKS = 128  # blocks a thread takes at a time
_PARALLEL_FROM = 4096  # blocks of single KV heads from which waking other threads pays


@numba.njit(fastmath=True, cache=True, nogil=True)
def _score_range(queries, codes, low, step, planes, scaling, start, stop, out):
    """Log-mass of blocks start..stop of one KV head into out [rows, blocks] f32.

    queries [rows, 4 * width] f32, interleaved: entry 4 * j + p is channel p * width + j; codes [blocks, block_size, width] u8;
    low, step [blocks, dim] f32; planes [256, 4] f32, the four codes of each byte.
    """
    rows, padded = queries.shape
    block_size, width, dim = codes.shape[1], codes.shape[2], low.shape[1]
    scaled = np.zeros((rows, padded), np.float32)
    unpacked = np.empty(padded, np.float32)
    scores = np.empty((rows, block_size), np.float32)
    exponents = np.empty(block_size, np.int32)
    powers = exponents.view(np.float32)
    for block in range(start, stop):
        for row in range(rows):
            base = np.float32(0.0)
            for p in range(4):
                for j in range(min(width, dim - p * width)):
                    query = queries[row, 4 * j + p] * scaling
                    base += query * low[block, p * width + j]
                    scaled[row, 4 * j + p] = query * step[block, p * width + j]
            out[row, block] = base
        for token in range(block_size):
            for j in range(width):
                byte = codes[block, token, j]
                unpacked[4 * j] = planes[byte, 0]
                unpacked[4 * j + 1] = planes[byte, 1]
                unpacked[4 * j + 2] = planes[byte, 2]
                unpacked[4 * j + 3] = planes[byte, 3]
            for row in range(rows):
                total = np.float32(0.0)
                for c in range(padded):
                    total += scaled[row, c] * unpacked[c]
                scores[row, token] = total
        for row in range(rows):
            highest = scores[row, 0]
            for token in range(block_size):
                highest = max(highest, scores[row, token])
            total = np.float32(0.0)
            for token in range(block_size):  # exp(x), x <= 0: the whole powers of two go into the exponent bits
                x = max((scores[row, token] - highest) * np.float32(1.44269504), np.float32(-126.0))
                whole = np.floor(x)
                x -= whole
                exponents[token] = (np.int32(whole) + 127) << 23
                y = np.float32(1.8775767e-3)
                y = y * x + np.float32(8.9893397e-3)
                y = y * x + np.float32(5.5826318e-2)
                y = y * x + np.float32(2.4015361e-1)
                y = y * x + np.float32(6.9315308e-1)
                scores[row, token] = y * x + np.float32(9.9999994e-1)
            for token in range(block_size):
                total += scores[row, token] * powers[token]
            out[row, block] += highest + np.log(total)


@numba.njit(cache=True, nogil=True)
def _score_serial(queries, codes, low, step, planes, scaling, out):
    """`_score_range` over all heads: queries [heads, rows, padded], the others [heads, blocks, ...], out [heads, rows, blocks]."""
    for head in range(codes.shape[0]):
        _score_range(queries[head], codes[head], low[head], step[head], planes, scaling, 0, out.shape[2], out[head])


@numba.njit(parallel=True, cache=True, nogil=True)
def _score_parallel(queries, codes, low, step, planes, scaling, chunk, out):
    """`_score_serial` in threads, `chunk` blocks at a time."""
    heads, blocks = codes.shape[0], out.shape[2]
    chunks = (blocks + chunk - 1) // chunk
    for job in numba.prange(heads * chunks):
        head, start = job // chunks, (job % chunks) * chunk
        stop = min(start + chunk, blocks)
        _score_range(queries[head], codes[head], low[head], step[head], planes, scaling, start, stop, out[head])


def log_mass_int2(
    queries: torch.Tensor, codes: torch.Tensor, low: torch.Tensor, step: torch.Tensor, num_blocks: int, scaling: float
) -> torch.Tensor:
    """`reference.log_mass_int2` of the first `num_blocks` blocks on CPU tensors without a visibility mask, within 1e-5.

    Args:
        queries: [batch, kv_heads, rows, key_dim].
        codes: [batch, kv_heads, capacity, block_size, ceil(key_dim / 4)] uint8, contiguous.
        low, step: [batch, kv_heads, capacity, key_dim].

    Returns:
        [batch, kv_heads, rows, num_blocks] float32.
    """
    batch, kv_heads, rows, dim = queries.shape
    width = codes.shape[-1]
    planes = torch.nn.functional.pad(queries.float(), (0, 4 * width - dim)).unflatten(-1, (4, width))
    interleaved = planes.transpose(-1, -2).reshape(batch * kv_heads, rows, 4 * width)
    out = np.empty((batch * kv_heads, rows, num_blocks), np.float32)
    arrays = [
        interleaved.numpy(),
        codes.flatten(0, 1).numpy(),
        low[:, :, :num_blocks].float().flatten(0, 1).numpy(),
        step[:, :, :num_blocks].float().flatten(0, 1).numpy(),
        _PLANES,
        np.float32(scaling),
    ]
    if batch * kv_heads * num_blocks < _PARALLEL_FROM or numba.get_num_threads() == 1:
        _score_serial(*arrays, out)
    else:
        _score_parallel(*arrays, _CHUNK_BLOCKS, out)
    return torch.from_numpy(out).view(batch, kv_heads, rows, num_blocks)
