"""Block indexes: small stand-ins for the keys, kept on the device, by which all blocks of the context are ranked.

An index answers one question: how much attention mass would each query row give to each block? It answers with the
log-sum-exp of the (estimated) scaled scores of the block's tokens, so that a softmax over blocks is the mass itself.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch

from oasis_cache import kernels
from oasis_cache.blocks import LayerShape
from oasis_cache.kernels import reference

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockIndex(ABC):
    """Summaries of sealed blocks, appended once, kept in arrays [batch, kv_heads, capacity, ...] that grow by doubling."""

    MIN_CAPACITY = 64
    sealed_by_kernel = False  # whether `kernels.seal_blocks` makes the summaries on a device that has kernels
    by_scores = True  # whether blocks rank by estimated scores of attention, which position biases raise
    scored_by: str | None = (
        None  # the function of `kernels` that scores the arrays, in the order in which `summarise` gives them
    )

    def __init__(self) -> None:
        self.num_blocks = 0
        self.block_size = 0
        self.arrays: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict) -> BlockIndex:
        twin = copy.copy(self)
        twin.arrays = {name: array.clone() for name, array in self.arrays.items()}
        return twin

    @abstractmethod
    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """keys [batch, kv_heads, blocks, block_size, key_dim] -> arrays [batch, kv_heads, blocks, ...]."""

    @abstractmethod
    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-sum-exp of the estimated scores of each block's tokens, of the first `num_blocks` blocks.

        Args:
            queries: [batch, kv_heads, rows, key_dim], rows of all query heads of a KV head.
            visible: [batch, num_blocks, block_size] bool, False for padding tokens.

        Returns:
            [batch, kv_heads, rows, num_blocks] float32, -inf for a block without a visible token.
        """

    def score(
        self,
        queries: torch.Tensor,
        group: int,
        num_blocks: int,
        scaling: float,
        visible: torch.Tensor | None = None,
    ) -> Scores:
        """`log_mass` and what follows from it.

        Args:
            queries: [batch, kv_heads, group * rows, key_dim].
            group: Query heads per KV head.

        Returns:
            Scores [batch, kv_heads, rows, num_blocks] as `reference.rank_rows` defines them, their maximum over rows
            [batch, kv_heads, num_blocks], and the log-mass [batch, kv_heads, group * rows, num_blocks]; all float32.
        """
        if self.scored_by is not None:
            arrays = (self.held(name, num_blocks) for name in self.arrays)
            scores: Scores = getattr(kernels, self.scored_by)(queries, *arrays, group, scaling, visible)
            return scores
        log_mass = self.log_mass(queries, num_blocks, scaling, visible)
        rows = reference.rank_rows(log_mass, group)
        return rows, rows.amax(2), log_mass

    @property
    def num_bytes(self) -> int:
        """Bytes of the summaries held, without spare capacity."""
        return sum(array[:, :, : self.num_blocks].numel() * array.element_size() for array in self.arrays.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays.values())

    def append(self, keys: torch.Tensor) -> None:
        """Enter new sealed blocks: keys [batch, kv_heads, blocks, block_size, key_dim]."""
        count = keys.shape[2]
        if count == 0:
            return
        self.block_size = keys.shape[3]
        first = self.num_blocks
        for name, new in self.summarise(keys).items():
            self._room(name, new, count)[:, :, first : first + count] = new
        self.num_blocks += count

    def reserve(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays, with room for new blocks that `kernels.seal_blocks` will summarise: keys as in `append`."""
        count = keys.shape[2]
        self.block_size = keys.shape[3]
        arrays = {name: self._room(name, like, count) for name, like in self.summarise(keys[:, :, :1]).items()}
        self.num_blocks += count
        return arrays

    def _room(self, name: str, like: torch.Tensor, count: int) -> torch.Tensor:
        """The array of that name, grown if need be to hold `count` more blocks like those of `like`."""
        needed, array = self.num_blocks + count, self.arrays.get(name)
        if array is None or array.shape[2] < needed:
            capacity = self._capacity(needed, 0 if array is None else array.shape[2])
            grown = like.new_empty(*like.shape[:2], capacity, *like.shape[3:])
            if array is not None:
                grown[:, :, : self.num_blocks] = array[:, :, : self.num_blocks]
            self.arrays[name] = array = grown
        return array

    def _capacity(self, needed: int, held: int) -> int:
        """Blocks that an array has room for when one for `held` blocks is too small for `needed`."""
        return max(needed, held * 5 // 4 + self.MIN_CAPACITY if held else self.MIN_CAPACITY)

    def forecast(self, shape: LayerShape, block_size: int, at_once: int, num_blocks: int) -> int:
        """`reserved_bytes` of a layer of that shape that gets `at_once` blocks first, then one by one up to `num_blocks`."""
        capacity = self._capacity(at_once, 0)
        while capacity < num_blocks:
            capacity = self._capacity(capacity + 1, capacity)
        keys = torch.zeros(1, 1, 1, block_size, shape.query_dim, dtype=shape.dtype, device=shape.device)
        block_bytes = sum(array.numel() * array.element_size() for array in self.summarise(keys).values())
        return shape.batch * shape.kv_heads * capacity * block_bytes

    def truncate(self, num_blocks: int) -> None:
        self.num_blocks = min(self.num_blocks, num_blocks)

    def selected_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays whose batch row i is the present row `rows[i]`; rows: int64 [new batch]."""
        return {name: array.index_select(0, rows.to(array.device)) for name, array in self.arrays.items()}

    def held(self, name: str, num_blocks: int) -> torch.Tensor:
        return self.arrays[name][:, :, :num_blocks]


class ExactIndex(BlockIndex):
    """Full keys: the oracle. It costs the device memory that the library exists to save."""

    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"keys": keys}

    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        return reference.log_mass_exact(queries, self.held("keys", num_blocks), scaling, visible)


class MinMaxIndex(BlockIndex):
    """Channel-wise minimum and maximum of a block's keys: an upper bound of its scores (Quest, section 3.3; OasisKV)."""

    sealed_by_kernel = True
    scored_by = "score_minmax"

    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"low": keys.amin(3), "high": keys.amax(3)}

    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        return reference.log_mass_minmax(
            queries, self.held("low", num_blocks), self.held("high", num_blocks), scaling, visible
        )


class Int2Index(BlockIndex):
    """Packed 2-bit keys with a minimum and a step per block and channel (as KIVI quantises keys: per channel).

    Codes lie as the device's scoring wants them: "codes" as `reference.pack_codes` packs them, or "words" for numba.
    """

    sealed_by_kernel = True
    scored_by = "score_int2"

    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        compiled = kernels.numba_for(keys.device)
        if compiled is not None:
            return dict(zip(("words", "low", "step"), compiled.pack_int2(keys), strict=True))
        return dict(zip(("codes", "low", "step"), reference.quantise_int2(keys), strict=True))

    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        if "words" in self.arrays:
            return self.score(queries, 1, num_blocks, scaling, visible)[2]
        codes, low, step = (self.held(name, num_blocks) for name in ("codes", "low", "step"))
        return reference.log_mass_int2(queries, codes, low, step, scaling, visible)

    def score(
        self,
        queries: torch.Tensor,
        group: int,
        num_blocks: int,
        scaling: float,
        visible: torch.Tensor | None = None,
    ) -> Scores:
        if "words" in self.arrays:
            compiled = kernels.numba_for(queries.device)
            assert compiled is not None, "words were packed for numba"
            words, low, step = (self.arrays[name] for name in ("words", "low", "step"))
            scores: Scores = compiled.score_int2(
                queries, words, low, step, num_blocks, self.block_size, group, scaling, visible
            )
            return scores
        return super().score(queries, group, num_blocks, scaling, visible)


class Int1Index(BlockIndex):
    """Packed signs with a mean and a mean deviation per block and channel."""

    scored_by = "score_int1"

    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, mean, deviation = reference.quantise_int1(keys)
        return {"codes": codes, "mean": mean, "deviation": deviation}

    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        codes, mean, deviation = (self.held(name, num_blocks) for name in ("codes", "mean", "deviation"))
        return reference.log_mass_int1(queries, codes, mean, deviation, scaling, visible)


class RecencyIndex(BlockIndex):
    """No summaries: newer blocks rank higher. The control that retrieves nothing (StreamingLLM with a larger window)."""

    by_scores = False

    def summarise(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"present": keys.new_ones(*keys.shape[:3], dtype=torch.bool)}

    def log_mass(
        self, queries: torch.Tensor, num_blocks: int, scaling: float, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        age = torch.arange(num_blocks, 0, -1, dtype=torch.float32, device=queries.device)
        scores = -age.log().expand(
            *queries.shape[:3], num_blocks
        )  # a softmax over blocks gives each a share that is not 0
        if visible is not None:
            scores = scores.masked_fill(~visible.any(-1)[:, None, None], float("-inf"))
        return scores


INDEXES: dict[str, type[BlockIndex]] = {
    "int2": Int2Index,
    "int1": Int1Index,
    "minmax": MinMaxIndex,
    "exact": ExactIndex,
    "recency": RecencyIndex,
}


def make_index(name: str) -> BlockIndex:
    """The index of that name (see `OasisConfig.index`)."""
    return INDEXES[name]()
