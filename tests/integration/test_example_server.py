"""examples/server.py: answers, streams, errors, and a cache that is kept between requests."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from oasis_cache.haystack import NEEDLE, QUESTION, text
from oasis_cache.packaged import load_model
from tests.integration.test_examples import example

pytest.importorskip("fastapi", reason="of the `server` extra, which the `test` extra has")

from starlette.testclient import TestClient

from oasis_cache.monitoring import CacheCollector

pytestmark = pytest.mark.slow
NUMBER, NAME = "7306214", "small"
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    return example("server")


@pytest.fixture(scope="module")
def model():
    return load_model()


@pytest.fixture
def engine(server, model):
    return server.Engine(*model, CacheCollector(), {"budget": 128})


@pytest.fixture
def client(server, engine):
    with TestClient(server.build_app(engine, NAME, new_tokens=3, queue=2)) as client:
        yield client


def about(document: str, key: str) -> dict:
    content = f"{document}\n\n{QUESTION.format(key=key).strip()}"
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 20}


def events(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_answers_streams_and_reads_a_text_once(client, model):
    """Two questions about one text, the second of them as a stream: it reads the question only, sparsely."""
    _, tokenizer = model
    parts = (
        text(120, tokenizer, start=200),
        NEEDLE.format(key="lantern", number=NUMBER),
        text(120, tokenizer, start=900),
    )
    response = client.post(PATH, json={**about(" ".join(parts), "lantern"), "model": NAME})
    assert response.status_code == 200
    body = response.json()
    (choice,) = body["choices"]
    assert (body["object"], body["model"], choice["message"]["role"]) == ("chat.completion", NAME, "assistant")
    assert NUMBER in choice["message"]["content"]
    usage, cache = body["usage"], body["oasis_cache"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert cache["tokens"]["prefill"] == usage["prompt_tokens"]
    assert cache["tokens"]["sparse"] == usage["completion_tokens"] - 1
    assert 0 < cache["hit_rate"] <= 1 and cache["bytes_fetched"] > 0

    again = about(" ".join(parts), "violin") | {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post(PATH, json=again)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, counted = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle)
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["oasis_cache"]["tokens"]["prefill"] == 0
    prompt, cached = counted["usage"]["prompt_tokens"], counted["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 250 < cached < prompt < cached + 30
    fed = last["oasis_cache"]["tokens"]["sparse"] + last["oasis_cache"]["tokens"]["streamed"]
    assert fed == prompt - cached + counted["usage"]["completion_tokens"] - 1

    counters = client.get("/metrics").text
    assert 'oasis_cache_requests_total{outcome="done"} 2.0' in counters
    assert "oasis_cache_running 0.0" in counters


def test_a_stream_is_the_same_text_and_stop_strings_end_it(client):
    question = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}],
        "max_tokens": 14,
    }
    whole = client.post(PATH, json=question).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    streamed = events(client.post(PATH, json={**question, "stream": True}))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == whole["message"]["content"]
    stop = whole["message"]["content"].split()[3]
    for stops in (stop, ["never", stop + " " + whole["message"]["content"].split()[4]]):
        ended = client.post(PATH, json={**question, "stop": stops}).json()["choices"][0]
        assert ended["finish_reason"] == "stop"
        assert ended["message"]["content"] == whole["message"]["content"].split(stop)[0]


def test_samples_by_a_seed(client):
    question = {"messages": [{"role": "user", "content": "Name a river."}], "temperature": 1.5, "max_tokens": 6}
    texts = [
        client.post(PATH, json={**question, "seed": seed}).json()["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_an_answer_has_a_limit_if_the_request_has_none(client):
    body = client.post(PATH, json={"messages": [{"role": "user", "content": "Name a river."}]}).json()
    assert body["usage"]["completion_tokens"] == 3


SAID = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize(
    ("status", "body", "message", "code"),
    [
        (400, {"messages": SAID, "tools": []}, "tools: this server does not know it", "unsupported"),
        (400, {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair", None),
        (400, {"messages": []}, "messages: List should have at least 1 item", None),
        (400, {"messages": SAID, "max_tokens": "5"}, "max_tokens: Input should be a valid integer", None),
        (400, {"messages": SAID, "seed": True}, "seed: Input should be a valid integer", None),
        (400, {"messages": SAID, "stream": "yes"}, "stream: Input should be a valid boolean", None),
        (400, {"messages": SAID, "n": 2}, "n: Input should be less than or equal to 1", None),
        (400, {"messages": SAID, "n": True}, "n: Input should be a valid integer", None),
        (400, {"messages": SAID, "top_p": "1"}, "top_p: Input should be a valid number", None),
        (400, {"messages": SAID, "temperature": 3}, "temperature: Input should be less", None),
        (
            400,
            {"messages": SAID, "max_tokens": 9000},
            "maximum context length is 8192 tokens",
            "context_length_exceeded",
        ),
        (400, {"messages": [{"role": "user", "content": "a " * 8200}]}, "maximum context", "context_length_exceeded"),
        (
            404,
            {"messages": SAID, "model": "other"},
            "'other' does not exist; this server has 'small'",
            "model_not_found",
        ),
        (400, None, "must be a JSON object, sent with Content-Type: application/json", None),
        (400, [], "must be a JSON object, sent with Content-Type: application/json", None),
        (400, {"messages": ["hi"]}, "messages.0: Input should be a valid dictionary", None),
        (400, {"messages": None}, "messages: Input should be a valid list", None),
        (400, {}, "messages: Field required", None),
        (400, {"messages": [{"role": "user"}]}, "messages.0.content: Field required", None),
        (
            400,
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.content: Input should be a valid string or: Input should be a valid list",
            None,
        ),
        (400, {"messages": SAID, "stop": [None]}, "stop.0: Input should be a valid string", None),
        (
            400,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type: Input should be 'text'",
            None,
        ),
        (400, {"messages": SAID, "seed": 1 << 70}, "seed: ", None),
        (400, {"messages": SAID, "seed": -(1 << 63) - 1}, "seed: Input should be greater than or equal", None),
    ],
)
def test_refuses_as_clients_expect_it(client, status, body, message, code):
    content = b"{" if body is None else json.dumps(body)
    response = client.post(PATH, content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert message in error["message"]


def test_a_text_that_cannot_fit_is_not_counted(client, engine, monkeypatch):
    monkeypatch.setattr(engine, "most_characters", 100)
    response = client.post(PATH, json={"messages": [{"role": "user", "content": "word " * 25}]})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "characters, which are more tokens in any case" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert 8192 < engine.most_characters < 8 << 20
    assert client.post(PATH, json={"messages": SAID, "max_tokens": 1}).status_code == 200


def test_takes_null_for_what_is_not_set(client):
    nothing = dict.fromkeys(("model", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream", "n"))
    body = client.post(PATH, json={"messages": SAID, "max_tokens": 2, **nothing}).json()
    assert body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 63) - 1])
def test_takes_seeds_of_64_bits(client, seed):
    asked = {"messages": SAID, "temperature": 1.0, "seed": seed, "max_tokens": 1}
    assert client.post(PATH, json=asked).status_code == 200


def test_refuses_a_body_without_end(server, engine):
    """By its bytes, not by what it says of them: a body in chunks has no length before it ends."""
    chunks = iter([b" " * 600] * 3)
    with TestClient(server.build_app(engine, NAME, most_bytes=1000)) as client:
        response = client.post(PATH, content=chunks, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert "the body exceeds 1,000 bytes" in response.json()["error"]["message"]
        assert client.post(PATH, json={"messages": SAID, "max_tokens": 1}).status_code == 200


def test_reading_a_long_text_does_not_stop_others(server, engine, monkeypatch):
    """While one request's text becomes tokens, /health answers, and the request counts as one that waits."""
    begun, go_on, encode = threading.Event(), threading.Event(), engine._encode

    def slow(request):
        begun.set()
        assert go_on.wait(60)
        return encode(request)

    monkeypatch.setattr(engine, "_encode", slow)
    with TestClient(server.build_app(engine, NAME, queue=1)) as client, ThreadPoolExecutor(1) as others:
        first = others.submit(client.post, PATH, json={"messages": SAID, "max_tokens": 1})
        try:
            assert begun.wait(60)
            assert client.get("/health").json() == {"status": "ok", "requests": 1}
            assert client.post(PATH, json={"messages": SAID}).status_code == 503
        finally:
            go_on.set()
        assert first.result(60).status_code == 200
        assert client.get("/health").json()["requests"] == 0


def test_what_is_refused_does_not_stay_in_the_queue(client, engine):
    for _ in range(3):
        assert client.post(PATH, json={"messages": SAID, "max_tokens": 9000}).status_code == 400
    assert not engine.jobs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "foo"], "dtype='foo' must be a floating point type"),
        (["--budget", "100"], "budget=100 must be a multiple of block_size=16"),
        (["--queue", "0"], "argument --queue: 0 must be at least 1"),
        (["--queue", "many"], "argument --queue: invalid number value: 'many'"),
        (["--port", "70000"], "argument --port: 70000 must be at least 1 and at most 65535"),
        (["--max-host-memory", "much"], "argument --max-host-memory: 'much' is no size"),
        (["--model", "./no-such-folder"], "model='./no-such-folder' cannot be loaded: there is no such folder"),
        (["--device", "nowhere"], "device='nowhere' cannot be used here"),
    ],
)
def test_wrong_options_end_in_a_line(server, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        server.main(arguments)
    assert ended.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert message in last


def test_refuses_other_paths_as_json(client):
    assert client.get("/v2").json()["error"]["message"] == "GET /v2: Not Found"
    assert client.get(PATH).status_code == 405
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [NAME]


def test_refuses_what_the_queue_does_not_take(client, engine):
    engine.jobs.update({1, 2})
    response = client.post(PATH, json={"messages": SAID})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert client.get("/health").json() == {"status": "ok", "requests": 2}
    engine.jobs.clear()


def test_memory_that_does_not_suffice_is_an_error_of_one_request(server, model):
    engine = server.Engine(*model, CacheCollector(), {"budget": 128, "max_host_bytes": 1 << 20})
    with TestClient(server.build_app(engine, NAME, new_tokens=3)) as client:
        response = client.post(PATH, json={"messages": [{"role": "user", "content": "word " * 200}]})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (507, "insufficient_memory", "server_error")
        assert "max_host_bytes=1,048,576" in error["message"]
        assert client.post(PATH, json={"messages": SAID}).status_code == 200


def test_a_failure_is_an_error_of_one_request(server, engine, monkeypatch):
    app = server.build_app(engine, NAME, new_tokens=3)
    with TestClient(app, raise_server_exceptions=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "generate", lambda *_, **__: 1 / 0)
            response = client.post(PATH, json={"messages": SAID})
            streamed = client.post(PATH, json={"messages": SAID, "stream": True})
        for failed in (response, streamed):
            error = failed.json()["error"]
            assert (failed.status_code, error["type"]) == (500, "server_error")
            assert error["message"] == "ZeroDivisionError: division by zero"
        assert client.post(PATH, json={"messages": SAID}).status_code == 200
        assert 'oasis_cache_requests_total{outcome="error"} 2.0' in client.get("/metrics").text


def test_a_client_that_goes_away_ends_its_generation(server, engine):
    request = server.ChatRequest(messages=SAID)

    async def admitted(new_tokens: int):
        job = engine.admit(request, most=2)
        await engine.encode(job)
        job.new_tokens = new_tokens
        return job

    async def leave_and_come_back() -> list:
        pieces = engine.answer(await admitted(5000))
        assert isinstance(await anext(pieces), str)
        await pieces.aclose()
        async with asyncio.timeout(300):
            while engine.jobs:
                await asyncio.sleep(0.05)
        return [piece async for piece in engine.answer(await admitted(4))]

    try:
        *texts, outcome = asyncio.run(leave_and_come_back())
        assert "".join(texts)
        assert (outcome.new_tokens, outcome.cached_tokens) == (4, outcome.prompt_tokens - 1)
    finally:
        engine.close()
