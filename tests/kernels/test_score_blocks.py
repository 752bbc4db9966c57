"""Scoring kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from oasis_cache.kernels import reference, triton_ops
from tests.kernels.comparing import TOLERANCE, label, relative_error, sample
from tests.kernels.recording import as_meta, assert_all_branches, record

KINDS = ["int2", "int1", "minmax"]
CASES = sample(
    24,
    seed=0,
    kind=["int2", "int2", "int1", "minmax"],
    rows=[1, 2, 3, 4, 5, 6, 7, 8],
    group=[1, 3, 4, 8],
    dim=[64, 80, 96, 128, 192, 256],
    blocks=[1, 2, 7, 16, 33, 40],
    block_size=[16, 16, 16, 16, 8, 12],
    batch_heads=[(1, 1), (1, 2), (2, 1)],
    dtype=[torch.float32, torch.float32, torch.float16, torch.bfloat16],
    visible=[None, None, "padded", "holes"],
    splits=[1, 2, 3, None],
)
CASES += [
    CASES[0]
    | {"kind": kind, "rows": 2, "group": 4, "dim": 64, "blocks": 300, "block_size": 16, "batch_heads": (1, 1)}
    | {"dtype": torch.float32, "visible": None, "splits": 5, "seed": 100}
    for kind in ("int2", "minmax")
]


def arguments(case, device):
    generator = torch.Generator().manual_seed(case["seed"])
    batch, kv_heads = case["batch_heads"]
    blocks, block_size, dim, dtype = case["blocks"], case["block_size"], case["dim"], case["dtype"]
    queries = torch.randn(batch, kv_heads, case["group"] * case["rows"], dim, generator=generator).to(dtype)
    keys = torch.randn(batch, kv_heads, blocks + 3, block_size, dim, generator=generator).to(dtype)
    if case["kind"] == "minmax":
        arrays = [keys.amin(3), keys.amax(3)]
    else:
        quantise = reference.quantise_int2 if case["kind"] == "int2" else reference.quantise_int1
        arrays = list(quantise(keys))
    for array in arrays:  # spare capacity behind the blocks, as the index has it
        array[:, :, blocks:] = 255 if array.dtype == torch.uint8 else float("nan")
    visible = None
    if case["visible"] is not None:
        visible = torch.ones(batch, blocks, block_size, dtype=torch.bool)
        visible[0].view(-1)[: blocks * block_size // 3] = False
        if case["visible"] == "holes":
            visible &= torch.rand(visible.shape, generator=generator) < 0.4
            visible[:, 0] = False
    arrays = [array.to(device)[:, :, :blocks] for array in arrays]
    return (queries.to(device), *arrays, case["group"], dim**-0.5, None if visible is None else visible.to(device))


def functions(kind):
    return getattr(triton_ops, f"score_{kind}"), getattr(reference, f"score_{kind}")


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_reference(case, device):
    kernel, expected = functions(case["kind"])
    inputs = arguments(case, device)
    tolerance = TOLERANCE[case["dtype"]]
    names = ("rows", "best", "log_mass")
    for name, got, want in zip(names, kernel(*inputs, splits=case["splits"]), expected(*inputs), strict=True):
        assert relative_error(got, want) <= tolerance, name
        assert got.dtype == torch.float32


def test_cases_reach_every_branch(device):
    launches = []
    for case in CASES:
        kernel, _ = functions(case["kind"])
        inputs = [as_meta(value) for value in arguments(case, torch.device("cpu"))]
        launches += record(lambda kernel=kernel, inputs=inputs, case=case: kernel(*inputs, splits=case["splits"]))
    assert_all_branches(launches, "packed", {"BITS": {1, 2}, "HAS_VISIBLE": {False, True}})
    assert_all_branches(launches, "minmax", {"HAS_VISIBLE": {False, True}})
    assert_all_branches(launches, "rank", {"WITH_BEST": {False, True}, "HAS_SINKS": {False}})
    packed = [launch for launch in launches if launch.name == "packed"]
    assert any(launch.arguments["tiles_per_split"] > 1 for launch in packed)
    assert any(launch.grid[2] > 1 for launch in packed), "more rows than a tile holds"
    assert any(launch.constants["BLOCK_PAD"] > launch.constants["BLOCK_SIZE"] for launch in packed)
    assert any(launch.constants["PLANE_PAD"] > launch.constants["PLANE_DIM"] for launch in packed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_sees_no_block_scores_minus_one(kind, device):
    case = CASES[0] | {"kind": kind, "rows": 2, "blocks": 9, "batch_heads": (2, 1), "dtype": torch.float32}
    *inputs, visible = arguments(case | {"visible": "padded"}, device)
    visible[0] = False
    rows, best, log_mass = functions(kind)[0](*inputs, visible)
    assert (rows[0] == -1).all()
    assert (best[0] == -1).all()
    assert log_mass[0].isneginf().all()
    assert (rows[1] >= 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_strided_queries_and_wide_scores(kind, device):
    case = CASES[0] | {"kind": kind, "group": 4, "rows": 3, "blocks": 5, "visible": None, "dtype": torch.float32}
    queries, *rest = arguments(case, device)
    strided = torch.randn(*queries.shape[:2], queries.shape[3], queries.shape[2], device=device).transpose(2, 3) * 40
    kernel, expected = functions(kind)
    for got, want in zip(kernel(strided, *rest), expected(strided, *rest), strict=True):
        assert relative_error(got, want) <= 1e-4  # scores of several hundred: a float32's last bits weigh more


def test_refuses_what_it_cannot_take(device):
    queries, codes, low, step, group, scaling, _ = arguments(CASES[0] | {"kind": "int2", "visible": None}, device)
    score = triton_ops.score_int2
    for message, changed in {
        "contiguous within a KV head": (
            queries,
            codes,
            low.transpose(2, 3).contiguous().transpose(2, 3),
            step,
            group,
            scaling,
        ),
        "no multiple of the group": (queries, codes, low, step, queries.shape[2] + 1, scaling),
        "uint8": (queries, codes.to(torch.int32), low, step, group, scaling),
        "low and step bfloat16": (queries, codes, low.float(), step.float(), group, scaling),
        "queries must be": (queries.double(), codes, low, step, group, scaling),
        "above 256": (torch.zeros(1, 1, 4, 300, device=device), codes, low, step, 4, scaling),
        "codes has shape": (queries, codes[..., :-1].contiguous(), low, step, group, scaling),
        "at least one block": (queries, codes[:, :, :0], low[:, :, :0], step[:, :, :0], group, scaling),
    }.items():
        with pytest.raises(ValueError, match=message):
            score(*changed)
    with pytest.raises(ValueError, match="visible must be bool"):
        score(queries, codes, low, step, group, scaling, torch.ones(*codes.shape[:1], *codes.shape[2:4], device=device))
