"""Tensor parallel by transformers' own plan, on two ranks: a cache holds its rank's KV heads, and tokens are those of one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests import models
from tests.integration import ranks

pytestmark = [pytest.mark.contract, pytest.mark.slow]
SIZES = {"vocab_size": 104}  # the ranks share the output layer, too
ARCHITECTURES = ("llama", "qwen3")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What the ranks wrote, by architecture."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ARCHITECTURES:
        models.build(name, **SIZES).save_pretrained(folder / name)
    folders = [str(folder / name) for name in ARCHITECTURES]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*torchrun, ranks.__name__, str(folder), *folders], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    read = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [report[str(folder / name)] for report in read] for name in ARCHITECTURES}


@pytest.mark.parametrize("way", ranks.WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_give_the_tokens_of_one_and_hold_half_each(name, way, reports):
    alone = ranks.run(models.build(name, **SIZES), way)
    assert alone["sparse_steps"] > 0
    for rank in reports[name]:
        got = rank[way]
        assert got["tokens"] == alone["tokens"]
        assert got["kv_heads"] == [heads // 2 for heads in alone["kv_heads"]]
        assert got["host_bytes"] == alone["host_bytes"] // 2 > 0
        assert got["sparse_steps"] == alone["sparse_steps"]
        assert (got["fallback_steps"], got["warnings"]) == (0, [])
