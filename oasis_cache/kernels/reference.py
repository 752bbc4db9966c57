"""Every device operation of a decode step in plain PyTorch, fp32 inside: the meaning that all faster versions must equal.

Shapes: `rows` are the new tokens of a forward (the current token and its drafts), `group` the query heads of one KV head.
Query tensors come as [batch, kv_heads, group * rows, key_dim], query head major: entry g * rows + r is row r of head g.
"""

from __future__ import annotations

import ctypes
import math

import torch

# --- Quantised keys -------------------------------------------------------------------------------------------------------


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack small integers planewise: byte j of a token holds channels j, j + n, j + 2n, ... with n = ceil(dim * bits / 8).

    Args:
        codes: [..., dim] uint8 below 2**bits; dim is padded with zeros to a multiple of 8 / bits.

    Returns:
        [..., n] uint8. Planes, not neighbours, share a byte, so that unpacking yields contiguous runs of channels.
    """
    per_byte = 8 // bits
    dim = codes.shape[-1]
    planes = torch.nn.functional.pad(codes, (0, -dim % per_byte)).unflatten(-1, (per_byte, -1))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    return (planes << shifts).sum(-2, dtype=torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The inverse of `pack_codes`: [..., n] uint8 -> [..., dim] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    planes = (packed.unsqueeze(-2) >> shifts) & (2**bits - 1)
    return planes.flatten(-2)[..., :dim]


def quantise_int2(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two bits per key channel between the block's minimum and maximum of that channel.

    The codes are rounded against the minimum and step as stored (bfloat16), so their rounding costs no accuracy.

    Args:
        keys: [batch, kv_heads, blocks, block_size, key_dim].

    Returns:
        codes [batch, kv_heads, blocks, block_size, ceil(key_dim / 4)] uint8, low and step [batch, kv_heads, blocks, key_dim]
        bfloat16: key ~ low + step * code.
    """
    codes, low, step = round_int2(keys)
    return pack_codes(codes, 2), low, step


def round_int2(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantise_int2` with codes as they are: [batch, kv_heads, blocks, block_size, key_dim] uint8."""
    keys = keys.float()
    low, high = keys.amin(3), keys.amax(3)
    low = low.bfloat16()
    step = ((high - low.float()) / 3).clamp_min(1e-8).bfloat16()
    codes = ((keys - low.float().unsqueeze(3)) / step.float().unsqueeze(3)).round().clamp(0, 3).to(torch.uint8)
    return codes, low, step


def quantise_int1(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One bit per key channel: mean plus or minus mean deviation of the block's channel.

    Args:
        keys: [batch, kv_heads, blocks, block_size, key_dim].

    Returns:
        codes [batch, kv_heads, blocks, block_size, ceil(key_dim / 8)] uint8, mean and deviation
        [batch, kv_heads, blocks, key_dim] bfloat16: key ~ mean + deviation * (2 * code - 1).
    """
    keys = keys.float()
    mean = keys.mean(3).bfloat16()
    offset = keys - mean.float().unsqueeze(3)
    return pack_codes((offset > 0).to(torch.uint8), 1), mean, offset.abs().mean(3).bfloat16()


# --- Scoring --------------------------------------------------------------------------------------------------------------


def _block_log_mass(token_scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """token_scores [batch, kv_heads, rows, blocks, block_size], visible [batch, blocks, block_size] -> log-sum-exp per block."""
    if visible is not None:
        token_scores = token_scores.masked_fill(~visible[:, None, None], float("-inf"))
    return token_scores.logsumexp(-1)


def log_mass_exact(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-sum-exp of q.k * scaling over each block.

    Args:
        queries: [batch, kv_heads, rows, key_dim].
        keys: [batch, kv_heads, blocks, block_size, key_dim].
        visible: [batch, blocks, block_size] bool, False for tokens that do not count.

    Returns:
        [batch, kv_heads, rows, blocks] float32.
    """
    scores = torch.einsum("bhrd,bhntd->bhrnt", queries.float(), keys.float()) * scaling
    return _block_log_mass(scores, visible)


def log_mass_int2(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with keys of `quantise_int2`: q.k ~ q.low + (q * step).code, so codes meet the query as they are."""
    queries, low, step = queries.float(), low.float(), step.float()
    base = queries @ low.transpose(-1, -2)  # [batch, kv_heads, rows, blocks]
    scaled = queries.unsqueeze(2) * step.unsqueeze(3)  # [batch, kv_heads, blocks, rows, key_dim]
    steps = scaled @ unpack_codes(codes, 2, queries.shape[-1]).float().transpose(
        -1, -2
    )  # [..., blocks, rows, block_size]
    scores = (base.unsqueeze(-1) + steps.transpose(2, 3)) * scaling
    return _block_log_mass(scores, visible)


def log_mass_int1(
    queries: torch.Tensor,
    codes: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with keys of `quantise_int1`: a minimum of mean - deviation and a step of twice the deviation."""
    queries, mean, deviation = queries.float(), mean.float(), deviation.float()
    base = queries @ (mean - deviation).transpose(-1, -2)
    scaled = queries.unsqueeze(2) * (2 * deviation).unsqueeze(3)
    steps = scaled @ unpack_codes(codes, 1, queries.shape[-1]).float().transpose(-1, -2)
    scores = (base.unsqueeze(-1) + steps.transpose(2, 3)) * scaling
    return _block_log_mass(scores, visible)


def log_mass_minmax(
    queries: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scaling: float, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Upper bound of q.k * scaling over each block (Quest, section 3.3): low, high [batch, kv_heads, blocks, key_dim]."""
    queries = queries.float()
    bound = queries.clamp_min(0) @ high.float().transpose(-1, -2) + queries.clamp_max(0) @ low.float().transpose(-1, -2)
    if visible is not None:
        bound = bound.masked_fill(~visible.any(-1)[:, None, None], float("-inf"))
    return bound * scaling


def rank_rows(log_mass: torch.Tensor, group: int) -> torch.Tensor:
    """Score of each block for each row of a KV head: softmax over blocks, mean over the query group.

    Args:
        log_mass: [batch, kv_heads, group * rows, blocks] float32, -inf for blocks that may not be chosen.

    Returns:
        [batch, kv_heads, rows, blocks] float32 in [0, 1]; -1 for blocks that the row may not see.
    """
    mass = log_mass.softmax(-1).nan_to_num(0.0)  # a row that sees no block at all gives no mass
    hidden = log_mass.isneginf().unflatten(2, (group, -1)).all(2)
    return mass.unflatten(2, (group, -1)).mean(2).masked_fill(hidden, -1.0)


def rank_blocks(log_mass: torch.Tensor, group: int) -> torch.Tensor:
    """Score of each block for a KV head: the maximum of `rank_rows` over rows, [batch, kv_heads, blocks] float32."""
    return rank_rows(log_mass, group).amax(2)


def score_int2(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of all blocks by `log_mass_int2`.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        codes, low, step: As `quantise_int2` returns them.
        group: Query heads per KV head.
        visible: [batch, blocks, block_size] bool, False for padding; None: all tokens are real.

    Returns:
        `rank_rows` [batch, kv_heads, rows, blocks], its maximum over rows [batch, kv_heads, blocks], and the log-mass
        [batch, kv_heads, group * rows, blocks], all float32.
    """
    return _ranked(log_mass_int2(queries, codes, low, step, scaling, visible), group)


def score_int1(
    queries: torch.Tensor,
    codes: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`score_int2` by `log_mass_int1`."""
    return _ranked(log_mass_int1(queries, codes, mean, deviation, scaling, visible), group)


def score_minmax(
    queries: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`score_int2` by `log_mass_minmax`."""
    return _ranked(log_mass_minmax(queries, low, high, scaling, visible), group)


def _ranked(log_mass: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = rank_rows(log_mass, group)
    return rows, rows.amax(2), log_mass


def cluster_shares(
    queries: torch.Tensor,
    centroids: torch.Tensor,
    sizes: torch.Tensor,
    codes: torch.Tensor,
    block_size: int,
    group: int,
    scaling: float,
) -> torch.Tensor:
    """Share of attention of each block if every token had the score of its cluster's centroid, mean over the query group.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        centroids, sizes, codes: As `Clusters` holds them, [batch, kv_heads, segments, ...].

    Returns:
        [batch, kv_heads, rows, blocks of all segments] float32, 1 in sum over blocks.
    """
    logits = torch.einsum("bhrd,bhskd->bhrsk", queries.float(), centroids.float()) * scaling
    total = (logits + sizes.log().unsqueeze(2)).flatten(3).logsumexp(-1)
    weights = (logits - total[..., None, None]).exp().unflatten(2, (group, -1)).mean(2)
    places = codes.unsqueeze(2).expand(-1, -1, weights.shape[2], -1, -1).long()
    return weights.gather(4, places).unflatten(4, (-1, block_size)).sum(-1).flatten(3)


def best_candidates(shares: torch.Tensor, count: int, sink_blocks: int) -> torch.Tensor:
    """The blocks of the largest shares, the first `sink_blocks` among them, in ascending order.

    Shares count as equal if their exponents and first four bits are, and of equal ones the first come first: so a compiled
    version needs no sorting.

    Args:
        shares: [batch, kv_heads, blocks] float32, not negative.

    Returns:
        [batch, kv_heads, count] int64.
    """
    blocks = shares.shape[2]
    rank = (shares.contiguous().view(torch.int32) >> 19).long()
    rank[..., :sink_blocks] = 1 << 13
    order = rank * blocks + torch.arange(blocks - 1, -1, -1, device=shares.device)
    return order.topk(count, dim=-1).indices.sort(dim=-1).values


def top_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The blocks of the largest scores [batch, kv_heads, blocks]: [batch, kv_heads, count] int64, in no order that matters."""
    return scores.topk(count, dim=-1).indices


# --- Attention ------------------------------------------------------------------------------------------------------------


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp, so that parts of a context can be merged.

    Args:
        queries: [batch, heads, rows, key_dim]; keys [batch, heads, tokens, key_dim]; values [batch, heads, tokens, value_dim].
        mask: Broadcastable to [batch, heads, rows, tokens]; bool (True: visible) or additive.
        softcap: Scores become softcap * tanh(score / softcap) before masking (Gemma 2).

    Returns:
        out [batch, heads, rows, value_dim] float32 and lse [batch, heads, rows] float32; a row that sees nothing has out 0 and
        lse -inf.
    """
    scores = queries.float() @ keys.float().transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    return weights @ values.float(), lse


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of a context: (out, lse) pairs as `attention` returns them (FlashDecoding)."""
    lse = torch.stack([part_lse for _, part_lse in parts]).logsumexp(0)
    finite = lse.nan_to_num(neginf=0.0)
    out = torch.stack([part * (part_lse - finite).exp().unsqueeze(-1) for part, part_lse in parts]).sum(0)
    return out, lse


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Let a learned logit per head take its share of the softmax (gpt-oss): out, lse of `attention`, sinks [heads]."""
    return out * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1)


def sparse_attention(
    queries: torch.Tensor,
    kv: torch.Tensor,
    key_dim: int,
    num_tokens: int,
    rows: int,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_of_slot: torch.Tensor | None = None,
    block_size: int = 16,
    window_start: int = 0,
    sliding_window: int | None = None,
    mass_block: int = 1,
    value_columns: slice | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of a decode step over the slots and the window behind them.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        kv: [batch, kv_heads, capacity, key_dim + value_dim]; the first `num_tokens` are in use, their last `rows` are the
            tokens of the rows themselves, which see each other causally; all others are visible to every row.
        mask: None, or [batch, kv_heads or 1, group * rows, num_tokens], bool or additive, on top of causality.
        softcap: See `attention`.
        sinks: [kv_heads, group] logits, or None.
        block_of_slot: [batch, kv_heads, slots] int64: the block that each of the first `slots * block_size` tokens belongs to,
            -1 for slots to leave out, whatever they hold. None: every token is there.
        block_size: Tokens per slot.
        window_start: Position in the sequence of the first token behind the slots.
        sliding_window: A row sees its own and the `sliding_window` - 1 positions before; None: all.
        mass_block: Tokens whose mass is added up.
        value_columns: The columns of kv that are the values; None: those behind the keys.

    Returns:
        out [batch, kv_heads, group * rows, value_dim] float32, lse [batch, kv_heads, group * rows] float32 (sinks not included),
        and mass [batch, kv_heads, rows, ceil(num_tokens / mass_block)] float32: the probability that each `mass_block` tokens
        received, mean over the group.
    """
    visible = causal_rows(rows, num_tokens, kv.device)  # [..., rows, num_tokens]
    kv = kv[:, :, :num_tokens].float()
    if block_of_slot is not None or sliding_window is not None:
        present, positions = _places(kv, block_of_slot, block_size, window_start)
        kv = kv.masked_fill(~present.unsqueeze(-1), 0.0)
        visible = visible & present.unsqueeze(2)
        if sliding_window is not None:
            own = positions[..., num_tokens - rows :].unsqueeze(-1)
            visible = visible & (positions.unsqueeze(2) > own - sliding_window)
    keys, values = kv[..., :key_dim], kv[..., value_columns or slice(key_dim, None)]
    scores = queries.float() @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    group = queries.shape[2] // rows
    scores = scores.masked_fill(~torch.cat([visible] * group, dim=-2), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    if sinks is not None:
        share = torch.sigmoid(lse.unflatten(2, (-1, rows)) - sinks.float()[None, :, :, None]).flatten(2)
        weights = weights * share.unsqueeze(-1)
    mass = torch.nn.functional.pad(weights.unflatten(2, (-1, rows)).mean(2), (0, -num_tokens % mass_block))
    return weights @ values, lse, mass.unflatten(-1, (-1, mass_block)).sum(-1)


def _places(
    kv: torch.Tensor, block_of_slot: torch.Tensor | None, block_size: int, window_start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token of [batch, kv_heads, num_tokens, kv_dim] is there, and its position: two [batch, kv_heads, num_tokens]."""
    num_tokens = kv.shape[2]
    slot_tokens = 0 if block_of_slot is None else block_of_slot.shape[2] * block_size
    positions = torch.arange(window_start - slot_tokens, window_start - slot_tokens + num_tokens, device=kv.device)
    positions = positions.repeat(*kv.shape[:2], 1)
    present = torch.ones_like(positions, dtype=torch.bool)
    if block_of_slot is not None:
        inside = torch.arange(block_size, device=kv.device)
        positions[..., :slot_tokens] = (block_of_slot.unsqueeze(-1) * block_size + inside).flatten(2)
        present[..., :slot_tokens] = (block_of_slot >= 0).repeat_interleave(block_size, dim=2)
    return present, positions


def causal_rows(rows: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """[rows, num_tokens] bool: row r sees all tokens but the last rows - 1 - r (bottom-right aligned causality)."""
    last = torch.arange(num_tokens - rows, num_tokens, device=device)
    return torch.arange(num_tokens, device=device) <= last.unsqueeze(-1)


# --- Residency ------------------------------------------------------------------------------------------------------------


def delta_select(
    wanted: torch.Tensor,
    block_of_slot: torch.Tensor,
    last_wanted: torch.Tensor,
    num_blocks: int,
    max_fetch: int,
    clock: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pair each wanted block that is absent with the slot of the least recently wanted block that is not wanted now.

    Args:
        wanted: [batch, kv_heads, count] int64, distinct block numbers below `num_blocks`, best first, or negative for none;
            count at most the slots.
        block_of_slot: [batch, kv_heads, slots] int64, the block in each slot, -1 where empty.
        last_wanted: [batch, kv_heads, slots] int64, the step at which a slot's block was last wanted; empty slots hold -1.
        max_fetch: Most pairs per KV head.
        clock: The step to enter for wanted blocks in `last_wanted`; the pairs are entered in `block_of_slot`. None changes nothing.

    Returns:
        blocks, slots, mask: [batch, kv_heads, min(max_fetch, count)] each; pairs where mask is False stand for nothing.
        Absent blocks come in the order of `wanted`, slots from the least recently wanted on, ties by slot number.
    """
    count = wanted.shape[2]
    entries = min(max_fetch, count)
    flags = torch.zeros(*wanted.shape[:2], num_blocks + 1, dtype=torch.bool, device=wanted.device)
    held = block_of_slot.masked_fill(block_of_slot < 0, num_blocks)
    numbers = wanted.masked_fill(wanted < 0, num_blocks)
    resident = flags.clone().scatter_(2, held, True).gather(2, numbers) | (wanted < 0)
    needed = flags.scatter_(2, numbers, True)
    needed[..., num_blocks] = False
    kept = needed.gather(2, held)
    absent_first = resident.to(torch.uint8).argsort(dim=2, stable=True)[..., :entries]
    never = torch.iinfo(torch.int64).max
    victims = last_wanted.masked_fill(kept, never).argsort(dim=2, stable=True)[..., :entries]
    num_absent = (~resident).sum(2, keepdim=True)
    num_victims = (~kept).sum(2, keepdim=True)
    mask = torch.arange(entries, device=wanted.device) < torch.minimum(num_absent, num_victims)
    blocks = wanted.clamp_min(-1).gather(2, absent_first)
    if clock is not None:
        block_of_slot.scatter_(2, victims, torch.where(mask, blocks, block_of_slot.gather(2, victims)))
        last_wanted.masked_fill_(kept.scatter(2, victims, kept.gather(2, victims) | mask), clock)
    return blocks, victims, mask


# --- Movement -------------------------------------------------------------------------------------------------------------


def page_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The page that begins at an address of this process's memory: a view, valid as long as that memory is."""
    raw = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def gather_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, addresses: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy planned blocks from host pages into slots.

    Args:
        blocks, slots: [batch, kv_heads, entries] int64: which block goes to which slot.
        mask: [batch, kv_heads, entries] bool; False entries stand for nothing.
        addresses: [batch, num_blocks] int64: where each block's page begins, [kv_heads, block_size, kv_dim] in target's dtype.
        target: [batch, kv_heads, slots, block_size, kv_dim]. Changed in place.
    """
    shape = (target.shape[1], *target.shape[3:])
    for row, head, entry in mask.nonzero().tolist():
        page = page_at(int(addresses[row, blocks[row, head, entry]]), shape, target.dtype)
        target[row, head, slots[row, head, entry]] = page[head].to(target.device)


def plan_exchange(
    blocks: torch.Tensor,
    mask: torch.Tensor,
    evicted: torch.Tensor,
    held: torch.Tensor,
    last_held: torch.Tensor,
    clock: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which planned blocks a buffer beside the slots holds, and where in it the blocks go whose slots they take (a victim cache).

    A planned block that the buffer holds changes places with the block it evicts. What other planned blocks evict goes where
    the buffer's least recently entered blocks are, as far as there is room beside those that leave.

    Args:
        blocks, mask: [batch, kv_heads, entries]: a plan, see `gather_blocks`.
        evicted: [batch, kv_heads, entries] int64, the block in each entry's slot before; negative: none. No block of it is held.
        held: [batch, kv_heads, num_held] int64, the block in each place of the buffer, -1 where empty. Brought up to date in place.
        last_held: [batch, kv_heads, num_held] int64, when it was entered, -1 where empty. Brought up to date in place.
        clock: The time to enter now.

    Returns:
        taken [batch, kv_heads, entries] int64: the place from which each planned block comes, -1: none; and put: the place to which
        the evicted block goes, -1: none.
    """
    num_held = held.shape[2]
    match = (blocks.unsqueeze(-1) == held.unsqueeze(2)) & mask.unsqueeze(-1)  # [batch, kv_heads, entries, num_held]
    found, leaving = match.any(-1), match.any(2)
    taken = match.to(torch.uint8).argmax(-1).masked_fill(~found, -1)
    moves = mask & (evicted >= 0)
    homeless = moves & ~found
    order = last_held.masked_fill(leaving, torch.iinfo(torch.int64).max).argsort(dim=2, stable=True)
    rank = homeless.long().cumsum(2) - 1
    housed = homeless & (rank < (~leaving).sum(2, keepdim=True))
    put = torch.where(housed, order.gather(2, rank.clamp(0, num_held - 1)), taken.masked_fill(~moves, -1))
    changed = torch.where(housed, put, taken)  # places with another content than before
    changed = changed.masked_fill(changed < 0, num_held)
    for table, value in ((held, evicted.masked_fill(~moves, -1)), (last_held, torch.where(moves, clock, -1))):
        padded = torch.nn.functional.pad(table, (0, 1)).scatter_(2, changed, value)
        table.copy_(padded[..., :num_held])
    return taken, put


def swap_blocks(
    slots: torch.Tensor, taken: torch.Tensor, put: torch.Tensor, buffer: torch.Tensor, target: torch.Tensor
) -> None:
    """Move blocks between slots and the buffer beside them as `plan_exchange` says.

    Args:
        slots: [batch, kv_heads, entries] int64.
        taken, put: See `plan_exchange`: the slot's content goes to `put` and the buffer's at `taken` to the slot.
        buffer: [batch, kv_heads, num_held, block_size, kv_dim]. Changed in place.
        target: [batch, kv_heads, num_slots, block_size, kv_dim]. Changed in place.
    """
    rows, heads, entries = (put >= 0).nonzero(as_tuple=True)
    evicted = target[rows, heads, slots[rows, heads, entries]]
    places = put[rows, heads, entries]
    sources, source_heads, source_entries = (taken >= 0).nonzero(as_tuple=True)
    arriving = buffer[sources, source_heads, taken[sources, source_heads, source_entries]]
    target[sources, source_heads, slots[sources, source_heads, source_entries]] = arriving
    buffer[rows, heads, places] = evicted


def seal_blocks(
    kv: torch.Tensor, key_dim: int, addresses: torch.Tensor, summaries: dict[str, torch.Tensor], first_block: int
) -> None:
    """Write blocks to their host pages and enter them in the block index.

    Args:
        kv: [batch, kv_heads, blocks, block_size, key_dim + value_dim].
        key_dim: Width of the keys.
        addresses: [batch, blocks] int64: where each block's page begins, [kv_heads, block_size, kv_dim] in kv's dtype.
        summaries: Arrays [batch, kv_heads, capacity, ...] of the index, changed in place from `first_block` on: "codes", "low" and
            "step" as `quantise_int2` makes them, or "low" and "high", or none.
        first_block: Number of the first block.
    """
    keys = kv[..., :key_dim]
    new: dict[str, torch.Tensor] = {}
    if "codes" in summaries:
        new = dict(zip(("codes", "low", "step"), quantise_int2(keys), strict=True))
    elif summaries:
        new = {"low": keys.amin(3), "high": keys.amax(3)}
    for name, array in summaries.items():
        array[:, :, first_block : first_block + kv.shape[2]] = new[name]
    for row in range(kv.shape[0]):
        for block in range(kv.shape[2]):
            page_at(int(addresses[row, block]), (kv.shape[1], *kv.shape[3:]), kv.dtype).copy_(kv[row, :, block])
