"""Every kernel configuration that can be launched, as calls with tensors on the meta device: the launchers' tables, spelt out.

A configuration of the attention kernel is one of its tilings with any choice of features. All tilings are here, plain and with
everything at once, and all features one by one; their whole product is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from oasis_cache.kernels import triton_ops
from oasis_cache.kernels.encoding import ENCODINGS, Encoding
from oasis_cache.kernels.limits import MAX_SLOTS
from oasis_cache.kernels.triton_ops.score_minmax import TILE_BLOCKS as MINMAX_BLOCKS
from oasis_cache.kernels.triton_ops.score_minmax import TILE_ROWS as MINMAX_ROWS
from oasis_cache.kernels.triton_ops.score_packed import TILE_ROWS as PACKED_ROWS
from oasis_cache.kernels.triton_ops.sparse_attention import TILINGS
from tests.kernels.recording import Launch, meta

BATCH, KV_HEADS, NUM_BLOCKS, NUM_SLOTS, NUM_TOKENS = 2, 8, 9000, 124, 2144
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class Configuration:
    """A call whose launches are compiled.

    Attributes:
        name: Unique.
        call: Starts the kernels.
        main: What a decode step of a common model runs: compiled for every target, and without a spilled register.
        only: The kernel to compile; None: all that the call starts.
        changes: Arguments of the launch to replace.
    """

    name: str
    call: Callable[[], Any]
    main: bool = False
    only: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def takes(self, launch: Launch) -> bool:
        """Whether a launch of the call is to be compiled."""
        return self.only in (None, launch.name)


def attention(key_dim: int, value_dim: int, dtype: torch.dtype, query_rows: int, **options: Any) -> Callable[[], Any]:
    queries = meta(BATCH, KV_HEADS, query_rows, key_dim, dtype=dtype)
    kv = meta(BATCH, KV_HEADS, NUM_TOKENS + 32, key_dim + value_dim, dtype=dtype)
    rows = query_rows // 4
    return lambda: triton_ops.sparse_attention(queries, kv, key_dim, NUM_TOKENS, rows, 0.1, **options)


def attention_features(query_rows: int) -> dict[str, dict[str, Any]]:
    shape = (BATCH, KV_HEADS, query_rows, NUM_TOKENS)
    table = meta(BATCH, KV_HEADS, NUM_SLOTS, dtype=torch.int64)
    features: dict[str, dict[str, Any]] = {
        "bool mask": {"mask": meta(*shape, dtype=torch.bool)},
        "added mask": {"mask": meta(*shape, dtype=torch.float32)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": meta(KV_HEADS, 4)},
        "table": {"block_of_slot": table},
        "window": {"sliding_window": 1000},
        "table and window": {"block_of_slot": table, "sliding_window": 1000},
        "mass of blocks": {"mass_block": 16},
        "mass of tokens": {"mass_block": 1},
    }
    features["everything"] = {
        name: value for options in list(features.values())[1:-1] for name, value in options.items()
    }
    return features


def attention_configurations() -> list[Configuration]:
    found = []
    for (key_pad, value_pad, element_size, many), tiling in TILINGS.items():
        if element_size == 4 and many:
            assert tiling == TILINGS[key_pad, value_pad, 4, False]
            continue
        query_rows = 32 if many else 8
        name = f"attention {key_pad}+{value_pad} {DTYPES[element_size]} rows {query_rows}".replace("torch.", "")
        is_main = element_size == 2 and key_pad == value_pad and (not many or key_pad == 128)
        call = attention(key_pad, value_pad, DTYPES[element_size], query_rows)
        found.append(Configuration(name, call, main=is_main))
        if is_main:
            options = attention_features(query_rows)["everything"]
            call = attention(key_pad, value_pad, DTYPES[element_size], query_rows, **options)
            found.append(Configuration(f"{name} everything", call))
    for feature, options in attention_features(8).items():
        if feature != "everything":
            found.append(Configuration(f"attention with {feature}", attention(128, 128, torch.bfloat16, 8, **options)))
    found.append(Configuration("attention float16", attention(128, 128, torch.float16, 8)))
    found.append(Configuration("attention 80+80", attention(80, 80, torch.bfloat16, 8)))
    found.append(Configuration("attention 192+128", attention(192, 128, torch.bfloat16, 8)))
    return found


def packed(
    bits: int, dim: int, query_rows: int, dtype: torch.dtype, block_size: int = 16, visible: bool = False
) -> Callable[[], Any]:
    score = triton_ops.score_int2 if bits == 2 else triton_ops.score_int1
    queries = meta(BATCH, KV_HEADS, query_rows, dim, dtype=dtype)
    codes = meta(BATCH, KV_HEADS, NUM_BLOCKS, block_size, -(-dim * bits // 8), dtype=torch.uint8)
    low = meta(BATCH, KV_HEADS, NUM_BLOCKS, dim)
    mask = meta(BATCH, NUM_BLOCKS, block_size, dtype=torch.bool) if visible else None
    return lambda: score(queries, codes, low, low, 4, 0.1, mask)


def minmax(dim: int, query_rows: int, dtype: torch.dtype, visible: bool = False) -> Callable[[], Any]:
    queries, bounds = (meta(BATCH, KV_HEADS, size, dim, dtype=dtype) for size in (query_rows, NUM_BLOCKS))
    mask = meta(BATCH, NUM_BLOCKS, 16, dtype=torch.bool) if visible else None
    return lambda: triton_ops.score_minmax(queries, bounds, bounds, 4, 0.1, mask)


def scoring_configurations() -> list[Configuration]:
    found = []
    for element_size, tile_rows in PACKED_ROWS.items():
        dtype = DTYPES[element_size]
        for rows in tile_rows:
            for dim in (64, 128, 256) if element_size == 2 and rows != 16 else (128,):
                is_main = dim == 128 and rows == 8 and element_size == 2
                name = f"int2 {dim} {dtype} rows {rows}".replace("torch.", "")
                found.append(Configuration(name, packed(2, dim, rows, dtype), main=is_main))
    found.append(Configuration("int1 128", packed(1, 128, 8, torch.bfloat16)))
    for block_size in (12, 256):
        found.append(Configuration(f"int2 blocks of {block_size}", packed(2, 128, 8, torch.bfloat16, block_size)))
    found.append(Configuration("int2 80 visible", packed(2, 80, 8, torch.bfloat16, visible=True)))
    for key_pad, element_size in MINMAX_BLOCKS:
        dtype = DTYPES[element_size]
        for rows in MINMAX_ROWS[element_size]:
            if rows != 16 or key_pad == 128:
                name = f"minmax {key_pad} {dtype} rows {rows}".replace("torch.", "")
                is_main = key_pad == 128 and rows == 8 and element_size == 2
                found.append(Configuration(name, minmax(key_pad, rows, dtype), main=is_main))
    found.append(Configuration("minmax 80 visible", minmax(80, 8, torch.bfloat16, visible=True)))
    for group, rows in ((1, 1), (8, 8), (64, 1), (128, 2)):  # the second pass
        queries, bounds = (meta(1, 1, size, 64) for size in (group * rows, NUM_BLOCKS))
        call = lambda q=queries, b=bounds, g=group: triton_ops.score_minmax(q, b, b, g, 0.1)  # noqa: E731
        found.append(Configuration(f"rank {group} heads {rows} rows", call))
    return found


def movement_configurations() -> list[Configuration]:
    found = []
    for slots in (1, NUM_SLOTS, MAX_SLOTS):
        table = meta(BATCH, KV_HEADS, slots, dtype=torch.int64)
        for clock in (None, 100_000):
            call = lambda t=table, c=clock: triton_ops.delta_select(t, t, t, NUM_BLOCKS, 16, c)  # noqa: E731
            found.append(
                Configuration(f"delta {slots} clock {clock}", call, main=slots == NUM_SLOTS and clock is not None)
            )
    for entries, places in ((1, 1), (NUM_SLOTS, 6), (NUM_SLOTS, NUM_SLOTS), (MAX_SLOTS, MAX_SLOTS)):
        blocks, held = (meta(BATCH, KV_HEADS, size, dtype=torch.int64) for size in (entries, places))
        call = lambda b=blocks, h=held: triton_ops.plan_exchange(b, b.bool(), b, h, h, 100_000)  # noqa: E731
        found.append(Configuration(f"exchange {entries} {places}", call, main=entries == NUM_SLOTS))
    addresses = meta(BATCH, NUM_BLOCKS, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for block_size, kv_dim in ((16, 256), (16, 128), (16, 512), (4, 6), (1, 3)):
            target = meta(BATCH, KV_HEADS, NUM_SLOTS, block_size, kv_dim, dtype=dtype)
            plan = [meta(BATCH, KV_HEADS, 6, dtype=kind) for kind in (torch.int64, torch.int64, torch.bool)]
            places, buffer = [plan[1]] * 3, meta(BATCH, KV_HEADS, 6, block_size, kv_dim, dtype=dtype)
            name = f"{dtype} {block_size}x{kv_dim}".removeprefix("torch.")
            call = lambda p=plan, t=target: triton_ops.gather_blocks(*p, addresses, t)  # noqa: E731
            found.append(Configuration(f"gather {name}", call, main=True))
            call = lambda p=places, t=target, b=buffer: triton_ops.swap_blocks(*p, b, t)  # noqa: E731
            found.append(Configuration(f"swap {name}", call, main=True))
    for encoding_name in ENCODINGS:
        for block_size, kv_dim, dtype in (
            (16, 256, torch.bfloat16), (16, 128, torch.float16), (16, 576, torch.float32), (5, 7, torch.bfloat16),
            (256, 512, torch.bfloat16),
        ):  # fmt: skip
            how = Encoding(encoding_name, block_size, kv_dim)
            target = meta(BATCH, KV_HEADS, NUM_SLOTS, block_size, kv_dim, dtype=dtype)
            plan = [meta(BATCH, KV_HEADS, 6, dtype=kind) for kind in (torch.int64, torch.int64, torch.bool)]
            pages = meta(BATCH, KV_HEADS, 3, how.num_bytes, dtype=torch.uint8)
            name = f"{encoding_name} {dtype} blocks of {block_size}x{kv_dim}".replace("torch.", "")
            call = lambda p=plan, t=target, h=how: triton_ops.gather_encoded(*p, addresses, t, h)  # noqa: E731
            found.append(Configuration(f"gather encoded {name}", call, main=block_size == 16))
            call = lambda p=pages: triton_ops.write_pages(p, addresses[:, :3])  # noqa: E731
            found.append(Configuration(f"write {name}", call, main=kv_dim == 256))
    for dim, block_size, dtype in (
        (128, 16, torch.bfloat16), (64, 16, torch.float16), (256, 16, torch.float32), (80, 12, torch.bfloat16),
        (256, 256, torch.bfloat16),
    ):  # fmt: skip
        kv = meta(BATCH, KV_HEADS, 3, block_size, 2 * dim, dtype=dtype)
        shape = (BATCH, KV_HEADS, NUM_BLOCKS)
        codes = meta(*shape, block_size, -(-dim // 4), dtype=torch.uint8)
        summaries = {
            "int2": {"codes": codes, "low": meta(*shape, dim), "step": meta(*shape, dim)},
            "minmax": {"low": meta(*shape, dim, dtype=dtype), "high": meta(*shape, dim, dtype=dtype)},
            "no summary": {},
        }
        for kind, arrays in summaries.items():
            call = lambda kv=kv, d=dim, a=arrays: triton_ops.seal_blocks(kv, d, addresses[:, :3], a, 7)  # noqa: E731
            name = f"seal {kind} {dim} {dtype} blocks of {block_size}".replace("torch.", "")
            found.append(Configuration(name, call, main=dim == 128))
    return found


def all_configurations() -> list[Configuration]:
    found = attention_configurations() + scoring_configurations() + movement_configurations()
    assert len({configuration.name for configuration in found}) == len(found)
    return found


def planted() -> list[Configuration]:
    """Configurations that no launcher chooses and no limit allows: the checks must find them."""
    call = attention(128, 128, torch.bfloat16, 8)
    return [
        Configuration("planted: too much shared memory", call, only="attend", changes={"TILE_TOKENS": 512}),
        Configuration("planted: too many registers", call, only="attend", changes={"TILE_ROWS": 64, "num_warps": 1}),
    ]
