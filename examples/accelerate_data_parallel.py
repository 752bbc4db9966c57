"""Data-parallel evaluation: every process has the whole model, a cache of its own, and its share of the questions.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_data_parallel.py
    accelerate launch --multi_gpu --num_processes 8 examples/accelerate_data_parallel.py --model Qwen/Qwen3-8B --context 32000

(`--multi_gpu` without a GPU starts that many processes on the CPU; `--cpu` starts one, unless there is MPI.)

Counts in how many of several long texts the number that is hidden there is found, with `OasisCache`. `max_host_bytes` is each
process's share of the machine: the processes do not know of each other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache
from oasis_cache.haystack import hide_number
from oasis_cache.packaged import PACKAGED, load_model


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=PACKAGED, help="folder or hub name; default: SmolLM2-135M-Instruct out of a package"
    )
    parser.add_argument("--context", type=int, default=2000, help="tokens of each text")
    parser.add_argument("--questions", type=int, default=4, help="how many texts, each with its question")
    parser.add_argument("--budget", type=int, default=512, help="tokens that a decode step reads per KV head and layer")
    parser.add_argument("--json", type=Path, help="where to write the answers")
    options = parser.parse_args(arguments)

    transformers_logging.disable_progress_bar()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with accelerator.main_process_first():  # it converts the package's model, once
        model, tokenizer = load_model(options.model, device=accelerator.device)
    share = int(psutil.virtual_memory().available / accelerator.num_processes)

    rows = []  # question, whether it was answered, process
    with (
        accelerator.split_between_processes(list(range(options.questions)), apply_padding=True) as numbers,
        OasisCache(model_config=model.config, budget=options.budget, max_host_bytes=share) as cache,
    ):
        for number in numbers:
            task = hide_number(tokenizer, options.context, depth=(number % 5 + 0.5) / 5, seed=number)
            ids = task.prompt_ids.to(accelerator.device)
            out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            rows.append([number, int(task.found_in(answer)), accelerator.process_index])
            assert cache.stats().sparse_steps > 0, "the texts are within the budget"
            cache.reset()
    gathered = accelerator.gather(torch.tensor(rows, device=accelerator.device)).tolist()

    results = {number: (found, process) for number, found, process in gathered}  # a padded question came twice
    if accelerator.is_main_process:
        found = sum(found for found, _ in results.values())
        print(
            f"{found} of {len(results)} numbers found by {accelerator.num_processes} processes at budget {options.budget}"
        )
        if options.json:
            names = ("question", "found", "process")
            listed = [dict(zip(names, (number, *results[number]), strict=True)) for number in sorted(results)]
            options.json.write_text(json.dumps({"found": found, "answers": listed}, indent=1) + "\n")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
