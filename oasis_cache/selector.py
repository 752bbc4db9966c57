"""From query rows to blocks: what attention reads now, and what the next step should want."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from oasis_cache import kernels
from oasis_cache.index import BlockIndex
from oasis_cache.kernels import reference


@dataclass(frozen=True)
class RowRoles:
    """Which rows of a forward have a say, for loops that know more of their rows than that they are tokens.

    Attributes:
        decide: [batch, rows] bool: rows whose blocks attention reads; at least one in each batch row.
        predict: [batch, rows] bool: rows that rank blocks for the next step.
    """

    decide: torch.Tensor
    predict: torch.Tensor
    _copies: dict[torch.device, RowRoles] = field(default_factory=dict, repr=False, compare=False)

    def on(self, device: torch.device) -> RowRoles:
        """The same on a device, copied there once: layers may lie on several in turn."""
        if self.decide.device == device:
            return self
        if device not in self._copies:
            waits = device.type != "cuda"  # a host that reads must wait for the copy; a device has it in its order
            decide, predict = (part.to(device, non_blocking=not waits) for part in (self.decide, self.predict))
            self._copies[device] = RowRoles(decide, predict)
        return self._copies[device]


@dataclass(frozen=True)
class BlockScores:
    """Estimated attention mass of the blocks before the window: of all, or of the candidates that a coarse level chose.

    Attributes:
        rows: [batch, kv_heads, rows, blocks] float32 in [0, 1], mean over the query group; -1 for blocks a row may not see.
        best: [batch, kv_heads, blocks]: the maximum over the rows that decide.
        predicted: The maximum over the rows that predict.
        log_mass: [batch, kv_heads, group * rows, blocks] float32, log-sum-exp of the estimated scores.
        first_block: [batch] int64, the first block with a token that is no padding; None: block 0 everywhere.
        roles: None: all rows decide and predict.
        chosen: [batch, kv_heads, candidates] int64, the numbers of the blocks that the others name by their places here, in
            ascending order; None: all blocks.
    """

    rows: torch.Tensor
    best: torch.Tensor
    predicted: torch.Tensor
    log_mass: torch.Tensor
    first_block: torch.Tensor | None = None
    roles: RowRoles | None = None
    chosen: torch.Tensor | None = None

    def numbers(self, places: torch.Tensor) -> torch.Tensor:
        """Block numbers of places among the scores: int64 [batch, kv_heads, count] both."""
        return places if self.chosen is None else self.chosen.gather(2, places)

    def of_all(self, num_blocks: int) -> BlockScores:
        """The same over all blocks: what was not chosen has no mass."""
        if self.chosen is None:
            return self

        def spread(scores: torch.Tensor, nothing: float) -> torch.Tensor:
            chosen = self.chosen
            assert chosen is not None
            if scores.dim() == 4:
                chosen = chosen.unsqueeze(2).expand(-1, -1, scores.shape[2], -1)
            return scores.new_full((*scores.shape[:-1], num_blocks), nothing).scatter_(-1, chosen, scores)

        rows, best, predicted = (spread(part, 0.0) for part in (self.rows, self.best, self.predicted))
        return BlockScores(rows, best, predicted, spread(self.log_mass, float("-inf")), self.first_block, self.roles)


def score_blocks(
    index: BlockIndex,
    queries: torch.Tensor,
    group: int,
    num_blocks: int,
    scaling: float,
    visible: torch.Tensor | None = None,
    roles: RowRoles | None = None,
    bias: torch.Tensor | None = None,
    sink_blocks: int = 0,
) -> BlockScores:
    """Score the blocks before the window, or those of them that are worth it.

    Args:
        queries: [batch, kv_heads, group * rows, key_dim].
        group: Query heads per KV head.
        num_blocks: Blocks before the window, the candidates.
        visible: [batch, num_blocks, block_size] bool, False for padding; None: all tokens are real.
        bias: [batch or 1, kv_heads or 1, group * rows or rows, num_blocks], what the scores of a block's tokens are raised by.
        sink_blocks: First blocks, which are scored in any case.
    """
    chosen = None
    if visible is None and bias is None:  # what hides or raises single tokens, clusters do not know
        chosen = index.candidates(
            queries, group, num_blocks, scaling, sink_blocks, None if roles is None else roles.decide
        )
    rows, best, log_mass = index.score(queries, group, num_blocks, scaling, visible, chosen)
    if bias is not None and index.by_scores:
        if bias.shape[2] != log_mass.shape[2]:
            bias = bias.repeat(1, 1, group, 1)
        log_mass = log_mass + bias
        rows = reference.rank_rows(log_mass, group)
        best = rows.amax(2)
    first_block = None if visible is None else visible.any(-1).to(torch.uint8).argmax(-1)
    if roles is None:
        return BlockScores(rows, best, best, log_mass, first_block, None, chosen)
    best, predicted = _best_of(rows, roles.decide), _best_of(rows, roles.predict)
    return BlockScores(rows, best, predicted, log_mass, first_block, roles, chosen)


def _best_of(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The maximum over the chosen rows [batch, rows] of scores [batch, kv_heads, rows, blocks]."""
    return rows.masked_fill(~chosen[:, None, :, None], -1.0).amax(2)


def choose_blocks(
    scores: torch.Tensor, count: int, sink_blocks: int, first_block: torch.Tensor | None = None
) -> torch.Tensor:
    """The best blocks of each KV head, the sinks always among them.

    Args:
        scores: [batch, kv_heads, blocks].
        count: Blocks to choose, sinks included; at most the blocks there are.
        first_block: [batch] int64, where each sequence begins, and its sinks with it; None: block 0.

    Returns:
        [batch, kv_heads, count] int64 distinct block numbers, best first. Blocks that no row may see come last.
    """
    return _with_sinks(scores, sink_blocks, first_block).topk(count, dim=-1).indices


def choose_for_reading(scores: BlockScores, count: int, sink_blocks: int) -> torch.Tensor:
    """The blocks that `choose_blocks` chooses by `scores.best`, as numbers, in an order that only depends on which they are.

    Returns:
        [batch, kv_heads, count] int64.
    """
    ranked = _with_sinks(scores.best, sink_blocks, scores.first_block)
    return scores.numbers(kernels.top_blocks(ranked, count))


def _with_sinks(scores: torch.Tensor, sink_blocks: int, first_block: torch.Tensor | None) -> torch.Tensor:
    """Scores in which the sinks are above all."""
    scores = scores.clone()
    if first_block is None:
        scores[..., :sink_blocks] = float("inf")
    elif sink_blocks:
        sinks = first_block.unsqueeze(-1) + torch.arange(sink_blocks, device=scores.device)
        sinks = sinks.clamp_max(scores.shape[2] - 1)[:, None].expand(-1, scores.shape[1], -1)
        scores.scatter_(2, sinks, float("inf"))
    return scores


def predict_scores(scores: BlockScores, mode: str) -> torch.Tensor:
    """What the next step should want, before residency is looked at: [batch, kv_heads, blocks].

    Args:
        mode: `"draft"`: all rows, the drafts above all (OasisKV, its lookahead row); `"previous"`: row 0, the newest token
            that is certain; `"auto"`: as `"draft"`.
    """
    return scores.rows[:, :, 0] if mode == "previous" else scores.predicted


def refine_by_attention(
    scores: BlockScores,
    lse: torch.Tensor,
    mass: torch.Tensor,
    block_of_slot: torch.Tensor,
    group: int,
    mode: str,
) -> torch.Tensor:
    """Rank resident blocks by the attention mass they received and absent ones by the index, on one scale.

    The index's log-mass of an absent block, less the row's own log-sum-exp, is the mass the block would have received beside
    what was read; so both are shares of the same softmax.

    Args:
        lse: [batch, kv_heads, group * rows] float32, of the attention just computed.
        mass: [batch, kv_heads, rows, slots] float32, attention mass per slot, mean over the group.
        block_of_slot: [batch, kv_heads, slots] int64, -1 where empty.

    Returns:
        [batch, kv_heads, blocks] float32.
    """
    would = (scores.log_mass - lse.unsqueeze(-1)).exp().nan_to_num(0.0).unflatten(2, (group, -1)).mean(2)
    held = block_of_slot.clamp_min(0).unsqueeze(2).expand(-1, -1, would.shape[2], -1)
    would = would.scatter(3, held, torch.where(block_of_slot.unsqueeze(2) >= 0, mass, would.gather(3, held)))
    would = would.masked_fill(scores.rows < 0, -1.0)
    if mode == "previous":
        return would[:, :, 0]
    return would.amax(2) if scores.roles is None else _best_of(would, scores.roles.predict)
