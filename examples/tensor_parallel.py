"""One model on several devices by tensor parallelism: every rank keeps its own KV heads, in its own host memory and working set.

    torchrun --nproc-per-node 3 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model Qwen/Qwen3-8B --context 32000

The number of ranks must divide the model's KV heads (the packaged SmolLM2-135M has 3). On a CPU the ranks talk through gloo, on
GPUs through NCCL; transformers splits the model by its own plan, and the cache needs no setting for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache
from oasis_cache.haystack import hide_number
from oasis_cache.packaged import PACKAGED, packaged_model_dir


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=PACKAGED, help="folder or hub name; default: SmolLM2-135M-Instruct out of a package"
    )
    parser.add_argument("--context", type=int, default=2000, help="tokens of the text in which a number is hidden")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a decode step reads per KV head and layer")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path, help="where to write what every rank did")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start this with torchrun: torchrun --nproc-per-node 3 examples/tensor_parallel.py")

    transformers_logging.disable_progress_bar()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if options.model == PACKAGED and rank > 0:
        dist.barrier()  # the first rank converts the package's model, once
    folder = packaged_model_dir() if options.model == PACKAGED else options.model
    if options.model == PACKAGED and rank == 0:
        dist.barrier()
    kv_heads = AutoConfig.from_pretrained(folder).get_text_config().num_key_value_heads
    if kv_heads % ranks:
        parser.error(f"{ranks} ranks cannot share the {kv_heads} KV heads of {options.model} evenly")

    read_tokenizer = PreTrainedTokenizerFast if options.model == PACKAGED else AutoTokenizer
    tokenizer = read_tokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    task = hide_number(tokenizer, options.context, depth=0.5)
    ids = task.prompt_ids.to(model.device)  # every rank reads the same prompt
    with OasisCache(model_config=model.config, budget=options.budget) as cache:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=options.new_tokens, do_sample=False)
        stats = cache.stats()
        held = [stats.host_bytes, stats.device_bytes, stats.sparse_steps, cache.layers[0].shape.kv_heads]
    tokens = out[0, ids.shape[1] :]
    everywhere = [torch.empty(4, dtype=torch.int64, device=model.device) for _ in range(ranks)]
    dist.all_gather(everywhere, torch.tensor(held, device=model.device))

    if rank == 0:
        names = ("host_bytes", "device_bytes", "sparse_steps", "kv_heads")
        report = {
            "context_tokens": ids.shape[1],
            "number": task.number,
            "answer": tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": tokens.tolist(),
            "ranks": [dict(zip(names, values.tolist(), strict=True)) for values in everywhere],
        }
        print(f"The hidden number is {task.number}. The answer of {ranks} ranks: {report['answer']!r}")
        for number, part in enumerate(report["ranks"]):
            print(
                "rank {}: {kv_heads} KV heads, {host_bytes:,} B in host memory, {device_bytes:,} B on the device".format(
                    number, **part
                )
            )
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()  # nobody leaves while another one still speaks
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
