"""The attention kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, triton_ops
from tests.kernels.comparing import TOLERANCE, label, relative_error, sample
from tests.kernels.recording import as_meta, assert_all_branches, record

CASES = sample(
    32,
    seed=1,
    rows=[1, 2, 3, 4, 5, 6, 7, 8],
    group=[1, 3, 4, 8],
    dims=[(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (24, 40)],
    dtype=[torch.float32, torch.float32, torch.float16, torch.bfloat16],
    batch_heads=[(1, 1), (1, 2), (2, 1)],
    slots=[0, 1, 3, 6],
    block_size=[16, 16, 8, 12],
    window=[1, 5, 20, 37],
    table=[None, "full", "empties", "all empty"],
    mask=[None, "bool", "float32", "same", "one head"],
    softcap=[None, None, 2.0],
    sinks=[False, True],
    sliding_window=[None, None, 1, 30, 1000],
    mass_block=[None, 1, 4, 16],
    splits=[1, 2, 5, None],
)


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"])

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    batch, kv_heads = case["batch_heads"]
    key_dim, value_dim = case["dims"]
    rows, block_size, dtype = case["rows"], case["block_size"], case["dtype"]
    slots = case["slots"]
    query_rows = case["group"] * rows
    num_tokens = slots * block_size + max(case["window"], rows)
    kv = draw(batch, kv_heads, num_tokens + 4, key_dim + value_dim).to(dtype)
    kv[:, :, num_tokens:] = float("nan")
    options = {
        "sliding_window": case["sliding_window"],
        "softcap": case["softcap"],
        "window_start": 3 * slots * block_size,
    }
    if case["table"] is not None and slots > 0:
        table = torch.stack([torch.randperm(3 * slots, generator=generator)[:slots] for _ in range(batch * kv_heads)])
        table = table.view(batch, kv_heads, slots)
        if case["table"] != "full":
            table[torch.rand(table.shape, generator=generator) < (0.5 if case["table"] == "empties" else 2.0)] = -1
        kv[:, :, : slots * block_size].unflatten(2, (slots, block_size))[table < 0] = float("nan")
        options |= {"block_of_slot": table.to(device), "block_size": block_size}
    if case["mask"] is not None:
        mask = draw(batch, 1 if case["mask"] == "one head" else kv_heads, query_rows, num_tokens)
        if case["mask"] in ("bool", "one head"):
            mask = mask < 0.5
            mask[..., : max(1, query_rows // 2), :] |= torch.arange(num_tokens) == num_tokens - rows
        options["mask"] = (mask.to(dtype) if case["mask"] == "same" else mask).to(device)
    if case["sinks"]:
        options["sinks"] = draw(kv_heads, case["group"]).to(device)
    queries = draw(batch, kv_heads, query_rows, key_dim).to(dtype).to(device)
    return (queries, kv.to(device), key_dim, num_tokens, rows, key_dim**-0.5), options


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_reference(case, device):
    inputs, options = arguments(case, device)
    out, lse, mass = triton_ops.sparse_attention(
        *inputs, **options, mass_block=case["mass_block"], splits=case["splits"]
    )
    want, want_lse, want_mass = reference.sparse_attention(*inputs, **options, mass_block=case["mass_block"] or 1)
    tolerance = TOLERANCE[case["dtype"]]
    assert out.dtype == case["dtype"]
    assert relative_error(out, want) <= tolerance
    assert relative_error(lse, want_lse) <= tolerance
    if case["mass_block"] is None:
        assert mass is None
    else:
        assert relative_error(mass, want_mass) <= tolerance


def test_cases_reach_every_branch(device):
    launches = []
    for case in CASES:
        inputs, options = arguments(case, torch.device("cpu"))
        inputs, options = [as_meta(value) for value in inputs], as_meta(options)
        options |= {"mass_block": case["mass_block"], "splits": case["splits"]}
        launches += record(lambda inputs=inputs, options=options: triton_ops.sparse_attention(*inputs, **options))
    flags = {False, True}
    assert_all_branches(
        launches, "attend", {"MASK": {0, 1, 2}, "HAS_SOFTCAP": flags, "HAS_TABLE": flags, "HAS_WINDOW": flags}
    )
    assert_all_branches(launches, "merge", {"HAS_SINKS": flags})
    assert_all_branches(launches, "rank", {"HAS_SINKS": flags})
    attend = [launch for launch in launches if launch.name == "attend"]
    assert {launch.constants["MASS_BLOCK"] for launch in attend} == {0, 1, 4, 16}
    assert any(launch.grid[2] > 1 for launch in attend), "more rows than a tile holds"
    assert any(launch.arguments["split_tokens"] > launch.constants["TILE_TOKENS"] for launch in attend)
    assert any(
        launch.arguments["split_tokens"] * (launch.grid[0] - 1) >= launch.arguments["num_tokens"] for launch in attend
    )


def plain(device, rows=3, group=2, num_tokens=70, dtype=torch.float32, dim=64):
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(1, 2, group * rows, dim, generator=generator).to(dtype).to(device)
    kv = torch.randn(1, 2, num_tokens + 5, 2 * dim, generator=generator).to(dtype).to(device)
    return queries, kv, dim, num_tokens, rows, dim**-0.5


def test_splits_change_only_the_last_bits(device):
    inputs = plain(device, num_tokens=300)
    whole, whole_lse, _ = triton_ops.sparse_attention(*inputs, splits=1)
    for splits in (2, 3, 9):
        out, lse, _ = triton_ops.sparse_attention(*inputs, splits=splits)
        assert relative_error(out, whole) <= 1e-6
        assert relative_error(lse, whole_lse) <= 1e-6


def test_rows_that_see_nothing_are_zero(device):
    inputs = plain(device)
    mask = torch.ones(1, 1, 6, 70, dtype=torch.bool, device=device)
    mask[:, :, 4] = False
    for options in ({}, {"sinks": torch.zeros(2, 2, device=device)}):
        out, lse, mass = triton_ops.sparse_attention(*inputs, mask=mask, mass_block=1, **options)
        assert (out[:, :, 4] == 0).all()
        assert lse[:, :, 4].isneginf().all()
        assert mass.isfinite().all()
        assert (out[:, :, 3].abs() > 0).any()


def test_mask_of_one_batch_row_and_strided_tensors(device):
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(2, 6, 3, 64, generator=generator).to(device).transpose(1, 2)  # [batch, kv_heads, rows, dim]
    kv = torch.randn(2, 30, 3, 128, generator=generator).to(device).transpose(1, 2)
    mask = (torch.rand(1, 1, 28, 6, generator=generator) < 0.7).transpose(2, 3).to(device)
    mask[..., 26:] = True
    inputs = (queries, kv, 64, 28, 2, 0.125, mask)
    out, lse, _ = triton_ops.sparse_attention(*inputs)
    want, want_lse, _ = reference.sparse_attention(*inputs)
    assert relative_error(out, want) <= 1e-5
    assert relative_error(lse, want_lse) <= 1e-5


def test_large_scores_do_not_overflow(device):
    queries, *rest = plain(device)
    for factor in (1e3, 1e4):
        inputs = (queries * factor, *rest)
        assert relative_error(triton_ops.sparse_attention(*inputs)[0], reference.sparse_attention(*inputs)[0]) <= 1e-3
    capped = triton_ops.sparse_attention(queries * 1e6, *rest, softcap=2.0)[0]
    assert relative_error(capped, reference.sparse_attention(queries * 1e6, *rest, softcap=2.0)[0]) <= 1e-5


def test_refuses_what_it_cannot_take(device):
    queries, kv, dim, num_tokens, rows, scaling = plain(device)
    base = {"queries": queries, "kv": kv, "key_dim": dim, "num_tokens": num_tokens, "rows": rows, "scaling": scaling}
    table = torch.zeros(1, 2, 4, dtype=torch.int64, device=device)
    for message, change in {
        "one dtype": {"kv": kv.half()},
        "num_tokens=76": {"num_tokens": 76},
        "num_tokens=2 ": {"num_tokens": 2},
        "no multiple of rows": {"rows": 4},
        "mask has shape": {"mask": torch.ones(1, 3, 6, 70, dtype=torch.bool, device=device)},
        "mask must be bool": {"mask": torch.ones(1, 1, 6, 70, dtype=torch.int64, device=device)},
        "softcap=0": {"softcap": 0.0},
        "sinks has shape": {"sinks": torch.zeros(2, 3, device=device)},
        "slots end before": {"block_of_slot": table, "block_size": 17},
        "sliding_window=0": {"sliding_window": 0},
        "mass_block=3": {"mass_block": 3},
        "splits=99": {"splits": 99},
        "contiguous in its last": {"kv": kv.transpose(2, 3).contiguous().transpose(2, 3)},
        "queries has shape": {"key_dim": 63},
        "must lie in": {
            "queries": torch.zeros(1, 2, 6, 300, device=device),
            "kv": torch.zeros(1, 2, 75, 400, device=device),
            "key_dim": 300,
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            triton_ops.sparse_attention(**(base | change))
