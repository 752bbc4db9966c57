"""Random programs over everything that users do to a cache, in lockstep with `DynamicCache` or with the rules of sparse attention.

A program is a list of operations on one conversation: forwards of any size, `generate` in several ways, crops, batch operations,
copies, resets, and exceptions at random places. Beside the cache under test runs a `DynamicCache`: with the same model where the
budget covers everything, with one whose attention is that of tests/oracle.py where it does not. After every operation both hold
the same, and every number they computed agrees.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import DynamicCache

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from oasis_cache.lookahead import LookaheadDecoding, RandomDrafter
from tests import models, oracle

pytestmark = pytest.mark.contract

TOLERANCE = 1e-4
NARROW = 1e-4
"""A choice among blocks or tokens by less than this may come out either way: the program ends there."""
MOST_TOKENS = 110
EXAMPLES = max(100, settings.default.max_examples // 8)
"""Programs per test: few in `make test`, thousands in `make fuzz`."""

GOING_BACK = ["llama", "qwen3", "phi", "qwen3-moe", "deepseek-v3"]
"""Architectures whose every layer can be cropped at any time."""
OTHERS = ["gemma3", "gpt-oss", "gemma2", "lfm2", "qwen3-next", "falcon-h1", "llama4", "mistral-window"]
# lfm2 does not go on after assisted decoding; before 5.24 windowed layers do not either, with any cache: their masks get too wide.
NO_LOOKUP = {"lfm2"} | (set(OTHERS) if Version("5.24.0") > models.TRANSFORMERS else set())

small_configs = st.builds(
    OasisConfig,
    block_size=st.just(4),
    budget=st.sampled_from([16, 24]),
    sink_blocks=st.sampled_from([0, 1]),
    recent_blocks=st.sampled_from([0, 1]),
    sparse_rows=st.sampled_from([1, 3, 6]),
    stream_tokens=st.sampled_from([1, 7, 64]),
    index=st.sampled_from(["int2", "int1", "minmax", "exact", "recency"]),
    lookahead=st.sampled_from(["auto", "draft", "previous", "off"]),
    max_fetch=st.sampled_from([1, 2, None]),
    engine=st.sampled_from(["sync", "threads", "simulated"]),
)
SPILLED = {"max_host_bytes": 1 << 14, "spill": tempfile.gettempdir()}
"""Host memory for some pages of these models: the others are on disk, and change nothing."""
small_configs = st.one_of(small_configs, small_configs.map(lambda config: replace(config, **SPILLED)))
seeds = st.integers(0, 2**16)
rows_of_three = st.lists(st.integers(0, 2), min_size=1, max_size=3)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 6)),
        st.tuples(st.just("forward"), st.integers(1, 40)),
        st.tuples(st.just("generate"), st.integers(1, 5)),
        st.tuples(st.just("sample"), st.integers(1, 5)),
        st.tuples(st.just("lookup"), st.integers(2, 6)),
        st.tuples(st.just("lookahead"), st.integers(2, 6)),
        st.tuples(st.just("chunked"), st.integers(1, 20)),
        st.tuples(st.just("beams"), st.integers(2, 3)),
        st.tuples(st.just("refused"), st.integers(0, 3)),
        st.tuples(st.just("crop"), st.integers(0, 5)),
        st.tuples(st.just("crop"), st.integers(0, 60)),
        st.tuples(st.just("reorder"), rows_of_three),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), rows_of_three),
        st.tuples(st.just("copy"), st.booleans()),
        st.tuples(st.just("save"), st.booleans()),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("fail"), st.tuples(st.integers(1, 20), st.integers(0, 2))),
        st.tuples(st.just("abort"), st.integers(1, 4)),
    ),
    min_size=3,
    max_size=16,
)


class Stop(Exception):
    """What a program throws from within a forward or a streamer."""


class Undecided(Exception):
    """Rounding may have decided: what follows proves nothing."""


class StoppingStreamer:
    def __init__(self, count: int) -> None:
        self.count = count

    def put(self, value: Any) -> None:
        self.count -= 1
        if self.count < 0:
            raise Stop

    def end(self) -> None: ...


class Conversation:
    """The cache under test and its complete twin, with the tokens and the mask that they hold."""

    def __init__(self, name: str, config: OasisConfig, full: bool, pads: tuple[int, ...], seed: int) -> None:
        attention = "eager" if models.eager_only(name) else "sdpa"
        self.name, self.config, self.full, self.pads = name, config, full, pads
        self.model = models.build(name, attention)
        self.truth = self.model if full else models.build(name, oracle.NAME)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = OasisCache(config, model_config=self.model.config)
        self.sparse_layers = frozenset(
            number for number, layer in enumerate(self.cache.layers) if isinstance(layer, OasisLayer)
        )
        self.blind_mean = attention == "eager"
        self.begin()

    def new_twin(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def begin(self) -> None:
        """Both are empty: the padding comes with the first tokens."""
        self.complete = self.new_twin()
        self.mask = models.left_padded(max(self.pads), self.pads)[1]
        self.ids = torch.full_like(self.mask, models.PADDING)
        self.held = 0

    @property
    def batch(self) -> int:
        return self.mask.shape[0]

    @property
    def croppable(self) -> bool:
        return self.name in GOING_BACK

    @contextmanager
    def rules(self) -> Iterator[None]:
        if self.full:
            yield
            return
        margins: list[float] = []
        with oracle.rules(self.config, self.sparse_layers, self.blind_mean, margins):
            yield
        if margins and min(margins) < NARROW:
            raise Undecided

    def extend(self, rows: int) -> None:
        """New random tokens behind what both caches hold; generated tokens that are in neither count as new."""
        new = torch.randint(2, models.VOCABULARY, (self.batch, rows), generator=self.generator)
        self.ids = torch.cat([self.ids, new], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)

    def forward(self, rows: int) -> None:
        self.extend(rows)
        part, real = self.ids[:, self.held :], self.mask[:, self.held :].bool()
        with self.rules():
            expected = models.forward(self.truth, part, self.complete, self.mask)
        out = models.forward(self.model, part, self.cache, self.mask)
        self.agree(out[real], expected[real])
        self.held = self.ids.shape[1]

    def agree(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        error = models.relative_error(out, expected)
        assert error < TOLERANCE, f"logits off by {error:.1e}"

    def generate(self, count: int, own: dict[str, Any] | None = None, rows: int = 1, **arguments: Any) -> None:
        """`generate` with both on the whole conversation, and what they say compared token by token."""
        self.extend(rows)
        seed = int(torch.randint(1 << 30, (1,), generator=self.generator))
        results = []
        for model, cache, rules, extra in (
            (self.truth, self.complete, self.rules, {}),
            (self.model, self.cache, None, own or {}),
        ):
            options = {"do_sample": False, **arguments, **extra}
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                run = dict(
                    inputs=self.ids,
                    attention_mask=self.mask,
                    max_new_tokens=count,
                    output_logits=True,
                    return_dict_in_generate=True,
                    pad_token_id=models.PADDING,
                    **{models.CACHE_ARGUMENT: cache},
                    **options,
                )
                if rules is None:
                    results.append(model.generate(**run))
                else:
                    with rules():
                        results.append(model.generate(**run))
        theirs, ours = results
        logits, expected = torch.stack(ours.logits), torch.stack(theirs.logits)
        best = expected.topk(2, -1).values
        if (best[..., 0] - best[..., 1]).min() < NARROW * best.abs().max():
            raise Undecided
        assert torch.equal(ours.sequences, theirs.sequences)
        if logits.shape == expected.shape:
            self.agree(logits, expected)
        self.held = ours.sequences.shape[1] - 1
        new = ours.sequences[:, self.ids.shape[1] :]
        self.ids = torch.cat([self.ids, new], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)

    def both_refuse(self, action: Any) -> bool:
        """Whether DynamicCache refuses something; then the cache under test does so too, and is as it was."""
        try:
            action(copy.deepcopy(self.complete))
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError)):
                action(self.cache)
            return True
        return False

    def crop(self, count: int) -> None:
        count = min(count, self.held)
        if count and self.both_refuse(lambda cache: cache.crop(-count)):
            event("a crop was refused")
            return
        try:
            self.cache.crop(-count)
        except RuntimeError as error:  # DynamicCache would crop, and fail or answer wrongly at the next forward
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "cannot go back" in refused and not self.croppable
            self.check()
            self.reset()
            return
        if count:
            self.complete.crop(-count)
        self.held -= count
        self.ids, self.mask = self.ids[:, : self.held], self.mask[:, : self.held]
        if self.held == 0:
            self.cache.reset()
            self.begin()

    def pick(self, method: str, argument: Any, rows: torch.Tensor) -> None:
        if self.held == 0 or (not self.croppable and method != "reorder_cache"):
            return  # recurrent layers of transformers know only reorder_cache
        for cache in (self.cache, self.complete):
            getattr(cache, method)(argument)
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    def refused(self, which: int) -> None:
        """Requests that cannot be honoured change nothing."""
        if self.held == 0:
            return
        ids, mask = self.ids[:, : self.held], self.mask[:, : self.held]
        arguments: dict[str, Any] = {"max_new_tokens": 2, "pad_token_id": 0, models.CACHE_ARGUMENT: self.cache}
        with pytest.raises(ValueError if self.name in GOING_BACK or which < 3 else (ValueError, RuntimeError)):
            if which == 0:  # nothing new
                self.model.generate(ids, attention_mask=mask, **arguments)
            elif which == 1:  # new tokens only, and a mask of those only
                self.model.generate(ids[:, :1], attention_mask=mask[:, :1], **arguments)
            elif which == 2:  # a forward whose mask leaves out the past
                self.model(
                    ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), **{models.CACHE_ARGUMENT: self.cache}
                )
            else:  # another batch size
                more = torch.cat([ids[:1, :1]] * (self.batch + 1))
                self.model(more, **{models.CACHE_ARGUMENT: self.cache})
        if which == 3 and self.name not in GOING_BACK:
            self.reset()  # other layers may have taken the tokens before the first OasisLayer refused them

    def fail(self, rows: int, place: int) -> None:
        """A forward that breaks off before some layer, or behind the last one."""
        modules = [
            *self.model.model.layers,
            self.model.model.norm if hasattr(self.model.model, "norm") else self.model.lm_head,
        ]

        def stop(*_: Any) -> None:
            raise Stop

        self.extend(rows)
        handle = modules[min(place, len(modules) - 1)].register_forward_pre_hook(stop)
        try:
            with pytest.raises(Stop):
                models.forward(self.model, self.ids[:, self.held :], self.cache, self.mask)
        finally:
            handle.remove()
        if place >= len(modules) - 1 or not self.croppable:
            self.reset()  # a complete forward, which the twin has not seen; or layers that cannot go back
            return
        self.cache.crop(0)
        self.ids, self.mask = self.ids[:, : self.held], self.mask[:, : self.held]
        if self.held == 0:
            self.reset()

    def abort(self, count: int) -> None:
        """A streamer that raises: both stop at the same token, and hold the same."""
        if self.batch > 1:
            return
        self.extend(1)
        for model, cache in ((self.truth, self.complete), (self.model, self.cache)):
            run = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, models.CACHE_ARGUMENT: cache}
            with pytest.raises(Stop), self.rules():
                model.generate(self.ids, attention_mask=self.mask, streamer=StoppingStreamer(count), **run)
        self.held = int(self.complete.get_seq_length())
        assert self.cache.get_seq_length() == self.held
        if self.held != self.ids.shape[1]:
            self.reset()  # tokens were generated that nobody handed out

    def reset(self) -> None:
        self.cache.reset()
        self.begin()

    def save(self, go_on: bool) -> None:
        """To a file and back: the loaded cache goes on, or the one that was saved while the other holds the same."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "saved.safetensors")
            self.cache.save(path, model=self.model)
            limits = {name: getattr(self.config, name) for name in ("max_host_bytes", "spill")}
            loaded = OasisCache.load(path, self.model, **limits)
            kept, self.cache = (self.cache, loaded) if go_on else (loaded, self.cache)
            assert kept.get_seq_length() == self.cache.get_seq_length()
            kept.close()

    def twin(self) -> Conversation:
        other = copy.copy(self)
        other.cache, other.complete = copy.deepcopy(self.cache), copy.deepcopy(self.complete)
        other.generator = torch.Generator().manual_seed(self.held)
        return other

    def apply(self, name: str, argument: Any) -> None:
        empty, length = self.held == 0, self.ids.shape[1]
        if length > MOST_TOKENS and name not in ("crop", "reset", "reorder", "copy", "refused"):
            self.crop(60) if self.croppable else self.reset()
            return
        recurrent = self.model._is_stateful
        if name == "forward":
            self.forward(argument)
        elif name == "generate":
            self.generate(argument, rows=argument)
        elif name == "sample":
            self.generate(argument, do_sample=True)
        elif name == "lookup" and empty and self.batch == 1 and not recurrent and self.name not in NO_LOOKUP:
            self.generate(argument, prompt_lookup_num_tokens=2, rows=30)
        elif name == "lookahead" and self.full and self.croppable:
            self.generate(
                argument, {"custom_generate": LookaheadDecoding(RandomDrafter(models.VOCABULARY), num_drafts=2)}
            )
        elif name == "chunked" and (empty or Version("5.24") <= models.TRANSFORMERS):
            self.generate(2, prefill_chunk_size=argument, rows=25)
        elif name == "beams" and empty:
            self.beams(argument)
        elif name == "refused":
            self.refused(argument)
        elif name == "crop":
            self.crop(argument)
        elif name == "reorder":
            rows = torch.tensor([number % self.batch for number in argument]).repeat(self.batch)[: self.batch]
            self.pick("reorder_cache", rows, rows)
        elif name == "repeat" and self.batch * argument <= 3:
            self.pick("batch_repeat_interleave", argument, torch.arange(self.batch).repeat_interleave(argument))
        elif name == "select":
            rows = torch.tensor([number % self.batch for number in argument])
            self.pick("batch_select_indices", rows, rows)
        elif name == "reset":
            self.reset()
        elif name == "save":
            self.save(argument)
        elif name == "fail":
            self.fail(*argument)
        elif name == "abort":
            self.abort(argument)

    def beams(self, count: int) -> None:
        """Beam search from nothing; its rows are not the conversation's, so both begin anew."""
        self.generate_beams(count)
        self.reset()

    def generate_beams(self, count: int) -> None:
        self.extend(20)
        results = []
        for model, cache in ((self.truth, self.complete), (self.model, self.cache)):
            run = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, models.CACHE_ARGUMENT: cache}
            with self.rules():
                results.append(
                    model.generate(
                        self.ids,
                        attention_mask=self.mask,
                        num_beams=count,
                        output_scores=True,
                        return_dict_in_generate=True,
                        **run,
                    )
                )
        theirs, ours = results
        if not torch.equal(ours.sequences, theirs.sequences):  # beams may be tied
            assert (ours.sequences_scores - theirs.sequences_scores).abs().max() < NARROW
            raise Undecided

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.complete.get_seq_length() == self.held
        if not self.mask[:, : self.held].any():
            return
        real = self.mask[:, : self.held].bool()
        for layer, whole in zip(self.cache.layers, self.complete.layers, strict=True):
            if isinstance(layer, OasisLayer):
                held = torch.cat(layer.dense_keys_and_values(), -1).transpose(1, 2)
                expected = torch.cat([whole.keys, whole.values], -1).transpose(1, 2)
                assert models.relative_error(held[real], expected[real]) < TOLERANCE
                if layer.pending is None:
                    layer.check_integrity()


STEPS = [0]


def run(name: str, config: OasisConfig, full: bool, pads: tuple[int, ...], program: list[Any], seed: int) -> None:
    conversation = Conversation(name, config, full, pads, seed)
    memory, parted = [conversation.cache.runtime.memory], []
    try:
        for operation, argument in program:
            STEPS[0] += 1
            if operation == "copy":
                twin = conversation.twin()
                conversation, other = (twin, conversation) if argument else (conversation, twin)
                parted.append(other)
            else:
                conversation.apply(operation, argument)
            conversation.check()
        for other in parted[-2:]:
            other.check()
            other.forward(2)
            other.check()
    except Undecided:
        event("rounding may have decided")
        return
    assert not conversation.full or conversation.cache.stats().sparse_steps == 0
    if conversation.name in GOING_BACK:
        assert conversation.cache.stats().fallback_steps == 0
    conversation.reset()
    for other in parted:
        other.cache.close()
    memory.append(conversation.cache.runtime.memory)  # of a loaded cache, maybe
    if any(each.reserved_bytes for each in memory):
        gc.collect()  # an exception's traceback holds the frames it went through, and they what was in them
    assert not any(each.reserved_bytes for each in memory), "host pages outlive the caches"


names = st.sampled_from([*GOING_BACK, *GOING_BACK, *OTHERS])
paddings = st.sampled_from([(0,), (0,), (0, 3), (5, 0, 1)])


@settings(max_examples=EXAMPLES)
@given(names, paddings, operations, seeds)
def test_programs_with_a_full_budget_equal_dynamic_cache(name, pads, program, seed):
    run(name, OasisConfig(budget=1024, engine="simulated"), True, pads, program, seed)


@settings(max_examples=EXAMPLES)
@given(names, small_configs, paddings, operations, seeds)
def test_programs_with_a_small_budget_follow_the_rules(name, config, pads, program, seed):
    run(name, config, False, pads, program, seed)
