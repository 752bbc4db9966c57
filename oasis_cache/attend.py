"""Attention of one layer's current forward: sparse over the working set, or streamed over everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from oasis_cache import kernels
from oasis_cache.kernels import reference
from oasis_cache.masks import AttentionMask
from oasis_cache.selector import (
    BlockScores,
    choose_blocks,
    choose_for_reading,
    predict_scores,
    refine_by_attention,
    score_blocks,
)
from oasis_cache.stats import StepTrace

if TYPE_CHECKING:
    from oasis_cache.layer import OasisLayer


def attend_sparse(
    layer: OasisLayer,
    query: torch.Tensor,
    mask: AttentionMask,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over sink + selected blocks + window; then the next step's blocks are sent for.

    Args:
        query: [batch, query_heads, rows, query_dim].
        sinks: [query_heads] logits, or None.

    Returns:
        [batch, query_heads, rows, value_dim] in the query's dtype; of a layer of latents, the sums of its "keys".
    """
    config, shape, index, residency = layer.config, layer.shape, layer.index, layer.residency
    assert shape is not None
    assert index is not None
    assert residency is not None
    working_set = residency.working_set
    batch, query_heads, rows, _ = query.shape
    group = query_heads // shape.kv_heads
    queries = query.reshape(batch, shape.kv_heads, group * rows, -1)
    num_blocks = working_set.window_start // config.block_size
    visible = mask.visible_tokens(working_set.window_start)
    if visible is not None:
        visible = visible.expand(batch, -1).unflatten(1, (num_blocks, config.block_size))
    roles = layer.runtime.roles_of(batch, rows, query.device)
    bias = mask.block_bias(num_blocks, config.block_size, shape.kv_heads)
    wanted: torch.Tensor | None = None
    scores: BlockScores | None = None
    fetches = config.on_miss == "fetch"
    if fetches and not residency.prefetches and visible is None and roles is None and bias is None:
        wanted = index.select(queries, group, num_blocks, scaling, config.sink_blocks, config.num_slots)
    if wanted is None:
        scores = score_blocks(index, queries, group, num_blocks, scaling, visible, roles, bias, config.sink_blocks)

    residency.land()
    if fetches or working_set.has_empty_slots:
        if wanted is None:
            assert scores is not None
            if fetches:
                wanted = choose_for_reading(scores, config.num_slots, config.sink_blocks)
            else:  # slots are given up in their order, so that it decides what later steps read
                best = choose_blocks(scores.best, config.num_slots, config.sink_blocks, scores.first_block)
                wanted = scores.numbers(best)
        residency.demand(wanted, num_blocks)
    _count(layer)
    if config.trace and fetches:
        _record(layer, rows)
    token_mask = mask.gather(working_set.token_positions(), group) if mask.values is not None else None
    inputs = (queries, working_set.kv, shape.query_dim, working_set.num_tokens, rows, scaling, token_mask, softcap)
    columns = shape.value_columns
    sinks = None if sinks is None else sinks.view(shape.kv_heads, group)
    if fetches:
        out = kernels.sparse_attention(*inputs, sinks, value_columns=columns)
        if scores is not None and residency.prefetches:
            residency.stage(predict_scores(scores.of_all(num_blocks), config.lookahead))
    else:
        out, lse, mass = kernels.sparse_attention_with_mass(*inputs, sinks, value_columns=columns)
        mass = mass[..., : working_set.slot_tokens].unflatten(-1, (config.num_slots, config.block_size)).sum(-1)
        assert scores is not None
        scores = scores.of_all(num_blocks)
        prediction = refine_by_attention(scores, lse, mass, working_set.block_of_slot, group, config.lookahead)
        if wanted is None:
            residency.count_resident(choose_for_reading(scores, config.num_slots, config.sink_blocks), num_blocks)
        if config.trace:
            _record(layer, rows)
        chosen = choose_blocks(prediction, config.num_slots, config.sink_blocks, scores.first_block)
        residency.replace(chosen, num_blocks)
    return out.to(query.dtype).view(batch, query_heads, rows, -1)


def attend_streamed(
    layer: OasisLayer,
    query: torch.Tensor,
    mask: AttentionMask,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Exact attention over everything, past blocks brought through in pieces and merged by their log-sum-exp.

    Arguments and result as those of `attend_sparse`, but that queries meet keys as the model knows them.

    Args:
        expand: Makes keys and values of each query head of latents [batch, 1, tokens, dim]; None: the layer holds them.
    """
    shape, rows = layer.shape, query.shape[2]
    assert shape is not None
    total, parts, position = layer.get_seq_length(), [], 0
    for kv in layer.pieces():
        stop = position + kv.shape[2]
        columns = mask.columns(position, stop)
        diagonal = total - rows - position if mask.causal else None
        keys, values = kv[..., : shape.key_dim], kv[..., shape.key_dim :]
        if expand is not None:
            keys, values = expand(keys, values)
        group = query.shape[1] // keys.shape[1]
        if group > 1:
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        parts.append(kernels.attention(query, keys, values, scaling, columns, softcap, diagonal))
        if len(parts) == 2:
            parts = [reference.merge(parts)]
        position = stop
    out, lse = parts[0]
    if sinks is not None:
        out = reference.apply_sinks(out, lse, sinks)
    return out.to(query.dtype)


def _count(layer: OasisLayer) -> None:
    """Enter the current sparse step in the counters."""
    config, shape, counters = layer.config, layer.shape, layer.counters
    assert shape is not None
    assert layer.store is not None
    assert layer.working_set is not None
    recent = layer.store.num_blocks - layer.working_set.window_start // config.block_size
    blocks = config.num_slots + recent
    counters.tokens_read_max = max(counters.tokens_read_max, blocks * config.block_size)
    counters.blocks_read += blocks * shape.batch * shape.kv_heads


def _record(layer: OasisLayer, rows: int) -> None:
    """Enter the current sparse step in the trace."""
    residency = layer.residency
    assert residency is not None
    working_set = residency.working_set
    selected = working_set.block_of_slot.sort(dim=2).values.to("cpu", torch.int32)
    absent, missed = (part.to("cpu", torch.int32) for part in (residency.absent, residency.missed))
    window_block = working_set.window_start // layer.config.block_size
    layer.trace.append(StepTrace(layer.length, rows, window_block, selected, absent, missed))
