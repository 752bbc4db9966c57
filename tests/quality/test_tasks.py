"""Tasks draw the same samples every time, within their length, with what is asked for in the text."""

from __future__ import annotations

import pytest

from eval.quality.suites import SUITES, Part
from eval.quality.tasks import FAMILIES
from eval.quality.tasks.prompts import Chat
from oasis_cache import OasisConfig
from oasis_cache.packaged import packaged_model_dir
from tests.tokens import by_character

LOCAL = [family for family in FAMILIES if family != "ruler"]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(packaged_model_dir())


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("family", LOCAL)
def test_samples_fit_and_hold_what_they_ask_for(family, length, tokenizer):
    samples = FAMILIES[family](tokenizer, length, 3)
    assert samples == FAMILIES[family](tokenizer, length, 3)
    assert len({(sample.task, sample.name, sample.way) for sample in samples}) == len(samples)
    assert len({sample.context for sample in samples}) == 3
    for sample in samples:
        assert 0.93 * length <= len(sample.context_ids) + 200 and sample.num_tokens <= length
        text = tokenizer.decode(sample.context_ids)
        for turn in sample.turns:
            assert all(reference in text for reference in turn.references)
            assert not any(reference in tokenizer.decode(turn.question_ids) for reference in turn.references)
            assert all(turn.new_tokens >= len(tokenizer(reference)["input_ids"]) for reference in turn.references)
        if sample.depth is not None:
            place = text.index(sample.turns[0].references[0]) / len(text)
            assert sample.depth == pytest.approx(place, abs=0.1)


@pytest.mark.parametrize("family", ["needle", "numbers", "lookup"])
def test_questions_are_sparse_steps_by_default(family, tokenizer):
    """SmolLM2 reads them in one sparse step of the default configuration: nothing is tuned for the suite."""
    for sample in FAMILIES[family](tokenizer, 1024, 2):
        assert sample.sparse_rows <= OasisConfig().sparse_rows


def test_a_needle_lies_at_every_depth(tokenizer):
    depths = [sample.depth for sample in FAMILIES["needle"](tokenizer, 4096, 5) if sample.way == "answer"]
    assert depths == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=0.02)


def test_chat_parts_make_up_the_conversation(tokenizer):
    chat = Chat(tokenizer)
    parts = [chat.opening("Read this.\n"), chat.encode("The text."), chat.question("What?", "It is"), chat.encode(" 5")]
    parts.append(chat.next_question("And?", "That is"))
    messages = [
        {"role": "user", "content": "Read this.\nThe text.\nWhat?"},
        {"role": "assistant", "content": "It is 5"},
        {"role": "user", "content": "And?"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode([token for part in parts for token in part]) == whole + "That is"


def test_tokenizers_without_a_chat_format_get_plain_text():
    chat = Chat(by_character(chat=False))
    decode = chat.tokenizer.decode
    assert decode(chat.opening("Read.")) == "Read."
    assert decode(chat.question("What?", "It")) == "\nWhat?\nIt"
    assert decode(chat.next_question("And?", "It")) == "\nAnd?\nIt"


def test_suites_name_families_and_sizes_that_there_are():
    for parts in SUITES.values():
        assert all(part.family in FAMILIES for part in parts)
    lengths = {part.length for part in SUITES["full"]}
    assert lengths == {1024, 2048, 4096, 8192} == {part.length for part in SUITES["ruler"]}
    with pytest.raises(ValueError, match="shares above 0"):
        Part("needle", 1024, 1, (2.0,))


@pytest.mark.slow
def test_ruler_prompts_are_lm_evals(tokenizer):
    pytest.importorskip("lm_eval", reason="comes with the eval extra")
    samples = FAMILIES["ruler"](tokenizer, 1024, 1)
    assert len(samples) == 8 and all(sample.num_tokens <= 1024 + 8 for sample in samples)
    first = samples[0]
    prompt = tokenizer.decode(first.context_ids + first.turns[0].question_ids)
    assert prompt.startswith("A special magic number is hidden within the following text.")
    assert prompt.endswith("mentioned in the provided text is") and first.turns[0].references[0] in prompt
