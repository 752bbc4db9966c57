"""The host tier: complete KV of one layer in refcounted, immutable pages carved from slabs.

A *page* holds one block of one batch row, all KV heads, in a format that formats.py knows. Pages are written once and never
changed, so copies of a cache, beams and repeated rows share them: every batch operation only permutes the page table.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
import torch

from oasis_cache import kernels
from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.formats import PageFormat, PlainFormat


def available_host_bytes() -> int:
    """Bytes of memory this process may still take: the machine's available memory, capped by its cgroup's limit."""
    available = psutil.virtual_memory().available
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(limit_path), _read_int(usage_path)
        if limit is not None and usage is not None:
            available = min(available, max(0, limit - usage))
    return available


def _read_int(path: str) -> int | None:
    if not os.path.exists(path):
        return None
    with open(path) as file:
        text = file.read().strip()
    return int(text) if text.isdigit() else None


@dataclass
class HostMemory:
    """Account of the slabs of one cache and its copies, and the cap on them. Thread-safe."""

    max_bytes: int | None = None
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    pin_failure: str | None = None  # what to tell the user when page-locked memory could not be had
    _lock: threading.RLock = field(
        default_factory=threading.RLock, repr=False
    )  # a collection may release in the middle

    def __deepcopy__(self, memo: dict) -> HostMemory:
        return self  # copies share pages, so they share the account

    def require(self, num_bytes: int, purpose: str) -> None:
        """Raise `MemoryError` with the numbers if `num_bytes` more cannot be had; reserves nothing."""
        left = self.max_bytes - self.reserved_bytes if self.max_bytes is not None else None
        if left is not None and num_bytes > left:
            raise MemoryError(
                f"{purpose} needs {num_bytes:,} more bytes of host memory, but max_host_bytes={self.max_bytes:,} leaves {left:,}. "
                "Raise max_host_bytes, or shorten the context or the batch"
            )
        available = available_host_bytes()
        if num_bytes > available:
            raise MemoryError(
                f"{purpose} needs {num_bytes:,} more bytes of host memory, but this machine (or its cgroup) has {available:,}"
            )

    def allocate(self, num_bytes: int, pin: bool) -> torch.Tensor:
        """A slab: [num_bytes] uint8, page-locked if `pin` and the platform allows it."""
        with self._lock:
            left = None if self.max_bytes is None else self.max_bytes - self.reserved_bytes
            if left is not None and num_bytes > left:
                raise MemoryError(
                    f"a slab of {num_bytes:,} bytes exceeds what max_host_bytes={self.max_bytes:,} leaves: {left:,}"
                )
            slab = self._allocate_pinned(num_bytes) if pin else None
            if slab is None:
                slab = torch.empty(num_bytes, dtype=torch.uint8)
            else:
                self.pinned_bytes += num_bytes
            self.reserved_bytes += num_bytes
            return slab

    def _allocate_pinned(self, num_bytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            self.pin_failure = (
                f"page-locked memory could not be had ({error}); the host tier uses ordinary memory, which is slower to copy from. "
                "Raise the locked-memory limit (ulimit -l), or lower the context or max_host_bytes."
            )
            return None

    def release(self, slab: torch.Tensor, device: torch.device | None = None) -> None:
        """Take a slab off the account. `device` may still be reading or writing it: that is waited for."""
        with self._lock:
            self.reserved_bytes -= slab.numel()
            if slab.is_pinned():
                self.pinned_bytes -= slab.numel()
                torch.cuda.synchronize(device)


def slab_sizes(page_bytes: int, num_missing: int, num_used: int) -> list[int]:
    """Bytes of the slabs to reserve for `num_missing` more pages beside `num_used` used ones: powers of two."""
    growth = num_used // 8  # amortises decoding, which asks for a page at a time
    smallest = 1 << (PageAllocator.MIN_SLAB_PAGES * page_bytes - 1).bit_length()
    sizes: list[int] = []
    while num_missing > 0:
        wanted = max(num_missing, growth) * page_bytes
        sizes.append(max(smallest, 1 << (wanted.bit_length() - 1)))
        num_missing -= sizes[-1] // page_bytes
    return sizes


def slab_bytes_after(page_bytes: int, counts: Iterable[int]) -> int:
    """Bytes of the slabs that an allocator has reserved after so many pages were taken, step by step, and none given back."""
    reserved = capacity = used = 0
    for count in counts:
        sizes = slab_sizes(page_bytes, count - (capacity - used), used)
        reserved, capacity = reserved + sum(sizes), capacity + sum(size // page_bytes for size in sizes)
        used += count
    return reserved


class PageAllocator:
    """Pages of one size, carved from slabs of power-of-two bytes, with reference counts. Thread-safe.

    Power-of-two slabs, because pinned allocators round up to one; whole slabs go back when their last page is freed.
    """

    MIN_SLAB_PAGES = 4

    def __init__(
        self,
        memory: HostMemory,
        page_shape: tuple[int, ...],
        dtype: torch.dtype,
        pin: bool,
        device: torch.device | None = None,
    ) -> None:
        self.memory = memory
        self.device = device  # that reads and writes page-locked pages
        self.page_shape = page_shape
        self.dtype = dtype
        self.pin = pin
        self.page_bytes = dtype.itemsize
        for size in page_shape:
            self.page_bytes *= size
        self.slabs: dict[int, torch.Tensor] = {}  # slab number -> [pages, *page_shape]
        self._raw: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[int]] = {}  # slab number -> free offsets, last one next
        self._references: dict[int, list[int]] = {}
        self._next_slab = 0
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict) -> PageAllocator:
        return self

    def __del__(self) -> None:
        # Tensors must not be used while the interpreter takes them, and `sys`, apart.
        if sys and not sys.is_finalizing():
            for raw in getattr(self, "_raw", {}).values():
                self.memory.release(raw, self.device)

    @property
    def num_pages_used(self) -> int:
        with self._lock:
            return sum(slab.shape[0] - len(self._free[number]) for number, slab in self.slabs.items())

    @property
    def reserved_bytes(self) -> int:
        return sum(raw.numel() for raw in self._raw.values())

    def slab_sizes(self, num_pages: int) -> list[int]:
        """Bytes of the slabs that `num_pages` more pages would add."""
        with self._lock:
            return slab_sizes(self.page_bytes, num_pages - sum(map(len, self._free.values())), self.num_pages_used)

    def allocate(self, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New pages with one reference each: slab numbers [num_pages] and offsets [num_pages], int64."""
        with self._lock:
            for size in self.slab_sizes(num_pages):
                raw = self.memory.allocate(size, self.pin)
                pages = size // self.page_bytes
                number, self._next_slab = self._next_slab, self._next_slab + 1
                self._raw[number] = raw
                self.slabs[number] = raw[: pages * self.page_bytes].view(self.dtype).view(pages, *self.page_shape)
                self._free[number] = list(range(pages - 1, -1, -1))
                self._references[number] = [0] * pages
            taken: list[tuple[int, int]] = []
            for number, free in list(self._free.items()):
                count = min(len(free), num_pages - len(taken))
                if count:
                    taken += [(number, offset) for offset in reversed(free[-count:])]
                    del free[-count:]
            for number, offset in taken:
                self._references[number][offset] = 1
            pages_taken = torch.tensor(taken, dtype=torch.int64).view(-1, 2)
            return pages_taken[:, 0], pages_taken[:, 1]

    def addresses(self, slab_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where pages begin in this process's memory: [n] slab numbers and offsets -> [n] int64."""
        bases = torch.empty_like(slab_ids)
        for number, where in _runs(slab_ids):
            bases[where] = self.slabs[number].data_ptr()
        return bases + offsets * self.page_bytes

    def share(self, slab_ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """One more reference to each page listed (a page may be listed several times)."""
        with self._lock:
            for number, offset in zip(slab_ids.flatten().tolist(), offsets.flatten().tolist(), strict=True):
                assert self._references[number][offset] > 0, "a free page was shared"
                self._references[number][offset] += 1

    def release(self, slab_ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """One reference less to each page listed; pages without references are free, slabs without pages are returned."""
        with self._lock:
            touched = set()
            for number, offset in zip(slab_ids.flatten().tolist(), offsets.flatten().tolist(), strict=True):
                assert self._references[number][offset] > 0, "a page was freed twice"
                self._references[number][offset] -= 1
                if self._references[number][offset] == 0:
                    self._free[number].append(offset)
                    touched.add(number)
            for number in touched:
                if len(self._free[number]) == self.slabs[number].shape[0]:
                    del self.slabs[number], self._free[number], self._references[number]
                    self.memory.release(self._raw.pop(number), self.device)

    def check_integrity(self) -> None:
        """Assert that free lists and reference counts agree."""
        for number, references in self._references.items():
            free = self._free[number]
            assert len(set(free)) == len(free), "a page is free twice"
            assert all((references[offset] == 0) == (offset in set(free)) for offset in range(len(references)))


class HostStore:
    """All sealed blocks of one layer: a page table over shared pages. The interface that every tier offers."""

    num_exact = 0  # first blocks that are kept in another format than the rest (see mixed_store.py)

    def __init__(
        self, memory: HostMemory, shape: LayerShape, block_size: int, page_format: PageFormat | None = None
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.format = PlainFormat(shape, block_size) if page_format is None else page_format
        self.pages = PageAllocator(
            memory, self.format.page_shape, self.format.page_dtype, shape.device.type == "cuda", shape.device
        )
        self._slab_ids = torch.empty(shape.batch, 0, dtype=torch.int64)  # [batch, capacity]
        self._offsets = torch.empty(shape.batch, 0, dtype=torch.int64)
        self._addresses = torch.empty(shape.batch, 0, dtype=torch.int64, device=shape.device)
        self.num_blocks = 0

    def __deepcopy__(self, memo: dict) -> HostStore:
        copy = object.__new__(HostStore)
        copy.shape, copy.block_size, copy.format = self.shape, self.block_size, self.format
        copy.pages, copy.num_blocks = self.pages, self.num_blocks
        copy._slab_ids, copy._offsets = self._slab_ids.clone(), self._offsets.clone()
        copy._addresses = self._addresses.clone()
        self.pages.share(*self._table())
        return copy

    def __del__(self) -> None:
        if getattr(self, "num_blocks", 0) and sys and not sys.is_finalizing():
            self.truncate(0)

    def _table(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._slab_ids[:, : self.num_blocks], self._offsets[:, : self.num_blocks]

    @property
    def batch(self) -> int:
        return self._slab_ids.shape[0]

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages this table points to; pages shared by several rows or copies count once per reference."""
        return self.range_bytes(0, self.num_blocks)

    def range_bytes(self, start: int, stop: int) -> int:
        """Bytes that hold blocks start..stop of all rows, and travel when they are read."""
        return self.batch * (stop - start) * self.format.page_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that travel when a block of one KV head is fetched, from number `num_exact` on."""
        return self.format.block_bytes

    @property
    def away_bytes(self) -> int:
        """Bytes of the table's pages that are not in host memory."""
        return 0

    def bytes_to_append(self, num_blocks: int) -> int:
        """Bytes of new slabs that appending `num_blocks` blocks would reserve."""
        return sum(self.pages.slab_sizes(self.batch * num_blocks))

    @property
    def device_readable(self) -> bool:
        """Whether the layer's device reads and writes the pages itself: they lie in its memory, or are page-locked."""
        return self.shape.device.type == "cpu" or self.pages.memory.pin_failure is None

    @property
    def sealed_by_kernel(self) -> bool:
        """Whether `kernels.seal_blocks` may write the pages, on a device that has kernels."""
        return self.format.sealed_by_kernel and self.device_readable

    @property
    def addresses(self) -> torch.Tensor:
        """[batch, num_blocks] int64 on the layer's device: where each block's page begins (see `PageFormat`).

        Pages are immutable and stay where they are until `truncate` or the store's end.
        """
        return self._addresses[:, : self.num_blocks]

    def reserve(self, count: int) -> torch.Tensor:
        """Enter `count` new blocks per batch row behind the existing ones; the caller fills the pages at the addresses returned."""
        self._grow(self.num_blocks + count)  # before pages are taken, which nobody would give back if this failed
        slab_ids, offsets = self.pages.allocate(self.batch * count)
        addresses = self.pages.addresses(slab_ids, offsets)
        new = slice(self.num_blocks, self.num_blocks + count)
        self._slab_ids[:, new] = slab_ids.view(self.batch, count)
        self._offsets[:, new] = offsets.view(self.batch, count)
        self._addresses[:, new] = addresses.view(self.batch, count).to(self.shape.device, non_blocking=True)
        self.num_blocks += count
        return self._addresses[:, new]

    def append(self, kv: torch.Tensor) -> int:
        """Write new blocks behind the existing ones and return the bytes written.

        Args:
            kv: [batch, kv_heads, blocks, block_size, kv_dim], on any device.
        """
        batch, _, count = kv.shape[:3]
        assert batch == self.batch, f"{batch} rows of blocks for a table of {self.batch}"
        if count == 0:
            return 0
        pages = self.format.encode(kv)
        addresses = self.reserve(count)
        new = slice(self.num_blocks - count, self.num_blocks)
        if kernels.uses_triton(kv.device) and self.device_readable:
            self.format.write(pages, addresses)
            return self.range_bytes(new.start, new.stop)
        slab_ids, offsets = self._slab_ids[:, new].flatten(), self._offsets[:, new].flatten()
        rows = pages.transpose(1, 2).reshape(batch * count, *self.pages.page_shape)
        for number, where in _runs(slab_ids):
            self._write(self.pages.slabs[number], offsets[where], rows[where])
        return self.range_bytes(new.start, new.stop)

    @staticmethod
    def _write(slab: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        first, count = int(offsets[0]), offsets.numel()
        if torch.equal(offsets, torch.arange(first, first + count)):
            slab[first : first + count].copy_(rows)
        else:
            slab[offsets] = rows.to(slab.device)

    def _grow(self, num_blocks: int) -> None:
        capacity = self._slab_ids.shape[1]
        if num_blocks > capacity:
            extra = max(num_blocks, 2 * capacity, 64) - capacity
            pad = torch.full((self.batch, extra), -1, dtype=torch.int64)
            self._slab_ids, self._offsets = torch.cat([self._slab_ids, pad], 1), torch.cat([self._offsets, pad], 1)
            self._addresses = torch.nn.functional.pad(self._addresses, (0, extra), value=-1)

    def gather(self, plan: FetchPlan, addresses: torch.Tensor, target: torch.Tensor) -> None:
        """Copy planned blocks into entries of `target` [batch, kv_heads, entries, block_size, kv_dim], which is changed in place.

        Args:
            addresses: What `addresses` was when the plan was made.
        """
        self.format.gather(plan, addresses, target, by_host=not self.device_readable)

    def read_range(self, start: int, stop: int) -> torch.Tensor:
        """Blocks start..stop of all rows, on the layer's device: [batch, kv_heads, (stop - start) * block_size, kv_dim]."""
        sizes = (self.batch, self.shape.kv_heads, (stop - start) * self.block_size, self.shape.kv_dim)
        if self.shape.device.type == "cuda":  # the device writes the pages, so only a read in its order sees them
            out = torch.empty(sizes, dtype=self.shape.dtype, device=self.shape.device)
            numbers = torch.arange(start, stop, device=self.shape.device).expand(*sizes[:2], -1)
            plan = FetchPlan(numbers, numbers - start, torch.ones_like(numbers, dtype=torch.bool), 0)
            self.gather(plan, self.addresses, out.unflatten(2, (stop - start, self.block_size)))
            return out
        slab_ids, offsets = self._slab_ids[:, start:stop].flatten(), self._offsets[:, start:stop].flatten()
        pages = torch.empty(slab_ids.numel(), *self.pages.page_shape, dtype=self.format.page_dtype)
        for number, where in _runs(slab_ids):
            pages[where] = self.pages.slabs[number][offsets[where]]
        return self.format.decode(pages).unflatten(0, (self.batch, stop - start)).transpose(1, 2).reshape(sizes)

    @property
    def parts(self) -> list[HostStore]:
        """The stores that this one consists of, in the order of their blocks."""
        return [self]

    @property
    def page_ids(self) -> torch.Tensor:
        """[batch, num_blocks] int64 in host memory: equal numbers for equal pages."""
        slab_ids, offsets = self._table()
        return (slab_ids << 32) | offsets

    def read_pages(self, ids: torch.Tensor) -> torch.Tensor:
        """Pages by `page_ids` [n], as their bytes: [n, page_bytes] uint8 in host memory."""
        slab_ids, offsets = ids >> 32, ids & 0xFFFFFFFF
        pages = torch.empty(ids.numel(), *self.pages.page_shape, dtype=self.format.page_dtype)
        for number, where in _runs(slab_ids):
            pages[where] = self.pages.slabs[number][offsets[where]]
        return pages.flatten(1).view(torch.uint8)

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from number `num_blocks` on."""
        if num_blocks < self.num_blocks:
            self.pages.release(
                self._slab_ids[:, num_blocks : self.num_blocks], self._offsets[:, num_blocks : self.num_blocks]
            )
            self.num_blocks = num_blocks

    def select_rows(self, rows: torch.Tensor) -> None:
        """Batch row i becomes the former row `rows[i]`; pages are shared, nothing is copied. rows: int64 [new batch], CPU."""
        old = self._table()
        slab_ids, offsets = self._slab_ids[rows], self._offsets[rows]
        self.pages.share(slab_ids[:, : self.num_blocks], offsets[:, : self.num_blocks])
        self.pages.release(*old)
        self._slab_ids, self._offsets = slab_ids, offsets
        self._addresses = self._addresses[rows.to(self.shape.device)]

    def check_integrity(self) -> None:
        """Assert that every page of the table is alive."""
        self.pages.check_integrity()
        slab_ids, offsets = (part.flatten() for part in self._table())
        for number, offset in zip(slab_ids.tolist(), offsets.tolist(), strict=True):
            assert self.pages._references[number][offset] > 0, "the table points to a free page"
        expected = self.pages.addresses(slab_ids, offsets).view(self.batch, -1)
        assert torch.equal(self.addresses.cpu(), expected), "an address is not its page's"


def _runs(slab_ids: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Slab numbers that occur in [n] ids, each with the int64 positions where it occurs."""
    numbers = torch.unique(slab_ids).tolist()
    return [(number, (slab_ids == number).nonzero().flatten()) for number in numbers]
