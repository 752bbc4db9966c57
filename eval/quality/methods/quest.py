"""Quest as published (arXiv 2406.10774), slow and obvious: a mask over complete keys and values.

A step's own query chooses, for each *query* head, the pages whose upper bound by their keys' channel-wise minimum and maximum is
highest (section 3.3). The first two layers read everything (section 3.2). There are no sinks and no recent pages but the newest
tokens that fill no page yet. Each row of a forward chooses for itself, as if its tokens came one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from eval.quality.methods.base import Counters, Method

PAGE = 16
DENSE_LAYERS = 2
ATTENTION = "quest_reference"


def pages_read(query: torch.Tensor, key: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """Which tokens each query head reads.

    Args:
        query: [batch, query_heads, rows, dim].
        key: [batch, kv_heads, tokens, dim], the rows' own included.
        count: Pages to choose.

    Returns:
        [batch, query_heads, rows, tokens] bool, causal.
    """
    tokens = key.shape[2]
    pages = (tokens - rows) // PAGE
    group = query.shape[1] // key.shape[1]
    paged = key[:, :, : pages * PAGE].unflatten(2, (pages, PAGE))
    low, high = (bound.repeat_interleave(group, 1) for bound in (paged.amin(3), paged.amax(3)))
    # sum over channels of max(q * low, q * high)
    bound = query.clamp_min(0) @ high.transpose(2, 3) + query.clamp_max(0) @ low.transpose(2, 3)
    chosen = torch.zeros_like(bound, dtype=torch.bool)
    chosen.scatter_(-1, bound.topk(min(count, pages), -1).indices, True)
    newest = chosen.new_ones(*chosen.shape[:3], tokens - pages * PAGE)
    causal = torch.ones(rows, tokens, dtype=torch.bool, device=key.device).tril(tokens - rows)
    return torch.cat([chosen.repeat_interleave(PAGE, -1), newest], -1) & causal


class QuestAttention:
    """An attention function of transformers that reads Quest's pages, and counts what it read."""

    def __init__(self, budget: int, sparse_rows: int) -> None:
        self.budget, self.sparse_rows = budget, sparse_rows
        self.layer_reads: dict[int, list[float]] = {}
        self.other_steps = 0

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        rows, tokens = query.shape[2], key.shape[2]
        sparse = rows < tokens and rows <= self.sparse_rows and (tokens - rows) // PAGE * PAGE > self.budget
        if not sparse or module.layer_idx < DENSE_LAYERS:
            if sparse:
                self._count(module.layer_idx, (tokens - rows) // PAGE * PAGE)
            elif module.layer_idx == 0:
                self.other_steps += 1
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        mask = pages_read(query, key, rows, self.budget // PAGE)
        group = query.shape[1] // key.shape[1]
        self._count(module.layer_idx, self._distinct(mask, group, (tokens - rows) // PAGE * PAGE))
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    @staticmethod
    def _distinct(mask: torch.Tensor, group: int, paged_tokens: int) -> float:
        """Distinct tokens in pages that the last row reads per KV head."""
        last = mask[:, :, -1, :paged_tokens].unflatten(1, (-1, group)).any(2)
        return float(last.sum(-1).float().mean())

    def _count(self, layer: int, tokens: float) -> None:
        self.layer_reads.setdefault(layer, []).append(float(tokens))


class QuestCounters(Counters):
    def __init__(self, attention: QuestAttention) -> None:
        self.attention = attention

    def as_dict(self) -> dict[str, Any]:
        reads = list(self.attention.layer_reads.values())
        return {
            "sparse_steps": len(reads[0]) if reads else 0,
            "other_steps": self.attention.other_steps,
            "tokens_read": sum(map(sum, reads)) / max(1, sum(map(len, reads))),
        }


class Quest(Method):
    """The published method over a `DynamicCache`."""

    name = "quest"
    title = "Quest"
    describes = (
        "as published: pages of 16 by min/max bounds, chosen by each query head, so that one KV head reads more than the budget; "
        "the first two layers read everything and are not charged"
    )

    @contextmanager
    def session(self, model: PreTrainedModel, budget: int, sparse_rows: int) -> Iterator[tuple[Cache, Counters]]:
        if budget < PAGE or budget % PAGE:
            raise ValueError(f"budget={budget} must be a multiple of the page size {PAGE}")
        attention = QuestAttention(budget, max(32, sparse_rows))
        AttentionInterface.register(ATTENTION, attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        before = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        try:
            yield DynamicCache(config=model.config), QuestCounters(attention)
        finally:
            model.set_attn_implementation(before)
            AttentionInterface._global_mapping.pop(ATTENTION)
            AttentionMaskInterface._global_mapping.pop(ATTENTION)
