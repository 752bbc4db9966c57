"""The measuring commands: caches hold what they should, take turns, and rows become tables and plots."""

from __future__ import annotations

import csv
import itertools
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from eval.bench import __main__ as command
from eval.bench import generation, measuring, profile, reporting
from eval.bench import providers as peers
from eval.bench.cases import CASES, Case, chosen
from eval.bench.filling import SPARE_TOKENS, Source
from eval.bench.gpu.ledger import COLUMNS, LEDGER, append
from eval.bench.gpu.measure import Row
from eval.bench.measuring import compared, measure, take_turns
from eval.bench.providers import (
    DYNAMIC,
    FP8,
    HAS_FP8,
    OASIS,
    QUEST,
    STATIC,
    TWO_LEVELS,
    device_bytes,
    providers,
    use_attention,
)
from eval.bench.quest import ATTENTION, QuestCache
from eval.quality.methods.quest import Quest
from oasis_cache import OasisCache
from oasis_cache.cache import cache_argument
from oasis_cache.layer import OasisLayer

SEED = 100
ALL = (OASIS, TWO_LEVELS, DYNAMIC, STATIC, QUEST, *((FP8,) if HAS_FP8 else ()))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    sizes = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2
    )  # fmt: skip
    model = LlamaForCausalLM(sizes).eval()
    for layer in model.model.layers:  # peaked attention: what is read matters
        layer.self_attn.q_proj.weight.data *= 25
    return model


@pytest.fixture(scope="module")
def source(model):
    return Source(model, torch.randint(1, 97, (1, SEED + SPARE_TOKENS), generator=torch.Generator().manual_seed(5)))


def test_names_of_cases():
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.name for case in chosen("flat, step-8192")] == [
        "step-8192-float32", "flat-float32", "step-8192-bfloat16", "flat-bfloat16"
    ]  # fmt: skip
    assert [case.name for case in chosen("step-1024-float32")] == ["step-1024-float32"]
    with pytest.raises(ValueError, match="unknown cases: step-8, steps; there are step-1024-float32"):
        chosen("step-8,steps,short")


def test_every_cache_is_filled_with_the_same(model, source):
    context, filled = 2 * SEED + 37, {}
    for provider in providers(ALL):
        cache = source.fill(provider.make(model, context, 96), context, whole=provider.whole)
        assert cache.get_seq_length() == context
        filled[provider.name] = cache
    keys, values = filled[DYNAMIC].layers[2].keys, filled[DYNAMIC].layers[2].values
    assert torch.equal(keys[:, :, :SEED], source.layers[2][0])
    assert not torch.equal(keys[:, :, SEED : 2 * SEED], source.layers[2][0])
    for kept, dense in zip(filled[OASIS].layers[2].dense_keys_and_values(), (keys, values), strict=True):
        torch.testing.assert_close(kept, dense, rtol=0, atol=0)
    for name in (STATIC, QUEST):
        torch.testing.assert_close(filled[name].layers[2].keys[:, :, :context], keys, rtol=0, atol=0)
        torch.testing.assert_close(filled[name].layers[2].values[:, :, :context], values, rtol=0, atol=0)
    assert device_bytes(filled[DYNAMIC]) == (source.kv_bytes(context), None)
    if HAS_FP8:
        assert device_bytes(filled[FP8])[0] == source.kv_bytes(context) // 4
    filled[OASIS].close()


def test_sequences_of_a_batch_differ(model, source):
    cache = source.fill(DynamicCache(config=model.config), SEED + 20, batch=3, whole=True)
    keys = cache.layers[1].keys
    assert keys.shape[0] == 3
    assert not torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1], keys[2])
    assert source.kv_bytes(SEED + 20, 3) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("context", [63, 64, 159, 160, 237])
def test_quest_reads_what_the_reference_reads(model, source, context):
    budget, steps = 64, 20
    with torch.inference_mode(), Quest().session(model, budget, 1) as (cache, counters):
        source.fill(cache, context, whole=True)
        expected = [model(source.ids_of(i), **cache_argument(model, cache)).logits for i in range(steps)]
        sparse_steps = counters.as_dict()["sparse_steps"]
    quest, own = QuestCache(model.config, context + steps, budget), model.config._attn_implementation
    source.fill(quest, context)
    use_attention(model, ATTENTION)
    try:
        with torch.inference_mode():
            for i in range(steps):
                logits = model(source.ids_of(i), **cache_argument(model, quest)).logits
                torch.testing.assert_close(logits, expected[i], rtol=2e-4, atol=2e-4)
    finally:
        use_attention(model, own)
    assert sparse_steps == sum((context + step) // 16 * 16 > budget for step in range(steps))
    with pytest.raises(ValueError, match="exceed the capacity"):
        source.fill(quest, 100)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_of_each_cache_gives_a_row(model, source, batch):
    case = Case("batch" if batch > 1 else "step", "float32", batch, 600, batch, budget=96)
    rows = {row.provider: row for row in measure(model, source, case, 5, providers(ALL), 1e9, pytest.fail)}
    assert set(rows) == {OASIS, DYNAMIC, STATIC} if batch > 1 else set(ALL)
    dense = source.kv_bytes(600, batch)
    assert all(row.kv_bytes == dense and row.samples == 5 for row in rows.values())
    assert all(
        row.p20_ms <= row.p50_ms <= row.p80_ms and row.ratio_p20 <= row.ratio <= row.ratio_p80 for row in rows.values()
    )
    assert rows[DYNAMIC].ratio == rows[STATIC].static_ratio == 1
    assert rows[DYNAMIC].bytes_moved == source.kv_bytes(607, batch)
    oasis = rows[OASIS]
    assert oasis.note.startswith("hit rate")
    assert 0 < oasis.bytes_read - source.weight_bytes < dense, "attention read the budget only"
    assert oasis.bytes_moved < oasis.bytes_read
    assert 0 < oasis.index_bytes < oasis.device_bytes < rows[DYNAMIC].device_bytes
    if QUEST in rows:
        assert 0 < rows[QUEST].index_bytes < dense / 8
    assert oasis.read_percent == pytest.approx(100 * oasis.bytes_read / (oasis.p50_ms * 1e-3) / 1e9)
    assert model.config._attn_implementation == "sdpa"


def test_a_short_context_is_dense(model, source):
    case = Case("short", "float32", 60, 60, budget=256)
    rows = {row.provider: row for row in measure(model, source, case, 2, providers(ALL), None, pytest.fail)}
    assert set(rows) == {OASIS, DYNAMIC}
    assert rows[OASIS].note.startswith("dense")
    assert rows[OASIS].bytes_moved == source.kv_bytes(60)
    assert rows[OASIS].read_percent is None


def test_flat_compares_two_contexts_of_one_cache(model, source, monkeypatch):
    monkeypatch.setattr(measuring, "FLAT_CONTEXTS", (200, 1200))
    rows = measure(model, source, Case("flat", "float32", 0, 1200, budget=96), 3, providers(ALL), None, pytest.fail)
    assert [row.provider for row in rows] == ["OasisCache at 200", "OasisCache at 1,200", f"{TWO_LEVELS} at 1,200"]
    assert rows[0].ratio == 1 and rows[1].ratio > 0
    assert {row.baseline for row in rows} == {"OasisCache at 200"}
    assert rows[1].kv_bytes == 6 * rows[0].kv_bytes


def test_every_part_of_a_step_has_a_row(model, source):
    own = [vars(holder)[name] for places in profile.PARTS.values() for holder, name in places]
    case = Case("profile", "float32", 600, 600, budget=96)
    rows = profile.measure_profile(model, source, case, 3, pytest.fail)
    assert [vars(holder)[name] for places in profile.PARTS.values() for holder, name in places] == own
    times = {row.quantity: row.p50_ms for row in rows}
    assert list(times) == [profile.WHOLE, *profile.PARTS, profile.REST, profile.EMPTY]
    assert all(
        0 < ms < times[profile.WHOLE] for part, ms in times.items() if part not in (profile.WHOLE, profile.EMPTY)
    )
    assert [row.provider for row in rows] == [OASIS] * (len(rows) - 1) + [DYNAMIC]
    assert {row.samples for row in rows} == {3}


def test_the_parts_and_the_rest_add_up(model, source, monkeypatch):
    kept = []
    monkeypatch.setattr(measuring, "percentiles", lambda values: kept.append(values) or (0, 0, 0))
    profile.measure_profile(model, source, Case("profile", "float32", 600, 600, budget=96), 3, pytest.fail)
    whole, *parts, _ = kept
    assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(whole)


def test_timing_counts_each_part_once(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    spent = dict.fromkeys(profile.PARTS, 0.0)
    with profile.timed(spent):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        with pytest.raises(TypeError):
            OasisLayer.update()
    assert spent == dict.fromkeys(profile.PARTS, 0.0) | {"products with weights": 1e3, "taking new tokens in": 1e3}
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert spent["products with weights"] == 1e3


def test_what_does_not_fit_is_left_out_and_said(model, source, monkeypatch):
    dense = source.kv_bytes(300)
    monkeypatch.setattr(measuring.psutil, "virtual_memory", lambda: SimpleNamespace(available=int(1.25 * dense)))
    said: list[str] = []
    subjects = measuring.fill_all(
        model, source, Case("step", "float32", 300, 300), 2, providers((DYNAMIC, STATIC)), said.append
    )
    assert [subject.name for subject in subjects] == [STATIC]
    assert len(said) == 1 and "step-300-float32: DynamicCache is left out: needs" in said[0]


def test_caches_take_turns_and_ratios_go_pair_by_pair(model, source, monkeypatch):
    order = []
    caches = {"a": DynamicCache(config=model.config), "b": StaticCache(config=model.config, max_cache_len=SEED + 5)}
    subjects = []
    for name, cache in caches.items():
        source.fill(cache, SEED, whole=name == "a")
        real = cache.update
        monkeypatch.setattr(
            cache,
            "update",
            lambda k, v, i, *a, n=name, r=real, **kw: (order.append(n) if i == 0 else None, r(k, v, i))[1],
        )
        subjects.append(measuring.Subject(name, cache, providers((DYNAMIC,))[0], SEED))
    take_turns(model, source, subjects, 1, 3)
    assert "".join(order) == "ab" * 5
    assert [len(subject.samples) for subject in subjects] == [3, 3]
    samples = {DYNAMIC: [10.0, 30.0, 20.0], OASIS: [5.0, 10.0, 40.0], STATIC: [5.0, 5.0, 5.0]}
    row = compared(Row("p", "c", "s", OASIS), samples, DYNAMIC)
    assert (row.ratio_p20, row.ratio, row.ratio_p80) == (0.5, 2.0, 3.0)
    assert row.static_ratio == 0.5
    alone = compared(Row("p", "c", "s", OASIS), {OASIS: [1.0]}, DYNAMIC)
    assert alone.ratio is None and alone.baseline == "" and alone.static_ratio is None


def test_generation_is_timed_in_parts(model):
    ids = torch.randint(1, 97, (1, 90), generator=torch.Generator().manual_seed(1))
    case = Case("generate", "float32", 90, 90, budget=128)  # covers the context: tokens must be equal
    rows = generation.measure_generation(model, ids, case, 2, 12, lambda line: None)
    by = {(row.provider, row.quantity): row for row in rows}
    ways = {name + lookup for name in (OASIS, DYNAMIC) for lookup in ("", generation.LOOKUP)}
    assert set(by) == set(itertools.product(ways, generation.QUANTITIES))
    for way in ways:
        total, first, further = (by[way, quantity] for quantity in generation.QUANTITIES)
        assert total.note.startswith("all tokens those of DynamicCache")
        assert first.p50_ms < total.p50_ms and further.p50_ms < total.p50_ms
        assert total.samples == 2
    assert by[DYNAMIC, "total"].ratio == 1


def test_a_prefill_is_measured_in_a_process_of_its_own(model, tmp_path, monkeypatch):
    from eval.bench import prefill

    model.save_pretrained(tmp_path)
    tokenizer = SimpleNamespace()
    ids = torch.randint(1, 97, (1, 700), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(prefill, "load_model", lambda *_: (model, tokenizer))
    monkeypatch.setattr(prefill, "prompt", lambda _, tokens: ids[:, :tokens])
    said: list[str] = []

    def in_this_process(arguments, **_):
        printed: list[str] = []
        monkeypatch.setattr(prefill, "print", printed.append, raising=False)
        status = prefill.main(arguments[3:])
        return SimpleNamespace(returncode=status, stdout="\n".join(printed), stderr="")

    monkeypatch.setattr(generation.subprocess, "run", in_this_process)
    case = Case("prefill", "float32", 32768, 32768, budget=128)
    rows = generation.measure_prefill(case, 2, 700, 256, None, said.append)
    assert [row.provider for row in rows] == [OASIS, DYNAMIC]
    sizes = model.config
    dense = 700 * 2 * 4 * sizes.num_key_value_heads * sizes.head_dim * sizes.num_hidden_layers
    for row in rows:
        assert row.kv_bytes == dense
        assert row.shape == "700 tokens in chunks of 256, budget 128"
        assert row.peak_bytes >= 0 and row.samples == 2
    assert rows[1].device_bytes == dense > rows[0].device_bytes
    assert len(said) == 4


def test_a_prefill_that_dies_is_left_out(monkeypatch):
    died = SimpleNamespace(returncode=-9, stdout="", stderr="no memory")
    monkeypatch.setattr(generation.subprocess, "run", lambda *_, **__: died)
    said: list[str] = []
    assert generation.measure_prefill(Case("prefill", "float32", 8, 8), 1, 8, 0, None, said.append) == []
    assert "OasisCache is left out: exit status -9, no memory" in said[0]


def test_the_token_of_a_chunked_prefill_is_that_of_one_at_once(model):
    from eval.bench.prefill import first_token

    ids = torch.randint(1, 97, (1, 200), generator=torch.Generator().manual_seed(2))
    expected = first_token(model, ids, DynamicCache(config=model.config), 0)
    for chunk in (64, 199, 200):
        for cache in (DynamicCache(config=model.config), OasisCache(model_config=model.config, budget=96)):
            assert first_token(model, ids, cache, chunk) == expected


def test_quanto_is_left_out_while_it_is_being_compiled(tmp_path, monkeypatch):
    build = tmp_path / "library" / "extensions" / "cpp" / "build"
    build.mkdir(parents=True)
    found = {"optimum": SimpleNamespace(), "optimum.quanto": SimpleNamespace(origin=str(tmp_path / "__init__.py"))}
    monkeypatch.setattr(peers.importlib.util, "find_spec", found.get)
    assert peers.QUANTO in {provider.name for provider in providers()}
    (build / "lock").touch()
    assert peers.QUANTO not in {provider.name for provider in providers()}
    (build / "lock").unlink()
    del found["optimum.quanto"]
    assert peers.QUANTO not in {provider.name for provider in providers()}


# --- Rows, tables, plots ----------------------------------------------------------------------------------------------


def fake_row(part: str, case: str, provider: str, ms: float, date: str = "2026-01-01 00:00", **cells: object) -> dict:
    known = {"date": date, "commit": "abc", "dirty": "no", "hardware": "a CPU", "torch": "2", "transformers": "5"}
    row = Row(f"cpu {part}", case, "", provider, ms - 1, ms, ms + 1, 9)
    return known | asdict(row) | cells


def fake_rows() -> list[dict]:
    old = fake_row("step", "step-8192-float32", OASIS, 77.0, "2025-01-01 00:00")
    rows = [old, fake_row("step", "step-8192-float32", STATIC, 78.0, "2025-01-01 00:00")]
    for dtype in ("float32", "bfloat16"):
        for context in (8192, 32768):
            for provider, ms in ((OASIS, 40.0), (DYNAMIC, 80.0)):
                cells = {
                    "ratio": 80 / ms,
                    "device_bytes": int(ms * 1e6),
                    "kv_bytes": 400_000_000,
                    "bytes_moved": 5_000_000,
                }
                rows.append(fake_row("step", f"step-{context}-{dtype}", provider, ms, **cells))
    for at, ratio in (("4,096", 1.0), ("131,072", 0.8)):
        cells = {"ratio": ratio, "device_bytes": 10**8, "kv_bytes": 24 * 10**8, "index_bytes": 10**7, "bytes_moved": 1}
        rows.append(fake_row("flat", "flat-float32", f"OasisCache at {at}", 40 / ratio, **cells))
    for provider, ratio in ((OASIS, 0.98), (DYNAMIC, 1.0)):
        cells = {"ratio": ratio, "ratio_p20": ratio - 0.01, "ratio_p80": ratio + 0.01}
        rows.append(fake_row("short", "short-512-float32", provider, 31.0, **cells))
    rows += [fake_row("batch", f"batch-{batch}-float32", OASIS, 50.0, ratio=2.0) for batch in (1, 4)]
    for quantity, ms in ((profile.WHOLE, 50.0), (profile.CHOOSING, 20.0)):
        rows.append(fake_row("profile", "profile-8192-float32", OASIS, ms, quantity=quantity))
    rows.append(fake_row("profile", "profile-32768-float32", OASIS, 90.0, quantity=profile.WHOLE))
    for quantity, ms in zip(generation.QUANTITIES, (9000.0, 4000.0, 20.0), strict=True):
        rows.append(fake_row("generate", "generate-8192-float32", OASIS, ms, quantity=quantity, ratio=1.5))
    rows.append(
        fake_row("prefill", "prefill-32768-float32", OASIS, 60000.0, shape="9 tokens at once, budget 2048")
        | {"peak_bytes": 10**8, "kv_bytes": 2 * 10**8}
    )
    return rows


@pytest.fixture
def ledger(tmp_path):
    append(tmp_path / "ledger.csv", fake_rows())
    return tmp_path / "ledger.csv"


def test_tables_are_those_of_the_newest_run(ledger):
    rows = reporting.read(ledger)
    steps = reporting.steps_table(rows)
    assert "77.0" not in steps and STATIC not in steps.split("\n", 2)[2], "rows of an older run"
    assert "| 8,192 | float32 | OasisCache | 40.0 (39.0 to 41.0) | 2.00x |  | 1/10.0 | 5.0 MB |  |  |" in steps
    assert "a CPU, torch 2, transformers 5, commit abc, medians of 9 in turns" in steps
    assert (
        "| float32 | OasisCache | 131,072 | 50.0 (49.0 to 51.0) | 1.25x | 1/24.0 | 100.0 MB (10.0 MB) | 0.0 MB |"
        in reporting.flat_table(rows)
    )
    assert "1.020x (1.010 to 1.031)" in reporting.short_table(rows)
    assert "| 4 | float32 | OasisCache | 50.0 (49.0 to 51.0) | 80.0 | 2.00x |" in reporting.batch_table(rows)
    parts = reporting.profile_table(rows).splitlines()
    assert parts[0] == "| milliseconds of | 8,192 tokens, float32 | 32,768 tokens, float32 |"
    assert parts[2:4] == [
        "| the step | 50.0 (49.0 to 51.0) | 90.0 (89.0 to 91.0) |",
        "| choosing blocks | 20.0 (19.0 to 21.0) |  |",
    ]
    generated = reporting.generate_table(rows)
    assert (
        "| float32 | OasisCache | 9.0 s (9.0 to 9.0) | 4.0 s (4.0 to 4.0) | 20.0 (19.0 to 21.0) | 1.50x | 1.50x |"
        in generated
    )
    assert (
        "| float32 | 9 tokens at once | OasisCache | 60.0 s (60.0 to 60.0) |  | 100.0 MB | 0.50x |"
        in reporting.prefill_table(rows)
    )
    brief = reporting.speed_table(rows)
    assert "| 32,768 tokens, bfloat16 | 40 ms | 80 ms (2.0x) |  |" in brief
    rows.append(fake_row("step", "step-32768-float32", STATIC, 60.0))
    line = reporting.speed_line(rows)
    assert "behind 32,768 tokens takes 40 ms in float32 (`DynamicCache` 80 ms, `StaticCache` 60 ms);" in line
    assert line.endswith("behind 131,072 tokens it takes 1.2 times in float32 as long as behind 4,096.")
    assert (
        "| 131,072 tokens, float32 | 50 ms: 1.25x the step behind 4,096; 1/24.0 of the dense KV on the device | | |"
        in brief
    )


def test_report_writes_pages_and_checks_them(ledger, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- flat:begin -->\nold\n<!-- flat:end -->\n<!-- batch:begin -->\n<!-- batch:end -->\nafter"
    )
    monkeypatch.setattr(reporting, "PERFORMANCE", page)
    monkeypatch.setattr(reporting, "README", page)
    assert command.main(["report", "--check", "--ledger", str(ledger)]) == 1
    assert "old" in page.read_text()
    assert command.main(["report", "--ledger", str(ledger)]) == 0
    assert command.main(["report", "--check", "--ledger", str(ledger)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- flat:begin -->\n| type |") and text.endswith("<!-- batch:end -->\nafter")
    append(tmp_path / "steps.csv", fake_rows()[:1])
    assert "Not measured yet: `python -m eval.bench run --cases flat`." in reporting.pages(tmp_path / "steps.csv")[page]


def test_the_committed_pages_are_those_of_the_committed_ledger():
    outdated = [page.name for page, text in reporting.pages(LEDGER).items() if page.read_text(encoding="utf-8") != text]
    assert not outdated, f"python -m eval.bench report would change {outdated}"


def test_columns_that_came_later_are_empty_in_older_rows(tmp_path):
    path = tmp_path / "ledger.csv"
    older = [name for name in COLUMNS if name not in ("numba", "quantity", "peak_bytes")]
    path.write_text(",".join(older) + "\n" + ",".join(f"<{name}>" for name in older) + "\n")
    append(path, fake_rows()[:1])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert all(rows[0][name] == (f"<{name}>" if name in older else "") for name in COLUMNS)
    assert rows[1]["provider"] == OASIS
    assert list(tmp_path.iterdir()) == [path]


def test_plots_of_rows(ledger, tmp_path):
    pytest.importorskip("matplotlib")
    from eval import plots_speed

    rows = reporting.read(ledger)
    lines = plots_speed.points(rows, "step", "float32", plots_speed.milliseconds)
    assert lines == {
        OASIS: [(8192, 39, 40, 41), (32768, 39, 40, 41)],
        DYNAMIC: [(8192, 79, 80, 81), (32768, 79, 80, 81)],
    }
    assert plots_speed.points(rows, "batch", "float32", plots_speed.tokens_per_second)[OASIS][1][2] == 80
    drawn = plots_speed.draw(rows, tmp_path / "img")
    assert [path.name for path in drawn] == ["step_time.png", "device_bytes.png", "batch.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert plots_speed.draw(fake_rows()[:0], tmp_path / "none") == []


def test_the_command_says_what_there_is(capsys):
    assert command.main(["run", "--list"]) == 0
    assert "prefill-32768-bfloat16" in capsys.readouterr().out
    assert command.main(["run", "--cases", "step-7-float32"]) == 2
    assert "unknown cases: step-7-float32" in capsys.readouterr().err
    assert command.main(["run", "--providers", "Cache"]) == 2
    assert "unknown caches: Cache; there are OasisCache" in capsys.readouterr().err
    assert command.main(["run", "--providers", "OasisCache,Nope", "--cases", "step-1024-float32"]) == 2
    assert "unknown caches: Nope; there are OasisCache" in capsys.readouterr().err
    assert command.main(["run", "--cases", " , "]) == 2
    assert "unknown cases: ' , '; there are step-1024-float32" in capsys.readouterr().err


def test_bandwidths_are_positive():
    rows = {row.case: row for row in measuring.bandwidths(rounds=2, num_bytes=1 << 20)}
    assert rows["read"].bytes_read == 1 << 20
    assert rows["copy"].bytes_moved == 2 << 20
    assert all(row.gb_per_s > 0 for row in rows.values())
