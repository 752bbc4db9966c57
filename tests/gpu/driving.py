"""A cache driven by hand: random keys, values and queries, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from oasis_cache import OasisCache


@dataclass
class Driver:
    """Feeds one cache.

    Attributes:
        cache: What is driven.
        device: Where the tensors lie.
        layers, batch, kv_heads, group, dim: Sizes of the model that is pretended.
    """

    cache: OasisCache
    device: torch.device
    layers: int = 1
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    seed: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)

    def draw(self, heads: int, tokens: int) -> torch.Tensor:
        """[batch, heads, tokens, dim] of the cache's dtype."""
        shape = (self.batch, heads, tokens, self.dim)
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def fill(self, tokens: int, chunk: int = 4096) -> None:
        """Random keys and values in all layers, as a prefill in chunks would leave them."""
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            for layer in range(self.layers):
                self.cache.update(self.draw(self.kv_heads, count), self.draw(self.kv_heads, count), layer)

    def step(self, rows: int = 1) -> list[torch.Tensor]:
        """One forward of `rows` new tokens: what attention gives in each layer, [batch, rows, query_heads, dim]."""
        out = []
        for layer in range(self.layers):
            self.cache.update(self.draw(self.kv_heads, rows), self.draw(self.kv_heads, rows), layer)
            query = self.draw(self.kv_heads * self.group, rows)
            out.append(
                self.cache.layers[layer].attend(
                    query,
                    None,
                    scaling=self.dim**-0.5,
                    sliding_window=None,
                    softcap=None,
                    sinks=None,
                    is_causal=True,
                )
            )
        return out
