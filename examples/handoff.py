"""Prefill in one process, decode in another: the decode process starts from the working set and fetches the rest on demand.

    python examples/handoff.py                        # both on this machine, and the same once more in one process, to compare
    python examples/handoff.py prefill --address tcp://10.0.0.1:5555
    python examples/handoff.py decode --address tcp://10.0.0.1:5555

Messages are neither encrypted nor authenticated: use addresses of a network that is trusted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache, handoff
from oasis_cache.demo import describe_environment
from oasis_cache.haystack import hide_number
from oasis_cache.packaged import PACKAGED, load_model

SERVING = "serving at "


def length(tokens: int) -> dict[str, Any]:
    """Arguments of `generate` for so many tokens, whatever they are."""
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}


def prefill(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Read a long text, write the first two tokens of the answer, and serve the cache until a decode process is done."""
    ids = hide_number(tokenizer, options.context, depth=0.5).prompt_ids.to(model.device)
    with OasisCache(model_config=model.config, budget=options.budget) as cache:
        # the first token's query chooses the blocks that travel; the second is what the decode process begins with
        sequences = model.generate(ids, past_key_values=cache, **length(2))
        server = handoff.serve(cache, {"input_ids": sequences}, options.address)
    with server:  # it keeps the pages, the cache is not needed any more
        print(f"{SERVING}{server.address}", flush=True)
        if not server.wait(options.timeout):
            sys.exit(f"no decode process was done within {options.timeout} s")


def decode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> dict[str, Any]:
    """Go on where the prefill process stopped; returns the tokens and what came over."""
    started = time.perf_counter()
    cache, inputs, peer = handoff.receive(
        options.address, model_config=model.config, device=model.device, timeout=options.timeout
    )
    with cache:
        received_seconds, first_pages, first_bytes = (
            time.perf_counter() - started,
            peer.pages_received,
            peer.bytes_received,
        )
        held = int(cache.get_seq_length())
        layers = [layer for layer in cache.layers if layer.shape is not None]
        dense_bytes = held * sum(layer.shape.token_bytes for layer in layers)
        out = model.generate(**inputs, past_key_values=cache, **length(options.new_tokens))
        decode_seconds = time.perf_counter() - started - received_seconds
        tokens = out[0, held:].tolist()
        print(f"Answer: {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
        admitted = peer.state_bytes + first_bytes
        report = {
            "context_tokens": held,
            "budget": options.budget,
            "new_tokens": out.shape[1] - inputs["input_ids"].shape[1],
            "tokens": tokens,
            "dense_bytes": dense_bytes,
            "admitted_bytes": admitted,
            "of_which_index_bytes": peer.index_bytes,
            "of_which_windows_and_tables_bytes": peer.state_bytes - peer.index_bytes,
            "of_which_working_set_bytes": first_bytes,
            "dense_over_admitted": dense_bytes / admitted,
            "dense_over_admitted_without_index": dense_bytes / (admitted - peer.index_bytes),
            "pages": peer.num_pages,
            "pages_at_first": first_pages,
            "pages_later": peer.pages_received - first_pages,
            "bytes_later": peer.bytes_received - first_bytes,
            "receive_seconds": received_seconds,
            "decode_seconds": decode_seconds,
        }
    return report


def alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> list[int]:
    """The same tokens by one process that does both."""
    ids = hide_number(tokenizer, options.context, depth=0.5).prompt_ids.to(model.device)
    with OasisCache(model_config=model.config, budget=options.budget) as cache:
        out = model.generate(ids, past_key_values=cache, **length(options.new_tokens + 2))
    return out[0, ids.shape[1] + 1 :].tolist()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["both", "prefill", "decode"], default="both")
    parser.add_argument("--address", default="tcp://127.0.0.1:*", help="where the prefill process listens")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for the other process at most")
    parser.add_argument(
        "--model", default=PACKAGED, help="folder or hub name; default: SmolLM2-135M-Instruct out of a package"
    )
    parser.add_argument("--context", type=int, default=2000, help="tokens of the text in which a number is hidden")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a decode step reads per KV head and layer")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="where to write what came over")
    options = parser.parse_args(arguments)

    transformers_logging.disable_progress_bar()
    model, tokenizer = load_model(options.model, device=options.device)
    if options.role == "prefill":
        prefill(model, tokenizer, options)
        return 0
    other = None
    if options.role == "both":
        command = [sys.executable, __file__, "prefill", *arguments[arguments[:1] == ["both"] :]]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = iter(other.stdout.readline, "")
        options.address = next(line for line in lines if line.startswith(SERVING)).removeprefix(SERVING).strip()
    try:
        report = decode(model, tokenizer, options)
        if other is not None:
            other.wait(options.timeout)
            expected = alone(model, tokenizer, options)
            report["equal_to_one_process"] = report["tokens"] == expected
    finally:
        if other is not None:
            other.kill()
    report["environment"] = describe_environment(model, options.model)
    print(
        "{context_tokens:,} tokens: {admitted_bytes:,} B came before the first step, {of_which_index_bytes:,} B of it an index.\n"
        "A dense cache has {dense_bytes:,} B, {dense_over_admitted:.1f} times as much ({dense_over_admitted_without_index:.1f} "
        "times, index aside).\n{pages_later} of {pages} pages came later, in {new_tokens} steps.".format(**report)
    )
    if other is not None:
        print(f"Tokens equal to those of one process: {report['equal_to_one_process']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(report.get("equal_to_one_process") is False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
