"""Page formats: what the bytes of a page mean. A page holds one block of one batch row, all KV heads.

The plain format keeps the blocks as they are. An encoded one keeps them in fewer bits (kernels/encoding.py), and decodes them as
they enter a slot, on whatever device the slot is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from oasis_cache import kernels
from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.kernels import Encoding

_ENCODED_AT_ONCE = 1 << 20  # numbers: encoding takes some 20 bytes for each


class PageFormat(ABC):
    """How blocks [kv_heads, block_size, kv_dim] lie in pages [kv_heads, ...]. Stateless; shared by all stores of a layer."""

    sealed_by_kernel = False  # whether `kernels.seal_blocks` writes such pages

    @property
    @abstractmethod
    def page_shape(self) -> tuple[int, ...]:
        """[kv_heads, ...], of `page_dtype`."""

    @property
    @abstractmethod
    def page_dtype(self) -> torch.dtype:
        """Of the pages' elements."""

    @property
    def page_bytes(self) -> int:
        return math.prod(self.page_shape) * self.page_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one KV head: what travels when it is fetched."""
        return self.page_bytes // self.page_shape[0]

    @abstractmethod
    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """Blocks [batch, kv_heads, blocks, block_size, kv_dim] -> [batch, kv_heads, blocks, *page_shape[1:]], same device."""

    @abstractmethod
    def decode(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages [n, *page_shape] -> blocks [n, kv_heads, block_size, kv_dim]."""

    @abstractmethod
    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor, by_host: bool) -> None:
        """Bring planned blocks from their pages into entries of `target` [batch, kv_heads, entries, block_size, kv_dim], in place.

        Args:
            addresses: [batch, num_blocks] int64, where pages begin.
            by_host: The target's device cannot read the pages itself.
        """

    @abstractmethod
    def write(self, pages: torch.Tensor, addresses: torch.Tensor) -> None:
        """Let the device write what `encode` gave to pages at addresses [batch, blocks] that it can write itself."""


@dataclass(frozen=True)
class PlainFormat(PageFormat):
    """Blocks as they are."""

    shape: LayerShape
    block_size: int
    sealed_by_kernel = True

    @property
    def page_shape(self) -> tuple[int, ...]:
        return self.shape.kv_heads, self.block_size, self.shape.kv_dim

    @property
    def page_dtype(self) -> torch.dtype:
        return self.shape.dtype

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        return kv

    def decode(self, pages: torch.Tensor) -> torch.Tensor:
        return pages

    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor, by_host: bool) -> None:
        copy = kernels.gather_blocks_by_host if by_host else kernels.gather_blocks
        copy(plan.blocks, plan.slots, plan.mask, addresses, target)

    def write(self, pages: torch.Tensor, addresses: torch.Tensor) -> None:
        kernels.seal_blocks(pages, self.shape.key_dim, addresses, {}, 0)


@dataclass(frozen=True)
class EncodedFormat(PageFormat):
    """Blocks in 8 or 4 bits per number."""

    shape: LayerShape
    encoding: Encoding

    @property
    def page_shape(self) -> tuple[int, ...]:
        return self.shape.kv_heads, self.encoding.num_bytes

    @property
    def page_dtype(self) -> torch.dtype:
        return torch.uint8

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        pages = torch.empty(*kv.shape[:3], self.encoding.num_bytes, dtype=torch.uint8, device=kv.device)
        at_once = max(1, _ENCODED_AT_ONCE // max(1, kv[:, :, :1].numel()))
        for part, encoded in zip(kv.split(at_once, dim=2), pages.split(at_once, dim=2), strict=True):
            encoded.copy_(kernels.encode(part, self.encoding))
        return pages

    def decode(self, pages: torch.Tensor) -> torch.Tensor:
        return kernels.decode(pages, self.encoding, self.shape.dtype)

    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor, by_host: bool) -> None:
        copy = kernels.gather_encoded_by_host if by_host else kernels.gather_encoded
        copy(plan.blocks, plan.slots, plan.mask, addresses, target, self.encoding)

    def write(self, pages: torch.Tensor, addresses: torch.Tensor) -> None:
        kernels.write_pages(pages, addresses)


def make_format(tier_dtype: str | None, shape: LayerShape, block_size: int) -> PageFormat:
    """The format that `OasisConfig.tier_dtype` asks for."""
    if tier_dtype is None:
        return PlainFormat(shape, block_size)
    return EncodedFormat(shape, Encoding(tier_dtype, block_size, shape.kv_dim))
