"""Every kernel configuration compiles ahead of time to machine code that fits its target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.configurations import all_configurations, planted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Shared memory (LDS) that one program may take, in bytes.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
REGISTER_LIMIT = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
KERNELS = {
    "attend", "merge", "packed", "minmax", "rank", "delta", "exchange", "gather", "gather_encoded", "swap", "seal", "write",
}  # fmt: skip
MAIN = {configuration.name for configuration in all_configurations() if configuration.main}
ROOT = Path(__file__).parents[2]


def violations(kernel: dict[str, Any], main: bool) -> list[str]:
    """What one compiled kernel does that its target, or its importance, does not allow."""
    target = kernel["target"]
    found = {
        f"{kernel['shared_bytes']} bytes of shared memory": kernel["shared_bytes"] > SHARED_LIMIT[target],
        f"{kernel['registers']} registers": not 0 < kernel["registers"] <= REGISTER_LIMIT[target],
        f"{kernel['spilled_bytes']} bytes spilled": main and kernel["spilled_bytes"] > 0,
    }
    return [f"{kernel['configuration']} on {target}: {what}" for what, is_so in found.items() if is_so]


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, Any]:
    """What `tests.kernels.compiling` writes. Compiled in another process: here kernels are interpreted, or belong to one GPU."""
    path = tmp_path_factory.mktemp("compiled") / "needs.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiling", str(path)],
        cwd=ROOT,
        env=environment,
        check=True,
    )
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def everything(results) -> list[dict[str, Any]]:
    """What all compiled kernels need."""
    return results["kernels"]


@pytest.fixture(scope="module")
def compiled(everything) -> list[dict[str, Any]]:
    """Those that can be launched."""
    return [kernel for kernel in everything if not kernel["configuration"].startswith("planted")]


@pytest.mark.parametrize("target", list(SHARED_LIMIT))
def test_configurations_fit_the_target(compiled, target):
    kernels = [kernel for kernel in compiled if kernel["target"] == target]
    assert len(kernels) >= 40
    assert [found for kernel in kernels for found in violations(kernel, kernel["configuration"] in MAIN)] == []


def test_what_is_compiled_is_what_a_launch_compiles(results):
    """Ahead of time, types, alignments and constants are spelt out; a launch derives them from its arguments."""
    assert results["launches"] >= len(all_configurations())
    assert results["specialised in another way"] == []


def test_all_kernels_were_compiled_for_all_targets(compiled):
    for target in SHARED_LIMIT:
        assert {kernel["kernel"] for kernel in compiled if kernel["target"] == target} == KERNELS


def test_all_configurations_were_compiled(compiled):
    """Those that compile to what another one compiled to already are left out; few do."""
    names = {kernel["configuration"] for kernel in compiled}
    assert len(names) >= 0.9 * len(all_configurations())
    assert names >= MAIN - {name for name in MAIN if name.startswith(("gather", "swap", "write"))}


def test_limits_catch_what_is_too_large(everything):
    shared, registers = (
        next(kernel for kernel in everything if kernel["configuration"] == plant.name) for plant in planted()
    )
    assert "shared memory" in "".join(violations(shared, main=False))
    assert "spilled" in "".join(violations(registers, main=True))


def test_half_precision_products_use_matrix_units(compiled):
    for kernel in compiled:
        if kernel["kernel"] in ("attend", "packed", "minmax") and "float32" not in kernel["configuration"]:
            assert kernel["matrix_products"] > 0, kernel


def test_blocks_move_sixteen_bytes_at_a_time(compiled):
    moving = [
        kernel for kernel in compiled if kernel["kernel"] in ("gather", "swap") and "16x" in kernel["configuration"]
    ]
    assert len(moving) >= 6 * len(SHARED_LIMIT)
    for kernel in moving:
        assert kernel["wide_copies"] >= 2, kernel
