"""What examples/server.py is asked and what it refuses: requests and errors as OpenAI's clients know them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

BRANCHES = ("str", "list[str]", "list[Part]")  # how pydantic names the ways to write `content` and `stop`


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
    include_usage: bool = Field(False, strict=True)


class ChatRequest(BaseModel):
    """What this server understands of OpenAI's chat completions."""

    model_config = ConfigDict(extra="forbid")

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    # Strictly, as OpenAI has it: "5" and true are no numbers, 1 and "yes" no truth values.
    max_tokens: int | None = Field(None, ge=1, strict=True)
    max_completion_tokens: int | None = Field(None, ge=1, strict=True)
    temperature: float = Field(0.0, ge=0.0, le=2.0, strict=True)
    top_p: float = Field(1.0, gt=0.0, le=1.0, strict=True)
    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63, strict=True)
    stop: str | list[str] | None = None
    stream: bool = Field(False, strict=True)
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=1, strict=True)
    user: str | None = None  # the caller's own note

    @model_validator(mode="before")
    @classmethod
    def take_null_for_left_out(cls, data: Any) -> Any:
        """As OpenAI's own clients write what they do not set."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name == "messages"}

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


def add_error_handlers(app: FastAPI) -> None:
    """Every error is JSON of one shape, whatever raised it."""

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def refuse_request(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        if errors[0]["type"] == "json_invalid" or len(errors[0]["loc"]) == 1:
            message = "the body must be a JSON object, sent with Content-Type: application/json"
            return await refuse(request, ApiError(400, message))
        places = [[str(part) for part in each["loc"][1:] if part not in BRANCHES] for each in errors]
        deepest = max(places, key=len)  # of the ways to write it, the one that was meant
        found = [each for place, each in zip(places, errors, strict=True) if place == deepest]
        unknown = found[0]["type"] == "extra_forbidden"
        why = "this server does not know it" if unknown else " or: ".join(dict.fromkeys(each["msg"] for each in found))
        place = ".".join(deepest)
        return await refuse(request, ApiError(400, f"{place}: {why}", "unsupported" if unknown else None, place))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, ApiError(500, f"{type(error).__name__}: {error}"))


class BodyLimit:
    """Refuses requests of more bytes, before they are held in memory."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self.app, self.most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def counted() -> AsgiMessage:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most_bytes:
                raise HTTPException(413, f"the body exceeds {self.most_bytes:,} bytes")
            return message

        await self.app(scope, counted, send)
