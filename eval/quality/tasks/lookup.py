"""Many needles at once, in the manner of Text2JSON (arXiv 2604.08426): all records of a long text go into a JSON list.

The records lie scattered over prose. The list's names are given one after another, as a grammar that knows them would, and the
model fills in each number: a look-up at another depth every few tokens.
"""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample, Turn
from eval.quality.tasks.prompts import TURN_TOKENS, Chat, draw_keys, draw_numbers, prose_with

RECORDS = 6
# The text's second half: of like records in the first half small models take the newest.
FIRST_DEPTH = 0.4
RECORD = ' {{"name": "{key}", "number": "{number}"}}'
FIRST = '\n\nAll records of this text in one list:\n[{{"name": "{key}", "number": "'
NEXT = '"}}, {{"name": "{key}", "number": "'


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """A context and its whole list a sample, a record a turn; the list is in another order than the text."""
    chat = Chat(tokenizer)
    drawn = []
    for number in range(contexts):
        rng = random.Random(f"lookup {length} {number}")
        keys, values = draw_keys(rng, RECORDS), draw_numbers(rng, RECORDS)
        hidden = [
            (FIRST_DEPTH + (1 - FIRST_DEPTH) * idx / RECORDS, RECORD.format(key=key, number=value))
            for idx, (key, value) in enumerate(zip(keys, values, strict=True))
        ]
        turns = []
        for key, value in rng.sample(list(zip(keys, values, strict=True)), RECORDS):
            text = (NEXT if turns else FIRST).format(key=key)
            turns.append(Turn(tuple(chat.encode(text)), (value,), chat.answer_tokens(value)))
        taken = sum(len(turn.question_ids) + turn.new_tokens for turn in turns)
        ids, _ = prose_with(chat, length - max(taken, TURN_TOKENS), hidden, rng)
        name = f"lookup-{number}"
        drawn.append(Sample("lookup", length, name, name, tuple(ids), tuple(turns), "question"))
    return drawn
