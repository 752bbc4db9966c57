"""`oasis-cache generate` through its command line: the answer, where it goes, and what is refused before a model is loaded."""

from __future__ import annotations

import json

import pytest

from oasis_cache.cli import main
from oasis_cache.haystack import NEEDLE, text
from oasis_cache.packaged import load_model

NUMBER = "7306214"
QUESTION = "What is the special magic number for lantern mentioned in the provided text?"


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A file of 700 tokens with a number in its middle."""
    _, tokenizer = load_model()
    first, second = text(350, tokenizer, start=200), text(350, tokenizer, start=900)
    path = tmp_path_factory.mktemp("generate") / "document.txt"
    path.write_text(f"{first} {NEEDLE.format(key='lantern', number=NUMBER)} {second}", encoding="utf-8")
    return path


def test_answers_about_a_file_sparsely_and_says_so(document, tmp_path, capsys):
    report = tmp_path / "report.json"
    arguments = ("--budget", "256", "--new-tokens", "24", "--json", str(report))
    assert main(["generate", QUESTION, "--file", str(document), *arguments]) == 0
    out, err = capsys.readouterr()
    written = json.loads(report.read_text())
    assert NUMBER in out
    assert out.strip() == written["text"].strip()
    assert "OasisCache: " in err and "budget=256" in err
    assert written["stats"]["sparse_steps"] == written["new_tokens"]
    assert written["stats"]["tokens_read_max"] == 256
    assert 700 < written["prompt_tokens"] == written["stats"]["context_tokens"] + 1 - written["new_tokens"]


def test_json_takes_the_place_of_the_text(capsys):
    assert main(["generate", "Say hello.", "--new-tokens", "4", "--raw", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["new_tokens"] <= 4 and written["text"]
    assert written["stats"]["sparse_steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to answer"),
        (("hello", "--new-tokens", "0"), "--new-tokens=0"),
        (("hello", "--temperature", "-1"), "--temperature=-1.0"),
        (("hello", "--temperature", "1e-320"), "must be 0, or a number of at least 1e-06"),
        (("hello", "--temperature", "inf"), "--temperature=inf"),
        (("hello", "--temperature", "nan"), "--temperature=nan"),
        (("caf\udce9?",), "the prompt is no text in UTF-8"),
        (("hello", "--budget", "20"), "--budget=20"),
        (("hello", "--file", "/nonexistent/file.txt"), "--file='/nonexistent/file.txt' cannot be read as text"),
        (("hello", "--spill", "/nonexistent", "--max-host-memory", "1GiB"), "no spill file can be made in --spill="),
        (("hello", "--spill", "/tmp"), "--spill='/tmp' needs --max-host-memory: how many bytes"),
        (("--json", "Who wrote it?", "--file", "a.txt"), "--json took 'Who wrote it?' for the name of a file"),
        (("hello", "--model", "/nonexistent/model"), "cannot be loaded: there is no such folder. Give a folder"),
        (("hello", "--model", "nobody/no-model"), "or a hub name that can be downloaded"),
        (("hello " * 8200, "--raw"), "exceed the model's 8192 positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refuses_in_words(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(1 << 64), "9" * 40, "x"])
def test_refuses_a_seed_that_is_none(seed, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "hello", "--temperature", "1", "--seed", seed])
    assert f"argument --seed: {seed} must be at least 0 and below 2**64" in capsys.readouterr().err


def test_says_when_host_memory_does_not_suffice(document, capsys):
    arguments = ("--budget", "128", "--max-host-memory", "1MiB", "--new-tokens", "2")
    assert main(["generate", QUESTION, "--file", str(document), *arguments]) == 1
    assert "--max-host-memory=1,048,576 leaves" in capsys.readouterr().err
