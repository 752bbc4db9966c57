"""Safetensors files whose every byte is accounted for: read without trust, a tensor at a time, never pickled.

The format is that of safetensors (an 8-byte length, a JSON header, tensors one behind the other), so that its own tools open
these files. In the header's metadata, "oasis_cache" is a JSON text with SHA-256 digests of the tensors, and "digest" the SHA-256 of
the header itself, counted with 64 zeros in its place. Tensors too large to be read at once have CRC-32 sums of their rows in a
tensor of their own, which has a digest like any other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oasis_cache.tiers.backing import Backing
from oasis_cache.tiers.spill import PREFIX, check_platform, in_runs, lock, remove_orphans

SUFFIX = ".saving"  # of files that are being written
_NO_DIGEST = "0" * 64
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def refuse(path: str, what: str) -> ValueError:
    """The error for a file that is not as it should be."""
    return ValueError(f"{path!r} is refused: {what}")


@dataclass
class Rows:
    """A tensor uint8 [count, row_bytes] that is written and read by rows: `read(first, last + 1)` gives some of them."""

    count: int
    row_bytes: int
    read: Callable[[int, int], torch.Tensor]
    at_once: int = 256


def write(path: str, description: dict[str, Any], tensors: dict[str, torch.Tensor | Rows]) -> None:
    """Write a file as a whole or not at all: it appears under its name when all bytes are on the disk.

    Args:
        description: What else the file says, as JSON has it.
        tensors: By name. `Rows` get their sums in a tensor named "<name>.sums".

    Raises:
        OSError: The disk cannot take it. Nothing of the attempt is left.
    """
    check_platform("saving a cache")
    directory, name = os.path.split(os.path.abspath(path))
    try:
        remove_orphans(directory, SUFFIX)
        fd, unfinished = tempfile.mkstemp(SUFFIX, f"{PREFIX}{os.getpid()}-", directory)
    except OSError as error:
        raise OSError(error.errno, f"the cache cannot be saved to {path!r}: {error.strerror}") from error
    try:
        with open(fd, "wb") as file:
            lock(file.fileno())
            _write(file, description, tensors)
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)
            os.replace(unfinished, os.path.join(directory, name))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"the cache cannot be saved to {path!r}: {error.strerror}") from error
        raise
    with contextlib.suppress(OSError):  # not every file system lets a directory be synchronised
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write(file: Any, description: dict[str, Any], tensors: dict[str, torch.Tensor | Rows]) -> None:
    header: dict[str, Any] = {}
    end = 0

    def place(name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        nonlocal end
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for name, tensor in tensors.items():
        if isinstance(tensor, Rows):
            place(name, torch.uint8, (tensor.count, tensor.row_bytes))
            place(f"{name}.sums", torch.int64, (tensor.count,))
        else:
            place(name, tensor.dtype, tensor.shape)
    digests = {name: _NO_DIGEST for name in header if not isinstance(tensors.get(name), Rows)}
    start = len(_header(header, description, digests))
    file.seek(start)
    for name, tensor in tensors.items():
        if isinstance(tensor, Rows):
            sums = []
            for first in range(0, tensor.count, tensor.at_once):
                rows = tensor.read(first, min(first + tensor.at_once, tensor.count)).contiguous().numpy()
                sums += [zlib.crc32(row) for row in rows]
                file.write(rows)
            name, tensor = f"{name}.sums", torch.tensor(sums, dtype=torch.int64)
        content = _bytes(tensor)
        digests[name] = hashlib.sha256(content).hexdigest()
        file.write(content)
    assert file.tell() == start + end
    file.seek(0)
    file.write(_header(header, description, digests))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _header(header: dict[str, Any], description: dict[str, Any], digests: dict[str, str]) -> bytes:
    """The file's first bytes: length, and a header with its own digest."""
    inner = json.dumps({**description, "digests": digests}, sort_keys=True)

    def encoded(digest: str) -> bytes:
        text = json.dumps({"__metadata__": {"digest": digest, "oasis_cache": inner}, **header}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    return encoded(hashlib.sha256(encoded(_NO_DIGEST)).hexdigest())


class Container:
    """An open file, checked as far as it was read: the header at once, tensors and rows as they are asked for.

    Args:
        path: A file written by `write`.

    Raises:
        ValueError: The file is none, is cut short, or its header is damaged.
        OSError: It cannot be read at all.
    """

    def __init__(self, path: str) -> None:
        check_platform("loading a cache")
        self.path = path
        if os.path.isdir(path):
            raise refuse(path, "it is no saved cache, but a directory")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        first = self._read(0, min(8, size))
        length = int.from_bytes(first, "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise refuse(self.path, f"it is no saved cache, or cut short ({size:,} bytes)")
        raw = self._read(8, length)
        try:
            header = json.loads(raw)
            metadata = header.pop("__metadata__")
            digest, inner = metadata["digest"], metadata["oasis_cache"]
            assert isinstance(digest, str) and len(digest) == 64
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            raise refuse(self.path, "it is no saved cache, or its header is damaged") from error
        blank = (first + raw).replace(digest.encode(), _NO_DIGEST.encode(), 1)
        if hashlib.sha256(blank).hexdigest() != digest:
            raise refuse(self.path, "its header is damaged")
        self.description: dict[str, Any] = json.loads(inner)  # from here on the header is what was written
        self._digests: dict[str, str] = self.description.pop("digests")
        self._entries: dict[str, dict[str, Any]] = header
        self._start = 8 + length
        end = self._start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != end:
            raise refuse(self.path, f"it has {size:,} bytes, not {end:,}")

    def _read(self, offset: int, count: int) -> bytes:
        parts = []
        while count > 0:
            part = os.pread(self._fd, min(count, 1 << 30), offset)
            if not part:
                raise refuse(self.path, "it was cut short")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in host memory.

        Raises:
            ValueError: Its bytes are not those that were written.
        """
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        content = bytearray(self._read(self._start + begin, end - begin))
        if hashlib.sha256(content).hexdigest() != self._digests[name]:
            raise refuse(self.path, f"the tensor {name} is damaged")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not content:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)

    def rows(self, name: str) -> SavedRows:
        """A tensor of rows, as a backing whose keys are the rows' numbers."""
        return SavedRows(self, name, self.tensor(f"{name}.sums").numpy())

    def read_rows(self, name: str, keys: np.ndarray, out: Sequence[np.ndarray], sums: np.ndarray) -> None:
        count, row_bytes = self._entries[name]["shape"]
        begin = self._start + self._entries[name]["data_offsets"][0]
        assert not len(keys) or 0 <= keys[0] <= keys[-1] < count

        def transfer(run: tuple[int, int]) -> None:
            buffers = [row[:row_bytes].data for row in out[run[0] : run[1]]]
            wanted = row_bytes * len(buffers)
            try:
                moved = os.preadv(self._fd, buffers, begin + int(keys[run[0]]) * row_bytes)
            except OSError as error:
                raise OSError(error.errno, f"reading {self.path!r} failed: {error.strerror}") from error
            if moved != wanted:
                raise OSError(errno.EIO, f"{self.path!r} was cut short: {moved} of {wanted} bytes of {name}")
            for key, row in zip(keys[run[0] : run[1]].tolist(), buffers, strict=True):
                if zlib.crc32(row) != sums[key]:
                    raise OSError(errno.EIO, f"{self.path!r} is damaged: row {key} of {name} is not what was saved")

        in_runs(transfer, keys, 1)

    def close(self) -> None:
        self._close()


class SavedRows(Backing):
    """Rows of a container, checked as they are read. Any number of caches and processes may read one file."""

    def __init__(self, container: Container, name: str, sums: np.ndarray) -> None:
        self._container, self._name, self._sums = container, name, sums

    def __len__(self) -> int:
        return len(self._sums)

    def read(self, keys: np.ndarray, out: Sequence[np.ndarray]) -> None:
        self._container.read_rows(self._name, keys, out, self._sums)

    def close(self) -> None:
        self._container.close()
