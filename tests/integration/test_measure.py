"""`oasis-cache bench` and `eval`, and what all commands have in common: reports, exit statuses, words on what to do next."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from eval.bench import __main__ as bench
from eval.quality import __main__ as quality
from oasis_cache import doctor, measure
from oasis_cache.cli import main
from oasis_cache.packaged import load_model
from oasis_cache.reports import check_report_file, write_report

COMMANDS = ("demo", "generate", "plan", "doctor", "bench", "eval")


def test_bench_lists_its_cases(capsys):
    assert main(["bench", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [case.name for case in bench.CASES]
    assert set(measure.QUICK_CASES.split(",")) < set(names)


def test_bench_passes_its_options_on_and_reports_rows(monkeypatch, capsys):
    """The measuring itself is tested in test_eval.py: here it is the committed rows that a run writes."""
    given: list[str] = []
    recorded = measure.ROOT / "eval" / "bench" / "results" / "ledger.csv"

    def run(arguments: list[str]) -> int:
        given.extend(arguments)
        print("step-1024-float32 OasisCache")
        Path(arguments[arguments.index("--ledger") + 1]).write_bytes(recorded.read_bytes())
        return 0

    monkeypatch.setattr(bench, "main", run)
    assert main(["bench", "--cases", "all", "--rounds", "2", "--model", "./mine", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    names = ",".join(case.name for case in bench.CASES)
    assert given[:3] == ["run", "--model", "./mine"]
    assert given[-4:] == ["--cases", names, "--rounds", "2"]
    assert "step-1024-float32 OasisCache" in err
    rows = json.loads(out)["rows"]
    assert len(rows) == len(recorded.read_text().splitlines()) - 1
    assert all(0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] for row in rows if row["p50_ms"] is not None)
    assert all(isinstance(row["commit"], str) and isinstance(row["torch"], str) for row in rows)


def test_bench_says_when_no_case_fits(monkeypatch, capsys):
    monkeypatch.setattr(bench, "main", lambda arguments: 0)
    assert main(["bench", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out) == {"rows": []}


def test_bench_refuses_in_words(capsys):
    assert main(["bench", "--rounds", "0"]) == 2
    assert "rounds=0 must be at least 1" in capsys.readouterr().err
    assert main(["bench", "--cases", "step-7-float32"]) == 2
    assert "unknown cases: step-7-float32; there are step-1024-float32" in " ".join(capsys.readouterr().err.split())


def test_bench_names_a_model_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(bench, "main", lambda arguments: load_model("./no-such-folder"))
    assert main(["bench", "--model", "./no-such-folder"]) == 2
    assert "model='./no-such-folder' cannot be loaded: there is no such folder" in capsys.readouterr().err


def test_eval_passes_its_options_on_and_shows_the_metrics(monkeypatch, tmp_path, capsys):
    """The suite itself is tested in tests/quality: here it is the committed results that a run leaves in the folder."""
    given: list[str] = []

    def run(arguments: list[str]) -> int:
        given.extend(arguments)
        print("1/1 needle, 1024 tokens: 3 s")
        for file in (measure.ROOT / "eval" / "quality" / "results" / "full").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return 0

    monkeypatch.setattr(quality, "main", run)
    assert main(["eval", "--methods", "oasis", "--out", str(tmp_path), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    expected = ["--suite", "small", "--out", str(tmp_path), "--model", "packaged", "--device", "auto"]
    assert given == ["run", *expected, "--dtype", "float32", "--methods", "oasis"]
    assert report["folder"] == str(tmp_path)
    assert {"averages", "cells"} <= set(report)
    assert "3 s" in err and "| OasisCache |" in err
    assert f"python -m eval.quality report {tmp_path}" in err


@pytest.mark.parametrize("status", [2, 130])
def test_eval_hands_the_status_on(monkeypatch, tmp_path, status):
    monkeypatch.setattr(quality, "main", lambda arguments: status)
    assert main(["eval", "--out", str(tmp_path)]) == status


@pytest.mark.parametrize("command", ["bench", "eval"])
def test_an_installed_package_says_where_the_measurements_are(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    assert main([command]) == 2
    assert "the measurements are part of the repository, in its folder eval/" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  oasis-cache " + command in out
    assert "exit status: 0" in out
    assert "--json" in out


WHERE = {"plan": ["packaged", "--context", "100"], "generate": ["Hello."]}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_that_cannot_be_written_is_refused_at_once(command, capsys):
    assert main([command, *WHERE.get(command, []), "--json", "/proc/nowhere/out.json"]) == 2
    assert "--json='/proc/nowhere/out.json' cannot be written" in capsys.readouterr().err


def test_reports_go_to_files_in_new_folders_and_leave_nothing_before(tmp_path, capsys):
    path = tmp_path / "new" / "report.json"
    check_report_file(str(path))
    assert list(path.parent.iterdir()) == []
    write_report({"tokens": 3}, str(path))
    check_report_file(str(path))
    assert json.loads(path.read_text()) == {"tokens": 3}
    write_report({"tokens": 4}, None)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (
            ModuleNotFoundError("No module named 'rich'", name="rich"),
            2,
            'this command needs pip install -e ".[demo-tools]", in a clone',
        ),
        (
            ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval"),
            2,
            'this command needs pip install -e ".[eval]", in a clone',
        ),
        (MemoryError("too long"), 1, "oasis-cache doctor: too long"),
        (OSError("disk full"), 1, "oasis-cache doctor: disk full"),
        (torch.OutOfMemoryError("tried 2 GiB"), 1, "doctor: the device has not enough memory: tried 2 GiB"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_have_a_status_and_words(error, status, words, monkeypatch, capsys):
    def fail(json_file: str | None) -> int:
        raise error

    monkeypatch.setattr(doctor, "run_doctor", fail)
    assert main(["doctor"]) == status
    assert words in capsys.readouterr().err


def test_a_failure_of_the_code_is_not_put_into_words(monkeypatch):
    def fail(json_file: str | None) -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(doctor, "run_doctor", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        main(["doctor"])


def test_the_measurements_are_found_from_anywhere(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(measure.ROOT))])
    assert measure.tool("eval.quality.suites").SUITES
