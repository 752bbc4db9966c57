"""`OasisCache`: the drop-in cache for `model.generate(**inputs, past_key_values=OasisCache())`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from oasis_cache.attention import install
from oasis_cache.blocks import LayerShape
from oasis_cache.config import OasisConfig
from oasis_cache.display import as_html, as_text, summary
from oasis_cache.hybrid import OasisHybridLayer
from oasis_cache.latents import adopt_caller
from oasis_cache.layer import OasisLayer
from oasis_cache.runtime import Runtime
from oasis_cache.saving import check_model, config_of, open_saved, restore_layers, save_layers
from oasis_cache.selector import RowRoles
from oasis_cache.stats import PHASES, LayerStats, OasisStats, PhaseClock, StepTrace

if TYPE_CHECKING:
    from oasis_cache.plan import CapacityPlan

_MAX_FRAMES = 24
_SUMMED = [field.name for field in dataclasses.fields(LayerStats) if field.name != "layer"]
_TOKEN_LAYERS = (OasisLayer, DynamicLayer)  # hold all tokens, or (sliding ones) count them
_MAX_MASK_FRAMES = 3  # the function that makes masks, with an EncoderDecoderCache in between


class OasisCache(DynamicCache):
    """A KV cache that keeps the complete KV in host memory and a small working set of blocks on the device.

    Contexts of at most `config.dense_tokens` tokens equal `DynamicCache`. On longer ones a forward of at most `sparse_rows` new
    tokens reads, per layer and KV head, the sink, the recent and the best retrieved blocks within `budget` tokens; longer
    forwards read everything, exactly, a piece at a time.

    Args:
        config: Settings; the defaults of `OasisConfig` if None.
        model_config: The model's config (`model.config`), by which sliding-window, recurrent and other special layers get
            transformers' own cache layers. If None it is taken from the model that first uses the cache; where none is found
            (the cache is driven by hand) every layer is taken for full attention.
        **overrides: Fields of `OasisConfig` to set on top of `config`.

    Raises:
        ValueError: An option is unknown or out of range, or the model has a layer type that transformers does not know.

    Examples:
        >>> cache = OasisCache(model_config=model.config, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
        >>> cache.stats().sparse_steps
    """

    def __init__(
        self, config: OasisConfig | None = None, *, model_config: PretrainedConfig | None = None, **overrides: Any
    ) -> None:
        self._begin(OasisConfig.from_options(config, overrides), model_config)

    def _begin(self, config: OasisConfig, model_config: PretrainedConfig | None, tiered: bool = False) -> None:
        self.config = config
        self.runtime = Runtime.create(config, tiered)
        self.model_config: PretrainedConfig | None = None
        self._config_given = model_config is not None
        self._thread = threading.get_ident()  # that began the current forward
        self._clock = PhaseClock()
        self._torn_by: str | None = None  # the operation on batch rows that broke off
        Cache.__init__(
            self, layers=[]
        )  # a DynamicCache where `EncoderDecoderCache` and models ask for one, but with other layers
        if model_config is not None:
            self._adopt(model_config)
        install()

    @property
    def layers(self) -> list[Any]:
        """One cache layer per model layer; empty until the model is known."""
        if not self._layers and self.model_config is None:
            model_config = _config_of_calling_model()
            if model_config is not None:
                self._adopt(model_config)
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers

    def _adopt(self, model_config: PretrainedConfig) -> None:
        """Make the layers that the model needs: transformers' own, an `OasisLayer` in place of each plain full-attention one."""
        layers = transformers_layers(model_config)
        self._layers = [self._in_place_of(layer) for layer in layers]
        self.model_config = model_config
        if not self._oasis_layers:
            self.runtime.warn_once(
                f"{type(model_config).__name__} has no full-attention layer that OasisCache could serve: the cache works as "
                "DynamicCache does"
            )

    def _in_place_of(self, layer: Any) -> Any:
        """The layer that serves in the place of one of transformers' own: that one where it is no full attention."""
        if type(layer) is DynamicLayer:
            return OasisLayer(self.runtime)
        if type(layer) is LinearAttentionAndFullAttentionLayer:
            return OasisHybridLayer(self.runtime, layer.number_of_states)
        return layer

    def __deepcopy__(self, memo: dict) -> OasisCache:
        """An independent cache with the same content; the host tier's pages are shared, not copied."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        memo[id(self.model_config)] = self.model_config
        for name, value in self.__dict__.items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(
            "an OasisCache cannot be pickled or copied shallowly: it owns host memory and transfers in flight. Use "
            "copy.deepcopy, or cache.save(path) and OasisCache.load(path, model)"
        )

    def __getitem__(self, layer_idx: int) -> Any:
        raise TypeError("an OasisCache has no tuples of tensors to index: use cache.layers[i].dense_keys_and_values()")

    def __iter__(self) -> Any:
        raise TypeError(
            "an OasisCache has no tuples of tensors to iterate: use layer.dense_keys_and_values() for cache.layers"
        )

    def __bool__(self) -> bool:
        return not self._spared_by_longrope(sys._getframe(1))

    def _spared_by_longrope(self, frame: FrameType) -> bool:
        """Whether the caller, one of Phi-3's family, is about to replace this empty cache by one of its own for no reason.

        `prepare_inputs_for_generation` of these models drops a cache when the sequence first exceeds the length up to which the
        short rotary factors hold, because what the cache holds was rotated by them. It drops an empty cache too, which holds
        nothing wrong. When there is something to drop, nothing here can keep it: then this cache says so and lets its memory go.
        """
        if frame.f_code.co_name != "prepare_inputs_for_generation":
            return False
        model, ids = frame.f_locals.get("self"), frame.f_locals.get("input_ids")
        longest = getattr(getattr(model, "config", None), "original_max_position_embeddings", None)
        if not isinstance(longest, int) or not isinstance(ids, torch.Tensor) or ids.shape[1] <= longest:
            return False
        held = int(self.get_seq_length())
        if 0 < held <= longest:
            self.runtime.warn_once(
                f"{type(model).__name__} computes its keys anew when a sequence exceeds {longest} tokens, and goes on with a "
                f"DynamicCache: this OasisCache lets its {held} tokens go and is empty from here on. A prompt of more than "
                f"{longest} tokens stays in it"
            )
            self.reset()
            return False
        return held == 0

    @property
    def _oasis_layers(self) -> list[OasisLayer]:
        return [layer for layer in self.layers if isinstance(layer, OasisLayer)]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys that a forward has in a layer; transformers makes masks by it.

        Args:
            query_length: New tokens of the forward.
            layer_idx: The layer's number in the model.

        Returns:
            Tokens that the mask covers (past and new ones, fewer in sliding layers), and the position of the first of them.

        Raises:
            ValueError: There are no new tokens, or the caller's 2D attention mask does not cover past and new tokens.
                (transformers would hide what the mask leaves out, the new tokens.)
        """
        self._check_new_tokens(int(query_length), sys._getframe(1))
        return super().get_mask_sizes(query_length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens per sequence held by a layer; by the first attention layer where layer 0 has none.

        Args:
            layer_idx: The layer's number in the model.

        Raises:
            ValueError: `generate` asks, and what it was given leaves it no new tokens to feed, or a mask that does not cover them.
        """
        length = super().get_seq_length(layer_idx)
        frame = sys._getframe(1)
        if length and frame.f_code.co_name == "_prefill":
            self._check_prefill(int(length), frame.f_locals)
        return length

    def activate_past_recording(self) -> None:
        """Let layers with a bounded memory keep what a crop may want back; `generate` calls it before assisted decoding.

        Raises:
            ValueError: Assisted decoding of transformers is about to feed the whole sequence again to a filled cache.
        """
        frame = sys._getframe(1)
        past = int(super().get_seq_length()) if self.layers else 0
        if past and frame.f_code.co_name == "_assisted_decoding":
            ids, covered = frame.f_locals.get("input_ids"), _covered_tokens(frame.f_locals)
            if isinstance(ids, torch.Tensor) and covered < past + ids.shape[1]:
                raise ValueError(
                    f"assisted decoding of transformers feeds all {ids.shape[1]} tokens again, although the cache holds {past} "
                    "already: use custom_generate=LookaheadDecoding(...), which goes on where the cache ends, or reset() the cache"
                )
        super().activate_past_recording()

    def _check_prefill(self, past: int, local: dict[str, Any]) -> None:
        """Refuse what `generate` would do wrongly with a filled cache: its `_prefill` slices without looking at lengths."""
        arguments, ids = local.get("model_kwargs") or {}, local.get("input_ids")
        embeds = arguments.get("inputs_embeds") if local.get("use_inputs_embeds") else None
        given = embeds if embeds is not None else ids
        if not isinstance(given, torch.Tensor):
            return
        tokens, covered = given.shape[1], _covered_tokens(local)
        if embeds is not None or covered == tokens:  # the whole sequence, of which the cache holds the beginning
            if tokens <= past:
                raise ValueError(f"no new tokens are left of the {tokens} given. {_how_to_go_on(past)}")
        elif 0 <= covered < past + tokens:
            raise ValueError(
                f"the attention mask covers {covered} tokens, but {tokens} more come to the {past} in the cache. "
                f"{_how_to_go_on(past)}"
            )

    def _check_new_tokens(self, rows: int, frame: FrameType | None) -> None:
        """Refuse a forward of no tokens, or whose 2D mask leaves some out."""
        past = int(super().get_seq_length()) if self.layers else 0
        if past == 0:
            return
        if rows == 0:
            raise ValueError(f"no new tokens are left to feed. {_how_to_go_on(past)}")
        for _ in range(_MAX_MASK_FRAMES):
            if frame is None:
                return
            mask = frame.f_locals.get("attention_mask")
            if isinstance(mask, torch.Tensor):
                if mask.dim() == 2 and mask.shape[1] < past + rows:
                    raise ValueError(
                        f"the attention mask covers {mask.shape[1]} tokens, but {rows} more come to the {past} in the cache. "
                        "(With use_cache=False, `generate` feeds the whole sequence at every step: a cache needs use_cache=True.) "
                        f"{_how_to_go_on(past)}"
                    )
                return
            frame = frame.f_back

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the new tokens of one layer; see `OasisLayer.update`.

        Args:
            key_states: [batch, kv_heads, rows, key_dim], of the dtype and on the device that the cache began with.
            value_states: [batch, kv_heads, rows, value_dim].
            layer_idx: The layer's number in the model.

        Returns:
            Keys [batch, kv_heads, tokens, key_dim] and values [batch, kv_heads, tokens, value_dim] of all past and new tokens:
            tensors where attention reads everything, else `KVView`s, which stand for them until the next forward or crop.

        Raises:
            ValueError: Shape, dtype or device do not fit what the cache holds, or there is no such layer.
            MemoryError: Host memory cannot take the tokens in all layers.
            OSError: The disk cannot take them (`spill`).
            RuntimeError: The cache is closed, an earlier forward broke off, or another thread is in the midst of one.
        """
        self.runtime.check_open()
        if self.model_config is None:
            while len(self.layers) <= layer_idx:
                self.layers.append(OasisLayer(self.runtime))
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} of a cache made for {len(self.layers)} layers: model_config is another model's than the one "
                "that uses the cache"
            )
        self._begin_layer(layer_idx, key_states, value_states)
        layer = self.layers[layer_idx]
        if isinstance(layer, OasisLayer) and (layer.get_seq_length() == 0 or layer.caller_unknown):
            layer.stores_latents = adopt_caller(sys._getframe(1), key_states)
            layer.caller_unknown = False
        result = layer.update(key_states, value_states, *args, **kwargs)
        if layer is self.layers[-1] or not any(
            isinstance(other, _TOKEN_LAYERS) for other in self.layers[layer_idx + 1 :]
        ):
            phase = next((other.phase for other in self.layers if isinstance(other, OasisLayer)), "dense")
            self._clock.stop(phase, key_states.shape[-2])
        return result

    def _begin_layer(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Checks before a layer takes new tokens: at the first one for the whole forward, at others that they follow it.

        Raises:
            MemoryError: The host tier cannot take the forward's tokens in all layers. Nothing was written.
            RuntimeError: An earlier forward broke off between the first layer and this one, or another thread began one.
        """
        layer = self.layers[layer_idx]
        first_oasis = next((other for other in self.layers if isinstance(other, OasisLayer)), None)
        if first_oasis is None or not isinstance(layer, _TOKEN_LAYERS):
            return
        first = next(other for other in self.layers if isinstance(other, _TOKEN_LAYERS))
        rows = keys.shape[-2]
        if layer is not first and self._thread != threading.get_ident():
            raise RuntimeError(
                f"two threads use this cache: another one began a forward before this one came to layer {layer_idx}. Give each "
                "thread a cache of its own; crop(0) or reset() makes this one usable again"
            )
        if layer is first:
            if self._torn_by is not None:
                raise RuntimeError(
                    f"{self._torn_by} broke off, so that layers may hold different batch rows: call reset(), and begin anew"
                )
            self._check_complete()
            self._thread = threading.get_ident()
            self._clock.start()
            self.runtime.masks.clear()
        elif layer.get_seq_length() + rows != first.get_seq_length():
            hint = " An encoder-decoder model needs EncoderDecoderCache(OasisCache(), DynamicCache())."
            raise RuntimeError(
                f"layer {layer_idx} holds {layer.get_seq_length()} tokens and gets {rows} more, but the first layer holds "
                f"{first.get_seq_length()}: an earlier forward was interrupted. {self._way_back()}"
                f"{hint if getattr(self.model_config, 'is_encoder_decoder', False) else ''}"
            )
        if layer in (first, first_oasis):  # a sliding layer may have other sizes, so that only the second look is sure
            oasis_layers, shape = self._oasis_layers, LayerShape.of(keys, values)
            needed = sum(each.slab_bytes_for(each.shape or shape, rows) for each in oasis_layers)
            if needed:
                total = first_oasis.get_seq_length() + rows
                self.runtime.require(needed, f"a context of {total:,} tokens in {len(oasis_layers)} layers")

    @property
    def _can_go_back(self) -> bool:
        """Whether every layer can be cropped at any time."""
        return all(type(layer) is OasisLayer for layer in self.layers)

    def _check_complete(self) -> None:
        """Raise `RuntimeError` if some layers hold tokens of a forward that did not come to the others."""
        lengths = [layer.get_seq_length() for layer in self.layers if isinstance(layer, _TOKEN_LAYERS)]
        if len(set(lengths)) > 1:
            thread = "" if self._thread == threading.get_ident() else ", or two threads use this cache at once"
            raise RuntimeError(
                f"the layers hold between {min(lengths)} and {max(lengths)} tokens: an earlier forward was interrupted{thread}. "
                f"{self._way_back()}"
            )

    def _way_back(self) -> str:
        """What to do after an interrupted forward."""
        if self._can_go_back:
            return "Call crop(0) to go back to the last complete forward, or reset()"
        return "Call reset(): this model has layers that cannot go back"

    def _drop_interrupted_forward(self) -> None:
        """Take away what a forward that broke off left in the layers it had reached."""
        lengths = [layer.get_seq_length() for layer in self.layers if hasattr(layer, "get_seq_length")]
        if len(set(lengths)) <= 1:
            return
        if not self._can_go_back:
            raise RuntimeError(
                "an earlier forward was interrupted, and this model has layers that cannot go back to before it: call reset()"
            )
        for layer, length in zip(self._oasis_layers, lengths, strict=True):
            layer.crop(min(lengths) - length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of each sequence from every layer.

        Tokens that an interrupted forward left in some layers only are removed first, and not counted.

        Args:
            tokens_to_remove: 0 or negative: minus the number of tokens to remove (more than there are: all).

        Raises:
            ValueError: `tokens_to_remove` is positive, unless the installed transformers still takes that as a length to keep.
            RuntimeError: The model has layers that cannot go back, sliding windows or recurrent states that do not record their
                past, or a forward was interrupted in such a model. Nothing was removed.
        """
        self._drop_interrupted_forward()
        count = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if count > 0 and _positive_crop_is_a_length():
            warnings.warn(
                f"crop({count}) with a length to keep is deprecated; pass a negative number to remove", stacklevel=2
            )
            count = min(0, count - self.get_seq_length())
        if count < 0:
            self._check_others_can_go_back(-count)
        for layer in self.layers:
            if count < 0 or getattr(
                layer, "record_past", True
            ):  # else there is nothing to take back, and it would raise
                layer.crop(count)

    def _check_others_can_go_back(self, count: int) -> None:
        """Raise before any layer is cropped by `count` tokens if one of transformers' own layers would, or would keep too few."""
        for number, layer in enumerate(self.layers):
            recorded = _tokens_to_go_back(layer)
            if recorded is not None and count > recorded:
                raise RuntimeError(
                    f"layer {number}, a {type(layer).__name__}, cannot go back {count} tokens but {recorded}: call "
                    "activate_past_recording() before the tokens come that may have to be removed, or reset() the cache"
                )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Batch row i becomes the former row `beam_idx[i]` (int64 [batch]), in every layer."""
        self._in_every_layer("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row `repeats` times, next to each other, in every layer; host pages are shared."""
        self._in_every_layer("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices` (int64 [new batch], or a bool mask over rows), in that order, in every layer."""
        self._in_every_layer("batch_select_indices", indices)

    def _in_every_layer(self, operation: str, argument: Any) -> None:
        """An operation on batch rows. If it breaks off when some layers have done it and some have not, that is remembered."""
        for number, layer in enumerate(self.layers):
            try:
                getattr(layer, operation)(argument)
            except BaseException:
                if number > 0 or not isinstance(layer, OasisLayer):  # an OasisLayer that fails is as it was
                    self._torn_by = operation
                raise

    def reset(self) -> None:
        """Forget all tokens, give their memory back and start the counters anew. Also after a forward that broke off."""
        for layer in self._oasis_layers:
            layer.reset()
        self._clock = PhaseClock()
        self._torn_by = None
        if not self._config_given:  # the next model may be another one
            self._layers, self.model_config = [], None
        elif self.model_config is not None:
            # transformers' own layers are made anew, because resetting leaves old tokens in some of them up to 5.17
            fresh = transformers_layers(self.model_config)
            self._layers = [
                old if isinstance(old, OasisLayer) else new for old, new in zip(self._layers, fresh, strict=True)
            ]

    def close(self) -> None:
        """Give back device and host memory; the cache cannot be used again. Idempotent."""
        if not self.runtime.closed:
            self.reset()
            self.runtime.close()

    def __enter__(self) -> OasisCache:
        self.runtime.check_open()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def row_roles(self, decide: torch.Tensor, predict: torch.Tensor | None = None) -> Iterator[None]:
        """Say which rows of the forwards inside choose blocks, where not all new tokens are worth it.

        Without it every row of a sparse forward decides which blocks attention reads, drafts that will be rejected too: they share
        the budget.

        Args:
            decide: [batch, rows] bool: rows whose blocks attention reads; at least one in each batch row.
            predict: [batch, rows] bool: rows that rank blocks for the next step. Default: all.

        Raises:
            ValueError: A shape or dtype is wrong, or a batch row has no row that decides; later, in attention: a sparse forward of
                another size.
        """
        if predict is None and isinstance(decide, torch.Tensor):
            predict = torch.ones_like(decide)
        if not (isinstance(decide, torch.Tensor) and isinstance(predict, torch.Tensor)):
            raise ValueError(f"row_roles takes tensors, got {type(decide).__name__} and {type(predict).__name__}")
        if decide.dim() != 2 or decide.shape != predict.shape or {decide.dtype, predict.dtype} != {torch.bool}:
            raise ValueError(
                f"row_roles takes two bool tensors [batch, rows], got {decide.dtype} {tuple(decide.shape)} and {predict.dtype} "
                f"{tuple(predict.shape)}"
            )
        if not bool((decide.any(1) & predict.any(1)).all()):
            raise ValueError("row_roles: every batch row needs a row that decides and one that predicts")
        before, self.runtime.roles = self.runtime.roles, RowRoles(decide, predict)
        try:
            yield
        finally:
            self.runtime.roles = before

    def save(self, path: str | os.PathLike[str], *, model: PreTrainedModel | None = None) -> None:
        """Write the cache's content to a file that `load` reads: safetensors, never pickled, the block index included.

        The file appears whole or not at all. The cache stays as it is, and what rests on disk is copied without coming to memory
        all at once.

        Args:
            path: The file; one that exists is replaced.
            model: The model whose tokens these are. If given, the file also tells it from others of the same config.

        Raises:
            OSError: The file cannot be written. One that was there before still is.
            RuntimeError: The cache is closed, or an earlier forward was interrupted.
            TypeError: A layer of transformers holds what cannot be saved.
        """
        self.runtime.check_open()
        self._check_complete()
        save_layers(os.fspath(path), self.layers, self.config, self.model_config, model)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | PretrainedConfig | None = None,
        *,
        device: torch.device | str | None = None,
        **overrides: Any,
    ) -> OasisCache:
        """A cache with the content of a saved one; its blocks stay in the file until they are fetched.

        What is read at once (index, working set, tables) is checked at once, blocks when they come. Any number of caches and
        processes may read one file, which must not be changed while they do.

        Args:
            path: A file that `save` wrote.
            model: The model that will use the cache, or its config. May be left out only if the saving cache knew none.
            device: Where the cache's tensors shall be; by default where they were.
            **overrides: Settings of this process: `max_host_bytes`, `spill`, `engine`, `trace`, `stream_tokens`, `lookahead`,
                `max_fetch`, `spare_blocks`, `on_miss`. All others are those of the saved cache.

        Raises:
            ValueError: The file is no saved cache, is damaged, of another version, or of another model: the message says what
                differs. Or an override would change what was saved.
            OSError: The file cannot be read. Later, from a forward: it was damaged where blocks lie.
        """
        file = open_saved(os.fspath(path))
        try:
            model_config = check_model(file, model)
            cache = object.__new__(cls)
            cache._begin(config_of(file, overrides), model_config, tiered=True)
            if model_config is None:
                cache._layers = [OasisLayer(cache.runtime) for _ in file.description["layers"]]
            restore_layers(file, cache._layers, None if device is None else torch.device(device))
        except BaseException:
            file.close()
            raise
        return cache

    def stats(self) -> OasisStats:
        """What the cache did since construction or `reset()`, and what it holds now. Waits for the device.

        Returns:
            A snapshot that does not change any more; bytes, tokens, blocks and seconds, as `OasisStats` says.
        """
        layers = self._oasis_layers
        counters = [layer.counters for layer in layers]
        forwards = {phase: max((c.forwards[phase] for c in counters), default=0) for phase in PHASES}
        parts = tuple(layer.stats(number) for number, layer in enumerate(self.layers) if isinstance(layer, OasisLayer))
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        memory, pools = self.runtime.memory, self.runtime.pools
        return OasisStats(
            steps=max((sum(c.forwards.values()) for c in counters), default=0),
            prefill_steps=forwards["prefill"],
            dense_steps=forwards["dense"],
            sparse_steps=forwards["sparse"],
            streamed_steps=forwards["streamed"],
            fallback_steps=max((c.fallbacks for c in counters), default=0),
            blocks_read=sum(c.blocks_read for c in counters),
            tokens_read_max=max((c.tokens_read_max for c in counters), default=0),
            prefetched=sum(int(c.prefetched) for c in counters),
            dropped=sum(c.dropped for c in counters),
            other_device_bytes=sum(map(other_bytes, self.layers)),
            host_bytes_reserved=memory.reserved_bytes,
            disk_bytes_read=pools.bytes_read if pools is not None else 0,
            disk_bytes_written=pools.bytes_written if pools is not None else 0,
            page_hits=pools.page_hits if pools is not None else 0,
            page_misses=pools.page_misses if pools is not None else 0,
            pinned=memory.pinned_bytes == memory.reserved_bytes if memory.reserved_bytes else None,
            seconds=dict(self._clock.seconds),
            tokens=dict(self._clock.tokens),
            context_tokens=max((layer.get_seq_length() for layer in layers), default=0),
            oasis_layers=len(layers),
            other_layers=len(self.layers) - len(layers),
            warnings=tuple(self.runtime.messages),
            layers=parts,
            **sums,
        )

    @staticmethod
    def plan(
        model_config: PretrainedConfig,
        *,
        context: int,
        batch: int = 1,
        new_tokens: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        weights: bool | int = True,
        hit_rate: float | None = None,
        config: OasisConfig | None = None,
        **overrides: Any,
    ) -> CapacityPlan:
        """What a cache with these settings needs for a model, and what fits. Takes no memory worth speaking of.

        Args:
            model_config: The model's config.
            context: Tokens read in one forward.
            batch: Sequences.
            new_tokens: Tokens decoded behind them, one by one.
            dtype: Of weights and KV.
            device: "cuda" or "cpu"; the index lies differently on them, and by default only a GPU prefetches.
            device_bytes, host_bytes: Limits to fit into; None: none.
            weights: Whether the device holds the weights too, in `dtype`, or how many bytes it holds of them.
            hit_rate: Share of selected blocks that is resident, as `stats().hit_rate` measured it on such a task.
            config: Settings; the defaults if None.
            **overrides: Fields of `OasisConfig` to set on top.

        Raises:
            ValueError: A count or an option is out of range, or the model's sizes cannot be found out.
        """
        from oasis_cache.plan import plan_capacity  # builds caches itself

        settings = OasisConfig.from_options(config, overrides)
        return plan_capacity(
            model_config,
            settings,
            context,
            batch,
            new_tokens,
            dtype,
            device,
            device_bytes,
            host_bytes,
            weights,
            hit_rate,
        )

    @property
    def trace(self) -> dict[int, list[StepTrace]]:
        """The sparse steps of each layer since construction or `reset()`, by layer number; empty without `trace=True`.

        Blocks are int32 [batch, kv_heads, slots] per step, on the CPU; see `StepTrace`.
        """
        return {
            number: list(layer.trace)
            for number, layer in enumerate(self.layers)
            if isinstance(layer, OasisLayer) and layer.trace
        }

    def bytes_held(self) -> dict[str, int]:
        """Bytes by what holds them: "working set" and "index" of the OasisLayers on the device, "host tier", and the class name of
        each kind of transformers' own layers. Does not wait for the device."""
        held = {"working set": 0, "index": 0, "host tier": 0}
        for layer in self.layers:
            if isinstance(layer, OasisLayer):
                held["working set"] += layer.device_bytes
                held["index"] += layer.index_bytes
                held["host tier"] += layer.host_bytes
            others = other_bytes(layer)
            if others:
                kind = "recurrent state" if isinstance(layer, OasisLayer) else type(layer).__name__
                held[kind] = held.get(kind, 0) + others
        return held

    def __repr__(self) -> str:
        return as_text(summary(self.stats(), self.config, self.runtime.closed))

    def _repr_html_(self) -> str:
        return as_html(summary(self.stats(), self.config, self.runtime.closed))


OasisCache.update = torch.compiler.disable(OasisCache.update)  # type: ignore[method-assign] # state of Python: nothing to trace


def cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """A cache under the name that this release of transformers gives it; the older name still works, with a warning."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def transformers_layers(model_config: PretrainedConfig) -> list[Any]:
    """The cache layers that transformers itself would use for a model.

    Raises:
        ValueError: The config is none, or has a layer type that the installed transformers does not know.
    """
    if not isinstance(model_config, PretrainedConfig):
        raise ValueError(f"model_config must be a model's config (model.config), got {type(model_config).__name__}")
    try:
        return DynamicCache(config=model_config).layers
    except KeyError as error:
        name = type(model_config).__name__
        raise ValueError(f"layer type {error} of {name} is not known to the installed transformers") from error


def _how_to_go_on(past: int) -> str:
    return (
        f"The cache holds {past} tokens: pass the ids of the whole sequence, at least one more than that, or only new ids together "
        "with an attention_mask over past and new tokens; or reset() the cache"
    )


def _covered_tokens(local: dict[str, Any]) -> int:
    """Tokens that the attention mask of a running `generate` covers, given the local variables of its loop; -1: unknown."""
    arguments = local.get("model_kwargs") or {}
    mask = arguments.get("decoder_attention_mask" if "encoder_outputs" in arguments else "attention_mask")
    if isinstance(mask, torch.Tensor):
        return mask.shape[1]
    # from 5.24 on a mask of ones is taken away, and its length noted here
    return int(getattr(local.get("generation_config"), "_mask_length", -1))


def _config_of_calling_model() -> PretrainedConfig | None:
    """The config of the model on whose behalf the cache is being used: the nearest one up the call stack.

    A cache handed to `generate` or to a model is told of everything but its model; yet the model's layer kinds decide which cache
    layers are right. The look costs microseconds and happens only while the cache has no layers.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            return None
        if "self" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                return owner.config
    return None


@functools.cache
def _positive_crop_is_a_length() -> bool:
    """Whether the installed transformers takes `crop(n)` with n > 0 as a length to keep (until 5.19)."""
    layer = DynamicLayer()
    tokens = torch.zeros(1, 1, 2, 1)
    layer.update(tokens, tokens)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer.crop(1)
    except ValueError:
        return False
    return layer.get_seq_length() == 1


def _tokens_to_go_back(layer: Any) -> int | None:
    """How many tokens a layer of transformers' own can be cropped by and still hold what the next forward reads; None: any number.

    A window that was exceeded and convolution states hold no more than they need, unless they record their past.
    """
    recording = getattr(layer, "record_past", None)
    if recording is None:
        return None
    kernels = [size for size in getattr(layer, "conv_kernel_size", {}).values() if size is not None]
    spare: list[int] = []
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        if not recording:
            return 0
        held = [state.shape[-1] for state in layer.conv_states.values() if state is not None]
        spare += [have - need for have, need in zip(held, kernels, strict=False)]
    window = getattr(layer, "sliding_window", None)
    if window is not None and int(layer.get_seq_length()) >= int(window):
        if not recording:
            return 0
        spare.append(layer.keys.shape[-2] - (int(window) - 1))
    return max(0, min(spare)) if spare else None


def other_bytes(layer: Any, itemsize: Callable[[torch.dtype], int] = lambda dtype: dtype.itemsize) -> int:
    """Bytes of the tensors that one of transformers' own layers holds, or one of ours beside keys and values."""
    if isinstance(layer, OasisLayer):
        items: list[Any] = layer.states if isinstance(layer, OasisHybridLayer) else []
    else:
        items = []
        for value in vars(layer).values():
            items += (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
    return sum(item.numel() * itemsize(item.dtype) for item in items if isinstance(item, torch.Tensor))
