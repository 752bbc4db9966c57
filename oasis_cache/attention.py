"""How attention meets the cache: `KVView`s in place of keys and values, and the dispatcher that recognises them.

`OasisLayer.update` returns plain tensors whenever attention reads everything anyway, so that the model's own attention runs
untouched, and `KVView`s for sparse and streamed forwards. The dispatcher stands in front of every attention function that
`AttentionInterface.get_interface` hands out; it computes attention for views and passes everything else through. Any other
operation on a view gets the exact dense tensor, once warned about and counted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

if TYPE_CHECKING:
    from oasis_cache.latents import Expansion
    from oasis_cache.layer import OasisLayer

# Names that an eager attention function may use and still be plain scaled dot product attention, sinks and softcap included. One
# that uses others (a bias of its own, say) gets the dense tensors.
_PLAIN_EAGER_NAMES = frozenset(
    "repeat_kv num_key_value_groups torch matmul transpose nn functional F softmax float32 dtype to dropout training contiguous "
    "shape size sinks reshape expand cat max values tanh head_dim scaling".split()
)
_PLAIN_EAGER_ARGUMENTS = frozenset(
    "module query key value attention_mask scaling dropout softcap s_aux sliding_window kwargs is_causal position_bias".split()
)
# Arguments that change what attention computes and that only the model's own function can honour.
_DENSE_ONLY_ARGUMENTS = ("head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")


class KVView(torch.Tensor):
    """Keys or values of a layer that stay where they are: a tensor of shape [batch, kv_heads, tokens, dim] without storage.

    The dispatcher asks its layer for attention. Any other operation gets the exact dense tensor.
    """

    layer: OasisLayer
    part: str
    dense: torch.Tensor | None
    expansion: Expansion | None = None  # of views that stand for what is made of latents

    @staticmethod
    def __new__(cls, layer: OasisLayer, part: str, shape: tuple[int, ...]) -> KVView:
        sizes = layer.shape
        assert sizes is not None
        view = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=sizes.dtype, device=sizes.device)
        view.layer, view.part, view.dense = layer, part, None
        return view

    def __init__(self, layer: OasisLayer, part: str, shape: tuple[int, ...]) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def materialise(self, cause: str) -> torch.Tensor:
        """The exact dense tensor of this part; counted as a fallback of the layer and warned about once."""
        if self.dense is None:
            self.check_current()
            self.dense = self.layer.fall_back(self.part, cause)
        return self.dense

    def check_current(self) -> None:
        """Raise `RuntimeError` if the layer does not hold the tokens any more that this view stands for."""
        held = self.layer.get_seq_length()
        if self.shape[2] != held:
            raise RuntimeError(
                f"keys or values of an earlier forward, when the cache held {self.shape[2]} tokens; now it holds {held}. Views are "
                "good until the next forward or crop: copy what is to be kept"
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cause = f"the operation {func} on keys or values outside of attention"
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda v: v.materialise(cause), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override] # Tensor.__repr__ would materialise
        return f"KVView({self.part}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


@functools.cache
def plain_eager(function: Callable) -> bool:
    """Whether an eager attention function computes plain attention (softcap and sinks passed as arguments included)."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars:
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return set(code.co_names) <= _PLAIN_EAGER_NAMES and set(arguments) <= _PLAIN_EAGER_ARGUMENTS


def refusal(
    original: Callable, module: torch.nn.Module, arguments: dict[str, Any], rows: int, tokens: int
) -> str | None:
    """Why this call of `rows` new tokens on `tokens` cannot be computed from a view, in words, or None if it can."""
    name = getattr(original, "__name__", repr(original))
    if original not in (sdpa_attention_forward, flash_attention_forward, flex_attention_forward):
        if name != "eager_attention_forward" or not plain_eager(original):
            return f"attention function {original.__module__}.{name}, which oasis_cache does not know"
        sinks_of_module = "sinks" in original.__code__.co_names and getattr(module, "sinks", None) is not None
        if sinks_of_module and arguments.get("s_aux") is None:
            return f"attention function {original.__module__}.{name}, whose sinks are not passed to it"
    if arguments.get("output_attentions") or getattr(module.config, "output_attentions", False):
        return "output_attentions=True"
    for argument in _DENSE_ONLY_ARGUMENTS:
        if arguments.get(argument) is not None:
            return f"attention argument {argument}"
    bias = arguments.get("position_bias")
    if bias is not None and (original is flash_attention_forward or tuple(bias.shape[2:]) != (rows, tokens)):
        return f"a position bias of shape {tuple(bias.shape)}"
    return None


def dispatch(
    original: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with the signature of transformers' attention functions, for tensors and for views.

    Args:
        original: The attention function the model asked for; called for anything that is no view.
        query: [batch, query_heads, rows, key_dim].
        key, value: [batch, kv_heads, tokens, dim], tensors or `KVView`s of one layer.
        attention_mask: As the model passes it to `original`.

    Returns:
        Output [batch, rows, query_heads, value_dim] and None (or what `original` returns).

    Raises:
        ValueError: The module is in training mode: gradients do not flow through the cache.
    """
    if not isinstance(key, KVView):
        return original(module, query, key, value, attention_mask, *args, **kwargs)
    return _dispatch_view(original, module, query, key, value, attention_mask, *args, **kwargs)


def _dispatch_view_eagerly(
    original: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: KVView,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if module.training and torch.is_grad_enabled():
        raise ValueError("OasisCache does not carry gradients: call model.eval(), or train with use_cache=False")
    arguments = {**dict(zip(("scaling", "dropout"), args, strict=False)), **kwargs}
    cause = refusal(original, module, arguments, query.shape[2], key.shape[2])
    if cause is None and not (isinstance(value, KVView) and value.layer is key.layer):
        cause = "keys and values of different layers"
    if cause is None and key.layer.holds_latents and key.expansion is None:
        cause = "attention to latents that are not expanded"
    if cause is None and key.expansion is not None and not key.expansion.is_linear(query.dtype, query.device):
        cause = "an expansion of latents that is not linear"
    if cause is None and any(isinstance(view, KVView) and view.dense is not None for view in (key, value)):
        cause = "an operation on keys or values before attention"
    if cause is not None:
        value = value.materialise(cause) if isinstance(value, KVView) else value
        return original(module, query, key.materialise(cause), value, attention_mask, *args, **kwargs)
    key.check_current()
    scaling = arguments.get("scaling")
    is_causal = arguments.get("is_causal")
    out = key.layer.attend(
        query,
        attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=arguments.get("sliding_window") if original is flash_attention_forward else None,
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
        is_causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        expansion=key.expansion,
        position_bias=arguments.get("position_bias"),
    )
    return out, None


_dispatch_view = torch.compiler.disable(_dispatch_view_eagerly)  # state of Python: nothing to trace

_lock = threading.Lock()
_original_get_interface: Callable | None = None
_replaced: dict[tuple[type, str], Callable] = {}  # methods of models' classes that were replaced, and what they were


def _get_interface(self: AttentionInterface, attn_implementation: str, default: Callable) -> Callable:
    assert _original_get_interface is not None
    return _dispatcher(_original_get_interface(self, attn_implementation, default))


@functools.cache
def _dispatcher(original: Callable) -> Callable:
    return functools.partial(dispatch, original)


def install() -> None:
    """Put the dispatcher in front of transformers' attention functions. Idempotent; the first `OasisCache` calls it."""
    global _original_get_interface
    with _lock:
        if _original_get_interface is None:
            _original_get_interface = AttentionInterface.get_interface
            AttentionInterface.get_interface = _get_interface


def replace_method(owner: type, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Put `wrap(method)` in the place of a class's method, until `uninstall`. Idempotent."""
    with _lock:
        if (owner, name) not in _replaced:
            _replaced[owner, name] = original = vars(owner)[name]
            setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Take the dispatcher and what replaced models' methods away. Caches made before then work on, densely. Idempotent."""
    global _original_get_interface
    with _lock:
        if _original_get_interface is not None:
            AttentionInterface.get_interface = _original_get_interface
            _original_get_interface = None
            _dispatcher.cache_clear()
            plain_eager.cache_clear()
        for (owner, name), original in _replaced.items():
            setattr(owner, name, original)
        _replaced.clear()
