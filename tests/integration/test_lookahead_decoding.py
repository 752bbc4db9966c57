"""LookaheadDecoding against plain `generate`: tokens, logits, what stops it, sampling, streamers, the cache it leaves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from packaging.version import Version
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from oasis_cache import OasisCache
from oasis_cache.drafters import first_layers
from oasis_cache.lookahead import (
    AssistantDrafter,
    Drafter,
    DraftRequest,
    EarlyExitDrafter,
    LookaheadDecoding,
    NoDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    ReplayDrafter,
)
from tests import models

pytestmark = pytest.mark.contract

TOLERANCE = 1e-5
PROMPT_TOKENS = 40
NEW_TOKENS = 28
PADS = (0, 7, 23, 3)
DRAFTS = 4
BATCHES = [1, 4]
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "oasis": lambda model: OasisCache(model_config=model.config, budget=1024),
}


def inputs(batch: int) -> dict[str, torch.Tensor]:
    """A prompt in which prompt lookup finds something, alone or with ragged left padding."""
    ids, mask = models.left_padded(PROMPT_TOKENS, PADS[:batch], seed=19)
    ids[:, 32:38] = ids[:, 25:31]
    return {"input_ids": ids} if batch == 1 else {"input_ids": ids, "attention_mask": mask}


def run(model, batch: int, cache: Any = None, decoding: LookaheadDecoding | None = None, **options: Any) -> Any:
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": models.PADDING,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
        **inputs(batch),
        **options,
    }
    cache = DynamicCache(config=model.config) if cache is None else cache
    if decoding is not None:
        options["custom_generate"] = decoding
    return model.generate(**options, **{models.CACHE_ARGUMENT: cache})


@functools.cache
def plain(name: str, batch: int, **options: Any) -> Any:
    """What plain `generate` gives: sequences, logits, scores, and the keys of its last cache layer."""
    model = models.build(name)
    cache = DynamicCache(config=model.config)
    out = run(model, batch, cache, **options)
    out.keys = cache.layers[-1].keys
    return out


def continuation(name: str, batch: int) -> torch.Tensor:
    return plain(name, batch).sequences[:, PROMPT_TOKENS:]


def noisy(name: str, batch: int, wrong: tuple[float, ...] = (0.4, 0.1, 0.6, 0.8)) -> ReplayDrafter:
    """Drafts of which a share is wrong, another one for each sequence: they advance unevenly."""
    tokens = continuation(name, batch).clone()
    generator = torch.Generator().manual_seed(11)
    share = torch.tensor(wrong[:batch]).unsqueeze(1)
    flip = torch.rand(tokens.shape, generator=generator) < share
    return ReplayDrafter(torch.where(flip, (tokens + 1) % models.VOCABULARY, tokens))


DRAFTERS = {
    "none": lambda batch: NoDrafter(),
    "random": lambda batch: RandomDrafter(models.VOCABULARY),
    "replay": lambda batch: ReplayDrafter(continuation("llama", batch)),
    "noisy": lambda batch: noisy("llama", batch),
    "lookup": lambda batch: PromptLookupDrafter(),
    "assistant": lambda batch: AssistantDrafter(models.build("llama", num_hidden_layers=1)),
    "itself": lambda batch: AssistantDrafter(models.build("llama"), make_cache=lambda c: OasisCache(model_config=c)),
    "early exit": lambda batch: EarlyExitDrafter(1),
}
ALWAYS_RIGHT = ("replay", "itself")
SOMETIMES_RIGHT = (*ALWAYS_RIGHT, "noisy", "lookup", "early exit")


def assert_equals(out: Any, expected: Any, prompt_tokens: int = PROMPT_TOKENS) -> None:
    """Same tokens, and logits and scores the same within rounding, up to the end of each sequence."""
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.logits) == len(out.scores) == len(expected.logits) == out.sequences.shape[1] - prompt_tokens
    for mine, theirs in ((out.logits, expected.logits), (out.scores, expected.scores)):
        mine, theirs = torch.stack(mine), torch.stack(theirs)
        ended = (mine == 0).all(dim=-1)  # rows behind the end of a finished sequence
        assert not ended[0].any()
        assert torch.equal(mine.isinf(), theirs.isinf() & ~ended.unsqueeze(-1))
        kept = ~ended.unsqueeze(-1) & theirs.isfinite()
        assert models.relative_error(mine[kept], theirs[kept]) < TOLERANCE


# --- Equal to generate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_generate(batch, drafter, accept, cache):
    model = models.build("llama")
    decoding = LookaheadDecoding(DRAFTERS[drafter](batch), DRAFTS, accept=accept)
    cache = CACHES[cache](model)
    out = run(model, batch, cache, decoding)
    assert_equals(out, plain("llama", batch))
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    report = decoding.report
    assert report.tokens == batch * NEW_TOKENS
    assert (report.drafted > 0) == (drafter != "none")
    if not accept:
        assert (report.accepted, report.forwards) == (0, NEW_TOKENS - 1)
    elif drafter in ALWAYS_RIGHT:
        assert report.accepted == report.drafted == batch * (NEW_TOKENS - 1) - batch * report.forwards
        assert report.forwards == -(-(NEW_TOKENS - 1) // (DRAFTS + 1))
    elif drafter in SOMETIMES_RIGHT:
        assert 0 < report.accepted < report.drafted
        assert report.forwards < NEW_TOKENS - 1


@pytest.mark.parametrize("max_rows", [DRAFTS + 1, None, 32])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window", "gpt-oss", "phi", "deepseek-v3", "qwen3-moe"])
def test_uneven_sequences_leave_the_cache_of_generate(name, max_rows):
    """Every architecture, sliding windows too; the narrowest forward makes sequences wait for one another."""
    model, expected = models.build(name), plain(name, 4)
    decoding = LookaheadDecoding(noisy(name, 4), DRAFTS, max_rows=max_rows)
    cache = DynamicCache(config=model.config)
    out = run(model, 4, cache, decoding)
    assert_equals(out, expected)
    assert cache.get_seq_length() == PROMPT_TOKENS + NEW_TOKENS - 1
    assert models.relative_error(cache.layers[-1].keys[:, :, -15:], expected.keys[:, :, -15:]) < TOLERANCE
    if expected.keys.shape[2] > 16:
        assert models.relative_error(cache.layers[-1].keys, expected.keys) < TOLERANCE
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    widest = decoding.report.query_rows / decoding.report.forwards
    assert widest <= DRAFTS + 1 if max_rows == DRAFTS + 1 else widest > DRAFTS + 1
    assert decoding.report.forwards < NEW_TOKENS - 1


@pytest.mark.parametrize("batch", BATCHES)
def test_a_second_turn_on_the_same_cache(batch):
    model = models.build("llama")
    given = inputs(batch)
    question = models.prompt(9, batch, seed=8)

    def two_turns(decoding: LookaheadDecoding | None, drafts: torch.Tensor | None) -> list[torch.Tensor]:
        cache = OasisCache(model_config=model.config, budget=1024)
        first = run(model, batch, cache, decoding).sequences
        ids = torch.cat([first, question], dim=1)
        mask = torch.ones_like(ids)
        if batch > 1:
            mask[:, :PROMPT_TOKENS] = given["attention_mask"]
        again = None if drafts is None else LookaheadDecoding(ReplayDrafter(drafts), 3)
        out = run(model, batch, cache, again, input_ids=ids, attention_mask=mask)
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        return [first, out.sequences]

    expected = two_turns(None, None)
    drafts = expected[1][:, expected[0].shape[1] + 9 :].clone()
    drafts[0, ::4] = 5
    got = two_turns(LookaheadDecoding(noisy("llama", batch), DRAFTS), drafts)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_other_ways_to_prefill():
    """Chunks; embeddings instead of ids; new ids only behind a filled cache."""
    model, expected = models.build("llama"), plain("llama", 4)
    decoding = LookaheadDecoding(noisy("llama", 4), DRAFTS)
    assert_equals(run(model, 4, None, decoding, prefill_chunk_size=16), expected)

    given = inputs(4)
    embeds = model.get_input_embeddings()(given["input_ids"])
    out = run(model, 4, None, decoding, input_ids=None, inputs_embeds=embeds)
    assert torch.equal(out.sequences, expected.sequences[:, PROMPT_TOKENS:])

    cache, past = DynamicCache(config=model.config), 20
    models.forward(model, given["input_ids"][:, :past], cache, given["attention_mask"][:, :past])
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)[:, past:]
    ids = given["input_ids"][:, past:]
    out = run(model, 4, cache, decoding, input_ids=ids, attention_mask=given["attention_mask"], position_ids=positions)
    assert torch.equal(out.sequences, expected.sequences[:, past:])


# --- What stops it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_eos_inside_a_draft(batch, accept):
    """Sequences end at different places, one of them in the middle of accepted drafts; the rest is padding."""
    model, tokens = models.build("llama"), continuation("llama", batch)
    eos = [int(tokens[0, 7])] if batch == 1 else [int(tokens[0, 7]), int(tokens[1, 13]), int(tokens[2, 2])]
    expected = run(model, batch, eos_token_id=eos)
    ends = [int(torch.isin(row, torch.tensor(eos)).nonzero()[0]) for row in tokens]
    assert len(set(ends)) >= min(batch, 3)
    if batch == 1:
        assert 5 < ends[0] < NEW_TOKENS - 1
        assert ends[0] % (DRAFTS + 1) not in (0, DRAFTS)
    cache = DynamicCache(config=model.config)
    decoding = LookaheadDecoding(ReplayDrafter(tokens), DRAFTS, accept=accept)
    out = run(model, batch, cache, decoding, eos_token_id=eos)
    assert_equals(out, expected)
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    expected_cache = expected[models.CACHE_ARGUMENT]
    for mine, theirs in zip(cache.layers, expected_cache.layers, strict=True):
        assert models.relative_error(mine.values, theirs.values) < TOLERANCE
    if accept:
        assert decoding.report.forwards < max(ends) / 2
        for row, end in enumerate(ends):
            assert all(logits[row].any() == (position <= end) for position, logits in enumerate(out.logits))
    assert decoding.report.tokens == sum(end + 1 for end in ends)


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"max_new_tokens": 3}, {"max_length": PROMPT_TOKENS + 6}])
def test_length_limits(options):
    model = models.build("llama")
    options = {"max_new_tokens": None, **options}
    cache = DynamicCache(config=model.config)
    out = run(model, 4, cache, LookaheadDecoding(noisy("llama", 4, (0.0, 0.9, 0.0, 0.9)), 8), **options)
    assert_equals(out, run(model, 4, **options))
    assert cache.get_seq_length() == out.sequences.shape[1] - 1


class TokenSeen(StoppingCriteria):
    """Done when the last token is one of some; remembers how long the sequences were that it was asked about."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)
        self.asked: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - PROMPT_TOKENS
        if input_ids.shape[0] == 1:
            self.asked.append(input_ids[0].tolist())
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_custom_stop_criteria(batch, accept, with_eos):
    """Without an EOS token a sequence that is done goes on until the last one is, as in `generate`; with one it is padded."""
    model, tokens = models.build("llama"), continuation("llama", batch)
    stops = [int(row[place]) for row, place in zip(tokens, (11, 3, 17, 6), strict=False)]
    options = {"eos_token_id": models.VOCABULARY - 1} if with_eos else {}
    assert not (tokens == models.VOCABULARY - 1).any()
    theirs, mine = TokenSeen(stops), TokenSeen(stops)
    expected = run(model, batch, stopping_criteria=StoppingCriteriaList([theirs]), **options)
    assert PROMPT_TOKENS + 3 < expected.sequences.shape[1] < PROMPT_TOKENS + NEW_TOKENS
    cache = DynamicCache(config=model.config)
    decoding = LookaheadDecoding(noisy("llama", batch, (0.0, 0.3, 0.6, 0.0)), DRAFTS, accept=accept)
    out = run(model, batch, cache, decoding, stopping_criteria=StoppingCriteriaList([mine]), **options)
    assert_equals(out, expected)
    assert cache.get_seq_length() == out.sequences.shape[1] - 1
    assert mine.asked == theirs.asked  # accepted tokens only, in order


def test_stop_strings():
    model, tokens = models.build("llama"), continuation("llama", 4)
    words = {f"w{i}": i for i in range(2, models.VOCABULARY - 1)}
    words |= {
        "<pad>": 0,
        "<unk>": 1,
        "abcdef": models.VOCABULARY - 1,
    }  # StopStringCriteria tries tokens behind "abcdef"
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>")
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [f"w{int(tokens[0, 9])}", f"w{int(tokens[3, 6])}"])])
    options = {"stopping_criteria": criteria, "eos_token_id": models.VOCABULARY - 1}
    expected = run(model, 4, **options)
    assert (expected.sequences[0, PROMPT_TOKENS + 10 :] == models.PADDING).all()
    assert_equals(run(model, 4, None, LookaheadDecoding(noisy("llama", 4), DRAFTS), **options), expected)


# --- Logits processors ------------------------------------------------------------------------------------------------


class Recorder(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        return scores


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 3.0},
    "no repeated pairs": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(2, 60))},
    "forced end": {"forced_eos_token_id": 7, "eos_token_id": 7, "max_new_tokens": 10},
    # The allowed tokens depend on the place in the batch and on the last token.
    "prefix function": {
        "prefix_allowed_tokens_fn": lambda row, ids: range(2 + 9 * row + int(ids[-1]) // 4, 60 + 9 * row)
    },
}


@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(name, accept):
    """At every position the processors see the tokens that the sequence has there, those of the same forward included."""
    model, options = models.build("llama"), PROCESSORS[name]
    expected = run(model, 4, **options)
    assert not torch.equal(
        expected.sequences, run(model, 4, max_new_tokens=options.get("max_new_tokens", NEW_TOKENS)).sequences
    )
    drafts = expected.sequences[:, PROMPT_TOKENS:].clone()
    drafts[1, ::3] = 4
    drafts[2, ::2] = 4
    decoding = LookaheadDecoding(ReplayDrafter(drafts), DRAFTS, accept=accept)
    assert_equals(run(model, 4, None, decoding, **options), expected)
    assert decoding.report.accepted > 0 if accept else decoding.report.accepted == 0


def test_processors_see_accepted_tokens_only():
    model = models.build("llama")
    mine, theirs = Recorder(), Recorder()
    run(model, 1, logits_processor=LogitsProcessorList([theirs]))
    run(
        model,
        1,
        None,
        LookaheadDecoding(noisy("llama", 1, (0.4,)), DRAFTS),
        logits_processor=LogitsProcessorList([mine]),
    )
    assert mine.seen == theirs.seen


@pytest.mark.parametrize("accept", [True, False])
def test_classifier_free_guidance(accept):
    """A processor with a cache of its own, which counts on one call per token."""
    model = models.build("llama")
    options = {"guidance_scale": 2.5, "negative_prompt_ids": models.prompt(5, 1, seed=4), "max_new_tokens": 12}
    expected = run(model, 1, **options)
    drafts = expected.sequences[:, PROMPT_TOKENS:].clone()
    drafts[0, 5] = 3
    decoding = LookaheadDecoding(ReplayDrafter(drafts), DRAFTS, accept=accept)
    assert torch.equal(run(model, 1, None, decoding, **options).sequences, expected.sequences)
    if accept:
        assert decoding.report.accepted > 0
        with pytest.raises(ValueError, match="one call per token"):
            run(model, 4, None, decoding, guidance_scale=2.5, negative_prompt_ids=models.prompt(5, 4))


# --- Sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
def test_sampling_without_acceptance_draws_the_tokens_of_generate(batch):
    model = models.build("llama")
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20, "eos_token_id": list(range(30, 34))}
    torch.manual_seed(5)
    expected = run(model, batch, **options)
    torch.manual_seed(5)
    out = run(model, batch, None, LookaheadDecoding(PromptLookupDrafter(), DRAFTS, accept=False), **options)
    assert_equals(out, expected)
    assert not torch.equal(out.sequences, run(model, batch, **options).sequences)


VOCABULARY = 7
SAMPLES = 3000


def chi_square(sequences: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of samples [samples, 3] for a joint distribution [vocabulary] * 3; rare outcomes count together."""
    counts = torch.bincount((sequences * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1), minlength=VOCABULARY**3)
    expected = probabilities.flatten() * len(sequences)
    rare = expected < 8
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)]).double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


@torch.no_grad()
def joint_distribution(model, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[vocabulary] * 3: probability of the next three tokens."""
    tails = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    rows = torch.cat([ids.expand(len(tails), -1), tails], dim=1)
    probabilities = (model(rows).logits[:, -3:].double() / temperature).softmax(-1)
    first = probabilities[torch.arange(len(tails)), 0, tails[:, 0]]
    second = probabilities[torch.arange(len(tails)), 1, tails[:, 1]]
    return ((first * second).unsqueeze(1) * probabilities[:, 2]).view(VOCABULARY, VOCABULARY, VOCABULARY)


@pytest.mark.parametrize("drafted", ["likely", "unlikely", None])
def test_sampling_keeps_the_distribution(drafted):
    """Joint distribution of three sampled tokens, drafts accepted, against that of the target; chi-square, seeded."""
    model = models.build("llama", vocab_size=VOCABULARY, num_hidden_layers=1)
    ids, temperature = torch.tensor([[2, 5, 3, 6, 4, 2]]), 1.5
    probabilities = joint_distribution(model, ids, temperature)
    options = {
        "input_ids": ids.expand(SAMPLES, -1),
        "max_new_tokens": 4,
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "return_dict_in_generate": False,
    }
    decoding = None
    if drafted is not None:
        ranked = probabilities.sum((0, 2)).argsort(descending=True), probabilities.sum((0, 1)).argsort(descending=True)
        place = 0 if drafted == "likely" else 3
        draft = [0, int(ranked[0][place]), int(ranked[1][place])]
        decoding = LookaheadDecoding(ReplayDrafter([draft] * SAMPLES), 2)
    torch.manual_seed(17)
    sequences = run(model, 1, None, decoding, attention_mask=torch.ones(SAMPLES, 6, dtype=torch.int64), **options)
    assert chi_square(sequences[:, 6:9], probabilities) > 0.01
    other = probabilities.pow(1.1) / probabilities.pow(1.1).sum()
    assert chi_square(sequences[:, 6:9], other) < 0.01  # the test can tell
    if decoding is not None:
        assert 0.02 < decoding.report.accepted / decoding.report.drafted < 0.95


# --- Streamers --------------------------------------------------------------------------------------------------------


class Puts(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("accept", [True, False])
def test_streamer(accept):
    model = models.build("llama")
    eos = int(continuation("llama", 1)[0, 7])
    mine, theirs = Puts(), Puts()
    run(model, 1, streamer=theirs, eos_token_id=eos)
    decoding = LookaheadDecoding(noisy("llama", 1), DRAFTS, accept=accept)
    out = run(model, 1, None, decoding, streamer=mine, eos_token_id=eos)
    assert mine.puts == theirs.puts
    assert (mine.ended, theirs.ended) == (1, 1)
    assert [token for put in mine.puts for token in put] == out.sequences[0].tolist()


# --- A sparse cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_sparse_budget(batch, accept):
    """Every forward but the prefill is sparse, whether drafts are kept or only point at blocks."""
    model = models.build("llama")
    ids, mask = models.left_padded(160, PADS[:batch], seed=1)
    cache = OasisCache(model_config=model.config, budget=48, block_size=8, recent_blocks=2, sparse_rows=8)
    decoding = LookaheadDecoding(EarlyExitDrafter(1), DRAFTS, accept=accept)
    out = run(model, batch, cache, decoding, input_ids=ids, attention_mask=mask)
    stats, report = cache.stats(), decoding.report
    assert report.query_rows > report.forwards
    assert stats.prefill_steps == 1
    assert stats.sparse_steps == stats.steps - 1 >= report.forwards
    assert stats.tokens_read_max <= 48
    assert cache.get_seq_length() == out.sequences.shape[1] - 1 == 160 + NEW_TOKENS - 1
    for layer in cache.layers:
        layer.check_integrity()
    assert report.accepted > 0 if accept else report.accepted == 0
    if not accept:
        assert report.forwards == NEW_TOKENS - 1 == stats.sparse_steps
        again = OasisCache(model_config=model.config, budget=1024)
        dense = run(model, batch, again, decoding, input_ids=ids, attention_mask=mask)
        assert again.stats().sparse_steps == 0
        assert models.relative_error(torch.stack(out.logits), torch.stack(dense.logits)) > TOLERANCE


@pytest.mark.parametrize("batch", BATCHES)
def test_rejected_drafts_bring_blocks_in_time(batch):
    """OasisKV's loop: predicting by draft rows finds more blocks on the device, and does not change what comes out."""
    model = models.build("llama")
    ids, mask = models.left_padded(200, PADS[:batch], seed=1)
    options = {"input_ids": ids, "attention_mask": mask}
    right = run(model, batch, **options).sequences[:, 200:]
    drafters = {"right": ReplayDrafter(right), "wrong": ReplayDrafter((right + 1) % models.VOCABULARY)}
    logits, hits = {}, {}
    for lookahead, drafter in (("off", "right"), ("previous", "right"), ("draft", "right"), ("draft", "wrong")):
        cache = OasisCache(
            budget=48, block_size=8, recent_blocks=2, sparse_rows=8, lookahead=lookahead, max_fetch=None, engine="sync"
        )
        out = run(model, batch, cache, LookaheadDecoding(drafters[drafter], 2, accept=False), **options)
        logits[lookahead, drafter], hits[lookahead, drafter] = torch.stack(out.logits), cache.stats().hit_rate
    assert torch.equal(logits["draft", "right"], logits["off", "right"])
    assert torch.equal(logits["previous", "right"], logits["off", "right"])
    assert hits["draft", "right"] > hits["previous", "right"] > hits["off", "right"]
    assert hits["draft", "right"] > hits["draft", "wrong"]


@pytest.mark.parametrize("batch", BATCHES)
def test_drafts_that_are_always_rejected_change_nothing_on_a_sparse_budget(batch):
    """With `accept=False` the certain row alone decides what attention reads: right drafts, wrong ones and none give one output."""
    model = models.build("llama")
    ids, mask = models.left_padded(200, PADS[:batch], seed=1)
    options = {"input_ids": ids, "attention_mask": mask}
    right = run(model, batch, **options).sequences[:, 200:]
    drafters = {"none": NoDrafter(), "right": ReplayDrafter(right), "wrong": RandomDrafter(models.VOCABULARY)}
    logits = {}
    for name, drafter in drafters.items():
        cache = OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=8)
        out = run(model, batch, cache, LookaheadDecoding(drafter, 4, accept=False), **options)
        assert cache.stats().sparse_steps == NEW_TOKENS - 1
        logits[name] = torch.stack(out.logits)
    assert models.relative_error(logits["right"], logits["none"]) < TOLERANCE
    assert models.relative_error(logits["wrong"], logits["none"]) < TOLERANCE


def test_filler_rows_take_no_budget():
    """A sequence without drafts reads the same blocks whether the others of its batch have drafts or not."""
    model = models.build("llama")
    ids, mask = models.left_padded(200, (0, 0), seed=1)
    right = run(model, 2, input_ids=ids, attention_mask=mask).sequences[:, 200:]
    logits = []
    for drafted in (0, 4):
        drafter = OneSided(right[0], drafted)
        cache = OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=8)
        out = run(model, 2, cache, LookaheadDecoding(drafter, 4), input_ids=ids, attention_mask=mask, max_new_tokens=8)
        logits.append(out.logits[1][1])
    assert models.relative_error(logits[1], logits[0]) < TOLERANCE


class OneSided(Drafter):
    """Drafts for the first sequence alone."""

    def __init__(self, tokens, count):
        self.tokens, self.count = tokens, count

    def draft(self, request):
        drafts = request.nothing()
        done = request.lengths[0] - request.num_prompt
        drafts[0] = self.tokens[done : done + min(self.count, request.limits[0])]
        return drafts


def test_row_roles_are_checked():
    model, cache = models.build("llama"), OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=8)
    with torch.no_grad():
        model(models.prompt(200), past_key_values=cache)
        with (
            pytest.raises(ValueError, match="a row that decides"),
            cache.row_roles(torch.zeros(1, 2, dtype=torch.bool)),
        ):
            pass
        with pytest.raises(ValueError, match="two bool tensors"), cache.row_roles(torch.ones(1, 2)):
            pass
        with (
            pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"),
            cache.row_roles(torch.ones(1, 2, dtype=torch.bool)),
        ):
            model(models.prompt(3), past_key_values=cache)
    assert cache.runtime.roles is None


# --- Drafters ---------------------------------------------------------------------------------------------------------


def request(rows: list[list[int]], limits: list[int], num_prompt: int = 0) -> DraftRequest:
    """Sequences that end unevenly in columns that begin together; what is behind them is rubbish."""
    columns = max(map(len, rows)) + 2
    tokens = torch.full((len(rows), columns), 99)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = torch.tensor(values)
    return DraftRequest(tokens, [0] * len(rows), [len(row) for row in rows], limits, num_prompt)


def test_prompt_lookup():
    rows = [
        [5, 6, 7, 8, 9, 3, 5, 6, 7],  # found by three tokens
        [4, 4, 4, 4, 4],  # overlaps its own end: the place with enough behind it
        [1, 2, 3],  # nothing
        [7, 8, 1, 7, 9, 2, 7],  # the newest place of one token
        [1, 2, 1, 2],  # sequence 4 wants none
    ]
    drafts = PromptLookupDrafter().draft(request(rows, [3, 2, 3, 2, 0]))
    assert [d.tolist() for d in drafts] == [[8, 9, 3], [4, 4], [], [9, 2], []]
    assert PromptLookupDrafter(min_ngram=2).draft(request(rows, [3, 2, 3, 2, 0]))[3].numel() == 0


def test_assistant_drafts_are_its_greedy_continuations():
    """For sequences that end unevenly, over a run in which drafts are rejected and sequences grow."""
    model = models.build("llama")
    drafter = AssistantDrafter(model)
    drafter.start(model)
    rows = [row.tolist() for row in models.prompt(20, 3, seed=6)]
    starts = [0, 6, 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        state = request(rows, [3, 2, 4])
        state = DraftRequest(state.tokens, starts, state.lengths, state.limits, 20)
        for row, draft in enumerate(drafter.draft(state)):
            own = torch.tensor([rows[row][starts[row] :]])
            mask = torch.ones_like(own)
            expected = models.generate(model, own, DynamicCache(config=model.config), len(draft), attention_mask=mask)
            assert draft.tolist() == expected.sequences[0, own.shape[1] :].tolist()
            assert len(draft) == state.limits[row]
            kept = int(torch.randint(0, 4, (1,), generator=generator))
            rows[row] += [
                *draft.tolist()[:kept],
                50 + row,
                *draft.tolist()[kept + 1 :],
            ]  # right tokens behind a wrong one
    assert drafter.cache.get_seq_length() > 20
    drafter.finish()
    assert drafter.cache is None


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi", "gpt-oss"])
def test_first_layers_leave_the_model_alone(name):
    model = models.build(name, num_hidden_layers=2)
    ids = models.prompt(12)
    before = models.forward(model, ids, DynamicCache(config=model.config))
    early = first_layers(model, 1)
    cache = DynamicCache(config=early.config)
    shallow = models.forward(early, ids, cache)
    assert len(cache.layers) == 1
    assert {p.data_ptr() for p in early.parameters()} < {p.data_ptr() for p in model.parameters()}
    decoder = model.get_decoder()
    kept = decoder.layers
    decoder.layers = kept[:1]  # the definition of early exit
    try:
        expected = models.forward(model, ids, DynamicCache(config=model.config))
    finally:
        decoder.layers = kept
    assert torch.equal(shallow, expected)
    assert torch.equal(models.forward(model, ids, DynamicCache(config=model.config)), before)
    assert model.config.num_hidden_layers == 2


def test_early_exit_of_windowed_layers():
    model = models.build("gemma3")
    decoding = LookaheadDecoding(EarlyExitDrafter(1), DRAFTS)
    if Version("5.20") <= models.TRANSFORMERS:
        assert torch.equal(run(model, 4, None, decoding).sequences, plain("gemma3", 4).sequences)
        assert decoding.report.drafted > 0
    else:
        with pytest.raises(ValueError, match="sliding-window layers"):
            run(model, 4, None, decoding)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "greedy search and sampling"),
        ({"prompt_lookup_num_tokens": 3}, "its own drafts"),
        ({"use_cache": False}, "needs a cache"),
        ({"output_attentions": True}, "neither attentions"),
        ({"output_hidden_states": True}, "neither attentions"),
        ({"streamer": Puts()}, "a streamer takes one sequence"),
    ],
)
def test_refuses_before_computing(options, message):
    model = models.build("llama", "eager")
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match=message):
        run(model, 4, cache, LookaheadDecoding(NoDrafter()), **options)
    assert cache.get_seq_length() == 0


def test_refuses_an_assistant_given_to_generate():
    model = models.build("llama")
    with pytest.raises(ValueError, match="AssistantDrafter"):
        run(model, 1, None, LookaheadDecoding(NoDrafter()), assistant_model=models.build("llama", num_hidden_layers=1))


def test_refuses_models_and_caches_that_cannot_take_tokens_back():
    model = models.build("qwen3-next")
    cache = DynamicCache(config=model.config)
    with pytest.raises(ValueError, match="recurrent"):
        run(model, 1, cache, LookaheadDecoding(NoDrafter()))
    with pytest.raises(ValueError, match="cannot assist"):
        run(models.build("llama"), 1, None, LookaheadDecoding(AssistantDrafter(model)))
    model = models.build("llama")
    static = StaticCache(config=model.config, max_cache_len=100)
    decoding = LookaheadDecoding(noisy("llama", 4), DRAFTS)
    if static.is_croppable:
        assert_equals(run(model, 4, static, decoding), plain("llama", 4))
    else:
        with pytest.raises(ValueError, match="cannot be cropped"):
            run(model, 4, static, decoding)
    narrow = OasisCache(model_config=model.config, sparse_rows=DRAFTS)
    with pytest.raises(ValueError, match=f"sparse_rows={DRAFTS}"):
        run(model, 1, narrow, decoding)


def test_refuses_wrong_values():
    with pytest.raises(ValueError, match="num_drafts=0"):
        LookaheadDecoding(NoDrafter(), 0)
    with pytest.raises(ValueError, match="max_rows=3"):
        LookaheadDecoding(NoDrafter(), 3, max_rows=3)
    with pytest.raises(ValueError, match="drafter must be a Drafter"):
        LookaheadDecoding(PromptLookupDrafter)
    with pytest.raises(ValueError, match="min_ngram=0"):
        PromptLookupDrafter(min_ngram=0)
    with pytest.raises(ValueError, match="share one vocabulary"):
        drafter = AssistantDrafter(models.build("llama", vocab_size=7))
        run(models.build("llama"), 1, None, LookaheadDecoding(drafter))
    with pytest.raises(ValueError, match="num_layers=2"):
        run(models.build("llama"), 1, None, LookaheadDecoding(EarlyExitDrafter(2)))
    with pytest.raises(ValueError, match="3 continuations"):
        run(models.build("llama"), 1, None, LookaheadDecoding(ReplayDrafter([[1], [2], [3]])))


class Greedy(Drafter):
    """Gives more than it is asked for, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.finished = error, 0

    def draft(self, request):
        if self.error is not None and request.lengths[0] > PROMPT_TOKENS + 3:
            raise self.error
        extra = 1 if self.error is None else 0
        return [torch.full((limit + extra,), 5) for limit in request.limits]

    def finish(self):
        self.finished += 1


def test_a_failing_drafter_leaves_a_cache_that_can_be_reset():
    model, expected = models.build("llama"), plain("llama", 4)
    with pytest.raises(ValueError, match=r"Greedy gave \[5, 5, 5, 5\] drafts"):
        run(model, 4, None, LookaheadDecoding(Greedy(), DRAFTS))
    cache, drafter = OasisCache(model_config=model.config, budget=1024), Greedy(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(model, 4, cache, LookaheadDecoding(drafter, DRAFTS))
    assert drafter.finished == 1
    assert cache.get_seq_length() > PROMPT_TOKENS
    cache.reset()
    assert_equals(run(model, 4, cache, LookaheadDecoding(noisy("llama", 4), DRAFTS)), expected)
