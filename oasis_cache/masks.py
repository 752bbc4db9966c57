"""Attention masks as models pass them, brought into one form and cut down to the tokens that attention reads."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from oasis_cache.kernels.reference import causal_rows

HIDDEN = -1e4  # what an additive mask lowers by this much gets no attention at all


@dataclass(frozen=True)
class AttentionMask:
    """What the rows of one forward may see, on top of bottom-right causality.

    Attributes:
        values: [batch or 1, query_heads or 1, rows, total tokens], bool (True: visible) or additive; None: all past tokens.
        causal: Whether no row sees newer tokens than its own (already part of `values` where those are given).
        bias: [batch or 1, query_heads or 1, rows, total tokens], what is added to the scores by position; part of `values` too.
    """

    values: torch.Tensor | None
    causal: bool = True
    bias: torch.Tensor | None = None

    def biased(self, bias: torch.Tensor) -> AttentionMask:
        """The same with a bias [batch or 1, query_heads or 1, rows, total tokens] on the scores."""
        values, (rows, total) = self.values, bias.shape[2:]
        if values is None and self.causal and rows > 1:
            values = causal_rows(rows, total, bias.device)
        if values is None:
            values = bias
        elif values.dtype == torch.bool:
            values = torch.where(values, bias, torch.finfo(bias.dtype).min)
        else:
            values = values + bias
        return AttentionMask(values, self.causal, bias)

    def block_bias(self, num_blocks: int, block_size: int, kv_heads: int) -> torch.Tensor | None:
        """Mean bias of the first blocks, [batch or 1, kv_heads or 1, group * rows or rows, num_blocks] float32, or None."""
        if self.bias is None:
            return None
        blocks = self.bias[..., : num_blocks * block_size].float().unflatten(-1, (num_blocks, block_size)).mean(-1)
        return blocks.unflatten(1, (kv_heads, -1)).flatten(2, 3) if blocks.shape[1] > 1 else blocks

    def columns(self, start: int, stop: int) -> torch.Tensor | None:
        """Columns start..stop of the values, or None."""
        return None if self.values is None else self.values[..., start:stop]

    def gather(self, positions: torch.Tensor, group: int) -> torch.Tensor | None:
        """The mask of single tokens.

        Args:
            positions: [batch, kv_heads, tokens] int64.
            group: Query heads per KV head.

        Returns:
            [batch, kv_heads, group * rows, tokens], or None where everything is visible.
        """
        if self.values is None:
            return None
        batch, kv_heads, _ = positions.shape
        heads = self.values.shape[1]
        rows = self.values.shape[2]
        values = self.values.expand(batch, heads, rows, -1)
        values = (
            values.unflatten(1, (kv_heads, -1)) if heads > 1 else values.unsqueeze(1).expand(-1, kv_heads, -1, -1, -1)
        )
        index = positions[:, :, None, None].expand(-1, -1, values.shape[2], rows, -1)
        picked = values.gather(-1, index)
        return picked.expand(-1, -1, group, -1, -1).flatten(2, 3)

    def visible_tokens(self, num_tokens: int) -> torch.Tensor | None:
        """[batch, num_tokens] bool: tokens of the first `num_tokens` that some row and head may see, or None for all."""
        if self.values is None:
            return None
        part = self.values[..., :num_tokens]
        if part.dtype != torch.bool:
            part = part > HIDDEN
        return part.any(dim=1).any(dim=1)


def normalise(
    mask: torch.Tensor | BlockMask | None,
    rows: int,
    total: int,
    sliding_window: int | None,
    is_causal: bool,
    device: torch.device,
) -> AttentionMask:
    """Bring a model's mask into the one form.

    Args:
        mask: None, [batch, total] (1 or True: a real token), [batch, heads or 1, rows, total] bool or additive, or a
            flex-attention `BlockMask`.
        rows: New tokens.
        total: Tokens in the cache, the new ones included.
        sliding_window: Only the newest `sliding_window` tokens up to its own are visible to a row; None where the mask says so.
        is_causal: Whether rows see each other causally where the mask does not say.

    Raises:
        ValueError: the mask covers fewer than `total` tokens, or has a form that is none of the above.
    """
    causal = causal_rows(rows, total, device)
    if sliding_window is not None and sliding_window < total:
        positions = torch.arange(total, device=device)
        causal = causal & (positions > positions[total - rows :].unsqueeze(-1) - sliding_window)
        windowed = True
    else:
        windowed = False
    if mask is None:
        return AttentionMask(causal[None, None] if windowed else None, causal=is_causal)
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], rows, total, device=str(device))
    if mask.dim() not in (2, 4):
        raise ValueError(f"attention_mask has {mask.dim()} dimensions {tuple(mask.shape)}; 2 or 4 are accepted")
    if mask.shape[-1] < total:
        raise ValueError(
            f"attention_mask covers {mask.shape[-1]} tokens, but the cache holds {total} with the new ones: pass a mask over past "
            "and new tokens"
        )
    if mask.dim() == 2:
        return AttentionMask(mask[:, None, None, :total].bool() & causal)
    values = mask[..., :total]
    if windowed:
        blocked = torch.finfo(values.dtype).min if values.dtype != torch.bool else False
        values = values.masked_fill(~causal, blocked)
    elif device.type == "cpu" and _is_plain(values, causal):
        return AttentionMask(None)
    return AttentionMask(values, causal=rows == 1 or not _sees_ahead(values, causal))


def _is_plain(values: torch.Tensor, causal: torch.Tensor) -> bool:
    """Whether a 4D mask says nothing but bottom-right causality (looked up on the CPU only, where looking costs no wait)."""
    visible = values if values.dtype == torch.bool else values > HIDDEN
    if not torch.equal(visible, causal.expand_as(visible)):
        return False
    return values.dtype == torch.bool or bool((values.masked_fill(~visible, 0) == 0).all())


def _sees_ahead(values: torch.Tensor, causal: torch.Tensor) -> bool:
    """Whether a 4D mask lets a row see newer tokens than its own, as image tokens see each other."""
    visible = values if values.dtype == torch.bool else values > HIDDEN
    return bool((visible & ~causal).any())


class MaskMemo:
    """The normalised mask of the current forward: every layer of a kind passes the same object."""

    def __init__(self) -> None:
        self._entries: dict[tuple, tuple[weakref.ref | None, AttentionMask]] = {}

    def clear(self) -> None:
        """Forget everything: a new forward may bring other content in the same tensors."""
        self._entries.clear()

    def normalise(
        self,
        mask: torch.Tensor | BlockMask | None,
        rows: int,
        total: int,
        sliding_window: int | None,
        is_causal: bool,
        device: torch.device,
    ) -> AttentionMask:
        """`normalise`, computed once per mask object and sizes."""
        if mask is None and (sliding_window is None or sliding_window >= total):
            return AttentionMask(None, causal=is_causal)
        key = (id(mask), rows, total, sliding_window, is_causal, device)
        entry = self._entries.get(key)
        if entry is not None and (entry[0]() if entry[0] is not None else None) is mask:
            return entry[1]
        result = normalise(mask, rows, total, sliding_window, is_causal, device)
        if len(self._entries) >= 8:
            self._entries.clear()
        self._entries[key] = (weakref.ref(mask) if mask is not None else None, result)
        return result
