"""The blocks of one layer whose pages need not be in host memory: a table of page ids over a shared pool."""

from __future__ import annotations

import numpy as np
import torch

from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.formats import PageFormat, PlainFormat
from oasis_cache.store import HostStore
from oasis_cache.tiers.backing import Backing
from oasis_cache.tiers.pools import PagePools


class TieredStore(HostStore):
    """A `HostStore` whose pages have a bounded number of frames in host memory, and homes beyond it.

    A page holds all KV heads of a block, so that it comes to host memory whole for any of them. What `addresses` gives
    are page ids here, in host memory on any device: a gather looks at the plan, brings the pages it names into frames, and copies
    from there.

    Args:
        pools: Where the pages rest; shared by the layers of a cache and its copies.
        shape: Sizes of the layer.
        block_size: Tokens per block.
        page_format: What the bytes of a page mean; by default blocks as they are.
    """

    sealed_by_kernel = False

    def __init__(
        self, pools: PagePools, shape: LayerShape, block_size: int, page_format: PageFormat | None = None
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.format = PlainFormat(shape, block_size) if page_format is None else page_format
        self.pools = pools
        self.pool = pools.pool(self.format.page_bytes)
        self._ids = torch.empty(shape.batch, 0, dtype=torch.int64)  # [batch, capacity]
        self.num_blocks = 0

    def __deepcopy__(self, memo: dict) -> TieredStore:
        copy = object.__new__(TieredStore)
        copy.shape, copy.block_size, copy.format = self.shape, self.block_size, self.format
        copy.pools, copy.pool, copy._ids = self.pools, self.pool, self._ids.clone()
        self.pool.share(_array(self.addresses))
        copy.num_blocks = self.num_blocks
        return copy

    @property
    def batch(self) -> int:
        return self._ids.shape[0]

    @property
    def used_bytes(self) -> int:
        """Bytes of this table's pages that are in host memory now; pages shared by several rows count once per reference."""
        return int(self.pool.is_resident(_array(self.addresses)).sum()) * self.pool.page_bytes

    @property
    def away_bytes(self) -> int:
        """Bytes of this table's pages that are not."""
        return self.batch * self.num_blocks * self.pool.page_bytes - self.used_bytes

    def bytes_to_append(self, num_blocks: int) -> int:
        return self.batch * num_blocks * self.pool.stride

    @property
    def device_readable(self) -> bool:
        return self.shape.device.type == "cpu"

    @property
    def addresses(self) -> torch.Tensor:
        """[batch, num_blocks] int64 in host memory: the id of each block's page."""
        return self._ids[:, : self.num_blocks]

    def reserve(self, count: int) -> torch.Tensor:
        raise NotImplementedError("a page that may be on disk has no address to write to: use append")

    def append(self, kv: torch.Tensor) -> int:
        batch, _, count = kv.shape[:3]
        assert batch == self.batch, f"{batch} rows of blocks for a table of {self.batch}"
        if count == 0:
            return 0
        rows = self.format.encode(kv).transpose(1, 2).reshape(batch * count, -1).cpu().view(torch.uint8)
        ids = self.pool.create(batch * count)
        try:
            self.pool.write(ids, rows.numpy())
        except BaseException:
            self.pool.release(ids)
            raise
        self._enter(ids)
        return rows.numel()

    def adopt(self, backing: Backing, keys: torch.Tensor) -> None:
        """Enter new blocks whose pages rest in a backing, behind the existing ones; nothing is read yet.

        Args:
            keys: [batch, blocks] int64; rows that share a page name the same key, and it is read once for all of them.
        """
        assert keys.shape[0] == self.batch, f"{keys.shape[0]} rows of keys for a table of {self.batch}"
        distinct, which = np.unique(keys.numpy(), return_inverse=True)
        first = self.pool.register(backing, distinct)
        ids = first[which.reshape(-1)]
        self.pool.share(ids)
        self.pool.release(first)
        self._enter(ids)

    def _enter(self, ids: np.ndarray) -> None:
        """Put pages [batch * count] behind the table's."""
        count, capacity = len(ids) // self.batch, self._ids.shape[1]
        if self.num_blocks + count > capacity:
            extra = max(self.num_blocks + count, 2 * capacity, 64) - capacity
            self._ids = torch.nn.functional.pad(self._ids, (0, extra), value=-1)
        self._ids[:, self.num_blocks : self.num_blocks + count] = torch.from_numpy(ids).view(self.batch, count)
        self.num_blocks += count

    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor) -> None:
        """As `HostStore.gather`, `addresses` being page ids. Waits for the device, if there is one, to see the plan, and for
        backings where pages are not in host memory.

        Raises:
            OSError: A page could not be read from where it rests. Some entries of `target` may have been written.
        """
        batch, device = addresses.shape[0], target.device
        blocks, mask = plan.blocks.cpu(), plan.mask.cpu()
        rows = torch.arange(batch)[:, None, None]
        ids = addresses[rows, torch.where(mask, blocks, 0)]
        wanted = np.unique(_array(ids[mask]))
        for taken, places in self.pool.lease(wanted):
            order = np.argsort(taken)
            positions = np.searchsorted(taken[order], ids.numpy()).clip(max=len(taken) - 1)
            here = mask & torch.from_numpy(taken[order][positions] == ids.numpy())
            table = torch.from_numpy(places[order]).expand(batch, -1).contiguous().to(device)
            part = FetchPlan(torch.from_numpy(positions).to(device), plan.slots, here.to(device), plan.generation)
            self.format.gather(part, table, target, by_host=not self.device_readable)

    def read_range(self, start: int, stop: int) -> torch.Tensor:
        """As `HostStore.read_range`; pages that are not in host memory are read past it.

        Raises:
            OSError: A page could not be read from where it rests.
        """
        ids, which = np.unique(_array(self._ids[:, start:stop]), return_inverse=True)
        rows = torch.from_numpy(self.pool.read(ids)).view(self.format.page_dtype)[torch.from_numpy(which.reshape(-1))]
        blocks = self.format.decode(rows.unflatten(1, self.format.page_shape).to(self.shape.device))
        sizes = (self.batch, self.shape.kv_heads, (stop - start) * self.block_size, self.shape.kv_dim)
        return blocks.unflatten(0, (self.batch, stop - start)).transpose(1, 2).reshape(sizes)

    @property
    def page_ids(self) -> torch.Tensor:
        return self.addresses

    def read_pages(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.pool.read(_array(ids)))

    def truncate(self, num_blocks: int) -> None:
        if num_blocks < self.num_blocks:
            gone = _array(self._ids[:, num_blocks : self.num_blocks])
            self.num_blocks = num_blocks
            self.pool.release(gone)

    def select_rows(self, rows: torch.Tensor) -> None:
        old, ids = _array(self.addresses), self._ids[rows]
        self.pool.share(_array(ids[:, : self.num_blocks]))
        self._ids = ids
        self.pool.release(old)

    def check_integrity(self) -> None:
        self.pools.check_integrity()
        assert (self.pool._references[_array(self.addresses)] > 0).all(), "the table points to a free page"


def _array(ids: torch.Tensor) -> np.ndarray:
    """Page ids as the pool takes them: a flat copy."""
    array: np.ndarray = ids.flatten().numpy().copy()
    return array
