"""Common words (RULER's cwe, arXiv 2404.06654): a long list of words, of which some come much more often than the rest."""

from __future__ import annotations

import random
import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample, Turn
from eval.quality.tasks.prompts import TURN_TOKENS, Chat
from oasis_cache.haystack import sentences

COMMON, COMMON_TIMES, RARE_TIMES = 3, 30, 2
RARE_AT_ONCE = 8  # words by which a list grows until it fills its room
INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
QUESTION = "What are the {count} most common words in the above list?"
ANSWER = "The {count} most common words in the list are:"


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Lower-case words of five to eight letters out of the packaged text, in order of the alphabet."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{5,8}\b", " ".join(sentences()[:4000])))))


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """A list each. Common words come in shares of the list, so that longer lists ask for no more of them."""
    chat = Chat(tokenizer)
    drawn = []
    for number in range(contexts):
        rng = random.Random(f"words {length} {number}")
        question = chat.question(QUESTION.format(count=COMMON), ANSWER.format(count=COMMON))
        opening = chat.opening(INSTRUCTION)
        room = length - len(opening) - len(question) - TURN_TOKENS
        pool = rng.sample(vocabulary(), len(vocabulary()))
        common, rare = pool[:COMMON], iter(pool[COMMON:])
        times = COMMON_TIMES * length // 1024
        words = [word for word in common for _ in range(times)]
        ids: list[int] = []
        while True:
            longer = words + [next(rare) for _ in range(RARE_AT_ONCE)] * RARE_TIMES
            listed = rng.sample(longer, len(longer))
            candidate = chat.encode(" ".join(f"{idx}. {word}" for idx, word in enumerate(listed, 1)))
            if len(candidate) > room:
                break
            words, ids = longer, candidate
        turn = Turn(tuple(question), tuple(common), 30, ends=True)
        name = f"words-{number}"
        drawn.append(Sample("words", length, name, name, (*opening, *ids), (turn,)))
    return drawn
