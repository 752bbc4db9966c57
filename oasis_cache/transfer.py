"""Transfer engines: how planned blocks travel from the host tier into buffers on the device.

Rules of the buffers, obeyed by every engine and checked by the simulated one:

1. Filling. A buffer entry is written only by the transfer whose plan names it, between `submit` and the return of `wait`. The
   layer submits a plan after the attention that last read those entries was issued, and a transfer begins after everything
   the compute stream holds at `submit`. Until `wait` returns the entries hold garbage.
2. Reading. An entry may be read only after `wait` returned for the transfer that fills it.
3. Reuse. An entry may be named by a new plan only after `wait` or `cancel` returned for the transfer that names it now.
4. Sources. A host page is immutable from `HostStore.append` until its last reference is gone. Freeing or replacing pages or
   buffers (crop, reset, close) begins with `cancel` of the layer's transfer, moving them (reorder, copy) with its `wait`; both
   raise the layer's generation. A transfer that was cancelled never lands.
"""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from oasis_cache.blocks import FetchPlan
from oasis_cache.store import BlockAddresses, HostStore


@dataclass(eq=False)
class Transfer:
    """A submitted plan: where it reads, where it writes, and whether it has landed.

    Attributes:
        plan: What was asked for.
        target: [batch, kv_heads, entries, block_size, kv_dim], the buffer that plan.slots number.
        where: Batch row, KV head and entry of each block that really travels: three int64 vectors.
        source: The same blocks in the host tier.
    """

    plan: FetchPlan
    target: torch.Tensor
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    source: BlockAddresses
    landed: bool = False
    cancelled: bool = False
    future: Future | None = field(default=None, repr=False)

    @classmethod
    def resolve(cls, plan: FetchPlan, store: HostStore, target: torch.Tensor) -> Transfer:
        """Look up a plan's pages now, so that nothing is looked up while other threads change the tables."""
        rows, heads, entries = plan.mask.nonzero(as_tuple=True)
        blocks, slots = plan.blocks[rows, heads, entries], plan.slots[rows, heads, entries]
        source = store.locate(rows.cpu(), heads.cpu(), blocks.cpu())
        return cls(plan, target, (rows, heads, slots), source)

    def land(self) -> None:
        """Copy the blocks into their entries, unless the transfer was cancelled."""
        if not self.cancelled and not self.landed:
            self.target[self.where] = self.source.read().to(self.target.device)
            self.landed = True


class TransferEngine(ABC):
    """Moves blocks. Implementations differ only in when the bytes arrive, never in which."""

    asynchronous: bool

    @abstractmethod
    def submit(self, plan: FetchPlan, store: HostStore, target: torch.Tensor) -> Transfer:
        """Begin a transfer into `target`; its entries must not be read before `wait`."""

    @abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Return when the transfer's entries may be read."""

    @abstractmethod
    def ready(self, transfer: Transfer) -> bool:
        """Whether `wait` would return at once."""

    def cancel(self, transfer: Transfer) -> None:
        """Make sure that the transfer writes nothing from now on."""
        transfer.cancelled = True

    def close(self) -> None:
        """Give back threads and streams. Idempotent."""


class SyncEngine(TransferEngine):
    """The synchronous twin of every other engine: `submit` copies, `wait` has nothing to do."""

    asynchronous = False

    def submit(self, plan: FetchPlan, store: HostStore, target: torch.Tensor) -> Transfer:
        transfer = Transfer.resolve(plan, store, target)
        transfer.land()
        return transfer

    def wait(self, transfer: Transfer) -> None:
        assert transfer.landed

    def ready(self, transfer: Transfer) -> bool:
        return True


class ThreadEngine(TransferEngine):
    """Copies in worker threads, for CPU tensors and for tiers that block."""

    asynchronous = True

    def submit(self, plan: FetchPlan, store: HostStore, target: torch.Tensor) -> Transfer:
        transfer = Transfer.resolve(plan, store, target)
        transfer.future = _copy_threads().submit(transfer.land)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        assert transfer.future is not None
        transfer.future.result()

    def ready(self, transfer: Transfer) -> bool:
        return transfer.future is not None and transfer.future.done()

    def cancel(self, transfer: Transfer) -> None:
        transfer.cancelled = True
        if transfer.future is not None and not transfer.future.cancel():
            transfer.future.exception()  # a copy that has begun runs to its end first


@functools.cache
def _copy_threads() -> ThreadPoolExecutor:
    """The threads of all thread engines of this process: their number does not grow with caches."""
    return ThreadPoolExecutor(1, thread_name_prefix="oasis-transfer")


class SimulatedEngine(TransferEngine):
    """An adversary for tests, on the CPU: entries in flight are poisoned, and copies land as late or in as odd an order as allowed.

    A transfer lands when it is waited for, or earlier at a moment and in an order drawn from `seed`; until then its entries hold
    NaN. So a missing wait, a wait for the wrong transfer, or a plan that names entries still in use shows as NaN or asserts.
    """

    asynchronous = True

    def __init__(self, seed: int = 0, early: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._early = early
        self._flying: list[Transfer] = []

    def submit(self, plan: FetchPlan, store: HostStore, target: torch.Tensor) -> Transfer:
        transfer = Transfer.resolve(plan, store, target)
        for other in self._flying:
            assert other.target.data_ptr() != target.data_ptr(), (
                "rule 3: a buffer got a new plan before its transfer was over"
            )
        transfer.target[transfer.where] = float("nan")
        self._flying.append(transfer)
        self._land_some()
        return transfer

    def wait(self, transfer: Transfer) -> None:
        assert not transfer.cancelled, "rule 4: a cancelled transfer was waited for"
        self._land_some()
        if not transfer.landed:
            self._land(transfer)

    def ready(self, transfer: Transfer) -> bool:
        return transfer.landed

    def cancel(self, transfer: Transfer) -> None:
        super().cancel(transfer)
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
    """The engine of that name (see `OasisConfig.engine`); "auto" takes the best one that this build has."""
    if name == "simulated":
        return SimulatedEngine(seed)
    engines: dict[str, type[TransferEngine]] = {"auto": SyncEngine, "sync": SyncEngine, "threads": ThreadEngine}
    if name not in engines:
        raise ValueError(f"engine={name!r} must be one of {', '.join(map(repr, [*engines, 'simulated']))}")
    return engines[name]()
