"""What the examples share: a model, a text, room for a prompt, a kept conversation, and errors in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from oasis_cache import OasisCache
from oasis_cache.demo import pick_device, pick_dtype, refuse_model
from oasis_cache.packaged import load_model


@contextmanager
def in_words(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program with a line, not a traceback, where an option is wrong (status 2) or memory does not suffice (1)."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except MemoryError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number of at least `least`."""

    def of(words: str) -> int:
        value = int(words)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"{value} must be at least {least}" + (f" and at most {most}" if most else "")
            )
        return value

    of.__name__ = "number"  # what argparse calls what is none
    return of


def load(name: str, device: str = "auto", dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer.

    Raises:
        ValueError: There is no such model, device or type.
        ModuleNotFoundError: The packaged model is not installed.
    """
    transformers_logging.disable_progress_bar()
    try:
        return load_model(name, pick_dtype(dtype), pick_device(device))
    except OSError as error:
        refuse_model(name, error)


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        ValueError: It is none.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a text in UTF-8: {error}") from error


def positions(model: PreTrainedModel) -> int | None:
    """Most tokens, prompt and answer together, that a model reads; None: it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_room(model: PreTrainedModel, tokens: int, new_tokens: int) -> None:
    """Raise `ValueError` where a prompt and an answer exceed the model's positions."""
    most = positions(model)
    if most is not None and tokens + new_tokens > most:
        raise ValueError(
            f"a prompt of {tokens:,} tokens with --new-tokens {new_tokens} is more than the model's {most:,} positions: give a "
            "part of the text, or a --model for longer texts"
        )


def keep_common(cache: OasisCache, held: list[int], ids: list[int]) -> int:
    """Take back what the cache holds beyond the common beginning of both, and return the length of that.

    Args:
        held: Tokens in the cache.
        ids: Tokens that it shall hold next; the last one is never kept, because a forward needs a new token.
    """
    limit = min(len(held), len(ids) - 1)
    common = next((place for place in range(limit) if held[place] != ids[place]), limit)
    try:
        cache.crop(common - len(held))
    except RuntimeError:  # windows and recurrent states cannot go back: everything is read again
        cache.reset()
        return 0
    return common
