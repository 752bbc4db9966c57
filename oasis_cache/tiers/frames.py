"""Places for pages in host memory: equal frames, carved from slabs that count against the cap."""

from __future__ import annotations

import numpy as np
import torch

from oasis_cache.store import HostMemory

_SLABS_OF_CAP = (
    16  # the cap is used up in at least so many slabs, so that pools of different page sizes can pass them on
)
_LEAST_FRAMES = 16


class Frames:
    """Frames of `stride` bytes, aligned for direct access to a disk. Not thread-safe: its pool holds the lock.

    Attributes:
        stride: Bytes of a frame: those of a page, rounded up to the alignment.
        address: [frames ever made] int64, where each begins; meaningless for frames whose slab was given back.
        buffers: The same as writable uint8 arrays of `stride` bytes, None where the slab was given back.
    """

    def __init__(self, memory: HostMemory, page_bytes: int, alignment: int) -> None:
        self.memory = memory
        self.alignment = alignment
        self.stride = -(-page_bytes // alignment) * alignment
        self.address = np.empty(0, np.int64)
        self.buffers: list[np.ndarray | None] = []
        self.free: list[int] = []
        self.slabs: dict[int, tuple[torch.Tensor, list[int]]] = {}  # slab number -> its memory and frames
        self._unused: list[int] = []  # numbers of frames whose slab was given back
        self._next_slab = 0

    @property
    def reserved_bytes(self) -> int:
        return sum(raw.numel() for raw, _ in self.slabs.values())

    @property
    def count(self) -> int:
        return sum(len(frames) for _, frames in self.slabs.values())

    def take(self, count: int) -> list[int]:
        """At most `count` free frames, taken off the free list."""
        taken = self.free[:count]
        del self.free[:count]
        return taken

    def grow(self, wanted: int) -> None:
        """Reserve slabs until `wanted` frames are free, or the cap is reached."""
        while len(self.free) < wanted:
            size = max(wanted - len(self.free), self.count // 8, _LEAST_FRAMES)
            if self.memory.max_bytes is not None:
                left = self.memory.max_bytes - self.memory.reserved_bytes - self.alignment
                size = min(size, max(1, self.memory.max_bytes // (_SLABS_OF_CAP * self.stride)), left // self.stride)
            if size <= 0:
                return
            raw = self.memory.allocate(size * self.stride + self.alignment, pin=False)
            start = -raw.data_ptr() % self.alignment
            rows = raw[start : start + size * self.stride].view(size, self.stride).numpy()
            while len(self._unused) < size:
                self._unused.append(len(self.buffers))
                self.buffers.append(None)
            numbers, self._unused = self._unused[:size], self._unused[size:]
            self.address = np.append(self.address, np.zeros(len(self.buffers) - len(self.address), np.int64))
            self.address[numbers] = raw.data_ptr() + start + self.stride * np.arange(size)
            for number, row in zip(numbers, rows, strict=True):
                self.buffers[number] = row
            self.slabs[self._next_slab] = (raw, numbers)
            self._next_slab += 1
            self.free += numbers

    def give_back(self, slab: int) -> None:
        """Return a slab whose frames are all free."""
        raw, numbers = self.slabs.pop(slab)
        gone = set(numbers)
        self.free = [frame for frame in self.free if frame not in gone]
        for number in numbers:
            self.buffers[number] = None
        self._unused += numbers
        self.memory.release(raw)

    def give_back_free(self) -> None:
        """Return all slabs whose frames are all free."""
        free = set(self.free)
        for slab in [number for number, (_, frames) in self.slabs.items() if free.issuperset(frames)]:
            self.give_back(slab)
