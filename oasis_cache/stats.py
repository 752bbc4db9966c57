"""Counters of what a cache did, and the report made of them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

PHASES = ("prefill", "dense", "sparse", "streamed")


@dataclass
class LayerCounters:
    """What one layer counted since it was made or reset. Device tensors where a number is only known there.

    Attributes:
        forwards: Forwards by phase (see `OasisStats`).
        fallbacks: Sparse or streamed forwards that were computed densely because something could not be honoured.
        selected: Blocks in slots that attention wanted, summed over batch rows, KV heads and sparse steps.
        absent: The part of them that was in no slot.
        blocks_read: Blocks that attention read, the recent ones of the window included.
        tokens_read_max: Most tokens, the unsealed tail aside, that one KV head's attention read in one sparse step.
        misses: Selected blocks that were not resident when attention asked.
        blocks_fetched: Blocks of single KV heads that came from the host tier into slots or the staging area.
        exact_blocks_fetched: The part of them that `tier_dtype` keeps in full precision.
        block_bytes, exact_block_bytes: Bytes that such a block takes in the host tier, and in full precision.
        bytes_fetched, bytes_written: Bytes moved from and to the host tier.
        stall_seconds: Time spent waiting for blocks.
    """

    forwards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    fallbacks: int = 0
    blocks_read: int = 0
    selected: int = 0
    absent: torch.Tensor | int = 0
    tokens_read_max: int = 0
    misses: torch.Tensor | int = 0
    prefetched: torch.Tensor | int = 0
    spare_hits: torch.Tensor | int = 0
    late: torch.Tensor | int = 0
    dropped: int = 0
    blocks_fetched: torch.Tensor | int = 0
    exact_blocks_fetched: torch.Tensor | int = 0
    block_bytes: int = 0
    exact_block_bytes: int = 0
    bytes_streamed: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0

    @property
    def bytes_fetched(self) -> int:
        exact = int(self.exact_blocks_fetched)
        encoded = int(self.blocks_fetched) - exact
        return encoded * self.block_bytes + exact * self.exact_block_bytes + self.bytes_streamed


@dataclass
class PhaseClock:
    """Time and tokens of a cache's forwards, by phase.

    A forward counts from the first layer's update to the end of the last layer's: without the last layer's attention and what
    comes behind it. On a CUDA device that is the host's time, which the device's follows at some distance.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    _started: float | None = None

    def start(self) -> None:
        """A forward begins, whatever became of the one before."""
        self._started = time.perf_counter()

    def stop(self, phase: str, rows: int) -> None:
        """The forward of that phase, of `rows` new tokens, came to its last layer."""
        if self._started is not None:
            self.seconds[phase] += time.perf_counter() - self._started
            self.tokens[phase] += rows
            self._started = None


@dataclass(frozen=True)
class StepTrace:
    """One sparse step of one layer, recorded with `OasisConfig(trace=True)`.

    Attributes:
        context_tokens: Tokens in the cache, the step's own included.
        rows: New tokens of the step.
        window_block: The block at which the window begins; blocks from there on are read without being selected.
        selected: [batch, kv_heads, slots] int32, the blocks in the slots that attention read, sorted; -1 for an empty slot.
        absent: [batch, kv_heads] int32, how many of the blocks that the rows wanted were in no slot when attention asked.
        missed: [batch, kv_heads] int32, how many of those were not prefetched either.
    """

    context_tokens: int
    rows: int
    window_block: int
    selected: torch.Tensor
    absent: torch.Tensor
    missed: torch.Tensor


@dataclass(frozen=True)
class LayerStats:
    """One OasisLayer's part of `OasisStats`, of the same names and units (blocks, bytes, seconds).

    Attributes:
        layer: The layer's number in the model.
    """

    layer: int
    hits: int
    misses: int
    spare_hits: int
    late: int
    bytes_fetched: int
    bytes_written: int
    stall_seconds: float
    device_bytes: int
    index_bytes: int
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class LayerForecast:
    """Bytes that one OasisLayer will hold: those that `LayerStats` reports, and the host slabs that it reserves."""

    device_bytes: int
    index_bytes: int
    host_bytes: int
    host_bytes_reserved: int


@dataclass(frozen=True)
class OasisStats:
    """Report of `OasisCache.stats()`. Counts are since construction or `reset()`; bytes are now.

    Attributes:
        steps: Forwards through the cache.
        prefill_steps: Forwards on an empty cache (exact).
        dense_steps: Forwards that read the whole context because it was short, or by fallback.
        sparse_steps: Forwards that read only selected blocks.
        streamed_steps: Long forwards on a filled cache (exact, past blocks streamed through).
        fallback_steps: The part of `dense_steps` that was computed densely for lack of support (see `warnings`).
        blocks_read: Blocks read by sparse steps, summed over layers, batch rows, KV heads and steps; recent blocks included.
        blocks_read_per_step: The same per sparse step.
        tokens_read_max: Most tokens besides the unsealed tail that one KV head read in one sparse step: at most the budget.
        hits, misses: Blocks wanted in slots that were, were not, resident (or prefetched and there) when attention asked.
        prefetched: Blocks sent for by prediction.
        spare_hits: Wanted blocks that were on the device beside the slots: prefetched, or out of the selection only lately.
        late: The part of those that had not arrived when attention asked, so that it waited; they count as misses.
        dropped: Prefetches called off by a crop or a reset.
        hit_rate: hits / (hits + misses), 0.0 before the first sparse step.
        bytes_fetched, bytes_written: Bytes moved from, to the host tier.
        device_bytes: Bytes of slots, window and tail on the device, index aside, over all OasisLayers.
        other_device_bytes: Bytes of the layers that are not OasisLayers (sliding window, recurrent states, ...).
        host_bytes: Bytes held by complete KV in host memory.
        host_bytes_reserved: Bytes of the slabs that hold them.
        pinned: Whether the host tier's memory is page-locked (None: nothing is stored yet).
        index_bytes: Bytes of the block index on the device.
        disk_bytes: Bytes of the complete KV that rest on disk only (`spill`, or a loaded file).
        disk_bytes_read, disk_bytes_written: Bytes read from and written to disk, by this cache and its copies, since construction.
        page_hits, page_misses: Pages (a block of all KV heads) fetched that were, were not, in host memory; counted as those.
        stall_seconds: Time that the host spent waiting for blocks; next to 0 on CUDA devices, where the device waits.
        seconds, tokens: Time spent in forwards, and new tokens per sequence that they brought, by phase (see `PhaseClock`).
        context_tokens: Tokens the cache holds now.
        oasis_layers, other_layers: How many layers of the cache can be sparse, and how many are transformers' own.
        warnings: Messages that this cache gave, each once.
        layers: The OasisLayers one by one.
    """

    steps: int
    prefill_steps: int
    dense_steps: int
    sparse_steps: int
    streamed_steps: int
    fallback_steps: int
    blocks_read: int
    tokens_read_max: int
    hits: int
    misses: int
    prefetched: int
    spare_hits: int
    late: int
    dropped: int
    bytes_fetched: int
    bytes_written: int
    device_bytes: int
    other_device_bytes: int
    host_bytes: int
    host_bytes_reserved: int
    pinned: bool | None
    index_bytes: int
    disk_bytes: int
    disk_bytes_read: int
    disk_bytes_written: int
    page_hits: int
    page_misses: int
    stall_seconds: float
    seconds: dict[str, float]
    tokens: dict[str, int]
    context_tokens: int
    oasis_layers: int
    other_layers: int
    warnings: tuple[str, ...] = ()
    layers: tuple[LayerStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the blocks wanted in slots that were resident, or prefetched and there, when attention asked: 0.0 to 1.0."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    @property
    def blocks_read_per_step(self) -> float:
        """Blocks read in one sparse step, summed over layers, batch rows and KV heads; 0.0 before the first one."""
        return self.blocks_read / self.sparse_steps if self.sparse_steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and the derived `hit_rate` and `blocks_read_per_step`, as plain Python values."""
        return {**asdict(self), "hit_rate": self.hit_rate, "blocks_read_per_step": self.blocks_read_per_step}

    def __str__(self) -> str:
        width = max(len(f.name) for f in fields(self))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.as_dict().items() if name != "layers")
