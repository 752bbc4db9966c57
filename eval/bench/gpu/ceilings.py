"""The ceilings: what a large copy reaches within the device, from page-locked host memory, and to it."""

from __future__ import annotations

import torch

from eval.bench.gpu.measure import Bench


def run(bench: Bench) -> dict[str, float]:
    """Measure and return the bandwidths in bytes per second: "copy" counts bytes read plus written."""
    elements = 1 << (16 if bench.tiny else 29)
    source, target = bench.random(elements), torch.empty(elements, dtype=bench.dtype, device=bench.device)
    host = torch.empty(elements // 2, dtype=bench.dtype, pin_memory=bench.on_gpu)
    host.copy_(source[: elements // 2])
    host_bytes = host.numel() * host.element_size()
    moved = {
        "copy": 2 * source.numel() * source.element_size(),
        "to_device": host_bytes,
        "to_host": host_bytes,
    }
    samplers = {
        "copy": lambda: bench.device_ms(lambda: target.copy_(source)),
        "to_device": lambda: bench.device_ms(lambda: target[: elements // 2].copy_(host, non_blocking=True)),
        "to_host": lambda: bench.device_ms(lambda: host.copy_(source[: elements // 2], non_blocking=True)),
    }
    for sampler in samplers.values():
        sampler()
    shape = f"{moved['to_device'] >> 20} MiB over the link"
    medians = bench.compare("ceilings", "bandwidth", shape, samplers, moved, seconds=8, rounds=15)
    return {name: moved[name] / (median * 1e-3) for name, median in medians.items()}
