"""From query rows to the blocks attention will read: scores of all blocks, then the best per KV head."""

from __future__ import annotations

import torch

from oasis_cache.index import BlockIndex
from oasis_cache.kernels import reference


def select_blocks(
    index: BlockIndex,
    queries: torch.Tensor,
    group: int,
    num_blocks: int,
    count: int,
    sink_blocks: int,
    scaling: float,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks before the window that the rows want most.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        group: Query heads per KV head.
        num_blocks: Blocks before the window, the candidates.
        count: Blocks to choose, sinks included; at most `num_blocks`.
        sink_blocks: First blocks, always chosen.
        visible: [batch, num_blocks, block_size] bool, False for padding; None: all tokens are real.

    Returns:
        [batch, kv_heads, count] int64 distinct block numbers, best first. Blocks that no row may see come last.
    """
    scores = reference.rank_blocks(index.log_mass(queries, num_blocks, scaling, visible), group)
    scores[..., :sink_blocks] = float("inf")
    return scores.topk(count, dim=-1).indices
