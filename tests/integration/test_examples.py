"""The examples run, as their docstrings say, and do what they promise."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oasis_cache import OasisCache
from oasis_cache.haystack import NEEDLE, QUESTION, text
from oasis_cache.packaged import load_model

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(launcher: list[str], name: str, out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run an example in processes of its own; returns what it printed and its report."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments, "--json", str(out)]
    here = {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **here})
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def example(name: str) -> ModuleType:
    """An example as a module, to run it in this process."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))  # as Python does when it runs one: they import what they share from there
    return importlib.import_module(name)


def run_here(name: str, out: Path, capsys: pytest.CaptureFixture, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run an example in this process; returns what it printed and its report."""
    assert example(name).main([*arguments, "--json", str(out)]) == 0
    return capsys.readouterr().out, json.loads(out.read_text())


NUMBER = "7306214"
ASKED = QUESTION.format(key="lantern").strip()


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> Path:
    """A file of 270 tokens with a number in its middle."""
    _, tokenizer = load_model()
    first, second = text(120, tokenizer, start=200), text(120, tokenizer, start=900)
    path = tmp_path_factory.mktemp("examples") / "document.txt"
    path.write_text(f"{first} {NEEDLE.format(key='lantern', number=NUMBER)} {second}", encoding="utf-8")
    return path


def test_tensor_parallel(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    arguments = ["--context", "500", "--budget", "256", "--new-tokens", "10"]
    printed, report = run(torchrun, "tensor_parallel.py", tmp_path / "out.json", *arguments)
    assert report["number"] in report["answer"]
    assert report["number"] in printed
    assert [rank["kv_heads"] for rank in report["ranks"]] == [1, 1, 1]
    assert len({rank["host_bytes"] for rank in report["ranks"]}) == 1
    assert all(rank["sparse_steps"] == 9 for rank in report["ranks"])


def test_accelerate_data_parallel(tmp_path):
    accelerate = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    arguments = ["--context", "500", "--budget", "256", "--questions", "3"]
    printed, report = run(accelerate, "accelerate_data_parallel.py", tmp_path / "out.json", *arguments)
    assert [answer["question"] for answer in report["answers"]] == [0, 1, 2]
    assert {answer["process"] for answer in report["answers"]} == {0, 1}
    assert report["found"] == 3
    assert "3 of 3 numbers found by 2 processes" in printed


def test_handoff(tmp_path, capsys):
    """The decode process is this one; it starts the prefill process."""
    pytest.importorskip("zmq", reason="of the `handoff` extra, which the `test` extra has")
    arguments = ["--context", "500", "--budget", "256", "--new-tokens", "6"]
    printed, report = run_here("handoff", tmp_path / "out.json", capsys, *arguments)
    assert report["equal_to_one_process"]
    assert "Tokens equal to those of one process: True" in printed
    assert 0 < report["admitted_bytes"] < report["dense_bytes"]
    assert 0 < report["pages_at_first"] + report["pages_later"] <= report["pages"]


def test_lookahead_batch(tmp_path, capsys):
    arguments = ["--context", "600", "--questions", "2", "--budget", "256", "--new-tokens", "16"]
    printed, report = run_here("lookahead_batch", tmp_path / "out.json", capsys, *arguments)
    assert report["found"] == 2
    assert "2 of 2 numbers found" in printed
    assert report["sparse_steps"] > 0
    assert 0 < report["accepted"] <= report["drafted"]
    assert report["forwards"] < 15  # those of plain decoding


def test_long_document_qa_reads_a_file_once(document, tmp_path, capsys):
    main = example("long_document_qa").main
    arguments = [str(document), ASKED, "--budget", "128", "--new-tokens", "20", "--keep", str(tmp_path / "kept")]
    printed = []
    for _ in range(2):
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    read, loaded = printed
    tokens = int(re.search(r"^Read ([0-9,]+) tokens in", read)[1].replace(",", ""))
    assert 250 < tokens < 330
    assert loaded.startswith(f"Loaded {tokens} tokens from {tmp_path / 'kept'}")
    answers = [out.split("\n\n")[1] for out in printed]
    assert NUMBER in answers[0]
    assert answers[0] == answers[1]
    assert "1 prefill" in read and "prefill" not in loaded
    assert re.search(r"\d+ sparse\n", loaded)


def test_long_document_qa_says_what_to_do_about_a_long_file(tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("word " * 8200)
    with pytest.raises(SystemExit) as ended:
        example("long_document_qa").main([str(path), "What?"])
    assert ended.value.code == 2
    assert "more than the model's 8,192 positions: give a part of the text" in capsys.readouterr().err


LONG = "word " * 8200


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("chat", ["--say", LONG], "a prompt of 8,2"),
        (
            "chat",
            ["--file", "/nonexistent.txt"],
            "/nonexistent.txt cannot be read as a text in UTF-8: [Errno 2] No such file",
        ),
        ("chat", ["--say", "hi", "--budget", "100"], "budget=100 must be a multiple"),
        ("chat", ["--say", "hi", "--new-tokens", "0"], "argument --new-tokens: 0 must be at least 1"),
        ("shared_prefix", ["--context", "9000"], "is more than the model's 8,192 positions: give a part"),
        ("shared_prefix", ["--file", "/nonexistent.txt", "--ask", "?"], "/nonexistent.txt cannot be read as a text"),
        ("shared_prefix", ["--device", "nowhere"], "device='nowhere' cannot be used here"),
        ("long_document_qa", ["/nonexistent.txt", "?"], "/nonexistent.txt cannot be read as a text"),
        ("long_document_qa", [str(EXAMPLES), "?"], "cannot be read as a text in UTF-8: [Errno 21] Is a directory"),
        ("chat", ["--model", "./no-such-folder"], "model='./no-such-folder' cannot be loaded: there is no such folder"),
    ],
)
def test_wrong_options_end_in_a_line(name, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        example(name).main(arguments)
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last


def test_a_chat_that_has_grown_too_long_keeps_what_was_said(capsys):
    """A turn that the model has no positions for is refused before it becomes a part of the conversation."""
    chat, (model, tokenizer) = example("chat"), load_model()
    with OasisCache(model_config=model.config) as cache:
        talk = chat.Chat(model, tokenizer, cache)
        talk.say("Name a river.", 4)
        before = list(talk.messages)
        with pytest.raises(ValueError, match="positions"):
            talk.say(LONG, 4)
        assert talk.messages == before
        talk.say("Thank you.", 4)
    assert "tokens kept" in capsys.readouterr().out


def test_chat_feeds_what_is_new(document, capsys):
    turns = ["--say", ASKED, "--say", "Thank you."]
    assert example("chat").main(["--file", str(document), *turns, "--budget", "128", "--new-tokens", "20"]) == 0
    out = capsys.readouterr().out
    (kept, fed), (kept_then, fed_then) = (
        (int(kept), int(fed)) for kept, fed in re.findall(r"\[(\d+) tokens kept, (\d+) fed\]", out)
    )
    assert NUMBER in out.split("tokens kept")[1]
    assert kept == 0 and kept_then > fed > 270
    assert fed_then < 30
    assert "1 prefill" in out and " sparse" in out


def test_chat_goes_back_to_what_is_common(capsys):
    """An earlier answer that was written otherwise: the cache holds what it would hold had it been so from the beginning."""
    chat, (model, tokenizer) = example("chat"), load_model()
    edited = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The Nile."}]
    with OasisCache(model_config=model.config) as cache, OasisCache(model_config=model.config) as other:
        first, fresh = chat.Chat(model, tokenizer, cache), chat.Chat(model, tokenizer, other)
        assert first.say("Name a river.", 8) != "The Nile."
        first.messages, fresh.messages = list(edited), list(edited)
        assert first.say("Where is it?", 8) == fresh.say("Where is it?", 8)
        assert first.held == fresh.held
    kept = [int(kept) for kept in re.findall(r"(\d+) tokens kept", capsys.readouterr().out)]
    assert kept[0] == kept[2] == 0 < kept[1]


def test_shared_prefix_does_not_double_memory(capsys):
    assert example("shared_prefix").main(["--context", "300", "--budget", "192", "--new-tokens", "22"]) == 0
    out = capsys.readouterr().out
    for number in ("4815162", "2718281", "1618033"):
        assert number in out
    alone, together, more = (float(mib) for mib in re.findall(r"([0-9.]+) MiB(?: of host memory| more)", out))
    assert alone < together < 2 * alone  # of four caches
    assert 3 * more == pytest.approx(together - alone, abs=0.5)


def test_assistant_model(capsys):
    arguments = ["--context", "300", "--budget", "128", "--new-tokens", "10", "--layers", "20"]
    assert example("assistant_model").main(arguments) == 0
    out = capsys.readouterr().out
    number = re.search(r"The hidden number is (\d+)", out)[1]
    answers = re.findall(r"^(?:alone|assisted): (.*)", out, re.MULTILINE)
    assert len(answers) == 2 and all(number in answer for answer in answers)
    alone, assisted = (int(count) for count in re.findall(r"in (\d+) forwards", out))
    assert assisted < alone
    assert "The tokens are the same." in out
