"""Ahead-of-time compilation of recorded kernel launches, and what the compiled code needs: no GPU, no driver."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.recording import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel needs per program.

    Attributes:
        shared_bytes: Shared memory (CUDA) or LDS (HIP).
        registers: Per thread (VGPRs on HIP).
        spilled_bytes: Registers written to and read from local memory, per thread.
    """

    shared_bytes: int
    registers: int
    spilled_bytes: int


def source(launch: Launch) -> ASTSource:
    """The kernel specialised as a launch with these arguments specialises it: constants, 16-byte alignment, ones."""
    kernel = launch.kernel
    parameters = inspect.signature(kernel.fn).parameters
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, (name, parameter) in enumerate(parameters.items()):
        value = launch.arguments[name]
        specialise = not kernel.params[position].do_not_specialize
        if "constexpr" in str(parameter.annotation):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            if value == 1 and specialise:
                signature[name], constants[name] = "constexpr", 1
                continue
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialise:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_for(launch: Launch, target: GPUTarget) -> tuple[Compiled, Any]:
    """Compile a launch to machine code and read what it needs."""
    compiled = triton.compile(source(launch), target=target, options=launch.options)
    if target.backend == "cuda":
        registers, spilled = _read_cubin(compiled.asm["cubin"])
    else:
        registers, spilled = _read_amdgcn(compiled.asm["amdgcn"])
    return Compiled(compiled.metadata.shared, registers, spilled), compiled


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which Triton's kernels use for spilled registers only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert match is not None, usage.stdout
    return int(match[1]), int(match[2])


def _read_amdgcn(assembly: str) -> tuple[int, int]:
    """VGPRs per lane, and bytes of scratch memory per lane."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    assert registers is not None
    assert scratch is not None
    return int(registers[1]), int(scratch[1])
