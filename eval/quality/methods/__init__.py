"""Caches to compare, a file each: every one is filled with the keys and values of the same exact prefill."""

from __future__ import annotations

from eval.quality.methods.base import Method
from eval.quality.methods.dense import Dense
from eval.quality.methods.oasis import OASIS
from eval.quality.methods.oracle import Oracle
from eval.quality.methods.quest import Quest
from eval.quality.methods.streaming import Streaming

DENSE = Dense()
METHODS: dict[str, Method] = {method.name: method for method in (DENSE, *OASIS, Quest(), Streaming(), Oracle())}


def methods_of(names: str) -> list[Method]:
    """Methods by their names, separated by commas; the dense one comes first and always.

    Raises:
        ValueError: A name is unknown.
    """
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {', '.join(map(repr, unknown))}; there are {', '.join(METHODS)}")
    return [DENSE, *(METHODS[name] for name in dict.fromkeys(wanted) if name != DENSE.name)]
