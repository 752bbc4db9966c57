"""Survival cases, sections L to N: compilation, evaluation harnesses, selection quality and edge sizes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationMixin

from oasis_cache import OasisCache, OasisConfig
from tests import models, oracle
from tests.integration.survival import (
    CONFIGS,
    EXACT,
    SIMULATED,
    SPARSE,
    assert_close,
    by_rules,
    case,
    dynamic,
    greedy,
    oasis_layers,
    selections,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


# --- L. Compilation -------------------------------------------------------------------------------------------------------------


@case(118)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_a_compiled_model_decodes_right(config):
    """`torch.compile(model)` and 40 tokens: it ends, the tokens are right, and compilations do not grow with the cache."""
    model = copy.deepcopy(models.build("llama", "sdpa"))
    ids = models.prompt(60)
    expected = greedy(models.build("llama", "sdpa"), ids, OasisCache(config), 40)
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph.forward

    torch._dynamo.reset()
    try:
        model.forward = torch.compile(model.forward, backend=backend, dynamic=None)
        cache = OasisCache(config)
        out = greedy(model, ids, cache, 12)
        first = len(compilations)
        seen = torch.ones_like(out)  # without it generate takes a generated token 0 for padding
        out = greedy(model, out, cache, 28, attention_mask=seen)
    finally:
        torch._dynamo.reset()
    assert torch.equal(out, expected)
    assert len(compilations) <= 2 * first


@case(118)
def test_a_compile_config_is_ignored(model):
    """generate compiles only with caches that say they can."""
    ids = models.prompt(60)
    out = greedy(model, ids, OasisCache(SPARSE), 8, compile_config=CompileConfig(backend="eager"))
    assert torch.equal(out, greedy(model, ids, OasisCache(SPARSE), 8))


@case(119)
@CONFIGS
@pytest.mark.parametrize("name", ["llama-deep", "gemma3-deep", "qwen3-next-deep"])
def test_no_path_of_static_caches_is_taken(name, config, monkeypatch):
    model = models.build(name)
    asked: list[bool] = []
    criteria = GenerationMixin._valid_auto_compile_criteria
    monkeypatch.setattr(
        GenerationMixin,
        "_valid_auto_compile_criteria",
        lambda self, *args, **kwargs: asked.append(criteria(self, *args, **kwargs)) or asked[-1],
    )
    cache = OasisCache(config, model_config=model.config)
    assert not cache.is_compileable and not any(layer.is_compileable for layer in oasis_layers(cache))
    greedy(model, models.prompt(60), cache, 4)
    assert not any(asked)
    assert not cache.is_compileable and not any(layer.is_compileable for layer in oasis_layers(cache))


# --- M. Evaluation harnesses ------------------------------------------------------------------------------------------------------


def ask(model: Any, ids: torch.Tensor, generation_kwargs: dict[str, Any]) -> torch.Tensor:
    """A harness's request: it copies the arguments that the user gave once, and runs them."""
    arguments = copy.deepcopy(generation_kwargs)
    arguments = {name: value() if name == "make_cache" else value for name, value in arguments.items()}
    if "make_cache" in arguments:
        arguments[models.CACHE_ARGUMENT] = arguments.pop("make_cache")
    return model.generate(ids, max_new_tokens=10, pad_token_id=models.PADDING, **arguments)


@case(120)
@CONFIGS
@pytest.mark.parametrize("way", ["instance", "factory"])
def test_requests_do_not_see_each_other(model, config, way):
    """A deep copy of an unused cache, or a factory: two prompts answered as in runs of their own."""
    cache = OasisCache(config)
    given: dict[str, Any] = {"do_sample": False}
    given |= {models.CACHE_ARGUMENT: cache} if way == "instance" else {"make_cache": lambda: OasisCache(config)}
    for seed, length in ((1, 60), (2, 75), (3, 30)):
        ids = models.prompt(length, seed=seed)
        assert torch.equal(ask(model, ids, given), greedy(model, ids, OasisCache(config), 10))
    assert cache.get_seq_length() == 0 and len(cache) == 0


@case(120)
def test_one_cache_for_all_requests_is_an_error_or_a_reset(model):
    """An instance that is not copied holds request 1: request 2 is refused, not answered from it."""
    cache = OasisCache(SPARSE)
    greedy(model, models.prompt(75, seed=1), cache, 10)
    second = models.prompt(60, seed=2)
    with pytest.raises(ValueError, match=r"no new tokens are left of the 60 given.*reset\(\)"):
        greedy(model, second, cache, 10)
    cache.reset()
    assert torch.equal(greedy(model, second, cache, 10), greedy(model, second, OasisCache(SPARSE), 10))


@case(121)
@CONFIGS
def test_samples_of_one_request_are_different(model, config):
    ids = models.prompt(60)
    torch.manual_seed(0)
    caches = [OasisCache(config) for _ in range(3)]
    samples = [
        model.generate(ids, **{models.CACHE_ARGUMENT: cache}, do_sample=True, max_new_tokens=10, pad_token_id=0)
        for cache in caches
    ]
    assert len({tuple(sample[0].tolist()) for sample in samples}) == 3
    torch.manual_seed(0)
    prefix = OasisCache(config)
    models.forward(model, ids[:, :-1], prefix)
    copies = [copy.deepcopy(prefix) for _ in range(3)]
    again = [
        model.generate(ids, **{models.CACHE_ARGUMENT: cache}, do_sample=True, max_new_tokens=10, pad_token_id=0)
        for cache in copies
    ]
    assert len({tuple(sample[0].tolist()) for sample in again}) == 3
    assert len({id(layer) for cache in copies for layer in cache.layers}) == 12


@case(122)
@pytest.mark.parametrize("config", [SPARSE, SIMULATED], ids=["sparse", "simulated"])
def test_a_harness_that_probes_for_memory(config):
    """Three batch sizes fail in the middle of the prefill, the fourth works: nothing of the failures stays."""
    model = models.build("llama-deep", "sdpa")
    cache = OasisCache(config, model_config=model.config)
    memory = cache.runtime.memory
    failing = [3]

    def fail(*_: Any) -> None:
        if failing[0]:
            failing[0] -= 1
            raise torch.OutOfMemoryError("out of memory (test)")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    try:
        for batch in (64, 32, 16, 8):
            ids = models.prompt(60, batch)
            try:
                out = greedy(model, ids, cache, 4)
            except torch.OutOfMemoryError:
                assert memory.reserved_bytes > 0
                cache.reset()
                assert memory.reserved_bytes == 0 and cache.get_seq_length() == 0
    finally:
        handle.remove()
    assert out.shape == (8, 64)
    assert torch.equal(out, greedy(model, ids, OasisCache(SPARSE), 4))
    for layer in cache.layers:
        layer.check_integrity()


@case(124)
@CONFIGS
def test_scores_do_not_depend_on_the_batch_size(model, config):
    """Eight prompts in batches of 1, 4 and 8, left-padded: the same tokens and the same selected blocks."""
    config = OasisConfig(**{**config.__dict__, "trace": True})
    ids, mask = models.left_padded(64, (0, 8, 0, 16, 8, 0, 24, 8))  # whole blocks: padding shifts the grid of blocks
    answers: dict[int, torch.Tensor] = {}
    chosen: dict[int, list[Any]] = {}
    for batch in (1, 4, 8):
        parts, chosen[batch] = [], []
        for start in range(0, 8, batch):
            rows = slice(start, start + batch)
            cache = OasisCache(config)
            parts.append(greedy(model, ids[rows], cache, 10, attention_mask=mask[rows]))
            chosen[batch] += [[[step[2][row] for step in layer] for layer in selections(cache)] for row in range(batch)]
        answers[batch] = torch.cat(parts)
    assert torch.equal(answers[1], answers[4]) and torch.equal(answers[1], answers[8])
    assert chosen[1] == chosen[4] == chosen[8]


@case(125)
def test_reported_numbers_come_with_their_control():
    """Tables of numbers found name the dense score, the budget and a control that retrieves nothing; README's says against what
    points were lost, at which budget, and has the control too."""
    root = Path(__file__).parents[2]
    needles = (
        (root / "docs" / "accuracy.md").read_text().split("<!-- needles:begin -->")[1].split("<!-- needles:end -->")[0]
    )
    lines = needles.splitlines()
    table = [line for line in lines if line.startswith("|") and "tokens" not in line and "---" not in line]
    dense = [line for line in table if line.startswith("| DynamicCache")]
    assert dense and all(cell.strip() == "5/5" for line in dense for cell in line.split("|")[4:-1])
    assert any("DynamicCache | all" in line for line in lines)
    assert any("at most" in line for line in lines if line.startswith("| OasisCache"))
    assert any("sink + recent tokens only" in line for line in lines)
    readme = (root / "README.md").read_text().split("<!-- accuracy:begin -->")[1].split("<!-- accuracy:end -->")[0]
    assert "against the dense cache at a budget of 1/8" in readme and "tasks that the dense model can do" in readme
    assert "\n| StreamingLLM | " in readme and "\n| OasisCache | " in readme


@case(127)
def test_errors_do_not_pile_up(model):
    """400 tokens on a quarter of the context: the distance to the dense model's distribution stays of one size."""
    ids = models.prompt(500, seed=4)
    config = OasisConfig(budget=64, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=4)
    cache, complete = OasisCache(config), dynamic(model)
    divergence: list[float] = []
    for each in (cache, complete):
        models.forward(model, ids[:, :100], each)
    for start in range(100, 500):
        step = ids[:, start : start + 1]
        ours, dense = (models.forward(model, step, each)[0, -1].log_softmax(-1) for each in (cache, complete))
        divergence.append((dense.exp() * (dense - ours)).sum().item())
    fifties = torch.tensor(divergence).view(8, 50).mean(1)
    assert cache.stats().sparse_steps == 400 and cache.stats().tokens_read_max == 64
    assert (fifties > 0).all() and torch.isfinite(fifties).all()
    # what a step misses is missed anew: the same sequence with a dense prefill up to any point is no nearer afterwards
    refreshed = OasisCache(config)
    models.forward(model, ids[:, :450], refreshed)
    again = []
    complete = dynamic(model)
    models.forward(model, ids[:, :450], complete)
    for start in range(450, 500):
        step = ids[:, start : start + 1]
        ours, dense = (models.forward(model, step, each)[0, -1].log_softmax(-1) for each in (refreshed, complete))
        again.append((dense.exp() * (dense - ours)).sum().item())
    assert fifties[-1] < 3 * torch.tensor(again).mean() + 0.5


# --- N. Selection quality and edge sizes -----------------------------------------------------------------------------------------


@case(128)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("budget", [1024, 40, 144])
def test_more_blocks_asked_for_than_there_are(model, tokens, budget):
    config = OasisConfig(budget=budget, block_size=8, recent_blocks=1, sparse_rows=4, dense_below=budget)
    ids = models.prompt(tokens)
    assert torch.equal(greedy(model, ids, OasisCache(config), 10), greedy(model, ids, dynamic(model), 10))


@case(129)
@pytest.mark.parametrize("index", ["int2", "minmax", "recency", "exact"])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 2, 60])
def test_the_first_tokens_are_always_read(model, index, beyond):
    """At the edge of the budget and far behind it: block 0 is read whether it scores or not."""
    config = OasisConfig(**{**SPARSE.__dict__, "index": index, "trace": True})
    cache, complete = OasisCache(config), DynamicCache()
    truth = models.build("llama-deep", oracle.NAME)
    ids = models.prompt(40 + beyond + 1)
    for part in (ids[:, :-1], ids[:, -1:]):
        out = models.forward(model, part, cache)
        with oracle.rules(config):
            expected = models.forward(truth, part, complete)
        assert_close(out, expected, 2e-5)
    steps = [step for layer in oasis_layers(cache) for step in layer.trace]
    assert len(steps) == (4 if beyond >= 0 else 0)
    for step in steps:
        assert (step.selected == 0).any(-1).all()


@case(129)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_no_cliff_at_the_budget(model, beyond):
    """A strong bias to the first token, planted: the output just past the edge of the budget is still the dense one."""
    cache = OasisCache(SPARSE)
    keys, values = 0.1 * torch.randn(1, 2, 40 + beyond, 16), torch.randn(1, 2, 40 + beyond, 16)
    keys[:, :, 0] = 3.0
    new = 0.1 * torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)
    cache.update(keys, values, 0)
    got = cache.update(*new, 0)
    query = torch.ones(1, 4, 1, 16)
    whole = [torch.cat(pair, 2) for pair in zip((keys, values), new, strict=True)]
    expected = oracle.attention(query, *whole, None, None, 0.25)
    layer = cache.layers[0]
    if layer.phase == "dense":
        assert torch.equal(got[0], whole[0])
    else:
        assert_close(layer.attend(query, None, 0.25, None, None, None, True), expected, 0.01)
    assert layer.phase == ("dense" if beyond < 0 else "sparse")


@case(130)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [EXACT, SPARSE, SIMULATED], ids=["exact", "sparse", "simulated"])
def test_rows_that_see_nothing(attention, config):
    """A row whose tokens are all hidden gives finite numbers, and leaves its neighbour as it is."""
    model = models.build("llama-deep", attention)
    ids = models.prompt(66, 2)
    mask = torch.ones(2, 1, 6, 66, dtype=torch.bool).tril(60)
    mask[0] = False
    if attention == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    cache, alone = OasisCache(config), OasisCache(config)
    models.forward(model, ids[:, :60], cache)
    models.forward(model, ids[1:, :60], alone)
    out = model(ids[:, 60:], attention_mask=mask, **{models.CACHE_ARGUMENT: cache}).logits
    expected = model(ids[1:, 60:], attention_mask=mask[1:], **{models.CACHE_ARGUMENT: alone}).logits
    assert torch.isfinite(out).all()
    assert_close(out[1:], expected)


@case(130)
def test_a_selection_that_is_hidden_entirely():
    """Everything but the newest tokens masked away: attention over those, not NaN."""
    cache = OasisCache(SPARSE)
    cache.update(torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8), 0)
    new = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    cache.update(*new, 0)
    mask = torch.zeros(1, 1, 2, 92, dtype=torch.bool)
    mask[0, 0, 0, 90] = mask[0, 0, 1, 90:] = True
    out = cache.layers[0].attend(torch.randn(1, 4, 2, 8), mask, 0.3, None, None, None, True)
    assert_close(out[:, 0], new[1][:, :, 0].repeat_interleave(2, 1))
    assert torch.isfinite(out).all()


@case(130)
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_window_without_tokens(block_size):
    """Without recent blocks, a crop to a block's end leaves no token in the window: a long forward reads the rest, exactly."""
    config = OasisConfig(
        block_size=block_size, budget=16, sink_blocks=1, recent_blocks=0, sparse_rows=1, stream_tokens=8
    )
    model = models.build("llama", "sdpa")
    cache, complete = OasisCache(config), dynamic(model)
    for each in (cache, complete):
        models.forward(model, models.prompt(41), each)
        each.crop(-1)
    assert cache.layers[0].working_set.window_length == 0
    assert_close(*(models.forward(model, models.prompt(5), each) for each in (cache, complete)))


@case(131)
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 64])
def test_any_block_size_and_length(block_size):
    """Blocks of 1 to 64 tokens and contexts of 1 to 70: exact within the budget, by the rules beyond it."""
    model, truth = models.build("llama", "sdpa"), models.build("llama", oracle.NAME)
    exact = OasisConfig(budget=64 * block_size, block_size=block_size)
    small = OasisConfig(budget=3 * block_size, block_size=block_size, recent_blocks=1, sparse_rows=2, stream_tokens=16)
    ids = models.prompt(72)
    for length in range(1, 71, 3):
        for config in (exact, small):
            cache, complete = OasisCache(config), DynamicCache()
            for part in (ids[:, :length], ids[:, length : length + 1], ids[:, length + 1 : length + 2]):
                out = models.forward(model, part, cache)
                with oracle.rules(config):
                    assert_close(out, models.forward(truth, part, complete), 2e-5)


@case(133)
@pytest.mark.parametrize("name", [*models.ARCHITECTURES, *models.FURTHER])
def test_cached_steps_equal_one_forward(name):
    """Prefill, single steps: the logits of every position are those of one forward without a cache."""
    if name in ("phi3-long", "deepseek-v32"):
        pytest.skip("cached steps differ from one forward in transformers itself, with any cache")
    model = models.build(name, "eager" if models.eager_only(name) else None)
    ids = models.prompt(30)
    cache = OasisCache(EXACT, model_config=model.config)
    parts = [models.forward(model, ids[:, :20], cache)]
    parts += [models.forward(model, ids[:, n : n + 1], cache) for n in range(20, 30)]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert_close(torch.cat(parts, 1), whole, 3e-5)


@case(133)
@pytest.mark.parametrize("name", ["llama-deep", "gemma3-deep", "gpt-oss-deep", "qwen3-next-deep", "lfm2"])
def test_sparse_generation_follows_the_rules(name):
    model = models.build(name, "eager" if models.eager_only(name) else None)
    ids = models.prompt(60)
    cache = OasisCache(SIMULATED, model_config=model.config)
    out = models.generate(model, ids, cache, 12)
    expected = by_rules(name, SPARSE, ids, 12)
    assert torch.equal(out.sequences, expected.sequences)
    assert cache.stats().sparse_steps == 11
