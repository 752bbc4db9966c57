"""What holds for all tests: no network, hypothesis profiles, and which tests run where."""

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, which torch itself does not do

from hypothesis import HealthCheck, settings

from tests.tracing import untraced

INTEGRATION = Path(__file__).parent / "integration"

# No deadline: the machines that run these tests are shared, and the first example of a shape is slower than the others. The same
# examples every time, so that a failure belongs to a change; `make fuzz` draws new ones.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("fuzz", settings.get_profile("default"), derandomize=False, max_examples=20_000)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Integration tests that are not slow are contract tests too; tests marked `gpu` need one."""
    for item in items:
        if INTEGRATION in item.path.parents and not item.get_closest_marker("slow"):
            item.add_marker("contract")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _untraced_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted out of coverage's sight: it leaves them out anyway, and following them takes most of their time."""
    launch = sys.modules.get("oasis_cache.kernels.triton_ops.launch")
    if launch is None or sys.gettrace() is None:
        return
    monkeypatch.setattr(launch, "start", functools.partial(untraced, launch.start))
