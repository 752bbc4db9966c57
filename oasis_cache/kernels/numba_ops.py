"""The operations of reference.py on a CPU, compiled by numba (optional): no intermediate tensors, one call an operation.

2-bit keys lie here as *words*: 16 tokens' codes of one channel in one uint32, token t in bits 2t and 2t + 1. So a block's
channel unpacks into one vector register with a lane for each token, and no sum over lanes is needed.
"""

from __future__ import annotations

import threading

import numba
import numpy as np
import torch

from oasis_cache.kernels import reference
from oasis_cache.kernels.lanes import (
    LANES,
    copy_bytes,
    dot_1,
    dot_2,
    dot_3,
    dot_4,
    exp_in_place,
    half_key_dots_1,
    half_key_dots_2,
    half_key_dots_3,
    half_key_dots_4,
    key_dots_1,
    key_dots_2,
    key_dots_3,
    key_dots_4,
    log_in_place,
    scale_query,
)

WORD_TOKENS = LANES  # tokens whose 2-bit codes share a word
_CHUNK_BLOCKS = 128  # blocks a thread takes at a time
_PARALLEL_FROM = 2048  # blocks of single KV heads from which waking other threads pays
MASKED = np.float32(-1e30)
_parallel_lock = threading.Lock()  # not every threading layer of numba takes calls from two threads at once


# --- Scoring --------------------------------------------------------------------------------------------------------------


def pack_int2(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.quantise_int2` in this layout, channels padded to a multiple of 16.

    Args:
        keys: [batch, kv_heads, blocks, block_size, key_dim].

    Returns:
        words [batch, kv_heads, blocks, ceil(block_size / 16), channels] int32, low and step [batch, kv_heads, blocks, channels]
        bfloat16.
    """
    codes, low, step = reference.round_int2(keys)
    padding = (0, -keys.shape[-1] % LANES)
    words, low, step = (torch.nn.functional.pad(part, padding) for part in (pack_words(codes), low, step))
    return words, low, step


def unpack_words(words: torch.Tensor, block_size: int) -> torch.Tensor:
    """The inverse of `pack_words`: [..., ceil(block_size / 16), dim] int32 -> [..., block_size, dim] uint8."""
    shifts = torch.arange(0, 2 * WORD_TOKENS, 2, dtype=torch.int32).unsqueeze(-1)
    codes = ((words.unsqueeze(-2) >> shifts) & 3).to(torch.uint8)
    return codes.flatten(-3, -2)[..., :block_size, :]


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 4 [..., block_size, dim] uint8 -> words [..., ceil(block_size / 16), dim] int32."""
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[-2] % WORD_TOKENS)).unflatten(-2, (-1, WORD_TOKENS))
    shifts = torch.arange(0, 2 * WORD_TOKENS, 2, dtype=torch.int32).unsqueeze(-1)
    return (padded.to(torch.int32) << shifts).sum(-2, dtype=torch.int32)


@numba.njit(cache=True, nogil=True)
def _score_range(queries, words, low, step, visible, chosen, block_size, start, stop, out):
    """Log-mass of blocks start..stop of one KV head into out [rows, blocks] f32.

    queries [rows, dim] f32, scaled, dim a multiple of 16; words [blocks, words per block, dim] u32; low, step [blocks, dim],
    bfloat16 as u16; visible [blocks, block_size] u8, or without blocks: all are; chosen [blocks] i64, the numbers of the blocks
    that are scored, or empty: all.
    """
    rows, dim = queries.shape
    num_words = words.shape[1]
    padded = num_words * LANES
    scaled = np.empty((rows, dim), np.float32)
    scores = np.empty((num_words, rows, LANES), np.float32)
    tokens = np.empty(padded, np.float32)
    highest = np.empty(1, np.float32)
    count = (stop - start + LANES - 1) // LANES * LANES
    totals = np.ones((rows, count), np.float32)
    p_queries, p_scaled, p_scores = _address(queries), _address(scaled), _address(scores)
    p_tokens, p_highest, p_totals = _address(tokens), _address(highest), _address(totals)
    p_words, p_low, p_step = _address(words), _address(low), _address(step)
    plain = block_size == LANES and visible.shape[0] == 0
    for place in range(start, stop):
        block = chosen[place] if chosen.shape[0] else place
        for row in range(rows):
            base = scale_query(
                p_queries + np.uintp(4 * row * dim),
                p_low + np.uintp(2 * block * dim),
                p_step + np.uintp(2 * block * dim),
                np.uintp(dim),
                p_scaled + np.uintp(4 * row * dim),
            )
            for w in range(num_words):
                scores[w, row] = base
        for w in range(num_words):
            p_word = p_words + np.uintp(4 * (block * num_words + w) * dim)
            for row in range(0, rows, 4):
                p_row = p_scaled + np.uintp(4 * row * dim)
                p_out = p_scores + np.uintp(4 * (w * rows + row) * LANES)
                if rows - row >= 4:
                    dot_4(p_word, p_row, np.uintp(dim), p_out)
                elif rows - row == 3:
                    dot_3(p_word, p_row, np.uintp(dim), p_out)
                elif rows - row == 2:
                    dot_2(p_word, p_row, np.uintp(dim), p_out)
                else:
                    dot_1(p_word, p_row, np.uintp(dim), p_out)
        for row in range(rows):
            if plain:
                total = exp_in_place(p_scores + np.uintp(4 * row * LANES), np.uintp(LANES), p_highest)
                out[row, place], totals[row, place - start] = highest[0], total
                continue
            hidden = True
            for t in range(padded):
                tokens[t] = scores[t // LANES, row, t % LANES]
                if t >= block_size or (visible.shape[0] > 0 and not visible[block, t]):
                    tokens[t] = MASKED
                else:
                    hidden = False
            if hidden:
                out[row, place] = MASKED
            else:
                total = exp_in_place(p_tokens, np.uintp(padded), p_highest)
                out[row, place], totals[row, place - start] = highest[0], total
    for row in range(rows):
        log_in_place(p_totals + np.uintp(4 * row * count), np.uintp(count))
        for place in range(start, stop):
            out[row, place] += totals[row, place - start]
    # numba frees an array after its last use by name: what only its address was used of must be named once more.
    scaled[0, 0] = np.float32(0.0)
    scores[0, 0, 0] = np.float32(0.0)
    tokens[0] = np.float32(0.0)
    highest[0] = np.float32(0.0)


@numba.njit(inline="always")
def _address(array):
    return np.uintp(array.ctypes.data)


@numba.njit(cache=True, nogil=True)
def _rank(log_mass, rows, best):
    """One KV head: log_mass [group, rows, blocks] f32 -> rows [rows, blocks] f32 as `rank_rows` gives them, best [blocks] f32."""
    group, num_rows, blocks = log_mass.shape
    shares = np.full((blocks + LANES - 1) // LANES * LANES, MASKED, np.float32)
    highest = np.empty(1, np.float32)
    for row in range(num_rows):
        rows[row, :] = np.float32(0.0)
        for g in range(group):
            shares[:blocks] = log_mass[g, row]
            shares[blocks:] = MASKED
            total = exp_in_place(_address(shares), np.uintp(shares.size), _address(highest))
            if highest[0] > MASKED:
                weight = np.float32(1.0) / (total * np.float32(group))
                for block in range(blocks):
                    rows[row, block] += shares[block] * weight
        for block in range(blocks):
            if log_mass[0, row, block] <= MASKED:
                rows[row, block] = np.float32(-1.0)
    best[:] = rows[0]
    for row in range(1, num_rows):
        for block in range(blocks):
            best[block] = max(best[block], rows[row, block])


@numba.njit(cache=True, nogil=True)
def _hide(log_mass):
    """Masked entries become -inf."""
    flat = log_mass.reshape(-1)
    for i in range(flat.shape[0]):
        if flat[i] <= MASKED:
            flat[i] = -np.inf


@numba.njit(cache=True, nogil=True)
def _score_serial(queries, words, low, step, visible, chosen, block_size, group, log_mass, rows, best):
    """All KV heads: queries [heads, group * rows, dim], visible [batch or 0, ...], log_mass [heads, group * rows, blocks]."""
    heads, query_rows, blocks = log_mass.shape
    per_row = heads // max(1, visible.shape[0])
    for head in range(heads):
        seen = visible[head // per_row] if visible.shape[0] else np.empty((0, 0), np.uint8)
        numbers = chosen[head] if chosen.shape[0] else np.empty(0, np.int64)
        _score_range(
            queries[head], words[head], low[head], step[head], seen, numbers, block_size, 0, blocks, log_mass[head]
        )
        _rank(log_mass[head].reshape(group, query_rows // group, blocks), rows[head], best[head])


@numba.njit(parallel=True, cache=True, nogil=True)
def _score_parallel(queries, words, low, step, visible, chosen, block_size, group, chunk, log_mass, rows, best):
    """`_score_serial` in threads, `chunk` blocks at a time."""
    heads, query_rows, blocks = log_mass.shape
    per_row = heads // max(1, visible.shape[0])
    chunks = (blocks + chunk - 1) // chunk
    for job in numba.prange(heads * chunks):
        head, start = job // chunks, (job % chunks) * chunk
        seen = visible[head // per_row] if visible.shape[0] else np.empty((0, 0), np.uint8)
        numbers = chosen[head] if chosen.shape[0] else np.empty(0, np.int64)
        _score_range(
            queries[head], words[head], low[head], step[head], seen, numbers, block_size, start, min(start + chunk, blocks),
            log_mass[head],
        )  # fmt: skip
    for head in numba.prange(heads):
        _rank(log_mass[head].reshape(group, query_rows // group, blocks), rows[head], best[head])


def _scaled(queries: torch.Tensor, scaling: float, width: int) -> np.ndarray:
    """Queries [batch, kv_heads, rows, dim] times `scaling`, with zeros up to a width: [heads, rows, width] float32."""
    scaled = queries.float() * scaling
    if scaled.shape[-1] < width:
        scaled = torch.nn.functional.pad(scaled, (0, width - scaled.shape[-1]))
    return scaled.contiguous().flatten(0, 1).numpy()


def num_threads() -> int:
    """Threads that a compiled function may use: PyTorch's, as far as numba has them."""
    return int(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def threads_pay(blocks: int) -> bool:
    """Whether scoring so many blocks of single KV heads is worth waking other threads."""
    return blocks >= _PARALLEL_FROM and num_threads() > 1


def score_int2(
    queries: torch.Tensor,
    words: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    num_blocks: int,
    block_size: int,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_int2` over the first `num_blocks` blocks, or over `chosen` ones, keys as words, within 1e-5.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        words, low, step: As `pack_int2` makes them, [batch, kv_heads, capacity, ...], contiguous.
        visible: [batch, num_blocks, block_size] bool, or None.
        chosen: [batch, kv_heads, count] int64, numbers of the blocks to score (without `visible`), or None.
    """
    batch, kv_heads, query_rows, _ = queries.shape
    num_blocks = num_blocks if chosen is None else chosen.shape[2]
    heads, rows = batch * kv_heads, query_rows // group
    log_mass = np.empty((heads, query_rows, num_blocks), np.float32)
    shares = np.empty((heads, rows, num_blocks), np.float32)
    best = np.empty((heads, num_blocks), np.float32)
    arrays = (
        _scaled(queries, scaling, words.shape[-1]),
        words.flatten(0, 1).numpy().view(np.uint32),
        low.flatten(0, 1).view(torch.int16).numpy().view(np.uint16),
        step.flatten(0, 1).view(torch.int16).numpy().view(np.uint16),
        np.empty((0, 0, 0), np.uint8) if visible is None else visible.contiguous().view(torch.uint8).numpy(),
        np.empty((0, 0), np.int64) if chosen is None else chosen.contiguous().flatten(0, 1).numpy(),
        block_size,
        group,
    )
    if not threads_pay(heads * num_blocks):
        _score_serial(*arrays, log_mass, shares, best)
    else:
        with _parallel_lock:
            numba.set_num_threads(num_threads())
            _score_parallel(*arrays, _CHUNK_BLOCKS, log_mass, shares, best)
    if visible is not None:
        _hide(log_mass)
    sizes = (batch, kv_heads)
    return (
        torch.from_numpy(shares).view(*sizes, rows, num_blocks),
        torch.from_numpy(best).view(*sizes, num_blocks),
        torch.from_numpy(log_mass).view(*sizes, query_rows, num_blocks),
    )


# --- Clusters -------------------------------------------------------------------------------------------------------------

_BINS = 1 << 12  # exponents and four bits of positive floats up to 1
_SURE = np.float32(4.0)  # above all shares


@numba.njit(cache=True, nogil=True)
def _key_scores(half, keys, stride, count, queries, rows, dim, scores, row_bytes):
    """scores [rows, count] of queries [rows, dim], both addresses; keys: address, `stride` bytes between tokens."""
    for row in range(0, rows, 4):
        q, s = queries + np.uintp(4 * row) * dim, scores + np.uintp(row) * row_bytes
        left = rows - row
        if half:
            if left >= 4:
                half_key_dots_4(keys, stride, count, q, dim, s, row_bytes)
            elif left == 3:
                half_key_dots_3(keys, stride, count, q, dim, s, row_bytes)
            elif left == 2:
                half_key_dots_2(keys, stride, count, q, dim, s, row_bytes)
            else:
                half_key_dots_1(keys, stride, count, q, dim, s, row_bytes)
        elif left >= 4:
            key_dots_4(keys, stride, count, q, dim, s, row_bytes)
        elif left == 3:
            key_dots_3(keys, stride, count, q, dim, s, row_bytes)
        elif left == 2:
            key_dots_2(keys, stride, count, q, dim, s, row_bytes)
        else:
            key_dots_1(keys, stride, count, q, dim, s, row_bytes)


@numba.njit(cache=True, nogil=True)
def _cluster_weights(queries, centroids, sizes, group, weights, total):
    """`reference.cluster_shares` up to its weights, of one KV head.

    queries [group * rows, dim] f32, scaled, dim a multiple of 16; centroids [clusters, dim], bfloat16 as u16; sizes [clusters] f32;
    weights [group * rows, clusters] f32: the first `rows` rows become the mean over the group; total: scratch, [1] f32.
    """
    query_rows, dim = queries.shape
    clusters = centroids.shape[0]
    p_weights, row_bytes, p_dim = _address(weights), np.uintp(4 * weights.shape[1]), np.uintp(dim)
    p_centroids, stride = _address(centroids), np.uintp(2 * dim)
    _key_scores(
        True, p_centroids, stride, np.uintp(clusters), _address(queries), query_rows, p_dim, p_weights, row_bytes
    )
    for row in range(query_rows):
        for c in range(clusters):  # an empty cluster must not set the maximum
            if sizes[c] == np.float32(0.0):
                weights[row, c] = MASKED
        exp_in_place(p_weights + np.uintp(row) * row_bytes, np.uintp(clusters), _address(total))
        whole = np.float32(0.0)
        for c in range(clusters):
            whole += weights[row, c] * sizes[c]
        scale = np.float32(1.0) / (whole * np.float32(group))
        for c in range(clusters):
            weights[row, c] *= scale
    rows = query_rows // group
    for g in range(1, group):
        for row in range(rows):
            for c in range(clusters):
                weights[row, c] += weights[g * rows + row, c]


@numba.njit(cache=True, nogil=True)
def _block_shares(weights, codes, clusters, block_size, best, first):
    """best [blocks] f32: each block's sum of weights [clusters of all segments] f32 by codes [segments, tokens], or the maximum of
    that and what it was, if this is not the first row."""
    segments, tokens = codes.shape
    per_segment = tokens // block_size
    for segment in range(segments):
        table = weights[segment * clusters : (segment + 1) * clusters]
        line = codes[segment]
        for number in range(per_segment):
            a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            start = number * block_size
            whole = block_size // 4 * 4
            for t in range(start, start + whole, 4):
                a += table[line[t]]
                b += table[line[t + 1]]
                c += table[line[t + 2]]
                d += table[line[t + 3]]
            for t in range(start + whole, start + block_size):
                a += table[line[t]]
            share = (a + b) + (c + d)
            place = segment * per_segment + number
            best[place] = share if first else max(best[place], share)


@numba.njit(cache=True, nogil=True)
def _best_candidates(best, count, out):
    """`reference.best_candidates` of one KV head, sinks marked by `_SURE`: best [blocks] f32 -> out [count] i64."""
    bits = best.view(np.uint32)
    blocks = bits.shape[0]
    histogram = np.zeros(_BINS, np.int32)
    for block in range(blocks):
        histogram[bits[block] >> np.uint32(19)] += 1
    above, threshold = 0, _BINS - 1
    while threshold > 0 and above + histogram[threshold] < count:
        above += histogram[threshold]
        threshold -= 1
    equal = count - above  # of those at the threshold
    found = 0
    for block in range(blocks):
        rank = np.int64(bits[block] >> np.uint32(19))
        if rank > threshold:
            out[found] = block
            found += 1
        elif rank == threshold and equal > 0:
            out[found] = block
            found += 1
            equal -= 1


@numba.njit(cache=True, nogil=True)
def _candidates_of_head(
    queries, centroids, sizes, codes, decide, segments, block_size, group, count, sinks, num_blocks, out
):
    """One KV head: queries [group * rows, dim], centroids [capacity, clusters, dim], decide [rows] or empty, out [candidates]."""
    query_rows, dim = queries.shape
    clusters = centroids.shape[1]
    blocks = segments * (codes.shape[1] // block_size)
    weights = np.empty((query_rows, segments * clusters), np.float32)
    best = np.empty(blocks, np.float32)
    total = np.empty(1, np.float32)
    means = centroids[:segments].reshape(segments * clusters, dim)
    _cluster_weights(queries, means, sizes[:segments].reshape(segments * clusters), group, weights, total)
    first = True
    for row in range(query_rows // group):
        if decide.shape[0] == 0 or decide[row]:
            _block_shares(weights[row], codes[:segments], clusters, block_size, best, first)
            first = False
    for block in range(min(sinks, blocks)):
        best[block] = _SURE
    _best_candidates(best, count, out)
    for block in range(blocks, num_blocks):
        out[count + block - blocks] = block
    total[0] = np.float32(0.0)  # named once more, as its address was used


@numba.njit(cache=True, nogil=True)
def _choose_candidates(
    queries, centroids, sizes, codes, decide, segments, block_size, group, count, sinks, num_blocks, out
):
    """All KV heads; decide [batch or 0, rows]."""
    per_row = queries.shape[0] // max(1, decide.shape[0])
    for head in range(queries.shape[0]):
        deciding = decide[head // per_row] if decide.shape[0] else np.empty(0, np.uint8)
        _candidates_of_head(
            queries[head], centroids[head], sizes[head], codes[head], deciding, segments, block_size, group, count, sinks,
            num_blocks, out[head],
        )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _top_blocks(scores, count, out):
    """The `count` largest of scores [blocks] f32, of equal ones the first, as ascending numbers in out [count] i64."""
    blocks = scores.shape[0]
    bits = scores.view(np.uint32)
    order = np.empty(blocks, np.uint32)  # in the order of the scores
    histogram = np.zeros(_BINS, np.int32)
    for block in range(blocks):
        sign = bits[block] >> np.uint32(31)
        order[block] = ~bits[block] if sign else bits[block] | np.uint32(0x80000000)
        histogram[order[block] >> np.uint32(20)] += 1
    above, threshold = 0, _BINS - 1
    while above + histogram[threshold] < count:
        above += histogram[threshold]
        threshold -= 1
    equal = count - above  # of those at the threshold
    least = np.uint32(0)
    if histogram[threshold] > equal:
        members = np.empty(histogram[threshold], np.uint32)
        found = 0
        for block in range(blocks):
            if order[block] >> np.uint32(20) == threshold:
                members[found] = order[block]
                found += 1
        members.sort()
        least = members[found - equal]  # the smallest that is in
        equal = 0
        for i in range(found):
            if members[i] > least:
                equal += 1
        equal = count - above - equal  # of those that are just as large
    else:
        least, equal = np.uint32(threshold) << np.uint32(20), 0
        least -= np.uint32(1) if least else np.uint32(0)
    found = 0
    for block in range(blocks):
        if order[block] > least:
            out[found] = block
            found += 1
        elif order[block] == least and equal > 0:
            out[found] = block
            found += 1
            equal -= 1


@numba.njit(cache=True, nogil=True)
def _top_of_all(scores, count, out):
    for head in range(scores.shape[0]):
        _top_blocks(scores[head], count, out[head])


def top_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """`reference.top_blocks`: scores [batch, kv_heads, blocks] float32 -> [batch, kv_heads, count] int64, ascending."""
    out = np.empty((scores.shape[0] * scores.shape[1], count), np.int64)
    _top_of_all(scores.contiguous().flatten(0, 1).numpy(), count, out)
    return torch.from_numpy(out).view(*scores.shape[:2], count)


@numba.njit(cache=True, nogil=True)
def _select_head(
    queries, words, low, step, centroids, sizes, codes, segments, blocks, block_size, group, keep, sinks, wanted
):
    """One KV head: scores, ranks and chooses as `choose_candidates`, `score_int2` and `top_blocks` do after one another."""
    query_rows = queries.shape[0]
    if segments:
        behind = blocks - segments * (codes.shape[1] // block_size)
        chosen = np.empty(keep + behind, np.int64)
        _candidates_of_head(
            queries,
            centroids,
            sizes,
            codes,
            np.empty(0, np.uint8),
            segments,
            block_size,
            group,
            keep,
            sinks,
            blocks,
            chosen,
        )
        places = keep + behind
    else:
        chosen = np.empty(0, np.int64)
        places = blocks
    log_mass = np.empty((query_rows, places), np.float32)
    rows = np.empty((query_rows // group, places), np.float32)
    best = np.empty(places, np.float32)
    hidden = np.empty((0, 0), np.uint8)
    _score_range(queries, words, low, step, hidden, chosen, block_size, 0, places, log_mass)
    _rank(log_mass.reshape(group, query_rows // group, places), rows, best)
    for place in range(min(sinks, places)):
        best[place] = np.float32(np.inf)
    _top_blocks(best, wanted.shape[0], wanted)
    if segments:
        for i in range(wanted.shape[0]):
            wanted[i] = chosen[wanted[i]]


@numba.njit(cache=True, nogil=True)
def _select(
    queries, words, low, step, centroids, sizes, codes, segments, blocks, block_size, group, keep, sinks, wanted
):
    for head in range(queries.shape[0]):
        _select_head(
            queries[head], words[head], low[head], step[head], centroids[head], sizes[head], codes[head], segments, blocks,
            block_size, group, keep, sinks, wanted[head],
        )  # fmt: skip


def select_int2(
    queries: torch.Tensor,
    words: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    clusters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    segments: int,
    num_blocks: int,
    block_size: int,
    group: int,
    scaling: float,
    candidates: int,
    sink_blocks: int,
    count: int,
) -> torch.Tensor:
    """The blocks that a step reads: `choose_candidates` (with clusters), `score_int2` and `top_blocks` in one call and one thread.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        words, low, step: As `pack_int2` makes them, contiguous.
        clusters: The arrays of `Clusters`, contiguous, or None: all of the first `num_blocks` blocks are ranked.
        candidates: Blocks of the first `segments` segments to rank.
        count: Blocks to choose, the first `sink_blocks` among them.

    Returns:
        [batch, kv_heads, count] int64, ascending.
    """
    batch, kv_heads = queries.shape[:2]
    out = np.empty((batch * kv_heads, count), np.int64)
    if clusters is None:
        heads = batch * kv_heads
        arrays = (
            np.empty((heads, 0, 0, 0), np.uint16),
            np.empty((heads, 0, 0), np.float32),
            np.empty((heads, 0, 0), np.uint8),
        )
    else:
        centroids, sizes, codes = (array.flatten(0, 1) for array in clusters)
        arrays = centroids.view(torch.int16).numpy().view(np.uint16), sizes.numpy(), codes.numpy()
    arguments = (
        _scaled(queries, scaling, words.shape[-1]),
        words.flatten(0, 1).numpy().view(np.uint32),
        low.flatten(0, 1).view(torch.int16).numpy().view(np.uint16),
        step.flatten(0, 1).view(torch.int16).numpy().view(np.uint16),
        *arrays,
        segments,
        num_blocks,
        block_size,
        group,
        candidates,
        sink_blocks,
        out,
    )
    _select(*arguments)
    return torch.from_numpy(out).view(batch, kv_heads, count)


def choose_candidates(
    queries: torch.Tensor,
    centroids: torch.Tensor,
    sizes: torch.Tensor,
    codes: torch.Tensor,
    segments: int,
    block_size: int,
    group: int,
    scaling: float,
    count: int,
    sink_blocks: int,
    num_blocks: int,
    decide: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Clusters.choose`: [batch, kv_heads, count + blocks behind the segments] int64.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        centroids, sizes, codes: As `Clusters` holds them, contiguous, key_dim a multiple of 16.
        count: Blocks to choose from the first `segments` segments.
        decide: [batch, rows] bool, or None.
    """
    batch, kv_heads = queries.shape[:2]
    heads = batch * kv_heads
    blocks = segments * codes.shape[3] // block_size
    out = np.empty((heads, count + num_blocks - blocks), np.int64)
    _choose_candidates(
        _scaled(queries, scaling, centroids.shape[-1]),
        centroids.flatten(0, 1).view(torch.int16).numpy().view(np.uint16),
        sizes.flatten(0, 1).numpy(),
        codes.flatten(0, 1).numpy(),
        np.empty((0, 0), np.uint8) if decide is None else decide.contiguous().view(torch.uint8).numpy(),
        segments,
        block_size,
        group,
        count,
        sink_blocks,
        num_blocks,
        out,
    )
    return torch.from_numpy(out).view(batch, kv_heads, -1)


# --- Residency ------------------------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def _delta_select(wanted, held, last_wanted, num_blocks, entries, clock, blocks, slots, mask):
    """`reference.delta_select` of all heads: wanted [heads, count], held, last_wanted [heads, slots], the rest [heads, entries]."""
    heads, count = wanted.shape
    num_slots = held.shape[1]
    for head in range(heads):
        state = np.zeros(num_blocks, np.uint8)  # 1: wanted, 2: wanted and resident
        for i in range(count):
            if wanted[head, i] >= 0:
                state[wanted[head, i]] = 1
        kept = np.zeros(num_slots, np.uint8)
        for slot in range(num_slots):
            block = held[head, slot]
            if 0 <= block < num_blocks and state[block]:
                kept[slot] = 1
                state[block] = 2
                last_wanted[head, slot] = clock
        order = np.argsort(last_wanted[head], kind="mergesort")
        found, place = 0, 0
        for i in range(count):
            if found == entries:
                break
            if wanted[head, i] < 0 or state[wanted[head, i]] == 2:
                continue
            while place < num_slots and kept[order[place]]:
                place += 1
            if place == num_slots:
                break
            slot = order[place]
            place += 1
            blocks[head, found], slots[head, found], mask[head, found] = wanted[head, i], slot, 1
            found += 1
            held[head, slot], last_wanted[head, slot] = wanted[head, i], clock


def delta_select(
    wanted: torch.Tensor,
    block_of_slot: torch.Tensor,
    last_wanted: torch.Tensor,
    num_blocks: int,
    max_fetch: int,
    clock: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.delta_select` with a clock, on contiguous tables, which are brought up to date in place."""
    batch, kv_heads, count = wanted.shape
    heads, entries = batch * kv_heads, min(max_fetch, count)
    blocks, slots, mask = (np.zeros((heads, entries), kind) for kind in (np.int64, np.int64, np.uint8))
    _delta_select(
        wanted.reshape(heads, count).numpy(),
        block_of_slot.view(heads, -1).numpy(),
        last_wanted.view(heads, -1).numpy(),
        num_blocks,
        entries,
        clock,
        blocks,
        slots,
        mask,
    )
    sizes = (batch, kv_heads, entries)
    return (
        torch.from_numpy(blocks).view(sizes),
        torch.from_numpy(slots).view(sizes),
        torch.from_numpy(mask.view(np.bool_)).view(sizes),
    )


# --- Movement -------------------------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True)
def _gather(blocks, slots, mask, addresses, block_bytes, target, stride_batch, stride_head, stride_slot):
    """Copy blocks from pages to the slots of the buffer at address `target`; strides in bytes."""
    batch, kv_heads, entries = blocks.shape
    for row in range(batch):
        for head in range(kv_heads):
            for entry in range(entries):
                if mask[row, head, entry]:
                    source = addresses[row, blocks[row, head, entry]] + head * block_bytes
                    place = target + row * stride_batch + head * stride_head + slots[row, head, entry] * stride_slot
                    copy_bytes(np.uintp(place), np.uintp(source), np.uintp(block_bytes))


def gather_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, addresses: torch.Tensor, target: torch.Tensor
) -> None:
    """`reference.gather_blocks`; each block of the target contiguous."""
    size = target.element_size()
    _gather(
        blocks.numpy(),
        slots.numpy(),
        mask.view(torch.uint8).numpy(),
        addresses.numpy(),
        target.shape[3] * target.shape[4] * size,
        target.data_ptr(),
        target.stride(0) * size,
        target.stride(1) * size,
        target.stride(2) * size,
    )


@numba.njit(cache=True, nogil=True)
def _exchange(
    blocks,
    slots,
    mask,
    evicted,
    held,
    last_held,
    clock,
    block_bytes,
    buffer,
    buffer_strides,
    target,
    target_strides,
    left,
):
    """`reference.plan_exchange` and `swap_blocks` of all heads: tables [batch, kv_heads, ...], addresses, strides in bytes."""
    batch, kv_heads, entries = blocks.shape
    num_held = held.shape[2]
    swapped = np.empty(block_bytes, np.uint8)
    for row in range(batch):
        for head in range(kv_heads):
            order = np.argsort(last_held[row, head], kind="mergesort")
            leaving = np.zeros(num_held, np.uint8)
            taken = np.full(entries, -1, np.int64)
            for entry in range(entries):
                left[row, head, entry] = mask[row, head, entry]
                if mask[row, head, entry]:
                    for place in range(num_held):
                        if held[row, head, place] == blocks[row, head, entry]:
                            taken[entry] = place
                            leaving[place] = 1
                            left[row, head, entry] = 0
                            break
            p_buffer = buffer + row * buffer_strides[0] + head * buffer_strides[1]
            p_target = target + row * target_strides[0] + head * target_strides[1]
            following = 0
            for entry in range(entries):
                if not mask[row, head, entry]:
                    continue
                moves = evicted[row, head, entry] >= 0
                p_slot = p_target + slots[row, head, entry] * target_strides[2]
                place = taken[entry]
                if place >= 0:
                    p_place = p_buffer + place * buffer_strides[2]
                    if moves:
                        copy_bytes(_address(swapped), np.uintp(p_slot), np.uintp(block_bytes))
                    copy_bytes(np.uintp(p_slot), np.uintp(p_place), np.uintp(block_bytes))
                    if moves:
                        copy_bytes(np.uintp(p_place), _address(swapped), np.uintp(block_bytes))
                elif moves:
                    while following < num_held and leaving[order[following]]:
                        following += 1
                    if following == num_held:
                        continue
                    place = order[following]
                    following += 1
                    p_place = p_buffer + place * buffer_strides[2]
                    copy_bytes(np.uintp(p_place), np.uintp(p_slot), np.uintp(block_bytes))
                else:
                    continue
                held[row, head, place] = evicted[row, head, entry] if moves else -1
                last_held[row, head, place] = clock if moves else -1


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
    """`reference.plan_exchange` and `swap_blocks`, each block contiguous; returns what is left of the mask."""
    left = np.empty(blocks.shape, np.uint8)
    size = target.element_size()
    _exchange(
        blocks.numpy(),
        slots.numpy(),
        mask.view(torch.uint8).numpy(),
        evicted.numpy(),
        held.numpy(),
        last_held.numpy(),
        clock,
        target.shape[3] * target.shape[4] * size,
        buffer.data_ptr(),
        tuple(stride * size for stride in buffer.stride()[:3]),
        target.data_ptr(),
        tuple(stride * size for stride in target.stride()[:3]),
        left,
    )
    return torch.from_numpy(left.view(np.bool_))
