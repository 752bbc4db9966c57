"""A stream that is kept busy, and a library whose streams do not wait for each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

CYCLES_PER_SECOND = 2_000_000_000  # about the clock of a large GPU; a slower one stalls for longer


def stall(seconds: float) -> None:
    """Keep the current stream busy, without the host."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


@contextlib.contextmanager
def without_waits() -> Iterator[None]:
    """Inside, no stream waits for another one: what the controls of the race tests run under."""

    def nothing(*_: object, **__: object) -> None:
        return None

    with (
        mock.patch.object(torch.cuda.Stream, "wait_event", nothing),
        mock.patch.object(torch.cuda.Stream, "wait_stream", nothing),
        mock.patch.object(torch.cuda.Event, "wait", nothing),
    ):
        yield
