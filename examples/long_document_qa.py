"""Questions about a text file of your own. The file is read once, and not again for the next question.

    python examples/long_document_qa.py report.txt "What does the report say about costs?"
    python examples/long_document_qa.py report.txt "And about dates?" --keep caches     # keeps the file's cache in caches/
    python examples/long_document_qa.py report.txt "Who wrote it?" --keep caches        # begins where the file was read
    python examples/long_document_qa.py report.txt "..." --model Qwen/Qwen3-4B --budget 2048

The text is read exactly; the tokens of the answer, and a short question about a kept text, then read `--budget` tokens each. A
model reads no more tokens than it has positions, 8,192 for the packaged one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
from common import check_room, in_words, load, number, read_text
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.demo import prefill
from oasis_cache.packaged import PACKAGED

DOCUMENT = "<the document>"


def prompt(tokenizer: PreTrainedTokenizerBase, document: str, question: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt up to the document's end, which is the same for every question, and the rest. int64 [1, tokens] each."""
    content = f"{DOCUMENT}\n\n{question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        content = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = content.split(DOCUMENT)
    parts = (before + document, after)
    first, second = (tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids for part in parts)
    return first, second


def read(model: PreTrainedModel, ids: torch.Tensor, options: argparse.Namespace) -> OasisCache:
    """A cache that holds the document: loaded if it was kept, else read and, if wanted, kept."""
    started = time.perf_counter()
    kept = None
    if options.keep is not None:
        read_as = f"{options.model} {options.budget} {ids.tolist()}"  # other tokens, model or budget: another file
        kept = options.keep / f"{hashlib.sha256(read_as.encode()).hexdigest()[:16]}.safetensors"
    if kept is not None and kept.exists():
        cache = OasisCache.load(kept, model)
        print(f"Loaded {ids.shape[1]:,} tokens from {kept} in {time.perf_counter() - started:.1f} s\n")
        return cache
    cache = OasisCache(model_config=model.config, budget=options.budget)
    prefill(model, ids, cache)
    print(f"Read {ids.shape[1]:,} tokens in {time.perf_counter() - started:.1f} s\n")
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        cache.save(kept, model=model)
    return cache


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text, UTF-8")
    parser.add_argument("question")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where caches of files are kept for later questions"
    )
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=number(1), default=128, help="most tokens of the answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="default: a GPU if there is one")
    options = parser.parse_args(arguments)

    with in_words(parser):
        text = read_text(options.file)
        model, tokenizer = load(options.model, options.device)
        document, question = prompt(tokenizer, text, options.question)
        ids = torch.cat([document, question], dim=1).to(model.device)
        check_room(model, ids.shape[1], options.new_tokens)
        with read(model, document.to(model.device), options) as cache:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                max_new_tokens=options.new_tokens,
                do_sample=False,
                **cache_argument(model, cache),
            )
            print(f"\n{cache}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
