"""Perplexity by decoding: natural prose that goes on, fed token by token, so that every step of a sparse cache is sparse."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample
from eval.quality.tasks.prompts import Chat, prose_with

TARGET_TOKENS = 64


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """A passage each, whose last tokens are the continuation."""
    chat = Chat(tokenizer)
    drawn = []
    for number in range(contexts):
        ids, _ = prose_with(chat, length, [], random.Random(f"prose {length} {number}"))
        name = f"prose-{number}"
        context, target = tuple(ids[:-TARGET_TOKENS]), tuple(ids[-TARGET_TOKENS:])
        drawn.append(Sample("prose", length, name, name, context, target_ids=target))
    return drawn
