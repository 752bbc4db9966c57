"""What prefill and decode processes say to each other: a JSON header and raw bytes behind it, each a frame of a ZeroMQ message.

A request is [number, header, body], a reply [the same number, header, body...]. Tensors travel as a safetensors file in memory,
pages as they lie in host memory. Nothing is unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

PROTOCOL = "oasis-cache hand-off 1"
ASK_STATE, ASK_PAGES, SAY_DONE = "state", "pages", "done"


class HandoffError(OSError):
    """The other process is gone, did not answer in time, or said something that is no part of a hand-off.

    Attributes:
        missing: The blocks that were asked for and did not come, by layer number.
    """

    def __init__(self, message: str, missing: dict[int, list[int]] | None = None) -> None:
        super().__init__(message)
        self.missing = missing or {}


def pack_header(**fields: Any) -> bytes:
    """A header of the current protocol."""
    return json.dumps({"protocol": PROTOCOL, **fields}, separators=(",", ":"), allow_nan=False).encode()


def read_header(frame: bytes) -> dict[str, Any]:
    """The header's fields.

    Raises:
        HandoffError: The frame is no header, or one of another protocol.
    """
    try:
        header = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise HandoffError(f"{bytes(frame[:40])!r} is no header of a hand-off: {error}") from error
    if not isinstance(header, dict) or header.get("protocol") != PROTOCOL:
        found = header.get("protocol") if isinstance(header, dict) else header
        raise HandoffError(f"the other side speaks {found!r:.60}, this one {PROTOCOL!r}")
    return header


def pack_tensors(tensors: dict[str, torch.Tensor]) -> bytes:
    """Contiguous tensors in host memory as one frame."""
    return save(tensors)


def read_tensors(frame: bytes) -> dict[str, torch.Tensor]:
    """What `pack_tensors` packed.

    Raises:
        HandoffError: The frame is damaged.
    """
    try:
        return load(frame)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise HandoffError(f"the tensors of a hand-off are damaged: {error}") from error
