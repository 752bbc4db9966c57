"""The examples run, as their docstrings say, and do what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(launcher: list[str], name: str, out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run an example; returns what it printed and its report."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments, "--json", str(out)]
    here = {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **here})
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


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


def test_handoff(tmp_path):
    pytest.importorskip("zmq", reason="of the `handoff` extra, which the `test` extra has")
    arguments = ["--context", "500", "--budget", "256", "--new-tokens", "6"]
    printed, report = run([], "handoff.py", tmp_path / "out.json", *arguments)
    assert report["equal_to_one_process"]
    assert "Tokens equal to those of one process: True" in printed
    assert 0 < report["admitted_bytes"] < report["dense_bytes"]
    assert 0 < report["pages_at_first"] + report["pages_later"] <= report["pages"]


def test_lookahead_batch(tmp_path):
    arguments = ["--context", "600", "--questions", "2", "--budget", "256", "--new-tokens", "16"]
    printed, report = run([], "lookahead_batch.py", tmp_path / "out.json", *arguments)
    assert report["found"] == 2
    assert "2 of 2 numbers found" in printed
    assert report["sparse_steps"] > 0
    assert 0 < report["accepted"] <= report["drafted"]
    assert report["forwards"] < 15  # those of plain decoding
