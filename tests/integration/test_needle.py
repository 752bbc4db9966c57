"""A number hidden in natural text is found through OasisCache, and is not found where nothing is retrieved."""

from __future__ import annotations

import json
from functools import cache

import pytest
from rich.console import Console

from eval.quality import needle
from eval.quality.needle import CONTROL, CONTROL_BUDGET, DENSE, Method, NeedleResult
from oasis_cache import packaged
from oasis_cache.haystack import hide_number

pytestmark = pytest.mark.slow

NUM_DEPTHS = 5
# 4,096 tokens take half a minute, and what is run does not depend on the length: fewer depths of more; `make needle` tries all.
SAMPLES = [(1024, sample) for sample in range(NUM_DEPTHS)] + [(2048, 0), (2048, 2), (2048, 4), (4096, 1)]
METHODS = [*needle.methods_of(["int2"], [512]), Method("int2", 128, "answer")]


@cache
def loaded():
    return packaged.load_model()


def depth_of(sample: int) -> float:
    return sample / NUM_DEPTHS


@cache
def results_of(length: int, sample: int) -> dict[tuple[str, int | None, str], NeedleResult]:
    results = needle.run_case(*loaded(), length, depth_of(sample), needle.FIRST_SEED + sample, METHODS)
    return {result.group[1:]: result for result in results}


@pytest.mark.parametrize(("length", "sample"), SAMPLES)
def test_number_is_found_sparsely(length, sample):
    results = results_of(length, sample)
    assert results[DENSE, None, ""].found, "the sample is useless: the dense model does not find it"
    for way in needle.WAYS:
        result = results["int2", 512, way]
        assert result.found, result
        assert (result.sparse_steps, result.dense_steps, result.streamed_steps) == (needle.ANSWER_TOKENS, 0, 0)
        assert 0 < result.tokens_read_max <= 512 < result.tokens


@pytest.mark.parametrize(("length", "sample"), SAMPLES)
def test_number_is_not_found_without_retrieval(length, sample):
    task = hide_number(loaded()[1], length, depth_of(sample), needle.FIRST_SEED + sample)
    window = CONTROL_BUDGET + 16  # and at most a block of unsealed tokens
    assert task.needle_end + window < task.context_ids.shape[1], "the sample is useless: the number is not hidden"
    for way in needle.WAYS:
        result = results_of(length, sample)[CONTROL, CONTROL_BUDGET, way]
        assert not result.found, result
        assert result.dense_steps == result.streamed_steps == 0 < result.sparse_steps
        assert 0 < result.tokens_read_max <= CONTROL_BUDGET


@pytest.mark.parametrize("length", [1024, 2048])
def test_small_budget_finds_most(length):
    results = [results_of(*each)["int2", 128, "answer"] for each in SAMPLES if each[0] == length]
    assert sum(result.found for result in results) >= 0.8 * len(results)
    assert max(result.tokens_read_max for result in results) <= 128


def test_command_line_sums_up_and_writes(tmp_path, capsys):
    file = tmp_path / "folder" / "needle.json"
    arguments = ["--lengths", "600", "--depths", "1", "--budgets", "256", "--ways", "answer", "--out", str(file)]
    assert needle.main(arguments) == 0
    report = json.loads(file.read_text())
    assert [row["method"] for row in report["summary"]] == [DENSE, "int2", CONTROL]
    assert [row["found"] for row in report["summary"]] == [1, 1, 0]
    assert len(report["results"]) == 3
    assert report["environment"]["transformers"]
    out = capsys.readouterr().out
    assert "1/1" in out
    assert "0/1" in out


def test_summary_counts_per_method():
    shared = {"length": 1024, "seed": 0, "tokens": 1000, "way": "answer", "answer": ""}
    results = [
        NeedleResult(
            **shared, depth=depth, method=method, budget=512, found=found, equal_dense=found, tokens_read_max=read
        )
        for depth, method, found, read in [
            (0.1, "int2", True, 300),
            (0.5, "int2", False, 512),
            (0.1, "minmax", False, 1),
        ]
    ]
    rows = needle.summary(results)
    assert [(row["method"], row["found"], row["samples"], row["tokens_read_max"]) for row in rows] == [
        ("int2", 1, 2, 512),
        ("minmax", 0, 1, 1),
    ]
    console = Console(width=120, record=True)
    console.print(needle.table(rows))
    assert "1/2" in console.export_text()


def test_wrong_options_are_named(capsys):
    for arguments, message in (
        (["--ways", "guess"], "way='guess' must be one of 'answer', 'question'"),
        (["--indexes", "int7"], "index='int7' must be one of"),
        (["--budgets", "500"], "budget=500 must be a multiple"),
    ):
        assert needle.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_models_whose_cache_cannot_be_handed_over_read_for_themselves(monkeypatch):
    monkeypatch.setattr(needle, "snapshot_of", lambda cache: None)
    own = needle.run_case(*loaded(), 600, 0.5, needle.FIRST_SEED, [Method("int2", 256, "question")])
    monkeypatch.undo()
    handed = needle.run_case(*loaded(), 600, 0.5, needle.FIRST_SEED, [Method("int2", 256, "question")])
    assert own == handed
