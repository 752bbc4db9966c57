"""The attention kernel over slots and window against PyTorch's attention over the same tokens, and against copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from eval.bench.gpu.measure import Bench, check
from oasis_cache import kernels
from oasis_cache.kernels import reference

KV_HEADS, GROUP, DIM, BLOCK, WINDOW = 8, 4, 128, 16, 79


def run(bench: Bench) -> None:
    budgets = (64,) if bench.tiny else (1024, 2048, 4096)
    cases = [(1, budget, rows) for budget in budgets for rows in ((1, 3) if bench.tiny else (1, 5))]
    if not bench.tiny:
        cases += [(8, 2048, 1)]
    for place, (batch, budget, rows) in enumerate(cases):
        measure(bench, batch, budget, rows, bench.left / (len(cases) - place))


def measure(bench: Bench, batch: int, budget: int, rows: int, seconds: float) -> None:
    slot_tokens = budget - 64 if budget > 64 else budget
    num_tokens = slot_tokens + WINDOW
    scaling = DIM**-0.5
    kv_bytes = batch * KV_HEADS * num_tokens * 2 * DIM * bench.dtype.itemsize
    inputs = [
        (
            bench.random(batch, KV_HEADS, GROUP * rows, DIM),
            bench.random(batch, KV_HEADS, num_tokens + 64, 2 * DIM),
        )
        for _ in range(bench.sets(kv_bytes))
    ]
    causal = reference.causal_rows(rows, num_tokens, bench.device) if rows > 1 else None
    packed_mask = causal.repeat(GROUP, 1) if causal is not None else None

    def oasis(queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kernels.sparse_attention(queries, kv, DIM, num_tokens, rows, scaling)

    def oasis_mass(queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kernels.sparse_attention_with_mass(queries, kv, DIM, num_tokens, rows, scaling, mass_block=BLOCK)[0]

    def sdpa_packed(queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        keys, values = kv[:, :, :num_tokens, :DIM], kv[:, :, :num_tokens, DIM:]
        return scaled_dot_product_attention(queries, keys, values, attn_mask=packed_mask, scale=scaling)

    def sdpa_gqa(queries: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        keys, values = kv[:, :, :num_tokens, :DIM], kv[:, :, :num_tokens, DIM:]
        heads = queries.view(batch, KV_HEADS * GROUP, rows, DIM)
        out = scaled_dot_product_attention(heads, keys, values, attn_mask=causal, scale=scaling, enable_gqa=True)
        return out.reshape(queries.shape)

    want = reference.sparse_attention(*inputs[0], DIM, num_tokens, rows, scaling)[0]
    candidates: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "oasis": oasis,
        "oasis with mass": oasis_mass,
        "sdpa, heads packed": sdpa_packed,
        "sdpa, grouped heads": sdpa_gqa,
    }
    notes, samplers = {}, {}
    for name, function in candidates.items():
        notes[name] = check(name, function(*inputs[0]), want)
        samplers[name] = bench.rotating([lambda f=function, i=i: f(*i) for i in inputs])
    shape = f"batch {batch}, {KV_HEADS}x{GROUP} heads of {DIM}, {num_tokens} tokens, {rows} rows"
    bench.compare(
        "attention",
        f"budget {budget}, rows {rows}, batch {batch}",
        shape,
        samplers,
        kv_bytes,
        baseline="sdpa, grouped heads",
        seconds=max(0.5, seconds - 3),
        notes=notes,
    )
