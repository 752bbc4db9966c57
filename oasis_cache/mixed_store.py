"""The host tier of one layer under `tier_dtype`: the first blocks in full precision, all others encoded."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import torch

from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.config import OasisConfig
from oasis_cache.formats import PageFormat, PlainFormat, make_format
from oasis_cache.store import HostMemory, HostStore, slab_bytes_after
from oasis_cache.tiers import PagePools, TieredStore


class MixedStore:
    """Two stores as one: blocks below `num_exact` in the first, all others in the second. Offers what a `HostStore` offers.

    Args:
        first: Holds the first `num_exact` blocks of every batch row.
        rest: Holds the others, its block 0 being block `num_exact`.
    """

    sealed_by_kernel = False

    def __init__(self, first: HostStore, rest: HostStore, num_exact: int) -> None:
        self.first, self.rest, self.num_exact = first, rest, num_exact

    def __deepcopy__(self, memo: dict) -> MixedStore:
        return MixedStore(copy.deepcopy(self.first, memo), copy.deepcopy(self.rest, memo), self.num_exact)

    def _split(self, start: int, stop: int) -> tuple[slice, slice]:
        """Blocks start..stop as ranges of the first and of the other store."""
        n = self.num_exact
        return slice(min(start, n), min(stop, n)), slice(max(start - n, 0), max(stop - n, 0))

    @property
    def num_blocks(self) -> int:
        return self.first.num_blocks + self.rest.num_blocks

    @property
    def parts(self) -> list[HostStore]:
        return [self.first, self.rest]

    @property
    def batch(self) -> int:
        return self.rest.batch

    @property
    def used_bytes(self) -> int:
        return self.first.used_bytes + self.rest.used_bytes

    def range_bytes(self, start: int, stop: int) -> int:
        first, rest = self._split(start, stop)
        return self.first.range_bytes(first.start, first.stop) + self.rest.range_bytes(rest.start, rest.stop)

    @property
    def away_bytes(self) -> int:
        return self.first.away_bytes + self.rest.away_bytes

    @property
    def block_bytes(self) -> int:
        return self.rest.block_bytes

    def bytes_to_append(self, num_blocks: int) -> int:
        first, rest = self._split(self.num_blocks, self.num_blocks + max(0, num_blocks))
        return self.first.bytes_to_append(first.stop - first.start) + self.rest.bytes_to_append(rest.stop - rest.start)

    @property
    def device_readable(self) -> bool:
        return self.first.device_readable and self.rest.device_readable

    @property
    def addresses(self) -> torch.Tensor:
        return torch.cat([self.first.addresses, self.rest.addresses], dim=1)

    def reserve(self, count: int) -> torch.Tensor:
        first, rest = self._split(self.num_blocks, self.num_blocks + count)
        parts = [self.first.reserve(first.stop - first.start), self.rest.reserve(rest.stop - rest.start)]
        return torch.cat(parts, dim=1)

    def append(self, kv: torch.Tensor) -> int:
        first, _ = self._split(self.num_blocks, self.num_blocks + kv.shape[2])
        count = first.stop - first.start
        return self.first.append(kv[:, :, :count]) + self.rest.append(kv[:, :, count:])

    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor) -> None:
        n = self.num_exact
        exact = plan.blocks < n
        self.first.gather(replace(plan, mask=plan.mask & exact), addresses[:, :n], target)
        rest = replace(plan, blocks=plan.blocks - n, mask=plan.mask & ~exact)
        self.rest.gather(rest, addresses[:, n:], target)

    def read_range(self, start: int, stop: int) -> torch.Tensor:
        stores = zip((self.first, self.rest), self._split(start, stop), strict=True)
        parts = [store.read_range(where.start, where.stop) for store, where in stores if where.stop > where.start]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def truncate(self, num_blocks: int) -> None:
        self.first.truncate(min(num_blocks, self.num_exact))
        self.rest.truncate(max(num_blocks - self.num_exact, 0))

    def select_rows(self, rows: torch.Tensor) -> None:
        self.first.select_rows(rows)
        self.rest.select_rows(rows)

    def check_integrity(self) -> None:
        assert self.rest.num_blocks == 0 or self.first.num_blocks == self.num_exact, "blocks are out of order"
        self.first.check_integrity()
        self.rest.check_integrity()


Store = HostStore | MixedStore


def make_store(memory: HostMemory, pools: PagePools | None, shape: LayerShape, config: OasisConfig) -> Store:
    """The store of a layer: what `tier_dtype` compresses, sinks apart, in a store of its own.

    Args:
        pools: Where pages rest that need not be in host memory; None: they are.
    """

    def of_format(page_format: PageFormat) -> HostStore:
        if pools is not None:
            return TieredStore(pools, shape, config.block_size, page_format)
        return HostStore(memory, shape, config.block_size, page_format)

    rest = of_format(make_format(config.tier_dtype, shape, config.block_size))
    if config.tier_dtype is None or config.sink_blocks == 0:
        return rest
    return MixedStore(of_format(PlainFormat(shape, config.block_size)), rest, config.sink_blocks)


def page_bytes_of_new(pools: PagePools | None, shape: LayerShape, config: OasisConfig, num_blocks: int) -> int:
    """Bytes that a new store reserves when it is given `num_blocks` blocks per batch row at once."""
    used, reserved = forecast_store(shape, config, num_blocks, num_blocks)
    return reserved if pools is None else used


def forecast_store(shape: LayerShape, config: OasisConfig, at_once: int, num_blocks: int) -> tuple[int, int]:
    """Bytes used and reserved by a store that gets `at_once` blocks per batch row first, then one by one up to `num_blocks`."""
    exact = config.sink_blocks if config.tier_dtype is not None else 0
    plain, rest = PlainFormat(shape, config.block_size), make_format(config.tier_dtype, shape, config.block_size)
    used = reserved = 0
    for page_format, start, stop in ((plain, 0, exact), (rest, exact, num_blocks)):
        first, last = (min(max(count - start, 0), stop - start) for count in (at_once, num_blocks))
        used += shape.batch * last * page_format.page_bytes
        counts = itertools.chain([shape.batch * first], itertools.repeat(shape.batch, last - first))
        reserved += slab_bytes_after(page_format.page_bytes, counts)
    return used, reserved
