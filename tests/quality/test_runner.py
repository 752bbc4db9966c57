"""Samples through methods: the shared prefill gives what each cache would have read itself; runs go on where they stopped."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DynamicCache

from eval.quality import __main__ as command
from eval.quality import runner, suites
from eval.quality.methods import DENSE, METHODS
from eval.quality.run import Results, commit, read_predictions, run_part
from eval.quality.samples import Sample, Turn
from eval.quality.suites import Part
from eval.quality.tasks import FAMILIES
from oasis_cache.demo import cache_argument
from tests import models
from tests.tokens import by_character

LENGTH = 1024
CONTEXT = tuple(models.prompt(300, seed=1)[0].tolist())
QUESTIONS = [tuple(models.prompt(9, seed=seed)[0].tolist()) for seed in (2, 3)]


def sample(way: str = "answer", turns: int = 1, ends: bool = False, new_tokens: int = 5) -> Sample:
    asked = tuple(Turn(question, ("x",), new_tokens, ends) for question in QUESTIONS[:turns])
    return Sample("task", LENGTH, "0", "0", CONTEXT, asked, way)


def predicted(sample: Sample, method: str = "oasis", shared: bool = True) -> runner.Prediction:
    model, tokenizer = models.build("llama-deep"), by_character()
    snapshot = runner.extended(model, runner.read_context(model, sample.context_ids), sample) if shared else None
    share = None if method == "dense" else 1 / 8
    return runner.predict(model, tokenizer, sample, METHODS[method], share, snapshot)


def by_hand(asked: Sample) -> list[str]:
    """Greedy answers of the dense model, everything computed anew for each token."""
    model, ids, answers = models.build("llama-deep"), list(asked.context_ids), []
    for turn in asked.turns:
        ids += turn.question_ids
        generated = []
        for _ in range(turn.new_tokens):
            with torch.no_grad():
                generated.append(int(model(torch.tensor([ids + generated])).logits[0, -1].argmax()))
        ids += generated
        answers.append(by_character().decode(generated, skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("way", ["answer", "question"])
@pytest.mark.parametrize("turns", [1, 2])
def test_dense_answers_are_those_of_a_model_without_a_cache(way, turns):
    asked = sample(way, turns)
    assert predicted(asked, "dense").answers == by_hand(asked)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "dense"])
@pytest.mark.parametrize("way", ["answer", "question"])
def test_shared_keys_and_values_give_what_a_prefill_of_its_own_gives(method, way):
    ours, own = predicted(sample(way, 2), method), predicted(sample(way, 2), method, shared=False)
    assert ours.answers == own.answers and ours.scores == own.scores
    for counters in (ours.counters, own.counters):  # a prefill of its own counts as a forward of quest's attention
        assert counters["sparse_steps"] == 10
    assert ours.counters["other_steps"] == 0
    assert ours.budget == 128


def test_the_question_is_read_sparsely_or_not():
    exactly, sparsely = predicted(sample("answer")), predicted(sample("question"))
    assert exactly.counters["sparse_steps"] == sparsely.counters["sparse_steps"] == 5
    assert sample("answer").exact_ids == CONTEXT + QUESTIONS[0][:-1] and sample("question").exact_ids == CONTEXT
    assert (
        sample("question").sparse_rows == 9
        and sample("answer", 2).sparse_rows == 10
        and sample("answer").sparse_rows == 1
    )
    with pytest.raises(ValueError, match="way='guess' must be one of"):
        sample("guess")


def test_an_answer_ends_at_a_stop_token_or_when_nothing_can_change_its_score(monkeypatch):
    full = predicted(sample(ends=True, new_tokens=12)).answers[0]
    monkeypatch.setattr(runner, "_stop_ids", lambda *_: {by_character()(full[3])["input_ids"][0]})
    assert predicted(sample(ends=True, new_tokens=12)).answers[0] == full[: full.index(full[3])]
    assert predicted(sample(new_tokens=12)).answers[0] == full
    monkeypatch.undo()
    turn = Turn(QUESTIONS[0], (full[:2].upper(), full[4]), 12, ends=True)
    asked = Sample("task", LENGTH, "0", "0", CONTEXT, (turn,))
    result = predicted(asked)
    assert result.scores == [1.0] and len(result.answers[0]) == max(2, full.index(full[4]) + 1)
    assert Turn(QUESTIONS[0], ("ab", "cd"), 1).score("xAB") == 0.5


@pytest.mark.parametrize("method", ["dense", "oasis"])
def test_log_likelihood_of_a_continuation(method):
    model, targets = models.build("llama-deep"), QUESTIONS[0]
    asked = Sample("prose", LENGTH, "0", "0", CONTEXT, target_ids=targets)
    result = predicted(asked, method)
    with torch.no_grad():
        if method == "dense":
            logits = model(torch.tensor([CONTEXT + targets])).logits[0, len(CONTEXT) - 1 : -1]
        else:
            with METHODS[method].session(model, 128, 1) as (cache, _):
                ids = torch.tensor([CONTEXT + targets])
                model(ids[:, : len(CONTEXT) - 1], use_cache=True, **cache_argument(model, cache))
                logits = torch.stack(
                    [
                        model(ids[:, place : place + 1], use_cache=True, **cache_argument(model, cache)).logits[0, 0]
                        for place in range(len(CONTEXT) - 1, len(CONTEXT) + len(targets) - 1)
                    ]
                )
    expected = logits.log_softmax(-1)[range(len(targets)), list(targets)].mean()
    assert result.scores == [pytest.approx(float(expected), abs=1e-4)]
    assert result.counters["sparse_steps"] == (0 if method == "dense" else len(targets))


def test_caches_of_other_models_read_for_themselves():
    model = models.build("mistral-window")
    assert runner.read_context(model, CONTEXT) is None
    cache = DynamicCache(config=model.config)
    runner.fill(model, cache, sample(), None)
    assert cache.get_seq_length() == len(sample().exact_ids)


# --- The loop over a suite ------------------------------------------------------------------------------------------------------


def drawn(*_) -> list[Sample]:
    """A context with a sample that the dense model gets right and one that it fails, and another context."""
    right = by_hand(sample("question"))[0]
    turn = Turn(QUESTIONS[0], (right,), 5)
    failing = Turn(QUESTIONS[0], ("never",), 5)
    samples = [Sample("right", LENGTH, "0", "a", CONTEXT, (turn,), way) for way in ("answer", "question")]
    samples.append(Sample("fails", LENGTH, "0", "a", CONTEXT, (failing,)))
    return [*samples, Sample("right", LENGTH, "1", "b", CONTEXT[1:], (failing,))]


CONFIG = {
    "suite": "test",
    "model": "tiny",
    "dtype": "float32",
    "methods": [],
    "parts": [],
    "commit": None,
    "environment": {},
}


def run_in(folder, monkeypatch, stop_after: int | None = None, without: tuple[str, ...] = ()) -> list[str]:
    """One part of a suite into a folder; interrupted after some predictions."""
    monkeypatch.setitem(FAMILIES, "test", drawn)
    results, said = Results(folder, CONFIG), []
    methods = [DENSE, METHODS["oasis"], METHODS["streaming"]]

    def say(text: str) -> None:
        said.append(text)
        if stop_after is not None and len(results.predictions) >= stop_after:
            raise KeyboardInterrupt

    part = Part("test", LENGTH, 1, (1 / 8, 1 / 4), without)
    run_part(models.build("llama-deep"), by_character(), part, methods, results, say)
    return said


def test_a_run_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    run_in(tmp_path / "whole", monkeypatch)
    whole = read_predictions(tmp_path / "whole" / "predictions.jsonl")
    # 4 dense ones; both methods and budgets on the three samples of the task that the dense model does by half
    assert len(whole) == 4 + 3 * 2 * 2 and {each.task for each in whole if each.method != "dense"} == {"right"}
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "parts", monkeypatch, stop_after=7)
    file = tmp_path / "parts" / "predictions.jsonl"
    assert len(read_predictions(file)) == 7
    with file.open("a") as cut_short:
        cut_short.write('{"task": "ri')
    said = run_in(tmp_path / "parts", monkeypatch)
    parts = read_predictions(file)
    assert sorted(parts, key=repr) == sorted(whole, key=repr)
    assert len([text for text in said if "reading" not in text]) == len(whole) - 7
    assert run_in(tmp_path / "parts", monkeypatch) == []


def test_a_part_leaves_methods_out_and_a_later_one_adds_them(tmp_path, monkeypatch):
    run_in(tmp_path, monkeypatch, without=("streaming",))
    file = tmp_path / "predictions.jsonl"
    assert {each.method for each in read_predictions(file)} == {"dense", "oasis"}
    said = run_in(tmp_path, monkeypatch)
    added = read_predictions(file)[4 + 3 * 2 :]
    assert {each.method for each in added} == {"streaming"} and len(added) == 3 * 2
    assert len([text for text in said if "reading" not in text]) == len(added)


def test_results_of_another_run_are_not_mixed_in(tmp_path):
    Results(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="holds results with model='tiny', this run has 'other'"):
        Results(tmp_path, {**CONFIG, "model": "other"})
    assert commit() is None or len(commit()) >= 7


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    running = Results(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="another run writes to"):
        Results(tmp_path, CONFIG)
    del running
    Results(tmp_path, CONFIG)


def test_the_command_runs_a_suite_and_reports_on_it(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="comes with the eval extra")
    folder, out = tmp_path / "model", tmp_path / "out"
    models.build("llama-deep").save_pretrained(folder)
    by_character().save_pretrained(folder)
    parts = (Part("needle", LENGTH, 2, (1 / 8, 1 / 4)), Part("prose", LENGTH, 1), Part("needle", 8192, 1))
    monkeypatch.setitem(suites.SUITES, "small", parts)
    monkeypatch.setattr("eval.quality.run.DENSE_RIGHT", 0.0)  # a random model finds nothing
    monkeypatch.setattr("eval.quality.metrics.DENSE_RIGHT", 0.0)
    arguments = ["run", "--model", str(folder), "--methods", "oasis,quest", "--out", str(out)]
    assert command.main(arguments) == 0
    assert "needle 8192 left out: the model has 4096 positions" in capsys.readouterr().out
    rows = json.loads((out / "metrics.json").read_text())["cells"]
    assert {row["method"] for row in rows} == {"dense", "oasis", "quest"} and len(rows) == 2 + 2 * 2 * 2
    assert json.loads((out / "config.json").read_text())["seconds"] > 0
    assert command.main(["report", str(out)]) == 0
    page = (out / "accuracy.md").read_text()
    assert "| needle | 1,024 | sparsely | 2 | 0 | 0 | 0 |" in page
    assert sorted(path.name for path in out.glob("*.png")) == [
        "accuracy_budget.png",
        "accuracy_needle.png",
        "accuracy_tasks.png",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--methods", "guess", "--out", "x"], "unknown method 'guess'"),
        (["run", "--dtype", "int7", "--out", "x"], "dtype='int7' must be"),
        (["report", "nowhere"], "nowhere holds no results"),
    ],
)
def test_wrong_options_are_named(arguments, message, tmp_path, monkeypatch, capsys):
    if arguments[0] == "report":
        pytest.importorskip("matplotlib", reason="comes with the eval extra")
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
