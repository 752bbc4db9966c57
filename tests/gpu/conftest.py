"""Tests that need a CUDA device. `make gpu-check` runs them on a machine that has only torch, transformers and pytest.

That is why nothing here leans on tests/conftest.py, which needs hypothesis and is not loaded there.
"""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
