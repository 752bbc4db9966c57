"""What a model's cache will need in each tier, and what fits: `OasisCache.plan` and `oasis-cache plan`.

The layers themselves are asked: `model_sizes` gives each its shape, and `OasisLayer.forecast` says what it will hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from oasis_cache.blocks import LayerShape
from oasis_cache.clusters import segment_blocks
from oasis_cache.config import OasisConfig
from oasis_cache.formats import make_format
from oasis_cache.layer import OasisLayer
from oasis_cache.model_sizes import ModelSizes, model_sizes
from oasis_cache.packaged import PACKAGED, packaged_model_dir, why_not_found
from oasis_cache.reports import STDOUT, check_report_file, write_report

_LONGEST = 1 << 27  # tokens; the search for the largest context ends there


@dataclass(frozen=True)
class Needs:
    """Bytes of a cache that holds a context, in all layers.

    Attributes:
        working_set_bytes: Slots, window and staging on the device; of short contexts the dense buffer (`stats().device_bytes`).
        index_bytes: The block index on the device.
        other_device_bytes: Sliding windows, recurrent states and the like (`stats().other_device_bytes`).
        host_bytes: Blocks in the host tier.
        host_bytes_reserved: The slabs that they lie in: powers of two.
        dense_bytes: What `DynamicCache` would hold on the device instead.
    """

    working_set_bytes: int
    index_bytes: int
    other_device_bytes: int
    host_bytes: int
    host_bytes_reserved: int
    dense_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.working_set_bytes + self.index_bytes + self.other_device_bytes


@dataclass(frozen=True)
class CapacityPlan:
    """The answer of `OasisCache.plan`. Bytes are exact where a context is read in one forward and decoded token by token.

    Attributes:
        context, new_tokens, batch, dtype: As asked: tokens read at once, tokens decoded behind them, sequences, dtype of the KV.
        needs: For that.
        weight_bytes: Of the model's parameters; None: unknown, or not asked for.
        device_bytes, host_bytes: The limits given, or None.
        fits: Whether weights and cache fit the limits; None without limits. Activations are not counted.
        largest_context, largest_context_dense: Longest context that fits with this batch, with OasisCache and with DynamicCache;
            None without limits, 0 if none does. Rounded down to blocks.
        largest_batch: Most sequences of this context that fit; None without limits.
        device_token_bytes: What a further token costs on the device: index, and layers that are no OasisLayers.
        host_token_bytes: What it costs in the host tier.
        dense_token_bytes: What it would cost DynamicCache.
        prefetched_step_bytes: Most bytes that a decode step sends for by prediction (`max_fetch`).
        demanded_step_bytes: Most bytes that it waits for, if no selected block were resident.
        hit_rate: The share of selected blocks that is resident, as given (stats().hit_rate measures it), or None.
        step_bytes: Bytes waited for in a step at that hit rate, or None.
        sizes_from: "model": the model was built without memory and asked; "config": fields of its config.
    """

    context: int
    new_tokens: int
    batch: int
    dtype: str
    needs: Needs
    weight_bytes: int | None
    device_bytes: int | None
    host_bytes: int | None
    fits: bool | None
    largest_context: int | None
    largest_context_dense: int | None
    largest_batch: int | None
    device_token_bytes: int
    host_token_bytes: int
    dense_token_bytes: int
    prefetched_step_bytes: int
    demanded_step_bytes: int
    hit_rate: float | None
    step_bytes: int | None
    sizes_from: str

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain Python values, `needs` with its sum on the device."""
        fields = asdict(self)
        fields["needs"]["device_bytes"] = self.needs.device_bytes
        return fields


def plan_capacity(
    model_config: PretrainedConfig,
    config: OasisConfig,
    context: int,
    batch: int = 1,
    new_tokens: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    weights: bool | int = True,
    hit_rate: float | None = None,
) -> CapacityPlan:
    """See `OasisCache.plan`."""
    _check(1, context=context, batch=batch, device_bytes=device_bytes, host_bytes=host_bytes)
    _check(0, new_tokens=new_tokens)
    if hit_rate is not None and not 0.0 <= hit_rate <= 1.0:
        raise ValueError(f"hit_rate={hit_rate} must lie in [0.0, 1.0]")
    if not isinstance(weights, bool) and (not isinstance(weights, int) or weights < 0):
        raise ValueError(f"weights={weights!r} must be True, False or a number of bytes")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} must be 'cuda' or 'cpu'")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} must be a floating-point type")
    sizes = model_sizes(model_config, config, dtype)
    if weights is True:
        weight_bytes = None if sizes.weight_elements is None else sizes.weight_elements * dtype.itemsize
    else:
        weight_bytes = int(weights) or None
    beside = config.engine != "sync" and (config.engine != "auto" or device == "cuda")
    limits = [limit for limit in (device_bytes, host_bytes) if limit is not None]

    def needs_of(tokens: int, sequences: int) -> Needs:
        return needs(sizes, tokens, new_tokens, sequences, dtype, device, beside)

    def fits(asked: Needs) -> bool:
        on_device = asked.device_bytes + (weight_bytes or 0)
        return (device_bytes is None or on_device <= device_bytes) and (
            host_bytes is None or asked.host_bytes_reserved <= host_bytes
        )

    def fits_densely(asked: Needs) -> bool:
        return device_bytes is None or asked.dense_bytes + (weight_bytes or 0) <= device_bytes

    block_size, own = config.block_size, needs_of(context, batch)
    longest = _LONGEST // block_size
    further = 4 * segment_blocks(block_size) * block_size
    now, later = (needs_of(tokens, batch) for tokens in (1 << 20, (1 << 20) + further))
    step = further * batch
    prefetched, demanded = step_traffic(sizes, config, batch, dtype, device)
    return CapacityPlan(
        context=context,
        new_tokens=new_tokens,
        batch=batch,
        dtype=str(dtype).removeprefix("torch."),
        needs=own,
        weight_bytes=weight_bytes,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        fits=fits(own) if limits else None,
        largest_context=_largest(lambda n: fits(needs_of(n * block_size, batch)), longest) * block_size
        if limits
        else None,
        largest_context_dense=_largest(lambda n: fits_densely(needs_of(n * block_size, batch)), longest) * block_size
        if device_bytes is not None
        else None,
        largest_batch=_largest(lambda n: fits(needs_of(context, n)), 1 << 16) if limits else None,
        device_token_bytes=(later.device_bytes - now.device_bytes) // step,
        host_token_bytes=(later.host_bytes - now.host_bytes) // step,
        dense_token_bytes=(later.dense_bytes - now.dense_bytes) // step,
        prefetched_step_bytes=prefetched if beside else 0,
        demanded_step_bytes=demanded,
        hit_rate=hit_rate,
        step_bytes=None if hit_rate is None else round((1 - hit_rate) * demanded),
        sizes_from=sizes.source,
    )


def _check(least: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
            raise ValueError(f"{name}={count} must be an int of at least {least}")


def _largest(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest count from 1 to `at_most` that fits, if what fits at one count does at smaller ones; 0: none does."""
    low, high = 0, 1
    while high <= at_most and fits(high):
        low, high = high, 2 * high
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def needs(
    sizes: ModelSizes,
    context: int,
    new_tokens: int,
    batch: int,
    dtype: torch.dtype,
    device: str,
    beside: bool,
) -> Needs:
    """Bytes of a cache of such layers after a forward of `context` tokens and `new_tokens` of one."""
    parts = [0, 0, 0, 0]
    tokens = context + new_tokens
    other = sum(each.num_bytes(batch, tokens) for each in sizes.others)
    dense = other
    forecasts: dict[LayerShape, tuple[int, ...]] = {}  # most layers of a model are alike
    for layer in sizes.layers:
        shape = _shape(layer, batch, dtype, device)
        if shape not in forecasts:
            forecast = layer.forecast(shape, context, new_tokens, beside)
            forecasts[shape] = tuple(asdict(forecast).values())
        parts = [total + part for total, part in zip(parts, forecasts[shape], strict=True)]
        dense += batch * tokens * shape.token_bytes
    return Needs(parts[0], parts[1], other, parts[2], parts[3], dense)


def _shape(layer: OasisLayer, batch: int, dtype: torch.dtype, device: str) -> LayerShape:
    assert layer.shape is not None
    return replace(layer.shape, batch=batch, dtype=dtype, device=torch.device(device))


def step_traffic(
    sizes: ModelSizes, config: OasisConfig, batch: int, dtype: torch.dtype, device: str
) -> tuple[int, int]:
    """Most bytes per decode step from the host tier: by prediction, and on demand."""
    block_bytes = 0
    for layer in sizes.layers:
        shape = _shape(layer, batch, dtype, device)
        block_bytes += batch * shape.kv_heads * make_format(config.tier_dtype, shape, config.block_size).block_bytes
    demanded = config.num_slots * block_bytes if config.on_miss == "fetch" else 0
    return config.max_fetch_blocks * block_bytes, demanded


def describe(plan: CapacityPlan) -> str:
    """A plan for people."""
    needs = plan.needs
    rows: list[tuple[str, str]] = [
        ("context", f"{plan.context:,} tokens" + (f" and {plan.new_tokens:,} new ones" if plan.new_tokens else "")),
        ("sequences", f"{plan.batch:,}"),
        ("weights", "not counted" if plan.weight_bytes is None else size(plan.weight_bytes)),
        ("", ""),
        ("on the device", size(needs.device_bytes)),
        ("  slots, window, staging", size(needs.working_set_bytes)),
        ("  block index", size(needs.index_bytes)),
        ("  other layers", size(needs.other_device_bytes)),
        ("  a further token", f"{plan.device_token_bytes:,} B"),
        ("in host memory", f"{size(needs.host_bytes)}, {size(needs.host_bytes_reserved)} reserved"),
        ("  a further token", f"{plan.host_token_bytes:,} B"),
        ("DynamicCache, all on the device", size(needs.dense_bytes)),
        ("  a further token", f"{plan.dense_token_bytes:,} B"),
        ("", ""),
        ("prefetched per step, at most", size(plan.prefetched_step_bytes)),
        ("waited for per step, at most", size(plan.demanded_step_bytes)),
    ]
    if plan.step_bytes is not None:
        rows.append((f"waited for at hit rate {plan.hit_rate}", size(plan.step_bytes)))
    if plan.fits is not None:
        limits = [
            f"{size(limit)} of {name}"
            for limit, name in ((plan.device_bytes, "device"), (plan.host_bytes, "host memory"))
            if limit is not None
        ]
        rows += [("", ""), (f"fits {' and '.join(limits)}", "yes" if plan.fits else "NO")]
        rows.append(("largest context, this many sequences", f"{plan.largest_context:,} tokens"))
        if plan.largest_context_dense is not None:
            rows.append(("  with DynamicCache", f"{plan.largest_context_dense:,} tokens"))
        rows.append(("most sequences of this context", f"{plan.largest_batch:,}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves at least one."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):,.2f} {unit}"
    return f"{num_bytes:,} B"


def parse_size(words: str) -> int:
    """Bytes of "24GiB", "24G", "512 MB", "1e9": K, M, G and T are powers of 1,000 before "B", else of 1,024.

    Raises:
        ValueError: It is none of these.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?b?)\s*", words.lower())
    if match is None:
        raise ValueError(f"{words!r} is no size: write it as 24GiB, 512MB or 1000000000")
    power = " kmgt".index(match[2] or " ")
    return round(float(match[1]) * (1000 if match[3] == "b" else 1024) ** power)


@dataclass(frozen=True)
class PlanOptions:
    """What `oasis-cache plan` was asked; see `OasisCache.plan`.

    Attributes:
        model: Folder or hub name, or "packaged".
        settings: Fields of `OasisConfig`.
        json_file: Where the plan goes as JSON: a path, "-" for the standard output instead of the table, or None.
    """

    model: str
    context: int
    batch: int
    new_tokens: int
    dtype: str
    device: str
    device_bytes: int | None
    host_bytes: int | None
    weights: bool | int
    hit_rate: float | None
    settings: dict[str, Any]
    json_file: str | None


def run_plan(options: PlanOptions) -> int:
    """Print a plan; returns the exit status: 0, or 1 if it does not fit the limits given.

    Raises:
        ValueError: An option is wrong, or there is no such model.
    """
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={options.dtype!r} must be a floating-point type of PyTorch, such as bfloat16")
    check_report_file(options.json_file)
    plan = plan_capacity(
        _load_config(options.model),
        OasisConfig.from_options(None, options.settings),
        options.context,
        options.batch,
        options.new_tokens,
        dtype,
        options.device,
        options.device_bytes,
        options.host_bytes,
        options.weights,
        options.hit_rate,
    )
    if options.json_file != STDOUT:
        print(describe(plan))
    write_report({"model": options.model, "settings": options.settings, **plan.as_dict()}, options.json_file)
    return 1 if plan.fits is False else 0


def _load_config(model: str) -> PretrainedConfig:
    if model == PACKAGED:
        model = str(packaged_model_dir())
    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        raise ValueError(
            f"there is no config of a model at {model!r}: {why_not_found(model, error)} Give a folder with config.json, a "
            "hub name that can be downloaded from here or was before, or: packaged"
        ) from error
