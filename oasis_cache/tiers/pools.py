"""The pools of pages of one cache: one cap on host memory, one spill file, one lock."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import numpy as np

from oasis_cache.store import HostMemory
from oasis_cache.tiers.backing import Backing
from oasis_cache.tiers.pages import PagePool
from oasis_cache.tiers.spill import SpillFile


class PagePools:
    """The pools of one cache and its copies, one for each page size, under one cap. Thread-safe.

    Args:
        memory: The account that frames are taken from.
        spill: Where pages go that find no frame; None: only pages with another home can leave host memory.
    """

    PROMISE_FROM = 7 / 8  # share of the cap from which pages have room on the disk before they are written

    def __init__(self, memory: HostMemory, spill: SpillFile | None = None) -> None:
        self.memory = memory
        self.spill = spill
        self.pools: WeakValueDictionary[int, PagePool] = WeakValueDictionary()  # by page bytes; stores keep them alive
        self.backings: list[Backing] = [] if spill is None else [spill]  # a page's home is a number in this list
        self.page_hits = self.page_misses = 0  # pages leased that were in host memory, that were not
        self.bytes_read = self.bytes_written = 0  # from and to backings
        self.num_users = 1  # caches that were not closed
        self.lock = threading.Condition(threading.Lock())
        self.num_lent = 0  # frames in use by somebody who will give them back: pins, and frames that are no page's yet
        self._released: deque[tuple[PagePool, np.ndarray]] = deque()

    def pool(self, page_bytes: int) -> PagePool:
        """The pool of pages of that size.

        Raises:
            MemoryError: The cap is smaller than what such a pool needs to work at all.
        """
        with self.locked():
            if page_bytes not in self.pools:
                cap, alignment = self.memory.max_bytes, 1 if self.spill is None else self.spill.alignment
                smallest = 2 * (page_bytes + 2 * alignment)
                if cap is not None and cap < smallest:
                    raise MemoryError(
                        f"max_host_bytes={cap:,} is too small: blocks of {page_bytes:,} bytes need {smallest:,}"
                    )
                pool = self.pools[page_bytes] = PagePool(self, page_bytes)
                return pool
            return self.pools[page_bytes]

    def __deepcopy__(self, memo: dict) -> PagePools:
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Pages released meanwhile, by a collection of garbage in this very thread too, are freed behind it."""
        self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()
            self.take_released()

    def give_up(self, pool: PagePool, ids: np.ndarray) -> None:
        """Take a reference from each page listed, now or as soon as nobody is in the middle of something."""
        self._released.append((pool, ids))
        self.take_released()

    def take_released(self) -> None:
        while self._released and self.lock.acquire(blocking=False):
            try:
                while self._released:
                    pool, ids = self._released.popleft()
                    pool._release(ids)
            finally:
                self.lock.release()

    def close(self) -> None:
        """One user less; the last one's end closes the backings."""
        self.num_users -= 1
        if self.num_users == 0:
            for backing in self.backings:
                backing.close()

    @property
    def live_bytes(self) -> int:
        """Bytes of all pages, wherever they rest."""
        return sum(pool.num_pages * pool.stride for pool in self.pools.values())

    @property
    def resident_bytes(self) -> int:
        return sum(pool.num_resident * pool.stride for pool in self.pools.values())

    def require(self, num_bytes: int, purpose: str) -> None:
        """Raise with the numbers if pages of `num_bytes` more cannot be had; reserves nothing.

        Raises:
            MemoryError: Host memory cannot take them, and nothing can leave it.
            OSError: The disk cannot take what host memory cannot.
        """
        cap = self.memory.max_bytes
        with self.locked():
            live = self.live_bytes
            homeless = sum(pool.num_homeless * pool.stride for pool in self.pools.values())
        fits = cap is None or live + num_bytes <= self.PROMISE_FROM * cap
        if fits or self.spill is not None:  # what is reserved and free is no bytes more, so the cap leaves enough
            left = num_bytes if cap is None else max(0, cap - self.memory.reserved_bytes)
            self.memory.require(min(num_bytes, left), purpose)
        if fits:
            return
        assert cap is not None
        if self.spill is not None:
            more = homeless + num_bytes - self.spill.spare_bytes
            if more > self.spill.free_bytes:
                raise OSError(
                    errno.ENOSPC,
                    f"{purpose} needs {num_bytes:,} more bytes, which max_host_bytes={cap:,} sends to disk, but the spill file "
                    f"would have to grow by {more:,} bytes and the file system of spill={self.spill.directory!r} has "
                    f"{self.spill.free_bytes:,}. Make room there, or shorten the context or the batch",
                )
        elif homeless + num_bytes > cap:
            raise MemoryError(
                f"{purpose} needs {num_bytes:,} more bytes of host memory, but max_host_bytes={cap:,} leaves "
                f"{max(0, cap - homeless):,}. "
                "Raise max_host_bytes, give spill= a directory, or shorten the context or the batch"
            )

    def make_way(self, pool: PagePool) -> bool:
        """Let another pool give a slab back if `pool` has less than its share of the cap; the lock is held, and let go to write."""
        cap, live = self.memory.max_bytes, self.live_bytes
        if cap is None or len(self.pools) == 1:
            return False

        def excess(other: PagePool) -> float:
            return other.frames.reserved_bytes - cap * other.num_pages * other.stride / live

        if pool.frames.count and excess(pool) >= 0:
            return False
        others = sorted((other for other in self.pools.values() if other is not pool), key=excess, reverse=True)
        return any(other.give_slab_back() for other in others)

    def check_integrity(self) -> None:
        """Assert that the books agree, when transfers under way are over."""
        with self.locked():
            assert self.lock.wait_for(lambda: self.num_lent == 0, timeout=10), f"{self.num_lent} frames stay lent"
            for pool in self.pools.values():
                pool.check_integrity()
