"""The evaluation commands run and give what their tables need; the committed pages are those of the committed results."""

from __future__ import annotations

import csv
import itertools
import json

import pytest

from eval import report
from eval.bench import filling
from eval.bench.__main__ import main as bench
from eval.quality import assisted, prediction


def test_pages_are_those_of_the_results():
    outdated = [page.name for page, text in report.pages().items() if page.read_text() != text]
    assert not outdated, f"python -m eval.report would change {outdated}"


@pytest.mark.slow
def test_prediction_on_a_short_text(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "SETTINGS", ((0.05, 1.0), (None, 1.0), (0.01, 1.0)))
    out = tmp_path / "prediction.json"
    arguments = ["--lengths", "600", "--steps", "4", "--budget", "256", "--settings", "2", "--out", str(out)]
    assert prediction.main(arguments) == 0
    results = json.loads(out.read_text())
    ranking = {(r["index"], r["predictor"], r["chosen_blocks"]): r for r in results["ranking"]}
    own = {name: ranking[name, "own query", 16]["mass"] for name in prediction.INDEXES}
    assert own["exact"] >= own["int2"] > own["minmax"]
    residency = {(r["drafter"], r["max_fetch"], r["spare"]): r for r in results["residency"]}
    assert len(residency) == 6 * 2
    right, none = (residency[name, 0.05, 12]["hit_rate"] for name in ("the text, 1", "none"))
    assert 1 >= right > none > 0.5
    assert residency["the text, 1", None, 12]["hit_rate"] > right


@pytest.mark.slow
def test_assisted_generation_on_a_short_text(tmp_path, monkeypatch):
    monkeypatch.setattr(assisted, "DEPTHS", (0.1, 0.9))
    out = tmp_path / "assisted.json"
    arguments = ["--length", "300", "--budget", "128", "--new-tokens", "10", "--out", str(out)]
    assert assisted.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["way"], row["depth"]) for row in rows} == set(itertools.product(assisted.WAYS, (0.1, 0.9)))
    assert all(row["found"] for row in rows)
    assert all(row["tokens_read_max"] == 128 for row in rows if "dense" not in row["way"])
    assert all(row["equal"] == 10 for row in rows if row["way"] in ("plain", "plain, dense"))


@pytest.mark.slow
def test_bench_writes_rows_that_can_be_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(filling, "SEED_TOKENS", 1024)  # read by the model; the case's context needs no more
    ledger = tmp_path / "ledger.csv"
    names = ["OasisCache", "DynamicCache", "StaticCache", "Quest"]
    arguments = ["--cases", "step-1024-float32", "--rounds", "2", "--providers", ",".join(names)]
    assert bench(["run", *arguments, "--ledger", str(ledger)]) == 0
    with ledger.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["provider"]) for row in rows[2:]] == [("step-1024-float32", name) for name in names]
    assert [row["case"] for row in rows[:2]] == ["copy", "read"]
    assert "OasisCache" in capsys.readouterr().out
