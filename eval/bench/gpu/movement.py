"""Moving blocks: gathering from page-locked host memory, sealing to it, and taking from a staging buffer."""

from __future__ import annotations

import torch

from eval.bench.gpu.measure import Bench
from oasis_cache import kernels

KV_HEADS, DIM, BLOCK, SLOTS = 8, 128, 16, 124


def run(bench: Bench) -> None:
    pages = 64 if bench.tiny else 4096
    page_shape = (KV_HEADS, BLOCK, 2 * DIM)
    slab = torch.empty(pages, *page_shape, dtype=bench.dtype, pin_memory=bench.on_gpu)
    for start in range(0, pages, 512):
        part = slab[start : start + 512]
        part.copy_(bench.random(*part.shape))
    page_bytes = slab[0].numel() * slab.element_size()
    addresses = (slab.data_ptr() + torch.arange(pages) * page_bytes).view(1, pages).to(bench.device)
    gather(bench, slab, addresses)
    seal(bench, slab, addresses)
    swap(bench)


def plan(bench: Bench, entries: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct random blocks of each KV head for the first slots."""
    chosen = torch.rand(1, KV_HEADS, blocks, device=bench.device).topk(entries, dim=-1).indices
    slots = torch.arange(entries, device=bench.device).expand(1, KV_HEADS, entries).contiguous()
    return chosen, slots, torch.ones_like(slots, dtype=torch.bool)


def gather(bench: Bench, slab: torch.Tensor, addresses: torch.Tensor) -> None:
    target = torch.zeros(1, KV_HEADS, SLOTS, BLOCK, 2 * DIM, dtype=bench.dtype, device=bench.device)
    for entries in (2,) if bench.tiny else (1, 6, 31, SLOTS):
        plans = [plan(bench, entries, slab.shape[0]) for _ in range(2 if bench.tiny else 16)]
        target.zero_()
        kernels.gather_blocks(*plans[0], addresses, target)
        bench.synchronize()
        for head in range(KV_HEADS):
            want = slab[plans[0][0][0, head].cpu(), head]
            if not torch.equal(target[0, head, :entries].cpu(), want):
                raise ArithmeticError("gather_blocks brought other bytes than the pages hold")
        num_bytes = KV_HEADS * entries * BLOCK * 2 * DIM * bench.dtype.itemsize
        flat = target.flatten()[: num_bytes // bench.dtype.itemsize]
        hosts = [slab.view(-1)[: flat.numel()], slab.view(-1)[-flat.numel() :]]
        samplers = {
            "oasis": bench.rotating([lambda p=p: kernels.gather_blocks(*p, addresses, target) for p in plans]),
            "one copy of as many bytes": bench.rotating(
                [lambda f=flat, h=h: f.copy_(h, non_blocking=True) for h in hosts]
            ),
        }
        bench.compare(
            "gather",
            f"{entries} blocks per head",
            f"{KV_HEADS} heads, {num_bytes} bytes",
            samplers,
            num_bytes,
            baseline="one copy of as many bytes",
            seconds=bench.left / 8,
            over_link=True,
        )


def seal(bench: Bench, slab: torch.Tensor, addresses: torch.Tensor) -> None:
    for count in (1,) if bench.tiny else (1, 64, 512):
        kv = bench.random(1, KV_HEADS, count, BLOCK, 2 * DIM)
        shape = (1, KV_HEADS, count)
        summaries = {
            "codes": torch.zeros(*shape, BLOCK, DIM // 4, dtype=torch.uint8, device=bench.device),
            "low": torch.zeros(*shape, DIM, dtype=torch.bfloat16, device=bench.device),
            "step": torch.zeros(*shape, DIM, dtype=torch.bfloat16, device=bench.device),
        }
        flat = slab.view(-1)[: kv.numel()]
        num_bytes = kv.numel() * kv.element_size()
        inputs = (kv, DIM, addresses[:, :count], summaries, 0)
        samplers = {
            "oasis": bench.rotating([lambda i=inputs: kernels.seal_blocks(*i)] * 4),
            "one copy of as many bytes": bench.rotating(
                [lambda f=flat, k=kv: f.copy_(k.view(-1), non_blocking=True)] * 4
            ),
        }
        bench.compare(
            "seal",
            f"{count} blocks",
            f"{KV_HEADS} heads, {num_bytes} bytes",
            samplers,
            num_bytes,
            baseline="one copy of as many bytes",
            seconds=bench.left / 6,
            over_link=True,
        )


def swap(bench: Bench) -> None:
    entries, staged = (2, 2) if bench.tiny else (31, 31)
    target = torch.zeros(1, KV_HEADS, SLOTS, BLOCK, 2 * DIM, dtype=bench.dtype, device=bench.device)
    buffer = bench.random(1, KV_HEADS, staged, BLOCK, 2 * DIM)
    blocks, slots, mask = plan(bench, entries, 64)
    evicted = blocks + 1000
    held = blocks[:, :, :staged].contiguous()
    entered = torch.zeros_like(held)
    num_bytes = 4 * buffer.numel() * buffer.element_size()  # both ways, each read and written

    def exchange() -> None:
        kernels.exchange_blocks(blocks, slots, mask, evicted, held.clone(), entered.clone(), 2, buffer, target)

    halves = buffer.numel() // 2
    samplers = {
        "oasis": bench.rotating([exchange]),
        "two copies of as many bytes": bench.rotating(
            [
                lambda: (
                    target.flatten()[: 2 * halves].copy_(buffer.view(-1)[: 2 * halves]),
                    buffer.view(-1)[: 2 * halves].copy_(target.flatten()[: 2 * halves]),
                )
            ]
        ),
    }
    bench.compare(
        "exchange",
        f"{staged} of {entries} blocks per head",
        f"{KV_HEADS} heads, {num_bytes} bytes",
        samplers,
        num_bytes,
        baseline="two copies of as many bytes",
        seconds=bench.left / 2,
    )
