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
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jinja2
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache, OasisStats
from oasis_cache.cache import cache_argument
from oasis_cache.monitoring import CacheCollector
from oasis_cache.packaged import MODEL_NAME, PACKAGED, load_model
from oasis_cache.plan import parse_size


class Part(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: str


class Message(BaseModel, extra="forbid"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def as_template_takes_it(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """What this server understands of OpenAI's chat completions."""

    model_config = ConfigDict(extra="forbid")

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int = 0
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] = 1
    user: str | None = None  # the caller's own note

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


class ApiError(Exception):
    """An error as OpenAI's clients expect it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Outcome:
    """How a generation ended."""

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    cache: dict[str, Any]

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class Job:
    """One request on its way: what the event loop asks, and what the generating thread sends back."""

    request: ChatRequest
    ids: list[int]
    new_tokens: int
    deliver: Callable[[str | Outcome | Exception], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def send(self, item: str | Outcome | Exception) -> None:
        if not self.cancelled.is_set():  # else nobody waits for it, and its event loop may have ended
            self.deliver(item)


class TextSender(TextStreamer):
    """Sends text as it becomes final, up to the first stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str], send: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stops, self.send = stops, send
        self.held_back = ""  # may be the beginning of a stop string
        self.stopped = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.stopped:
            return
        text = self.held_back + text
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        keep = 0 if stream_end else max(map(len, self.stops), default=1) - 1
        end = min(places) if places else max(0, len(text) - keep)
        self.stopped, self.held_back = bool(places), text[end:]
        if end:
            self.send(text[:end])


class EndsWhen(StoppingCriteria):
    """Ends a generation when `done` says so."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.done(), dtype=torch.bool, device=input_ids.device)


class Engine:
    """One model, one cache, and one thread in which requests are answered one after another."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        collector: CacheCollector,
        settings: dict[str, Any],
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: use a model that was tuned for chats")
        self.model, self.tokenizer, self.collector = model, tokenizer, collector
        self.cache = OasisCache(model_config=model.config, **settings)
        self.held: list[int] = []  # tokens in the cache
        self.jobs: set[int] = set()  # queued or running
        self.closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generation")

    def encode(self, messages: list[Message]) -> list[int]:
        try:
            plain = [message.as_template_takes_it() for message in messages]
            chat = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.tokenizer(chat, add_special_tokens=False).input_ids

    async def answer(self, request: ChatRequest, ids: list[int], new_tokens: int) -> AsyncIterator[str | Outcome]:
        """Pieces of text, and at last the outcome. Ends the generation when it is closed."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue()
        job = Job(request, ids, new_tokens, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        self.jobs.add(id(job))
        self._thread.submit(self._run, job)
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, Outcome):
                    return
        finally:
            job.cancelled.set()

    def close(self) -> None:
        self.closing.set()
        self._thread.shutdown()
        self.cache.close()

    def _run(self, job: Job) -> None:
        """In the generating thread: one job."""
        try:
            if self.closing.is_set():
                raise ApiError(503, "the server is shutting down", "overloaded")
            if not job.cancelled.is_set():
                job.send(self._generate(job))
        except Exception as error:  # noqa: BLE001 # it is the request's, in the event loop
            self.cache.reset()
            self.held = []
            job.send(error)
        finally:
            self.jobs.discard(id(job))

    def _generate(self, job: Job) -> Outcome:
        request = job.request
        started = time.perf_counter()
        kept = self._keep_common(job.ids)
        before = self.cache.stats()
        sender = TextSender(self.tokenizer, request.stops, job.send)
        end = EndsWhen(lambda: sender.stopped or job.cancelled.is_set() or self.closing.is_set())
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            torch.manual_seed(request.seed)
            sampling = {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p}
        ids = torch.tensor([job.ids], device=self.model.device)
        with self.collector.request(self.cache):
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=sender,
                stopping_criteria=StoppingCriteriaList([end]),
                max_new_tokens=job.new_tokens,
                **sampling,
                **cache_argument(self.model, self.cache),
            )
        self.held = output[0, : self.cache.get_seq_length()].tolist()
        new = output.shape[1] - len(job.ids)
        full = new == job.new_tokens and not sender.stopped and int(output[0, -1]) not in self._eos_ids()
        report = difference(before, self.cache.stats()) | {"seconds": time.perf_counter() - started}
        return Outcome("length" if full else "stop", len(job.ids), kept, new, report)

    def _keep_common(self, ids: list[int]) -> int:
        """Take back what the cache holds beyond its common beginning with `ids`, whose last token is to be fed; its length."""
        limit = min(len(self.held), len(ids) - 1)
        common = next((number for number in range(limit) if self.held[number] != ids[number]), limit)
        try:
            self.cache.crop(common - len(self.held))
        except RuntimeError:  # windows and recurrent states cannot go back: everything is read again
            self.cache.reset()
            common = 0
        self.held = self.held[:common]
        return common

    def _eos_ids(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        return ids if isinstance(ids, list) else [ids]


def difference(before: OasisStats, after: OasisStats) -> dict[str, Any]:
    """What a cache did between two looks at it, and what it holds at the second."""
    asked = after.hits + after.misses - before.hits - before.misses
    return {
        "tokens": {phase: after.tokens[phase] - before.tokens[phase] for phase in after.tokens},
        "forward_seconds": {phase: after.seconds[phase] - before.seconds[phase] for phase in after.seconds},
        "hit_rate": (after.hits - before.hits) / asked if asked else None,
        "bytes_fetched": after.bytes_fetched - before.bytes_fetched,
        "stall_seconds": after.stall_seconds - before.stall_seconds,
        "fallback_steps": after.fallback_steps - before.fallback_steps,
        "context_tokens": after.context_tokens,
        "device_bytes": after.device_bytes + after.other_device_bytes + after.index_bytes,
        "host_bytes": after.host_bytes,
        "warnings": list(after.warnings),
    }


def build_app(engine: Engine, name: str, new_tokens: int = 512, queue: int = 16) -> FastAPI:
    """The application.

    Args:
        engine: What answers; closed when the application ends.
        name: The model's name to clients.
        new_tokens: Most tokens of an answer to a request that does not say.
        queue: Most requests that wait or run.
    """
    positions = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
    registry = CollectorRegistry()
    registry.register(engine.collector)
    began = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="oasis-cache", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def refuse_request(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) if isinstance(first["loc"][-1], str) else ""
        unknown = first["type"] == "extra_forbidden"
        message = f"{place}: {'this server does not know it' if unknown else first['msg']}"
        if not place:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        return await refuse(request, ApiError(400, message, "unsupported" if unknown else None, place or None))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, ApiError(500, f"{type(error).__name__}: {error}"))

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
        ids = engine.encode(request.messages)
        wanted = request.max_completion_tokens or request.max_tokens
        room = wanted or new_tokens if positions is None else positions - len(ids)
        if room < (wanted or 1):
            raise ApiError(
                400,
                f"this model's maximum context length is {positions} tokens; the messages take {len(ids)} and the answer "
                f"{wanted or 1} or more",
                "context_length_exceeded",
                "messages",
            )
        if len(engine.jobs) >= queue:
            raise ApiError(503, f"{queue} requests wait already: try again later", "overloaded")
        pieces = engine.answer(request, ids, min(wanted or new_tokens, room))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        try:
            first = await next_of(pieces, connection)  # so that what the prefill raises has a status of its own
            if not request.stream:
                return JSONResponse(await whole(head, first, pieces, connection))
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise ApiError(
                507, f"memory does not suffice for {len(ids)} tokens: {error}", "insufficient_memory"
            ) from error
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        return StreamingResponse(events(head, first, pieces, include_usage), media_type="text/event-stream")

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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=PACKAGED, help="folder or hub name (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--name", help="the model's name to clients (default: the last part of --model)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--queue", type=int, default=16, help="most requests that wait or run (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=512, help="of an answer, if a request does not say (default: %(default)s)"
    )
    parser.add_argument("--budget", type=int, default=2048, help="tokens that a step reads (default: %(default)s)")
    parser.add_argument("--max-host-memory", type=parse_size, metavar="SIZE", help="cap on host memory, such as 8GiB")
    parser.add_argument("--dtype", default="float32", help="of weights and KV (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    transformers_logging.disable_progress_bar()
    model, tokenizer = load_model(options.model, getattr(torch, options.dtype), options.device)
    settings = {"budget": options.budget, "max_host_bytes": options.max_host_memory}
    name = options.name or (MODEL_NAME if options.model == PACKAGED else Path(options.model).name)
    engine = Engine(model, tokenizer, CacheCollector(), settings)
    app = build_app(engine, name, options.new_tokens, options.queue)
    with suppress(KeyboardInterrupt):
        Server(uvicorn.Config(app, host=options.host, port=options.port), engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
