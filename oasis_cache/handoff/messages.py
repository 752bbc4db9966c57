"""What prefill and decode processes say to each other: a number, a JSON header and raw bytes, in one frame of ZeroMQ.

A reply has the number of its request. Tensors travel as a safetensors file in memory, pages one behind the other as they lie in
host memory. Nothing is unpickled.

One frame, because libzmq (4.3.5, session_base.cpp, `clean_pipes`) aborts the process when a connection breaks off between two
frames of a message while the socket that sends it closes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

PROTOCOL = "oasis-cache hand-off 1"
NUMBER_BYTES = 8
_LENGTH_BYTES = 4
ASK_STATE, ASK_PAGES, SAY_DONE = "state", "pages", "done"


class HandoffError(OSError):
    """The other process is gone, did not answer in time, or said something that is no part of a hand-off.

    Attributes:
        missing: The blocks that were asked for and did not come, by layer number.
    """

    def __init__(self, message: str, missing: dict[int, list[int]] | None = None) -> None:
        super().__init__(message)
        self.missing = missing or {}


def pack(number: bytes, header: bytes, body: Sequence[bytes | memoryview] = ()) -> bytes:
    """A message: `number` of 8 bytes, then the length of the header, the header, and the parts of the body without a gap."""
    assert len(number) == NUMBER_BYTES
    return b"".join([number, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *body])


def unpack(message: bytes) -> tuple[bytes, memoryview]:
    """Header and body of a message that has a number.

    Raises:
        HandoffError: It is cut short.
    """
    start = NUMBER_BYTES + _LENGTH_BYTES
    stop = start + int.from_bytes(message[NUMBER_BYTES:start], "little")
    if not start <= stop <= len(message):
        raise HandoffError(f"a message of {len(message)} bytes is no part of a hand-off")
    return message[start:stop], memoryview(message)[stop:]


def pack_header(**fields: Any) -> bytes:
    """A header of the current protocol."""
    return json.dumps({"protocol": PROTOCOL, **fields}, separators=(",", ":"), allow_nan=False).encode()


def read_header(text: bytes) -> dict[str, Any]:
    """The header's fields.

    Raises:
        HandoffError: It is no header, or one of another protocol.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HandoffError(f"{text[:40]!r} is no header of a hand-off: {error}") from error
    if not isinstance(header, dict) or header.get("protocol") != PROTOCOL:
        found = header.get("protocol") if isinstance(header, dict) else header
        raise HandoffError(f"the other side speaks {found!r:.60}, this one {PROTOCOL!r}")
    return header


def pack_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """Contiguous tensors in host memory as bytes."""
    return save(tensors)


def read_tensors(content: bytes) -> dict[str, torch.Tensor]:
    """What `pack_tensors` packed.

    Raises:
        HandoffError: It is damaged.
    """
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise HandoffError(f"the tensors of a hand-off are damaged: {error}") from error
