"""One rank of a tensor-parallel run, started by torchrun: `-m tests.integration.ranks OUT_FOLDER MODEL_FOLDER...`.

Generates with every model in every way of `WAYS`; what came out and what the cache holds go to OUT_FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache
from oasis_cache.drafters import PromptLookupDrafter
from oasis_cache.lookahead import LookaheadDecoding
from tests import models
from tests.integration.survival import SIMULATED, SPARSE

PADS = (0, 7)
WAYS = ("plain", "prefetching", "prompt lookup", "lookahead decoding of a padded batch")


def run(model: PreTrainedModel, way: str) -> dict[str, Any]:
    """Generate 24 tokens behind 120 in one of the ways; returns tokens and numbers that JSON can carry."""
    ids, arguments = models.prompt(120), {}
    if way == "prompt lookup":
        arguments = {"prompt_lookup_num_tokens": 3}
    if way == WAYS[3]:
        ids, mask = models.left_padded(120, PADS)
        arguments = {"attention_mask": mask, "custom_generate": LookaheadDecoding(PromptLookupDrafter(), num_drafts=3)}
    with OasisCache(SIMULATED if way == "prefetching" else SPARSE) as cache:
        out = models.generate(model, ids, cache, 24, **arguments)
        stats = cache.stats()
        return {
            "tokens": out.sequences.tolist(),
            "kv_heads": [layer.shape.kv_heads for layer in cache.layers],
            "host_bytes": stats.host_bytes,
            "sparse_steps": stats.sparse_steps,
            "fallback_steps": stats.fallback_steps,
            "warnings": list(stats.warnings),
        }


def main(out_folder: str, *folders: str) -> None:
    transformers_logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    report = {}
    for folder in folders:
        config = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
        report[folder] = {way: run(model, way) for way in WAYS}
    Path(out_folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.barrier()  # nobody leaves while another one still speaks
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(
        0
    )  # a thread of PyTorch's that outlives the interpreter aborts the process now and then, its work long done
