"""The evaluation commands run and give what their tables need; the committed pages are those of the committed results."""

from __future__ import annotations

import csv
import json

import pytest

from eval import report
from eval.bench.__main__ import main as bench
from eval.quality import assisted, prediction


def test_pages_are_those_of_the_results():
    outdated = [page.name for page, text in report.pages().items() if page.read_text() != text]
    assert not outdated, f"python -m eval.report would change {outdated}"


@pytest.mark.slow
def test_prediction_on_a_short_text(tmp_path):
    out = tmp_path / "prediction.json"
    assert (
        prediction.main(["--lengths", "600", "--steps", "4", "--budget", "256", "--settings", "4", "--out", str(out)])
        == 0
    )
    results = json.loads(out.read_text())
    ranking = {(r["index"], r["predictor"], r["chosen_blocks"]): r for r in results["ranking"]}
    own = {name: ranking[name, "own query", 16]["mass"] for name in prediction.INDEXES}
    assert own["exact"] >= own["int2"] > own["minmax"]
    residency = {(r["drafter"], r["max_fetch"], r["spare"]): r for r in results["residency"]}
    assert len(residency) == 6 * 4
    right, none = (residency[name, 0.05, 12]["hit_rate"] for name in ("the text, 1", "none"))
    assert 1 >= right > none > 0.5
    assert residency["the text, 1", None, 12]["hit_rate"] > right


@pytest.mark.slow
def test_assisted_generation_on_a_short_text(tmp_path):
    out = tmp_path / "assisted.json"
    arguments = ["--length", "500", "--budget", "256", "--new-tokens", "10", "--out", str(out)]
    assert assisted.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["way"] for row in rows} == set(assisted.WAYS)
    assert all(row["found"] for row in rows)
    assert all(row["tokens_read_max"] == 256 for row in rows if "dense" not in row["way"])
    assert all(row["equal"] == 10 for row in rows if row["way"] in ("plain", "plain, dense"))


@pytest.mark.slow
def test_bench_writes_rows_that_can_be_told_apart(tmp_path, capsys):
    ledger = tmp_path / "ledger.csv"
    names = ["OasisCache", "DynamicCache", "StaticCache", "Quest"]
    arguments = ["--cases", "step-1024-float32", "--rounds", "2", "--providers", ",".join(names)]
    assert bench(["run", *arguments, "--ledger", str(ledger)]) == 0
    with ledger.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["case"], row["provider"]) for row in rows[2:]] == [("step-1024-float32", name) for name in names]
    assert [row["case"] for row in rows[:2]] == ["copy", "read"]
    assert "OasisCache" in capsys.readouterr().out
