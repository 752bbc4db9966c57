"""The file that pages spill to: one a cache, without a name as soon as it is open, so that nothing is left of it behind a crash."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from oasis_cache.tiers.backing import Backing

try:
    import fcntl
except ImportError:  # Windows: nothing can be spilled or saved there, and all else works
    fcntl = None  # type: ignore[assignment]

PREFIX, SUFFIX = "oasis-cache-", ".spill"
EXTENT_BYTES = 16 << 20  # the file grows by whole extents
_RUN_PAGES = 256  # most pages of one system call (IOV_MAX is 1024)
_READERS = 4


def check_platform(what: str) -> None:
    """Raise `OSError` where the operating system lacks what files of pages need."""
    if fcntl is None or not all(hasattr(os, name) for name in ("preadv", "pwritev", "posix_fallocate")):
        raise OSError(
            errno.ENOSYS, f"{what} needs a platform with file locks, os.preadv and os.posix_fallocate, such as Linux"
        )


def remove_orphans(directory: str, suffix: str = SUFFIX) -> list[str]:
    """Remove our unfinished files that no living process has locked, and return their names.

    A spill file has a name only between its creation and the moment it is locked, and that only on file systems that cannot make
    nameless ones. What is found unlocked was left by a process that was killed in between.
    """
    removed = []
    for path in sorted(Path(directory).glob(f"{PREFIX}*{suffix}")):
        if _is_alive(path.name.removeprefix(PREFIX).split("-")[0]):
            continue  # between making and locking it, maybe
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
    return removed


def lock(fd: int) -> None:
    """Say that a living process has use for a file; ends with the file's last descriptor."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def _is_alive(pid: str) -> bool:
    """Whether a process of this machine has that number."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OSError, OverflowError):
        return False
    return True


class SpillFile(Backing):
    """A scratch file of pages: room is preallocated before it is promised, pages are written once, behind one another.

    Read and written past the operating system's page cache (O_DIRECT) where the file system can: host memory then holds a page
    once, and its cap means what it says. docs/tiers.md has the measurements.

    Args:
        directory: Where the file shall be; it must exist.

    Raises:
        OSError: No file can be made there.
    """

    def __init__(self, directory: str) -> None:
        check_platform("spilling")
        self.directory = directory
        try:
            remove_orphans(directory)
            self._fd = _open_nameless(directory)
        except OSError as error:
            raise OSError(error.errno, f"no spill file can be made in spill={directory!r}: {error.strerror}") from error
        self.alignment = _use_direct_access(self._fd)
        self.capacity_bytes = 0
        self._end = 0  # pages were given out up to here
        self._live = 0
        self._free: dict[int, list[int]] = {}  # page bytes -> offsets given back
        self._promised: dict[int, int] = {}  # page bytes -> pages that `allocate` will be asked for
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a collection of garbage may give pages back in the middle
        self._close = weakref.finalize(self, os.close, self._fd)

    def close(self) -> None:
        self._close()

    @property
    def free_bytes(self) -> int:
        """Bytes that the file system still has for this file."""
        state = os.fstatvfs(self._fd)
        return state.f_bavail * state.f_frsize

    @property
    def spare_bytes(self) -> int:
        """Bytes of the file that hold no page."""
        with self._lock:
            return self.capacity_bytes - self._end + sum(size * len(keys) for size, keys in self._free.items())

    def promise(self, count: int, page_bytes: int) -> None:
        """Have room on the disk for `count` more pages of `page_bytes`, so that `allocate` cannot fail later.

        Raises:
            OSError: The disk is full, or the file must not become so large. The file is as it was.
        """
        with self._lock:
            promised = {**self._promised, page_bytes: self._promised.get(page_bytes, 0) + count}
            needed = self._end + sum(
                size * max(0, pages - len(self._free.get(size, ()))) for size, pages in promised.items()
            )
            if needed > self.capacity_bytes:
                self._grow(needed)
            self._promised = promised

    def take_back(self, count: int, page_bytes: int) -> None:
        """`count` promised pages will not come."""
        with self._lock:
            self._promised[page_bytes] -= count
            self._shrink()

    def _grow(self, needed: int) -> None:
        generous = -(-max(needed, self.capacity_bytes * 9 // 8) // EXTENT_BYTES) * EXTENT_BYTES
        for size in (generous, needed):
            try:
                os.posix_fallocate(self._fd, self.capacity_bytes, size - self.capacity_bytes)
                self.capacity_bytes = size
                return
            except OSError as error:
                os.ftruncate(self._fd, self.capacity_bytes)
                failure = error
        raise OSError(
            failure.errno,
            f"spill={self.directory!r} cannot take {needed - self.capacity_bytes:,} more bytes besides the {self.capacity_bytes:,} "
            f"that the spill file has ({failure.strerror}); its file system has {self.free_bytes:,} bytes left",
        )

    def allocate(self, count: int, page_bytes: int) -> np.ndarray:
        """Offsets for `count` promised pages of `page_bytes`, [count] int64: first those that were given back, then new ones."""
        with self._lock:
            free = sorted(self._free.get(page_bytes, ()))
            reused = min(count, len(free))  # what lies behind the end may be promised to pages of another size
            new = self._end + page_bytes * np.arange(count - reused)
            self._end += page_bytes * (count - reused)
            assert count <= self._promised[page_bytes] and self._end <= self.capacity_bytes, "more than was promised"
            keys = np.array([*free[:reused], *new], np.int64)
            self._free[page_bytes] = free[reused:]
            self._promised[page_bytes] -= count
            self._live += count
            return keys

    def free(self, keys: np.ndarray, page_bytes: int) -> None:
        """Give offsets back; a file without pages gives its room on the disk back."""
        with self._lock:
            self._live -= len(keys)
            self._free.setdefault(page_bytes, []).extend(keys.tolist())
            self._shrink()

    def _shrink(self) -> None:
        if self._live == 0 and not any(self._promised.values()):
            if self._close.alive:
                os.ftruncate(self._fd, 0)
            self.capacity_bytes = self._end = 0
            self._free.clear()

    def write(self, keys: np.ndarray, pages: Sequence[np.ndarray]) -> None:
        """Write whole pages (uint8, all of one length and aligned to `alignment`) at offsets from `allocate`.

        Raises:
            OSError: The disk failed.
        """
        self._check_process()
        self._transfer(os.pwritev, "writing to", keys, pages)

    def read(self, keys: np.ndarray, out: Sequence[np.ndarray]) -> None:
        self._check_process()
        self._transfer(os.preadv, "reading", keys, out)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise OSError(
                errno.EPERM, "a cache that spills to disk cannot be used in a forked process: both would write one file"
            )

    def _transfer(self, call: Callable[..., int], what: str, keys: np.ndarray, pages: Sequence[np.ndarray]) -> None:
        def transfer(run: tuple[int, int]) -> None:
            offset, buffers = int(keys[run[0]]), pages[run[0] : run[1]]
            wanted = sum(buffer.nbytes for buffer in buffers)
            try:
                moved = call(self._fd, buffers, offset)
                if moved != wanted:
                    raise OSError(errno.EIO, f"{moved} of {wanted} bytes")
            except OSError as error:
                raise OSError(
                    error.errno, f"{what} the spill file in {self.directory!r} failed: {error.strerror}"
                ) from error

        in_runs(transfer, keys, pages[0].nbytes)


def in_runs(transfer: Callable[[tuple[int, int]], None], keys: np.ndarray, page_bytes: int) -> None:
    """Call `transfer` for each run (first, last + 1) of adjacent offsets, several at a time."""
    breaks = np.flatnonzero(np.diff(keys) != page_bytes) + 1
    edges = [0, *breaks.tolist(), len(keys)]
    runs = [
        (first, min(first + _RUN_PAGES, stop))
        for start, stop in pairwise(edges)
        for first in range(start, stop, _RUN_PAGES)
    ]
    if len(runs) == 1:
        transfer(runs[0])
    else:
        for _ in _disk_threads().map(transfer, runs):
            pass


@cache
def _disk_threads() -> ThreadPoolExecutor:
    """The threads that wait for disks, of all caches of this process."""
    return ThreadPoolExecutor(_READERS, thread_name_prefix="oasis-disk")


def _open_nameless(directory: str) -> int:
    """A new file that ends with its last descriptor."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return _open_and_unlink(directory)


def _open_and_unlink(directory: str) -> int:
    fd, path = tempfile.mkstemp(SUFFIX, f"{PREFIX}{os.getpid()}-", directory)
    lock(fd)
    with contextlib.suppress(FileNotFoundError):  # another process took it for an orphan: it has no name any more
        os.unlink(path)
    return fd


def _use_direct_access(fd: int) -> int:
    """Switch a file to direct access if its file system can; returns the alignment that offsets, lengths and memory need."""
    if not hasattr(os, "O_DIRECT"):
        return 1
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        return 1
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)  # page-aligned
    for alignment in (512, 4096):
        with contextlib.suppress(OSError):
            os.pwritev(fd, [memoryview(memory)[alignment : 2 * alignment]], alignment)
            os.preadv(fd, [memoryview(memory)[alignment : 2 * alignment]], alignment)
            os.ftruncate(fd, 0)
            return alignment
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return 1
