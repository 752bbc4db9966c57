"""Inputs, cases and error measures of the kernel tests."""

from __future__ import annotations

import random
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| over finite entries; infinite if infinities differ or anything is NaN."""
    out, reference = out.double().cpu(), reference.double().cpu()
    assert out.shape == reference.shape, f"{tuple(out.shape)} and {tuple(reference.shape)}"
    finite = reference.isfinite()
    if (
        not torch.equal(torch.where(finite, 0.0, reference), torch.where(finite, 0.0, out))
        or not out[finite].isfinite().all()
    ):
        return float("inf")
    norm = reference[finite].norm().item()
    difference = (out[finite] - reference[finite]).norm().item()
    return difference / norm if norm > 0 else difference


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality, NaN equal to itself."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def sample(count: int, seed: int, **choices: list[Any]) -> list[dict[str, Any]]:
    """`count` cases in which every choice of every parameter occurs about equally often, mixed at random."""
    generator = random.Random(seed)
    columns = {}
    for name, values in choices.items():
        column = [values[i % len(values)] for i in range(count)]
        generator.shuffle(column)
        columns[name] = column
    return [{name: column[i] for name, column in columns.items()} | {"seed": i} for i in range(count)]


def label(case: dict[str, Any]) -> str:
    """A readable test id."""
    return "-".join(str(value).removeprefix("torch.").replace(" ", "") for value in case.values())
