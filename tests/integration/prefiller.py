"""A prefill process for the tests of hand-off: `-m tests.integration.prefiller CASE...` fills a cache for each case and serves it.

Prints one line of JSON, case -> address, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from oasis_cache import OasisCache, handoff
from tests import models
from tests.integration.survival import SPARSE

PROMPT, TOKENS = 150, 24
# case -> architecture, and the padding of each row of the batch
CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "llama": ("llama", (0,)),
    "padded batch": ("qwen3", (0, 37)),
    "sliding layers": ("gemma3", (0, 5)),
    "recurrent layers": ("qwen3-next", (0,)),
    "hybrid layers": ("falcon-h1", (0,)),
    "latents": ("deepseek-v3", (0,)),
    "no sparse layer": ("mistral-window", (0,)),
}


def model_of(case: str) -> PreTrainedModel:
    return models.build(CASES[case][0])


def sequences(case: str, tokens: int, cache: OasisCache) -> dict[str, torch.Tensor]:
    """`tokens` tokens behind the case's prompt: ids and mask of the whole sequences."""
    ids, mask = models.left_padded(PROMPT, CASES[case][1])
    out = models.generate(model_of(case), ids, cache, tokens, attention_mask=mask).sequences
    return {"input_ids": out, "attention_mask": torch.nn.functional.pad(mask, (0, tokens), value=1)}


def prefilled(case: str, **options: Any) -> tuple[OasisCache, dict[str, torch.Tensor]]:
    """A cache that holds the prompt and the first new token, and what a decode process goes on with."""
    cache = OasisCache(SPARSE, model_config=model_of(case).config, **options)
    return cache, sequences(case, 2, cache)


def main(*cases: str) -> None:
    servers = {}
    for case in cases:
        cache, inputs = prefilled(case)
        with cache:
            servers[case] = handoff.serve(cache, inputs)
    print(json.dumps({case: server.address for case, server in servers.items()}), flush=True)
    sys.stdin.read()
    for server in servers.values():
        server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
