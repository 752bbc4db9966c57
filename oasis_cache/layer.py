"""One layer of the cache: short contexts in one dense buffer, long ones as working set + index + host store.

States. *dense*: at most `config.dense_tokens` tokens, in order in `self.dense`. *paged*: longer; blocks before the window are in
the host store and the index, some of them in slots; the window holds the newest tokens. `self.pending` holds the new tokens of a
streamed forward until attention has read them. Every operation brings the layer into one of the two states again.

Phases of a forward of `rows` new tokens that leaves `total` tokens: prefill on an empty layer; dense if total fits
`config.dense_tokens`; sparse if rows <= `config.sparse_rows`; streamed otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers.cache_utils import CacheLayerMixin

from oasis_cache import kernels
from oasis_cache.attend import attend_sparse, attend_streamed
from oasis_cache.attention import KVView
from oasis_cache.blocks import LayerShape, as_blocks, pack_kv
from oasis_cache.index import BlockIndex, make_index
from oasis_cache.latents import Expansion
from oasis_cache.mixed_store import Store, forecast_store, make_store, page_bytes_of_new
from oasis_cache.pool import WorkingSet
from oasis_cache.residency import Residency, prefetches
from oasis_cache.runtime import Runtime
from oasis_cache.stats import LayerCounters, LayerForecast, LayerStats, StepTrace

_T = TypeVar("_T")


def _outside_autograd(function: Callable[..., _T]) -> Callable[..., _T]:
    """Run without gradients and outside of inference mode, so that what is stored can be changed in every mode later."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> _T:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as in `generate`
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapped


class OasisLayer(CacheLayerMixin):
    """A full-attention layer whose complete KV rests in the host tier and whose working set is on the device."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, runtime: Runtime, **_: Any) -> None:
        super().__init__()
        self.runtime = runtime
        self.config = runtime.config
        self.stores_latents = False  # what the next first tokens are
        self.caller_unknown = False  # it was loaded: nobody has looked yet whose tokens it holds
        self.counters = LayerCounters()
        self.trace: list[StepTrace] = []
        self.residency: Residency | None = None
        self._forget()

    @property
    def working_set(self) -> WorkingSet | None:
        """Slots and window; None while the layer is dense."""
        return None if self.residency is None else self.residency.working_set

    def _forget(self) -> None:
        if self.residency is not None:
            self.residency.call_off()
        self.shape: LayerShape | None = None
        self.dense: torch.Tensor | None = None  # [batch, kv_heads, capacity, kv_dim]
        self.residency = None
        self.index: BlockIndex | None = None
        self.store: Store | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0  # tokens stored, pending ones not counted
        self.phase = "prefill"
        self.is_initialized = False
        self.keys = self.values = None

    @_outside_autograd
    def __deepcopy__(self, memo: dict) -> OasisLayer:
        self.settle()
        twin = copy.copy(self)
        twin.runtime = copy.deepcopy(self.runtime, memo)
        twin.counters, twin.trace = copy.deepcopy(self.counters), list(self.trace)
        twin.dense = None if self.dense is None else self.dense.clone()
        memo[id(self.counters)] = twin.counters
        for name in ("residency", "index", "store"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    @_outside_autograd
    def settle(self) -> None:
        """Bring what is under way to its end: tokens that are not stored yet, and a prefetch."""
        self._commit()
        if self.residency is not None:
            self.residency.land()

    # --- The contract of CacheLayerMixin: sizes -------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fix the layer's sizes by the first tensors: [batch, kv_heads, tokens, dim] each."""
        self.shape = LayerShape.of(key_states, value_states, self.stores_latents)
        self.counters.block_bytes = self.counters.exact_block_bytes = self.shape.block_bytes(self.config.block_size)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Tokens held, those of the current forward included once `update` returned."""
        return self.length + (self.pending[0].shape[2] if self.pending is not None else 0)

    @property
    def holds_latents(self) -> bool:
        """Whether what the layer holds is to be expanded before attention (see `LayerShape.latent`)."""
        return self.shape is not None and self.shape.latent

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + int(query_length), 0

    @property
    def device_bytes(self) -> int:
        """Bytes on the device now: the dense buffer, or slots, window and tables, and tokens not stored yet."""
        waiting = [part for part in (self.dense, *(self.pending or ())) if part is not None]
        return sum(part.numel() * part.element_size() for part in waiting) + (
            self.working_set.num_bytes if self.working_set is not None else 0
        )

    @property
    def index_bytes(self) -> int:
        return self.index.reserved_bytes if self.index is not None else 0

    @property
    def host_bytes(self) -> int:
        return self.store.used_bytes if self.store is not None else 0

    def stats(self, number: int) -> LayerStats:
        """This layer's part of `OasisCache.stats()`; `number` is its place in the model."""
        counters = self.counters
        late = int(counters.late)
        misses = int(counters.misses) + late
        return LayerStats(
            number,
            counters.selected - misses,
            misses,
            int(counters.spare_hits),
            late,
            counters.bytes_fetched,
            counters.bytes_written,
            counters.stall_seconds,
            self.device_bytes,
            self.index_bytes,
            self.host_bytes,
            self.store.away_bytes if self.store is not None else 0,
        )

    # --- Update -------------------------------------------------------------------------------------------------------

    def phase_of(self, rows: int) -> str:
        """The phase that a forward of `rows` new tokens would be now (see the module's docstring)."""
        past = self.get_seq_length()
        if past == 0:
            return "prefill"
        if past + rows <= self.config.dense_tokens:
            return "dense"
        return "sparse" if rows <= self.config.sparse_rows else "streamed"

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens in and return what attention shall read.

        Args:
            key_states: [batch, kv_heads, rows, key_dim], position already applied.
            value_states: [batch, kv_heads, rows, value_dim].

        Returns:
            Keys and values of the whole context as tensors (prefill and dense), or as `KVView`s (sparse and streamed).

        Raises:
            ValueError: A size, dtype or device differs from what the layer holds.
            MemoryError: The host tier cannot take the tokens. Nothing was written.
            RuntimeError: The cache is closed.
        """
        self.runtime.check_open()
        self._check(key_states, value_states)
        if torch.is_grad_enabled() and key_states.requires_grad:
            self.runtime.warn_once(
                "gradients do not flow through OasisCache: call the model under torch.no_grad(), or train with use_cache=False"
            )
        return self._update(key_states, value_states)

    @_outside_autograd
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._commit()
        rows = key_states.shape[2]
        phase = self.phase_of(rows)
        if not self.is_initialized or self.get_seq_length() == 0:
            self.lazy_initialization(key_states, value_states)
        self.phase = phase
        self.counters.forwards[phase] += 1
        if phase == "streamed":
            self.pending = (key_states, value_states)
            return self._views()
        if phase == "sparse":
            self._seal_accepted()
            self.working_set.append(pack_kv(key_states, value_states))
            self.length += rows
            return self._views()
        kv = pack_kv(key_states.detach(), value_states.detach())
        if self.length + rows <= self.config.dense_tokens:
            self._append_dense(kv)
        else:
            self._page_in(kv)
        if phase == "prefill":
            return key_states, value_states
        key_dim = self.shape.key_dim
        held = self.dense[:, :, : self.length]
        return held[..., :key_dim], held[..., key_dim:]

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"keys {tuple(keys.shape)}, values {tuple(values.shape)} must be [batch, kv_heads, tokens, dim], equal but for dim"
            )
        if self.shape is None or self.get_seq_length() == 0:
            return
        new = LayerShape.of(keys, values)
        for name, held, got in (
            ("batch size", self.shape.batch, new.batch),
            ("number of KV heads", self.shape.kv_heads, new.kv_heads),
            ("key width", self.shape.key_dim, new.key_dim),
            ("value width", self.shape.value_dim, new.value_dim),
            ("dtype", self.shape.dtype, new.dtype),
            ("device", self.shape.device, new.device),
        ):
            if held != got:
                raise ValueError(
                    f"{name} {got} does not fit this cache, which holds {self.get_seq_length()} tokens with {name} {held}; "
                    "reset() it, or use a cache per batch"
                )

    def slab_bytes_for(self, shape: LayerShape, rows: int) -> int:
        """Bytes of the host slabs that a forward of `rows` new tokens would add to this layer, whose tensors have `shape`."""
        block_size, length = self.config.block_size, self.get_seq_length()
        total = length + rows
        if total <= self.config.dense_tokens:
            return 0
        blocks = length // block_size
        if rows > self.config.sparse_rows or self.store is None:
            blocks = max(blocks, (total - self.config.sparse_rows) // block_size)
        if self.store is not None:
            return self.store.bytes_to_append(blocks - self.store.num_blocks)
        return page_bytes_of_new(self.runtime.pools, shape, self.config, blocks)

    def _views(self) -> tuple[KVView, KVView]:
        sizes = (self.shape.batch, self.shape.kv_heads, self.get_seq_length())
        return (
            KVView(self, "keys", (*sizes, self.shape.key_dim)),
            KVView(self, "values", (*sizes, self.shape.value_dim)),
        )

    # --- Storing ------------------------------------------------------------------------------------------------------

    def _append_dense(self, kv: torch.Tensor) -> None:
        """Put new tokens [batch, kv_heads, rows, kv_dim] behind the dense buffer's, which grows by doubling."""
        total = self.length + kv.shape[2]
        if self.dense is None or self.dense.shape[2] < total:
            capacity = self._dense_capacity(total, 0 if self.dense is None else self.dense.shape[2])
            grown = kv.new_empty(*kv.shape[:2], capacity, kv.shape[3])
            if self.dense is not None:
                grown[:, :, : self.length] = self.dense[:, :, : self.length]
            self.dense = grown
        self.dense[:, :, self.length : total] = kv
        self.length = total

    def _dense_capacity(self, total: int, held: int) -> int:
        """Tokens that the dense buffer has room for when one for `held` is too small for `total`."""
        return min(max(total + self.config.sparse_rows, 2 * held), self.config.dense_tokens)

    def forecast(self, shape: LayerShape, context: int, new_tokens: int, beside: bool) -> LayerForecast:
        """Bytes that this layer will hold once it was given `context` tokens at once and `new_tokens` more one by one.

        Args:
            shape: Sizes of its tensors. No memory of theirs is taken.
            beside: Whether copies run beside the computation, which decides on prefetching.
        """
        config, block_size = self.config, self.config.block_size
        shape = replace(shape, device=torch.device("meta") if shape.device.type != "cpu" else shape.device)
        total = context + new_tokens
        if total <= config.dense_tokens:
            capacity = self._dense_capacity(context, 0)
            while capacity < total:
                capacity = self._dense_capacity(capacity + 1, capacity)
            return LayerForecast(shape.batch * capacity * shape.token_bytes, 0, 0, 0)
        at_once = max(0, context - config.sparse_rows) // block_size
        if context <= config.dense_tokens:  # it leaves the dense buffer later
            at_once = config.dense_tokens // block_size
        num_blocks = max(at_once, (total - 1) // block_size) if new_tokens else at_once
        staged = config.num_spare_blocks(prefetches(config, beside)) if config.on_miss == "fetch" else 0
        sizes = (block_size, config.num_slots, config.window_tokens, staged)
        return LayerForecast(
            WorkingSet(replace(shape, device=torch.device("meta")), *sizes).num_bytes,
            make_index(config.index, config.candidates).forecast(shape, block_size, at_once, num_blocks),
            *forecast_store(shape, config, at_once, num_blocks),
        )

    def _page_in(self, kv: torch.Tensor) -> None:
        """Take many new tokens [batch, kv_heads, rows, kv_dim] into the paged state, sealing all but the newest."""
        num_blocks = None if self.store is None else self.store.num_blocks
        try:
            self._page(kv)
        except BaseException:  # out of memory, or an interrupt: the layer holds what it held before
            if num_blocks is None:
                self.residency = self.index = self.store = None
            else:
                self.store.truncate(num_blocks)
                self.index.truncate(num_blocks)
            raise

    def _page(self, kv: torch.Tensor) -> None:
        block_size = self.config.block_size
        if self.working_set is None:
            known, start = (self.dense[:, :, : self.length], 0) if self.dense is not None else (kv[:, :, :0], 0)
            self.open_pages()
        else:
            known, start = self.working_set.window, self.working_set.window_start
        total = self.length + kv.shape[2]
        sealed = max(self.length // block_size, (total - self.config.sparse_rows) // block_size)
        recent = max(self._window_block(sealed) * block_size, self.working_set.window_start)
        first = self.store.num_blocks * block_size
        kv = torch.cat([known[:, :, max(0, first - start) :], kv], dim=2)  # from position max(start, first) on
        start = max(start, first)
        self._seal(kv[:, :, first - start : sealed * block_size - start])
        if recent < start:  # the window still holds older tokens that stay
            kv = torch.cat(
                [known[:, :, recent - self.working_set.window_start : first - self.working_set.window_start], kv], dim=2
            )
            start = recent
        self.working_set.replace_window(kv[:, :, recent - start :], recent)
        self.length, self.dense = total, None

    def _window_block(self, sealed: int) -> int:
        """The block at which the window starts when `sealed` blocks are sealed: the slots can always be filled."""
        return max(sealed - self.config.recent_blocks, self.config.num_slots)

    def _window_moves_back(self, keep: int) -> bool:
        """Whether the window begins at an older block when only `keep` tokens are left."""
        return (
            self._window_block(keep // self.config.block_size) * self.config.block_size < self.working_set.window_start
        )

    def open(self, shape: LayerShape, length: int) -> None:
        """Make an empty layer ready for `length` tokens that somebody else brings: in `dense`, or after `open_pages`."""
        self.shape, self.length, self.is_initialized = shape, length, True
        self.counters.block_bytes = self.counters.exact_block_bytes = shape.block_bytes(self.config.block_size)
        self.caller_unknown = True

    def open_pages(self) -> None:
        """Make the empty parts of the paged state."""
        self.index = make_index(self.config.index, self.config.candidates)
        self.store = make_store(self.runtime.memory, self.runtime.pools, self.shape, self.config)
        self.counters.block_bytes = self.store.block_bytes
        self.residency = Residency(self.runtime, self.shape, self.store, self.counters)

    def _seal(self, kv: torch.Tensor) -> None:
        """Enter the next whole blocks [batch, kv_heads, blocks * block_size, kv_dim] in the store and the index."""
        blocks = as_blocks(kv, self.config.block_size)
        keys = blocks[..., : self.shape.query_dim]
        first = self.store.num_blocks
        try:
            by_kernel = blocks.shape[2] > 0 and kernels.uses_triton(kv.device) and self.store.sealed_by_kernel
            if by_kernel:
                addresses = self.store.reserve(blocks.shape[2])
                if not self.store.device_readable:  # the new pages could not be page-locked
                    self.store.truncate(first)
                    by_kernel = False
            if by_kernel:
                summaries = self.index.reserve(keys) if self.index.sealed_by_kernel else {}
                kernels.seal_blocks(blocks, self.shape.query_dim, addresses, summaries, first)
                if not summaries:
                    self.index.append(keys)
            else:
                self.store.append(blocks)
                self.index.append(keys)
        except BaseException:  # out of memory, or an interrupt: store and index stay in step
            self.store.truncate(first)
            self.index.truncate(first)
            raise
        self.counters.bytes_written += self.store.range_bytes(first, self.store.num_blocks)
        if self.runtime.memory.pin_failure is not None:
            self.runtime.warn_once(self.runtime.memory.pin_failure)

    def _seal_accepted(self) -> None:
        """Seal the blocks whose tokens are all still there, and let blocks that are no longer recent leave the window."""
        if self.working_set is None:
            self._page_in(self.dense[:, :, :0])
            return
        block_size, window = self.config.block_size, self.working_set
        accepted, sealed = self.length // block_size, self.store.num_blocks
        if accepted > sealed:
            offset = sealed * block_size - window.window_start
            self._seal(window.window[:, :, offset : offset + (accepted - sealed) * block_size])
        window.advance_window(self._window_block(self.store.num_blocks) * block_size)

    def _commit(self) -> None:
        """Store the new tokens of a streamed forward, whose attention is over."""
        if self.pending is not None:
            keys, values = self.pending
            self._page_in(pack_kv(keys.detach(), values.detach()))
            self.pending = None

    # --- Attention ----------------------------------------------------------------------------------------------------

    @_outside_autograd
    def attend(
        self,
        query: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        is_causal: bool,
        expansion: Expansion | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the current forward's rows over this layer: query [batch, query_heads, rows, key_dim] ->
        [batch, rows, query_heads, value_dim].

        `expansion` is what a layer of latents is read by; `position_bias`, [batch or 1, query_heads or 1, rows, tokens], is added
        to the scores.
        """
        rows, total = query.shape[2], self.get_seq_length()
        mask = self.runtime.masks.normalise(attention_mask, rows, total, sliding_window, is_causal, query.device)
        if position_bias is not None:
            mask = mask.biased(position_bias)
        if self.phase == "sparse" and not mask.causal:
            self._recount("streamed")
        if self.phase == "streamed":
            expand = None if expansion is None else expansion.expand
            out = attend_streamed(self, query, mask, scaling, softcap, sinks, expand)
        elif expansion is None:
            out = attend_sparse(self, query, mask, scaling, softcap, sinks)
        else:
            out = expansion.values_of(attend_sparse(self, expansion.absorb(query), mask, scaling, softcap, sinks))
        self._commit()
        return out.transpose(1, 2).contiguous()

    def pieces(self) -> Iterator[torch.Tensor]:
        """All tokens in order, on the device, a bounded number at a time: [batch, kv_heads, tokens, kv_dim] each."""
        step = self.config.stream_tokens
        if self.working_set is not None:
            blocks_at_a_time = max(1, step // self.config.block_size)
            window_block = self.working_set.window_start // self.config.block_size
            for block in range(0, window_block, blocks_at_a_time):
                stop = min(block + blocks_at_a_time, window_block)
                self.counters.bytes_streamed += self.store.range_bytes(block, stop)
                yield self.store.read_range(block, stop)
            if (
                self.working_set.window_length
            ):  # no empty piece: torch's attention on the CPU divides by the number of keys
                yield self.working_set.window
        elif self.length:
            yield from self.dense[:, :, : self.length].split(step, dim=2)
        if self.pending is not None:
            keys, values = self.pending
            for part in zip(keys.split(step, dim=2), values.split(step, dim=2), strict=True):
                yield pack_kv(*part)

    def dense_keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [batch, kv_heads, tokens, key_dim] and values [batch, kv_heads, tokens, value_dim] of all tokens, on the device."""
        kv = self.dense_kv()
        return kv[..., : self.shape.key_dim], kv[..., self.shape.key_dim :]

    def dense_kv(self) -> torch.Tensor:
        """All tokens, gathered on the device: [batch, kv_heads, tokens, kv_dim]. The one operation that is not bounded."""
        return torch.cat(list(self.pieces()), dim=2)

    def fall_back(self, part: str, cause: str) -> torch.Tensor:
        """The dense keys or values for an operation that cannot work on a view; warned about and counted."""
        self.runtime.warn_once(
            f"{cause} gets the complete dense keys and values from OasisCache: right, but slow and not sparse. "
            "stats().fallback_steps counts such steps."
        )
        if self.phase in ("sparse", "streamed"):
            self._recount("dense")
            self.counters.fallbacks += 1
        kv = self.dense_kv()
        return kv[..., : self.shape.key_dim] if part == "keys" else kv[..., self.shape.key_dim :]

    def _recount(self, phase: str) -> None:
        """Count the current forward under another phase than it began in."""
        self.counters.forwards[self.phase] -= 1
        self.counters.forwards[phase] += 1
        self.phase = phase

    # --- The contract of CacheLayerMixin: mutations -----------------------------------------------------------------------

    @_outside_autograd
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens (0: none; more than there are: all).

        Raises:
            ValueError: `tokens_to_remove` is positive (a length to keep, as before transformers 5.15, is not accepted).
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass 0 or a negative number of tokens to remove (a length to keep is not accepted)"
            )
        keep = max(0, self.get_seq_length() + int(tokens_to_remove))
        if keep <= self.length:
            self.pending = None  # nobody found room for these tokens, maybe: they need none
        self._commit()
        if keep == self.length:
            return
        if self.working_set is not None and (keep <= self.config.dense_tokens or self._window_moves_back(keep)):
            self.residency.call_off()
        if keep == 0:
            self._forget()
        elif self.working_set is None:
            self.length = keep
        elif keep <= self.config.dense_tokens:
            self._leave_pages(keep)
        else:
            self._crop_pages(keep)

    def _leave_pages(self, keep: int) -> None:
        kv = torch.cat(list(self._pieces_until(keep)), dim=2)[:, :, :keep].contiguous()
        self.residency = self.index = self.store = None
        self.dense, self.length = kv, keep

    def _pieces_until(self, keep: int) -> Iterator[torch.Tensor]:
        position = 0
        for kv in self.pieces():
            if position < keep:
                yield kv
            position += kv.shape[2]

    def _crop_pages(self, keep: int) -> None:
        block_size, working_set = self.config.block_size, self.working_set
        whole = keep // block_size
        if self._window_moves_back(keep):  # sealed blocks become recent again
            start, stop = self._window_block(whole), min(-(-keep // block_size), working_set.window_start // block_size)
            kept = working_set.window[:, :, : max(0, keep - working_set.window_start)]
            kv = torch.cat([self.store.read_range(start, stop), kept], dim=2)
            working_set.forget_from(start)
            working_set.replace_window(kv[:, :, : keep - start * block_size], start * block_size)
        else:
            working_set.window_length = keep - working_set.window_start
        self.store.truncate(whole)
        self.index.truncate(whole)
        self.length = keep

    def reset(self) -> None:
        """Forget all tokens and give their memory back; counters start anew."""
        self._forget()
        self.counters, self.trace = LayerCounters(), []

    @_outside_autograd
    def _select_rows(self, rows: torch.Tensor) -> None:
        self._commit()
        if self.get_seq_length() == 0:
            return
        if self.dense is not None:
            self.dense = self.dense.index_select(0, rows.to(self.dense.device))
        if self.residency is not None:
            slots, summaries = (
                self.residency.selected_rows(rows),
                self.index.selected_rows(rows),
            )  # may run out of memory
            self.residency.replace_tensors(slots)
            self.index.replace_arrays(summaries)
            self.store.select_rows(rows.cpu())
        self.shape = dataclasses.replace(self.shape, batch=rows.numel())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Batch row i becomes the former row `beam_idx[i]` (int64 [batch])."""
        self._select_rows(beam_idx.to(torch.int64))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row `repeats` times, next to each other; host pages are shared."""
        if self.get_seq_length():
            self._select_rows(torch.arange(self.shape.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices` (int64 [new batch], or a bool mask over rows), in that order."""
        if self.get_seq_length():
            indices = torch.as_tensor(indices)
            indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices.flatten()
            self._select_rows(torch.where(indices < 0, indices + self.shape.batch, indices))

    def offload(self) -> None:
        """Nothing to do: the complete KV is in the host tier already."""

    def prefetch(self) -> None:
        """Nothing to do: blocks are fetched by demand and by prediction."""

    def check_integrity(self) -> None:
        """Assert that tables, stores and lengths agree. For tests."""
        if self.working_set is None:
            assert self.store is None and self.index is None
            assert self.length == 0 or self.dense.shape[2] >= self.length
            return
        self._commit()
        window, block_size = self.working_set, self.config.block_size
        window.check_integrity()
        self.store.check_integrity()
        assert self.index.num_blocks == self.store.num_blocks
        assert window.window_start % block_size == 0
        assert window.window_start + window.window_length == self.length
        assert window.window_start // block_size <= self._window_block(self.store.num_blocks), (
            "a recent block left the window"
        )
        assert window.window_start // block_size <= self.store.num_blocks <= self.length // block_size
        assert window.window_start // block_size >= self.config.num_slots
