"""Ahead-of-time compilation of all kernel configurations, and what the compiled code needs: no GPU, no driver.

    python -m tests.kernels.compiling results.json [--every-target]

runs in a process of its own, because TRITON_INTERPRET=1 turns compilation off where the other kernel tests run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.configurations import all_configurations, planted
from tests.kernels.recording import Launch, record

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
MAIN_TARGET = "sm_90"
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
}


def source(launch: Launch) -> ASTSource:
    """The kernel specialised as a launch with these arguments specialises it: constants, 16-byte alignment, ones."""
    parameters = inspect.signature(launch.kernel.fn).parameters
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, name in enumerate(parameters):
        value = launch.arguments[name]
        specialised = not launch.kernel.params[position].do_not_specialize
        if name in launch.constants or (isinstance(value, int) and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and specialised:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float)
            signature[name] = "fp32"
    return ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_for(launch: Launch, target: GPUTarget) -> tuple[dict[str, Any], Any]:
    """Compile a launch to machine code and read what it needs.

    Returns:
        shared_bytes (per program), registers (per thread), spilled_bytes (of local memory per thread), matrix_products (matrix
        instructions in the code), wide_copies (16-byte loads and stores of global memory); and triton's compiled kernel.
    """
    compiled = triton.compile(source(launch), target=target, options=launch.options)
    if target.backend == "cuda":
        registers, spilled = _read_cubin(compiled.asm["cubin"])
        text = compiled.asm["ptx"]
        products = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", text)
        copies = re.findall(r"\b(?:ld|st)\.global\.(?:\w+\.)*v4\.b32", text)
    else:
        text = compiled.asm["amdgcn"]
        registers, spilled = _read_amdgcn(text)
        products = re.findall(r"\bv_mfma_", text)
        copies = re.findall(r"\b(?:buffer|global|flat)_(?:load|store)_dwordx4", text)
    needs = {
        "shared_bytes": compiled.metadata.shared,
        "registers": registers,
        "spilled_bytes": spilled,
        "matrix_products": len(products),
        "wide_copies": len(copies),
    }
    return needs, compiled


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which Triton's kernels use for spilled registers only."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
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


def planned(every_target: bool = False) -> list[tuple[str, str]]:
    """The pairs of configuration and target that are compiled."""
    pairs = []
    for configuration in all_configurations():
        for target in TARGETS:
            if every_target or configuration.main or target == MAIN_TARGET:
                pairs.append((configuration.name, target))
    return pairs


def launches_of(name: str, target: str) -> list[Launch]:
    """The launches of a configuration on a target."""
    (found,) = (configuration for configuration in (*all_configurations(), *planted()) if configuration.name == name)
    launches = record(found.call, TARGETS[target].backend, 132)
    return [replace(launch, arguments=launch.arguments | found.changes) for launch in launches if found.takes(launch)]


def _identity(launch: Launch, target: str) -> str:
    built = source(launch)
    return f"{target} {launch.name} {built.signature} {built.constants} {built.attrs} {launch.options}"


def _compile_job(job: tuple[str, str, int]) -> dict[str, Any]:
    name, target, position = job
    launch = launches_of(name, target)[position]
    needs, _ = compile_for(launch, TARGETS[target])
    return {"configuration": name, "target": target, "kernel": launch.name, "options": launch.options} | needs


def compile_all(every_target: bool) -> list[dict[str, Any]]:
    """Compile all launches of all planned pairs, each once, and the planted ones, on all processors."""
    seen: set[str] = set()
    jobs = []
    for name, target in planned(every_target) + [(plant.name, MAIN_TARGET) for plant in planted()]:
        for position, launch in enumerate(launches_of(name, target)):
            identity = _identity(launch, target)
            if identity not in seen:
                seen.add(identity)
                jobs.append((name, target, position))
    with multiprocessing.get_context("fork").Pool(min(4, os.cpu_count() or 1)) as pool:
        return pool.map(_compile_job, jobs, chunksize=1)


class _Driver:
    """A driver for a device that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def launched_sources(target: str) -> tuple[int, list[str]]:
    """Launch all configurations as on a device, up to the point where Triton would compile.

    Returns:
        How many launches there were, and those whose kernel is specialised in another way than `source` does.
    """
    asked: list[tuple[Any, Any, Any]] = []

    def remember(
        kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: Any
    ) -> None:
        asked.append((dict(signature), constants, {place: pairs for place, pairs in attributes.items() if pairs}))

    count, different = 0, []
    driver.set_active(_Driver(TARGETS[target]))
    with mock.patch.object(JITFunction, "_do_compile", remember):
        for configuration in all_configurations():
            for launch in launches_of(configuration.name, target):
                asked.clear()
                launch.kernel.device_caches.clear()  # it forgets that it was compiled
                launch.kernel[launch.grid](**launch.arguments)
                own = source(launch)
                count += 1
                if asked != [(own.signature, own.constants, own.attrs)]:
                    different.append(f"{configuration.name}: {asked}")
    return count, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where the needs of all compiled kernels go, as JSON")
    parser.add_argument(
        "--every-target", action="store_true", help="all configurations for all targets, not the main ones only"
    )
    arguments = parser.parse_args()
    kernels = compile_all(arguments.every_target)
    count, different = launched_sources(MAIN_TARGET)
    results = {"kernels": kernels, "launches": count, "specialised in another way": different}
    arguments.results.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
