"""The device operations of a decode step: for each, the fastest version that the tensors' device has.

On NVIDIA and AMD devices these are Triton kernels (triton_ops/), which never wait for the device. On CPUs numba compiles what
PyTorch's operations are too many for (numba_ops.py), where it is installed. PyTorch (torch_ops.py and reference.py) serves the
rest, and what the kernels do not take: that is warned about once, and counted in `fallbacks`. Triton is imported with the
first tensor that needs it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import torch

from oasis_cache.kernels import encoding, reference, torch_ops
from oasis_cache.kernels.encoding import Encoding, decode, encode
from oasis_cache.kernels.encoding import gather_encoded as gather_encoded_by_host
from oasis_cache.kernels.limits import KERNEL_DTYPES, MASS_BLOCKS, MAX_DIM, MAX_SLOTS
from oasis_cache.kernels.torch_ops import attention
from oasis_cache.kernels.torch_ops import gather_blocks as gather_blocks_by_host

__all__ = [
    "Encoding",
    "attention",
    "decode",
    "delta_select",
    "encode",
    "exchange_blocks",
    "fallbacks",
    "gather_blocks",
    "gather_blocks_by_host",
    "gather_encoded",
    "gather_encoded_by_host",
    "interpreted",
    "numba_for",
    "score_int1",
    "score_int2",
    "score_minmax",
    "seal_blocks",
    "sparse_attention",
    "sparse_attention_with_mass",
    "top_blocks",
    "uses_triton",
    "write_pages",
]

fallbacks: Counter[str] = Counter()  # calls, by operation, that PyTorch served on a device that has kernels
_interpreting = False


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, tensors on the CPU go through the Triton kernels too, in Triton's interpreter: slow, for tests.

    Raises:
        RuntimeError: triton is missing, or was imported without TRITON_INTERPRET=1 in the environment.
    """
    global _interpreting
    triton = importlib.import_module("triton")
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is first imported")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on a device go through the Triton kernels."""
    return (device.type == "cuda" or (_interpreting and device.type == "cpu")) and _triton_ops() is not None


def numba_for(device: torch.device) -> ModuleType | None:
    """numba_ops where it serves tensors on a device, else None."""
    return _numba_ops() if device.type == "cpu" and not _interpreting else None


@functools.cache
def _numba_ops() -> ModuleType | None:
    try:
        return importlib.import_module("oasis_cache.kernels.numba_ops")
    except ImportError:  # numba is optional
        return None


@functools.cache
def _triton_ops() -> ModuleType | None:
    try:
        return importlib.import_module("oasis_cache.kernels.triton_ops")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        _warn_once("triton is not installed: PyTorch's operations take the place of its kernels, slower and with waits")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _serving(operation: str, tensor: torch.Tensor, fits: bool, sizes: str) -> ModuleType | None:
    """triton_ops where it shall serve, else None; falling back on a device that has kernels is said once and counted."""
    if not uses_triton(tensor.device):
        if tensor.device.type == "cuda":
            fallbacks[operation] += 1
        return None
    if not fits:
        fallbacks[operation] += 1
        _warn_once(f"{operation} has no kernel for {sizes}: PyTorch takes its place, slower")
        return None
    return _triton_ops()


def sparse_attention(
    queries: torch.Tensor,
    kv: torch.Tensor,
    key_dim: int,
    num_tokens: int,
    rows: int,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_of_slot: torch.Tensor | None = None,
    block_size: int = 16,
    window_start: int = 0,
    sliding_window: int | None = None,
    value_columns: slice | None = None,
) -> torch.Tensor:
    """`reference.sparse_attention`, its first result only, in the queries' dtype."""
    inputs = (queries, kv, key_dim, num_tokens, rows, scaling, mask, softcap, sinks)
    places = (block_of_slot, block_size, window_start, sliding_window)
    plain = all(part is None for part in (mask, softcap, sinks, block_of_slot, sliding_window))
    if plain and value_columns in (None, slice(key_dim, kv.shape[3])) and numba_for(queries.device) is not None:
        compiled = importlib.import_module("oasis_cache.kernels.numba_attention")
        if compiled.serves(queries, kv, key_dim):
            served: torch.Tensor = compiled.sparse_attention(*inputs[:6])
            return served
    ops = _attention_ops(queries, kv, key_dim, value_columns)
    if ops is None:
        return torch_ops.sparse_attention(*inputs, *places, value_columns)
    out: torch.Tensor = ops.sparse_attention(*inputs, *places)[0]
    return out


def sparse_attention_with_mass(
    queries: torch.Tensor,
    kv: torch.Tensor,
    key_dim: int,
    num_tokens: int,
    rows: int,
    scaling: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_of_slot: torch.Tensor | None = None,
    block_size: int = 16,
    window_start: int = 0,
    sliding_window: int | None = None,
    mass_block: int = 1,
    value_columns: slice | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.sparse_attention`: out, log-sum-exp, and the mass that each `mass_block` tokens received."""
    inputs = (queries, kv, key_dim, num_tokens, rows, scaling, mask, softcap, sinks)
    places = (block_of_slot, block_size, window_start, sliding_window)
    ops = _attention_ops(queries, kv, key_dim, value_columns, mass_block)
    if ops is None:
        return reference.sparse_attention(*inputs, *places, mass_block, value_columns)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ops.sparse_attention(*inputs, *places, mass_block)
    return result


def _attention_ops(
    queries: torch.Tensor, kv: torch.Tensor, key_dim: int, value_columns: slice | None, mass_block: int = 1
) -> ModuleType | None:
    value_dim = kv.shape[3] - key_dim
    fits = max(key_dim, value_dim) <= MAX_DIM and queries.dtype in KERNEL_DTYPES and mass_block in MASS_BLOCKS
    behind = value_columns is None or value_columns == slice(key_dim, kv.shape[3])
    what = f"widths {key_dim} and {value_dim}, mass of {mass_block}" if behind else "values inside the keys"
    return _serving("sparse_attention", queries, fits and behind, f"{queries.dtype}, {what}")


def _score(
    name: str, queries: torch.Tensor, arrays: tuple[torch.Tensor, ...], *options: object
) -> tuple[torch.Tensor, ...]:
    block_size = arrays[0].shape[3] if name != "score_minmax" else 1
    fits = queries.shape[3] <= MAX_DIM and block_size <= MAX_DIM and queries.dtype in KERNEL_DTYPES
    ops = _serving(name, queries, fits, f"{queries.dtype}, width {queries.shape[3]}, blocks of {block_size}")
    result: tuple[torch.Tensor, ...] = getattr(reference if ops is None else ops, name)(queries, *arrays, *options)
    return result


def score_int2(
    queries: torch.Tensor,
    codes: torch.Tensor,
    low: torch.Tensor,
    step: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_int2`: scores of all blocks per row, their maximum over rows, and the log-mass."""
    rows, best, log_mass = _score("score_int2", queries, (codes, low, step), group, scaling, visible)
    return rows, best, log_mass


def score_int1(
    queries: torch.Tensor,
    codes: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_int1`: scores of all blocks per row, their maximum over rows, and the log-mass."""
    rows, best, log_mass = _score("score_int1", queries, (codes, mean, deviation), group, scaling, visible)
    return rows, best, log_mass


def score_minmax(
    queries: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    group: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.score_minmax`: scores of all blocks per row, their maximum over rows, and the log-mass."""
    rows, best, log_mass = _score("score_minmax", queries, (low, high), group, scaling, visible)
    return rows, best, log_mass


def top_blocks(scores: torch.Tensor, count: int) -> torch.Tensor:
    """`reference.top_blocks`; of equal scores, where numba serves, the first ones, in ascending order."""
    compiled = numba_for(scores.device)
    chosen: torch.Tensor = (reference if compiled is None else compiled).top_blocks(scores, count)
    return chosen


def delta_select(
    wanted: torch.Tensor,
    block_of_slot: torch.Tensor,
    last_wanted: torch.Tensor,
    num_blocks: int,
    max_fetch: int,
    clock: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.delta_select`: blocks, slots and mask of the plan; with `clock` the tables are brought up to date in place."""
    slots = block_of_slot.shape[2]
    plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    compiled = numba_for(wanted.device)
    if compiled is not None and clock is not None:
        plan = compiled.delta_select(wanted, block_of_slot, last_wanted, num_blocks, max_fetch, clock)
        return plan
    ops = _serving("delta_select", wanted, 0 < wanted.shape[2] and slots <= MAX_SLOTS, f"{slots} slots")
    plan = (reference if ops is None else ops).delta_select(
        wanted, block_of_slot, last_wanted, num_blocks, max_fetch, clock
    )
    return plan


def gather_blocks(
    blocks: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, addresses: torch.Tensor, target: torch.Tensor
) -> None:
    """`reference.gather_blocks`: copy planned blocks from host pages into slots."""
    ops = _serving("gather_blocks", target, True, "") or numba_for(target.device) or torch_ops
    ops.gather_blocks(blocks, slots, mask, addresses, target)


def exchange_blocks(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    evicted: torch.Tensor,
    held: torch.Tensor,
    last_held: torch.Tensor,
    clock: int,
    buffer: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor:
    """`reference.plan_exchange`, then `swap_blocks`; returns what is left of the plan's mask: [batch, kv_heads, entries] bool."""
    compiled = numba_for(target.device)
    if compiled is not None:
        left: torch.Tensor = compiled.exchange_blocks(
            blocks, slots, mask, evicted, held, last_held, clock, buffer, target
        )
        return left
    most = max(blocks.shape[2], held.shape[2])
    ops = _serving("exchange_blocks", target, most <= MAX_SLOTS, f"{most} blocks")
    if ops is not None:
        rest: torch.Tensor = ops.exchange_blocks(blocks, slots, mask, evicted, held, last_held, clock, buffer, target)
        return rest
    taken, put = reference.plan_exchange(blocks, mask, evicted, held, last_held, clock)
    reference.swap_blocks(slots, taken, put, buffer, target)
    return mask & (taken < 0)


def seal_blocks(
    kv: torch.Tensor, key_dim: int, addresses: torch.Tensor, summaries: dict[str, torch.Tensor], first_block: int
) -> None:
    """`reference.seal_blocks`: write blocks to their host pages, and their summaries into the block index."""
    fits = kv.dtype in KERNEL_DTYPES and kv.shape[3] <= MAX_DIM
    ops = _serving("seal_blocks", kv, fits, f"{kv.dtype}, blocks of {kv.shape[3]}")
    (reference if ops is None else ops).seal_blocks(kv, key_dim, addresses, summaries, first_block)


def gather_encoded(
    blocks: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    addresses: torch.Tensor,
    target: torch.Tensor,
    how: Encoding,
) -> None:
    """`encoding.gather_encoded`: decode planned blocks from host pages into slots."""
    arguments = (blocks, slots, mask, addresses, target, how)
    fits = target.dtype in KERNEL_DTYPES and how.block_size <= MAX_DIM
    ops = _serving("gather_encoded", target, fits, f"{target.dtype}, blocks of {how.block_size}")
    if ops is None and numba_for(target.device) is not None and target.dtype in (torch.float32, torch.bfloat16):
        ops = importlib.import_module("oasis_cache.kernels.numba_encoding")
    (ops or encoding).gather_encoded(*arguments)


def write_pages(pages: torch.Tensor, addresses: torch.Tensor) -> None:
    """`encoding.write_pages`: write encoded blocks to their host pages."""
    (_serving("write_pages", pages, True, "") or encoding).write_pages(pages, addresses)
