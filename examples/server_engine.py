"""What answers in examples/server.py: one model, one kept cache, and one thread in which requests come one after another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch
from common import keep_common, positions
from server_api import ApiError, ChatRequest
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from oasis_cache import OasisCache, OasisStats
from oasis_cache.cache import cache_argument
from oasis_cache.generate import LEAST_TEMPERATURE, is_text
from oasis_cache.monitoring import CacheCollector


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
    ids: list[int] = field(default_factory=list)
    new_tokens: int = 0
    deliver: Callable[[str | Outcome | Exception], None] = lambda _: None
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
        most = positions(model)
        longest = max(map(len, tokenizer.get_vocab()))
        self.most_characters = None if most is None else most * longest
        self.held: list[int] = []  # tokens in the cache
        self.jobs: set[int] = set()  # admitted, and not done
        self.closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generation")
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoding")

    def admit(self, request: ChatRequest, most: int) -> Job:
        """A place among those that wait or run; it is given back by `dismiss`, or at the end of `answer`."""
        if len(self.jobs) >= most:
            raise ApiError(503, f"{most} requests wait already: try again later", "overloaded")
        job = Job(request)
        self.jobs.add(id(job))
        return job

    def dismiss(self, job: Job) -> None:
        job.cancelled.set()
        self.jobs.discard(id(job))

    async def encode(self, job: Job) -> None:
        """Give a job its tokens, beside the event loop: a long text takes a second and more."""
        job.ids = await asyncio.get_running_loop().run_in_executor(self._encoder, self._encode, job.request)

    def _encode(self, request: ChatRequest) -> list[int]:
        try:
            plain = [message.as_template_takes_it() for message in request.messages]
            chat = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        if not is_text(chat):
            raise ApiError(400, "the messages hold half of a surrogate pair, which is no text", param="messages")
        if (
            self.most_characters is not None and len(chat) > self.most_characters
        ):  # no need to count tokens for half a minute
            raise ApiError(
                400,
                f"this model's maximum context length is {positions(self.model)} tokens; the messages have {len(chat)} characters, "
                "which are more tokens in any case",
                "context_length_exceeded",
                "messages",
            )
        return self.tokenizer(chat, add_special_tokens=False).input_ids

    async def answer(self, job: Job) -> AsyncIterator[str | Outcome]:
        """Pieces of text, and at last the outcome. Ends the generation when it is closed."""
        loop, items = asyncio.get_running_loop(), asyncio.Queue()
        job.deliver = lambda item: loop.call_soon_threadsafe(items.put_nowait, item)
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
        self._encoder.shutdown()
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
        kept = keep_common(self.cache, self.held, job.ids)
        self.held = self.held[:kept]
        before = self.cache.stats()
        sender = TextSender(self.tokenizer, request.stops, job.send)
        end = EndsWhen(lambda: sender.stopped or job.cancelled.is_set() or self.closing.is_set())
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature >= LEAST_TEMPERATURE:  # below, the most likely token is all that is left
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
