"""Variable tracking (RULER's vt, arXiv 2404.06654): a chain of assignments scattered over prose, whose names are asked for."""

from __future__ import annotations

import random
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample, Turn
from eval.quality.tasks.prompts import TURN_TOKENS, Chat, draw_numbers, prose_with

HOPS = 2
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
INSTRUCTION = "Memorize and track the chain of variable assignment hidden in the following text.\n"
QUESTION = "Find all variables that are assigned the value {number} in the text above."
ANSWER = "According to the chain of variable assignment, {count} variables are assigned the value {number}, they are:"


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """A chain and a context each."""
    chat = Chat(tokenizer)
    drawn = []
    for number in range(contexts):
        rng = random.Random(f"variables {length} {number}")
        names = ["".join(rng.sample(LETTERS, 3)) for _ in range(HOPS + 1)]
        (value,) = draw_numbers(rng, 1)
        steps = [f" VAR {names[0]} = {value}."]
        steps += [f" VAR {name} = VAR {before}." for before, name in pairwise(names)]
        question = chat.question(QUESTION.format(number=value), ANSWER.format(number=value, count=len(names)))
        opening = chat.opening(INSTRUCTION)
        room = length - len(opening) - len(question) - TURN_TOKENS
        ids, _ = prose_with(chat, room, [((idx + 0.5) / len(steps), step) for idx, step in enumerate(steps)], rng)
        turn = Turn(tuple(question), tuple(names), 30, ends=True)
        name = f"variables-{number}"
        drawn.append(Sample("variables", length, name, name, (*opening, *ids), (turn,)))
    return drawn
