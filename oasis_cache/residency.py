"""Which blocks of a layer are on the device: demanded ones now, predicted ones on their way, and the count of both."""

from __future__ import annotations

import copy
import time

import torch

from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.config import OasisConfig
from oasis_cache.mixed_store import Store
from oasis_cache.pool import WorkingSet
from oasis_cache.runtime import Runtime
from oasis_cache.stats import LayerCounters
from oasis_cache.transfer import Transfer


def prefetches(config: OasisConfig, beside: bool) -> bool:
    """Whether `on_miss="fetch"` prefetches: by default only if copies really run `beside` the computation."""
    if config.lookahead == "off" or config.max_fetch_blocks == 0:
        return False
    if config.on_miss == "fetch" and config.spare_blocks == 0:
        return False
    return config.lookahead != "auto" or beside


class Residency:
    """The working set of one layer, and the transfers that change it.

    A step first lands what the last one sent for, then demands what it reads (`on_miss="fetch"`), and after attention sends for
    what the next one should want: `stage` keeps it beside the slots, `replace` puts it into them (`on_miss="skip"`).

    Attributes:
        flying: The prefetch that no step has landed yet.
        generation: Goes up whenever blocks, rows or slots change their meaning; a transfer of an older one must not be landed.
        absent, missed: Of the last step, [batch, kv_heads]: wanted blocks that were in no slot; that were not prefetched either.
    """

    def __init__(self, runtime: Runtime, shape: LayerShape, store: Store, counters: LayerCounters) -> None:
        config = runtime.config
        self.runtime, self.config, self.store, self.counters = runtime, config, store, counters
        self.device = shape.device
        num_staged = config.num_spare_blocks(self.prefetches) if config.on_miss == "fetch" else 0
        self.working_set = WorkingSet(shape, config.block_size, config.num_slots, config.window_tokens, num_staged)
        self.flying: Transfer | None = None
        self.generation = 0
        self.absent = self.missed = torch.zeros(0)
        self._late: FetchPlan | None = None  # the plan of a prefetch that had not arrived when it was landed

    def __deepcopy__(self, memo: dict) -> Residency:
        assert self.flying is None, "land a prefetch before copying"
        twin = copy.copy(self)
        for name in ("runtime", "store", "counters", "working_set"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    @property
    def prefetches(self) -> bool:
        """Whether blocks are sent for before a step asks for them."""
        return prefetches(self.config, self.runtime.engine.runs_beside(self.device))

    def land(self) -> None:
        """Wait for what the last step sent for."""
        self._late = None
        if self.flying is not None:
            assert self.flying.plan.generation == self.generation, "a prefetch outlived a change of what it was for"
            if not self.runtime.engine.ready(self.flying):
                self._late = self.flying.plan
            try:
                self._wait(self.flying)
            except (
                OSError
            ):  # a disk or a peer failed at what was only predicted: what is needed will be asked for again
                self._late = None
                self.call_off()
            self.flying = None

    def _wait(self, transfer: Transfer) -> None:
        started = time.perf_counter()
        self.runtime.engine.wait(transfer)
        self.counters.stall_seconds += time.perf_counter() - started

    def demand(self, wanted: torch.Tensor, num_blocks: int) -> None:
        """Bring blocks into slots, from the staging area or the host tier, before attention reads.

        Args:
            wanted: [batch, kv_heads, count] int64, distinct block numbers.
            num_blocks: Blocks that exist before the window.
        """
        before = self.working_set.block_of_slot.clone() if self.working_set.num_staged else None
        plan = self.working_set.want(wanted, num_blocks, self.config.num_slots, self.generation)
        absent_mask = plan.mask
        absent = missed = absent_mask.sum(2)
        if before is not None:
            plan, staged = self.working_set.exchange_staged(plan, before.gather(2, plan.slots))
            missed = plan.mask.sum(2)
            self.counters.spare_hits += staged
            if self._late is not None:
                asked = absent_mask ^ plan.mask
                sent = (plan.blocks.unsqueeze(-1) == self._late.blocks.unsqueeze(2)) & self._late.mask.unsqueeze(2)
                self.counters.late += (sent.any(-1) & asked).sum()
        self._count(wanted, absent, missed)
        self._count_fetched(plan, self.missed.sum())
        started = time.perf_counter()
        try:
            self.runtime.engine.fetch(plan, self.store, self.working_set.slots)
        except BaseException:  # the tables name blocks that did not come
            self._forget_contents()
            raise
        self.counters.stall_seconds += time.perf_counter() - started

    def fill_slots(self) -> None:
        """Fetch the blocks that the slots' table names, after it was set to another cache's; no step has asked for them."""
        held = self.working_set.block_of_slot
        slots = torch.arange(held.shape[2], device=held.device).expand_as(held)
        plan = FetchPlan(held.clamp_min(0), slots, held >= 0, self.generation)
        self.runtime.engine.fetch(plan, self.store, self.working_set.slots)

    def stage(self, prediction: torch.Tensor) -> None:
        """Send for the best absent blocks by a prediction [batch, kv_heads, blocks]; slots stay as they are."""
        plan = self.working_set.want_staged(prediction, self.config.max_fetch_blocks, self.generation)
        self._send(plan, self.working_set.staging)

    def replace(self, wanted: torch.Tensor, num_blocks: int) -> None:
        """Send for at most `max_fetch` of the wanted blocks [batch, kv_heads, count], into slots that are not wanted."""
        plan = self.working_set.want(wanted, num_blocks, self.config.max_fetch_blocks, self.generation)
        self._send(plan, self.working_set.slots)

    def _send(self, plan: FetchPlan, target: torch.Tensor) -> None:
        count = plan.mask.sum()
        self.counters.prefetched += count
        self._count_fetched(plan, count)
        try:
            self.flying = self.runtime.engine.submit(plan, self.store, target)
        except OSError:  # as in `land`; engines that copy at once fail here
            self._forget_contents()
        except BaseException:
            self._forget_contents()
            raise

    def _forget_contents(self) -> None:
        """After a transfer that failed: whatever the tables name has to be fetched anew."""
        self.working_set.forget_staged()
        self.working_set.forget_from(0)

    def _count_fetched(self, plan: FetchPlan, count: torch.Tensor) -> None:
        """Count the `count` blocks of a plan, which come from the host tier."""
        self.counters.blocks_fetched += count
        if self.store.num_exact:
            self.counters.exact_blocks_fetched += (plan.mask & (plan.blocks < self.store.num_exact)).sum()

    def count_resident(self, wanted: torch.Tensor, num_blocks: int) -> None:
        """Count which of the wanted blocks [batch, kv_heads, count] are in slots, where none is fetched for this step."""
        held = self.working_set.block_of_slot
        resident = torch.zeros(*wanted.shape[:2], num_blocks, dtype=torch.bool, device=wanted.device)
        missed = (~resident.scatter_(2, held.clamp_min(0), True).gather(2, wanted)).sum(2)
        self._count(wanted, missed, missed)

    def _count(self, wanted: torch.Tensor, absent: torch.Tensor, missed: torch.Tensor) -> None:
        self.counters.selected += wanted.numel()
        self.counters.absent += absent.sum()
        self.counters.misses += missed.sum()
        self.absent, self.missed = absent, missed

    def call_off(self) -> None:
        """Before tables or stores change under a transfer: drop it, and what was prefetched with it."""
        self.generation += 1
        if self.flying is not None:
            self.runtime.engine.cancel(self.flying)
            self.flying = None
            self.counters.dropped += 1
        self.working_set.forget_staged()
        if self.config.on_miss == "skip":
            self.working_set.forget_from(0)

    def selected_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The working set's tensors whose batch row i is the present row `rows[i]` (int64 [new batch]), for `replace_tensors`."""
        self.land()  # what is on its way moves along
        return self.working_set.selected_rows(rows)

    def replace_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `selected_rows` gave."""
        self.generation += 1
        self.working_set.replace_tensors(tensors)
