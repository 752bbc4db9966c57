"""Several numbers in one text, asked for in several ways: one of many, a change of topic, many turns.

One context serves all of them, so that a prefill buys many answers: a multi-key needle (RULER's niah_multikey, arXiv 2404.06654), a
topic shift (the second question's answer lies where the first never looked), and the reuse of one cache over several turns, the
last of which comes back to the first. The numbers lie in the text's second half: of like sentences in the first half small models
take the newest.
"""

from __future__ import annotations

import random
from functools import partial

from transformers import PreTrainedTokenizerBase

from eval.quality.needle import WAYS
from eval.quality.samples import Sample, Turn
from eval.quality.tasks.prompts import Chat, draw_keys, draw_numbers, prose_with

DEPTHS = (0.5, 0.7, 0.85)
INSTRUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about the "
    "numbers afterwards.\n"
)
HIDDEN = " One of the special magic numbers for {key} is: {number}."
QUESTION = "What is the special magic number for {key}?"
NEXT = "And for {key}?"
ANSWER = "One of the special magic numbers for {key} is:"
# All turns of the longest sample, so that every sample stays within the nominal length.
TURNS_TOKENS = 40 * (len(DEPTHS) + 1)


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """Per context: each key asked for alone in both ways, one change of topic, one chain of turns."""
    chat = Chat(tokenizer)
    drawn: list[Sample] = []
    for number in range(contexts):
        rng = random.Random(f"numbers {length} {number}")
        keys, values = draw_keys(rng, len(DEPTHS)), draw_numbers(rng, len(DEPTHS))
        number_of = dict(zip(keys, values, strict=True))
        hidden = [
            (depth, HIDDEN.format(key=key, number=number_of[key])) for depth, key in zip(DEPTHS, keys, strict=True)
        ]
        opening = chat.opening(INSTRUCTION)
        ids, depths = prose_with(chat, length - len(opening) - TURNS_TOKENS, hidden, rng)
        make = partial(Sample, length=length, context=f"numbers-{number}", context_ids=(*opening, *ids))

        def turns(*asked: str, number_of: dict[str, str] = number_of) -> tuple[Turn, ...]:
            made = []
            for key in asked:
                ask, text = (chat.next_question, NEXT) if made else (chat.question, QUESTION)
                question = ask(text.format(key=key), ANSWER.format(key=key))
                made.append(Turn(tuple(question), (number_of[key],), chat.answer_tokens(" " + number_of[key])))
            return tuple(made)

        for key, depth in zip(keys, depths, strict=True):
            name = f"{number}-{key}"
            drawn += [
                make(task="multikey", name=name, turns=turns(key), way=way, depth=round(depth, 3)) for way in WAYS
            ]
        drawn.append(make(task="topic-shift", name=str(number), turns=turns(keys[-1], keys[0])))
        order = rng.sample(keys, len(keys))
        drawn.append(make(task="turns", name=str(number), turns=turns(*order, order[0])))
    return drawn
