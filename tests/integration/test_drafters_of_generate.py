"""Assisted generation with each drafter of `generate`: the tokens of plain decoding, and rows that predict blocks."""

from __future__ import annotations

import functools

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import DynamicCache, PreTrainedTokenizerFast

from oasis_cache import OasisCache
from tests import models

pytestmark = pytest.mark.contract

PROMPT_TOKENS, NEW_TOKENS = 200, 16
SPARSE = dict(budget=64, block_size=8, recent_blocks=2, sparse_rows=16)


def words(order: list[int]) -> PreTrainedTokenizerFast:
    """A tokenizer of words w0, w1, ... whose numbers are `order`."""
    vocabulary = {f"w{word}": number for word, number in enumerate(order)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w2")


@functools.cache
def drafters() -> dict[str, dict]:
    smaller = models.build("llama", num_hidden_layers=1)
    numbers = list(range(models.VOCABULARY))
    return {
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": smaller},
        "assistant, itself": {"assistant_model": models.build("llama")},
        "early exit": {"assistant_early_exit": 1},
        "assistant with another tokenizer": {
            "assistant_model": models.build("llama", num_hidden_layers=1, vocab_size=models.VOCABULARY - 8),
            "tokenizer": words(numbers),
            "assistant_tokenizer": words(numbers[:3] + numbers[-9:2:-1]),
        },
    }


NAMES = ["prompt lookup", "assistant", "assistant, itself", "early exit", "assistant with another tokenizer"]


def run(name: str | None, cache) -> tuple[torch.Tensor, torch.Tensor]:
    model = models.build("llama")
    ids = models.prompt(PROMPT_TOKENS)
    ids[:, 150:170] = ids[:, 20:40]
    out = models.generate(
        model, ids, cache, NEW_TOKENS, eos_token_id=None, **(drafters()[name] if name is not None else {})
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_plain_decoding(name):
    expected, _ = run(None, DynamicCache(config=models.build("llama").config))
    cache = OasisCache(budget=1024)
    tokens, _ = run(name, cache)
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() == PROMPT_TOKENS + NEW_TOKENS - 1


@pytest.mark.parametrize("name", NAMES)
def test_drafts_predict_and_predictions_change_no_bit(name):
    plain = OasisCache(**SPARSE, lookahead="off")
    tokens, logits = run(name, plain)
    assert plain.stats().sparse_steps > 0
    cache = OasisCache(**SPARSE, lookahead="draft", max_fetch=0.5, engine="simulated", trace=True)
    got, got_logits = run(name, cache)
    assert torch.equal(got, tokens)
    assert torch.equal(got_logits, logits)
    assert any(step.rows > 1 for step in cache.trace[0]), "no draft reached the cache"
    stats = cache.stats()
    assert stats.prefetched > 0
    assert stats.misses < plain.stats().misses
