"""Block arithmetic and the types that selection, pool and transfer share.

A block is `block_size` consecutive tokens of one layer. Keys and values of a token lie side by side in one tensor `kv` whose
last dimension is key_dim + value_dim, so that one copy moves both and attention reads them as two strided views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerShape:
    """Sizes that stay fixed while a layer holds tokens, taken from the first tensors it is given (never from a config).

    Attributes:
        latent: The layer holds latents (multi-head latent attention): "keys" are the compressed keys and values of all query heads
            [batch, 1, tokens, key_dim], "values" the rotary part of the keys. Queries that absorbed the expansion meet both
            together, and what attention sums up are the "keys".
    """

    batch: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    latent: bool = False

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, latent: bool = False) -> LayerShape:
        """keys [batch, kv_heads, tokens, key_dim], values [batch, kv_heads, tokens, value_dim]."""
        batch, kv_heads, _, key_dim = keys.shape
        return cls(batch, kv_heads, key_dim, values.shape[-1], keys.dtype, keys.device, latent)

    @property
    def query_dim(self) -> int:
        """Width of what a query meets, and of what the index stands for: the first columns of `kv`."""
        return self.kv_dim if self.latent else self.key_dim

    @property
    def value_columns(self) -> slice:
        """The columns of `kv` that attention sums up."""
        return slice(0, self.key_dim) if self.latent else slice(self.key_dim, self.kv_dim)

    @property
    def kv_dim(self) -> int:
        return self.key_dim + self.value_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, over all KV heads of one batch row."""
        return self.kv_heads * self.kv_dim * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one KV head."""
        return block_size * self.kv_dim * self.dtype.itemsize


@dataclass(frozen=True)
class FetchPlan:
    """Blocks to bring into slots, with a fixed shape: entries whose mask is False stand for nothing.

    Attributes:
        blocks: [batch, kv_heads, entries] int64, block numbers in the sequence.
        slots: [batch, kv_heads, entries] int64, where they go.
        mask: [batch, kv_heads, entries] bool.
        generation: The layer's generation when the plan was made. A plan of an older generation is dropped: its blocks or
            slots may have become others by a crop, a reorder or a reset.
    """

    blocks: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    generation: int


def pack_kv(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[..., tokens, key_dim] and [..., tokens, value_dim] -> [..., tokens, key_dim + value_dim]."""
    return torch.cat([keys, values], dim=-1)


def as_blocks(kv: torch.Tensor, block_size: int) -> torch.Tensor:
    """[batch, kv_heads, blocks * block_size, dim] -> [batch, kv_heads, blocks, block_size, dim] (a view if contiguous)."""
    batch, kv_heads, tokens, dim = kv.shape
    assert tokens % block_size == 0, f"{tokens} tokens are no whole number of blocks of {block_size}"
    return kv.reshape(batch, kv_heads, tokens // block_size, block_size, dim)
