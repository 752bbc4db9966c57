"""Attention of few query rows over the slots and the window on a CPU, compiled by numba: one call, in threads.

A KV head's tokens are taken in pieces of a fixed length, each with its own softmax, and merged afterwards, so that sums do not
depend on how many threads there are.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from oasis_cache.kernels.lanes import (
    LANES,
    add_values_1,
    add_values_2,
    add_values_3,
    add_values_4,
    exp_in_place,
    half_add_values_1,
    half_add_values_2,
    half_add_values_3,
    half_add_values_4,
)
from oasis_cache.kernels.numba_ops import MASKED, _address, _key_scores, _parallel_lock, num_threads

PIECE_TOKENS = 512
MAX_ROWS = 128  # query rows of a KV head; for many more of them PyTorch's matrix products are as fast
DTYPES = (torch.float32, torch.bfloat16)
_VALUE_TOKENS = 64  # tokens whose values stay in the fastest memory while channels are gone through
_PARALLEL_FROM = 1 << 15  # tokens times query rows from which waking other threads pays


@numba.njit(cache=True, nogil=True)
def _add_values(half, values, stride, count, weights, row_bytes, rows, dim, out):
    """out [rows, dim] += weights [rows, count] x values; addresses as in `_key_scores`."""
    for row in range(0, rows, 4):
        w, o = weights + np.uintp(row) * row_bytes, out + np.uintp(4 * row) * dim
        left = rows - row
        if half:
            if left >= 4:
                half_add_values_4(values, stride, count, w, row_bytes, dim, o)
            elif left == 3:
                half_add_values_3(values, stride, count, w, row_bytes, dim, o)
            elif left == 2:
                half_add_values_2(values, stride, count, w, row_bytes, dim, o)
            else:
                half_add_values_1(values, stride, count, w, row_bytes, dim, o)
        elif left >= 4:
            add_values_4(values, stride, count, w, row_bytes, dim, o)
        elif left == 3:
            add_values_3(values, stride, count, w, row_bytes, dim, o)
        elif left == 2:
            add_values_2(values, stride, count, w, row_bytes, dim, o)
        else:
            add_values_1(values, stride, count, w, row_bytes, dim, o)


@numba.njit(cache=True, nogil=True)
def _attend_piece(half, queries, keys, values, stride, start, stop, first_row, rows_of_group, out, highest, total):
    """Tokens start..stop of one KV head.

    queries [rows, dim] f32, scaled; keys, values: addresses of token 0; `first_row`: tokens that the first of `rows_of_group` rows
    sees, the next one sees one more; out [rows, value_dim], highest, total [rows] f32: sums of values, maximum, sum of weights.
    """
    rows, dim = queries.shape
    count = stop - start
    padded = (count + LANES - 1) // LANES * LANES
    weights = np.empty((rows, padded), np.float32)
    best = np.empty(1, np.float32)
    out[:] = np.float32(0.0)
    p_weights, p_best, p_out = _address(weights), _address(best), _address(out)
    row_bytes, p_dim, p_value_dim = np.uintp(4 * padded), np.uintp(dim), np.uintp(out.shape[1])
    p_keys, p_values = keys + np.uintp(start) * stride, values + np.uintp(start) * stride
    _key_scores(half, p_keys, stride, np.uintp(count), _address(queries), rows, p_dim, p_weights, row_bytes)
    for row in range(rows):
        seen = min(count, first_row + row % rows_of_group - start)
        for token in range(max(0, seen), padded):
            weights[row, token] = MASKED
        total[row] = exp_in_place(p_weights + np.uintp(row) * row_bytes, np.uintp(padded), p_best)
        highest[row] = best[0]
    for first in range(0, count, _VALUE_TOKENS):
        some = np.uintp(min(_VALUE_TOKENS, count - first))
        p_some = p_weights + np.uintp(4 * first)
        _add_values(
            half, p_values + np.uintp(first) * stride, stride, some, p_some, row_bytes, rows, p_value_dim, p_out
        )
    # numba frees an array after its last use by name: what only its address was used of must be named once more.
    weights[0, 0] = np.float32(0.0)
    best[0] = np.float32(0.0)


@numba.njit(cache=True, nogil=True)
def _merge(parts, highest, total, out):
    """One KV head: parts [pieces, rows, dim], highest, total [pieces, rows] -> out [rows, dim]; all f32."""
    pieces, rows, dim = parts.shape
    for row in range(rows):
        most = highest[0, row]
        for piece in range(1, pieces):
            most = max(most, highest[piece, row])
        whole = np.float32(0.0)
        out[row] = np.float32(0.0)
        for piece in range(pieces):
            weight = np.exp(highest[piece, row] - most)
            whole += weight * total[piece, row]
            for channel in range(dim):
                out[row, channel] += weight * parts[piece, row, channel]
        for channel in range(dim):
            out[row, channel] /= whole


@numba.njit(cache=True, nogil=True)
def _serial(half, queries, kv, strides, key_bytes, kv_heads, num_tokens, rows, parts, highest, total, out):
    heads, pieces = parts.shape[:2]
    for head in range(heads):
        base = kv + np.uintp(head // kv_heads) * strides[0] + np.uintp(head % kv_heads) * strides[1]
        for piece in range(pieces):
            start = piece * PIECE_TOKENS
            stop = min(start + PIECE_TOKENS, num_tokens)
            _attend_piece(
                half, queries[head], base, base + key_bytes, strides[2], start, stop, num_tokens - rows + 1, rows,
                parts[head, piece], highest[head, piece], total[head, piece],
            )  # fmt: skip
        _merge(parts[head], highest[head], total[head], out[head])


@numba.njit(parallel=True, cache=True, nogil=True)
def _parallel(half, queries, kv, strides, key_bytes, kv_heads, num_tokens, rows, parts, highest, total, out):
    heads, pieces = parts.shape[:2]
    for job in numba.prange(heads * pieces):
        head, piece = job // pieces, job % pieces
        base = kv + np.uintp(head // kv_heads) * strides[0] + np.uintp(head % kv_heads) * strides[1]
        start = piece * PIECE_TOKENS
        stop = min(start + PIECE_TOKENS, num_tokens)
        _attend_piece(
            half, queries[head], base, base + key_bytes, strides[2], start, stop, num_tokens - rows + 1, rows,
            parts[head, piece], highest[head, piece], total[head, piece],
        )  # fmt: skip
    for head in range(heads):
        _merge(parts[head], highest[head], total[head], out[head])


def serves(queries: torch.Tensor, kv: torch.Tensor, key_dim: int) -> bool:
    """Whether `sparse_attention` takes these."""
    return (
        kv.dtype in DTYPES
        and queries.dtype == kv.dtype
        and queries.shape[2] <= MAX_ROWS
        and key_dim % LANES == 0
        and kv.shape[3] % LANES == 0
        and kv.stride(3) == 1
    )


def sparse_attention(
    queries: torch.Tensor, kv: torch.Tensor, key_dim: int, num_tokens: int, rows: int, scaling: float
) -> torch.Tensor:
    """`reference.sparse_attention`, its first result only, in the queries' dtype, without masks and what changes scores.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim], at most `MAX_ROWS` rows of all query heads of a KV head.
        kv: [batch, kv_heads, capacity, key_dim + value_dim], widths multiples of 16, float32 or bfloat16.
    """
    batch, kv_heads, query_rows, _ = queries.shape
    heads, value_dim, size = batch * kv_heads, kv.shape[3] - key_dim, kv.element_size()
    pieces = (num_tokens + PIECE_TOKENS - 1) // PIECE_TOKENS
    parts = np.empty((heads, pieces, query_rows, value_dim), np.float32)
    highest, total = np.empty((2, heads, pieces, query_rows), np.float32)
    out = np.empty((heads, query_rows, value_dim), np.float32)
    arguments = (
        kv.dtype == torch.bfloat16,
        (queries.float() * scaling).contiguous().view(heads, query_rows, -1).numpy(),
        np.uintp(kv.data_ptr()),
        np.array(kv.stride()[:3], np.uintp) * np.uintp(size),
        np.uintp(key_dim * size),
        kv_heads,
        num_tokens,
        rows,
        parts,
        highest,
        total,
        out,
    )
    threads = num_threads()
    if threads == 1 or heads * num_tokens * query_rows < _PARALLEL_FROM:
        _serial(*arguments)
    else:
        with _parallel_lock:
            numba.set_num_threads(threads)
            _parallel(*arguments)
    return torch.from_numpy(out).view(batch, kv_heads, query_rows, value_dim).to(queries.dtype)
