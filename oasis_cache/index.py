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
from oasis_cache.clusters import ARRAYS, Clusters, segment_blocks
from oasis_cache.kernels import reference

Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class BlockIndex(ABC):
    """Summaries of sealed blocks, appended once, kept in arrays [batch, kv_heads, capacity, ...] that grow by doubling.

    Attributes:
        clusters: The coarse level, by which long contexts are searched; None: every block is ranked, always.
    """

    MIN_CAPACITY = 64
    sealed_by_kernel = False  # whether `kernels.seal_blocks` makes the summaries on a device that has kernels
    has_keys = False  # whether `keys` gives what clusters can be made of
    by_scores = True  # whether blocks rank by estimated scores of attention, which position biases raise
    scored_by: str | None = (
        None  # the function of `kernels` that scores the arrays, in the order in which `summarise` gives them
    )

    def __init__(self, candidates: int | None = None) -> None:
        self.num_blocks = 0
        self.block_size = 0
        self.arrays: dict[str, torch.Tensor] = {}
        self.clusters = Clusters(candidates) if candidates is not None and self.has_keys else None

    def __deepcopy__(self, memo: dict) -> BlockIndex:
        twin = copy.copy(self)
        twin.arrays = {name: array.clone() for name, array in self.arrays.items()}
        twin.clusters = copy.deepcopy(self.clusters, memo)
        return twin

    def keys(self, first: int, last: int) -> torch.Tensor:
        """The keys of blocks as the index knows them: [batch, kv_heads, blocks, block_size, dim] float32, dim at least key_dim."""
        raise NotImplementedError

    def candidates(
        self,
        queries: torch.Tensor,
        group: int,
        num_blocks: int,
        scaling: float,
        sink_blocks: int,
        decide: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The blocks that are worth ranking: [batch, kv_heads, candidates] int64, ascending; None: all. See `Clusters.choose`."""
        clusters = self._clusters_for(num_blocks)
        if clusters is None:
            return None
        return clusters.choose(queries, group, num_blocks, self.block_size, scaling, sink_blocks, decide)

    def _clusters_for(self, num_blocks: int) -> Clusters | None:
        """The coarse level, complete for so many blocks, if they are ranked in two levels."""
        if self.clusters is None or not self.clusters.pays(num_blocks, self.block_size):
            return None
        self.clusters.catch_up(num_blocks, self.block_size, self.keys)
        return self.clusters

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

    def select(
        self, queries: torch.Tensor, group: int, num_blocks: int, scaling: float, sink_blocks: int, count: int
    ) -> torch.Tensor | None:
        """What `candidates`, `score` and `selector.choose_for_reading` come to, if one call for it is faster.

        Returns:
            [batch, kv_heads, count] int64, or None.
        """
        return None

    def score(
        self,
        queries: torch.Tensor,
        group: int,
        num_blocks: int,
        scaling: float,
        visible: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> Scores:
        """`log_mass` and what follows from it.

        Args:
            queries: [batch, kv_heads, group * rows, key_dim].
            group: Query heads per KV head.
            chosen: [batch, kv_heads, count] int64, numbers of the blocks that are scored in place of all; without `visible`.

        Returns:
            Scores [batch, kv_heads, rows, num_blocks] as `reference.rank_rows` defines them, their maximum over rows
            [batch, kv_heads, num_blocks], and the log-mass [batch, kv_heads, group * rows, num_blocks]; all float32.
        """
        if self.scored_by is not None:
            arrays = (self.held(name, num_blocks) for name in self.arrays)
            if chosen is not None:
                arrays = (_of_blocks(array, chosen) for array in arrays)
            scores: Scores = getattr(kernels, self.scored_by)(queries, *arrays, group, scaling, visible)
            return scores
        assert chosen is None, "an index without arrays to score ranks all blocks"
        log_mass = self.log_mass(queries, num_blocks, scaling, visible)
        rows = reference.rank_rows(log_mass, group)
        return rows, rows.amax(2), log_mass

    @property
    def num_bytes(self) -> int:
        """Bytes of the summaries held, without spare capacity."""
        held = sum(array[:, :, : self.num_blocks].numel() * array.element_size() for array in self.arrays.values())
        return held + (0 if self.clusters is None else self.clusters.num_bytes)

    @property
    def reserved_bytes(self) -> int:
        held = sum(array.numel() * array.element_size() for array in self.arrays.values())
        return held + (0 if self.clusters is None else self.clusters.reserved_bytes)

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
        self._clusters_for(self.num_blocks)  # made while the prompt is read, not in the first step

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
        clusters = 0
        if self.clusters is not None and self.clusters.pays(num_blocks, block_size):
            size, held = segment_blocks(block_size), 0
            if self.clusters.pays(at_once, block_size):
                held = at_once // size
            while held < num_blocks // size:
                held = self.clusters.capacity(held + 1, held)
            clusters = held * self.clusters.bytes_of_segment(block_size, self._width(shape))
        return shape.batch * shape.kv_heads * (capacity * block_bytes + clusters)

    def _width(self, shape: LayerShape) -> int:
        """Channels of what `keys` gives."""
        return shape.query_dim

    def truncate(self, num_blocks: int) -> None:
        self.num_blocks = min(self.num_blocks, num_blocks)
        if self.clusters is not None and self.block_size:
            self.clusters.truncate(self.num_blocks, self.block_size)

    def selected_rows(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], ...]:
        """The arrays, and those of the clusters, whose batch row i is the present row `rows[i]`; rows: int64 [new batch]."""
        held = (self.arrays, {} if self.clusters is None else self.clusters.arrays)
        return tuple(
            {name: array.index_select(0, rows.to(array.device)) for name, array in part.items()} for part in held
        )

    def replace_arrays(self, selected: tuple[dict[str, torch.Tensor], ...]) -> None:
        """Take what `selected_rows` gave."""
        self.arrays = selected[0]
        if self.clusters is not None:
            self.clusters.arrays = selected[1]

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
    has_keys = True
    scored_by = "score_int2"

    def keys(self, first: int, last: int) -> torch.Tensor:
        parts = {name: array[:, :, first:last] for name, array in self.arrays.items()}
        low, step = parts["low"].float().unsqueeze(3), parts["step"].float().unsqueeze(3)
        if "words" in parts:
            compiled = kernels.numba_for(low.device)
            assert compiled is not None, "words were packed for numba"
            codes = compiled.unpack_words(parts["words"], self.block_size)
        else:
            codes = reference.unpack_codes(parts["codes"], 2, low.shape[-1])
        return low + step * codes

    def select(
        self, queries: torch.Tensor, group: int, num_blocks: int, scaling: float, sink_blocks: int, count: int
    ) -> torch.Tensor | None:
        if "words" not in self.arrays:
            return None
        compiled = kernels.numba_for(queries.device)
        assert compiled is not None, "words were packed for numba"
        arrays, segments, ranked = None, 0, num_blocks
        clusters = self._clusters_for(num_blocks)
        if clusters is not None:
            segments, ranked = clusters.whole_segments(num_blocks, self.block_size), clusters.candidates
            arrays = tuple(clusters.arrays[name] for name in ARRAYS)
        if compiled.threads_pay(queries.shape[0] * queries.shape[1] * ranked):
            return None
        words, low, step = (self.arrays[name] for name in ("words", "low", "step"))
        sizes = (segments, num_blocks, self.block_size, group, scaling, ranked, sink_blocks, count)
        wanted: torch.Tensor = compiled.select_int2(queries, words, low, step, arrays, *sizes)
        return wanted

    def _width(self, shape: LayerShape) -> int:
        compiled = kernels.numba_for(shape.device)
        return shape.query_dim if compiled is None else -(-shape.query_dim // compiled.LANES) * compiled.LANES

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
        chosen: torch.Tensor | None = None,
    ) -> Scores:
        if "words" in self.arrays:
            compiled = kernels.numba_for(queries.device)
            assert compiled is not None, "words were packed for numba"
            words, low, step = (self.arrays[name] for name in ("words", "low", "step"))
            scores: Scores = compiled.score_int2(
                queries, words, low, step, num_blocks, self.block_size, group, scaling, visible, chosen
            )
            return scores
        return super().score(queries, group, num_blocks, scaling, visible, chosen)


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


def make_index(name: str, candidates: int | None = None) -> BlockIndex:
    """The index of that name (see `OasisConfig.index`), and so many blocks for it to rank in long contexts; None: all."""
    return INDEXES[name](candidates)


def _of_blocks(array: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The blocks `chosen` [batch, kv_heads, count] of an array [batch, kv_heads, blocks, ...]."""
    places = chosen.view(*chosen.shape, *(1,) * (array.dim() - 3)).expand(*chosen.shape, *array.shape[3:])
    return array.gather(2, places)
