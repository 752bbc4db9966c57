"""The decode side: a prefill process as the home of pages, and the cache that stands on it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq

from oasis_cache.handoff.messages import (
    ASK_PAGES,
    ASK_STATE,
    NUMBER_BYTES,
    SAY_DONE,
    HandoffError,
    pack,
    pack_header,
    read_header,
    read_tensors,
    unpack,
)
from oasis_cache.handoff.state import StateError
from oasis_cache.mixed_store import Store
from oasis_cache.tiers import Backing, TieredStore

_GOODBYE_MS = 500  # how long closing may take to say so


class PrefillPeer(Backing):
    """Pages that a prefill process holds. Thread-safe: one request at a time.

    Args:
        address: Where the process serves.
        timeout: Seconds within which it must answer each request.
        rereads: Whether pages may be dropped from host memory and asked for again.

    Attributes:
        requests: Requests for pages.
        state_bytes: Bytes of what came first: windows, tables, block index, states of other layers, inputs.
        index_bytes: The block index's part of them.
        pages_received, bytes_received: Pages that came since, and their bytes.
    """

    def __init__(self, address: str, timeout: float, rereads: bool) -> None:
        self.address, self.timeout, self.rereads = address, timeout, rereads
        self.requests = self.state_bytes = self.index_bytes = self.pages_received = self.bytes_received = 0
        self._tables: dict[tuple[int, int], torch.Tensor] = {}  # layer, part of its store -> [batch, blocks] int64 keys
        self._came, self._page_bytes = np.zeros(0, bool), np.zeros(0, np.int64)
        self._lost: str | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"address={address!r} is nothing to connect to: {error}") from error

    @property
    def num_pages(self) -> int:
        """Pages that the process serves."""
        return self._came.size

    def ask_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What the process says of its cache: the header's fields, and tensors by name; keeps the keys of pages.

        Raises:
            HandoffError: It did not answer in time, or not with a cache.
        """
        header, body = self._request(pack_header(ask=ASK_STATE), b"")
        self.state_bytes += len(body)
        tensors = read_tensors(bytes(body))
        self.index_bytes = sum(part.nbytes for name, part in tensors.items() if ".index." in name)
        num_pages = header.get("num_pages")
        if not isinstance(num_pages, int) or num_pages < 0:
            raise HandoffError(f"{self.address} serves {num_pages!r:.60} pages")
        for name in [name for name in tensors if name.startswith("pages.")]:
            table, (layer, part) = tensors.pop(name), [*name.split("."), ""][1:3]
            if table.dtype != torch.int64 or table.dim() != 2 or not (layer.isdecimal() and part.isdecimal()):
                raise HandoffError(f"{self.address} sent {name} as {table.dtype} {tuple(table.shape)}")
            if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_pages:
                raise HandoffError(f"{self.address} sent {name} with keys outside of its {num_pages} pages")
            self._tables[int(layer), int(part)] = table
        self._came, self._page_bytes = np.zeros(num_pages, bool), np.zeros(num_pages, np.int64)
        return header, tensors

    def read(self, keys: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """See `Backing.read`.

        Raises:
            HandoffError: The process is lost; `missing` names the blocks that were to come.
        """
        if self._lost is not None:
            raise self._missing(self._lost, keys)
        try:
            header, body = self._request(pack_header(ask=ASK_PAGES), keys.astype(np.int64).tobytes())
            if header.get("pages") != len(keys):
                raise HandoffError(
                    f"{self.address} sent {header.get('pages')!r:.60} pages where {len(keys)} were asked for"
                )
            ends = np.cumsum(self._page_bytes[keys])
            if len(body) != ends[-1]:
                raise HandoffError(
                    f"{self.address} sent {len(body)} bytes as {len(keys)} pages of {ends[-1]} bytes in all"
                )
        except HandoffError as error:
            self._lost = str(error)
            raise self._missing(self._lost, keys) from error
        for content, page in zip(np.split(np.frombuffer(body, np.uint8), ends[:-1]), out, strict=True):
            page[: len(content)] = content
        with self._lock:
            self._came[keys] = True
            self.requests += 1
            self.pages_received += len(keys)
            self.bytes_received += len(body)

    def give(self, layer: int, store: Store) -> None:
        """Enter the pages of a layer in its empty store, which then asks for them.

        Raises:
            StateError: The process did not say what the store needs.
        """
        for place, part in enumerate(store.parts):
            table = self._tables.get((layer, place))
            if table is None or table.shape[0] != part.batch or not isinstance(part, TieredStore):
                raise StateError(f"the pages of layer {layer} are not named")
            if table.numel():
                self._page_bytes[table.flatten().numpy()] = part.format.page_bytes
                part.adopt(self, table)

    def missing(self) -> dict[int, list[int]]:
        """Blocks that have not come yet, by layer."""
        return self._blocks_of(np.flatnonzero(~self._came))

    def _blocks_of(self, keys: np.ndarray) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for (layer, place), table in sorted(self._tables.items()):
            before = sum(self._tables[layer, earlier].shape[1] for earlier in range(place))
            blocks = np.flatnonzero(np.isin(table.numpy(), keys).any(axis=0)) + before
            found[layer] = found.get(layer, []) + blocks.tolist()
        return {layer: blocks for layer, blocks in found.items() if blocks}

    def _missing(self, cause: str, keys: np.ndarray) -> HandoffError:
        missing = self._blocks_of(keys)
        named = "; ".join(f"layer {layer}: blocks {_ranges(blocks)}" for layer, blocks in missing.items())
        left = self.num_pages - int(self._came.sum())
        return HandoffError(
            f"{cause}. Missing are {named}. Of {self.num_pages} pages {left} had not come; what has come can still be used",
            missing,
        )

    def _request(self, header: bytes, body: bytes) -> tuple[dict[str, Any], memoryview]:
        """Ask, and wait for the answer at most `timeout` seconds: its header's fields and its body."""
        if os.getpid() != self._pid:
            raise HandoffError(
                f"the connection to {self.address} cannot be used in a forked process: libzmq's threads are not there"
            )
        with self._lock:
            if self._socket.closed:
                raise HandoffError(f"the connection to {self.address} was closed")
            number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
            until = time.monotonic() + self.timeout
            self._socket.send(pack(number, header, [body]))
            while True:
                left = until - time.monotonic()
                if left <= 0 or not self._socket.poll(max(1, int(left * 1000))):
                    raise HandoffError(f"the prefill process at {self.address} did not answer within {self.timeout} s")
                frames = self._socket.recv_multipart()
                if len(frames) == 1 and frames[0][:NUMBER_BYTES] == number:  # else an answer nobody waits for any more
                    break
        answer, content = unpack(frames[0])
        fields = read_header(answer)
        if "error" in fields:
            raise HandoffError(f"the prefill process at {self.address} refuses: {fields['error']!s:.500}")
        return fields, content

    def close(self) -> None:
        """Say that nothing more will be asked for, and disconnect. Idempotent; a forked process leaves it to the first one."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._socket.closed:
                if self._lost is None:
                    number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
                    self._socket.send(pack(number, pack_header(ask=SAY_DONE)))
                self._socket.close(linger=_GOODBYE_MS)


def _ranges(numbers: list[int], at_most: int = 12) -> str:
    """Sorted numbers as "3, 7-9, 20"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    texts = [f"{first}-{last}" if first < last else str(first) for first, last in parts]
    return ", ".join(texts[:at_most]) + (f" and {len(texts) - at_most} more ranges" if len(texts) > at_most else "")
