"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a cache of latents that every query head expands.

Such a model caches one compressed vector of keys and values and one rotary key per token, and its method `expand_kv` makes every
head's keys and values of them: linearly, head by head. So a query can be turned round instead: one that absorbed the expansion
meets the latents themselves, all heads the same ones, and what attention sums up are latents, of which only the sums are
expanded. To a sparse step a layer of latents is therefore one KV head, whose keys are both parts of a latent and whose values are
the first. A streamed forward has rows enough to expand the pieces, as the model does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from oasis_cache.attention import KVView, replace_method

_EXPAND = "expand_kv"
_MAX_FRAMES = 8  # from an update of the cache up to the attention module that asked for it


def adopt_caller(frame: FrameType | None, keys: torch.Tensor) -> bool:
    """Whether an attention module up the call stack is storing latents; its `expand_kv` then accepts views of them.

    Args:
        frame: The frame that updates the cache.
        keys: [batch, heads, rows, dim], what is being stored; latents have one head.
    """
    if keys.shape[1] != 1:
        return False
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if "self" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and hasattr(module, _EXPAND):
                owner = next(each for each in type(module).__mro__ if _EXPAND in vars(each))
                replace_method(owner, _EXPAND, _taking_views)
                return True
        frame = frame.f_back
    return False


def _taking_views(original: Callable) -> Callable:
    """`expand_kv` that leaves views of latents as they are, and remembers what they are to be expanded by."""

    @functools.wraps(original)
    def expand_kv(self: torch.nn.Module, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[Any, Any]:
        if isinstance(kv_nope, KVView) and isinstance(k_rot, KVView) and kv_nope.layer is k_rot.layer:
            return _expanded_views(self, original, kv_nope, k_rot)
        return original(self, kv_nope, k_rot)

    return expand_kv


def _views_eagerly(
    module: torch.nn.Module, original: Callable, latents: KVView, rotary: KVView
) -> tuple[ExpandedView, ExpandedView]:
    expansion = Expansion(module, original, latents.shape[3], rotary.shape[3])
    sizes = expansion.sizes(latents.dtype, latents.device)
    views = []
    for part, dim in (("keys", sizes.key_dim), ("values", sizes.value_dim)):
        view = ExpandedView(latents.layer, part, (latents.shape[0], sizes.query_heads, latents.shape[2], dim))
        view.expansion, view.latents, view.rotary = expansion, latents, rotary
        views.append(view)
    return views[0], views[1]


_expanded_views = torch.compiler.disable(_views_eagerly)  # views are Python's: nothing to trace


class ExpandedView(KVView):
    """Keys or values of all query heads, [batch, query_heads, tokens, dim], as they would be expanded from a layer's latents.

    The dispatcher has attention computed on the latents. Any other operation gets the tensor, expanded from all of them.
    """

    latents: KVView
    rotary: KVView

    def materialise(self, cause: str) -> torch.Tensor:
        if self.dense is None:
            assert self.expansion is not None
            keys, values = self.expansion.expand(self.latents.materialise(cause), self.rotary.materialise(cause))
            self.dense = keys if self.part == "keys" else values
        return self.dense


@dataclass(frozen=True)
class Sizes:
    """What an attention module makes of latents.

    Attributes:
        query_heads, key_dim, value_dim: Of the keys and values.
        by_weights: Whether the module's weights lay as `Expansion` reads them, when it was first seen.
        linear: Whether it then expanded linearly, but for a bias.
    """

    query_heads: int
    key_dim: int
    value_dim: int
    by_weights: bool
    linear: bool


_sizes: weakref.WeakKeyDictionary[torch.nn.Module, Sizes] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Expansion:
    """How an attention module makes keys and values of latents.

    Attributes:
        module: The attention module.
        function: Its class's own `expand_kv`.
        latent_dim, rotary_dim: Widths of the two parts of a latent.
    """

    module: torch.nn.Module
    function: Callable
    latent_dim: int
    rotary_dim: int

    def expand(self, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 1, tokens, latent_dim] and [batch, 1, tokens, rotary_dim] -> keys, values [batch, query_heads, tokens, dim]."""
        keys, values = self.function(self.module, latents, rotary)
        return keys, values

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries that meet latents: [batch, query_heads, rows, key_dim] -> [..., rows, latent_dim + rotary_dim]."""
        weights = self._weights(query)
        if weights is not None:
            width = query.shape[3] - self.rotary_dim
            return torch.cat([query[..., :width] @ weights[:, :width], query[..., width:]], dim=-1)
        keys, _, _ = self._of_basis(query)
        return query @ keys.transpose(-1, -2)

    def values_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Values of weighted sums of latents: [batch, query_heads, rows, latent_dim] -> [batch, query_heads, rows, value_dim]."""
        weights = self._weights(sums)
        if weights is not None:
            value_dim = self.sizes(sums.dtype, sums.device).value_dim
            return sums @ weights[:, -value_dim:].transpose(-1, -2)
        _, values, offset = self._of_basis(sums)
        return sums @ values[:, :, : self.latent_dim] + offset

    def _of_basis(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the unit vectors expand to: as good as the weights, wherever and however the module keeps those.

        Keys and values [1, query_heads, latent_dim + rotary_dim, dim] less what zero expands to, as by the bias of an adapter,
        and that of the values, [1, query_heads, 1, value_dim]: shares of attention sum up to 1, so sums of values contain it
        once. That of the keys raises all scores of a row alike, and is none of attention's business.
        """
        width = self.latent_dim + self.rotary_dim
        rows = torch.eye(width + 1, width, dtype=like.dtype, device=like.device)[None, None]  # the last one: zero
        keys, values = self.expand(rows[..., : self.latent_dim], rows[..., self.latent_dim :])
        offset = values[:, :, -1:]
        return (keys - keys[:, :, -1:])[:, :, :-1], (values - offset)[:, :, :-1], offset

    def is_linear(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the module, when first seen, expanded sums of latents to sums, but for a bias; else no query absorbs it."""
        return self.sizes(dtype, device).linear

    def _weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """[query_heads, width of a key less its rotary part + value_dim, latent_dim], a view of the weights, or None."""
        sizes, linear = self.sizes(like.dtype, like.device), self._plain_linear(like.device)
        if linear is None or not sizes.by_weights:
            return None
        return linear.weight.detach().unflatten(0, (sizes.query_heads, -1))

    def sizes(self, dtype: torch.dtype, device: torch.device) -> Sizes:
        """Sizes of what the module makes; found out once, by having it expand one latent."""
        if self.module not in _sizes:
            generator = torch.Generator().manual_seed(0)
            latent, rotary = (
                torch.randn(1, 1, 1, dim, generator=generator).to(device, dtype)
                for dim in (self.latent_dim, self.rotary_dim)
            )
            with torch.no_grad():
                keys, values = self.expand(latent, rotary)
                by_weights = self._lie_so(latent, rotary, keys, values)
                linear = by_weights or self._adds_up(latent, rotary, keys, values)
            _sizes[self.module] = Sizes(keys.shape[1], keys.shape[3], values.shape[3], by_weights, linear)
        return _sizes[self.module]

    def _lie_so(self, latent: torch.Tensor, rotary: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the rows of `kv_b_proj` are, head by head, those of key and value, and a key ends in the rotary part."""
        linear = self._plain_linear(latent.device)
        heads, width = keys.shape[1], keys.shape[3] - self.rotary_dim
        if linear is None or linear.weight.shape != (heads * (width + values.shape[3]), self.latent_dim) or width <= 0:
            return False
        expanded = latent @ linear.weight.detach().unflatten(0, (heads, -1)).transpose(-1, -2)
        expected = torch.cat([expanded[..., :width], rotary.expand(-1, heads, -1, -1)], dim=-1)
        return _agree(keys, expected) and _agree(values, expanded[..., width:])

    def _adds_up(self, latent: torch.Tensor, rotary: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether keys and values of a latent are those of its parts, as nearly as weights and activations of 8 bits allow."""
        of_keys, of_values, offset = self._of_basis(latent)
        zero, _ = self.expand(torch.zeros_like(latent), torch.zeros_like(rotary))
        expected = torch.cat([latent, rotary], dim=-1) @ of_keys + zero
        return _agree(keys, expected, 0.1) and _agree(values, latent @ of_values[:, :, : self.latent_dim] + offset, 0.1)

    def _plain_linear(self, device: torch.device) -> torch.nn.Linear | None:
        """`kv_b_proj` if it is a plain matrix now: with no adapter, quantisation, hook or shard, and on the device."""
        linear = getattr(self.module, "kv_b_proj", None)
        if type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter:
            return None
        hooked = linear._forward_hooks or linear._forward_pre_hooks or "_hf_hook" in vars(linear)
        if hooked or linear.weight.device != device or getattr(linear, "bias", None) is not None:
            return None
        return linear


def _agree(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.02) -> bool:
    return bool((got - expected).norm() <= tolerance * expected.norm())
