"""The settings of a cache: one frozen dataclass, validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

INDEX_NAMES = ("int2", "int1", "minmax", "exact", "recency")
MISS_POLICIES = ("fetch", "skip")
LOOKAHEAD_MODES = ("auto", "draft", "previous", "off")
TIER_DTYPES = (None, "int8", "int4", "fp8")
ENGINE_NAMES = ("auto", "sync", "threads", "cuda", "simulated")


@dataclass(frozen=True)
class OasisConfig:
    """Settings of an `OasisCache`. All sizes named `budget` or `*_tokens` are in tokens, `*_blocks` in blocks.

    Args:
        block_size: Tokens per block, the unit of selection and transfer (16 in the paper and in Quest).
        budget: Tokens per KV head and layer that attention may read in a sparse step besides the unsealed tail: sink +
            recent + retrieved blocks. A multiple of `block_size`.
        sink_blocks: First blocks of the sequence, always resident (attention sinks; StreamingLLM, section 3).
        recent_blocks: Newest sealed blocks, always resident.
        index: Stand-in for the keys by which blocks are ranked. `"int2"` and `"int1"`: packed low-bit keys; `"minmax"`: the
            bounds of Quest and the OasisKV paper; `"exact"`: full keys on the device (an oracle: it costs what it should
            save); `"recency"`: the newest blocks, no retrieval at all (StreamingLLM: the control in measurements).
        candidates: Most blocks per KV head and layer that `index` ranks in a step of a long context: a coarse level, clusters of
            keys, chooses them, so that a step's time hardly grows with the context; the newest blocks, up to 4,096 tokens, come on
            top. What it leaves out may be what was asked for: docs/performance.md has the gain and the loss. None: all blocks are
            ranked. Has no effect on contexts of less than twice as many blocks, on padded batches, on models with position biases,
            and on indexes other than `"int2"`.
        on_miss: `"fetch"`: attention reads exactly the selected blocks, absent ones are fetched and waited for.
            `"skip"`: attention reads the resident blocks and never waits (the paper's behaviour).
        lookahead: Which query rows predict the next step's blocks: `"draft"` all rows of a forward, `"previous"` the first one
            (the newest token of plain decoding and of assisted rounds), `"auto"` as `"draft"`, where copies run beside the
            computation, `"off"` none (`on_miss="fetch"` only).
        max_fetch: Most blocks prefetched per KV head and step: an int counts blocks, a float is a fraction of the budget, None
            is no cap. Demand fetches of `on_miss="fetch"` are not capped.
        spare_blocks: Blocks per KV head kept on the device beside those that attention reads (`on_miss="fetch"`): prefetched ones,
            and those that left the selection last. They are no part of `budget`. Default: as many as there are slots if blocks
            are prefetched, else none.
        dense_below: Contexts of at most this many tokens stay dense and equal `DynamicCache`. Default: `budget`, or a little more
            where the slots could not be filled otherwise (`dense_tokens`).
        sparse_rows: A forward of at most this many new tokens on a filled cache is a sparse step; a longer one is streamed
            exactly.
        tier_dtype: What the host tier keeps sealed blocks in: None: the cache's own dtype, exactly; `"int8"`, `"int4"` or
            `"fp8"`: 8 or 4 bits a number and a step per block and channel, decoded as blocks enter the device. Host memory and
            traffic shrink, to 0.54 and 0.32 of what bf16 takes, and what is read back from the tier is rounded: retrieved blocks,
            the past in streamed forwards (a second turn), and what a crop brings back from sealed blocks. The first `sink_blocks`
            blocks, the recent ones and the tail stay exact, and so do contexts of at most `dense_tokens`. docs/tiers.md has the
            error bounds and measurements.
        max_host_bytes: Most bytes of host memory for complete KV; None: what the machine (or its cgroup) has available. A context
            that exceeds it is refused, or goes to disk with `spill`.
        spill: An existing directory. Blocks beyond `max_host_bytes`, which must be given too, go to a file there, and host memory
            is a cache of it. None: what does not fit host memory is refused.
        engine: How blocks travel: `"auto"` (a side stream on a CUDA device; elsewhere at once, or in a thread with `spill`),
            `"cuda"`, `"sync"`, `"threads"`, or `"simulated"` (tests).
        stream_tokens: Tokens of past KV brought to the device at a time while a long forward is streamed.
        trace: Record selections per layer and step, for plots.

    Raises:
        ValueError: an option is out of range; the message names the value and the accepted range.
    """

    block_size: int = 16
    budget: int = 2048
    sink_blocks: int = 1
    recent_blocks: int = 4
    index: str = "int2"
    candidates: int | None = None
    on_miss: str = "fetch"
    lookahead: str = "auto"
    max_fetch: int | float | None = 0.05
    spare_blocks: int | None = None
    dense_below: int | None = None
    sparse_rows: int = 32
    tier_dtype: str | None = None
    max_host_bytes: int | None = None
    spill: str | None = None
    engine: str = "auto"
    stream_tokens: int = 1024
    trace: bool = False

    def __post_init__(self) -> None:
        _check_int(self, "block_size", minimum=1)
        _check_int(self, "sink_blocks", minimum=0)
        _check_int(self, "recent_blocks", minimum=0)
        _check_int(self, "sparse_rows", minimum=1)
        _check_int(self, "stream_tokens", minimum=1)
        smallest = (self.sink_blocks + self.recent_blocks + 1) * self.block_size
        _check_int(self, "budget", minimum=1)
        if self.budget < smallest:
            raise ValueError(
                f"budget={self.budget} is too small: sink_blocks={self.sink_blocks}, recent_blocks={self.recent_blocks} and one "
                f"retrieved block of {self.block_size} tokens need at least {smallest} tokens"
            )
        if self.budget % self.block_size:
            raise ValueError(f"budget={self.budget} must be a multiple of block_size={self.block_size}")
        if self.spare_blocks is not None:
            _check_int(self, "spare_blocks", minimum=0)
        if self.dense_below is not None:
            _check_int(self, "dense_below", minimum=0)
            if self.dense_below < self.budget:
                raise ValueError(
                    f"dense_below={self.dense_below} must be at least budget={self.budget}: a context within the budget is "
                    "read whole anyway"
                )
        if self.max_host_bytes is not None:
            _check_int(self, "max_host_bytes", minimum=1)
        _check_choice(self, "tier_dtype", TIER_DTYPES)
        if self.spill is not None:
            if not isinstance(self.spill, str | os.PathLike) or not os.fspath(self.spill):
                raise ValueError(f"spill={self.spill!r} must be a directory's path, or None")
            object.__setattr__(self, "spill", os.fspath(self.spill))
            if self.max_host_bytes is None:
                raise ValueError(
                    f"spill={self.spill!r} needs max_host_bytes: how many bytes of blocks host memory holds before they go to disk"
                )
        _check_choice(self, "index", INDEX_NAMES)
        self._check_candidates()
        _check_choice(self, "on_miss", MISS_POLICIES)
        _check_choice(self, "lookahead", LOOKAHEAD_MODES)
        if self.on_miss == "skip" and self.lookahead == "off":
            raise ValueError(
                "on_miss='skip' reads what predictions brought to the device, so lookahead='off' would leave it with the first "
                "blocks for ever: use another lookahead, or on_miss='fetch'"
            )
        _check_choice(self, "engine", ENGINE_NAMES)
        if not isinstance(self.trace, bool):
            raise ValueError(f"trace={self.trace!r} must be True or False")
        self._check_max_fetch()

    def _check_candidates(self) -> None:
        if self.candidates is None:
            return
        _check_int(self, "candidates", minimum=1)
        if self.candidates < self.num_slots:
            raise ValueError(
                f"candidates={self.candidates} must be at least {self.num_slots}, the blocks that are chosen of them: budget="
                f"{self.budget} in blocks of {self.block_size} tokens, less recent_blocks={self.recent_blocks}"
            )

    def _check_max_fetch(self) -> None:
        cap = self.max_fetch
        if cap is None:
            return
        if isinstance(cap, bool) or not isinstance(cap, int | float):
            raise ValueError(
                f"max_fetch={cap!r} must be None, a number of blocks (int), or a fraction of the budget (float)"
            )
        if isinstance(cap, float) and not 0.0 <= cap <= 1.0:
            raise ValueError(f"max_fetch={cap} as a float is a fraction of the budget and must lie in [0.0, 1.0]")
        if cap < 0:
            raise ValueError(f"max_fetch={cap} must not be negative")

    @classmethod
    def from_options(cls, config: OasisConfig | None, overrides: dict[str, Any]) -> OasisConfig:
        """`config` (or the defaults) with `overrides` applied.

        Raises:
            ValueError: A name is unknown (the message lists the known ones), or a value is out of range.
        """
        if config is not None and not isinstance(config, cls):
            raise ValueError(
                f"config must be an OasisConfig, got {type(config).__name__}; a model's config goes in model_config="
            )
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise ValueError(f"unknown option {', '.join(map(repr, unknown))}; OasisConfig has {', '.join(known)}")
        return replace(config if config is not None else cls(), **overrides)

    @property
    def budget_blocks(self) -> int:
        """Blocks that attention may read per KV head and layer: sink + recent + retrieved."""
        return self.budget // self.block_size

    @property
    def num_slots(self) -> int:
        """Slots on the device per KV head and layer: sink + retrieved blocks (recent blocks live in the window)."""
        return self.budget_blocks - self.recent_blocks

    @property
    def dense_tokens(self) -> int:
        """Longest context, in tokens, that is kept and read densely: `dense_below`, or as much as the slots need to be full."""
        wanted = self.budget if self.dense_below is None else self.dense_below
        return max(wanted, self.num_slots * self.block_size + self.block_size - 1 + self.sparse_rows)

    @property
    def window_tokens(self) -> int:
        """Capacity of the window behind the slots: recent blocks, the unsealed tail and the rows of one sparse step."""
        return self.recent_blocks * self.block_size + self.block_size - 1 + 2 * self.sparse_rows

    def num_spare_blocks(self, prefetches: bool) -> int:
        """Blocks per KV head and layer beside those that attention reads: `spare_blocks`, or its default."""
        if self.spare_blocks is not None:
            return self.spare_blocks
        return self.num_slots if prefetches else 0

    @property
    def max_fetch_blocks(self) -> int:
        """The prefetch cap in blocks per KV head and step."""
        if self.max_fetch is None:
            return self.num_slots
        if isinstance(self.max_fetch, float):
            return min(self.num_slots, max(1, round(self.max_fetch * self.budget_blocks))) if self.max_fetch else 0
        return min(self.num_slots, self.max_fetch)


def _check_int(config: OasisConfig, name: str, minimum: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an int of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")


def _check_choice(config: OasisConfig, name: str, accepted: tuple[str | None, ...]) -> None:
    value = getattr(config, name)
    if value not in accepted:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, accepted))}")
