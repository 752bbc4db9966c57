"""The number of a survival case in a test's id: see `survival.case`."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def case(request: pytest.FixtureRequest) -> Any:
    """The number that `survival.case` names, else None."""
    return getattr(request, "param", None)
