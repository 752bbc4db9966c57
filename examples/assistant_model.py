"""Assisted generation: a smaller model guesses the next tokens, the model confirms several of them in one forward.

    python examples/assistant_model.py                                      # the model's own first layers guess
    python examples/assistant_model.py --model Qwen/Qwen3-8B --assistant Qwen/Qwen3-0.6B --context 16000

`generate(assistant_model=...)` needs nothing from the cache but to be cropped. With an `OasisCache` the guesses serve twice: they
are rows of the same forward, so they also show which blocks the next step will want. The assistant has a cache of its own, which
transformers makes. An assistant with another tokenizer works too, more slowly.

First layers guess badly in a model that was not trained for it, as here: how many guesses are kept is printed, and it
decides whether assisted generation is faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache, OasisStats
from oasis_cache.cache import cache_argument
from oasis_cache.drafters import first_layers
from oasis_cache.haystack import hide_number
from oasis_cache.packaged import PACKAGED, load_model


@dataclass(frozen=True)
class Run:
    """One generation: its tokens, what the cache counted, and seconds with the prompt."""

    tokens: list[int]
    stats: OasisStats
    seconds: float

    @property
    def forwards(self) -> int:
        """Of the model, the prompt's own left out."""
        return self.stats.steps - self.stats.prefill_steps


def generate(model: PreTrainedModel, ids: torch.Tensor, options: argparse.Namespace, **assistance: Any) -> Run:
    """The answer to a prompt, int64 [1, tokens], with or without an assistant."""
    started = time.perf_counter()
    with OasisCache(model_config=model.config, budget=options.budget) as cache:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            **assistance,
            **cache_argument(model, cache),
        )
        return Run(output[0, ids.shape[1] :].tolist(), cache.stats(), time.perf_counter() - started)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--assistant", help="folder or hub name of a smaller model (default: the model's first layers)")
    parser.add_argument("--layers", type=int, default=10, help="how many first layers guess (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2000, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens to generate (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # else its assisted generation warns of what it does itself
    model, tokenizer = load_model(options.model, device=options.device)
    assistance: dict[str, Any] = {}
    if options.assistant is None:
        assistance["assistant_model"] = first_layers(model, options.layers)
    else:
        assistance["assistant_model"], own_tokenizer = load_model(options.assistant, device=options.device)
        if own_tokenizer.get_vocab() != tokenizer.get_vocab():
            assistance |= {"tokenizer": tokenizer, "assistant_tokenizer": own_tokenizer}

    task = hide_number(tokenizer, options.context, depth=0.5)
    ids = task.prompt_ids.to(model.device)
    plain, assisted = generate(model, ids, options), generate(model, ids, options, **assistance)
    print(f"The hidden number is {task.number}.")
    for name, run in (("alone", plain), ("assisted", assisted)):
        print(f"{name}: {tokenizer.decode(run.tokens, skip_special_tokens=True).strip()!r}")
        print(
            f"  {len(run.tokens)} tokens in {run.forwards} forwards and {run.seconds:.1f} s, hit rate {run.stats.hit_rate:.3f}"
        )
    print("The tokens are the same." if plain.tokens == assisted.tokens else "The tokens differ.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
