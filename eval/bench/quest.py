"""Quest (arXiv 2406.10774) as a cache to be timed: what eval/quality/methods/quest.py computes, without its waste.

Complete keys and values in buffers of fixed size, each page's channel-wise bounds kept as the page fills, and attention over the
gathered pages. A step's own query chooses them, for each query head; the first two layers read everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from eval.quality.methods.quest import DENSE_LAYERS, PAGE

ATTENTION = "quest_gathered"


class QuestLayer(DynamicLayer):
    """Keys and values, [batch, kv_heads, capacity, dim], and bounds of whole pages, [batch, kv_heads, pages, dim]."""

    def __init__(self, capacity: int, num_pages: int) -> None:
        super().__init__()
        self.capacity = -(-capacity // PAGE) * PAGE
        self.num_pages = num_pages
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        heads = key_states.shape[:2]
        self.keys = key_states.new_zeros(*heads, self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*heads, self.capacity, value_states.shape[3])
        self.low, self.high = (key_states.new_zeros(*heads, self.capacity // PAGE, key_states.shape[3]) for _ in "lh")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens in.

        Raises:
            ValueError: They exceed the capacity.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.length, self.length + key_states.shape[2]
        if stop > self.capacity:
            raise ValueError(f"{stop} tokens exceed the capacity of {self.capacity}")
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        done, whole = start // PAGE, stop // PAGE
        if whole > done:
            paged = self.keys[:, :, done * PAGE : whole * PAGE].unflatten(2, (-1, PAGE))
            self.low[:, :, done:whole], self.high[:, :, done:whole] = paged.amin(3), paged.amax(3)
        self.length = stop
        keys = self.keys[:, :, :stop]
        keys.quest_layer = self  # type: ignore[attr-defined]  # attention gets these very tensors
        return keys, self.values[:, :, :stop]

    def get_seq_length(self) -> int:
        return self.length

    @property
    def index_bytes(self) -> int:
        return self.low.nbytes + self.high.nbytes

    def attend(self, query: torch.Tensor, tokens: int, scaling: float | None) -> torch.Tensor:
        """Attention of one row, [batch, query_heads, 1, dim], over the pages that its heads choose and the newest tokens."""
        batch, heads, _, dim = query.shape
        kv_heads = self.keys.shape[1]
        pages = (tokens - 1) // PAGE  # the row's own token fills no page yet
        grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
        low, high = self.low[:, :, :pages].mT, self.high[:, :, :pages].mT
        # Section 3.3: the sum over channels of max(q * low, q * high).
        bound = grouped.clamp_min(0) @ high + grouped.clamp_max(0) @ low
        best = bound.topk(self.num_pages, -1, sorted=False).indices  # [batch, kv_heads, group, num_pages]
        best = torch.cat([best, best.new_full((*best.shape[:3], 1), pages)], -1)  # and the page that is being filled
        rows = best + (torch.arange(batch * kv_heads) * (self.capacity // PAGE)).view(batch, kv_heads, 1, 1)
        read = self.num_pages * PAGE + tokens - pages * PAGE
        keys, values = (
            whole.view(-1, PAGE * whole.shape[3]).index_select(0, rows.flatten()).view(batch, heads, -1, whole.shape[3])
            for whole in (self.keys, self.values)
        )
        return scaled_dot_product_attention(query, keys[:, :, :read], values[:, :, :read], scale=scaling)


def quest_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over what a `QuestLayer` returned."""
    layer, rows, tokens = key.quest_layer, query.shape[2], key.shape[2]  # type: ignore[attr-defined]
    if rows > 1 or module.layer_idx < DENSE_LAYERS or (tokens - rows) // PAGE <= layer.num_pages:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return layer.attend(query, tokens, scaling).transpose(1, 2).contiguous(), None


class QuestCache(Cache):
    """One `QuestLayer` per layer. The model's attention must be `ATTENTION`, which the first one registers."""

    def __init__(self, config: PretrainedConfig, capacity: int, budget: int) -> None:
        super().__init__(layers=[QuestLayer(capacity, budget // PAGE) for _ in range(config.num_hidden_layers)])
        self.num_query_heads = config.num_attention_heads
        AttentionInterface.register(ATTENTION, quest_attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    def read_bytes(self) -> int:
        """Bytes of keys, values and bounds that one step reads."""
        read = 0
        for number, layer in enumerate(self.layers):
            batch, kv_heads, _, dim = layer.keys.shape
            token_bytes = (dim + layer.values.shape[3]) * layer.keys.element_size()
            pages = (layer.length - 1) // PAGE
            if number < DENSE_LAYERS or pages <= layer.num_pages:
                read += batch * kv_heads * layer.length * token_bytes
                continue
            read += batch * self.num_query_heads * layer.num_pages * PAGE * token_bytes
            read += batch * kv_heads * pages * 2 * dim * layer.keys.element_size()
        return read
