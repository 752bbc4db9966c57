"""The measurement that feeds the dense cache's tokens to sparse ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from eval.quality import forced, runner
from eval.quality.forced import Nearness, Variant, compare, dense_steps, follow, table
from eval.quality.runner import extended, read_context
from eval.quality.samples import Sample, Turn
from oasis_cache.demo import prefill
from oasis_cache.packaged import load_model
from tests import models

LENGTH = 1024


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = models.build("llama"), load_model(None)[1]
    ids = tuple(models.prompt(LENGTH)[0].tolist())
    turns = tuple(Turn(tuple(ids[at : at + 5]), ("never said",), 3) for at in (100, 300))
    asked = Sample("asked", LENGTH, "a", "text", ids, turns, "question")
    prose = Sample("prose", LENGTH, "p", "text", ids, target_ids=ids[:6])
    return model, tokenizer, [asked, prose]


def test_the_whole_budget_is_the_dense_cache_but_for_rounding(parts):
    everything, few = Variant("default", 15 / 16, {}), Variant("default", 1 / 8, {})
    rows = {(row.task, row.share): row for row in compare(*parts, [everything, few])}
    for task, tokens in (("asked", 6), ("prose", 6)):
        near, far = rows[task, everything.share], rows[task, few.share]
        assert near.tokens == far.tokens == tokens
        assert abs(near.divergence) < 0.2 * far.divergence
        assert far.tokens_read_max == LENGTH // 8
    assert not rows["asked", few.share].answers, "answers that the dense cache gets wrong do not count"


def test_every_variant_is_fed_the_dense_answer(parts):
    model, tokenizer, (asked, _) = parts
    snapshot = extended(model, read_context(model, asked.context_ids), asked)
    steps = dense_steps(model, tokenizer, asked, snapshot)
    assert [len(step.fed) for step in steps] == [5, 1, 1, 6, 1, 1], "the second question follows the last token said"
    for before, after in pairwise(steps):
        assert after.fed[0] == int(before.log_probs.argmax())
    right = [forced.Step(step.fed, step.turn, step.turn == 0, step.log_probs) for step in steps]
    sums = Nearness("default", 1 / 8, "asked")
    follow(model, asked, snapshot, right, Variant("default", 1 / 8, {}), sums)
    assert sums.answers == 1
    turned = [forced.Step(s.fed, s.turn, True, s.log_probs.flip(0)) for s in steps]
    wrong = Nearness("default", 1 / 8, "asked")
    follow(model, asked, snapshot, turned, Variant("default", 1 / 8, {}), wrong)
    assert (wrong.answers, wrong.kept, wrong.same) == (2, 0, 0)


def test_a_question_read_exactly_is_fed_once(parts):
    model, tokenizer, (asked, _) = parts
    exactly = replace(asked, way="answer")
    snapshot = extended(model, read_context(model, asked.context_ids), exactly)
    steps = dense_steps(model, tokenizer, exactly, snapshot)
    assert [len(step.fed) for step in steps] == [1, 1, 1, 6, 1, 1]
    assert steps[0].fed == asked.turns[0].question_ids[-1:]
    whole = extended(model, read_context(model, asked.context_ids), asked)
    torch.testing.assert_close(steps[0].log_probs, dense_steps(model, tokenizer, asked, whole)[0].log_probs)


def test_a_model_that_reads_for_itself_in_several_forwards(monkeypatch):
    model, ids = models.build("gemma3"), tuple(models.prompt(600)[0].tolist())
    monkeypatch.setattr(runner, "prefill", partial(prefill, chunk_tokens=200))
    sample = Sample("prose", 600, "p", "text", ids, target_ids=ids[:4])
    (row,) = compare(model, load_model(None)[1], [sample], [Variant("default", 1 / 4, {})])
    assert row.tokens == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "0"], "--contexts=0 must be at least 1"),
        (["--length", "300"], "--length=300 must be from 768 to 8192"),
        (["--length", "9000"], "--length=9000 must be from 768 to 8192"),
    ],
)
def test_refuses_in_words(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        forced.main([*options, "--out", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err


def test_steps_that_read_everything_are_refused(parts):
    model, _, (_, prose) = parts
    snapshot = read_context(model, prose.context_ids)
    steps = [forced.Step(tuple(prose.target_ids[:2]) * 20, 0, True, torch.zeros(1))]
    with pytest.raises(RuntimeError, match="0 of 1 steps"):
        follow(model, prose, snapshot, steps, Variant("default", 1 / 8, {}), Nearness("default", 1 / 8, "prose"))


def test_a_table_has_a_line_per_variant(parts):
    rows = compare(*parts, [Variant("default", 1 / 8, {}), Variant("block_size=8", 1 / 8, {"block_size": 8})])
    lines = table({"rows": [vars(row) for row in rows]}).splitlines()
    assert lines[0] == "| | budget | asked: KL | asked: same token | prose: KL | prose: same token |"
    assert len(lines) == 4 and lines[3].startswith("| `block_size=8` | 1/8 | ")
