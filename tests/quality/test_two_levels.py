"""The measurement of what a coarse level loses."""

from __future__ import annotations

import pytest

from eval.quality.two_levels import compare, number_ids
from oasis_cache import clusters
from oasis_cache.packaged import load_model
from tests import models


def test_more_candidates_lose_less(monkeypatch):
    monkeypatch.setattr(clusters, "SEGMENT_TOKENS", 256)
    monkeypatch.setattr(clusters, "CLUSTERS", 32)
    model, ids = models.build("llama"), models.prompt(1500)
    few, many = compare(model, ids, 3, [128], [1, 9])
    assert (few.blocks, few.candidates, many.candidates) == (89, 4, 36)
    assert 0 < few.worst_layer <= few.mean < many.mean <= 1.001


def test_short_texts_have_no_coarse_level():
    with pytest.raises(ValueError, match="too few"):
        compare(models.build("llama"), models.prompt(500), 3, [128], [1])


def test_a_hidden_number_is_where_it_is_said_to_be():
    tokenizer = load_model(None)[1]
    ids, spot = number_ids(tokenizer, 1024, 0.5, 5)
    digits = ids[0, spot.start : spot.stop]
    assert tokenizer.decode(digits).isdigit() and len(digits) == 7
    assert ids[0, -7:].tolist() == digits.tolist(), "the prompt ends in its answer"
    assert 300 < spot.start < 700
