"""Families of tasks, a file each: `samples(tokenizer, length, contexts)` draws them, always the same ones."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample
from eval.quality.tasks import lookup, needle, numbers, prose, ruler, variables, words

FAMILIES: dict[str, Callable[[PreTrainedTokenizerBase, int, int], list[Sample]]] = {
    "needle": needle.samples,
    "numbers": numbers.samples,
    "lookup": lookup.samples,
    "variables": variables.samples,
    "words": words.samples,
    "prose": prose.samples,
    "ruler": ruler.samples,
}
