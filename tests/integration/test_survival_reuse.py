"""Survival cases, section D: cache reuse, prefixes and several turns."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

from oasis_cache import OasisCache, OasisConfig, OasisWarning
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    assert_summaries,
    case,
    dynamic,
    greedy,
    oasis_layers,
    used_cache,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


@case(46)
@CONFIGS
@pytest.mark.parametrize("forwards", [(20,), (60, 1, 4), (60, 30)], ids=str)
def test_a_copy_holds_everything_and_lives_alone(model, config, forwards):
    cache = OasisCache(config, model_config=model.config, trace=True)
    for rows in forwards:
        models.forward(model, models.prompt(rows), cache)
    twin = copy.deepcopy(cache)
    assert twin.get_seq_length() == cache.get_seq_length()
    for mine, theirs in zip(twin.layers, cache.layers, strict=True):
        assert torch.equal(mine.dense_kv(), theirs.dense_kv())
        assert_summaries(mine)
        if mine.working_set is not None:
            assert torch.equal(mine.working_set.block_of_slot, theirs.working_set.block_of_slot)
    step = models.prompt(1, seed=9)
    expected = models.forward(model, step, cache)
    traced = [layer.trace[-1].selected for layer in oasis_layers(cache) if layer.trace]
    content = [layer.dense_kv() for layer in cache.layers]
    cache.close()
    del cache
    assert torch.equal(models.forward(model, step, twin), expected)
    for mine, old in zip(
        [layer.trace[-1].selected for layer in oasis_layers(twin) if layer.trace], traced, strict=True
    ):
        assert torch.equal(mine, old)
    for layer, old in zip(twin.layers, content, strict=True):
        assert torch.equal(layer.dense_kv(), old)
        layer.check_integrity()


@case(46)
def test_copies_share_the_host_memory(model):
    """A prefix with several continuations: the host tier grows by what they add."""
    prefix, answers = models.prompt(300), []
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, prefix, cache)
    reserved = cache.runtime.memory.reserved_bytes
    twins = [copy.deepcopy(cache) for _ in range(5)]
    assert cache.runtime.memory.reserved_bytes == reserved
    for seed, twin in enumerate(twins):
        ids = torch.cat([prefix, models.prompt(5, seed=seed)], 1)
        answers.append(greedy(model, ids, twin, 4))
        alone = OasisCache(SPARSE, model_config=model.config)
        models.forward(model, prefix, alone)
        assert torch.equal(answers[-1], greedy(model, ids, alone, 4))
    assert cache.runtime.memory.reserved_bytes < 1.5 * reserved
    assert cache.get_seq_length() == 300


@case(47)
@CONFIGS
def test_the_mask_says_how_many_tokens_there_are(model, config):
    ids = models.prompt(60)
    whole = torch.ones(1, 60, dtype=torch.int64)
    cache = OasisCache(config, model_config=model.config)
    models.forward(model, ids[:, :-1], cache)
    for length in (1, 30, 59):
        with pytest.raises(ValueError, match=r"attention mask covers|no new tokens"):
            greedy(model, ids[:, -1:], cache, 4, attention_mask=whole[:, :length])
        assert cache.get_seq_length() == 59
    positions: list[torch.Tensor] = []
    handle = model.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs["position_ids"] if "position_ids" in kwargs else args[1]),
        with_kwargs=True,
    )
    out = greedy(model, ids[:, -1:], cache, 4, attention_mask=whole)
    handle.remove()
    assert [part.flatten().tolist() for part in positions] == [[59], [60], [61], [62]]
    if config is EXACT:
        assert torch.equal(out[0, 1:], greedy(model, ids, dynamic(model), 4)[0, 60:])


@case(49)
@CONFIGS
def test_going_on_with_new_tokens_only(model, config):
    """With the mask over everything it works; with a short one, or none, one sentence says what to pass."""
    ids = models.prompt(60)
    cache = OasisCache(config, model_config=model.config)
    models.forward(model, ids[:, :-3], cache)
    for mask in (None, torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 40, dtype=torch.int64)):
        arguments = {} if mask is None else {"attention_mask": mask}
        with pytest.raises(ValueError, match=r"The cache holds 57 tokens: pass .* attention_mask over past and new"):
            greedy(model, ids[:, -3:], cache, 4, **arguments)
        assert cache.get_seq_length() == 57
    for short in (3, 59):
        with pytest.raises(ValueError, match=rf"attention mask covers {short} tokens, but 3 more come to the 57"):
            model(
                ids[:, -3:],
                attention_mask=torch.ones(1, short, dtype=torch.int64),
                **{models.CACHE_ARGUMENT: cache},
            )
        assert cache.get_seq_length() == 57
    out = greedy(model, ids[:, -3:], cache, 4, attention_mask=torch.ones(1, 60, dtype=torch.int64))
    if config is EXACT:
        assert torch.equal(out[0, 3:], greedy(model, ids, dynamic(model), 4)[0, 60:])
    assert cache.get_seq_length() == 63


@case(50)
@CONFIGS
@pytest.mark.parametrize("name", ["gemma3-deep", "gpt-oss-deep"])
def test_turns_of_a_windowed_model(name, config):
    """Three turns, each longer than the window; positions past it index nothing out of range."""
    model = models.build(name, "eager" if models.eager_only(name) else "sdpa")
    cache, complete = OasisCache(config, model_config=model.config), dynamic(model)
    conversation = dense = models.prompt(30)
    for turn in range(3):
        conversation = greedy(model, conversation, cache, 5)
        dense = greedy(model, dense, complete, 5)
        if config is EXACT:
            assert torch.equal(conversation, dense)
        question = models.prompt(9, seed=turn)
        conversation, dense = torch.cat([conversation, question], 1), torch.cat([dense, question], 1)
    assert cache.get_seq_length() == 30 + 2 * 14 + 4
    assert (cache.stats().sparse_steps > 0) == (config is not EXACT)


def picture(seed: int) -> dict[str, Any]:
    """A question about an image of 4 tokens for the tiny Qwen2-VL."""
    ids = models.prompt(14, seed=seed) % 90 + 2
    ids[0, 3:9] = torch.tensor([models.VISION_START, *[models.IMAGE_TOKEN] * 4, models.VISION_END])
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 12, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == models.IMAGE_TOKEN).long(),
    }


@case(52)
@CONFIGS
def test_another_image_after_a_reset(config):
    """The model keeps its position offsets between calls and tells a new run by the cache's length."""
    model = models.build_vision("qwen2-vl")

    def answer(cache: Any, seed: int) -> torch.Tensor:
        arguments = picture(seed)
        if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
            arguments.pop("mm_token_type_ids")
        return model.generate(
            **arguments, **{models.CACHE_ARGUMENT: cache}, max_new_tokens=40, do_sample=False, pad_token_id=0
        )

    cache, fresh = OasisCache(config), OasisCache(config)
    first = answer(cache, 1)
    assert cache.stats().oasis_layers == 2
    cache.reset()
    assert cache.get_seq_length() == 0
    second = answer(cache, 2)
    answer(DynamicCache(config=model.config), 1)
    assert torch.equal(second, answer(fresh, 2))
    if config is EXACT:
        assert torch.equal(first, answer(DynamicCache(config=model.config), 1))
        assert torch.equal(second, answer(DynamicCache(config=model.config), 2))
    else:
        assert fresh.stats().sparse_steps > 0


@case(53)
@pytest.mark.parametrize(
    "config", [EXACT, OasisConfig(budget=12, block_size=2, recent_blocks=2, sparse_rows=2)], ids=["exact", "sparse"]
)
def test_a_model_that_drops_its_cache(config):
    """Phi-3 crosses the length where its rotary factors change: it goes on without the cache, which says so and empties."""
    model = models.build("phi3-long", "sdpa")
    expected = models.generate(model, models.prompt(28), dynamic(model), 20)
    cache = OasisCache(config, model_config=model.config)
    with pytest.warns(OasisWarning, match=r"Phi3ForCausalLM computes its keys anew .* exceeds 32 tokens") as caught:
        out = models.generate(model, models.prompt(28), cache, 20)
    assert sum(warning.category is OasisWarning for warning in caught) == 1
    if config is EXACT:
        assert torch.equal(out.sequences, expected.sequences)
    assert used_cache(out) is not cache
    stats = cache.stats()
    assert stats.context_tokens == stats.host_bytes_reserved == stats.device_bytes == 0
    assert len(stats.warnings) == 1


@case(53)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
@pytest.mark.parametrize("tokens", [20, 33, 80])
def test_a_prompt_on_one_side_of_the_border_stays_in_the_cache(config, tokens):
    """The model would drop an empty cache as well, for nothing."""
    model = models.build("phi3-long", "sdpa")
    cache = OasisCache(config, model_config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OasisWarning)
        out = models.generate(model, models.prompt(tokens), cache, 10)
    assert used_cache(out) is cache and cache.get_seq_length() == tokens + 9
    if config is EXACT or tokens == 20:
        assert torch.equal(out.sequences, greedy(model, models.prompt(tokens), dynamic(model), 10))
    else:
        assert cache.stats().sparse_steps == 9 if tokens == 80 else 2


@case(55)
@CONFIGS
def test_embeddings_instead_of_ids(model, config):
    ids = models.prompt(60)
    embeds = model.get_input_embeddings()(ids)
    results = []
    for inputs in ({"input_ids": ids}, {"inputs_embeds": embeds}):
        cache = OasisCache(config)
        results.append(
            model.generate(
                **inputs,
                **{models.CACHE_ARGUMENT: cache},
                max_new_tokens=10,
                do_sample=False,
                pad_token_id=models.PADDING,
            )[:, -10:]
        )
        assert cache.get_seq_length() == 69
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="no new tokens are left of the 60 given"):
        model.generate(inputs_embeds=embeds, **{models.CACHE_ARGUMENT: cache}, max_new_tokens=2, pad_token_id=0)
    assert cache.get_seq_length() == 69


@case(56)
@CONFIGS
@pytest.mark.parametrize(
    "arguments", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 16}], ids=str
)
def test_what_generate_leaves_in_the_cache(model, config, arguments):
    """All tokens but the last: nothing is trimmed behind the user's back."""
    ids = models.prompt(60)
    ids[:, 40:55] = ids[:, 10:25]
    cache = OasisCache(config)
    out = models.generate(model, ids, cache, 10, **arguments)
    assert cache.get_seq_length() == out.sequences.shape[1] - 1 == 69


@case(49, 56)
@CONFIGS
def test_a_conversation_handed_over_whole(model, config):
    """Three turns with the whole conversation each time, then back to an earlier turn by a crop."""
    truth = models.build("llama-deep", oracle.NAME)
    cache, complete = OasisCache(config, model_config=model.config), DynamicCache()
    conversation = models.prompt(50)
    lengths = []
    for turn in range(3):
        with oracle.rules(config):
            expected = greedy(truth, conversation, complete, 6)
        conversation = greedy(model, conversation, cache, 6)
        assert torch.equal(conversation, expected)
        lengths.append(conversation.shape[1])
        conversation = torch.cat([conversation, models.prompt(12, seed=turn)], 1)
    back = lengths[0] - 1
    for each in (cache, complete):
        each.crop(back - int(each.get_seq_length()))
    other = torch.cat([conversation[:, : lengths[0]], models.prompt(3, seed=77)], 1)
    with oracle.rules(config):
        expected = greedy(truth, other, complete, 6)
    assert torch.equal(greedy(model, other, cache, 6), expected)
    assert config is EXACT or cache.stats().sparse_steps > 10
    assert_close(cache.layers[0].dense_keys_and_values()[0], complete.layers[0].keys, 1e-4)


@case(56)
@pytest.mark.parametrize("config", [EXACT, SIMULATED], ids=["exact", "simulated"])
def test_an_interrupted_answer_can_be_gone_on_from(model, config):
    """A stop by exception leaves complete forwards; the whole conversation again continues as if nothing had happened."""

    class Stop(Exception):
        pass

    class Streamer:
        count = 0

        def put(self, value: Any) -> None:
            self.count += 1
            if self.count == 4:
                raise Stop

        def end(self) -> None: ...

    ids = models.prompt(60)
    cache, twin = OasisCache(config), OasisCache(config)
    expected = greedy(model, ids, twin, 12)
    with pytest.raises(Stop):
        greedy(model, ids, cache, 12, streamer=Streamer())
    held = cache.get_seq_length()
    assert 60 < held < 71
    assert torch.equal(greedy(model, expected[:, : held + 1], cache, 71 - held), expected)


@pytest.fixture(scope="module")
def words():
    """A tokenizer with a word per token."""
    vocabulary = {"<pad>": 0, "<unk>": 1} | {f"w{number}": number for number in range(2, models.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


@case(56)
@CONFIGS
def test_pipelines_and_streamers(model, words, config):
    """`pipeline("text-generation")` with a cache among its arguments, one request or several; and a streamer to iterate."""
    text = " ".join(f"w{number}" for number in models.prompt(60)[0].tolist())
    generator = pipeline("text-generation", model=model, tokenizer=words)

    def ask(cache: Any, prompts: Any, **arguments: Any) -> Any:
        return generator(
            prompts,
            **{models.CACHE_ARGUMENT: cache},
            max_new_tokens=8,
            do_sample=False,
            return_full_text=False,
            pad_token_id=models.PADDING,
            **arguments,
        )

    expected = greedy(model, words(text, return_tensors="pt").input_ids, OasisCache(config), 8)
    cache = OasisCache(config)
    answer = ask(cache, text)[0]["generated_text"]
    assert words(answer).input_ids == expected[0, 60:].tolist()
    assert cache.get_seq_length() == 67
    short = " ".join(text.split()[-20:])
    batched = ask(OasisCache(config), [text, short], batch_size=2)
    assert batched[0][0]["generated_text"] == answer
    alone = ask(OasisCache(config), short)[0]["generated_text"]
    assert config is not EXACT or batched[1][0]["generated_text"] == alone
    with pytest.raises(ValueError, match=r"no new tokens are left"):
        ask(cache, text)  # the cache holds the prompt already
    streamer = TextIteratorStreamer(words, skip_prompt=True)
    ids = words(text, return_tensors="pt").input_ids
    arguments = (model, ids, OasisCache(config), 8)
    thread = threading.Thread(target=greedy, args=arguments, kwargs={"streamer": streamer})
    thread.start()
    assert "".join(streamer).split() == answer.split()
    thread.join()
