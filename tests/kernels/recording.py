"""Kernel launches recorded instead of made: what a public function would start, seen with tensors on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from oasis_cache.kernels.triton_ops import launch as launch_module


@dataclass(frozen=True)
class Launch:
    """A kernel launch as a launcher asked for it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.strip("_").removesuffix("_kernel")

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernel is specialised for."""
        return {name: value for name, value in self.arguments.items() if name.isupper()}

    @property
    def options(self) -> dict[str, int]:
        return {name: self.arguments[name] for name in ("num_warps", "num_stages") if name in self.arguments}


def record(call: Callable[[], Any], backend: str = "cuda", num_processors: int = 132) -> list[Launch]:
    """The launches that a call would make on such a device."""
    launches: list[Launch] = []

    def remember(kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]) -> None:
        assert all(size >= 1 for size in grid), f"an empty grid {grid}"
        launches.append(Launch(kernel, grid, arguments))

    saved = launch_module.start, launch_module.describe
    launch_module.start = remember
    launch_module.describe = lambda device: launch_module.Device(backend, num_processors)
    try:
        call()
    finally:
        launch_module.start, launch_module.describe = saved
    return launches


def assert_all_branches(launches: Iterable[Launch], kernel: str, values: dict[str, set[Any]]) -> None:
    """Assert that launches of a kernel specialise it for all the values given: each of them selects code of its own."""
    seen: dict[str, set[Any]] = {name: set() for name in values}
    for launch in launches:
        if launch.name == kernel:
            for name in values:
                seen[name].add(launch.constants[name])
    assert seen == values


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def as_meta(value: Any) -> Any:
    """Tensors, and those in dicts, without their memory; anything else unchanged."""
    if isinstance(value, dict):
        return {name: as_meta(item) for name, item in value.items()}
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else value
    )
