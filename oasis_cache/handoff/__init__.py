"""From a prefill process to a decode process: the working set first, everything else when attention asks for it.

The prefill process fills a cache and serves it:

    sequences = model.generate(**inputs, past_key_values=cache, max_new_tokens=2)   # the first one's query chooses the blocks
    with handoff.serve(cache, {"input_ids": sequences}, "tcp://127.0.0.1:5555") as server:
        server.wait()

The decode process starts from the working set, the block index and the newest tokens, and goes on:

    cache, inputs, peer = handoff.receive("tcp://127.0.0.1:5555", model_config=model.config)
    model.generate(**inputs, past_key_values=cache)

Messages travel by ZeroMQ (`pip install -e ".[handoff]"`, in a clone), neither encrypted nor authenticated: listen on a network
that is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

try:
    import zmq  # noqa: F401 # named here, so that the message says what to install
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('oasis_cache.handoff needs pyzmq: pip install -e ".[handoff]", in a clone') from error

from oasis_cache.cache import OasisCache
from oasis_cache.config import OasisConfig
from oasis_cache.handoff.messages import HandoffError
from oasis_cache.handoff.peer import PrefillPeer
from oasis_cache.handoff.server import HandoffServer
from oasis_cache.handoff.state import STRUCTURE, StateError, check_model, rebuild

__all__ = ["HandoffError", "HandoffServer", "PrefillPeer", "Received", "StateError", "receive", "serve"]


def serve(
    cache: OasisCache, inputs: Mapping[str, torch.Tensor] | None = None, address: str = "tcp://127.0.0.1:*"
) -> HandoffServer:
    """Serve a filled cache to decode processes, from a thread of this process, until the server is closed.

    What travels first is what the slots hold: the union over KV heads of the blocks that the last step's queries chose. So let the
    model read the first generated token before (`generate` with `max_new_tokens=2`, or one forward of it). Without such a step
    nothing is wrong, but all blocks travel on demand.

    Args:
        cache: A cache between two forwards. It is looked at now and may be used, reset or closed afterwards.
        inputs: Arguments of `generate` for the decode process, tensors: the ids of the whole sequence, of which the cache holds
            all but the newest, and for a padded batch its mask.
        address: Where to listen, as ZeroMQ writes it: "tcp://ADDRESS:PORT" ("*": any free port), or "ipc://PATH".

    Raises:
        ValueError: The cache does not know its model, holds nothing, or holds what the inputs do not go on from; or the address
            cannot be listened at.
        RuntimeError: A forward broke off in the cache, or it is closed.
    """
    inputs = dict(inputs or {})
    cache.runtime.check_open()
    held = int(cache.get_seq_length())
    if held == 0:
        raise ValueError("the cache holds no tokens: fill it before it is served")
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"inputs[{name!r}] must be a tensor, got {type(value).__name__}")
    ids = inputs.get("input_ids")
    if ids is not None and (ids.dim() != 2 or ids.shape[1] <= held):
        raise ValueError(
            f"input_ids {tuple(ids.shape)} must be [batch, tokens] of the whole sequence, more than the {held} tokens in the cache"
        )
    return HandoffServer(cache, inputs, address)


class Received(NamedTuple):
    """What `receive` gives.

    Attributes:
        cache: Holds what the prefill process's cache held; blocks come over when they are needed.
        inputs: What was given to `serve`, on the device of the first layer.
        peer: The prefill process, with what came from it so far.
    """

    cache: OasisCache
    inputs: dict[str, torch.Tensor]
    peer: PrefillPeer


def receive(
    address: str,
    *,
    model_config: PretrainedConfig,
    device: torch.device | str | Sequence[torch.device | str] = "cpu",
    timeout: float = 30.0,
    **overrides: Any,
) -> Received:
    """Make a cache of what a prefill process serves. Returns as soon as the working set is there.

    A block comes once and stays in host memory, unless `max_host_bytes` bounds that without `spill`: then it is a cache of the
    prefill process's memory, and a block may come again. When the prefill process is lost, what has come can still be used; a block
    that has not raises `HandoffError` in the middle of a forward, after which `crop(0)` or `reset()` make the cache usable again.

    Args:
        address: What `HandoffServer.address` was on the other side.
        model_config: `model.config` of the model that goes on, the same one as there.
        device: Where the layers are, one for all or one for each.
        timeout: Seconds within which the other process must answer, each time.
        **overrides: Fields of `OasisConfig` for this side. Those that the cache's content depends on (`STRUCTURE`) come with it.

    Raises:
        HandoffError: Nobody answers in time, or with something else than a cache.
        StateError: It is a cache of another model, or damaged.
        ValueError: An option is unknown, or cannot differ between the two sides.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout} must be more than 0 seconds")
    fixed = sorted(set(overrides) & set(STRUCTURE))
    if fixed:
        raise ValueError(f"{', '.join(fixed)} come with the cache and cannot be chosen here")
    OasisConfig.from_options(None, overrides)
    rereads = overrides.get("max_host_bytes") is not None and overrides.get("spill") is None
    peer = PrefillPeer(address, timeout, rereads)
    cache = None
    try:
        header, tensors = peer.ask_state()
        state = header.get("state")
        if not isinstance(state, dict) or not isinstance(state.get("settings"), dict):
            raise HandoffError(f"{address} sent no cache")
        check_model(state.get("model"), model_config)
        settings = {name: value for name, value in state["settings"].items() if name in STRUCTURE}
        cache = object.__new__(OasisCache)
        cache._begin(OasisConfig.from_options(None, {**settings, **overrides}), model_config, tiered=True)
        places = [device] * len(cache.layers) if isinstance(device, str | torch.device) else device
        devices = [torch.device(place) for place in places]
        if len(devices) != len(cache.layers):
            raise ValueError(f"{len(devices)} devices for {len(cache.layers)} layers")
        inputs = {
            name.removeprefix("input."): tensors.pop(name).to(devices[0])
            for name in [name for name in tensors if name.startswith("input.")]
        }
        rebuild(cache, state, tensors, peer.give, devices)
    except BaseException:
        if cache is not None:
            cache.close()
        peer.close()
        raise
    return Received(cache, inputs, peer)
