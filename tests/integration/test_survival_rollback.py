"""Survival cases, section B: assisted generation and rollback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.lookahead import LookaheadDecoding, PromptLookupDrafter, RandomDrafter
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    by_rules,
    case,
    dynamic,
    greedy,
    oasis_layers,
    selections,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


def repeating(length: int = 60) -> torch.Tensor:
    """A prompt in which prompt lookup finds something."""
    ids = models.prompt(length)
    ids[:, length - 20 : length - 5] = ids[:, 10:25]
    return ids


@case(22)
@CONFIGS
@pytest.mark.parametrize("name", ["qwen3-next-deep", "jamba", "falcon-h1"])
def test_recurrent_models_refuse_drafts(name, config):
    """Their state cannot go back: an error before the first token, never another sequence."""
    model, ids = models.build(name), repeating()
    cache = OasisCache(config, model_config=model.config)
    for drafts in (
        {"prompt_lookup_num_tokens": 3},
        {"custom_generate": LookaheadDecoding(PromptLookupDrafter())},
    ):
        with pytest.raises(ValueError, match=r"stateful|recurrent"):
            greedy(model, ids, cache, 8, **drafts)
        assert cache.get_seq_length() == 0 and cache.stats().steps == 0
    out = greedy(model, ids, cache, 8)
    if config is EXACT:
        assert torch.equal(out, greedy(model, ids, dynamic(model), 8))


@case(23)
@pytest.mark.parametrize("way", ["transformers", "lookahead"])
def test_convolutions_take_drafts_back(way):
    """LFM2 keeps its last inputs until drafts are judged: lossless, or refused."""
    model, ids = models.build("lfm2"), repeating()
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if way == "lookahead":
        drafts = {"custom_generate": LookaheadDecoding(PromptLookupDrafter())}
    for config in (EXACT, SPARSE):
        cache = OasisCache(config, model_config=model.config)
        try:
            out = greedy(model, ids, cache, 20, **drafts)
        except ValueError as error:
            refused = str(error)
        else:
            refused = None
        if refused is not None:
            assert any(word in refused for word in ("recurrent", "stateful", "cannot be cropped"))
            assert cache.get_seq_length() == 0
            return
        if config is EXACT:
            assert torch.equal(out, greedy(model, ids, dynamic(model), 20))
        else:
            assert torch.equal(out, by_rules("lfm2", config, ids, 20, **drafts).sequences)
            assert cache.stats().sparse_steps > 0


@case(25)
@CONFIGS
@pytest.mark.parametrize("repeats", [True, False])
def test_no_eos_and_rounds_without_drafts(model, config, repeats):
    ids = repeating() if repeats else torch.arange(2, 62)[None]
    cache = OasisCache(config, model_config=model.config)
    assert model.generation_config.eos_token_id is None
    out = greedy(model, ids, cache, 12, prompt_lookup_num_tokens=3, eos_token_id=None)
    if config is EXACT:
        assert torch.equal(out, greedy(model, ids, dynamic(model), 12))
    else:
        assert torch.equal(out, by_rules("llama-deep", SPARSE, ids, 12, prompt_lookup_num_tokens=3).sequences)


@case(26)
def test_drafts_in_float32_are_exact_and_in_bfloat16_near(model):
    """In bfloat16 sequences may part, but only where the two best logits are close together."""
    ids = repeating()
    exact = greedy(model, ids, dynamic(model), 24)
    assert torch.equal(greedy(model, ids, OasisCache(EXACT), 24, prompt_lookup_num_tokens=4), exact)
    brain = copy.deepcopy(model).bfloat16()
    plain = models.generate(brain, ids, OasisCache(EXACT), 24)
    drafted = models.generate(brain, ids, OasisCache(EXACT), 24, prompt_lookup_num_tokens=4)
    new = range(ids.shape[1], plain.sequences.shape[1])
    for step, position in enumerate(new):
        ours, theirs = (torch.stack(out.logits)[step, 0].float() for out in (drafted, plain))
        assert_close(ours, theirs, 0.05)
        if drafted.sequences[0, position] != plain.sequences[0, position]:
            best = theirs.topk(2).values
            assert best[0] - best[1] < 0.05 * theirs.abs().max()
            break


@case(28)
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "lfm2"])
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_back_to_an_earlier_turn_after_drafts(name, config):
    """Windows and convolutions hold what the next forward reads, and no more: a crop behind that is refused, not done by half."""
    model = models.build(name, "eager" if models.eager_only(name) else None)
    cache, twin = OasisCache(config, model_config=model.config), OasisCache(config, model_config=model.config)
    out = greedy(model, repeating(), cache, 10, prompt_lookup_num_tokens=3)
    held = cache.get_seq_length()
    with pytest.raises(RuntimeError, match=r"cannot go back 20 tokens but 0: call activate_past_recording"):
        cache.crop(-20)
    assert {int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length")} == {held}
    models.forward(model, out[:, :held], twin)
    step = out[:, held : held + 1]
    logits = [models.forward(model, step, each) for each in (cache, twin)]
    if config is EXACT:
        assert_close(*logits)
    cache.crop(-1)  # what came since is recorded
    assert cache.get_seq_length() == held


@case(28)
@CONFIGS
def test_assisted_decoding_edits_the_cache_in_place(model, config):
    cache = reference = OasisCache(config)
    out = models.generate(model, repeating(), cache, 15, prompt_lookup_num_tokens=3)
    layers = cache.layers
    assert cache is reference
    assert reference.get_seq_length() == out.sequences.shape[1] - 1 == 74
    cache.crop(-4)
    assert cache.layers is layers and {layer.get_seq_length() for layer in cache.layers} == {70}


@case(29)
@pytest.mark.parametrize(
    "config", [EXACT, OasisConfig(budget=8, block_size=2, recent_blocks=1, sparse_rows=4)], ids=["exact", "sparse"]
)
def test_speech_model_with_a_smaller_assistant(config, monkeypatch):
    """After each round the decoder's own cache holds what was accepted; the cross-attention cache never changes its length."""
    model = models.build_encoder_decoder("whisper")
    assistant = copy.deepcopy(model)
    assistant.model.decoder.layers = assistant.model.decoder.layers[:1]
    assistant.config.decoder_layers = assistant.config.num_hidden_layers = 1
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    features = torch.randn(1, 8, 80, generator=torch.Generator().manual_seed(3))

    def run(own: Any, **arguments: Any) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        cache, lengths = EncoderDecoderCache(own, DynamicCache()), []
        crop = EncoderDecoderCache.crop

        def watched(self, count):
            crop(self, count)
            if self is cache:
                lengths.append((int(self.get_seq_length()), int(self.cross_attention_cache.get_seq_length())))

        with monkeypatch.context() as patch:
            patch.setattr(EncoderDecoderCache, "crop", watched)
            out = GenerationMixin.generate(
                model,
                input_features=features,
                decoder_input_ids=models.prompt(12),
                max_new_tokens=16,
                do_sample=False,
                **{models.CACHE_ARGUMENT: cache},
                **arguments,
            )
        return out, lengths

    expected, _ = run(DynamicCache(config=model.config.get_text_config(decoder=True)))
    cache = OasisCache(config)
    out, lengths = run(cache, assistant_model=assistant)
    assert len(lengths) >= 3
    assert {cross for _, cross in lengths} == {40}
    own = [length for length, _ in lengths]
    assert own == sorted(own) and own[0] >= 12 and own[-1] == out.shape[1] - 1 == cache.get_seq_length()
    if config is EXACT:
        assert torch.equal(out, expected)
    else:
        assert cache.stats().sparse_steps > 0


@case(31)
@pytest.mark.parametrize(
    ("forwards", "phases"),
    [
        ((1,), ["prefill"]),
        ((1, 1), ["prefill", "dense"]),
        ((60,), ["prefill"]),
        ((60, 1), ["prefill", "sparse"]),
        ((60, 500), ["prefill", "streamed"]),
        ((60, 6, 1), ["prefill", "sparse", "sparse"]),
        ((32, 32, 32, 1), ["prefill", "streamed", "streamed", "sparse"]),
        ((20, 6, 14, 1), ["prefill", "dense", "dense", "sparse"]),
    ],
    ids=str,
)
def test_the_phase_follows_the_state_of_the_cache(model, forwards, phases):
    cache = OasisCache(SPARSE, model_config=model.config)
    seen = []
    for rows in forwards:
        models.forward(model, models.prompt(rows), cache)
        seen.append(cache.layers[0].phase)
    assert seen == phases


@case(32)
@pytest.mark.parametrize("chunks", [(20, 6, 1, 5, 8), (40,), (1, 39)], ids=str)
def test_below_the_budget_every_bit_is_the_dense_one(model, chunks):
    cache, complete = OasisCache(SPARSE, model_config=model.config), dynamic(model)
    for number, rows in enumerate(chunks):
        ids = models.prompt(rows, seed=number)
        assert torch.equal(models.forward(model, ids, cache), models.forward(model, ids, complete))
    assert cache.get_seq_length() == 40 and cache.stats().sparse_steps == 0


@case(32)
@pytest.mark.parametrize("index", ["int2", "minmax", "exact"])
def test_a_verify_step_reads_what_each_row_wants_most(index):
    """Three rows look for a block each: one selection holds all of them, and what comes out is what a step of each alone reads."""
    config = OasisConfig(
        budget=56, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=4, index=index, trace=True
    )
    cache = OasisCache(config)
    keys = 0.1 * torch.randn(1, 1, 200, 8)
    wanted = torch.eye(8)[:3] * 6
    for row, block in enumerate((4, 11, 17)):
        keys[0, 0, block * 8 + 3] = wanted[row]
    cache.update(keys, torch.randn(1, 1, 200, 8), 0)
    cache.update(0.1 * torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8), 0)
    query = wanted[None, None] * 2
    cache.layers[0].attend(query, None, 0.5, None, None, None, True)
    assert {4, 11, 17} <= set(cache.trace[0][0].selected[0, 0].tolist())


@case(34)
@pytest.mark.parametrize("drafter", [PromptLookupDrafter(), RandomDrafter(101)], ids=["lookup", "random"])
@pytest.mark.parametrize("config", [EXACT, SPARSE, SIMULATED], ids=["exact", "sparse", "simulated"])
def test_drafts_copies_and_second_turns_together(model, config, drafter):
    """Turn one with drafts, a copy, turn two with drafts from the copy: as if nothing had been there before."""
    config = OasisConfig(**{**config.__dict__, "trace": True})
    first, question = repeating(), models.prompt(12, seed=9)
    cache = OasisCache(config, model_config=model.config)
    decoding = LookaheadDecoding(drafter, num_drafts=3)
    answer = greedy(model, first, cache, 10, custom_generate=decoding)
    twin = copy.deepcopy(cache)
    steps = [len(layer.trace) for layer in oasis_layers(twin)]
    second = torch.cat([answer, question], 1)
    out = greedy(model, second, twin, 10, custom_generate=decoding)
    assert cache.get_seq_length() == 69 and twin.get_seq_length() == second.shape[1] + 9
    if config.budget == EXACT.budget:
        assert torch.equal(out, greedy(model, second, dynamic(model), 10))
        return
    cold = OasisCache(config, model_config=model.config)
    for layer, known in zip(cold.layers, oasis_layers(cache), strict=True):
        layer.update(*known.dense_keys_and_values())
    assert torch.equal(out, greedy(model, second, cold, 10, custom_generate=decoding))
    new = [steps_of[start:] for steps_of, start in zip(selections(twin), steps, strict=True)]
    assert new == selections(cold)


@case(34)
def test_what_a_rejected_draft_wanted_leaves_no_trace(model):
    """Selections after rejected drafts are those of the rules, which know no drafts."""
    ids = models.prompt(90)
    cache, complete = OasisCache(SIMULATED, model_config=model.config), DynamicCache()
    truth = models.build("llama-deep", oracle.NAME)
    models.forward(model, ids, cache)
    models.forward(model, ids, complete)
    for number in range(4):
        models.forward(model, models.prompt(6, seed=number), cache)
        cache.crop(-5)
        models.forward(model, models.prompt(6, seed=number)[:, :1], complete)
        step = models.prompt(1, seed=50 + number)
        with oracle.rules(SPARSE):
            probe = copy.deepcopy(complete)
            for layer, held in zip(probe.layers, cache.layers, strict=True):
                layer.keys, layer.values = (part.clone() for part in held.dense_keys_and_values())
            expected = models.forward(truth, step, probe)
        assert_close(models.forward(model, step, cache), expected, 2e-5)
        cache.crop(-1)
