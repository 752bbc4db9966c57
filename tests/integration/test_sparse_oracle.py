"""Sparse decoding equals the stated rules, computed by tests/oracle.py from complete keys and values, in every state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from tests import models, oracle

pytestmark = pytest.mark.contract

TOLERANCE = 2e-5
SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)
"""Dense up to 48 tokens; 4 slots (sink + 3 retrieved), 2 recent blocks."""


class Pair:
    """A model with OasisCache and the same model with complete keys and values and the oracle's attention, driven in lockstep."""

    def __init__(
        self,
        name: str = "llama",
        config: OasisConfig = SMALL,
        attention: str | None = None,
        pads: tuple[int, ...] = (0,),
        all_full: bool = False,
        **options: Any,
    ) -> None:
        self.config = config
        attention = attention or ("eager" if models.eager_only(name) else "sdpa")
        self.blind_mean = attention == "eager"
        self.model = models.build(name, attention, **options)
        self.truth = models.build(name, oracle.NAME, **options)
        self.cache = OasisCache(config, model_config=None if all_full else self.model.config)
        self.complete = DynamicCache() if all_full else DynamicCache(config=self.model.config)
        if all_full:
            self.cache.layers = [OasisLayer(self.cache.runtime) for _ in range(self.model.config.num_hidden_layers)]
        self.layers = (
            None
            if all_full
            else frozenset(number for number, layer in enumerate(self.complete.layers) if type(layer) is DynamicLayer)
        )
        self.mask = models.left_padded(max(pads), pads)[1]
        self.padded = max(pads) > 0
        self.generator = torch.Generator().manual_seed(7)
        self.sparse_steps = 0

    @property
    def length(self) -> int:
        return int(self.complete.get_seq_length())

    def feed(self, rows: int) -> float:
        """Feed random tokens to both, compare the logits of all real tokens, and return the error."""
        batch = self.mask.shape[0]
        pads = self.mask.shape[1] - self.length  # the padding comes with the first tokens
        ids = torch.randint(2, models.VOCABULARY, (batch, pads + rows), generator=self.generator)
        self.mask = torch.cat([self.mask, torch.ones(batch, rows, dtype=torch.int64)], 1)
        new = self.mask[:, self.length :].bool()
        ids = ids.masked_fill(~new, models.PADDING)
        self.sparse_steps += oracle.is_sparse(self.config, self.length, pads + rows)
        mask = self.mask if self.padded else None
        with oracle.rules(self.config, self.layers, self.blind_mean):
            expected = models.forward(self.truth, ids, self.complete, mask)
        out = models.forward(self.model, ids, self.cache, mask)
        error = models.relative_error(out[new], expected[new])
        assert error < TOLERANCE, f"{error:.2e} at {self.length} tokens after {rows} new ones"
        assert self.cache.get_seq_length() == self.length
        return error

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.complete.crop(-count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]

    def rows(self, method: str, argument: Any, picked: torch.Tensor) -> None:
        """A batch operation of both caches that leaves the rows `picked`."""
        getattr(self.cache, method)(argument)
        getattr(self.complete, method)(argument)
        self.mask = self.mask[picked]

    def check(self) -> None:
        for layer, complete in zip(self.cache.layers, self.complete.layers, strict=True):
            if isinstance(layer, OasisLayer):
                layer.check_integrity()
                real = self.mask.bool()  # what rows of padding compute is nobody's business
                held, whole = layer.dense_kv(), torch.cat([complete.keys, complete.values], -1)
                assert models.relative_error(held.transpose(1, 2)[real], whole.transpose(1, 2)[real]) < TOLERANCE
        assert self.cache.stats().sparse_steps == self.sparse_steps
        assert self.cache.stats().fallback_steps == 0


WALK = (57, 1, 1, 3, 8, 2, 1, 21, 4, 1, 7)
"""A prefill over the budget, sparse steps of 1 to `sparse_rows` rows, a streamed forward between them."""


def walk(pair: Pair, forwards=WALK) -> Pair:
    for rows in forwards:
        pair.feed(rows)
    pair.check()
    assert pair.sparse_steps >= len(forwards) - 2
    return pair


@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("index", ["int2", "int1", "minmax", "exact", "recency"])
def test_indexes_and_gqa_ratios(index, ratio):
    config = OasisConfig(**{**SMALL.__dict__, "index": index})
    walk(Pair(config=config, hidden_size=48, num_attention_heads=2 * ratio, num_key_value_heads=2, head_dim=16))


@pytest.mark.parametrize("index", ["int2", "minmax", "recency"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_batch(attention, index):
    config = OasisConfig(**{**SMALL.__dict__, "index": index})
    walk(Pair(config=config, attention=attention, pads=(0, 13, 40)))


@pytest.mark.parametrize(
    ("block_size", "budget", "sink_blocks", "recent_blocks", "sparse_rows"),
    [
        (1, 12, 1, 4, 8),
        (1, 40, 0, 0, 3),
        (3, 27, 2, 3, 8),
        (3, 9, 0, 2, 8),
        (8, 24, 1, 1, 16),
        (16, 48, 1, 1, 8),
        (16, 32, 0, 1, 1),
    ],
)
def test_block_sizes_and_budgets(block_size, budget, sink_blocks, recent_blocks, sparse_rows):
    config = OasisConfig(
        block_size=block_size,
        budget=budget,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
        sparse_rows=sparse_rows,
        stream_tokens=16,
    )
    steps = [min(rows, sparse_rows) for rows in (1, 8, 3, 16, 1, 1, 5, 2, 1)]
    walk(Pair(config=config, pads=(0, 5)), (oracle.dense_tokens(config) + 20, *steps, 31, *steps))


@pytest.mark.parametrize("padded", [False, True], ids=["one-row", "padded"])
@pytest.mark.parametrize(
    "name", ["qwen3", "mistral", "gemma3", "gemma2", "gpt-oss", "phi", "qwen3-moe", "qwen3-next", "deepseek-v3"]
)
def test_architectures(name, padded):
    pads = (0, 9, 30) if padded else (0,)
    if name == "qwen3-next":  # its recurrent layers take one token a time behind the first ones
        walk(Pair(name, pads=pads), (70, *[1] * 8))
    else:
        walk(Pair(name, pads=pads))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_windowed_layers_taken_for_full_attention(name):
    """Blocks outside the window that the mask states are chosen last and read by nobody."""
    walk(Pair(name, pads=(0, 9), all_full=True))


@pytest.mark.parametrize("lookahead", ["draft", "previous", "off"])
@pytest.mark.parametrize("engine", ["sync", "threads", "simulated"])
def test_prefetching_never_changes_what_is_read(engine, lookahead):
    config = OasisConfig(**{**SMALL.__dict__, "engine": engine, "lookahead": lookahead, "max_fetch": 3})
    pair = walk(Pair(config=config, pads=(0, 13)))
    assert (pair.cache.stats().prefetched > 0) == (lookahead != "off")
    for count, rows in ((6, 8), (3, 1), (20, 1), (1, 4)):
        pair.crop(count)
        pair.feed(rows)
    pair.check()


def test_sparse_differs_from_dense():
    """The oracle's rules matter: without them the same forwards give other logits."""
    pair = Pair()
    dense = DynamicCache()
    ids = models.prompt(120, seed=3)
    for part in (slice(0, 117), slice(117, 120)):
        exact = models.forward(pair.model, ids[:, part], dense)
        out = models.forward(pair.model, ids[:, part], pair.cache)
    assert models.relative_error(out, exact) > 0.05


# --- Every operation that changes what the cache holds ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cuts",
    [
        (1,),  # a rejected draft
        (8, 8),
        (13,),  # into the window
        (30,),  # before the window: slots and store
        (40, 3),
        (75,),  # back below the budget: dense again
        (60, 15),
        (57, 1, 1),
        (90,),
    ],
)
@pytest.mark.parametrize("pads", [(0,), (0, 11)])
def test_crops(cuts, pads):
    pair = walk(Pair(pads=pads))
    for count in cuts:
        pair.crop(count)
        for rows in (1, 3):
            pair.feed(rows)
    pair.check()
    for rows in (30, 8, 1, 50, 1):
        pair.feed(rows)
    pair.check()


@pytest.mark.parametrize("count", list(range(0, 60, 7)))
def test_crop_right_after_prefill(count):
    """Assisted decoding crops the prefill's drafts; deeper cuts reach sealed blocks and the state before the budget."""
    pair = Pair(pads=(0, 3))
    pair.feed(95)
    pair.crop(count)
    for rows in (1, 8, 1):
        pair.feed(rows)
    pair.check()


def test_crop_of_a_streamed_forward():
    pair = Pair(pads=(0, 3))
    pair.feed(95)
    pair.feed(25)
    pair.crop(31)
    pair.feed(2)
    pair.feed(40)
    pair.crop(5)
    pair.feed(1)
    pair.check()


@pytest.mark.parametrize("forwards", [(20,), (95,), (95, 1, 3), (95, 30), (95, 1, 30, 1)])
def test_batch_operations(forwards):
    """Beams, repeats and selections reach slots, window, index and store; every row goes on by its own content."""
    pair = Pair(pads=(0, 9, 17))
    for rows in forwards:
        pair.feed(rows)
    beams = torch.tensor([2, 0, 0])
    pair.rows("reorder_cache", beams, beams)
    pair.feed(1)
    pair.feed(4)
    pair.rows("batch_repeat_interleave", 2, torch.tensor([0, 0, 1, 1, 2, 2]))
    pair.feed(2)
    kept = torch.tensor([5, 0, 2])
    pair.rows("batch_select_indices", kept, kept)
    pair.feed(45)
    pair.feed(1)
    pair.crop(4)
    beams = torch.tensor([1, 1, 2])
    pair.rows("reorder_cache", beams, beams)
    pair.feed(3)
    pair.check()


@pytest.mark.parametrize("forwards", [(20,), (95, 3), (95, 30)])
def test_deep_copies_go_separate_ways(forwards):
    pair = Pair(pads=(0, 9))
    for rows in forwards:
        pair.feed(rows)
    twin = copy.copy(pair)
    twin.cache, twin.complete = copy.deepcopy(pair.cache), copy.deepcopy(pair.complete)
    twin.generator = torch.Generator().manual_seed(99)
    for rows in (1, 4, 40, 2):
        twin.feed(rows)
        pair.feed(rows)
    pair.crop(50)
    twin.feed(1)
    pair.feed(3)
    pair.check()
    twin.check()
    pair.cache.close()
    twin.feed(30)
    twin.feed(1)
    twin.check()


def test_reset_and_second_use():
    pair = walk(Pair(pads=(0, 9)))
    pair.cache.reset()
    assert pair.cache.get_seq_length() == 0 and pair.cache.stats().host_bytes == pair.cache.stats().device_bytes == 0
    again = Pair(pads=(0, 4, 2))
    again.cache = pair.cache
    walk(again)


def test_second_turn():
    """A long question is streamed over the sparse state, a short one read sparsely, and the answer follows sparsely."""
    pair = walk(Pair())
    for rows in (40, 1, 1, 1, 6, 1, 1):
        pair.feed(rows)
    pair.check()


# --- Whole generations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        (1, {}),
        (3, {}),
        (1, {"prompt_lookup_num_tokens": 4}),
        (1, {"num_beams": 3}),
        (2, {"num_beams": 2}),
        (3, {"prefill_chunk_size": 32}),
    ],
)
def test_generation(batch, arguments):
    ids, mask = models.left_padded(90, (0, 13, 40)[:batch], seed=5)
    if batch == 1:
        ids[:, 50:80] = ids[:, 10:40]
    model, truth = models.build("llama", "sdpa"), models.build("llama", oracle.NAME)
    cache = OasisCache(SMALL, model_config=model.config)
    out = models.generate(model, ids, cache, 24, attention_mask=mask, **arguments)
    with oracle.rules(SMALL):
        expected = models.generate(truth, ids, DynamicCache(), 24, attention_mask=mask, **arguments)
    assert torch.equal(out.sequences, expected.sequences)
    assert models.relative_error(torch.stack(out.logits), torch.stack(expected.logits)) < TOLERANCE
    stats = cache.stats()
    assert stats.sparse_steps >= (23 if "prompt_lookup_num_tokens" not in arguments else 5)
    assert stats.dense_steps == stats.fallback_steps == 0


def test_padding_takes_no_sink():
    """Whole blocks of padding in front change nothing: the sink is where the sequence begins."""
    model, ids = models.build("llama"), models.prompt(230)
    settings = dict(budget=48, block_size=8, recent_blocks=2, sparse_rows=4, index="exact")
    logits = []
    for padding in (0, 32):
        padded = torch.nn.functional.pad(ids, (padding, 0), value=models.PADDING)
        mask = (torch.arange(padded.shape[1]) >= padding).long().unsqueeze(0)
        out = models.generate(model, padded, OasisCache(**settings), 6, attention_mask=mask)
        logits.append(torch.stack(out.logits))
    assert models.relative_error(logits[1], logits[0]) < 1e-5


def test_a_short_row_of_a_long_batch_reads_everything():
    """A row whose own tokens fit the budget gets dense logits, whatever its padding."""
    model = models.build("llama")
    ids, mask = models.left_padded(300, (0, 250), seed=4)
    out = models.generate(
        model, ids, OasisCache(budget=96, block_size=8, recent_blocks=2, sparse_rows=4), 8, attention_mask=mask
    )
    dense = models.generate(model, ids, DynamicCache(config=model.config), 8, attention_mask=mask)
    got, expected = (torch.stack(each.logits)[:, 1] for each in (out, dense))
    assert models.relative_error(got, expected) < 1e-5


def test_one_mask_for_all_rows_serves_each():
    """A 4D mask of batch 1 over a batch of 2: what the same mask gives, expanded."""
    model, ids = models.build("llama"), models.left_padded(230, (0, 0), seed=2)[0]
    outputs = []
    for batch in (1, 2):
        cache = OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=4)
        models.forward(model, ids, cache)
        mask = torch.ones(batch, 1, 1, 231, dtype=torch.bool)
        mask[..., :40] = False
        with torch.no_grad():
            out = model(
                ids[:, :1], attention_mask=mask, position_ids=torch.full((2, 1), 230), **{models.CACHE_ARGUMENT: cache}
            )
        assert cache.stats().sparse_steps == 1
        outputs.append(out.logits)
    assert torch.equal(*outputs)
