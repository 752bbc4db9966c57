"""The dense cache of transformers: what all methods are measured against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel

from eval.quality.methods.base import Counters, Method


class Dense(Method):
    """`DynamicCache`."""

    name = "dense"
    title = "DynamicCache"
    describes = "transformers' own cache: every step reads everything"

    @contextmanager
    def session(self, model: PreTrainedModel, budget: int, sparse_rows: int) -> Iterator[tuple[Cache, Counters]]:
        cache = DynamicCache(config=model.config)
        yield cache, DenseCounters(cache)


class DenseCounters(Counters):
    """The length is all there is to tell."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    def as_dict(self) -> dict[str, Any]:
        return {"sparse_steps": 0, "tokens_read": float(self.cache.get_seq_length())}
