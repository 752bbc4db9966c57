"""Many questions about one text: it is read once, and every question gets a copy of its cache.

    python examples/shared_prefix.py                                              # a text with three numbers hidden in it
    python examples/shared_prefix.py --file report.txt --ask "Who wrote it?" --ask "When?"

`copy.deepcopy` of an `OasisCache` shares the pages in host memory, which hold all keys and values. A copy has a working set and
an index of its own, and pages for its own tokens. So questions do not see each other, and all copies may live at once.
"""

from __future__ import annotations

import argparse
import copy
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from common import check_room, in_words, load, number, read_text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oasis_cache import OasisCache
from oasis_cache.demo import generate, prefill
from oasis_cache.display import in_bytes
from oasis_cache.haystack import NEEDLE, QUESTION, TASK, take_sentences
from oasis_cache.packaged import PACKAGED

NUMBERS = {"harbor": "4815162", "violin": "2718281", "glacier": "1618033"}
DOCUMENT = "<the document>"


def hidden_numbers(tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[str, list[str]]:
    """A text of about so many tokens with `NUMBERS` in it, and a question for each."""
    sentences = take_sentences(tokens, tokenizer, start=3000)
    for place, (key, value) in zip((0.2, 0.5, 0.8), NUMBERS.items(), strict=True):
        sentences.insert(int(place * len(sentences)), NEEDLE.format(key=key, number=value))
    return " ".join((TASK.strip(), *sentences)), [QUESTION.format(key=key).strip() for key in NUMBERS]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """int64 [1, tokens]."""
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def chat(tokenizer: PreTrainedTokenizerBase, question: str) -> tuple[str, str]:
    """What comes before the document, and what comes behind it, in the model's chat format if it has one."""
    content = f"{DOCUMENT}\n\n{question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        content = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, behind = content.split(DOCUMENT)
    return before, behind


def answer_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: str,
    questions: list[str],
    options: argparse.Namespace,
) -> None:
    prefix = encode(tokenizer, chat(tokenizer, "")[0] + document).to(model.device)
    endings = [encode(tokenizer, chat(tokenizer, question)[1]).to(model.device) for question in questions]
    check_room(model, prefix.shape[1] + max(ending.shape[1] for ending in endings), options.new_tokens)
    with OasisCache(model_config=model.config, budget=options.budget) as shared, ExitStack() as copies:
        prefill(model, prefix, shared)
        alone = shared.stats()
        print(f"{prefix.shape[1]:,} tokens read once: {in_bytes(alone.host_bytes_reserved)} of host memory\n")
        for question, ending in zip(questions, endings, strict=True):
            branch = copies.enter_context(copy.deepcopy(shared))
            new = generate(model, torch.cat([prefix, ending], dim=1), branch, options.new_tokens)
            print(f"{question}\n  {tokenizer.decode(new, skip_special_tokens=True).strip()}")
        together = shared.stats().host_bytes_reserved  # copies share the account of host memory
        more = (together - alone.host_bytes_reserved) / len(questions)
        own = alone.device_bytes + alone.index_bytes
        print(
            f"\n{len(questions)} copies at once: {in_bytes(together)} of host memory, {in_bytes(more)} more per copy; "
            f"{in_bytes(own)} of working set and index each"
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a text, UTF-8 (default: prose with numbers hidden in it)")
    parser.add_argument("--ask", action="append", metavar="QUESTION", help="may be given several times; with --file")
    parser.add_argument(
        "--context", type=number(1), default=2000, help="tokens of the default text (default: %(default)s)"
    )
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=number(1), default=32, help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="default: a GPU if there is one")
    options = parser.parse_args(arguments)
    if bool(options.file) != bool(options.ask):
        parser.error("--file and --ask belong together: a text, and questions about it")

    with in_words(parser):
        document, questions = (read_text(options.file), options.ask) if options.file else ("", [])
        model, tokenizer = load(options.model, options.device)
        if not questions:
            document, questions = hidden_numbers(tokenizer, options.context)
        answer_all(model, tokenizer, document, questions, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
