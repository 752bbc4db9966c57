"""Saved caches come back bit for bit, lazily; whatever is not as it was written is refused, at load or when it is fetched."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import threading
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from oasis_cache import OasisCache, OasisConfig, kernels, saving, uninstall
from oasis_cache.saving import container
from oasis_cache.saving.fingerprint import sample_weights
from tests import models
from tests.integration.survival import assert_summaries, oasis_layers

CONFIG = OasisConfig(budget=40, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)


def filled(name, tokens, config=CONFIG, batch=2, **overrides):
    """A model and a cache that decoded a little behind a prompt."""
    model, cache = models.build(name), OasisCache(config, **overrides)
    models.forward(model, models.prompt(tokens, batch=batch), cache)
    for seed in range(3):
        models.forward(model, models.prompt(1, batch=batch, seed=seed), cache)
    return model, cache


def assert_go_on_alike(model, cache, loaded, batch=2):
    """Decoding, a streamed second turn, a crop and decoding again give the same bits."""
    for rows, seed in ((1, 10), (1, 11), (3, 12), (30, 13), (1, 14)):
        new = models.prompt(rows, batch=batch, seed=seed)
        assert torch.equal(models.forward(model, new, loaded), models.forward(model, new, cache)), (rows, seed)
    for one, other in zip(oasis_layers(cache), oasis_layers(loaded), strict=True):
        assert all(map(torch.equal, one.dense_keys_and_values(), other.dense_keys_and_values()))
        other.check_integrity()


@pytest.mark.parametrize("tokens", [20, 200])
@pytest.mark.parametrize("name", sorted(models.ARCHITECTURES | models.FURTHER))
def test_every_kind_of_layer_comes_back_bit_for_bit(tmp_path, name, tokens):
    model, cache = filled(name, tokens)
    path = tmp_path / "saved.safetensors"
    cache.save(path, model=model)
    uninstall()  # as in a new process
    loaded = OasisCache.load(path, model)
    again = tmp_path / "again.safetensors"
    loaded.save(again, model=model)
    assert again.read_bytes() == path.read_bytes()
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    before = cache.stats().fallback_steps
    assert_go_on_alike(model, cache, loaded)
    assert loaded.stats().fallback_steps == cache.stats().fallback_steps - before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.safetensors", "saved.safetensors"]


@pytest.mark.parametrize("index", ["int2", "int1", "minmax", "exact", "recency"])
def test_every_index_comes_back(tmp_path, index):
    model, cache = filled("llama", 200, index=index)
    cache.save(tmp_path / "saved")
    assert_go_on_alike(model, cache, OasisCache.load(tmp_path / "saved", model.config))


@pytest.mark.parametrize("tier_dtype", [None, "int8", "int4", "fp8"])
def test_what_is_compressed_or_spilled_is_saved_and_loaded_under_a_cap(tmp_path, tier_dtype):
    where = {"spill": str(tmp_path), "max_host_bytes": 12_000}
    model, plain = filled("llama", 300, tier_dtype=tier_dtype)
    _, cache = filled("llama", 300, tier_dtype=tier_dtype, **where)
    assert cache.stats().disk_bytes > 0
    cache.save(tmp_path / "saved")
    plain.save(tmp_path / "same")
    assert (tmp_path / "saved").read_bytes() == (tmp_path / "same").read_bytes()
    for limits in ({}, where, {"max_host_bytes": 60_000}):
        loaded = OasisCache.load(tmp_path / "saved", model, **limits)
        twin = OasisCache.load(tmp_path / "saved", model, engine="sync", lookahead="off")
        assert_go_on_alike(model, twin, loaded)
        assert loaded.config.tier_dtype == tier_dtype
        assert loaded.runtime.memory.reserved_bytes <= limits.get("max_host_bytes", 2**40)


def test_loading_reads_no_block_that_nobody_wants(tmp_path):
    model, cache = filled("llama", 1500, batch=1)
    cache.batch_repeat_interleave(3)
    cache.save(tmp_path / "saved")
    pages = cache.stats().host_bytes // 3
    assert (tmp_path / "saved").stat().st_size < 2 * pages, "rows share pages in the file"
    loaded = OasisCache.load(tmp_path / "saved", model, lookahead="off")
    stats = loaded.stats()
    assert (stats.disk_bytes_read, stats.host_bytes, stats.host_bytes_reserved) == (0, 0, 0)
    assert stats.disk_bytes == 3 * pages and stats.context_tokens == 1503
    models.forward(model, models.prompt(1, batch=3, seed=9), loaded)
    assert 0 < loaded.stats().disk_bytes_read < pages / 4


def test_generation_goes_on_as_if_nothing_had_been_saved(tmp_path):
    model, ids = models.build("llama"), models.prompt(150)
    cache = OasisCache(CONFIG)
    first = models.generate(model, ids, cache, 5).sequences
    cache.save(tmp_path / "saved")
    turn = torch.cat([first, models.prompt(12, seed=4)], dim=1)
    expected = models.generate(model, turn, cache, 10)
    out = models.generate(model, turn, OasisCache.load(tmp_path / "saved", model), 10)
    assert torch.equal(out.sequences, expected.sequences)
    assert all(map(torch.equal, out.logits, expected.logits))


def test_a_cache_without_a_model_comes_back_without_one(tmp_path):
    cache = OasisCache(CONFIG)
    for layer_idx in range(2):
        cache.update(torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8), layer_idx)
    cache.save(tmp_path / "saved")
    loaded = OasisCache.load(tmp_path / "saved")
    for one, other in zip(cache.layers, loaded.layers, strict=True):
        assert all(map(torch.equal, one.dense_keys_and_values(), other.dense_keys_and_values()))


def test_the_tools_of_safetensors_open_the_file(tmp_path):
    _, cache = filled("llama", 200, batch=1)
    cache.save(tmp_path / "saved")
    with safe_open(tmp_path / "saved", "pt") as file:
        assert json.loads(file.metadata()["oasis_cache"])["model"]["model_type"] == "llama"
        pages, table = (file.get_tensor(f"layers.1.store.0.{name}") for name in ("pages", "table"))
    kv = pages[table[0]].view(torch.float32).view(-1, 2, 8, 16).transpose(0, 1).flatten(1, 2)
    keys, _ = cache.layers[1].dense_keys_and_values()
    assert torch.equal(kv[..., :8], keys[0, :, : kv.shape[1]])


def test_another_model_is_refused_with_what_differs(tmp_path):
    model, cache = filled("llama", 100)
    path = tmp_path / "saved"
    cache.save(path, model=model)
    for options, words in (
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            r"rope_parameters\.rope_theta: .* in the file, 500000\.0",
        ),
        ({"num_hidden_layers": 3}, "num_hidden_layers: 2 in the file, 3 here"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ):
        other_config = copy.deepcopy(model.config)
        for name, value in options.items():
            setattr(other_config, name, value)
        with pytest.raises(ValueError, match=words):
            OasisCache.load(path, other_config)
    with pytest.raises(ValueError, match="model_type: 'llama' in the file, 'qwen3' here"):
        OasisCache.load(path, models.build("qwen3").config)
    with pytest.raises(ValueError, match="keys and values are float32, and the model computes in bfloat16"):
        OasisCache.load(path, copy.deepcopy(model).to(torch.bfloat16))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="other weights"):
        OasisCache.load(path, other)
    with pytest.raises(ValueError, match="saved for a llama model: pass the model"):
        OasisCache.load(path)
    OasisCache.load(path, model, lookahead="off", trace=True).close()


def test_weights_are_sampled_from_the_first_to_the_last_number_of_parameters_of_any_size():
    large = torch.nn.Linear(49152, 576, bias=True, dtype=torch.bfloat16)  # its last index is no float32
    with torch.no_grad():
        large.weight.zero_()
        large.bias.zero_()
    digests = {sample_weights(large)}
    for place in (0, -1):
        with torch.no_grad():
            large.weight.view(-1)[place] = 1.0
        digests.add(sample_weights(large))
    assert len(digests) == 3


def test_settings_that_are_part_of_the_content_cannot_be_changed(tmp_path):
    model, cache = filled("llama", 100)
    cache.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"budget=48 \(saved with 40\)"):
        OasisCache.load(tmp_path / "saved", model, budget=48)
    with pytest.raises(ValueError, match="unknown option 'buget'"):
        OasisCache.load(tmp_path / "saved", model, buget=48)
    assert OasisCache.load(tmp_path / "saved", model, budget=40).config.budget == 40


def test_another_version_and_other_files_are_refused(tmp_path, monkeypatch):
    model, cache = filled("llama", 100)
    path = tmp_path / "saved"
    with monkeypatch.context() as patch:
        patch.setattr(saving, "FORMAT", 2)
        cache.save(path)
    with pytest.raises(ValueError, match="its format is 2, and this version of oasis-cache reads format 1"):
        OasisCache.load(path, model)
    for content in (b"", b"PK\x03\x04 no cache at all", b"\xff" * 200, (2).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is refused: it is no saved cache"):
            OasisCache.load(path, model)
    with pytest.raises(FileNotFoundError):
        OasisCache.load(tmp_path / "absent", model)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory):
    """Two saved caches of equal size, of the same model, and a place for damaged copies."""
    directory = tmp_path_factory.mktemp("files")
    contents = []
    for seed in range(2):
        model, cache = models.build("gemma3"), OasisCache(CONFIG)
        models.forward(model, models.prompt(170, seed=seed), cache)
        cache.save(directory / "saved")
        contents.append((directory / "saved").read_bytes())
    return lambda: (model, contents, directory / "damaged")  # which hypothesis does not print


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(0.0), st.just(0)),
    st.tuples(st.just("flip"), st.floats(0, 1), st.just(0.0), st.integers(0, 7)),
    st.tuples(st.just("flip-header"), st.floats(0, 1), st.just(0.0), st.integers(0, 7)),
    st.tuples(st.just("swap"), st.floats(0, 1), st.floats(0, 1), st.integers(1, 4096)),
    st.tuples(st.just("mix"), st.floats(0, 1), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("grow"), st.just(0.0), st.just(0.0), st.integers(1, 100)),
)


@given(damage=DAMAGE)
@settings(max_examples=150)
def test_damaged_files_are_refused(two_files, damage):
    model, (good, other), path = two_files()
    kind, first, second, number = damage
    bad = bytearray(good)
    header = 8 + int.from_bytes(good[:8], "little")
    a, b = (min(int(where * len(bad)), len(bad) - 1) for where in (first, second))
    if kind == "cut":
        del bad[a:]
    elif kind == "flip":
        bad[a] ^= 1 << number
    elif kind == "flip-header":
        bad[int(first * (header - 1))] ^= 1 << number
    elif kind == "swap":
        assume(a + number <= b and b + number <= len(bad))
        bad[a : a + number], bad[b : b + number] = bad[b : b + number], bad[a : a + number]
    elif kind == "mix":
        bad[min(a, b) : max(a, b)] = other[min(a, b) : max(a, b)]
    else:
        bad += bytes(number)
    assume(bytes(bad) not in (good, other))
    path.write_bytes(bad)
    with (
        pytest.raises((ValueError, OSError), match=r"is refused|is damaged|cut short"),
        OasisCache.load(path, model) as loaded,
    ):
        for layer in oasis_layers(loaded):
            layer.store.read_range(0, layer.store.num_blocks)


def test_a_damaged_block_is_refused_when_it_is_fetched(tmp_path):
    model, cache = filled("llama", 400, batch=1)
    path = tmp_path / "saved"
    cache.save(path)
    file = container.Container(str(path))
    begin = file._start + file._entries["layers.1.store.0.pages"]["data_offsets"][0]
    with open(path, "r+b") as damaged:
        damaged.seek(begin)
        damaged.write(bytes(1024 * 40))
    loaded = OasisCache.load(path, model)  # all that is read at once is whole
    with pytest.raises(
        OSError, match=r"is damaged: row \d+ of layers\.1\.store\.0\.pages is not what was saved"
    ) as error:
        for seed in range(20):
            models.forward(model, models.prompt(1, seed=seed), loaded)
    assert error.value.errno == errno.EIO
    loaded.crop(0)
    with pytest.raises(OSError, match="is damaged"):
        models.forward(model, models.prompt(30), loaded)
    loaded.close()
    file.close()


def test_a_save_that_fails_leaves_the_former_file(tmp_path, monkeypatch):
    _, cache = filled("llama", 100)
    path = tmp_path / "saved"
    cache.save(path)
    before = path.read_bytes()

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=r"cannot be saved to .*No space left"):
            cache.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="No such file"):
        cache.save(tmp_path / "absent" / "saved")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        container.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        container.write(str(path), {}, {})
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    cache.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_many_read_one_file_at_once_even_after_it_is_gone(tmp_path):
    model, cache = filled("llama", 600, batch=1)
    path = tmp_path / "saved"
    cache.save(path)
    steps = [models.prompt(1, seed=seed) for seed in range(20, 30)]
    readers = [OasisCache.load(path, model) for _ in range(3)]
    path.unlink()
    expected, results = [models.forward(model, step, cache) for step in steps], {}

    def read(number):
        results[number] = [models.forward(model, step, readers[number]) for step in steps]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert all(map(torch.equal, results[number], expected))
    descriptors = len(os.listdir("/proc/self/fd"))
    for reader in readers:
        reader.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3


def test_an_index_for_another_device_is_made_anew(tmp_path, monkeypatch):
    model, cache = filled("llama", 200)
    assert "words" in cache.layers[0].index.arrays
    cache.save(tmp_path / "saved")
    monkeypatch.setattr(kernels, "_numba_ops", lambda: None)
    with pytest.warns(UserWarning, match="laid out for another device"):
        loaded = OasisCache.load(tmp_path / "saved", model)
    assert "codes" in loaded.layers[0].index.arrays
    for layer in oasis_layers(loaded):
        assert_summaries(layer)


def test_what_cannot_be_saved_says_so(tmp_path):
    _, cache = filled("gemma3", 100)
    cache.layers[0].surprise = object()
    with pytest.raises(TypeError, match=r"layers\.0\.surprise is a object cannot be saved"):
        cache.save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []
    del cache.layers[0].surprise
    cache.layers[1].length -= 1
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.save(tmp_path / "saved")
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.save(tmp_path / "saved")
    with pytest.raises(TypeError, match=r"cache\.save"):
        torch.save(OasisCache(CONFIG), tmp_path / "pickled")


def test_paths_that_are_no_files_are_named(tmp_path):
    """What the user asked for, not what the library makes of it inside."""
    model = models.build("llama")
    cache = OasisCache(model_config=model.config)
    models.forward(model, models.prompt(9), cache)
    missing = tmp_path / "missing" / "saved.safetensors"
    with pytest.raises(OSError, match=f"cannot be saved to '{missing}'"):
        cache.save(missing)
    with pytest.raises(OSError, match=f"cannot be saved to '{tmp_path}'"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.*directory"):
        OasisCache.load(tmp_path, model)
    with pytest.raises(FileNotFoundError, match="missing"):
        OasisCache.load(missing, model)
    assert list(tmp_path.parent.glob("*.saving")) == list(tmp_path.glob("*")) == []
