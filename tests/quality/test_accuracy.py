"""What the report says of a run made up by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from eval.quality import accuracy
from tests.quality.test_metrics import prediction

ENVIRONMENT = {
    "model": "tiny",
    "dtype": "float32",
    "device_name": "the CPU",
    "threads": 1,
    "torch": "2",
    "transformers": "5",
}


def run_of(folder, predictions) -> accuracy.Run:
    config = {"environment": {**ENVIRONMENT, "text": "prose"}, "commit": "abc", "seconds": 60.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(asdict(each)) + "\n" for each in predictions))
    return accuracy.Run(folder)


def task(name: str, dense: list[int], **methods: list[int]) -> list:
    columns = {"dense": dense, **methods}
    return [
        prediction(name, str(number), method, [score])
        for method, scores in columns.items()
        for number, score in enumerate(scores)
    ]


@pytest.mark.parametrize(("lost", "said"), [([1, 1], "4,096 tokens: met. 0.0"), ([1, 0], "4,096 tokens: missed. 25.0")])
def test_the_target_is_met_or_missed(tmp_path, lost, said):
    run = run_of(tmp_path, task("easy", [1, 1], oasis=[1, 1]) + task("hard", [1, 1], oasis=lost))
    text = accuracy.target_text(run)
    assert said in text
    assert ("hard 50.0 (question read exactly, 2 samples)" in text) == ("missed" in said)
    assert f"of 4 that the dense cache gets right {lost.count(0)} are lost" in text
    assert f"| OasisCache | 4,096 | 4 | 4 | {lost.count(0)} |" in accuracy.paired_table(run)


def test_methods_that_ran_only_some_tasks_have_scores_and_no_average(tmp_path):
    predictions = task("easy", [1, 1], oasis=[1, 1], **{"kvpress-knorm": [0, 1]}) + task("hard", [1, 1], oasis=[1, 0])
    predictions += task("fails", [0, 0], oasis=[1, 1])
    run = run_of(tmp_path, predictions)
    assert "kvpress" not in accuracy.average_table(run) and "25.0" in accuracy.average_table(run)
    assert "| easy | 4,096 | exactly | 2 | 100 | 100 | 50 |" in accuracy.task_table(run)
    assert "| fails | 4,096 | exactly | 2 | 0 | dense fails |" in accuracy.task_table(run)
    assert "| OasisCache | 3/4 |" in accuracy.kept_table(run) and "| kvpress, key norms | 1/2 |" in accuracy.kept_table(
        run
    )
    assert "512 of 4,096 | 18 | 0 |" in accuracy.reading_table(run)
    assert "commit abc" in accuracy.blocks(run)["environment"]


def test_the_readme_has_the_averages_at_the_lengths_of_the_target(tmp_path):
    predictions = task("easy", [1, 1], oasis=[1, 0], **{"kvpress-knorm": [0, 1]}) + task("hard", [1, 1], oasis=[1, 1])
    predictions += [prediction("easy", "2", method, [1], length=1024) for method in ("dense", "oasis")]
    lines = accuracy.readme_block(run_of(tmp_path, predictions)).splitlines()
    assert "| method | 4,096 tokens | samples |" in lines
    assert [line for line in lines if "OasisCache |" in line] == ["| OasisCache | 25.0 (0.0 to 50.0) | 4 |"]
    assert not any("kvpress" in line for line in lines)


def test_methods_are_compared_on_the_samples_that_all_of_them_answered(tmp_path):
    predictions = task("easy", [1, 1, 1, 1], oasis=[1, 1, 0, 0], quest=[0, 1])
    run = run_of(tmp_path, predictions)
    readme = accuracy.readme_table(run).splitlines()
    assert "| OasisCache | 0.0 (0.0 to 0.0) | 2 |" in readme
    assert "| OasisCache, on more samples | 50.0 (0.0 to 100.0) | 4 |" in readme
    assert "| Quest | 50.0 (0.0 to 100.0) | 2 |" in readme
    assert len(accuracy.kept_table(run).splitlines()) == 2 + 3
    assert "| OasisCache | 2/2 |" in accuracy.kept_table(run)
    assert "| OasisCache, on more samples | 2/4 |" in accuracy.kept_table(run)
    assert "| OasisCache | 4,096 | 2 | 2 | 0 |" in accuracy.paired_table(run)
    assert "| easy | 4,096 | exactly | 2 | 100 | 100 | 50 |" in accuracy.task_table(run)
    assert "50.0 (0.0 to 100.0) points on average over 1 tasks" in accuracy.target_text(run), "of all samples"


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no results"):
        accuracy.Run(tmp_path)
