"""Transfer engines: how planned blocks travel from the host tier into buffers on the device.

Rules of the buffers. `TransferEngine` obeys them for every kind of stream; the simulated streams check them.

1. Filling. A buffer entry is written only by the transfer whose plan names it, between `submit` and the return of `wait`. The
   layer submits a plan after the attention that last read those entries was issued, and a transfer begins after everything
   the compute stream holds at `submit`. Until `wait` returns the entries hold garbage.
2. Reading. An entry may be read only after `wait` returned for the transfer that fills it.
3. Reuse. An entry may be named by a new plan only after `wait` or `cancel` returned for the transfer that names it now.
4. Sources. A host page is immutable from `HostStore.append` until its last reference is gone. Freeing or replacing pages or
   buffers (crop, reset, close) begins with `cancel` of the layer's transfer, moving them (reorder, copy) with its `wait`; what
   changes their meaning raises the layer's generation. A transfer that was cancelled never lands, or lands before anything that
   follows `cancel`. A transfer holds its store, so that dropping a cache frees nothing under it.

"Returned" means for a device: what the compute stream is given from then on is ordered behind it. Nobody's host waits.
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from oasis_cache.blocks import FetchPlan
from oasis_cache.mixed_store import Store


@dataclass(eq=False)
class Transfer:
    """A submitted plan: what it reads and where it writes.

    Attributes:
        plan: What was asked for.
        target: [batch, kv_heads, entries, block_size, kv_dim], the buffer that plan.slots number.
        store: Whose pages are read; they live as long as the transfer does.
        addresses: [batch, num_blocks] int64, the host pages at the time of `submit`.
        event: What `Streams.issue` returned.
    """

    plan: FetchPlan
    target: torch.Tensor
    store: Store
    addresses: torch.Tensor
    event: Any = None
    landed: bool = False
    cancelled: bool = False

    def land(self) -> None:
        """Copy the blocks into their entries, unless the transfer was cancelled."""
        if not self.cancelled and not self.landed:
            self.store.gather(self.plan, self.addresses, self.target)
            self.landed = True

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that the copy reads or writes on the device."""
        return self.plan.blocks, self.plan.slots, self.plan.mask, self.addresses, self.target


class Streams(ABC):
    """A place beside the computation where copies run in the order of their issue, and the computation's way to wait for them."""

    asynchronous: bool

    def runs_beside(self, device: torch.device) -> bool:
        """Whether copies into a device's tensors run beside its computation."""
        return self.asynchronous

    @abstractmethod
    def issue(self, transfer: Transfer) -> Any:
        """Let `transfer.land` run after everything that the computation was given until now; returns an event behind it."""

    @abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Order what the computation is given from now on behind the transfer's event."""

    @abstractmethod
    def done(self, transfer: Transfer) -> bool:
        """Whether the transfer's event has happened."""

    def now(self, transfer: Transfer) -> None:
        """Land a transfer in the order of the computation itself, ahead of copies that only were predicted."""
        transfer.event = self.issue(transfer)
        self.wait(transfer)

    def drop(self, transfer: Transfer) -> None:
        """The transfer was cancelled: see to it that it has ended, or never begins, before what follows."""

    def close(self) -> None:
        """Give back what is held. Idempotent."""


class TransferEngine:
    """Moves blocks by the rules above. Kinds of streams differ only in when the bytes arrive, never in which."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def runs_beside(self, device: torch.device) -> bool:
        """Whether copies into a device's tensors run beside its computation, so that prefetching can pay."""
        return self.streams.runs_beside(device)

    def submit(self, plan: FetchPlan, store: Store, target: torch.Tensor) -> Transfer:
        """Begin a transfer into `target`; its entries must not be read before `wait`."""
        transfer = Transfer(plan, target, store, store.addresses)
        transfer.event = self.streams.issue(transfer)
        return transfer

    def fetch(self, plan: FetchPlan, store: Store, target: torch.Tensor) -> None:
        """Transfer what the computation needs next: the entries may be read on return."""
        self.streams.now(Transfer(plan, target, store, store.addresses))

    def wait(self, transfer: Transfer) -> None:
        """The entries of the transfer may be read by what the computation is given from now on."""
        assert not transfer.cancelled, "rule 4: a cancelled transfer was waited for"
        self.streams.wait(transfer)

    def ready(self, transfer: Transfer) -> bool:
        """Whether the bytes have arrived, so that nothing waits for them."""
        return self.streams.done(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Make sure that the transfer writes nothing after what the computation holds now."""
        transfer.cancelled = True
        self.streams.drop(transfer)

    def close(self) -> None:
        """Give back what the streams hold. Idempotent."""
        self.streams.close()


class NoStreams(Streams):
    """Copies happen at once: the synchronous twin of every other kind."""

    asynchronous = False

    def issue(self, transfer: Transfer) -> None:
        transfer.land()

    def wait(self, transfer: Transfer) -> None:
        assert transfer.landed

    def done(self, transfer: Transfer) -> bool:
        return True


class ThreadStreams(Streams):
    """Copies in a worker thread, for CPU tensors and for tiers that block. Events are futures."""

    asynchronous = True

    def issue(self, transfer: Transfer) -> Future:
        return _copy_threads().submit(transfer.land)

    def wait(self, transfer: Transfer) -> None:
        transfer.event.result()

    def done(self, transfer: Transfer) -> bool:
        return transfer.event.done()

    def now(self, transfer: Transfer) -> None:
        transfer.land()

    def drop(self, transfer: Transfer) -> None:
        if not transfer.event.cancel():
            transfer.event.exception()  # a copy that has begun runs to its end first


@functools.cache
def _copy_threads() -> ThreadPoolExecutor:
    """The thread of all thread engines of this process: their number does not grow with caches."""
    return ThreadPoolExecutor(1, thread_name_prefix="oasis-transfer")


class CudaStreams(Streams):
    """Copies on a side stream of the target's device, which all layers and caches share; the compute stream is the current one."""

    asynchronous = True

    def issue(self, transfer: Transfer) -> torch.cuda.Event:
        device = transfer.target.device
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            transfer.land()
            event = torch.cuda.Event()
            event.record(side)
        for tensor in transfer.tensors:  # the allocator must not give their memory away while the side stream reads it
            tensor.record_stream(side)
        return event

    def wait(self, transfer: Transfer) -> None:
        torch.cuda.current_stream(transfer.target.device).wait_event(transfer.event)

    def done(self, transfer: Transfer) -> bool:
        return transfer.event.query()

    def now(self, transfer: Transfer) -> None:
        transfer.land()  # on the compute stream

    def drop(self, transfer: Transfer) -> None:
        self.wait(transfer)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a device: one for all caches, so that the allocator's pools do not grow with them."""
    return torch.cuda.Stream(device)


class DeviceStreams(Streams):
    """CUDA streams for what lies on a CUDA device, and others for everything else: layers follow their tensors."""

    def __init__(self, elsewhere: Streams) -> None:
        self._cuda, self._elsewhere = CudaStreams(), elsewhere

    def _of(self, transfer: Transfer) -> Streams:
        return self._cuda if transfer.target.device.type == "cuda" else self._elsewhere

    def runs_beside(self, device: torch.device) -> bool:
        return device.type == "cuda" or self._elsewhere.runs_beside(device)

    def issue(self, transfer: Transfer) -> Any:
        return self._of(transfer).issue(transfer)

    def wait(self, transfer: Transfer) -> None:
        self._of(transfer).wait(transfer)

    def done(self, transfer: Transfer) -> bool:
        return self._of(transfer).done(transfer)

    def now(self, transfer: Transfer) -> None:
        self._of(transfer).now(transfer)

    def drop(self, transfer: Transfer) -> None:
        self._of(transfer).drop(transfer)


class SimulatedStreams(Streams):
    """An adversary for tests, on the CPU: entries in flight are poisoned, and copies land as late or in as odd an order as allowed.

    A transfer lands when it is waited for, or earlier at a moment and in an order drawn from `seed`; until then its entries hold
    NaN. So a missing wait, a wait for the wrong transfer, or a plan that names entries still in use shows as NaN or asserts.
    """

    asynchronous = True

    def __init__(self, seed: int = 0, early: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._early = early
        self._flying: list[Transfer] = []

    def issue(self, transfer: Transfer) -> None:
        target, plan = transfer.target, transfer.plan
        for other in self._flying:
            assert other.target.data_ptr() != target.data_ptr(), (
                "rule 3: a buffer got a new plan before its transfer was over"
            )
        rows, heads, entries = plan.mask.nonzero(as_tuple=True)
        target[rows, heads, plan.slots[rows, heads, entries]] = float("nan")
        self._flying.append(transfer)
        self._land_some()

    def wait(self, transfer: Transfer) -> None:
        self._land_some()
        if not transfer.landed:
            self._land(transfer)

    def done(self, transfer: Transfer) -> bool:
        return transfer.landed

    def drop(self, transfer: Transfer) -> None:
        if transfer in self._flying:
            self._flying.remove(transfer)

    def _land(self, transfer: Transfer) -> None:
        transfer.land()
        self._flying.remove(transfer)

    def _land_some(self) -> None:
        for transfer in self._random.sample(self._flying, len(self._flying)):
            if self._random.random() < self._early:
                self._land(transfer)


def make_engine(name: str, seed: int = 0) -> TransferEngine:
    """The engine of that name (see `OasisConfig.engine`)."""
    on_device = torch.cuda.is_available()
    kinds: dict[str, Callable[[], Streams]] = {
        "auto": (lambda: DeviceStreams(NoStreams())) if on_device else NoStreams,
        "sync": NoStreams,
        "threads": (lambda: DeviceStreams(ThreadStreams())) if on_device else ThreadStreams,
        "cuda": lambda: DeviceStreams(NoStreams()),
        "simulated": functools.partial(SimulatedStreams, seed),
    }
    if name not in kinds:
        raise ValueError(f"engine={name!r} must be one of {', '.join(map(repr, kinds))}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine='cuda' needs a CUDA device, and PyTorch finds none")
    return TransferEngine(kinds[name]())
