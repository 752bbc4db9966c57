"""Hand-off from a prefill to a decode process: the tokens of one process, each block crossing once, and nothing that hangs."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("zmq", reason="of the `handoff` extra, which the `test` extra has")

from oasis_cache import OasisCache
from oasis_cache.handoff import HandoffError, StateError, receive, serve
from oasis_cache.handoff.messages import pack
from oasis_cache.handoff.state import describe
from oasis_cache.layer import OasisLayer
from tests import models
from tests.integration import prefiller
from tests.integration.prefiller import CASES, TOKENS, model_of, prefilled, sequences
from tests.integration.survival import SPARSE, all_returned

TIMEOUT = 20.0


@contextmanager
def prefill_process(*cases):
    """A real process that serves cases: the process and its addresses."""
    command = [sys.executable, "-m", prefiller.__name__, *cases]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def addresses():
    with prefill_process(*CASES) as (_, served):
        yield served


def going_on(case, received, tokens=TOKENS - 2):
    """Generate with a received cache: sequences."""
    return models.generate(model_of(case), received.inputs["input_ids"], received.cache, tokens,
                           attention_mask=received.inputs["attention_mask"]).sequences  # fmt: skip


@pytest.mark.slow  # starts a process
@pytest.mark.contract
@pytest.mark.parametrize("options", [{}, {"engine": "simulated", "lookahead": "draft", "max_fetch": 2}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_another_process_goes_on_bit_for_bit(case, options, addresses):
    model = model_of(case)
    with OasisCache(SPARSE, model_config=model.config) as alone:
        expected = sequences(case, TOKENS, alone)["input_ids"]
        whole = [layer.dense_kv() for layer in alone.layers if isinstance(layer, OasisLayer)]
    received = receive(addresses[case], model_config=model.config, timeout=TIMEOUT, **options)
    with received.cache as cache:
        layers = [layer for layer in cache.layers if isinstance(layer, OasisLayer)]
        first = received.peer.pages_received
        slots = sum(layer.working_set.block_of_slot.unique().numel() for layer in layers)
        assert slots <= first <= slots * len(CASES[case][1]), "the working set, and nothing else"
        for layer in layers:
            layer.check_integrity()
        assert torch.equal(going_on(case, received), expected)
        assert cache.stats().fallback_steps == 0
        for layer, kv in zip(layers, whole, strict=True):
            assert torch.equal(layer.dense_kv(), kv)
            layer.check_integrity()
        # all have been read now, most of them several times: each came once
        assert received.peer.pages_received == received.peer.num_pages
        assert not received.peer.missing()
        assert first < received.peer.num_pages or not layers


def test_pages_that_rows_share_cross_once():
    """Beams and repeated rows share pages: they have a key in common."""
    case = "llama"
    cache, inputs = prefilled(case)
    cache.batch_repeat_interleave(3)
    model = model_of(case)
    distinct = sum(layer.working_set.window_start for layer in cache.layers) // SPARSE.block_size
    with serve(cache, {"input_ids": inputs["input_ids"].repeat(3, 1)}) as server, cache:
        received = receive(server.address, model_config=model.config, timeout=TIMEOUT)
        with received.cache:
            runs = [models.generate(model, received.inputs["input_ids"], each, 8) for each in (received.cache, cache)]
            assert torch.equal(runs[0].sequences, runs[1].sequences)
            for layer, there in zip(received.cache.layers, cache.layers, strict=True):
                assert torch.equal(layer.dense_kv(), there.dense_kv())
            assert server.pages_sent == received.peer.pages_received == received.peer.num_pages == distinct


def test_a_context_within_the_budget_comes_whole():
    model = model_of("llama")
    with OasisCache(budget=1024, model_config=model.config) as cache:
        inputs = sequences("llama", 2, cache)
        with serve(cache, inputs) as server:
            received = receive(server.address, model_config=model.config, timeout=TIMEOUT)
    with received.cache, OasisCache(budget=1024, model_config=model.config) as alone:
        assert received.peer.num_pages == 0
        got = going_on("llama", received)  # the server is gone: nothing more was to come
        assert torch.equal(got, sequences("llama", TOKENS, alone)["input_ids"])


def test_without_a_step_behind_the_prefill_all_come_on_demand():
    model, ids = model_of("llama"), models.prompt(120)
    with OasisCache(SPARSE, model_config=model.config) as alone, OasisCache(SPARSE, model_config=model.config) as cache:
        models.forward(model, ids, alone)
        models.forward(model, ids, cache)
        with serve(cache) as server:
            received = receive(server.address, model_config=model.config, timeout=TIMEOUT)
            assert received.peer.pages_received == 0
            for seed in range(3):
                new = models.prompt(1, seed=seed)
                assert torch.equal(models.forward(model, new, received.cache), models.forward(model, new, alone))
            received.cache.close()
            assert server.wait(TIMEOUT), "closing says that nothing more is asked for"


def test_the_prefill_cache_may_go_on_and_close():
    """What is served is the cache as it was; copies of what was received share the connection."""
    cache, inputs = prefilled("llama")
    server = serve(cache, inputs)
    models.forward(model_of("llama"), models.prompt(40), cache)
    memory = cache.runtime.memory
    cache.close()
    with OasisCache(SPARSE, model_config=model_of("llama").config) as alone:
        expected = sequences("llama", TOKENS, alone)["input_ids"]
    received = receive(server.address, model_config=model_of("llama").config, timeout=TIMEOUT)
    twin = received._replace(cache=copy.deepcopy(received.cache))
    assert torch.equal(going_on("llama", received), expected)
    received.cache.close()
    assert torch.equal(going_on("llama", twin), expected)
    twin.cache.close()
    server.close()
    del cache, server
    assert all_returned(memory)


@pytest.mark.parametrize("tier", ["int8", "spilled", "minmax"])
def test_other_tiers_and_indexes_go_along(tier, tmp_path):
    """Encoded pages cross as they are, and spilled ones from the disk, even when the cache that spilled them has closed."""
    model = model_of("llama")
    options = {
        "int8": {"tier_dtype": "int8"},
        "minmax": {"index": "minmax"},
        "spilled": {"spill": str(tmp_path), "max_host_bytes": 20_000},
    }[tier]
    with OasisCache(SPARSE, model_config=model.config, **options) as alone:
        expected = sequences("llama", TOKENS, alone)["input_ids"]
    cache, inputs = prefilled("llama", **options)
    if tier == "spilled":
        assert cache.stats().disk_bytes > 0
    with serve(cache, inputs) as server:
        cache.close()
        received = receive(server.address, model_config=model.config, timeout=TIMEOUT)
        with received.cache:
            assert torch.equal(going_on("llama", received), expected)
            for layer in received.cache.layers:
                layer.dense_kv()
            assert received.peer.pages_received == received.peer.num_pages > 0
    assert not list(tmp_path.iterdir())


def test_bounded_host_memory_asks_again():
    cache, inputs = prefilled("llama")
    model = model_of("llama")
    with OasisCache(SPARSE, model_config=model.config) as alone:
        expected = sequences("llama", TOKENS, alone)["input_ids"]
    page = cache.layers[0].store.used_bytes // cache.layers[0].store.num_blocks
    with serve(cache, inputs) as server, cache:
        cap = 24 * page  # of 36 pages
        received = receive(server.address, model_config=model.config, timeout=TIMEOUT, max_host_bytes=cap)
        with received.cache:
            assert torch.equal(going_on("llama", received), expected)
            assert received.cache.runtime.memory.reserved_bytes <= cap
            assert received.peer.pages_received > received.peer.num_pages


# --- A peer that is lost -------------------------------------------------------------------------------------------------


def decode_until_lost(case, received, steps=200):
    """Feed tokens until a block is missing: the error, and the steps before it."""
    model = model_of(case)
    rows = received.inputs["input_ids"].shape[0]
    for step in range(steps):
        try:
            models.forward(model, models.prompt(1, rows, seed=step), received.cache)
        except HandoffError as error:
            return error, step
    pytest.fail("nothing was missed")


@pytest.mark.slow  # starts a process
def test_a_stopped_and_a_killed_process_end_in_errors_that_name_what_is_missing():
    model = model_of("llama")
    with prefill_process("llama") as (process, served):
        received, other = (receive(served["llama"], model_config=model.config, timeout=TIMEOUT) for _ in range(2))
        received.peer.timeout = other.peer.timeout = 1.0
        before = {layer: set(blocks) for layer, blocks in received.peer.missing().items()}
        process.send_signal(signal.SIGSTOP)  # alive, and silent
        started = time.monotonic()
        error, step = decode_until_lost("llama", received)
        assert 1.0 <= time.monotonic() - started < 10
        assert error.missing
        assert all(set(blocks) <= before[layer] for layer, blocks in error.missing.items())
        layer, blocks = next(iter(error.missing.items()))
        assert f"layer {layer}: blocks {blocks[0]}" in str(error)
        assert "did not answer within 1.0 s" in str(error)
        process.kill()
        started = time.monotonic()
        killed, _ = decode_until_lost("llama", other)
        assert killed.missing
        assert time.monotonic() - started < 10
        started = time.monotonic()
        received.cache.crop(0)  # the cache is as it was before the forward that failed
        assert int(received.cache.get_seq_length()) == received.inputs["input_ids"].shape[1] - 1 + step
        again, _ = decode_until_lost("llama", received, 1)
        assert again.missing
        with pytest.raises(HandoffError, match="did not answer within 0\\.5 s"):
            receive(served["llama"], model_config=model.config, timeout=0.5)
        received.cache.reset()
        models.forward(model, models.prompt(80), received.cache)
        models.forward(model, models.prompt(1), received.cache)
        assert time.monotonic() - started < 10, "a lost peer is not waited for again"
        received.cache.close()
        other.cache.close()


def test_what_has_come_can_be_used_when_the_server_has_closed():
    cache, inputs = prefilled("llama")
    model = model_of("llama")
    with OasisCache(SPARSE, model_config=model.config) as alone:
        expected = sequences("llama", TOKENS, alone)["input_ids"]
    with cache, serve(cache, inputs) as server:
        received = receive(server.address, model_config=model.config, timeout=TIMEOUT)
        for layer in received.cache.layers:
            layer.dense_kv()
        assert server.wait(TIMEOUT), "all pages were sent"
    received.peer.timeout = 0.5
    with received.cache:
        assert torch.equal(going_on("llama", received), expected)


def test_a_lost_peer_does_not_hold_up_predictions():
    """A prefetch that fails is called off; only a block that attention needs is an error."""
    cache, inputs = prefilled("llama")
    options = {"engine": "threads", "lookahead": "draft", "max_fetch": None}
    with cache, serve(cache, inputs) as server:
        received = receive(server.address, model_config=model_of("llama").config, timeout=TIMEOUT, **options)
    received.peer.timeout = 0.2
    with received.cache:
        error, _ = decode_until_lost("llama", received)
        assert error.missing


def test_a_forked_process_is_told_that_it_has_no_connection():
    """Nothing answers there, and libzmq would wait without end."""
    cache, inputs = prefilled("llama")
    with cache, serve(cache, inputs) as server:
        received = receive(server.address, model_config=model_of("llama").config, timeout=TIMEOUT)
        with received.cache:
            received.peer._pid += 1  # as if this were a child of the process that made it
            received.peer.close()
            with pytest.raises(HandoffError, match="forked process"):
                received.peer.ask_state()
            received.peer._pid -= 1
            received.peer.ask_state()


# --- What is refused ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served():
    cache, inputs = prefilled("llama")
    with serve(cache, inputs) as server:
        yield cache, server
    cache.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers=2 (here 3)"),
        ({"rope_theta": 5e5}, "rope"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=2 (here 4)"),
    ],
)
def test_another_model_is_refused_with_what_differs(options, named, served):
    with pytest.raises(StateError, match="another model") as raised:
        receive(served[1].address, model_config=models.build("llama", **options).config, timeout=TIMEOUT)
    assert named in str(raised.value)
    with pytest.raises(StateError, match="model_type='llama' \\(here 'qwen3'\\)"):
        receive(served[1].address, model_config=models.build("qwen3").config, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"budget": 80}, "budget come with the cache"),
        ({"badget": 80}, "unknown option 'badget'"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_host_bytes": -1}, "max_host_bytes=-1"),
    ],
)
def test_options_are_checked_before_anything_is_asked(overrides, message):
    with pytest.raises(ValueError, match=message):
        receive("tcp://127.0.0.1:9", model_config=model_of("llama").config, **{"timeout": 1, **overrides})


def test_caches_that_cannot_be_served(served):
    cache, server = served
    with pytest.raises(ValueError, match="holds no tokens"):
        serve(OasisCache(model_config=cache.model_config))
    with pytest.raises(ValueError, match="more than the 151 tokens"):
        serve(cache, {"input_ids": models.prompt(151)})
    with pytest.raises(ValueError, match=r"inputs\['input_ids'\] must be a tensor"):
        serve(cache, {"input_ids": [1, 2]})
    with pytest.raises(ValueError, match="cannot be listened at"):
        serve(cache, address=server.address)
    cache.layers[0].crop(-1)
    with pytest.raises(RuntimeError, match="interrupted"):
        serve(cache)
    by_hand = OasisCache()
    by_hand.update(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), 0)
    with pytest.raises(ValueError, match="does not know its model"):
        serve(by_hand)


def test_strangers_do_not_end_the_service(served):
    zmq = pytest.importorskip("zmq")
    cache, server = served
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(server.address)
        number = b"12345678"
        good = b'{"protocol":"oasis-cache hand-off 1","ask":"pages"}'
        for frames in ([b"hello"], [b""], [pack(number, good), b""], [number, good, b"abc"]):
            stranger.send_multipart(frames)
        for message in (
            number,
            number + b"\xff" * 4 + good,
            pack(number, b"{"),
            pack(number, b"[" * 100000),
            pack(number, b'{"protocol":"other"}'),
            pack(number, b'{"protocol":"oasis-cache hand-off 1","ask":"everything"}'),
            pack(number, good, [b"abc"]),
            pack(number, good, [(10**6).to_bytes(8, "little")]),
            pack(number, good, [(-1).to_bytes(8, "little", signed=True)]),
        ):
            stranger.send(message)
            assert stranger.poll(5000), message[:40]
            assert b'"error"' in stranger.recv()
    received = receive(server.address, model_config=cache.model_config, timeout=TIMEOUT)
    received.cache.close()


def test_an_answer_is_one_frame(served):
    """libzmq aborts when a connection breaks off between two frames while the socket that sends them closes."""
    zmq = pytest.importorskip("zmq")
    _, server = served
    with zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(server.address)
        keys = b"".join(key.to_bytes(8, "little") for key in range(server.num_pages))
        for ask, body in (("state", b""), ("pages", keys), ("nothing", b"")):
            header = json.dumps({"protocol": "oasis-cache hand-off 1", "ask": ask}).encode()
            asking.send(pack(b"12345678", header, [body]))
            assert asking.poll(5000)
            assert len(asking.recv_multipart()) == 1


@contextmanager
def impostor(*replies):
    """Answers requests with given headers and bodies, one list after another: its address."""
    import threading

    zmq = pytest.importorskip("zmq")
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")

    def answer():
        for reply in replies:
            if not socket.poll(3000):
                return
            peer, message = socket.recv_multipart()
            socket.send_multipart([peer, pack(message[:8], reply[0], reply[1:])])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
    finally:
        thread.join()
        socket.close(linger=0)


def honest_state(server):
    """The header and body with which a server describes its cache."""
    return [bytes(part) for part in server._state]


@pytest.mark.parametrize(
    "damage",
    [
        "header",
        "no cache",
        "cut tensors",
        "flipped tensors",
        "missing tensor",
        "other type",
        "other kind",
        "no number",
        "too few layers",
    ],
)
def test_a_damaged_state_is_refused(damage, served):
    cache, server = served
    header, blob = honest_state(server)
    fields = json.loads(header)
    layers = fields["state"]["layers"]
    if damage == "header":
        header = header[: len(header) // 2]
    elif damage == "no cache":
        header = json.dumps({"protocol": fields["protocol"], "num_pages": 3}).encode()
    elif damage == "cut tensors":
        blob = blob[:-100]
    elif damage == "flipped tensors":
        blob = blob[:9] + bytes([blob[9] ^ 255]) + blob[10:]
    elif damage == "missing tensor":
        blob = blob.replace(b'"0.window"', b'"0.widnow"')
    elif damage == "other type":
        layers[1]["shape"]["dtype"] = "float16"
        header = json.dumps(fields).encode()
    elif damage == "other kind":
        layers[0]["kind"] = "DynamicLayer"
        header = json.dumps(fields).encode()
    elif damage == "no number":
        layers[0]["pages"]["window_start"] = "24"
        header = json.dumps(fields).encode()
    else:
        del layers[1]
        header = json.dumps(fields).encode()
    with impostor([header, blob]) as address, pytest.raises((HandoffError, StateError)):
        receive(address, model_config=cache.model_config, timeout=2.0)


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 0), (0, -1), (0, 1)])
def test_pages_of_a_wrong_number_or_size_are_refused(count, size, served):
    """As many pages more than were asked for, of so many bytes more than a page has; (0, 0) is what a true server does."""
    cache, server = served
    layers = [layer.working_set.block_of_slot.unique().numel() for layer in cache.layers]
    page = b"x" * (cache.layers[0].store.format.page_bytes + size)
    protocol = "oasis-cache hand-off 1"
    replies = [
        [json.dumps({"protocol": protocol, "pages": asked + count}).encode(), *[page] * (asked + count)]
        for asked in layers
    ]
    with impostor(honest_state(server), *replies) as address:
        if (count, size) == (0, 0):
            receive(address, model_config=cache.model_config, timeout=2.0).cache.close()
        else:
            with pytest.raises(HandoffError, match="pages where" if count else "bytes as"):
                receive(address, model_config=cache.model_config, timeout=2.0)


def test_every_bit_of_the_description_is_refused_or_harmless(served):
    """Values of the JSON description replaced one by one: a cache is made that can be used, or an error says why not."""
    cache, server = served
    header, blob = honest_state(server)
    fields = json.loads(header)
    for path in (
        ("length",),
        ("shape", "batch"),
        ("shape", "kv_heads"),
        ("shape", "latent"),
        ("pages", "num_blocks"),
        ("pages", "clock"),
    ):
        for value in (-1, 0, 7, 10**6, None, "x", 1.5, True):
            changed = copy.deepcopy(fields)
            part = changed["state"]["layers"][0]
            for name in path[:-1]:
                part = part[name]
            part[path[-1]] = value
            if path == ("pages", "clock") and isinstance(value, int) and value >= 0:
                continue  # any number will do
            if value is True and path == ("shape", "latent"):
                continue  # as wide as the keys and values of one head: the index is not, but for a clock this one says nothing
            with impostor([json.dumps(changed).encode(), blob]) as address, pytest.raises((HandoffError, StateError)):
                receive(address, model_config=cache.model_config, timeout=0.5)


def test_a_state_says_all_and_shares_nothing(served):
    cache, _ = served
    described, tensors = describe(cache)
    assert json.loads(json.dumps(described)) == described
    for tensor in tensors.values():
        tensor.fill_(0)
    assert cache.layers[0].working_set.window.abs().sum() > 0
