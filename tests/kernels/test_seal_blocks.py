"""Sealing: host pages and summaries, bit for bit, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, triton_ops
from tests.kernels.comparing import label, same, sample
from tests.kernels.recording import as_meta, assert_all_branches, record

CASES = sample(
    12,
    seed=4,
    kind=["int2", "int2", "minmax", "none"],
    batch_heads=[(1, 1), (1, 2), (2, 1)],
    blocks=[1, 2, 3],
    block_size=[16, 16, 4, 5],
    dims=[(64, 64), (128, 64), (24, 8), (80, 80)],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
)
FIRST_BLOCK, CAPACITY = 5, 9


def summaries(case, device):
    batch, kv_heads = case["batch_heads"]
    shape = (batch, kv_heads, CAPACITY)
    key_dim = case["dims"][0]
    if case["kind"] == "int2":
        codes = torch.full((*shape, case["block_size"], -(-key_dim // 4)), 119, dtype=torch.uint8, device=device)
        low, step = (torch.full((*shape, key_dim), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2))
        return {"codes": codes, "low": low, "step": step}
    names = ("low", "high") if case["kind"] == "minmax" else ()
    return {name: torch.full((*shape, key_dim), float("nan"), dtype=case["dtype"], device=device) for name in names}


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv_heads = case["batch_heads"]
    tokens, kv_dim = case["blocks"] * case["block_size"], sum(case["dims"])
    buffer = torch.randn(batch, kv_heads, tokens + 24, kv_dim, generator=generator).to(case["dtype"]).to(device)
    buffer[..., 0] = 0.5  # a channel without range
    kv = buffer[:, :, 16 : 16 + tokens].unflatten(2, (case["blocks"], case["block_size"]))
    pages = torch.full(
        (batch * case["blocks"] + 2, kv_heads, case["block_size"], kv_dim), float("nan"), dtype=case["dtype"]
    )
    pages = pages.pin_memory() if device.type == "cuda" else pages
    places = torch.randperm(pages.shape[0], generator=generator)[: batch * case["blocks"]].view(batch, case["blocks"])
    addresses = pages.data_ptr() + places * pages[0].numel() * pages.element_size()
    return kv, addresses.to(device), pages


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_reference(case, device):
    kv, addresses, pages = arguments(case, device)
    expected_pages = pages.clone()
    own, expected = summaries(case, device), summaries(case, device)
    page_addresses = addresses - pages.data_ptr() + expected_pages.data_ptr()
    reference.seal_blocks(kv, case["dims"][0], page_addresses, expected, FIRST_BLOCK)
    triton_ops.seal_blocks(kv, case["dims"][0], addresses, own, FIRST_BLOCK)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert same(pages, expected_pages)
    for name, array in own.items():
        assert same(array, expected[name]), name


def test_cases_reach_every_branch(device):
    launches = []
    for case in CASES:
        kv, addresses, _ = arguments(case, torch.device("cpu"))
        inputs = [as_meta(value) for value in (kv, case["dims"][0], addresses, summaries(case, torch.device("cpu")))]
        launches += record(lambda inputs=inputs: triton_ops.seal_blocks(*inputs, FIRST_BLOCK))
    assert_all_branches(launches, "seal", {"KIND": {0, 1, 2}})
    assert any(launch.constants["BLOCK_PAD"] > launch.constants["BLOCK_SIZE"] for launch in launches)
    assert any(launch.constants["PLANE_PAD"] > launch.constants["PLANE_DIM"] for launch in launches)


def test_sealed_keys_are_scored_and_gathered_again(device):
    case = CASES[0] | {
        "kind": "int2",
        "batch_heads": (1, 2),
        "blocks": 3,
        "block_size": 16,
        "dims": (64, 64),
        "dtype": torch.float32,
    }
    kv, addresses, pages = arguments(case, device)
    arrays = summaries(case, device)
    triton_ops.seal_blocks(kv, 64, addresses, arrays, 0)
    queries = torch.randn(1, 2, 4, 64, device=device)
    held = [arrays[name][:, :, :3] for name in ("codes", "low", "step")]
    rows, _, _ = triton_ops.score_int2(queries, *held, 4, 0.125)
    want, _, _ = reference.score_int2(queries, *reference.quantise_int2(kv[..., :64]), 4, 0.125)
    torch.testing.assert_close(rows, want, rtol=1e-5, atol=1e-6)
    target = torch.full((1, 2, 4, 16, 128), float("nan"), device=device)
    blocks = torch.tensor([2, 0], device=device).expand(1, 2, 2)
    slots = torch.tensor([1, 3], device=device).expand(1, 2, 2)
    triton_ops.gather_blocks(blocks, slots, torch.ones_like(blocks, dtype=torch.bool), addresses, target)
    assert torch.equal(target[:, :, [1, 3]], kv[:, :, [2, 0]])
    assert target[:, :, [0, 2]].isnan().all()
    assert pages.isnan().any()


def test_refuses_what_it_cannot_take(device):
    case = CASES[0] | {"kind": "int2", "block_size": 16, "dims": (64, 64)}
    kv, addresses, _ = arguments(case, device)
    arrays = summaries(case, device)
    for message, inputs in {
        "are none of": (kv, 64, addresses, {"low": arrays["low"]}, 0),
        "low must be torch.bfloat16": (kv, 64, addresses, arrays | {"low": arrays["low"].double()}, 0),
        "are needed": (kv, 64, addresses, arrays, CAPACITY),
        "addresses must be int64": (kv, 64, addresses.int(), arrays, 0),
        "codes has shape": (kv, 64, addresses, arrays | {"codes": arrays["codes"][..., 1:]}, 0),
        "key_dim=200": (kv, 200, addresses, {}, 0),
        "kv must be": (kv.double(), 64, addresses, {}, 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.seal_blocks(*inputs)
