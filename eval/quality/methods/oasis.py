"""OasisCache: the default configuration, the paper's index, and the paper's way to handle misses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache, PreTrainedModel

from eval.quality.methods.base import Counters, Method, OasisCounters, oasis_config
from oasis_cache import OasisCache


class Oasis(Method):
    """An `OasisCache` with these fields of `OasisConfig` set."""

    def __init__(self, name: str, title: str, describes: str, **options: Any) -> None:
        self.name, self.title, self.describes, self.options = name, title, describes, options

    @contextmanager
    def session(self, model: PreTrainedModel, budget: int, sparse_rows: int) -> Iterator[tuple[Cache, Counters]]:
        with OasisCache(oasis_config(budget, sparse_rows, **self.options), model_config=model.config) as cache:
            yield cache, OasisCounters(cache, model)


OASIS = (
    Oasis(
        "oasis",
        "OasisCache",
        'the default configuration (`index="int2"`, `on_miss="fetch"`); sink, recent and retrieved blocks are charged',
    ),
    Oasis("oasis-minmax", "OasisCache, `minmax`", "with the paper's index, bounds of the keys", index="minmax"),
    Oasis(
        "oasis-skip",
        'OasisCache, `on_miss="skip"`, cap 5 %',
        "the paper's behaviour: reads what is there, exchanges at most 5 % of the budget for the next step",
        on_miss="skip",
        max_fetch=0.05,
    ),
    Oasis(
        "oasis-skip-25",
        'OasisCache, `on_miss="skip"`, cap 25 %',
        "the same with at most 25 % of the budget exchanged",
        on_miss="skip",
        max_fetch=0.25,
    ),
    Oasis(
        "oasis-lookahead",
        'OasisCache, `lookahead="draft"`',
        "the default configuration with prefetching, which changes where blocks come from and no output",
        lookahead="draft",
    ),
)
