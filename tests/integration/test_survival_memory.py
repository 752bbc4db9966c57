"""Survival cases, sections I to K: host memory, several devices, lifetime, errors and leaks."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref
from typing import Any

import psutil
import pytest
import torch
from accelerate.utils import send_to_device
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from oasis_cache import OasisCache, OasisConfig, OasisWarning, store
from oasis_cache.blocks import LayerShape
from oasis_cache.store import HostMemory, HostStore
from tests import models
from tests.integration.survival import (
    EXACT,
    SIMULATED,
    SPARSE,
    all_returned,
    assert_close,
    case,
    dynamic,
    greedy,
    oasis_layers,
)

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def model():
    return models.build("llama-deep", "sdpa")


class Stop(Exception):
    pass


# --- I. Host memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pinning(monkeypatch):
    """Page-locked memory on a machine without a device: ordinary memory, of which only so many bytes can be had."""
    limit, taken, real = [0], [0], torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = real(*args, **kwargs)
        if pin_memory:
            if taken[0] + tensor.numel() > limit[0]:
                raise RuntimeError("CUDA error: out of memory")
            taken[0] += tensor.numel()
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    return limit


@case(95, 97)
@pytest.mark.parametrize("limit", [0, 40_000, 1 << 30])
def test_page_locked_memory_that_cannot_be_had(pinning, limit):
    """Ordinary memory instead, correct, said once and visible; all or nothing counts as pinned."""
    pinning[0] = limit
    memory = HostMemory()
    shape = LayerShape(1, 2, 8, 8, torch.float32, torch.device("cpu"))
    tier = HostStore(memory, shape, 8)
    tier.pages.pin = True
    blocks = torch.randn(1, 2, 100, 8, 16)
    for number in range(100):
        tier.append(blocks[:, :, number : number + 1])
    assert torch.equal(tier.read_range(0, 100).reshape_as(blocks), blocks)
    assert (memory.pin_failure is not None) == (limit < 1 << 30)
    assert memory.pinned_bytes <= limit and (memory.pinned_bytes == memory.reserved_bytes) == (limit == 1 << 30)
    if memory.pin_failure is not None:
        assert "page-locked memory could not be had (CUDA error: out of memory)" in memory.pin_failure


@case(95, 97)
def test_the_report_says_which_memory_it_was(model, monkeypatch):
    """A failed pin reaches the user as one warning, and `stats()`."""
    cache = OasisCache(SPARSE, model_config=model.config)
    cache.runtime.memory.pin_failure = "page-locked memory could not be had (test)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OasisWarning)
        models.forward(model, models.prompt(60), cache)
        models.forward(model, models.prompt(40), cache)
    assert [str(w.message) for w in caught if w.category is OasisWarning] == [
        "page-locked memory could not be had (test)"
    ]
    assert cache.stats().pinned is False and OasisCache().stats().pinned is None


@case(98)
@pytest.mark.parametrize("tokens", [200, 1000, 3000])
def test_little_more_is_reserved_than_used(tokens):
    """Slabs are powers of two, since pinned allocators round up to them: what one takes is what was asked for."""
    cache = OasisCache(SPARSE)
    cache.update(torch.randn(1, 2, tokens, 24), torch.randn(1, 2, tokens, 24), 0)
    stats = cache.stats()
    sizes = [raw.numel() for raw in cache.layers[0].store.pages._raw.values()]
    assert all(size & (size - 1) == 0 for size in sizes) and sum(sizes) == stats.host_bytes_reserved
    assert stats.host_bytes_reserved <= 1.25 * stats.host_bytes + max(sizes[-1:])


@case(100)
def test_allocations_while_decoding(model, monkeypatch):
    """256 tokens: a slab now and then; nothing is concatenated in the host tier."""
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(60), cache)
    slabs: list[int] = []
    allocate = HostMemory.allocate
    monkeypatch.setattr(HostMemory, "allocate", lambda self, size, pin: slabs.append(size) or allocate(self, size, pin))
    greedy(model, models.prompt(61), cache, 256)
    pages = 256 // SPARSE.block_size * 4
    assert cache.layers[0].store.num_blocks >= 38
    assert 0 < len(slabs) <= pages // store.PageAllocator.MIN_SLAB_PAGES


@case(101)
@pytest.mark.parametrize("version", [1, 2])
def test_the_cap_of_a_container(monkeypatch, version, model):
    """What the cgroup leaves is what there is, whatever the machine has."""
    paths = {
        2: ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        1: ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    }[version]
    numbers = dict(zip(paths, (1 << 30, (1 << 30) - 100_000), strict=True))
    monkeypatch.setattr(store, "_read_int", numbers.get)
    assert store.available_host_bytes() == 100_000
    cache = OasisCache(SPARSE, model_config=model.config)
    with pytest.raises(MemoryError, match=r"needs [\d,]+ more bytes .* this machine \(or its cgroup\) has 100,000"):
        models.forward(model, models.prompt(400), cache)
    assert cache.get_seq_length() == 0 and cache.stats().host_bytes_reserved == 0
    models.forward(model, models.prompt(90), cache)


@case(101)
def test_no_limit_in_the_cgroup(monkeypatch):
    monkeypatch.setattr(store, "_read_int", lambda path: None)
    assert store.available_host_bytes() <= psutil.virtual_memory().total


@case(103)
def test_a_cap_beyond_the_machine_is_no_promise(model, monkeypatch):
    """`max_host_bytes` of ten times the memory: the machine's own limit holds, before the prefill."""
    monkeypatch.setattr(store, "available_host_bytes", lambda: 50_000)
    cache = OasisCache(SPARSE, model_config=model.config, max_host_bytes=10 * psutil.virtual_memory().total)
    with pytest.raises(MemoryError, match="this machine"):
        models.forward(model, models.prompt(400), cache)
    assert cache.get_seq_length() == 0 == cache.stats().steps


@case(103)
def test_host_bytes_are_layers_times_tokens(model):
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(300), cache)
    models.forward(model, models.prompt(1), cache)
    sealed = 300 // 8 * 8
    assert cache.stats().host_bytes == 4 * sealed * 2 * 2 * 16 * 4 > 0


@case(104)
def test_nothing_asks_for_a_gpu(model, monkeypatch):
    """On a CPU no stream is made and nothing is pinned; that the package imports without CUDA, all these tests show."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("CUDA was asked for")

    for name in ("Stream", "Event", "current_stream", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    for engine in ("auto", "sync", "threads"):
        cache = OasisCache(SPARSE, engine=engine, lookahead="draft", model_config=model.config)
        assert greedy(model, models.prompt(60), cache, 6).shape == (1, 66)
        assert cache.stats().pinned is False
        cache.close()


# --- J. Several devices --------------------------------------------------------------------------------------------------------


@case(106)
def test_accelerate_passes_the_cache_on(model):
    """Moving a model's arguments to a device leaves the cache what it is: no tensor, mapping or sequence to take apart."""
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(60), cache)
    moved = send_to_device({"cache": cache, "ids": models.prompt(3)}, torch.device("cpu"))
    assert moved["cache"] is cache
    assert send_to_device((cache,), "cpu", skip_keys=["past_key_values"])[0] is cache
    for name in ("to", "keys", "items", "cpu", "cuda"):
        assert not hasattr(cache, name), name
    assert not isinstance(cache, dict | list | tuple)


@case(107)
def test_layers_stay_on_the_device_of_their_tensors(model, monkeypatch):
    """A step of a sparse cache moves nothing from one device to another but its own blocks: watched on the CPU."""
    cache = OasisCache(SPARSE, model_config=model.config)
    models.forward(model, models.prompt(200), cache)
    moved: list[torch.device] = []
    real = torch.Tensor.to

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(self, *args, **kwargs)
        if out.device != self.device:
            moved.append(out.device)
        return out

    monkeypatch.setattr(torch.Tensor, "to", watched)
    models.forward(model, models.prompt(1), cache)
    assert not moved
    assert {layer.shape.device for layer in cache.layers} == {torch.device("cpu")}


@case(107)
def test_layers_on_different_devices_are_each_on_their_own():
    """Under a device map layers live on several devices: each takes that of its first tensors."""
    cache = OasisCache(EXACT)
    cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), 0)
    cache.update(torch.randn(1, 2, 5, 4, device="meta"), torch.randn(1, 2, 5, 4, device="meta"), 1)
    assert [layer.dense_kv().device.type for layer in cache.layers] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="device cpu does not fit this cache"):
        cache.layers[1].update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))


# --- K. Lifetime, errors, leaks -------------------------------------------------------------------------------------------------


class StopAfter(StoppingCriteria):
    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.count -= 1
        if self.count == 0:
            raise Stop
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Streamer:
    def __init__(self, count: int) -> None:
        self.count = count

    def put(self, value: Any) -> None:
        self.count -= 1
        if self.count == 0:
            raise Stop

    def end(self) -> None: ...


@case(109)
@pytest.mark.parametrize(
    "config", [SPARSE, SIMULATED, OasisConfig(**{**SPARSE.__dict__, "engine": "threads", "lookahead": "draft"})]
)
@pytest.mark.parametrize("way", ["criterion", "streamer", "layer"])
def test_aborted_requests_leave_nothing_behind(model, config, way):
    """50 aborts, in one cache and in caches of their own: the host tier's memory is where it was before."""
    cache, ids = OasisCache(config, model_config=model.config), models.prompt(60)
    for number in range(50):
        alone = number % 2 == 0
        used = OasisCache(config, model_config=model.config) if alone else cache
        arguments: dict[str, Any] = {}
        handle = None
        if way == "criterion":
            arguments["stopping_criteria"] = StoppingCriteriaList([StopAfter(1 + number % 5)])
        elif way == "streamer":
            arguments["streamer"] = Streamer(1 + number % 5)
        else:
            seen = [number % 9]

            def stop(*_: Any, seen: list[int] = seen) -> None:
                seen[0] -= 1
                if seen[0] < 0:
                    raise Stop

            handle = model.model.layers[number % 4].mlp.register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            greedy(model, ids, used, 12, **arguments)
        if handle is not None:
            handle.remove()
        memory = used.runtime.memory
        if alone:
            del used
        else:
            used.reset()
        assert all_returned(memory)
    assert torch.equal(greedy(model, ids, cache, 8), greedy(model, ids, OasisCache(SPARSE), 8))


def tensors_of(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """All tensors reachable from an object of this library."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple | set):
        items = list(value)
    elif type(value).__module__.startswith("oasis_cache"):
        items = list(getattr(value, "__dict__", {}).values())
    else:
        return []
    return [tensor for item in items for tensor in tensors_of(item, seen)]


@case(110)
@pytest.mark.parametrize("config", [SPARSE, SIMULATED], ids=["sparse", "simulated"])
def test_no_view_keeps_a_large_tensor_alive(model, config):
    """What is kept between steps owns its memory, or lies in a slab of the host tier."""
    cache = OasisCache(config, model_config=model.config, trace=True)
    for rows in (200, 1, 5, 1, 40, 1, 1):
        models.forward(model, models.prompt(rows), cache)
    cache.crop(-12)
    models.forward(model, models.prompt(1), cache)
    slabs = {
        raw.untyped_storage().data_ptr() for layer in oasis_layers(cache) for raw in layer.store.pages._raw.values()
    }
    kept = [tensor for layer in oasis_layers(cache) for tensor in tensors_of(layer, set())]
    assert len(kept) > 20
    buffers = {layer.working_set.kv.untyped_storage().data_ptr() for layer in oasis_layers(cache)}
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in slabs | buffers:
            continue
        assert storage.nbytes() <= max(2 * tensor.numel() * tensor.element_size(), 4096), tuple(tensor.shape)


@case(110)
def test_short_contexts_keep_no_large_tensor_alive(model):
    """Tokens of a prefill are copied: the model's own projections are freed."""
    cache = OasisCache(EXACT)
    keys = torch.randn(1, 2, 500, 16)
    watcher = weakref.ref(keys.untyped_storage())
    cache.update(keys[:, :, :5], keys[:, :, 5:10], 0)
    del keys
    assert watcher() is None


def assert_whole(cache: OasisCache) -> None:
    for layer in cache.layers:
        layer.check_integrity()


@case(112)
@pytest.mark.parametrize("config", [SPARSE, SIMULATED], ids=["sparse", "simulated"])
def test_pages_are_freed_once(model, config):
    """Reset behind a crop to nothing, deletion behind a reset, two copies deleted in either order: counted, and back to zero."""
    for order in range(6):
        cache = OasisCache(config, model_config=model.config)
        memory = cache.runtime.memory
        models.forward(model, models.prompt(90), cache)
        models.forward(model, models.prompt(1), cache)
        if order == 0:
            cache.crop(-91)
            cache.reset()
        elif order == 1:
            cache.reset()
            cache.reset()
        elif order in (2, 3):
            twin = copy.deepcopy(cache)
            twin.crop(-30)
            first, second = (cache, twin) if order == 2 else (twin, cache)
            del cache, twin
            first.close()
            assert_whole(second)
            assert memory.reserved_bytes > 0
            del first, second
            cache = None
        elif order == 4:
            cache.batch_repeat_interleave(3)
            cache.batch_select_indices(torch.tensor([2]))
            assert_whole(cache)
            cache.close()
        else:
            with cache:
                cache.crop(-50)
            cache.close()
        del cache
        assert memory.reserved_bytes == 0, order


@case(113)
def test_caches_die_with_the_outputs_that_hold_them(model):
    """`generate`'s output object holds its cache; without it nothing does: no cycles, so no garbage collector is needed."""
    ids, outputs, watchers = models.prompt(60), [], []
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            cache = OasisCache(SIMULATED if number % 2 else SPARSE)
            outputs.append(models.generate(model, ids, cache, 3))
            watchers.append(weakref.ref(cache))
            del cache
        assert all(watcher() is not None for watcher in watchers)
        outputs.clear()
        assert all(watcher() is None for watcher in watchers)
    finally:
        gc.enable()


@case(113)
def test_long_runs_stay_within_their_bytes(model):
    """Generated tokens do not grow the device's part, index apart."""
    cache = OasisCache(SPARSE, model_config=model.config)
    out = greedy(model, models.prompt(60), cache, 40)
    held = cache.stats().device_bytes
    for _ in range(4):
        out = greedy(model, out, cache, 100)
        assert cache.stats().device_bytes == held
    assert cache.stats().context_tokens == 499


@case(115)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_checkpointed_training_does_not_double_the_cache(config):
    """transformers turns caches off there, with a warning; what would recompute a forward into a cache raises."""
    model = copy.deepcopy(models.build("llama-deep", "sdpa")).requires_grad_(True)
    model.gradient_checkpointing_enable()
    model.train()
    ids, cache = models.prompt(60), OasisCache(config)
    loss = model(ids, labels=ids, **{models.CACHE_ARGUMENT: cache}).loss
    loss.backward()
    assert cache.get_seq_length() == 0
    plain = copy.deepcopy(models.build("llama-deep", "sdpa")).requires_grad_(True).train()
    plain(ids, labels=ids).loss.backward()
    gradients = [each.model.embed_tokens.weight.grad for each in (model, plain)]
    assert_close(*gradients)


@case(115)
def test_training_over_a_filled_cache_is_refused():
    """Without checkpointing a forward in training mode on a long context raises: gradients do not flow through the cache."""
    model = copy.deepcopy(models.build("llama-deep", "sdpa")).requires_grad_(True)
    cache = OasisCache(SPARSE)
    models.forward(model, models.prompt(60), cache)
    model.train()
    with pytest.raises(ValueError, match=r"does not carry gradients: call model\.eval\(\)"):
        model(models.prompt(3), **{models.CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() <= 63
    cache.crop(0)
    assert cache.get_seq_length() == 60


@case(116)
@pytest.mark.parametrize(
    "config", [EXACT, SPARSE, OasisConfig(**{**SPARSE.__dict__, "engine": "threads", "lookahead": "draft"})]
)
def test_threads_with_caches_of_their_own(model, config):
    """Four threads, one model, four caches: each as alone, tokens, logits and counters."""
    prompts = [models.prompt(60, seed=seed) for seed in range(4)]
    before = {name: repr(value) for name, value in vars(model.config).items()}

    def answer(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        cache = OasisCache(config)
        out = models.generate(model, ids, cache, 30)
        stats = cache.stats()
        return (
            out.sequences,
            torch.stack(out.logits),
            stats.misses - stats.late,
        )  # how late copies land is a matter of time

    serial = [answer(ids) for ids in prompts]
    results: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        results[number] = answer(prompts[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, alone in zip(results, serial, strict=True):
        assert torch.equal(mine[0], alone[0]) and torch.equal(mine[1], alone[1]) and mine[2] == alone[2]
    assert {name: repr(value) for name, value in vars(model.config).items()} == before


@case(116)
def test_a_cache_beside_dense_ones(model):
    """Threads with DynamicCache on the same model see nothing of the library."""
    ids, errors = models.prompt(60), []
    expected = models.generate(model, ids, dynamic(model), 20)

    def work(make: Any, check: bool) -> None:
        out = models.generate(model, ids, make(), 20)
        if check and not torch.equal(out.sequences, expected.sequences):
            errors.append(out.sequences)

    jobs = [(lambda: OasisCache(SPARSE), False), (lambda: DynamicCache(config=model.config), True)] * 2
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert_close(torch.stack(models.generate(model, ids, dynamic(model), 20).logits), torch.stack(expected.logits))


@case(116)
@pytest.mark.parametrize("config", [EXACT, SPARSE], ids=["exact", "sparse"])
def test_one_cache_in_two_threads_is_refused(model, config):
    """A second thread that begins a forward in the middle of another is told, before it writes anything; the first one goes on."""
    cache, twin, ids = OasisCache(config), OasisCache(config), models.prompt(61)
    for each in (cache, twin):
        models.forward(model, ids[:, :60], each)
    told: list[str] = []

    def intrude(*_: Any) -> None:
        def work() -> None:
            try:
                models.forward(model, ids[:, 60:], cache)
            except RuntimeError as error:
                told.append(str(error))

        handle.remove()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    handle = model.model.layers[1].mlp.register_forward_pre_hook(intrude)
    out = models.forward(model, ids[:, 60:], cache)
    assert len(told) == 1 and "two threads use this cache at once" in told[0]
    assert torch.equal(out, models.forward(model, ids[:, 60:], twin))
    assert {layer.get_seq_length() for layer in cache.layers} == {61}
    thread = threading.Thread(target=models.forward, args=(model, ids[:, :1], cache))  # one after another is fine
    thread.start()
    thread.join()
    models.forward(model, ids[:, :1], cache)
    assert cache.get_seq_length() == 63
