"""Pages that rest in a bounded number of frames in host memory, at home in a backing, or both.

A page is written once and never changed. *Resident*: it has a frame. *Home*: a backing and a key it can be read from again. A page
without a home is given one, in the spill file, when its frame is wanted for another page for the first time; later evictions cost
nothing. Frames go to the least recently leased page's successor. No lock is held while bytes are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from oasis_cache.tiers.backing import Backing
from oasis_cache.tiers.frames import Frames

if TYPE_CHECKING:
    from oasis_cache.tiers.pools import PagePools

_WRITE_PAGES = 64  # pages written at a time when one without a home has to go


class PagePool:
    """Pages of one size. Methods with an underscore are called with the lock held."""

    def __init__(self, pools: PagePools, page_bytes: int) -> None:
        self.pools = pools  # which knows this pool weakly: no cycle keeps memory until a collection of garbage
        self.page_bytes = page_bytes
        self.frames = Frames(pools.memory, page_bytes, 1 if pools.spill is None else pools.spill.alignment)
        self.num_pages = self.num_resident = 0
        self._homeless = self._promised = 0
        # by page
        self._references = np.zeros(0, np.int32)
        self._frame = np.zeros(0, np.int64)  # -1: not resident
        self._arriving = np.zeros(0, bool)  # the frame is being filled
        self._pins = np.zeros(0, np.int32)  # who reads or writes the frame just now
        self._home = np.zeros(0, np.int32)  # number of the backing, -1: none
        self._key = np.zeros(0, np.int64)
        self._used = np.zeros(0, np.int64)  # clock of the last lease
        self._free_ids: list[int] = []
        self._clock = 0

    @property
    def stride(self) -> int:
        return self.frames.stride

    @property
    def num_homeless(self) -> int:
        return self._homeless

    # --- References ---------------------------------------------------------------------------------------------------

    def create(self, count: int) -> np.ndarray:
        """`count` new pages with one reference each, to be written: ids [count] int64.

        Raises:
            OSError: The disk cannot take what host memory cannot.
        """
        with self.pools.locked():
            cap = self.pools.memory.max_bytes
            if cap is not None and self.pools.live_bytes + count * self.stride > self.pools.PROMISE_FROM * cap:
                for pool in self.pools.pools.values():
                    pool._promise(pool._homeless + (count if pool is self else 0))
            ids = self._new_ids(count)
            self._homeless += count
            return ids

    def _promise(self, count: int) -> None:
        """Have room on the disk for `count` pages without a home."""
        if self.pools.spill is not None and count > self._promised:
            self.pools.spill.promise(count - self._promised, self.stride)
            self._promised = count

    def register(self, backing: Backing, keys: np.ndarray) -> np.ndarray:
        """New pages with one reference each whose home is `backing`, by keys [n] int64: ids [n] int64. Nothing is read yet."""
        with self.pools.locked():
            if backing not in self.pools.backings:
                self.pools.backings.append(backing)
            ids = self._new_ids(len(keys))
            self._home[ids] = self.pools.backings.index(backing)
            self._key[ids] = keys
            return ids

    def _new_ids(self, count: int) -> np.ndarray:
        missing = count - len(self._free_ids)
        if missing > 0:
            held = len(self._references)
            grown = held + max(missing, held // 2, 64)
            for name, empty in (
                ("_references", 0), ("_frame", -1), ("_arriving", False), ("_pins", 0), ("_home", -1), ("_key", -1), ("_used", 0),
            ):  # fmt: skip
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.full(grown - held, empty, array.dtype)]))
            self._free_ids += range(held, grown)
        ids = np.array(self._free_ids[:count], np.int64)
        del self._free_ids[:count]
        self._references[ids] = 1
        self.num_pages += count
        return ids

    def share(self, ids: np.ndarray) -> None:
        """One more reference to each page listed (a page may be listed several times)."""
        with self.pools.locked():
            assert (self._references[ids] > 0).all(), "a free page was shared"
            np.add.at(self._references, ids, 1)

    def release(self, ids: np.ndarray) -> None:
        """One reference less to each page listed; pages without references are gone, and memory that they leave empty."""
        self.pools.give_up(self, ids)

    def _release(self, ids: np.ndarray) -> None:
        np.subtract.at(self._references, ids, 1)
        assert (self._references[ids] >= 0).all(), "a page was freed twice"
        ids = np.unique(ids)
        self._forget(ids[(self._references[ids] == 0) & (self._pins[ids] == 0)])

    def _forget(self, ids: np.ndarray) -> None:
        """Pages without references whose frames nobody uses."""
        if not ids.size:
            return
        spill = self.pools.spill
        self._vacate(ids[self._frame[ids] >= 0])
        if spill is not None:
            spilled = ids[self._home[ids] == 0]
            if spilled.size:
                spill.free(self._key[spilled], self.stride)
        self._homeless -= int((self._home[ids] < 0).sum())
        if spill is not None and self._promised > self._homeless:
            spill.take_back(self._promised - self._homeless, self.stride)
            self._promised = self._homeless
        self._home[ids] = -1
        self._free_ids += ids.tolist()
        self.num_pages -= ids.size
        if len(self.frames.free) * 4 >= self.frames.count:
            self.frames.give_back_free()

    # --- Bytes --------------------------------------------------------------------------------------------------------

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Fill new pages: ids [n], rows [n, page_bytes] uint8.

        Raises:
            MemoryError: The cap holds no page at all.
            OSError: The disk failed. Pages that were written stay readable.
        """
        done = 0
        while done < len(ids):
            with self.pools.locked():
                frames = self._obtain(len(ids) - done, wait=True)
                self.pools.num_lent += len(frames)
            for number, frame in enumerate(frames):
                self._buffer(frame)[: self.page_bytes] = rows[done + number]
            with self.pools.locked():
                self.pools.num_lent -= len(frames)
                part = ids[done : done + len(frames)]
                self._frame[part] = frames
                self._used[part] = self._tick()
                self.num_resident += len(frames)
                self.pools.lock.notify_all()
            done += len(frames)

    def lease(self, ids: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Make pages resident and keep them so while the caller reads them, as many at once as find frames.

        Args:
            ids: [n] int64, distinct.

        Yields:
            ids [k] and the addresses in memory [k] int64 of some pages; all of `ids` in the end, each once. Addresses hold until
            the next step of the iteration.

        Raises:
            OSError: A backing failed. Nothing changed.
            MemoryError: The cap holds no page at all.
        """
        while ids.size:
            taken, addresses, ids = self._bring(ids)
            try:
                if taken.size:
                    yield taken, addresses
            finally:
                with self.pools.locked():
                    self._unpin(taken)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Copies of pages, past the frames, so that reading everything once evicts nothing: [n, page_bytes] uint8."""
        alignment = self.frames.alignment
        raw = np.empty(len(ids) * self.stride + alignment, np.uint8)
        start = -raw.ctypes.data % alignment
        out = raw[start : start + len(ids) * self.stride].reshape(len(ids), self.stride)
        with self.pools.locked():
            frames = np.where(self._arriving[ids], -1, self._frame[ids])
            here = frames >= 0
            assert (here | (self._home[ids] >= 0)).all(), "a page was read that was never written"
            homes, keys = self._home[ids], self._key[ids]
            once = ~here & ~self._rereads()[homes]
            self._pin(ids[here])
        try:
            for row, frame in zip(np.flatnonzero(here).tolist(), frames[here].tolist(), strict=True):
                out[row] = self._buffer(frame)
            self._read_homes(homes, keys, np.flatnonzero(~here & ~once), out)
        finally:
            with self.pools.locked():
                self.pools.bytes_read += int((~here & ~once).sum()) * self.page_bytes
                self._unpin(ids[here])
        row_of = dict(zip(ids[once].tolist(), np.flatnonzero(once).tolist(), strict=True))
        for taken, _ in self.lease(ids[once]):
            for page in taken.tolist():
                out[row_of[page]] = self._buffer(int(self._frame[page]))
        return out[:, : self.page_bytes]

    def _rereads(self) -> np.ndarray:
        """[backings] bool, and True at -1 (no home)."""
        return np.array([*(backing.rereads for backing in self.pools.backings), True])

    def is_resident(self, ids: np.ndarray) -> np.ndarray:
        """[n] bool."""
        with self.pools.locked():
            resident: np.ndarray = (self._frame[ids] >= 0) & ~self._arriving[ids]
            return resident

    def _buffer(self, frame: int) -> np.ndarray:
        buffer = self.frames.buffers[frame]
        assert buffer is not None, "a frame of a slab that was given back"
        return buffer

    def _read_homes(self, homes: np.ndarray, keys: np.ndarray, which: np.ndarray, out: np.ndarray | list) -> None:
        """Read the pages numbered by `which`, from the homes and keys of all, into their rows of `out`. No lock is held."""
        for home in np.unique(homes[which]).tolist():
            rows = which[homes[which] == home]
            rows = rows[np.argsort(keys[rows], kind="stable")]
            self.pools.backings[home].read(keys[rows], [out[row] for row in rows.tolist()])

    def _bring(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pin those of `ids` that are resident and as many others as find frames, at least one in all.

        Returns:
            The ids that are pinned now, their addresses, and the ids that are left.
        """
        with self.pools.locked():
            here = self._frame[ids] >= 0
            held, absent = ids[here], ids[~here]
            self._pin(held)
            frames: list[int] = []
            if absent.size:
                frames = self._obtain(absent.size, wait=held.size == 0)
                came = self._frame[absent] >= 0  # another thread brought them while this one waited
                fetched, absent = (
                    absent[~came][: len(frames)],
                    np.concatenate([absent[came], absent[~came][len(frames) :]]),
                )
                self.frames.free += frames[len(fetched) :]
                frames = frames[: len(fetched)]
                self._frame[fetched] = frames
                self._arriving[fetched] = True
                self._pin(fetched)
            else:
                fetched = absent
            self.pools.page_hits += held.size
            self.pools.page_misses += fetched.size
            homes, keys = self._home[fetched], self._key[fetched]
        try:
            self._read_homes(homes, keys, np.arange(fetched.size), [self._buffer(frame) for frame in frames])
        except BaseException:
            with self.pools.locked():
                self._arriving[fetched] = False
                self._frame[fetched] = -1
                self.frames.free += frames
                self._unpin(np.concatenate([held, fetched]))
            raise
        with self.pools.locked():
            self._arriving[fetched] = False
            self.num_resident += fetched.size
            self.pools.bytes_read += fetched.size * self.page_bytes
            self._lose_homes(fetched, homes)
            self.pools.lock.notify_all()
            while self._arriving[held].any():
                self.pools.lock.wait()
            failed = self._frame[held] < 0
            self._unpin(held[failed])  # who was to bring them could not: this thread will try
            taken = np.concatenate([held[~failed], fetched])
            self._used[taken] = self._tick()
            return taken, self.frames.address[self._frame[taken]], np.concatenate([absent, held[failed]])

    def _lose_homes(self, ids: np.ndarray, homes: np.ndarray) -> None:
        """Pages just read from a backing that is not to be asked twice must not be dropped."""
        for number in np.unique(homes).tolist():
            if not self.pools.backings[number].rereads:
                gone = ids[homes == number]
                self._home[gone] = -1
                self._homeless += gone.size

    # --- Frames -------------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _pin(self, ids: np.ndarray) -> None:
        self._pins[ids] += 1
        self.pools.num_lent += ids.size

    def _unpin(self, ids: np.ndarray) -> None:
        self._pins[ids] -= 1
        self.pools.num_lent -= ids.size
        self._forget(ids[(self._pins[ids] == 0) & (self._references[ids] == 0)])
        self.pools.lock.notify_all()

    def _vacate(self, ids: np.ndarray) -> None:
        self.frames.free += self._frame[ids].tolist()
        self._frame[ids] = -1
        self.num_resident -= ids.size

    def _obtain(self, count: int, wait: bool) -> list[int]:
        """At most `count` free frames, off the free list; at least one if `wait`. The lock may be let go in between."""
        while True:
            self.frames.grow(count)
            if len(self.frames.free) < count and not self.pools.make_way(self):
                self._evict(count - len(self.frames.free))
            frames = self.frames.take(count)
            if frames or not wait:
                return frames
            if self.pools.num_lent == 0 and not self._evictable().size and not self.pools.make_way(self):
                raise MemoryError(
                    f"max_host_bytes={self.pools.memory.max_bytes:,} leaves no room for one page of {self.stride:,} bytes"
                    + ("" if self.pools.spill is not None else ": without spill=, new blocks have nowhere else to go")
                )
            if self.pools.num_lent:
                self.pools.lock.wait()

    def _evictable(self) -> np.ndarray:
        """Pages that can leave their frames, in no order."""
        able = (self._frame >= 0) & (self._pins == 0)
        if self.pools.spill is None:
            able &= self._home >= 0
        return np.flatnonzero(able)

    def _oldest(self, ids: np.ndarray, count: int) -> np.ndarray:
        """The `count` pages that were leased least recently, or all."""
        if count < ids.size:
            ids = ids[np.argpartition(self._used[ids], count)[:count]]
        return ids

    def _evict(self, count: int) -> None:
        """Free the frames of `count` pages, or of as many as can go; those that have no home get one first."""
        ids = self._evictable()
        leaving = self._oldest(ids, count)
        num_homeless = int((self._home[leaving] < 0).sum())
        if num_homeless:  # others that will have to go soon are written with them
            self._write_home(self._oldest(ids[self._home[ids] < 0], max(_WRITE_PAGES, num_homeless)))
        leaving = leaving[(self._pins[leaving] == 0) & (self._home[leaving] >= 0) & (self._frame[leaving] >= 0)]
        self._vacate(leaving)

    def _write_home(self, ids: np.ndarray) -> None:
        """Give pages a home in the spill file. The lock is let go while the disk writes."""
        spill = self.pools.spill
        assert spill is not None
        self._promise(ids.size)
        keys = spill.allocate(ids.size, self.stride)
        self._promised -= ids.size
        self._pin(ids)
        buffers = [self._buffer(frame) for frame in self._frame[ids].tolist()]
        self.pools.lock.release()
        try:
            spill.write(keys, buffers)
        except BaseException:
            self.pools.lock.acquire()
            spill.free(keys, self.stride)
            self._unpin(ids)
            raise
        self.pools.lock.acquire()
        self.pools.bytes_written += ids.size * self.page_bytes
        self._home[ids] = 0
        self._key[ids] = keys
        self._homeless -= ids.size
        self._unpin(ids)

    def give_slab_back(self) -> bool:
        """Empty the slab that was used least recently and return it to the account; whether one could be.

        The lock is held, and let go to write.
        """
        page_of = dict(
            zip(self._frame[self._frame >= 0].tolist(), np.flatnonzero(self._frame >= 0).tolist(), strict=True)
        )
        evictable = set(self._evictable().tolist())
        best: tuple[int, int] | None = None
        free = set(self.frames.free)
        for slab, (_, frames) in self.frames.slabs.items():
            pages = [page_of.get(frame, -1) for frame in frames if frame not in free]
            if evictable.issuperset(pages):
                latest = max((int(self._used[page]) for page in pages), default=-1)
                best = min(best, (latest, slab)) if best is not None else (latest, slab)
        if best is None:
            return False
        frames = self.frames.slabs[best[1]][1]
        pages_in = np.array([page_of[frame] for frame in frames if frame not in free], np.int64)
        homeless = pages_in[self._home[pages_in] < 0]
        if homeless.size:
            self._write_home(homeless)
            pages_in = pages_in[(self._pins[pages_in] == 0) & (self._frame[pages_in] >= 0)]
        self._vacate(pages_in)
        if set(self.frames.free).issuperset(frames) and best[1] in self.frames.slabs:
            self.frames.give_back(best[1])
        return True

    def check_integrity(self) -> None:
        """Assert that references, frames and homes agree; the lock is held and nothing under way."""
        live = self._references > 0
        resident = self._frame >= 0
        assert int(live.sum()) == self.num_pages and int(resident.sum()) == self.num_resident
        assert not (resident & ~live).any(), "a free page has a frame"
        assert not self._pins.any() and not self._arriving.any()
        assert (resident | (self._home >= 0))[live].all(), "a page is nowhere"
        used = [*self._frame[resident].tolist(), *self.frames.free]
        assert len(set(used)) == len(used) == self.frames.count, "frames were lost, or are used twice"
        assert int((self._home[live] < 0).sum()) == self._homeless
        spilled = self._key[live & (self._home == 0)] if self.pools.spill is not None else self._key[:0]
        assert len(np.unique(spilled)) == spilled.size, "two pages have one place in the spill file"
