"""How the cache meets transformers: nothing changes before it is made, all attention functions are right, others pass untouched."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import oasis_cache
from oasis_cache import OasisCache, OasisConfig, OasisWarning
from oasis_cache.attention import KVView, install
from tests import models, oracle

pytestmark = pytest.mark.contract

SMALL = OasisConfig(budget=48, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)
LAYERS = 2


def run_python(code: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, with the repository on its path."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def sparse_cache(model, tokens: int = 90) -> OasisCache:
    """A cache with so many tokens that a short forward is sparse."""
    cache = OasisCache(SMALL, model_config=model.config)
    models.forward(model, models.prompt(tokens), cache)
    return cache


@pytest.fixture
def custom():
    """Registers an attention function under a name for one test, with sdpa's mask."""
    registered = []

    def register(name: str, function) -> str:
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
        registered.append(name)
        return name

    yield register
    for name in registered:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


# --- Installing and uninstalling ----------------------------------------------------------------------------------------------


def test_import_changes_nothing_and_the_first_cache_installs():
    result = run_python(
        """
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        def state():
            return (
                AttentionInterface.get_interface,
                dict(AttentionInterface._global_mapping),
                dict(AttentionMaskInterface._global_mapping),
                dict(DYNAMIC_LAYER_TYPE_MAPPING),
                dict(vars(transformers.DynamicCache)),
                dict(vars(transformers.PreTrainedModel)),
                dict(vars(transformers.GenerationMixin)),
            )

        before = state()
        import sys
        import oasis_cache
        import oasis_cache.layer, oasis_cache.attention
        assert state() == before, "importing changed transformers"
        assert not {"matplotlib", "lm_eval", "datasets", "pandas"} & set(sys.modules)
        oasis_cache.OasisConfig(budget=512)
        assert state() == before, "a config changed transformers"
        cache = oasis_cache.OasisCache()
        assert AttentionInterface.get_interface is not before[0], "the first cache did not install"
        assert state()[1:] == before[1:], "more than get_interface changed"
        installed = AttentionInterface.get_interface
        oasis_cache.OasisCache()
        assert AttentionInterface.get_interface is installed, "the second cache installed again"
        oasis_cache.uninstall()
        assert state() == before, "uninstall() did not restore transformers"
        oasis_cache.uninstall()
        assert state() == before, "a second uninstall() broke something"
        oasis_cache.OasisCache()
        assert AttentionInterface.get_interface is not before[0], "a cache after uninstall() did not install"
        """
    )
    assert result.returncode == 0, result.stderr


def test_caches_made_before_uninstall_work_on_densely():
    model = models.build("llama", "sdpa")
    cache, dense = sparse_cache(model), DynamicCache()
    models.forward(model, models.prompt(90), dense)
    try:
        oasis_cache.uninstall()
        with pytest.warns(OasisWarning, match="complete dense keys and values"):
            out = models.forward(model, models.prompt(1, seed=1), cache)
    finally:
        install()
    assert models.relative_error(out, models.forward(model, models.prompt(1, seed=1), dense)) < 1e-5
    assert cache.stats().fallback_steps == 1


def test_other_caches_and_models_pass_untouched(custom, monkeypatch):
    """While installed, what is not ours reaches its attention function with the very same objects."""
    OasisCache()
    seen: list[Any] = []

    def spy(module, query, key, value, attention_mask, *args, **kwargs):
        seen.append((type(key), args, {name: kwargs[name] for name in ("scaling", "dropout")}))
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)

    model = models.build("llama", custom("spy_attention", spy))
    expected = models.generate(models.build("llama", "sdpa"), models.prompt(90), DynamicCache(), 6)
    out = models.generate(model, models.prompt(90), DynamicCache(), 6)
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(torch.stack(out.logits), torch.stack(expected.logits))
    assert {entry[0] for entry in seen} == {torch.Tensor}
    assert len(seen) == LAYERS * 6
    assert torch.equal(
        model(models.prompt(20), use_cache=False).logits, models.build("llama", "sdpa")(models.prompt(20)).logits
    )


# --- Every attention function gives the right answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("config_given", [True, False])
def test_untouched_model_with_its_default_attention(config_given):
    """The README's one line: no attention named, `past_key_values=` of generate, nothing set up."""
    model = models.build("llama")
    ids = models.prompt(90)
    cache = OasisCache(SMALL, model_config=model.config if config_given else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OasisWarning)
        out = model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=10,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    with oracle.rules(SMALL):
        expected = models.generate(models.build("llama", oracle.NAME), ids, DynamicCache(), 10)
    assert torch.equal(out.sequences, expected.sequences)
    assert models.relative_error(torch.stack(out.logits), torch.stack(expected.logits)) < 2e-5
    stats = cache.stats()
    assert (stats.prefill_steps, stats.sparse_steps, stats.fallback_steps, stats.steps) == (1, 9, 0, 10)


def odd_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Touches keys in ways that no dispatcher can know: a bias by key norm."""
    keys = key.repeat_interleave(module.num_key_value_groups, 1)
    values = value.repeat_interleave(module.num_key_value_groups, 1)
    scores = query @ keys.transpose(-1, -2) * scaling - 0.1 * keys.norm(dim=-1).unsqueeze(-2)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    elif query.shape[2] > 1:
        rows, total = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, total, dtype=torch.bool).tril(total - rows), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("wrapped", [False, True], ids=["function", "partial"])
def test_unknown_attention_function_gets_exact_dense_kv_and_one_warning(custom, wrapped):
    function = functools.partial(odd_attention) if wrapped else odd_attention
    model = models.build("llama", custom(f"odd_attention_{wrapped}", function))
    cache, dense = OasisCache(SMALL, model_config=model.config), DynamicCache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (90, 1, 4, 20, 1):
            ids = models.prompt(rows, 2, seed=rows)
            assert models.relative_error(models.forward(model, ids, cache), models.forward(model, ids, dense)) < 1e-5
    messages = [str(w.message) for w in caught if w.category is OasisWarning]
    assert len(messages) == 1
    assert "partial" in messages[0] if wrapped else "odd_attention" in messages[0]
    stats = cache.stats()
    assert stats.fallback_steps == stats.dense_steps == 4
    assert stats.sparse_steps == stats.streamed_steps == 0
    assert stats.warnings == tuple(messages)


def test_output_attentions_gets_dense_kv_and_whole_weights():
    model = models.build("llama", "eager")
    cache, dense, ids = sparse_cache(model), DynamicCache(), models.prompt(1, seed=1)
    models.forward(model, models.prompt(90), dense)
    with pytest.warns(OasisWarning, match="output_attentions"):
        out = model(ids, **{models.CACHE_ARGUMENT: cache}, output_attentions=True)
    expected = model(ids, **{models.CACHE_ARGUMENT: dense}, output_attentions=True)
    assert len(out.attentions) == LAYERS
    for mine, theirs in zip(out.attentions, expected.attentions, strict=True):
        assert mine.shape == (1, 4, 1, 91)
        assert models.relative_error(mine, theirs) < 1e-5
    assert models.relative_error(out.logits, expected.logits) < 1e-5
    assert cache.stats().fallback_steps == 1
    models.forward(model, ids, cache)
    assert cache.stats().sparse_steps == 1  # and the next one is sparse again


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("position_bias", "position bias of shape (1,)"),
        ("head_mask", "argument head_mask"),
        ("block_table", "argument block_table"),
    ],
)
def test_arguments_that_only_the_model_can_honour_are_not_dropped(argument, said):
    model = models.build("llama", "sdpa")
    cache = sparse_cache(model)
    layer, seen = cache.layers[0], []
    keys, values = layer.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    assert isinstance(keys, KVView)

    def original(module, query, key, value, mask, **kwargs):
        seen.append((key, kwargs))
        return query, None

    monkeyed = functools.wraps(sdpa_attention_forward)(original)
    with pytest.warns(OasisWarning):
        oasis_cache.attention.dispatch(
            monkeyed,
            model.model.layers[0].self_attn,
            torch.randn(1, 4, 1, 8),
            keys,
            values,
            None,
            **{argument: torch.ones(1)},
        )
    assert torch.equal(seen[0][1][argument], torch.ones(1))
    assert torch.equal(seen[0][0], layer.dense_kv()[..., :8])
    assert oasis_cache.attention.refusal(
        sdpa_attention_forward, model.model.layers[0].self_attn, {argument: torch.ones(1)}, 1, 91
    ).endswith(said)


def test_code_that_touches_keys_gets_the_exact_tensor():
    model = models.build("llama", "sdpa")
    cache = sparse_cache(model)
    layer = cache.layers[0]
    complete = layer.dense_kv()
    new = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    keys, values = layer.update(*new)
    assert keys.shape == values.shape == (1, 2, 93, 8)
    assert "KVView" in repr(keys) and keys.dtype == torch.float32
    assert cache.stats().fallback_steps == 0
    with pytest.warns(OasisWarning, match=r"aten\.add"):
        same = keys + 0
    assert torch.equal(same, torch.cat([complete[..., :8], new[0]], 2))
    with pytest.warns(OasisWarning, match=r"aten\.slice"):
        second = values[:, 1:]
    assert torch.equal(second, torch.cat([complete[..., 8:], new[1]], 2)[:, 1:])
    assert len(cache.stats().warnings) == 2  # by operation
    assert cache.stats().fallback_steps == 1  # one forward


def test_views_of_an_earlier_forward_are_refused():
    """They stand for tokens that the layer may not hold any more: an error, not other tokens."""
    model = models.build("llama", "sdpa")
    cache, module = sparse_cache(model), model.model.layers[0].self_attn
    new = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    keys, values = cache.layers[0].update(*new)
    later, _ = cache.layers[0].update(*new)
    with pytest.raises(RuntimeError, match="held 91 tokens; now it holds 92"):
        keys + 0
    with pytest.raises(RuntimeError, match="earlier forward"):
        oasis_cache.attention.dispatch(sdpa_attention_forward, module, torch.randn(1, 4, 1, 8), keys, values, None)
    cache.layers[0].crop(-2)
    with pytest.raises(RuntimeError, match="held 92 tokens; now it holds 90"):
        later.sum()


def test_training_raises_before_it_goes_wrong():
    model = models.build("llama", "sdpa")
    cache = sparse_cache(model)
    model.train()
    try:
        with pytest.raises(ValueError, match=r"model\.eval\(\)"), torch.enable_grad():
            model(models.prompt(1), **{models.CACHE_ARGUMENT: cache})
    finally:
        model.eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_mask_that_is_too_short_is_refused(attention):
    model = models.build("llama", attention)
    cache = sparse_cache(model)
    layer = cache.layers[0]
    layer.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    with pytest.raises(ValueError, match="covers 50 tokens"):
        layer.attend(torch.randn(1, 4, 1, 8), torch.ones(1, 1, 1, 50, dtype=torch.bool), 0.3, None, None, None, True)


def test_bidirectional_rows_are_streamed():
    """A module that is not causal sees its new rows both ways: read exactly, not sparsely."""
    model = models.build("llama", "sdpa")
    cache = sparse_cache(model)
    layer = cache.layers[0]
    query, new = torch.randn(1, 4, 3, 8), (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    layer.update(*new)
    out = layer.attend(query, None, 0.3, None, None, None, False)
    kv = layer.dense_kv().repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, kv[..., :8], kv[..., 8:], scale=0.3).transpose(
        1, 2
    )
    assert models.relative_error(out, expected) < 1e-5
    assert layer.counters.forwards["streamed"] == 1 and layer.counters.forwards["sparse"] == 0


@pytest.mark.parametrize("rows", [1, 20], ids=["sparse", "streamed"])
def test_flash_window_is_applied(rows):
    """flash attention gets its window as an argument, the other functions get it in the mask and may ignore the argument."""
    model = models.build("llama", "sdpa")
    module = model.model.layers[0].self_attn
    total = 90 + rows
    seen = torch.ones(rows, total, dtype=torch.bool).tril(90)
    windowed = seen & ~torch.ones(rows, total, dtype=torch.bool).tril(90 - 10)
    query, new = torch.randn(1, 4, rows, 8), (torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8))

    def attend(function, mask):
        layer = sparse_cache(model).layers[0]
        out, _ = oasis_cache.attention.dispatch(
            function, module, query, *layer.update(*new), mask, scaling=0.3, sliding_window=10
        )
        return out, layer.dense_kv().repeat_interleave(2, 1)

    out, kv = attend(flash_attention_forward, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, kv[..., :8], kv[..., 8:], windowed, scale=0.3)
    assert models.relative_error(out, expected.transpose(1, 2)) < 1e-5
    again, _ = attend(sdpa_attention_forward, windowed[None, None])
    assert models.relative_error(again, out) < 1e-5
    other, _ = attend(sdpa_attention_forward, None)
    assert models.relative_error(other, out) > 0.05


# --- Threads and the end of the process -------------------------------------------------------------------------------------------


def test_two_caches_in_two_threads_do_not_meet():
    model = models.build("llama", "sdpa")
    prompts = [models.prompt(90, seed=seed) for seed in (1, 2)]

    def answer(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        cache = OasisCache(SMALL)
        out = models.generate(model, ids, cache, 30)
        return out.sequences, torch.stack(out.logits), cache.stats()

    serial = [answer(ids) for ids in prompts]
    results: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        barrier.wait()
        results[number] = answer(prompts[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (tokens, logits, stats), (serial_tokens, serial_logits, serial_stats) in zip(results, serial, strict=True):
        assert torch.equal(tokens, serial_tokens)
        assert torch.equal(logits, serial_logits)
        assert (stats.hits, stats.misses, stats.sparse_steps) == (serial_stats.hits, serial_stats.misses, 29)


def test_interpreter_exits_cleanly_with_a_live_cache():
    """Views, pages and transfers that live until the interpreter ends must not crash it."""
    result = run_python(
        """
        import os, sys
        import torch
        from oasis_cache import OasisCache
        from tests import models

        for engine, state in (("sync", "sparse"), ("sync", "streamed"), ("threads", "kept")):
            if (child := os.fork()) == 0:
                break  # from here to its end an interpreter of its own, imports done
            print(engine, state, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            sys.exit()
        model = models.build("llama", "sdpa")
        cache = OasisCache(budget=48, block_size=8, recent_blocks=2, sparse_rows=8, engine=engine, lookahead="draft")
        models.forward(model, models.prompt(90), cache)
        models.forward(model, models.prompt(1 if state != "streamed" else 30), cache)
        views = cache.layers[0].update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
        if state == "kept":
            import builtins
            builtins.kept = (cache, views, model)  # outlives this module
        print(cache.stats().sparse_steps, "done")
        """
    )
    assert result.returncode == 0, (result.returncode, result.stderr)
    assert result.stdout.splitlines() == [
        "2 done", "sync sparse 0", "1 done", "sync streamed 0", "2 done", "threads kept 0"
    ]  # fmt: skip
    assert result.stderr == ""
