"""Options: every bad one is refused with the value and the accepted range, before anything else happens."""

from __future__ import annotations

import dataclasses

import pytest

from oasis_cache import OasisCache, OasisConfig


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, ["block_size=0", "at least 1"]),
        ({"block_size": 2.0}, ["block_size=2.0", "int"]),
        ({"sink_blocks": -1}, ["sink_blocks=-1"]),
        ({"recent_blocks": True}, ["recent_blocks=True"]),
        ({"sparse_rows": 0}, ["sparse_rows=0"]),
        ({"stream_tokens": 0}, ["stream_tokens=0"]),
        ({"budget": 80}, ["budget=80", "96"]),
        ({"budget": 100}, ["budget=100", "multiple of block_size=16"]),
        ({"budget": None}, ["budget=None"]),
        ({"dense_below": 512, "budget": 1024}, ["dense_below=512", "budget=1024"]),
        ({"max_host_bytes": 0}, ["max_host_bytes=0"]),
        ({"spill": "/tmp"}, ["spill='/tmp'", "needs max_host_bytes"]),
        ({"spill": 3, "max_host_bytes": 2**30}, ["spill=3", "directory"]),
        ({"spill": "", "max_host_bytes": 2**30}, ["spill=''"]),
        ({"index": "int3"}, ["index='int3'", "'int2'", "'minmax'"]),
        ({"on_miss": "ignore"}, ["on_miss='ignore'", "'fetch'", "'skip'"]),
        ({"lookahead": True}, ["lookahead=True", "'draft'"]),
        ({"engine": "warp"}, ["engine='warp'"]),
        ({"on_miss": "skip", "lookahead": "off"}, ["on_miss='skip'", "lookahead='off'"]),
        ({"spare_blocks": -1}, ["spare_blocks=-1"]),
        ({"max_fetch": 1.5}, ["max_fetch=1.5", "[0.0, 1.0]"]),
        ({"max_fetch": -1}, ["max_fetch=-1"]),
        ({"max_fetch": "all"}, ["max_fetch='all'"]),
        ({"trace": 1}, ["trace=1"]),
        ({"buget": 512}, ["'buget'", "budget"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_option_is_refused_by_name_and_range(options, words):
    with pytest.raises(ValueError) as error:
        OasisCache(**options)
    for word in words:
        assert word in str(error.value)


def test_config_must_be_an_oasis_config():
    with pytest.raises(ValueError, match="model_config="):
        OasisCache({"budget": 512})
    with pytest.raises(ValueError, match="model_config must be"):
        OasisCache(model_config={"hidden_size": 4})


def test_overrides_go_on_top_of_a_config():
    base = OasisConfig(budget=512, index="minmax")
    cache = OasisCache(base, budget=1024)
    assert (cache.config.budget, cache.config.index) == (1024, "minmax")
    assert base.budget == 512
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.budget = 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"budget": 512}, (32, 28, 512)),
        ({"budget": 512, "dense_below": 4096}, (32, 28, 4096)),
        ({"budget": 96, "recent_blocks": 0}, (6, 6, 6 * 16 + 15 + 32)),  # the slots must be fillable from sealed blocks
    ],
)
def test_derived_sizes(options, expected):
    config = OasisConfig(**options)
    assert (config.budget_blocks, config.num_slots, config.dense_tokens) == expected


@pytest.mark.parametrize(
    ("cap", "blocks"), [(None, 28), (0, 0), (3, 3), (99, 28), (0.0, 0), (0.05, 2), (0.01, 1), (1.0, 28)]
)
def test_fetch_cap_in_blocks(cap, blocks):
    assert OasisConfig(budget=512, max_fetch=cap).max_fetch_blocks == blocks
