"""What a decode step consists of: the time of its parts, and of a step without a context beside it.

A part's functions are timed from outside, by the clock around each call. None of them calls another one that is timed, so that in
each step the parts and the rest add up (their medians need not). The parts are those of the default configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from eval.bench.cases import Case
from eval.bench.filling import Source
from eval.bench.gpu.measure import Row
from eval.bench.measuring import WARM_UP, fill_all, row_of, timed_step
from eval.bench.providers import DYNAMIC, OASIS, providers
from oasis_cache import OasisCache, attend, kernels
from oasis_cache.cache import cache_argument
from oasis_cache.index import INDEXES
from oasis_cache.layer import OasisLayer
from oasis_cache.residency import Residency

WHOLE, REST, EMPTY = "the step", "the rest", "a step without a context"
CHOOSING = "choosing blocks"
# The holders and names of each part's functions.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "products with weights": ((torch.nn.Linear, "forward"),),
    CHOOSING: (
        *((index, "select") for index in INDEXES.values() if "select" in vars(index)),
        (attend, "score_blocks"),
        (attend, "choose_for_reading"),
    ),
    "moving blocks": ((Residency, "land"), (Residency, "demand")),
    "attention over what is there": ((kernels, "sparse_attention"),),
    "taking new tokens in": ((OasisLayer, "update"),),
}
EMPTY_TOKENS = 32


@contextmanager
def timed(spent: dict[str, float]) -> Iterator[None]:
    """Within, each part's milliseconds are added up in `spent`."""

    def around(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += 1e3 * (time.perf_counter() - begin)

        return wrapped

    own = [(holder, name, vars(holder)[name]) for places in PARTS.values() for holder, name in places]
    try:
        for part, places in PARTS.items():
            for holder, name in places:
                setattr(holder, name, around(vars(holder)[name], part))
        yield
    finally:
        for holder, name, function in own:
            setattr(holder, name, function)


@torch.inference_mode()
def measure_profile(
    model: PreTrainedModel, source: Source, case: Case, rounds: int, say: Callable[[str], None]
) -> list[Row]:
    """A row for each part of an OasisCache's step, in turns with a DynamicCache's step behind few tokens; `say` as in `measure`."""
    subjects = fill_all(model, source, case, rounds, providers((OASIS,)), say)
    if not subjects:
        return []
    cache = subjects[0].cache
    assert isinstance(cache, OasisCache)
    empty = DynamicCache(config=model.config)
    model(source.following[:, :EMPTY_TOKENS], **cache_argument(model, empty), use_cache=True, logits_to_keep=1)
    samples: dict[str, list[float]] = {name: [] for name in (WHOLE, *PARTS, REST, EMPTY)}
    with cache:
        for step in range(rounds + WARM_UP):
            spent = dict.fromkeys(PARTS, 0.0)
            with timed(spent):
                whole = timed_step(model, source, cache, case.context, step)
            bare = timed_step(model, source, empty, EMPTY_TOKENS, step)
            if step < WARM_UP:
                continue
            found = {WHOLE: whole, **spent, REST: whole - sum(spent.values()), EMPTY: bare}
            for name, value in found.items():
                samples[name].append(value)
    return [
        row_of(case, case.shape, DYNAMIC if name == EMPTY else OASIS, values, name) for name, values in samples.items()
    ]
