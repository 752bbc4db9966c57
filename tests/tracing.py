"""Calls out of coverage's sight: it follows all Python code, and that of other packages is most of what many tests run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def untraced(function: Callable, *arguments: Any, **options: Any) -> Any:
    """What a call returns that runs no line of the library, or none that coverage is to see."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        return function(*arguments, **options)
    finally:
        sys.settrace(trace)
