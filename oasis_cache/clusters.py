"""The coarse level above a block index: clusters of keys, by which the blocks are chosen that the index then ranks.

Ranking every block by its own summary takes time linear in the context. Tokens are far cheaper to rank by the cluster that
their key lies in: a query meets the centroids of a segment of 4,096 tokens once, and every token of the segment has the
score of its centroid, a table look-up. The idea of ranking keys by clusters of them is that of ClusterKV (arXiv 2412.03213) and
RetroInfer (arXiv 2505.02922, whose segments these are); here it only decides what the index looks at.

Clusters are made of the index's own keys, once for each whole segment, and never change: so they follow from the index
alone, and a crop drops them by segments. The blocks behind the last whole segment are always ranked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from oasis_cache import kernels
from oasis_cache.kernels import reference

SEGMENT_TOKENS = 4096
CLUSTERS = 128  # of a segment
ROUNDS = 2  # of k-means
ARRAYS = ("centroids", "sizes", "codes")

Keys = Callable[[int, int], torch.Tensor]


def segment_blocks(block_size: int) -> int:
    """Blocks of a segment."""
    return max(1, SEGMENT_TOKENS // block_size)


class Clusters:
    """Clusters of the keys of all whole segments: arrays [batch, kv_heads, capacity in segments, ...].

    Attributes:
        candidates: Blocks of whole segments that are left for the index to rank.
        arrays: "centroids" [..., clusters, key_dim] bfloat16, "sizes" [..., clusters] float32, tokens of each cluster, and "codes"
            [..., tokens of a segment] uint8, each token's cluster.
    """

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates
        self.num_segments = 0
        self.arrays: dict[str, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict) -> Clusters:
        twin = copy.copy(self)
        twin.arrays = {name: array.clone() for name, array in self.arrays.items()}
        return twin

    def pays(self, num_blocks: int, block_size: int) -> bool:
        """Whether so many blocks are ranked in two levels."""
        size = segment_blocks(block_size)
        return num_blocks // size * size > 2 * self.candidates

    def catch_up(self, num_blocks: int, block_size: int, keys: Keys) -> None:
        """Make the clusters of the whole segments among the first `num_blocks` blocks that have none.

        Args:
            keys: From a first and a last block to the keys between, [batch, kv_heads, blocks, block_size, key_dim].
        """
        size = segment_blocks(block_size)
        whole = num_blocks // size
        while self.num_segments < whole:
            first = self.num_segments * size
            new = cluster(keys(first, first + size).flatten(2, 3))
            self._make_room(new, whole)
            for name, array in new.items():
                self.arrays[name][:, :, self.num_segments] = array
            self.num_segments += 1

    def _make_room(self, new: dict[str, torch.Tensor], needed: int) -> None:
        for name, like in new.items():
            array = self.arrays.get(name)
            if array is not None and array.shape[2] > self.num_segments:
                continue
            grown = like.new_empty(*like.shape[:2], self.capacity(needed, self.num_segments), *like.shape[2:])
            if array is not None:
                grown[:, :, : self.num_segments] = array[:, :, : self.num_segments]
            self.arrays[name] = grown

    @staticmethod
    def capacity(needed: int, held: int) -> int:
        """Segments that arrays have room for when those for `held` segments are too small for `needed`."""
        return max(needed, held + max(1, held // 4))

    @staticmethod
    def bytes_of_segment(block_size: int, key_dim: int) -> int:
        """Bytes of the arrays for each segment of a KV head."""
        return CLUSTERS * (2 * key_dim + 4) + segment_blocks(block_size) * block_size

    @property
    def reserved_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the clusters held, without spare capacity."""
        held = [array[:, :, : self.num_segments] for array in self.arrays.values()]
        return sum(array.numel() * array.element_size() for array in held)

    def truncate(self, num_blocks: int, block_size: int) -> None:
        self.num_segments = min(self.num_segments, num_blocks // segment_blocks(block_size))

    def whole_segments(self, num_blocks: int, block_size: int) -> int:
        """Segments with clusters among the first `num_blocks` blocks."""
        return min(self.num_segments, num_blocks // segment_blocks(block_size))

    def choose(
        self,
        queries: torch.Tensor,
        group: int,
        num_blocks: int,
        block_size: int,
        scaling: float,
        sink_blocks: int,
        decide: torch.Tensor | None,
    ) -> torch.Tensor:
        """The blocks for the index to rank, among the first `num_blocks`: the best of whole segments, and all behind them.

        Args:
            queries: [batch, kv_heads, group * rows, key_dim].
            sink_blocks: First blocks, which are chosen in any case.
            decide: [batch, rows] bool, the rows that have a say; None: all.

        Returns:
            [batch, kv_heads, candidates] int64 block numbers, ascending.
        """
        segments = self.whole_segments(num_blocks, block_size)
        arrays = tuple(self.arrays[name] for name in ARRAYS)
        compiled = kernels.numba_for(queries.device)
        if compiled is not None:
            chosen: torch.Tensor = compiled.choose_candidates(
                queries, *arrays, segments, block_size, group, scaling, self.candidates, sink_blocks, num_blocks, decide
            )
            return chosen
        centroids, sizes, codes = (array[:, :, :segments] for array in arrays)
        shares = reference.cluster_shares(queries, centroids, sizes, codes, block_size, group, scaling)
        if decide is not None:
            shares = shares.masked_fill(~decide[:, None, :, None], 0.0)
        best = reference.best_candidates(shares.amax(2), self.candidates, sink_blocks)
        rest = torch.arange(segments * segment_blocks(block_size), num_blocks, device=best.device).expand(
            *best.shape[:2], -1
        )
        return torch.cat([best, rest], dim=2)


def cluster(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """k-means of a segment's keys [batch, kv_heads, tokens, key_dim] float32, from evenly spaced ones on; see `Clusters.arrays`."""
    tokens = keys.shape[2]
    count = min(CLUSTERS, tokens)
    centroids = keys[:, :, tokens // count // 2 :: tokens // count][:, :, :count]
    for _ in range(ROUNDS):
        members = _members(_nearest(keys, centroids), count)
        sizes = members.sum(2).unsqueeze(-1)
        centroids = torch.where(sizes > 0, (members.transpose(2, 3) @ keys) / sizes.clamp_min(1), centroids)
    codes = _nearest(keys, centroids)
    missing = CLUSTERS - count
    return {
        "centroids": torch.nn.functional.pad(centroids, (0, 0, 0, missing)).to(torch.bfloat16),
        "sizes": torch.nn.functional.pad(_members(codes, count).sum(2), (0, missing)),
        "codes": codes.to(torch.uint8),
    }


def _members(codes: torch.Tensor, count: int) -> torch.Tensor:
    """1 where a token belongs to a cluster: [batch, kv_heads, tokens, count] float32."""
    nothing = torch.zeros(*codes.shape, count, device=codes.device)
    return nothing.scatter_(-1, codes.unsqueeze(-1), 1.0)


def _nearest(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of each key: [batch, kv_heads, tokens] int64."""
    norms = centroids.square().sum(-1).unsqueeze(2)
    return (2 * keys @ centroids.transpose(2, 3) - norms).argmax(-1)
