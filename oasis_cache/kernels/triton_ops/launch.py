"""What every launcher shares: the device's description, tile sizes, checks, and the one place where kernels are started."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """What launchers must know of a device.

    Attributes:
        backend: "cuda", "hip", or "interpreter" for tensors on the CPU.
        num_processors: Streaming multiprocessors or compute units; work is split to fill them.
    """

    backend: str
    num_processors: int


@functools.cache
def describe(device: torch.device) -> Device:
    """The description of a tensor's device."""
    if device.type != "cuda":
        return Device("interpreter", 4)
    return Device(
        "hip" if torch.version.hip else "cuda", torch.cuda.get_device_properties(device).multi_processor_count
    )


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    """Start `kernel` on `device`, on the stream that is current there. Every launch of this package passes here."""
    start(kernel, grid, device, arguments)


def start(kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]) -> None:
    """What `launch` does; tests put a recorder in its place."""
    elsewhere = device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        kernel[grid](**arguments)


def tile(size: int, at_least: int = 16, at_most: int | None = None) -> int:
    """The power of two that holds `size`, within bounds. Matrix units want at least 16 in every dimension."""
    power = max(at_least, 1 << max(0, size - 1).bit_length())
    return power if at_most is None else min(power, at_most)


def split(num_tiles: int, num_programs: int, device: torch.device, at_most: int) -> int:
    """Into how many parts to cut the `num_tiles` tiles of each of `num_programs` programs: about two waves, no part empty."""
    wanted = max(1, min(num_tiles, at_most, 2 * describe(device).num_processors // max(1, num_programs)))
    return -(-num_tiles // -(-num_tiles // wanted))


def is_hip(device: torch.device) -> bool:
    """Whether a device is one of AMD's, whose registers and local memory hold smaller tiles."""
    return describe(device).backend == "hip"


def stages(device: torch.device, cuda: int) -> int:
    """Depth of the software pipeline: `cuda` on NVIDIA, 2 on AMD, whose local memory holds 64 KiB."""
    return 2 if is_hip(device) else cuda


def row_tile(query_rows: int, sizes: tuple[int, ...], device: torch.device) -> int:
    """The smallest of several tile sizes that holds all rows, or the largest; AMD's matrix units want 16."""
    usable = [size for size in sizes if size >= 16 or not is_hip(device)]
    return next((size for size in usable if size >= query_rows), usable[-1])


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def check_devices(**tensors: torch.Tensor | None) -> None:
    """Raise `ValueError` unless all tensors lie on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            f"all tensors must lie on one device, got {', '.join(f'{n}: {d}' for n, d in devices.items())}"
        )


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int | None, ...]) -> None:
    """Raise `ValueError` unless the tensor has the expected shape; None accepts any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(e is not None and s != e for s, e in zip(shape, expected, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {shape}; expected ({wanted})")
