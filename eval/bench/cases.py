"""The named cases: what is measured, behind how many tokens, in which type."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

CONTEXTS = (1024, 4096, 8192, 32768, 65536, 131072)
FLAT_CONTEXTS = (4096, 131072)
SHORT_CONTEXTS = (512, 1500)  # below the default `dense_below`
PROFILE_CONTEXTS = (8192, 32768, 131072)
BATCHES = (1, 2, 4, 8)
BATCH_CONTEXT = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One thing to measure, with several caches.

    Attributes:
        kind: "step": one decode step behind `context` tokens. "flat": the same with OasisCache behind a short and a long context,
            against each other. "short": a step where the context is within the budget. "batch": a step of several sequences.
            "profile": a step taken apart. "generate": a real prompt and 256 new tokens. "prefill": a real prompt read, its time and
            the peak of memory.
        size: What tells cases of a kind apart: tokens, or sequences; 0 where there is one case only.
        context: Tokens in the cache.
        batch: Sequences.
        budget: The OasisCache's, in tokens.
        rounds: How often each cache has its turn, unless the command says otherwise.
    """

    kind: str
    dtype: str
    size: int
    context: int
    batch: int = 1
    budget: int = 2048
    rounds: int = 9

    @property
    def name(self) -> str:
        return "-".join([self.kind, *([str(self.size)] if self.size else []), self.dtype])

    @property
    def shape(self) -> str:
        """What the ledger says about the sizes."""
        return f"context {self.context}, batch {self.batch}, budget {self.budget}"


CASES = tuple(
    case
    for dtype in DTYPES
    for case in (
        *(Case("step", dtype, context, context) for context in CONTEXTS),
        Case("flat", dtype, 0, max(FLAT_CONTEXTS)),
        *(Case("short", dtype, context, context, rounds=120) for context in SHORT_CONTEXTS),
        *(Case("batch", dtype, batch, BATCH_CONTEXT, batch) for batch in BATCHES),
        *(Case("profile", dtype, context, context, rounds=15) for context in PROFILE_CONTEXTS),
        Case("generate", dtype, 8192, 7900, rounds=3),
        Case("prefill", dtype, 32768, 32768, rounds=3),
    )
)
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))
BY_DEFAULT = "step,flat,short,batch,profile"  # those that need no real prefill


def chosen(names: str) -> list[Case]:
    """The cases that comma-separated names mean: a name, or its beginning up to a hyphen ("step", "step-8192").

    Raises:
        ValueError: A name means no case; the message lists all.
    """
    wanted = names_in(names, "cases", [case.name for case in CASES], _means)
    return [case for case in CASES if any(_means(name, case.name) for name in wanted)]


def names_in(names: str, what: str, known: list[str], means: Callable[[str, str], bool] = operator.eq) -> list[str]:
    """Comma-separated names, each of which means one of the known ones at least.

    Raises:
        ValueError: There is no name, or one means nothing known; the message says which, and lists the known ones.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in given if not any(means(name, each) for each in known)]
    if unknown or not given:
        raise ValueError(f"unknown {what}: {', '.join(unknown) or repr(names)}; there are {', '.join(known)}")
    return given


def _means(name: str, case: str) -> bool:
    return f"{case}-".startswith(f"{name}-")
