"""Each kernel once on small inputs, for compute-sanitizer to watch: `compute-sanitizer python -m eval.bench.gpu.sanitize`."""

from __future__ import annotations

import argparse

import torch

from oasis_cache import OasisCache, kernels
from oasis_cache.kernels import reference
from oasis_cache.kernels.encoding import ENCODINGS, Encoding

HEADS, GROUP, DIM, BLOCK, BLOCKS, SLOTS = 2, 2, 64, 16, 20, 6


def run(device: torch.device) -> None:
    """Start every kernel, and a few steps of a small cache."""
    torch.manual_seed(0)
    keys = torch.randn(1, HEADS, BLOCKS, BLOCK, DIM, device=device)
    kv = torch.cat([keys, torch.randn_like(keys)], -1)
    queries = torch.randn(1, HEADS, GROUP, DIM, device=device)
    scaling = DIM**-0.5
    kernels.score_int2(queries, *reference.quantise_int2(keys), GROUP, scaling)
    kernels.score_int1(queries, *reference.quantise_int1(keys), GROUP, scaling)
    best = kernels.score_minmax(queries, keys.amin(3), keys.amax(3), GROUP, scaling)[1]
    table, last = (torch.full((1, HEADS, SLOTS), -1, dtype=torch.int64, device=device) for _ in range(2))
    plan = kernels.delta_select(best.topk(SLOTS, dim=-1).indices, table, last, BLOCKS, SLOTS, 1)
    pages = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, pin_memory=device.type == "cuda")
    page_bytes = pages[0].numel() * pages.element_size()
    addresses = (pages.data_ptr() + torch.arange(BLOCKS) * page_bytes).view(1, BLOCKS).to(device)
    kernels.seal_blocks(kv, DIM, addresses, {}, 0)
    slots = torch.zeros(1, HEADS, SLOTS, BLOCK, 2 * DIM, device=device)
    kernels.gather_blocks(*plan, addresses, slots)
    for name in ENCODINGS:
        how = Encoding(name, BLOCK, 2 * DIM)
        kernels.write_pages(kernels.encode(kv, how), addresses)
        kernels.gather_encoded(*plan, addresses, slots, how)
    evicted = torch.full_like(plan[0], BLOCKS - 1)
    held, entered = plan[0][:, :, :3].contiguous(), torch.zeros(1, HEADS, 3, dtype=torch.int64, device=device)
    kernels.exchange_blocks(*plan, evicted, held, entered, 2, kv[:, :, :3].contiguous(), slots)
    tokens = SLOTS * BLOCK
    kernels.sparse_attention_with_mass(queries, slots.flatten(2, 3), DIM, tokens, 1, scaling, mass_block=BLOCK)
    for options in ({}, {"on_miss": "skip"}, {"tier_dtype": "int8"}):
        with OasisCache(budget=128, recent_blocks=1, sparse_rows=4, **options) as cache:
            for rows in (300, 1, 1, 2):
                new, query = (torch.randn(1, heads, rows, DIM, device=device) for heads in (HEADS, HEADS * GROUP))
                cache.update(new, new, 0)
                if rows < 300:
                    cache.layers[0].attend(
                        query, None, scaling=scaling, sliding_window=None, softcap=None, sinks=None, is_causal=True
                    )
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    run(torch.device(parser.parse_args().device))
    print("all kernels ran")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
