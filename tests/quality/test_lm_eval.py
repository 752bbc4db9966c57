"""The lm-eval model: a fresh cache per batch, equal answers however it is run, and both ways to score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oasis_cache import OasisCache
from tests import models
from tests.tokens import by_character

lm_eval = pytest.importorskip("lm_eval", reason="comes with the eval extra")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from eval.quality import ruler
from eval.quality.lm_eval_model import OasisLM
from eval.quality.lm_eval_model import main as lm_eval_command

OPTIONS = {"block_size": 8, "recent_blocks": 2, "sparse_rows": 4}
SPARSE = {"budget": 48, **OPTIONS}
COMPLETE = {"budget": 512, **OPTIONS}
DOCUMENTS = [
    f"{number} " + "The quick brown fox jumps over the lazy dog. " * 4 + word
    for number, word in enumerate(("ab", "cd", "ef"))
]
NEW_TOKENS = 12


def make(**options) -> OasisLM:
    return OasisLM(models.build("llama-deep"), tokenizer=by_character(), **options)


def generation_task(arguments: dict | None = None) -> dict:
    def documents(**_):
        import datasets

        return {"test": datasets.Dataset.from_list([{"text": text} for text in DOCUMENTS])}

    return {
        "task": "tiny",
        "custom_dataset": documents,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "-",
        "generation_kwargs": {"max_gen_toks": NEW_TOKENS, "until": ["\x00"], "do_sample": False, **(arguments or {})},
        "metric_list": [{"metric": "exact_match"}],
    }


def evaluate(lm: HFLM) -> tuple[list[str], dict]:
    manager = TaskManager(include_defaults=False)  # thousands of files that nothing here needs
    results = lm_eval.simple_evaluate(model=lm, tasks=[generation_task()], task_manager=manager, bootstrap_iters=0)
    samples = sorted(results["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples], results["config"]


def alone(text: str) -> str:
    """The answer of `generate` with a cache of its own."""
    tokenizer, model = by_character(), models.build("llama-deep")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=OasisCache(**SPARSE),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def requests_of(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, idx) for idx, pair in enumerate(pairs)]


def test_answers_are_those_of_a_cache_of_their_own_and_repeat():
    lm = make(**SPARSE)
    answers, config = evaluate(lm)
    assert answers == [alone(text) for text in DOCUMENTS]
    assert len(set(answers)) == len(answers)  # else nothing could leak from one request to the next
    stats = config["oasis_stats"]
    assert stats["caches"] == len(DOCUMENTS) and stats["dense_steps"] == stats["fallback_steps"] == 0
    assert stats["sparse_steps"] == len(DOCUMENTS) * (NEW_TOKENS - 1) and stats["tokens_read_max"] == 48
    assert config["oasis_config"]["budget"] == 48 and config["oasis_scoring"] == "prefill"
    json.dumps(config["oasis_stats"])
    again, _ = evaluate(lm)
    assert again == answers


@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_batches_of_equal_lengths_give_the_same_answers(batch_size):
    lm = make(**SPARSE, batch_size=batch_size, max_batch_size=4)
    answers, config = evaluate(lm)
    assert answers == [alone(text) for text in DOCUMENTS]
    assert config["oasis_stats"]["caches"] == 1
    assert config["oasis_stats"]["sparse_steps"] == NEW_TOKENS - 1


def test_automatic_batches_are_as_large_as_memory_allows(monkeypatch):
    lm = make(batch_size="auto", max_batch_size=64)
    available = type("Memory", (), {"available": 0})()
    monkeypatch.setattr("psutil.virtual_memory", lambda: available)
    assert lm._detect_batch_size() == 1
    row_bytes = (
        2 * (4 + 4) * (2 * 2 * 4 * 2 * 16 * 4 + 8 * models.VOCABULARY)
    )  # of requests of 8 tokens, half of what is free
    available.available = 6 * row_bytes
    assert lm._detect_batch_size([(None, [1] * 4, [1] * 4)]) == 4
    available.available = 10**15
    assert lm._detect_batch_size() == 64


def test_a_cache_in_the_generation_arguments_is_refused():
    task = generation_task({"past_key_values": OasisCache(**SPARSE)})
    with pytest.raises(Exception, match=r"cannot be pickled|must not share a cache"):
        manager = TaskManager(include_defaults=False)
        lm_eval.simple_evaluate(model=make(**SPARSE), tasks=[task], task_manager=manager, bootstrap_iters=0)
    with pytest.raises(ValueError, match="requests must not share a cache"):
        make()._model_generate(torch.ones(1, 4, dtype=torch.int64), 8, [], past_key_values=OasisCache())


PAIRS = [(DOCUMENTS[0], " and more"), (DOCUMENTS[1], "x"), ("ab", "cde"), ("", "abc")]


@pytest.mark.parametrize("scoring", ["prefill", "decode"])
def test_scores_within_the_budget_are_those_of_the_dense_cache(scoring):
    ours = make(**COMPLETE, scoring=scoring).loglikelihood(requests_of(PAIRS), disable_tqdm=True)
    dense = HFLM(models.build("llama-deep"), tokenizer=by_character()).loglikelihood(
        requests_of(PAIRS), disable_tqdm=True
    )
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in dense]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in dense], abs=1e-3)


def test_scoring_by_decoding_is_sparse():
    exact = make(**SPARSE).loglikelihood(requests_of(PAIRS), disable_tqdm=True)
    lm = make(**SPARSE, scoring="decode")
    sparse = lm.loglikelihood(requests_of(PAIRS), disable_tqdm=True)
    assert lm.oasis_stats["sparse_steps"] == len(" and more") + len("x")
    assert abs(sparse[0][0] - exact[0][0]) > 1e-3  # long: other attention
    assert sparse[2][0] == pytest.approx(exact[2][0], abs=1e-3)  # shorter than the budget
    assert make(**SPARSE, scoring="decode").loglikelihood(requests_of(PAIRS), disable_tqdm=True) == sparse


def test_a_greedy_continuation_is_recognised():
    lm = make(**SPARSE, scoring="decode")
    continuation = alone(DOCUMENTS[0])[:4]
    (_, greedy), (_, other) = lm.loglikelihood(
        requests_of([(DOCUMENTS[0], continuation), (DOCUMENTS[0], continuation[:-1] + "~")]), disable_tqdm=True
    )
    assert greedy and not other


def test_perplexity_by_decoding():
    request = [Instance("loglikelihood_rolling", {}, (DOCUMENTS[0],), 0)]
    dense = HFLM(models.build("llama-deep"), tokenizer=by_character()).loglikelihood_rolling(request, disable_tqdm=True)
    within = make(**COMPLETE, scoring="decode").loglikelihood_rolling(request, disable_tqdm=True)
    assert within == pytest.approx(dense, abs=2e-3)
    lm = make(**SPARSE, scoring="decode")
    assert lm.loglikelihood_rolling(request, disable_tqdm=True) != pytest.approx(dense, abs=2e-3)
    assert lm.oasis_stats["sparse_steps"] == len(DOCUMENTS[0]) - lm.oasis_config.dense_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "guess"}, "scoring='guess' must be one of 'prefill', 'decode'"),
        ({"index": "int7"}, "index='int7' must be one of"),
        ({"budget": 100}, "budget=100 must be a multiple"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.slow
def test_the_command_runs_ruler_offline(tmp_path, monkeypatch):
    of_ruler = {"include_path": Path(lm_eval.tasks.__file__).parent / "ruler", "include_defaults": False}
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **options: TaskManager(**{**options, **of_ruler}))
    folder = tmp_path / "model"
    models.build("llama-deep").save_pretrained(folder)
    by_character(chat=False).save_pretrained(folder)
    arguments = f"pretrained={folder},budget=96,dtype=float32,max_fetch=None"
    command = [
        "--model",
        "oasis",
        "--model_args",
        arguments,
        "--tasks",
        "niah_single_2",
        "--limit",
        "2",
        "--device",
        "cpu",
    ]
    command += ["--metadata", '{"max_seq_lengths":[4000]}', "--output_path", str(tmp_path / "out"), "--log_samples"]
    assert lm_eval_command(command) == 0
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert 0 <= results["results"]["niah_single_2"]["4000,none"] <= 1
    assert results["config"]["oasis_config"]["max_fetch"] is None
    assert results["config"]["oasis_stats"]["sparse_steps"] > 0
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    prompt = json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"]
    assert "special magic number" in prompt and "God created the heaven" in prompt


@pytest.mark.slow
def test_ruler_documents_are_the_same_every_time_and_lm_eval_keeps_its_own(tmp_path):
    from lm_eval.tasks.ruler import prepare_niah

    before = prepare_niah.get_haystack, prepare_niah.generate_samples
    by_character(chat=False).save_pretrained(tmp_path)
    drawn = []
    for samples in (3, 3, 2):
        tasks = ruler.load_tasks(("niah_single_2", "niah_multivalue"), str(tmp_path), 4000, samples)
        drawn.append([[doc["input"] for doc in task.test_docs()] for task in tasks.values()])
    assert drawn[0] == drawn[1]
    assert [[len(docs) for docs in each] for each in drawn] == [[3, 3], [3, 3], [2, 2]]
    assert "God created the heaven" in drawn[0][0][0]
    assert (prepare_niah.get_haystack, prepare_niah.generate_samples) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run on")
def test_the_device_that_lm_eval_names_by_default_need_not_be_there():
    assert OasisLM(device="cuda:0", **SPARSE).device.type == "cpu"
