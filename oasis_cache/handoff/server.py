"""The prefill side: a snapshot of a cache, and a thread that gives its blocks to whoever asks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zmq

from oasis_cache.cache import OasisCache
from oasis_cache.handoff.messages import (
    ASK_PAGES,
    ASK_STATE,
    NUMBER_BYTES,
    SAY_DONE,
    HandoffError,
    pack,
    pack_header,
    pack_tensors,
    read_header,
    unpack,
)
from oasis_cache.handoff.state import describe
from oasis_cache.layer import OasisLayer
from oasis_cache.store import HostStore

_LOOK_MS = 100  # how often the thread looks whether it is to stop


@dataclass(frozen=True)
class _Pages:
    """The distinct pages of one layer's store, or of a part of it: page `first_key + i` is `ids[i]` there."""

    store: HostStore
    first_key: int
    ids: torch.Tensor


class HandoffServer:
    """Serves one cache as it was when this was made: `serve` makes it. Any number of decode processes may come, at any time.

    The cache may go on, be reset or closed; the server keeps a reference to the pages it serves, which are immutable. Attributes
    are counted by the serving thread and may be read at any time.

    Attributes:
        address: Where it listens, the port included.
        num_pages: Distinct pages (a block of all KV heads of a layer) there are.
        pages_sent: Pages sent, over all decode processes.
        bytes_sent: Bytes of all replies.
    """

    def __init__(self, cache: OasisCache, inputs: Mapping[str, torch.Tensor], address: str) -> None:
        self._state, self._pages, self.num_pages = _snapshot(cache, inputs)
        self._pools = cache.runtime.pools  # where pages may rest on disk: in use until this is closed
        if self._pools is not None:
            self._pools.num_users += 1
        self.pages_sent = self.bytes_sent = 0
        self._came = np.zeros(self.num_pages, bool)
        self._settled, self._stop = threading.Event(), threading.Event()
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._pages = []
            if self._pools is not None:
                self._pools.close()
            raise ValueError(f"address={address!r} cannot be listened at: {error}") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="oasis-handoff", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a decode process has said that it is done, or all pages have been sent.

        Args:
            timeout: Seconds to wait at most; None: for ever.

        Returns:
            Whether that came about.
        """
        return self._settled.wait(timeout)

    def close(self) -> None:
        """Stop serving and let go of the pages. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._pages = []
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.close()

    def __enter__(self) -> HandoffServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._socket.poll(_LOOK_MS):
                    self._answer(self._socket.recv_multipart())
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        """Answer one request; one that makes no sense is answered in words, so that a stranger cannot end the service."""
        if len(frames) != 2 or len(frames[1]) < NUMBER_BYTES:
            return
        peer, message = frames
        number = message[:NUMBER_BYTES]
        content: Sequence[bytes | memoryview] = ()
        try:
            header, body = unpack(message)
            asked = read_header(header).get("ask")
            if asked == SAY_DONE:
                self._settled.set()
                return
            if asked == ASK_STATE:
                reply, content = self._state[0], [self._state[1]]
            elif asked == ASK_PAGES:
                content = [page.data for page in self._read(bytes(body))]
                reply = pack_header(pages=len(content))
            else:
                raise HandoffError(f"nobody can be asked for {asked!r:.60}")
        except Exception as error:  # noqa: BLE001 # whatever it is, the peer that asked is told, and others are served
            reply, content = pack_header(error=f"{type(error).__name__}: {error}"), []
        answer = pack(number, reply, content)
        self.bytes_sent += len(answer)
        self._socket.send_multipart([peer, answer])
        if self._came.all():
            self._settled.set()

    def _read(self, body: bytes) -> list[np.ndarray]:
        """The pages of int64 keys: uint8 [page_bytes] each, in the order asked."""
        if len(body) % 8:
            raise HandoffError(f"{len(body)} bytes are no whole number of keys")
        keys = np.frombuffer(body, np.int64)
        if keys.size and not 0 <= keys.min() <= keys.max() < self.num_pages:
            raise HandoffError(f"pages are numbered 0 to {self.num_pages - 1}, asked for {keys.min()} to {keys.max()}")
        out: list[np.ndarray] = [np.empty(0, np.uint8)] * keys.size
        for part in self._pages:
            mine = np.flatnonzero((keys >= part.first_key) & (keys < part.first_key + part.ids.numel()))
            if mine.size:
                pages = part.store.read_pages(part.ids[torch.from_numpy(keys[mine] - part.first_key)])
                for place, page in zip(mine.tolist(), pages.numpy(), strict=True):
                    out[place] = page
        self._came[keys] = True
        self.pages_sent += keys.size
        return out


def _snapshot(cache: OasisCache, inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[bytes, bytes], list[_Pages], int]:
    """The reply to `ASK_STATE`, and the pages of each layer with the key of its first one."""
    described, tensors = describe(cache)
    pages: list[_Pages] = []
    num_pages = 0
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, OasisLayer) or layer.store is None or layer.working_set is None:
            continue
        if layer.store.parts[0].shape.device.type == "cuda":
            torch.cuda.synchronize(layer.store.parts[0].shape.device)  # the device writes pages in its own time
        left = layer.working_set.window_start // layer.config.block_size  # newer blocks travel in the window
        for place, store in enumerate(copy.deepcopy(layer.store).parts):
            ids, table = store.page_ids[:, :left].unique(return_inverse=True)  # rows may share pages
            left -= table.shape[1]
            pages.append(_Pages(store, num_pages, ids))
            tensors[f"pages.{number}.{place}"] = table + num_pages
            num_pages += ids.numel()
    for name, value in inputs.items():
        tensors[f"input.{name}"] = value.detach().cpu().contiguous()
    header = pack_header(state=described, num_pages=num_pages, inputs=sorted(inputs))
    return (header, pack_tensors(tensors)), pages, num_pages
