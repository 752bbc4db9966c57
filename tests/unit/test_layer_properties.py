"""Random histories: an OasisLayer holds and reads what a DynamicLayer would, whatever happened to it before.

Sizes are so small that blocks, budget, pages and rows collide all the time.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from oasis_cache import OasisConfig
from oasis_cache.blocks import as_blocks
from oasis_cache.index import INDEXES
from oasis_cache.layer import OasisLayer
from oasis_cache.runtime import Runtime
from tests import models, oracle

pytestmark = pytest.mark.contract

KV_HEADS, GROUP, KEY_DIM, VALUE_DIM, SCALING = 2, 2, 2, 3, 0.8

configs = st.builds(
    OasisConfig,
    block_size=st.just(2),
    budget=st.sampled_from([6, 8]),
    sink_blocks=st.sampled_from([0, 1]),
    recent_blocks=st.sampled_from([0, 1]),
    sparse_rows=st.sampled_from([1, 2, 3]),
    stream_tokens=st.sampled_from([1, 3, 64]),
    index=st.sampled_from(sorted(INDEXES)),
    on_miss=st.sampled_from(["fetch", "fetch", "fetch", "skip"]),
    lookahead=st.sampled_from(["auto", "draft", "previous"]),
    engine=st.sampled_from(["sync", "simulated"]),
)
rows_of_four = st.lists(st.integers(0, 3), min_size=1, max_size=3)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 13)),
        st.tuples(st.just("attend"), st.integers(1, 13)),
        st.tuples(st.just("attend"), st.integers(1, 3)),
        st.tuples(st.just("attend masked"), st.integers(1, 3)),
        st.tuples(st.just("crop"), st.integers(0, 4)),
        st.tuples(st.just("crop"), st.integers(0, 40)),
        st.tuples(st.just("reorder"), rows_of_four),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), rows_of_four),
        st.tuples(st.just("select mask"), st.integers(1, 15)),
        st.tuples(st.just("reset"), st.just(0)),
        st.tuples(st.just("deepcopy"), st.booleans()),
    ),
    min_size=1,
    max_size=16,
)


class Pair:
    """An OasisLayer and a DynamicLayer with the same past."""

    def __init__(self, config: OasisConfig, generator: torch.Generator) -> None:
        self.config, self.generator, self.batch = config, generator, 2
        self.layer, self.truth = OasisLayer(Runtime.create(config)), DynamicLayer()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def length(self) -> int:
        return self.truth.get_seq_length()

    def update(self, rows: int) -> str:
        past, keys, values = (
            self.length,
            *(self.random(self.batch, KV_HEADS, rows, dim) for dim in (KEY_DIM, VALUE_DIM)),
        )
        fits = past + rows <= oracle.dense_tokens(self.config)
        phase = (
            "prefill" if past == 0 else "dense" if fits else "sparse" if rows <= self.config.sparse_rows else "streamed"
        )
        assert self.layer.phase_of(rows) == phase
        assert self.layer.get_mask_sizes(rows) == self.truth.get_mask_sizes(rows)
        before = self.layer.counters.forwards[phase]
        got, expected = self.layer.update(keys, values), self.truth.update(keys, values)
        assert self.layer.counters.forwards[phase] == before + 1
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.shape == theirs.shape
            if phase in ("prefill", "dense"):
                assert torch.equal(mine, theirs)
        return phase

    def attend(self, rows: int, masked: bool) -> None:
        phase = self.update(rows)
        if phase in ("prefill", "dense"):
            return
        query = self.random(self.batch, KV_HEADS * GROUP, rows, KEY_DIM)
        mask = None
        if masked:  # some of the past is hidden; every row sees itself
            mask = torch.rand(self.batch, 1, 1, self.length, generator=self.generator) < 0.7
            mask = mask.expand(-1, -1, rows, -1) & torch.ones(rows, self.length, dtype=torch.bool).tril(
                self.length - rows
            )
            mask[..., -rows:] |= torch.eye(rows, dtype=torch.bool)
        out = self.layer.attend(query, mask, SCALING, None, None, None, True)
        if self.config.on_miss == "skip" and phase == "sparse":
            assert torch.isfinite(out).all()  # what it reads follows from predictions; tested elsewhere
            return
        margins: list[float] = []
        expected = oracle.attention(
            query, self.truth.keys, self.truth.values, mask, self.config, SCALING, margins=margins
        )
        if all(margin > 1e-5 for margin in margins):  # else rounding may choose
            assert models.relative_error(out, expected) < 1e-4

    def crop(self, count: int) -> None:
        self.layer.crop(-count)
        if self.truth.is_initialized:
            self.truth.crop(-count)

    def pick_rows(self, method: str, argument: Any, batch: int) -> None:
        if self.length:
            getattr(self.truth, method)(argument)
            self.batch = batch
        getattr(self.layer, method)(argument)

    def reset(self) -> None:
        self.layer.reset()
        self.truth, self.batch = DynamicLayer(), 2  # DynamicLayer's own reset keeps zeros up to transformers 5.17
        assert self.layer.device_bytes == self.layer.host_bytes == self.layer.index_bytes == 0

    def twin(self) -> Pair:
        twin = copy.copy(self)
        twin.layer, twin.truth = copy.deepcopy(self.layer), copy.deepcopy(self.truth)
        return twin

    def apply(self, name: str, argument: Any) -> None:
        if name in ("update", "attend", "attend masked"):
            rows = argument if self.batch * argument < 60 else 1
            self.update(rows) if name == "update" else self.attend(rows, masked=name.endswith("masked"))
        elif name == "crop":
            self.crop(argument)
        elif name == "reorder":
            rows = torch.tensor([number % self.batch for number in argument])
            self.pick_rows("reorder_cache", rows.repeat(self.batch)[: self.batch], self.batch)
        elif name == "repeat" and self.batch * argument <= 4:
            self.pick_rows("batch_repeat_interleave", argument, self.batch * argument)
        elif name == "select":
            rows = torch.tensor([number % self.batch for number in argument])
            self.pick_rows("batch_select_indices", rows, len(argument))
        elif name == "select mask":
            chosen = torch.tensor([bool(argument >> row & 1) for row in range(self.batch)])
            if chosen.any():
                self.pick_rows("batch_select_indices", chosen, int(chosen.sum()))
        elif name == "reset":
            self.reset()

    def check(self) -> None:
        layer, block_size = self.layer, self.config.block_size
        assert layer.get_seq_length() == self.length
        if not self.length:
            assert layer.device_bytes == layer.host_bytes == 0
            return
        complete = torch.cat([self.truth.keys, self.truth.values], -1)
        assert torch.equal(layer.dense_kv(), complete)
        if layer.pending is not None:
            layer.crop(0)  # stores what the streamed forward left pending
            assert torch.equal(layer.dense_kv(), complete)
        layer.check_integrity()
        if layer.working_set is None:
            return
        sealed = layer.store.num_blocks
        blocks = as_blocks(complete[:, :, : sealed * block_size], block_size)
        for name, summary in layer.index.summarise(blocks[..., :KEY_DIM]).items():
            assert torch.equal(layer.index.held(name, sealed), summary), name
        assert layer.host_bytes == blocks.numel() * blocks.element_size()
        if layer.residency.flying is None:
            window = layer.working_set
            for table, content in ((window.block_of_slot, window.slots), (window.block_of_staged, window.staging)):
                rows, heads, places = (table >= 0).nonzero(as_tuple=True)
                assert torch.equal(content[rows, heads, places], blocks[rows, heads, table[rows, heads, places]])


def run(config: OasisConfig, history: list[tuple[str, Any]], seed: int) -> None:
    pair = Pair(config, torch.Generator().manual_seed(seed))
    memory, parted = pair.layer.runtime.memory, []
    for name, argument in history:
        if name == "deepcopy":
            twin = pair.twin()
            pair, other = (twin, pair) if argument else (pair, twin)
            parted.append(other)
        else:
            pair.apply(name, argument)
        pair.check()
    for other in parted:
        other.check()  # untouched by what happened to its copy
        other.apply("attend", 2)
        other.check()
    del pair, parted[:]
    other = twin = None
    assert memory.reserved_bytes == 0, "host pages outlive their layers"


@settings(max_examples=1500)
@given(configs, operations, st.integers(0, 2**32))
def test_any_history_equals_dynamic_layer(config, history, seed):
    run(config, history, seed)


@settings(max_examples=100)
@given(
    configs, st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=5, max_size=30), st.integers(0, 2**32)
)
def test_speculative_decoding_equals_dynamic_layer(config, rounds, seed):
    """A long prefill, then rounds of a few rows of which some are taken back: what decoding with drafts does."""
    history: list[tuple[str, Any]] = [("attend", 25)]
    for rows, rejected in rounds:
        history += [("attend", rows), ("crop", min(rejected, rows) if rejected < 9 else 11)]
    run(config, history, seed)
