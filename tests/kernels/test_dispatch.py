"""Which version serves which tensors."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import triton

from oasis_cache import kernels
from oasis_cache.kernels import reference, triton_ops
from oasis_cache.kernels.encoding import Encoding
from oasis_cache.kernels.limits import MASS_BLOCKS, MAX_DIM, MAX_SLOTS
from tests.kernels.comparing import relative_error
from tests.kernels.recording import meta, record


def attention_inputs(dtype=torch.float32, dim=64):
    generator = torch.Generator().manual_seed(0)
    queries, kv = torch.randn(1, 2, 6, dim, generator=generator), torch.randn(1, 2, 40, 2 * dim, generator=generator)
    return queries.to(dtype), kv.to(dtype), dim, 37, 3, 0.125


@pytest.fixture
def served(monkeypatch):
    """The names of Triton operations in the order of their calls."""
    calls = []

    def spy(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in triton_ops.__all__:
        monkeypatch.setattr(triton_ops, name, spy(name, getattr(triton_ops, name)))
    return calls


@pytest.fixture
def no_gpu():
    if torch.cuda.is_available():
        pytest.skip("the interpreter serves only where there is no GPU")


def test_cpu_tensors_take_pytorch_outside_the_switch(served):
    out = kernels.sparse_attention(*attention_inputs())
    assert relative_error(out, reference.sparse_attention(*attention_inputs())[0]) < 1e-5
    assert served == []


@pytest.mark.usefixtures("no_gpu")
def test_every_operation_takes_its_kernel_inside_the_switch(served):
    inputs = attention_inputs()
    keys = torch.randn(1, 2, 5, 16, 64)
    tables = [torch.full((1, 2, 4), -1, dtype=torch.int64) for _ in range(2)]
    wanted = torch.arange(3).expand(1, 2, 3)
    mask = torch.zeros(1, 2, 3, dtype=torch.bool)
    target = torch.zeros(1, 2, 4, 16, 128)
    addresses = torch.zeros(1, 5, dtype=torch.int64)
    with kernels.interpreted():
        out = kernels.sparse_attention(*inputs)
        out_too, lse, mass = kernels.sparse_attention_with_mass(*inputs, mass_block=4)
        kernels.score_int2(inputs[0], *reference.quantise_int2(keys), 2, 0.125)
        kernels.score_int1(inputs[0], *reference.quantise_int1(keys), 2, 0.125)
        kernels.score_minmax(inputs[0], keys.amin(3), keys.amax(3), 2, 0.125)
        kernels.delta_select(wanted, *tables, 5, 3, 1)
        kernels.gather_blocks(wanted, wanted, mask, addresses, target)
        kernels.exchange_blocks(
            wanted, wanted, mask, wanted, wanted.clone(), wanted.clone(), 2, target[:, :, :3].clone(), target
        )
        kernels.seal_blocks(target[:, :, :0], 64, addresses[:, :0], {}, 0)
        kernels.gather_encoded(wanted, wanted, mask, addresses, target, kernels.Encoding("int4", 16, 128))
        kernels.write_pages(torch.zeros(1, 2, 0, 16, dtype=torch.uint8), addresses[:, :0])
    assert served == [
        "sparse_attention", "sparse_attention", "score_int2", "score_int1", "score_minmax", "delta_select", "gather_blocks",
        "exchange_blocks", "seal_blocks", "gather_encoded", "write_pages",
    ]  # fmt: skip
    assert torch.equal(out, out_too)
    want = reference.sparse_attention(*inputs, mass_block=4)
    assert all(relative_error(got, expected) < 1e-5 for got, expected in zip((out, lse, mass), want, strict=True))
    assert tables[0].tolist() == [[[0, 1, 2, -1]] * 2]
    kernels.sparse_attention(*inputs)
    assert len(served) == 11


@pytest.mark.usefixtures("no_gpu")
def test_what_no_kernel_takes_is_served_by_pytorch_and_said_once(served):
    inputs = attention_inputs(torch.float64)
    kernels._warn_once.cache_clear()
    before = kernels.fallbacks["sparse_attention"]
    with kernels.interpreted(), pytest.warns(RuntimeWarning, match="no kernel for torch.float64"):
        out = kernels.sparse_attention(*inputs)
    with kernels.interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.sparse_attention(*inputs)
    assert served == []
    assert kernels.fallbacks["sparse_attention"] == before + 2
    assert relative_error(out, reference.sparse_attention(*inputs)[0]) < 1e-5


def test_kernels_take_all_that_dispatch_sends_them(device):
    """Their own checks and those of the dispatch agree on the largest sizes."""
    table = meta(1, 1, MAX_SLOTS, dtype=torch.int64)
    queries, kv = meta(1, 1, 4, MAX_DIM), meta(1, 1, 64, 2 * MAX_DIM)
    codes, bounds = meta(1, 1, 3, MAX_DIM, MAX_DIM // 4, dtype=torch.uint8), meta(1, 1, 3, MAX_DIM)
    block, address = meta(1, 1, 1, MAX_DIM, 8), meta(1, 1, dtype=torch.int64)
    for mass_block in MASS_BLOCKS:
        assert record(
            lambda size=mass_block: triton_ops.sparse_attention(queries, kv, MAX_DIM, 64, 1, 1.0, mass_block=size)
        )
    assert record(lambda: triton_ops.score_int2(queries, codes, bounds, bounds, 4, 1.0))
    assert record(lambda: triton_ops.delta_select(table, table, table, 10**6, MAX_SLOTS, 1))
    assert record(lambda: triton_ops.seal_blocks(block, 4, address, {}, 0))
    how = Encoding("int8", MAX_DIM, 8)
    assert record(
        lambda: triton_ops.gather_encoded(
            address[None], address[None], meta(1, 1, 1, dtype=torch.bool), address, block, how
        )
    )


def test_importing_the_library_does_not_import_triton_or_need_it():
    code = """
import sys
sys.modules["triton"] = None  # any import of it now fails
import torch
import oasis_cache.kernels as kernels
kernels.sparse_attention(torch.randn(1, 1, 2, 8), torch.randn(1, 1, 9, 16), 8, 9, 1, 1.0)
assert not kernels.uses_triton(torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_triton_a_device_with_kernels_falls_back_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "oasis_cache.kernels.triton_ops")
    for name in [name for name in sys.modules if name.startswith("oasis_cache.kernels.triton_ops.")]:
        monkeypatch.delitem(sys.modules, name)
    kernels._triton_ops.cache_clear()
    kernels._warn_once.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="triton is not installed"):
            assert not kernels.uses_triton(torch.device("cuda"))
    finally:
        kernels._triton_ops.cache_clear()


def test_the_switch_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), kernels.interpreted():
        pass
