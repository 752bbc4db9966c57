"""`OasisCache.plan` against what real caches hold, byte by byte, for layers of every kind."""

from __future__ import annotations

import json

import pytest
import torch

from oasis_cache import OasisCache, model_sizes
from oasis_cache.cli import main
from oasis_cache.plan import parse_size
from tests import models

SETTINGS = {"budget": 128, "recent_blocks": 2, "sparse_rows": 8}
PARTS = {
    "working_set_bytes": "device_bytes",
    "index_bytes": "index_bytes",
    "other_device_bytes": "other_device_bytes",
    "host_bytes": "host_bytes",
    "host_bytes_reserved": "host_bytes_reserved",
}


def held(model, context: int, new_tokens: int, batch: int, **options) -> OasisCache:
    """A cache that read `context` tokens at once and then `new_tokens` one by one."""
    cache = OasisCache(model_config=model.config, **SETTINGS | options)
    ids = models.prompt(context + new_tokens, batch)
    with torch.no_grad():
        models.forward(model, ids[:, :context], cache)
        for position in range(context, context + new_tokens):
            models.forward(model, ids[:, position : position + 1], cache)
    return cache


def check(name: str, context: int, new_tokens: int, batch: int, **options) -> None:
    model = models.build(name)
    plan = OasisCache.plan(
        model.config, context=context, new_tokens=new_tokens, batch=batch, dtype=torch.float32, device="cpu", **SETTINGS | options
    )  # fmt: skip
    cache = held(model, context, new_tokens, batch, **options)
    stats = cache.stats()
    assert plan.sizes_from == "model"
    assert {name: getattr(plan.needs, name) for name in PARTS} == {
        name: getattr(stats, own) for name, own in PARTS.items()
    }
    assert plan.weight_bytes == sum(weight.numel() for weight in model.parameters()) * 4
    keys_and_values = [layer.dense_keys_and_values() for layer in cache._oasis_layers if layer.is_initialized]
    dense = sum(part.numel() * 4 for pair in keys_and_values for part in pair)
    assert plan.needs.dense_bytes == dense + stats.other_device_bytes
    cache.close()


ARCHITECTURES = (
    "llama", "qwen3", "gemma3", "gpt-oss", "mistral-window", "qwen3-next", "falcon-h1", "lfm2", "jamba", "deepseek-v3",
    "deepseek-v32", "qwen3-moe", "llama4", "bloom",
)  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_plan_names_the_bytes_that_a_cache_holds(name):
    check(name, context=300, new_tokens=21, batch=2)


@pytest.mark.parametrize(
    ("context", "new_tokens", "batch", "options"),
    [
        (40, 0, 1, {}),
        (40, 90, 3, {}),
        (120, 60, 2, {}),  # becomes sparse while it is decoded
        (1500, 0, 1, {"index": "minmax"}),
        (1510, 0, 1, {}),  # whole blocks that are not sealed before the next forward
        (1500, 40, 1, {"index": "int1"}),
        (200, 10, 2, {"index": "exact", "lookahead": "draft"}),
        (200, 10, 2, {"index": "recency", "spare_blocks": 3}),
        (333, 50, 1, {"tier_dtype": "int8", "on_miss": "skip"}),
        (333, 50, 2, {"tier_dtype": "int4", "sink_blocks": 3}),
        (333, 1, 1, {"tier_dtype": "fp8", "sink_blocks": 0, "block_size": 8, "dense_below": 200}),
    ],
    ids=str,
)
def test_settings_are_followed(context, new_tokens, batch, options):
    check("llama", context, new_tokens, batch, **options)


def plan_of(name: str = "llama", **arguments):
    return OasisCache.plan(
        models.build(name).config, **{"device": "cpu", "dtype": torch.float32, **SETTINGS} | arguments
    )


@pytest.mark.parametrize("options", [{}, {"tier_dtype": "int4", "new_tokens": 5}, {"host_bytes": 40_000}], ids=str)
def test_the_largest_that_fits_fits_and_no_more(options):
    limits = {"device_bytes": 300_000, "weights": 100_000} | options
    plan = plan_of(context=1000, batch=2, **limits)
    assert plan.fits == (options.get("host_bytes") is None)
    for most, asked in (
        (plan.largest_context, lambda n: {"context": n, "batch": 2}),
        (plan.largest_batch * 16, lambda n: {"context": 1000, "batch": n // 16}),
    ):
        assert most == 0 or plan_of(**asked(most), **limits).fits
        assert not plan_of(**asked(most + 16), **limits).fits
    dense = [plan_of(context=plan.largest_context_dense + n, batch=2, **limits).needs.dense_bytes for n in (0, 16)]
    assert dense[0] + 100_000 <= 300_000 < dense[1] + 100_000


def test_without_limits_nothing_is_said_of_fitting():
    plan = plan_of(context=500)
    assert (plan.fits, plan.largest_context, plan.largest_context_dense, plan.largest_batch) == (None, None, None, None)
    assert plan_of(context=10**9, device_bytes=10).largest_context == 0


def test_further_tokens_cost_what_caches_pay_for_them():
    plan = plan_of(context=500, tier_dtype="int8")
    near, far = (
        plan_of(context=tokens, tier_dtype="int8").needs for tokens in (20_480, 36_864)
    )  # segments of clusters are whole
    assert plan.host_token_bytes == pytest.approx((far.host_bytes - near.host_bytes) / 16_384, abs=1)
    assert plan.device_token_bytes == pytest.approx((far.device_bytes - near.device_bytes) / 16_384, abs=1)
    assert plan.dense_token_bytes == (far.dense_bytes - near.dense_bytes) / 16_384


@pytest.mark.parametrize(
    "options", [{"lookahead": "off"}, {"lookahead": "draft", "engine": "threads", "max_fetch": 2}], ids=str
)
def test_traffic_stays_within_the_plan(options):
    new_tokens, context = 20, 600
    cache = held(models.build("llama"), context, new_tokens, 2, **options)
    stats = cache.stats()
    missed = stats.misses - stats.late  # late ones were prefetched
    rate = 1 - missed / (stats.hits + stats.misses)
    plan = plan_of(context=context, batch=2, hit_rate=rate, **options)
    prefetched = stats.prefetched * cache.layers[0].counters.block_bytes
    assert prefetched <= plan.prefetched_step_bytes * new_tokens
    assert (prefetched > 0) == (plan.prefetched_step_bytes > 0) == (options["lookahead"] != "off")
    assert stats.bytes_fetched - prefetched == pytest.approx(plan.step_bytes * new_tokens, rel=1e-3, abs=new_tokens)
    assert 0 < plan.step_bytes < plan.demanded_step_bytes
    cache.close()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss", "mistral-window", "deepseek-v3"])
def test_a_config_says_what_the_model_says_if_that_cannot_be_built(name, monkeypatch):
    asked = plan_of(name, context=700, batch=3)

    def fail(*_):
        raise NotImplementedError("not on the meta device")

    monkeypatch.setattr(model_sizes, "_ask_model", fail)
    told = plan_of(name, context=700, batch=3)
    assert (told.sizes_from, told.needs, told.weight_bytes) == ("config", asked.needs, None)
    with pytest.raises(ValueError, match=r"sizes of Qwen3NextConfig are not known.*not on the meta device"):
        plan_of("qwen3-next", context=700)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 0}, "context=0 must be an int of at least 1"),
        ({"batch": -1}, "batch=-1 must be an int of at least 1"),
        ({"batch": 1.5}, "batch=1.5 must be"),
        ({"new_tokens": -1}, "new_tokens=-1 must be an int of at least 0"),
        ({"device_bytes": 0}, "device_bytes=0 must be"),
        ({"hit_rate": 1.5}, r"hit_rate=1.5 must lie in \[0.0, 1.0\]"),
        ({"device": "tpu"}, "device='tpu' must be 'cuda' or 'cpu'"),
        ({"dtype": torch.int8}, "must be a floating-point type"),
        ({"weights": -5}, "weights=-5 must be"),
        ({"budget": 7}, "budget=7 is too small"),
        ({"colour": 1}, "unknown option 'colour'"),
    ],
    ids=str,
)
def test_wrong_questions_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        plan_of(**{"context": 100} | wrong)
    with pytest.raises(ValueError, match=r"model_config must be a model's config"):
        OasisCache.plan("llama", context=100)


# --- The command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    models.build("llama").config.save_pretrained(path)
    return str(path)


def test_the_command_prints_what_python_says(folder, capsys, tmp_path):
    words = [
        "plan",
        folder,
        "--context",
        "3000",
        "--batch",
        "2",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--budget",
        "256",
    ]
    limits = ["--device-memory", "1MiB", "--host-memory", "8MB", "--hit-rate", "0.75", "--tier-dtype", "int8"]
    assert main([*words, *limits, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = OasisCache.plan(
        models.build("llama").config, context=3000, batch=2, dtype=torch.float32, device="cpu", device_bytes=1 << 20,
        host_bytes=8_000_000, hit_rate=0.75, budget=256, tier_dtype="int8",
    )  # fmt: skip
    assert printed == {"model": folder, "settings": {"budget": 256, "tier_dtype": "int8"}, **plan.as_dict()}
    out = tmp_path / "plan.json"
    assert main([*words, *limits, "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == printed
    table = capsys.readouterr().out
    assert "fits 1.00 MiB of device and 7.63 MiB of host memory" in table
    assert f"{plan.largest_context:,} tokens" in table


def test_exit_codes(folder, capsys):
    words = ["plan", folder, "--context", "3000", "--device", "cpu"]
    assert main(words) == 0
    assert main([*words, "--device-memory", "100K"]) == 1
    assert "NO" in capsys.readouterr().out
    assert main([*words, "--no-weights", "--weights-memory", "1M"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert main(["plan", str(folder) + "-not", "--context", "10"]) == 2
    assert "no config of a model" in capsys.readouterr().err
    for options, said in (
        (("--dtype", "float99"), "--dtype='float99' must be"),
        (("--device-memory", "0"), "--device-memory=0 must be an int of at least 1"),
        (("--host-memory", "0"), "--host-memory=0 must be"),
        (("--new-tokens", "-1"), "--new-tokens=-1 must be"),
        (("--hit-rate", "2"), "--hit-rate=2.0 must lie in"),
        (("--budget", "100"), "--budget=100 must be a multiple of block_size=16"),
    ):
        assert main([*words, *options]) == 2
        assert f"oasis-cache plan: {said}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--host-memory", "much"])
    assert stopped.value.code == 2
    assert "'much' is no size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "num_bytes"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("512 MB", 512_000_000),
        ("1e9", 10**9),
        ("1.5k", 1536),
        ("7", 7),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(words, num_bytes):
    assert parse_size(words) == num_bytes


@pytest.mark.parametrize("words", ["1e999", "1.2.3GB", ".", "-1", "5e"])
def test_what_is_no_size_says_how_to_write_one(words):
    with pytest.raises(ValueError, match="is no size: write it as 24GiB"):
        parse_size(words)


def test_the_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "exit status:" in shown
