"""A small OpenAI-style server: POST /v1/chat/completions, GET /v1/models, /metrics and /health, for one model.

    pip install -e ".[server,demo-tools]"
    python examples/server.py --port 8000
    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \
        -d '{"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 40, "stream": true}'

One generation runs at a time, requests wait in the order in which they came, and those beyond `--queue` get status 503. The cache
is kept: a request that begins as the one before did, as the next turn of a chat and the next question about a text do, reads only
what is new (`usage.prompt_tokens_details.cached_tokens`). A client that goes away ends its generation.

The `oasis_cache` member of a response, in the last chunk of a stream, says what the cache did for the request. Without
`temperature` the most likely token is taken each time. What the server does not know is refused, not ignored.

There is neither authentication nor encryption: other machines do not reach it unless `--host` lets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from common import in_words, load, number, positions
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from server_api import ApiError, BodyLimit, ChatRequest, add_error_handlers
from server_engine import Engine, Outcome

from oasis_cache import OasisCache
from oasis_cache.monitoring import CacheCollector
from oasis_cache.packaged import MODEL_NAME, PACKAGED
from oasis_cache.plan import parse_size

MOST_BYTES = 8 << 20  # of a request


def build_app(
    engine: Engine, name: str, new_tokens: int = 512, queue: int = 16, most_bytes: int = MOST_BYTES
) -> FastAPI:
    """The application.

    Args:
        engine: What answers; closed when the application ends.
        name: The model's name to clients.
        new_tokens: Most tokens of an answer to a request that does not say.
        queue: Most requests that wait or run.
        most_bytes: Of a request; a larger one is refused.
    """
    most_positions = positions(engine.model)
    registry = CollectorRegistry()
    registry.register(engine.collector)
    began = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="oasis-cache", lifespan=lifespan, docs_url=None, redoc_url=None)

    add_error_handlers(app)
    app.add_middleware(BodyLimit, most_bytes=most_bytes)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "requests": len(engine.jobs)}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": began, "owned_by": "oasis-cache"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/chat/completions")
    async def complete(request: ChatRequest, connection: Request) -> Response:
        if request.model not in (None, name):
            raise ApiError(
                404, f"the model {request.model!r} does not exist; this server has {name!r}", "model_not_found", "model"
            )
        job = engine.admit(request, queue)
        try:
            await engine.encode(job)
            job.new_tokens = room_for(request, len(job.ids))
        except BaseException:
            engine.dismiss(job)
            raise
        pieces = engine.answer(job)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        try:
            first = await next_of(pieces, connection)  # so that what the prefill raises has a status of its own
            if not request.stream:
                return JSONResponse(await whole(head, first, pieces, connection))
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise ApiError(
                507, f"memory does not suffice for {len(job.ids)} tokens: {error}", "insufficient_memory"
            ) from error
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        return StreamingResponse(events(head, first, pieces, include_usage), media_type="text/event-stream")

    def room_for(request: ChatRequest, tokens: int) -> int:
        """Most tokens of an answer behind a prompt of so many."""
        wanted = request.max_completion_tokens or request.max_tokens
        room = wanted or new_tokens if most_positions is None else most_positions - tokens
        if room < (wanted or 1):
            raise ApiError(
                400,
                f"this model's maximum context length is {most_positions} tokens; the messages take {tokens} and the answer "
                f"{wanted or 1} or more",
                "context_length_exceeded",
                "messages",
            )
        return min(wanted or new_tokens, room)

    return app


async def next_of(pieces: AsyncIterator[str | Outcome], connection: Request) -> str | Outcome:
    """The next piece, unless the client goes away: then the generation ends, or never begins."""
    piece = asyncio.ensure_future(anext(pieces))
    while not (await asyncio.wait({piece}, timeout=1.0))[0]:
        if await connection.is_disconnected():
            piece.cancel()
            raise ApiError(499, "the client went away")
    return piece.result()


async def whole(
    head: dict[str, Any], first: str | Outcome, pieces: AsyncIterator[str | Outcome], connection: Request
) -> dict[str, Any]:
    """The response that is no stream."""
    text, item = "", first
    while isinstance(item, str):
        text += item
        item = await next_of(pieces, connection)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": item.finish_reason}
    body = {"object": "chat.completion", "choices": [choice], "usage": item.usage, "oasis_cache": item.cache}
    return head | body


async def events(
    head: dict[str, Any], first: str | Outcome, pieces: AsyncIterator[str | Outcome], include_usage: bool
) -> AsyncIterator[str]:
    """The response as server-sent events."""

    def event(delta: dict[str, str], finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return f"data: {json.dumps(head | {'object': 'chat.completion.chunk', 'choices': [choice]} | more)}\n\n"

    async with aclosing(pieces):
        yield event({"role": "assistant", "content": ""})
        item = first
        try:
            while isinstance(item, str):
                yield event({"content": item})
                item = await anext(pieces)
        except Exception as error:  # noqa: BLE001 # the status was sent: what is left is an event
            yield f"data: {json.dumps(ApiError(500, f'{type(error).__name__}: {error}').body)}\n\n"
            return
        yield event({}, item.finish_reason, oasis_cache=item.cache)
        if include_usage:
            last = head | {"object": "chat.completion.chunk", "choices": [], "usage": item.usage}
            yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"


class Server(uvicorn.Server):
    """Ends the generation that runs when it is told to stop, and so does not wait long for it."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.engine.closing.set()
        super().handle_exit(sig, frame)


def size(words: str) -> int:
    """The type of an option that is a number of bytes."""
    try:
        return parse_size(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--name", help="the model's name to clients (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    parser.add_argument("--port", type=number(1, 65535), default=8000, help="default: %(default)s")
    parser.add_argument(
        "--queue", type=number(1), default=16, help="most requests that wait or run (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens",
        type=number(1),
        default=512,
        help="of an answer, if a request does not say (default: %(default)s)",
    )
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument("--max-host-memory", type=size, metavar="SIZE", help="cap on host memory, such as 8GiB")
    parser.add_argument("--dtype", default="float32", help="of weights and KV (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="default: a GPU if there is one")
    parser.add_argument(
        "--max-request", type=size, default=MOST_BYTES, metavar="SIZE", help="most bytes of a request (default: 8MiB)"
    )
    options = parser.parse_args(arguments)

    with in_words(parser):
        settings = {"budget": options.budget, "max_host_bytes": options.max_host_memory}
        OasisCache(**settings).close()  # refuses bad settings before anything takes time
        model, tokenizer = load(options.model, options.device, options.dtype)
        engine = Engine(model, tokenizer, CacheCollector(), settings)
    name = options.name or (MODEL_NAME if options.model == PACKAGED else Path(options.model).name)
    app = build_app(engine, name, options.new_tokens, options.queue, options.max_request)
    with suppress(KeyboardInterrupt):
        Server(uvicorn.Config(app, host=options.host, port=options.port), engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
