"""RULER through the shared prefill: lm-eval makes the prompts and defines the score, this suite's runner decodes.

All of a prompt but its last tokens is the context; the answer is decoded sparsely. Other than in lm-eval an answer ends as soon as
all that is asked for is there, which cannot change the score.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from eval.quality.samples import Sample, Turn

PREFIX_TOKENS = 8


def samples(tokenizer: PreTrainedTokenizerBase, length: int, contexts: int) -> list[Sample]:
    """`contexts` documents of each of lm-eval's needle tasks."""
    from eval.quality import ruler  # here, because lm-eval comes with the eval extra

    drawn = []
    for name, task in ruler.load_tasks(ruler.NEEDLES, str(tokenizer.name_or_path), length, contexts).items():
        task.build_all_requests(limit=contexts, rank=0, world_size=1)
        for number, request in enumerate(task.instances[:contexts]):
            prompt, arguments = request.args
            ids = tokenizer(prompt)["input_ids"]
            turn = Turn(
                tuple(ids[-PREFIX_TOKENS:]), tuple(request.doc["outputs"]), int(arguments["max_gen_toks"]), ends=True
            )
            sample = f"{name}-{number}"
            drawn.append(Sample(name, length, sample, sample, tuple(ids[:-PREFIX_TOKENS]), (turn,)))
    return drawn
