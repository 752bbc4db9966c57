"""A chat whose cache is kept between turns: a turn feeds what is new, however long the conversation has become.

    python examples/chat.py                                          # an empty line ends
    python examples/chat.py --file report.txt                        # about a text file (UTF-8)
    python examples/chat.py --say "Name a river." --say "Where is it?"    # these turns, nothing to type

Every turn encodes the whole conversation and compares it with the tokens that the cache holds. Where they part, because a
chat template writes an earlier answer otherwise than the model did, the cache is cropped to what is common.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common import check_room, in_words, keep_common, load, number, read_text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.packaged import PACKAGED


class Chat:
    """A conversation: its messages, and a cache with the tokens that it holds."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: OasisCache) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: use a model that was tuned for chats")
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.messages: list[dict[str, str]] = []
        self.held: list[int] = []

    def say(self, text: str, new_tokens: int) -> str:
        """One turn: prints the answer as it comes, and returns it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        chat = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(chat, add_special_tokens=False, return_tensors="pt").input_ids.to(self.model.device)
        check_room(self.model, ids.shape[1], new_tokens)
        kept = keep_common(self.cache, self.held, ids[0].tolist())
        print(f"[{kept:,} tokens kept, {ids.shape[1] - kept:,} fed]")
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=new_tokens,
            do_sample=False,
            **cache_argument(self.model, self.cache),
        )
        self.held = output[0, : self.cache.get_seq_length()].tolist()
        answer = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def typed() -> Iterator[str]:
    """Lines from the terminal, up to an empty one."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="a text that comes before the first turn")
    parser.add_argument("--say", action="append", metavar="TEXT", help="a turn; may be given several times")
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=number(1), default=128, help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="default: a GPU if there is one")
    options = parser.parse_args(arguments)

    with in_words(parser):
        opening = read_text(options.file) + "\n\n" if options.file else ""
        model, tokenizer = load(options.model, options.device)
        with OasisCache(model_config=model.config, budget=options.budget) as cache:
            chat = Chat(model, tokenizer, cache)
            for turn in options.say or typed():
                chat.say(opening + turn, options.new_tokens)
                opening = ""
            print(cache)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
