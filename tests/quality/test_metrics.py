"""Losses, averages and intervals of predictions made up by hand."""

from __future__ import annotations

import math

import pytest

from eval.quality import metrics
from eval.quality.runner import Prediction, budget_of


def prediction(task: str, name: str, method: str, scores: list[float], **changes) -> Prediction:
    fields = {
        "task": task,
        "length": 4096,
        "name": name,
        "context": name,
        "way": "answer",
        "depth": None,
        "method": method,
        "share": None if method == "dense" else 0.125,
        "budget": None if method == "dense" else 512,
        "answers": [""] * len(scores),
        "scores": scores,
        "counters": {"tokens_read": 512.0, "sparse_steps": 3},
    }
    return Prediction(**{**fields, **changes})


def test_losses_are_paired_and_failed_tasks_left_out():
    predictions = []
    for number, (dense, ours) in enumerate([(1, 1), (1, 0), (0, 1), (1, 1)]):
        predictions += [
            prediction("right", f"{number}", "dense", [dense]),
            prediction("right", f"{number}", "oasis", [ours]),
        ]
    for number, (dense, ours) in enumerate([(0, 1), (0, 1), (1, 1)]):
        predictions += [
            prediction("fails", f"{number}", "dense", [dense]),
            prediction("fails", f"{number}", "oasis", [ours]),
        ]
    summary = metrics.summary(predictions)
    assert [(row["task"], row["score"]) for row in summary["dense_fails"]] == [("fails", pytest.approx(1 / 3))]
    cells = {(cell["task"], cell["method"]): cell for cell in summary["cells"]}
    assert cells["right", "oasis"]["loss"] == 0.0 and cells["right", "oasis"]["score"] == 0.75
    assert cells["right", "oasis"]["loss_low"] < 0 < cells["right", "oasis"]["loss_high"]
    assert cells["right", "oasis"]["sparse_steps"] == 12
    averages = {(row["length"], row["method"]): row for row in summary["averages"]}
    assert averages[4096, "oasis"]["tasks"] == 1 and averages[4096, "oasis"]["samples"] == 4
    assert averages[None, "oasis"]["loss"] == 0.0 and averages[4096, "dense"]["loss"] == 0.0
    assert metrics.pairs(predictions, 0.125) == {("oasis", 4096, "answer"): metrics.Pairs(3, 1, 3, 7)}


def test_tasks_count_once_however_many_samples_they_have():
    predictions = []
    for number in range(9):
        predictions += [prediction("many", f"{number}", "dense", [1]), prediction("many", f"{number}", "quest", [1])]
    predictions += [prediction("few", "0", "dense", [1, 1]), prediction("few", "0", "quest", [0, 0])]
    (row,) = [r for r in metrics.summary(predictions)["averages"] if r["length"] == 4096 and r["method"] == "quest"]
    assert row["loss"] == 50.0 and row["worst"] == 100.0 and row["tasks"] == 2 and row["samples"] == 10


def test_intervals_draw_contexts_and_not_samples():
    """Samples of one context are copies of each other: a hundred of them are as sure as one."""
    one = metrics.interval([{"a": [0.0], "b": [100.0], "c": [0.0], "d": [100.0]}])
    many = metrics.interval([{"a": [0.0] * 100, "b": [100.0] * 100, "c": [0.0] * 100, "d": [100.0] * 100}])
    assert one == many
    assert one[0] <= 25 and one[1] >= 75
    assert metrics.interval([{"a": [7.0, 7.0]}, {"b": [3.0]}]) == (5.0, 5.0)


def test_answers_are_paired_turn_by_turn():
    predictions = [
        prediction("turns", "0", "dense", [1, 0, 1, 0, 0.5]),
        prediction("turns", "0", "oasis", [1, 1, 0, 0, 1]),
        prediction("turns", "0", "oasis", [0, 0, 0, 0, 0], share=0.25),
        prediction("prose", "0", "dense", [-1.0]),
        prediction("prose", "0", "oasis", [-1.0]),
        prediction("turns", "1", "dense", [1], length=8192, way="question"),
        prediction("turns", "1", "oasis", [1], length=8192, way="question"),
    ]
    pairs = metrics.pairs(predictions, 0.125)
    assert pairs == {
        ("oasis", 4096, "answer"): metrics.Pairs(both=1, lost=1, gained=2, answers=5),
        ("oasis", 8192, "question"): metrics.Pairs(both=1, answers=1),
    }
    assert sum(pairs.values(), metrics.Pairs()) == metrics.Pairs(2, 1, 2, 6)


def test_the_test_of_pairs_is_exact_and_two_sided():
    stats = pytest.importorskip("scipy.stats")
    for lost, gained in [(0, 0), (1, 0), (5, 0), (2, 7), (9, 1), (4, 4)]:
        expected = stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
        assert metrics.Pairs(10, lost, gained, 30).p_value == pytest.approx(expected)
        assert metrics.Pairs(10, gained, lost, 30).p_value == pytest.approx(expected)


def test_a_share_of_few_is_unsure_even_where_none_is_lost():
    stats = pytest.importorskip("scipy.stats")
    for lost, both in [(0, 10), (1, 60), (3, 0)]:
        expected = stats.binomtest(lost, lost + both).proportion_ci(0.95, method="wilson")
        assert metrics.Pairs(both, lost).lost_interval == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert metrics.Pairs(answers=4).lost_interval == (0.0, 1.0)


def test_perplexity_is_a_ratio_and_in_no_average():
    predictions = [
        prediction("prose", "0", "dense", [-2.0]),
        prediction("prose", "0", "oasis", [-2.1]),
        prediction("right", "0", "dense", [1]),
        prediction("right", "0", "oasis", [1]),
    ]
    summary = metrics.summary(predictions)
    rows = {row["method"]: row for row in summary["prose"]}
    assert rows["oasis"]["ratio"] == pytest.approx(math.exp(0.1))
    assert rows["dense"]["perplexity"] == pytest.approx(math.exp(2.0)) and rows["dense"]["ratio"] == 1.0
    assert all(row["tasks"] == 1 for row in summary["averages"])


def test_budgets_are_whole_blocks():
    assert [budget_of(length, 1 / 8) for length in (512, 1024, 4096, 8192)] == [96, 128, 512, 1024]
    assert budget_of(4096, 0.07) == 272
