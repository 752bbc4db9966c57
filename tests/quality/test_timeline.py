"""What is recorded of a cache's steps adds up to what the cache counted, and the plots draw those numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from eval import timeline
from eval.timeline import FOUND, PARTS, Recorder, Timeline
from oasis_cache import OasisCache, StepTrace
from tests import models

OPTIONS = {"block_size": 8, "budget": 64, "recent_blocks": 2, "sparse_rows": 4, "trace": True}
TOKENS, NEW = 300, 10
NUM_SLOTS = 6


def generated(**options) -> tuple[OasisCache, Recorder]:
    model = models.build("llama-deep")
    cache = OasisCache(model_config=model.config, **OPTIONS, **options)
    recorder = Recorder(cache)
    models.generate(model, models.prompt(TOKENS), cache, NEW, stopping_criteria=[recorder], eos_token_id=None)
    return cache, recorder


@pytest.mark.parametrize(
    "options", [{}, {"lookahead": "draft", "spare_blocks": 4}, {"on_miss": "skip", "lookahead": "draft"}]
)
def test_a_timeline_adds_up_to_the_counters_and_the_trace(options):
    cache, recorder = generated(**options)
    recorded, stats = recorder.timeline(), cache.stats()
    layers, heads = len(cache.layers), cache.layers[0].shape.kv_heads
    assert recorded.layers == list(range(layers))
    assert recorded.context_tokens == [TOKENS + step + 1 for step in range(NEW - 1)] and stats.sparse_steps == NEW - 1
    for step in range(NEW - 1):
        for layer in range(layers):
            found = [getattr(recorded, name)[step][layer] for name in FOUND]
            traced = cache.trace[layer][step]
            assert min(found) >= 0 and sum(found) == heads * NUM_SLOTS
            assert sum(found[1:]) == int(traced.absent.sum())
            assert found[3] == int(traced.missed.sum())
    assert sum(recorded.by_step("late")) + sum(recorded.by_step("fetched")) == stats.misses
    assert sum(recorded.by_step("bytes_fetched")) == stats.bytes_fetched
    assert sum(recorded.by_step("stall_seconds")) == pytest.approx(stats.stall_seconds)
    assert recorded.by_step("fetched")[0] > 0
    assert (sum(recorded.by_step("staged")) > 0) == ("spare_blocks" in options)


def test_late_prefetches_are_told_from_those_in_time(monkeypatch):
    from oasis_cache.transfer import TransferEngine

    monkeypatch.setattr(TransferEngine, "ready", lambda *_: False)
    cache, recorder = generated(lookahead="draft", spare_blocks=4, max_fetch=None)
    recorded = recorder.timeline()
    assert sum(recorded.by_step("late")) == cache.stats().late > 0
    blocks = len(cache.layers) * cache.layers[0].shape.kv_heads * NUM_SLOTS
    assert [sum(step) for step in zip(*map(recorded.by_step, FOUND), strict=True)] == [blocks] * (NEW - 1)


def test_a_recording_without_sparse_steps_is_refused():
    model = models.build("llama-deep")
    cache = OasisCache(model_config=model.config)
    recorder = Recorder(cache)
    models.generate(model, models.prompt(20), cache, 3, stopping_criteria=[recorder])
    assert len(recorder.snapshots) == 3
    with pytest.raises(ValueError, match="no sparse step between 3 snapshots"):
        recorder.timeline()
    with pytest.raises(ValueError, match="needs trace=True"):
        timeline.working_set(cache.trace)


def step(*heads: tuple[int, ...]) -> StepTrace:
    selected = torch.tensor([heads], dtype=torch.int32)
    none = torch.zeros(1, len(heads), dtype=torch.int32)
    return StepTrace(200, 1, 20, selected, none, none)


def test_the_working_set_counts_distinct_blocks_of_the_last_steps():
    one = [step((0, 1, 2), (-1, 0, 4)), step((0, 1, 5), (-1, 0, 6)), step((0, 1, 5), (-1, 0, 4))]
    other = [step((7, 8, 9), (7, 8, 9))] * 3
    sizes = timeline.working_set({0: one, 3: other}, spans=(1, 2))
    assert sizes == {
        "last 1": [2.75, 2.75, 2.75],
        "last 2": [2.75, 3.25, 3.0],
        "all": [2.75, 3.25, 3.25],
        "blocks": [20.0, 20.0, 20.0],
    }


def test_bytes_by_tier_are_all_that_a_cache_holds(tmp_path):
    sizes = models.build("llama-deep").config
    heads, dim = sizes.num_key_value_heads, sizes.hidden_size // sizes.num_attention_heads
    options = {**OPTIONS, "lookahead": "draft", "spare_blocks": 4, "max_host_bytes": 1 << 15, "spill": str(tmp_path)}
    cache, rows = OasisCache(model_config=sizes, **options), []
    for tokens in (40, 400, 800):
        for layer in range(sizes.num_hidden_layers):
            cache.update(*torch.randn(2, 1, heads, tokens, dim), layer)
        rows.append(timeline.bytes_by_tier(cache))
        held = cache.bytes_held()
        assert sum(rows[-1][part] for part in PARTS) == held["working set"] + held["index"]
        assert rows[-1]["host"] == held["host tier"] and rows[-1]["disk"] == cache.stats().disk_bytes
    token = 2 * heads * dim * 4 * sizes.num_hidden_layers
    assert [row["context_tokens"] for row in rows] == [40, 440, 1240]
    assert [row["dense"] for row in rows] == [40 * token, 440 * token, 1240 * token]
    dense, paged, longer = rows
    assert dense["dense buffer"] >= 40 * token and dense["slots"] == dense["host"] == dense["disk"] == 0
    assert paged["dense buffer"] == 0 and paged["staging"] == 4 * 8 * token
    assert paged["window"] == cache.config.window_tokens * token
    assert NUM_SLOTS * 8 * token < paged["slots"] < 1.2 * NUM_SLOTS * 8 * token  # with the tables
    assert longer["disk"] > paged["disk"] > 0 and longer["slots"] == paged["slots"] and longer["index"] > paged["index"]


# --- The plots --------------------------------------------------------------------------------------------------------

matplotlib = pytest.importorskip("matplotlib", reason="comes with the eval extra")
matplotlib.use("Agg")

from eval import plots_cache


@pytest.fixture(autouse=True)
def no_open_figures():
    yield
    plots_cache.pyplot.close("all")


def heights(axes) -> list[list[float]]:
    return [[bar.get_height() for bar in container] for container in axes.containers]


def test_the_timeline_draws_what_was_recorded():
    recorded = Timeline(
        layers=[0, 2],
        context_tokens=[101, 102, 103],
        in_slots=[[0, 0], [5, 6], [7, 8]],
        staged=[[0, 0], [1, 0], [0, 0]],
        late=[[0, 0], [0, 1], [0, 0]],
        fetched=[[8, 8], [2, 1], [1, 0]],
        bytes_fetched=[[10**6, 10**6], [500_000, 0], [0, 0]],
        stall_seconds=[[0.5, 0.1], [0.002, 0.004], [0.001, 0.0]],
    )
    figure = plots_cache.timeline(recorded, "a title")
    found, moved, blocks, waits = figure.axes[:4]
    assert heights(found) == [[0, 11, 15], [0, 1, 0], [0, 1, 0], [16, 3, 1]]
    assert heights(moved) == [[2.0, 0.5, 0.0]]
    assert blocks.images[0].get_array().tolist() == [[8, 2, 1], [8, 2, 0]]  # [layers][steps]
    assert blocks.images[0].get_clim() == (0, 2)  # of the steps after the first
    assert waits.images[0].get_array().flatten().tolist() == pytest.approx([500, 2, 1, 100, 4, 0])
    assert [tick.get_text() for tick in waits.get_yticklabels()] == ["0", "2"]
    assert waits.images[0].get_clim() == (0, 4)
    assert figure.get_suptitle() == "a title"
    assert all(axes.get_ylabel() for axes in figure.axes)


def test_a_single_step_can_be_drawn():
    values = {name: [[1, 1]] for name in FOUND}
    figure = plots_cache.timeline(Timeline([0, 1], [10], **values, bytes_fetched=[[1, 1]], stall_seconds=[[0.0, 0.0]]))
    assert figure.axes[2].images[0].get_clim() == (0, 2)
    figure.canvas.draw()


def test_the_working_set_is_drawn_against_all_blocks():
    sizes = {"last 1": [2.0, 2.0], "last 4": [2.0, 3.0], "all": [2.0, 4.0], "blocks": [20.0, 21.0]}
    (axes,) = plots_cache.working_set(sizes).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines == {
        "this step": [2.0, 2.0],
        "last 4 steps": [2.0, 3.0],
        "all steps so far": [2.0, 4.0],
        "all blocks before the window": [20.0, 21.0],
    }
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 21


def test_bytes_by_tier_are_stacked():
    row = dict.fromkeys(PARTS, 0) | {"context_tokens": 1000, "slots": 3_000_000, "index": 1_000_000, "dense": 9_000_000}
    rows = [row | {"host": 9_000_000, "disk": 0}, row | {"host": 9_000_000, "disk": 4_000_000, "dense": 13_000_000}]
    device, tiers = plots_cache.bytes_by_tier(rows).axes
    assert heights(device) == [[3, 3], [1, 1]] and heights(tiers) == [[9, 9], [0, 4]]
    assert [bar.get_y() for bar in device.containers[1]] == [3, 3]
    assert list(tiers.lines[0].get_ydata()) == [9, 13] == list(device.lines[0].get_ydata())
    assert [label.get_text() for label in tiers.get_xticklabels()] == ["1,000", "1,000"]
    named, _ = plots_cache.bytes_by_tier(rows, labels=["before", "after"]).axes
    assert [label.get_text() for label in named.get_xticklabels()] == ["before", "after"]


def lightness(colour: str) -> float:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


@pytest.mark.parametrize("styles", [plots_cache._FOUND, plots_cache._PARTS, plots_cache._TIERS])
def test_parts_differ_without_colour_where_they_touch(styles):
    listed = list(styles.values())
    assert len({colour for _, colour, _ in listed}) == len(listed)
    for (_, colour, hatch), (_, other, other_hatch) in itertools.pairwise(listed):
        assert hatch != other_hatch or abs(lightness(colour) - lightness(other)) > 20
