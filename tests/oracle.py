"""The stated rules of sparse attention, slow and obvious: everything is computed anew from complete keys and values.

Nothing here knows slots, windows, stores or layers. What a forward reads follows from the number of past tokens alone:

- A forward is sparse if there are past tokens, at most `sparse_rows` new ones, and more than `dense_tokens` in all; otherwise it
  reads everything.
- Past tokens make `past // block_size` sealed blocks. The newest `recent_blocks` of them are read, and all tokens behind them.
  Of the older ones (at least as many as there is room for) sink + retrieved blocks are read, as many as the budget leaves.
- A block's score for a KV head: the maximum over rows of the mean over the query group of the softmax over blocks of the
  log-sum-exp of the scores that the index estimates for the block's visible tokens. The first `sink_blocks` always come first,
  blocks that no row may see last.

Only the quantisers are the library's own (tests/unit/test_index.py tests those).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from oasis_cache import OasisConfig
from oasis_cache.kernels import reference

NAME = "sparse_oracle"
"""The attention implementation that computes by these rules: `models.build(name, oracle.NAME)`."""

_rules: tuple[OasisConfig, frozenset[int] | None, bool, list[float] | None] | None = None


def dense_tokens(config: OasisConfig) -> int:
    """Longest context that is read whole: the budget (or `dense_below`), but no less than what fills all slots for certain."""
    slots = config.budget // config.block_size - config.recent_blocks
    fills_slots = (slots + 1) * config.block_size - 1 + config.sparse_rows
    return max(config.dense_below or config.budget, fills_slots)


def is_sparse(config: OasisConfig, past: int, rows: int) -> bool:
    return past > 0 and rows <= config.sparse_rows and past + rows > dense_tokens(config)


def tokens_read(
    queries: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    rows: int,
    scaling: float,
    config: OasisConfig,
    bias: torch.Tensor | None = None,
) -> tuple[list[int], float]:
    """Positions of the tokens that a sparse forward reads for one batch row and KV head.

    Args:
        queries: [group, rows, key_dim] float64.
        keys: [tokens, key_dim], as they were cached.
        visible: [tokens] bool, whether some row may see a token.
        bias: [group, rows, tokens] by which positions raise the scores: a block's by the mean over its tokens.

    Returns:
        The positions, and by how much the worst block chosen beats the best one left out (a choice by less than rounding may
        come out the other way elsewhere).
    """
    size, total = config.block_size, keys.shape[0]
    sealed = (total - rows) // size
    slots = config.budget // size - config.recent_blocks
    candidates = max(sealed - config.recent_blocks, slots)
    blocks = keys[: candidates * size].unflatten(0, (candidates, size))
    real = visible[: candidates * size].unflatten(0, (candidates, size))
    log_mass = _log_mass(config.index, queries, blocks, real, scaling)
    if bias is not None:
        log_mass = log_mass + bias[..., : candidates * size].unflatten(-1, (candidates, size)).mean(-1)
    share = log_mass.softmax(-1).nan_to_num(0.0)
    scores = [0.0] * candidates
    for block in range(candidates):
        scores[block] = share[:, :, block].mean(0).max().item()
        if config.index == "recency":
            scores[block] = float(block)
        if not real[block].any():
            scores[block] = -1.0
    begin = next((block for block in range(candidates) if real[block].any()), 0)  # behind the padding
    for block in range(begin, min(begin + config.sink_blocks, candidates)):
        scores[block] = float("inf")
    ranking = sorted(range(candidates), key=lambda block: -scores[block])
    best, margin = ranking[:slots], float("inf")
    if slots < candidates and scores[ranking[slots]] >= 0:
        margin = scores[ranking[slots - 1]] - scores[ranking[slots]]
    inside = [position for block in best for position in range(block * size, (block + 1) * size)]
    return inside + list(range(candidates * size, total)), margin


def _log_mass(
    index: str, queries: torch.Tensor, keys: torch.Tensor, real: torch.Tensor, scaling: float
) -> torch.Tensor:
    """What the index makes of blocks: queries [group, rows, key_dim], keys [blocks, block_size, key_dim], real [blocks, block_size]
    -> [group, rows, blocks]."""
    if index == "minmax":
        low, high = keys.amin(1).double(), keys.amax(1).double()  # [blocks, key_dim]
        bound = torch.maximum(queries.unsqueeze(2) * low, queries.unsqueeze(2) * high).sum(-1)
        return (scaling * bound).masked_fill(~real.any(-1), float("-inf"))
    if index == "int2":
        codes, low, step = (part[0, 0] for part in reference.quantise_int2(keys[None, None]))
        keys = (
            low.unsqueeze(1).double()
            + step.unsqueeze(1).double() * reference.unpack_codes(codes, 2, keys.shape[-1]).double()
        )
    elif index == "int1":
        codes, mean, deviation = (part[0, 0] for part in reference.quantise_int1(keys[None, None]))
        signs = 2 * reference.unpack_codes(codes, 1, keys.shape[-1]).double() - 1
        keys = mean.unsqueeze(1).double() + deviation.unsqueeze(1).double() * signs
    scores = scaling * torch.einsum("grd,ntd->grnt", queries, keys.double())
    return scores.masked_fill(~real, float("-inf")).logsumexp(-1)


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    config: OasisConfig | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    blind_mean: bool = False,
    margins: list[float] | None = None,
    position_bias: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """Attention by the rules; with `config` None, over everything.

    Args:
        query: [batch, query_heads, rows, key_dim].
        keys, values: [batch, kv_heads, tokens, dim], complete.
        mask: [batch or 1, query_heads or 1, rows, tokens] bool or additive, or None.
        blind_mean: Rows of padding, which see nothing, get the mean of all values (transformers' eager attention), not zeros (its
            sdpa). Their keys lie in blocks with real ones, so an index that takes a block's range notices.
        margins: Takes the margin of each choice, if given.
        position_bias: [batch or 1, query_heads, rows, tokens], added to the scores.
        causal: Whether rows see each other causally (encoders and cross attention: all see all).

    Returns:
        [batch, rows, query_heads, value_dim] of query's dtype.
    """
    batch, heads, rows, _ = query.shape
    kv_heads, total = keys.shape[1:3]
    group = heads // kv_heads
    allowed = torch.ones(rows, total, dtype=torch.bool)
    allowed = (allowed.tril(total - rows) if causal else allowed).expand(batch, heads, rows, total)
    by_position = None if position_bias is None else position_bias.double().expand(batch, heads, rows, total)
    bias = torch.zeros(batch, heads, rows, total, dtype=torch.float64)
    if mask is not None:
        mask = mask[..., :total]
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > -1e30)
        if mask.dtype != torch.bool:
            bias = bias + torch.where(mask > -1e30, mask.double(), 0.0)
    if by_position is not None:
        bias = bias + by_position
    out = torch.zeros(batch, rows, heads, values.shape[-1], dtype=torch.float64)
    sparse = config is not None and is_sparse(config, total - rows, rows)
    for b in range(batch):
        for kv_head in range(kv_heads):
            members = range(kv_head * group, (kv_head + 1) * group)
            read = list(range(total))
            if sparse:
                visible = allowed[b].flatten(0, 1).any(0)
                queries = query[b, members.start : members.stop].double()
                raised = None if by_position is None else by_position[b, members.start : members.stop]
                read, margin = tokens_read(queries, keys[b, kv_head], visible, rows, scaling, config, raised)
                if margins is not None:
                    margins.append(margin)
            k, v = keys[b, kv_head, read].double(), values[b, kv_head, read].double()
            for head in members:
                scores = query[b, head].double() @ k.T * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = (scores + bias[b, head][:, read]).masked_fill(~allowed[b, head][:, read], float("-inf"))
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().expand(rows, 1)], dim=-1)
                weights = scores.softmax(-1).nan_to_num(1 / total if blind_mean else 0.0)[:, : len(read)]
                out[b, :, head] = weights @ v
    return out.to(query.dtype)


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert _rules is not None, "an oracle model runs inside `rules`"
    config, layers, blind_mean, margins = _rules
    causal = getattr(module, "is_causal", True)  # if not, the mask says what is, or nothing is
    if (not causal and attention_mask is None) or (layers is not None and module.layer_idx not in layers):
        config = None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    latents = vars(module).get(_LATENTS)
    if config is not None and latents is not None:
        return _latent_attention(module, query, *latents, attention_mask, config, scaling, blind_mean, margins), None
    own = (softcap, s_aux, blind_mean, margins, position_bias, causal)
    return attention(query, key, value, attention_mask, config, scaling, *own), None


_LATENTS = "latents_of_oracle"


def record_latents(model: torch.nn.Module) -> None:
    """Let the modules of a model that expand latents (multi-head latent attention) note what they expand."""
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = _recording(module)


def _recording(module: torch.nn.Module) -> Any:
    def expand_kv(latents: torch.Tensor, rotary: torch.Tensor) -> Any:
        vars(module)[_LATENTS] = latents, rotary
        return type(module).expand_kv(module, latents, rotary)

    return expand_kv


def _latent_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary: torch.Tensor,
    mask: torch.Tensor | None,
    config: OasisConfig,
    scaling: float,
    blind_mean: bool,
    margins: list[float] | None,
) -> torch.Tensor:
    """The rules where keys and values are linear in latents [batch, 1, tokens, dim]: one KV head, and blocks of latents.

    A query's product with a key is that of the query, taken through the transposed expansion, with both parts of the latent.
    """
    width = latents.shape[3]
    unit = torch.eye(width + rotary.shape[3])[None, None]
    keys, values = (part.double() for part in type(module).expand_kv(module, unit[..., :width], unit[..., width:]))
    absorbed = query.double() @ keys.transpose(-1, -2)
    whole = torch.cat([latents, rotary], dim=-1)
    sums = attention(absorbed, whole, latents, mask, config, scaling, None, None, blind_mean, margins)
    return torch.einsum("brhl,hlv->brhv", sums, values[0, :, :width]).to(query.dtype)


@contextmanager
def rules(
    config: OasisConfig,
    layers: frozenset[int] | None = None,
    blind_mean: bool = False,
    margins: list[float] | None = None,
) -> Iterator[None]:
    """Within, oracle models attend by the rules of `config` in `layers` (None: in all), and exactly elsewhere.

    `margins` takes the margin of each choice of blocks, if given.
    """
    global _rules
    before, _rules = _rules, (config, layers, blind_mean, margins)
    try:
        yield
    finally:
        _rules = before


AttentionInterface.register(NAME, _attention_function)
AttentionMaskInterface.register(NAME, eager_mask)
