"""Transfer engines: how planned blocks travel from the host tier into device slots.

Rules of the buffers, obeyed by every engine:

1. A slot is written only by the transfer whose plan names it. The plan is made after the attention that last read the slot was
   issued on the compute stream, so a transfer waits for the compute stream's position at the time of `submit`.
2. A slot may be read only after `wait` returned for the transfer that fills it.
3. A host page is immutable from the moment the store returns it until its last reference is gone, and a transfer keeps the
   store it reads alive.
4. A transfer whose plan is of an older generation than the layer's is dropped: it never lands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from oasis_cache.blocks import FetchPlan
from oasis_cache.pool import WorkingSet
from oasis_cache.store import HostStore


@dataclass
class Transfer:
    """A submitted plan: where it reads, where it writes, and whether it has landed."""

    plan: FetchPlan
    store: HostStore
    target: WorkingSet
    landed: bool = False


class TransferEngine(ABC):
    """Moves blocks. Implementations differ only in when the bytes arrive, never in which."""

    @abstractmethod
    def submit(self, plan: FetchPlan, store: HostStore, target: WorkingSet) -> Transfer:
        """Begin a transfer into `target`'s slots; they must not be read before `wait`."""

    @abstractmethod
    def wait(self, transfer: Transfer) -> None:
        """Return when the transfer's slots may be read."""

    def close(self) -> None:
        """Give back threads and streams. Idempotent."""


def copy_now(plan: FetchPlan, store: HostStore, target: WorkingSet) -> None:
    """Copy a plan's blocks with ordinary tensor operations, waiting for the device where it must."""
    rows, heads, entries = plan.mask.nonzero(as_tuple=True)
    blocks, slots = plan.blocks[rows, heads, entries], plan.slots[rows, heads, entries]
    kv = store.read_blocks(rows.cpu(), heads.cpu(), blocks.cpu())
    target.slots[rows, heads, slots] = kv.to(target.kv.device)


class SyncEngine(TransferEngine):
    """The synchronous twin of every other engine: `submit` copies, `wait` does nothing."""

    def submit(self, plan: FetchPlan, store: HostStore, target: WorkingSet) -> Transfer:
        copy_now(plan, store, target)
        return Transfer(plan, store, target, landed=True)

    def wait(self, transfer: Transfer) -> None:
        assert transfer.landed


def make_engine(name: str) -> TransferEngine:
    """The engine of that name (see `OasisConfig.engine`); "auto" takes the best one that this build has."""
    engines = {"auto": SyncEngine, "sync": SyncEngine}
    if name not in engines:
        raise ValueError(f"engine={name!r} is not available in this version; use one of {', '.join(map(repr, engines))}")
    return engines[name]()
