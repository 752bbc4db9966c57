"""One number in natural prose, by depth and length: the heat map's task (RULER's niah_single, arXiv 2404.06654)."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from eval.quality.needle import WAYS
from eval.quality.samples import Sample, Turn
from eval.quality.tasks.prompts import TURN_TOKENS, Chat, draw_keys, draw_numbers, prose_with

INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n"
)
HIDDEN = " One of the special magic numbers for {key} is: {number}."
QUESTION = "What is the special magic number for {key}?"
ANSWER = "The special magic number for {key} mentioned in the provided text is"
DEPTHS = 5


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """A context per number; depths are the beginnings of five equal parts of the text, one after another."""
    chat = Chat(tokenizer)
    drawn = []
    for number in range(contexts):
        rng = random.Random(f"needle {length} {number}")
        (key,), (value,) = draw_keys(rng, 1), draw_numbers(rng, 1, digits=7)
        question = tuple(chat.question(QUESTION.format(key=key), ANSWER.format(key=key)))
        opening = chat.opening(INSTRUCTION)
        room = length - len(opening) - len(question) - TURN_TOKENS
        hidden = [(number % DEPTHS / DEPTHS, HIDDEN.format(key=key, number=value))]
        ids, (depth,) = prose_with(chat, room, hidden, rng)
        turn = Turn(question, (value,), chat.answer_tokens(" " + value))
        context = f"needle-{number}"
        drawn += [
            Sample("needle", length, context, context, (*opening, *ids), (turn,), way, round(depth, 3)) for way in WAYS
        ]
    return drawn
