"""What a method is to the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from transformers import Cache, PreTrainedModel

from oasis_cache import OasisCache, OasisConfig


class Method(ABC):
    """A way to keep keys and values, and to choose those that a step reads.

    Attributes:
        name: What it is called on the command line and in results.
        title: What it is called in tables.
        describes: One sentence for the report: whose method it is, and what counts against the budget.
    """

    name: str
    title: str
    describes: str

    @abstractmethod
    def session(
        self, model: PreTrainedModel, budget: int, sparse_rows: int
    ) -> AbstractContextManager[tuple[Cache, Counters]]:
        """An empty cache for one sample, and the counters that tell afterwards what was read.

        Args:
            budget: Tokens per KV head and layer that a step may read besides the newest ones.
            sparse_rows: Forwards of at most this many tokens on a filled cache are to be sparse.

        Raises:
            ValueError: The budget is out of range for the method.
        """


class Counters(ABC):
    """What a session did, asked when it is over."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """`sparse_steps`, `other_steps` (forwards after the prefill that read everything) and `tokens_read`: the mean over sparse
        steps, layers and KV heads of the distinct tokens read besides the newest, unsealed ones."""


class OasisCounters(Counters):
    """Those of an `OasisCache`."""

    def __init__(self, cache: OasisCache, model: PreTrainedModel) -> None:
        self.cache = cache
        self.heads = model.config.get_text_config().num_key_value_heads

    def as_dict(self) -> dict[str, Any]:
        stats = self.cache.stats()
        blocks = stats.blocks_read_per_step / max(1, stats.oasis_layers * self.heads)
        return {
            "sparse_steps": stats.sparse_steps,
            "other_steps": stats.dense_steps + stats.streamed_steps,
            "tokens_read": blocks * self.cache.config.block_size,
            "tokens_read_max": stats.tokens_read_max,
            "hit_rate": stats.hit_rate,
        }


def oasis_config(budget: int, sparse_rows: int, **options: Any) -> OasisConfig:
    """The default configuration with a budget; `sparse_rows` only grows where a question needs it."""
    return OasisConfig(budget=budget, sparse_rows=max(OasisConfig.sparse_rows, sparse_rows), **options)
