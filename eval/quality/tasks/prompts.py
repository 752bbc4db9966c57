"""Prompts in parts, in any tokenizer's chat format, and prose with things hidden in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from oasis_cache.haystack import KEYS, sentences, take_sentences

# Place holders in the chat template's input that no text contains, to cut the prompt where the parts meet.
_CUT = "\x00"
# Room that a context leaves for its questions and answers, so that the longest sample stays within its nominal length.
TURN_TOKENS = 48


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat format; plain text where it has none."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def opening(self, instruction: str) -> list[int]:
        """The beginning of a conversation: header, instruction; the document follows."""
        head, _ = self._render([{"role": "user", "content": instruction + _CUT}])
        return self.encode(head)

    def question(self, text: str, answer: str) -> list[int]:
        """What ends the user's turn after the document: the question, and the beginning of the answer."""
        _, tail = self._render([{"role": "user", "content": _CUT + "\n" + text}])
        return self.encode(tail + answer)

    def next_question(self, text: str, answer: str) -> list[int]:
        """What follows an answer: its end, the user's next question, and the beginning of the next answer."""
        if not self.tokenizer.chat_template:
            return self.encode(f"\n{text}\n{answer}")
        messages = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _CUT},
            {"role": "user", "content": text},
        ]
        return self.encode(self._render(messages)[1] + answer)

    def _render(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = messages[-1]["content"] + "\n"
        before, after = text.split(_CUT)
        return before, after

    def answer_tokens(self, answer: str) -> int:
        """Tokens that an answer takes."""
        return len(self.encode(answer))


def prose_with(
    chat: Chat, num_tokens: int, hidden: Sequence[tuple[float, str]], rng: random.Random
) -> tuple[list[int], list[float]]:
    """Natural prose with sentences hidden in it at sentence boundaries.

    Args:
        num_tokens: Length in tokens, reached but for a few.
        hidden: Depth (0 to 1) and text of each; the text brings its own white space.
        rng: Chooses the passage.

    Returns:
        Token ids, and the depth that each text got.

    Raises:
        ValueError: What is hidden takes more than `num_tokens`.
    """
    inserts = [chat.encode(text) for _, text in hidden]
    room = num_tokens - sum(map(len, inserts))
    start = rng.randrange(len(sentences()) // 2)
    hay = take_sentences(room, chat.tokenizer, start) if room > 0 else []
    if not hay:
        raise ValueError(
            f"num_tokens={num_tokens} leaves no room for prose beside what is hidden, {num_tokens - room} tokens"
        )
    pieces = [chat.encode(" " + sentence) for sentence in hay]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    places = [min(range(len(ends)), key=lambda idx: abs(ends[idx] - depth * ends[-1])) for depth, _ in hidden]
    ids: list[int] = []
    for idx in range(len(ends)):
        for place, insert in zip(places, inserts, strict=True):
            if place == idx:
                ids += insert
        ids += pieces[idx] if idx < len(pieces) else []
    return ids, [ends[place] / ends[-1] for place in places]


def draw_keys(rng: random.Random, count: int) -> list[str]:
    """Distinct words to hide numbers under."""
    if count > len(KEYS):
        raise ValueError(f"{count} keys were asked for, there are {len(KEYS)}")
    return rng.sample(KEYS, count)


def draw_numbers(rng: random.Random, count: int, digits: int = 5) -> list[str]:
    """Distinct numbers of that many digits."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
