"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter (tests/conftest.py sets it up)."""

from __future__ import annotations

import pytest
import torch
import triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert triton.knobs.runtime.interpret, "triton was imported before TRITON_INTERPRET was set"
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is allocated without a value holds NaN, or an absurd number: unwritten results show."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate):
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.device.type == "meta":
            return tensor
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else 119)

    return poisoned


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """numpy warns about log(0) = -inf and inf - inf in places that the kernels discard; devices do not."""
    import numpy

    with numpy.errstate(all="ignore"):
        yield
