"""The cache on a CUDA device against transformers' own cache, against itself on the CPU, and over engines."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from oasis_cache import OasisCache
from tests.models import build, forward, generate, prompt, relative_error

pytestmark = pytest.mark.gpu
SPARSE = {"budget": 256, "recent_blocks": 2, "sparse_rows": 8}
PROMPT, TOKENS = 700, 40
ENGINES = ("sync", "threads", "cuda", "auto")


def model_on(device, dtype=torch.float32, attention=None):
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 128}
    return copy.deepcopy(build("llama", attention, **sizes)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_budget_it_equals_dynamic_cache(dtype, device):
    model = model_on(device, dtype)
    ids = prompt(300, batch=2).to(device)
    want = generate(model, ids, DynamicCache(config=model.config), TOKENS)
    with OasisCache(budget=1024) as cache:
        got = generate(model, ids, cache, TOKENS)
        assert cache.stats().sparse_steps == 0
    first = relative_error(got.logits[0].float(), want.logits[0].float())
    assert first <= (1e-5 if dtype == torch.float32 else 2e-2)
    if dtype == torch.float32:
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("index", ["int2", "int1", "minmax", "exact"])
def test_sparse_steps_choose_and_give_what_they_do_on_the_cpu(index, device):
    ids = prompt(PROMPT, batch=2, seed=1)
    later = [prompt(rows, batch=2, seed=2 + place) for place, rows in enumerate([1] * 20 + [4, 8, 1, 1])]
    logits, traces = [], []
    for where in (torch.device("cpu"), device):
        model = model_on(where, attention="eager")  # whose prefill is the same on every device, but for rounding
        with OasisCache(index=index, trace=True, **SPARSE) as cache:
            forward(model, ids.to(where), cache)
            logits.append(torch.cat([forward(model, new.to(where), cache).cpu() for new in later], dim=1))
            traces.append(torch.stack([step.selected for layer in cache.layers for step in layer.trace]))
            assert cache.stats().sparse_steps == len(later)
    assert traces[0].shape == traces[1].shape
    different = (traces[0] != traces[1]).float().mean().item()
    assert different <= 0.01, f"{different:.1%} of the selected blocks differ"  # near ties may come out the other way
    assert relative_error(logits[1], logits[0]) <= 1e-2


@pytest.fixture(scope="module")
def synchronous(device):
    model = model_on(device)
    with OasisCache(engine="sync", lookahead="off", **SPARSE) as cache:
        return model, generate(model, prompt(PROMPT).to(device), cache, TOKENS).sequences


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lookahead", ["off", "previous", "draft", "auto"])
def test_engines_and_lookahead_change_no_token(engine, lookahead, synchronous, device):
    model, want = synchronous
    with OasisCache(engine=engine, lookahead=lookahead, **SPARSE) as cache:
        got = generate(model, prompt(PROMPT).to(device), cache, TOKENS).sequences
        assert cache.stats().sparse_steps >= TOKENS - 1
    assert torch.equal(got, want)


def test_another_current_stream_changes_no_token(synchronous, device):
    model, want = synchronous
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), OasisCache(engine="cuda", **SPARSE) as cache:
        got = generate(model, prompt(PROMPT).to(device), cache, TOKENS).sequences
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_beams_and_crops_on_the_device(device):
    model, ids = model_on(device), prompt(PROMPT, seed=3).to(device)
    sequences = []
    for engine in ("sync", "cuda"):
        with OasisCache(engine=engine, **SPARSE) as cache:
            sequences.append(generate(model, ids, cache, 20, num_beams=3).sequences)
        with OasisCache(engine=engine, **SPARSE) as cache:
            forward(model, ids, cache)
            for rows in (1, 4, 1):
                forward(model, prompt(rows, seed=rows).to(device), cache)
                cache.crop(-rows)
            sequences.append(forward(model, prompt(2, seed=9).to(device), cache))
    assert torch.equal(sequences[0], sequences[2])
    assert torch.equal(sequences[1], sequences[3])
