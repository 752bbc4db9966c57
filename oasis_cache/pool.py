"""The working set of one layer on the device: head-wise block slots, and behind them the window of newest tokens.

Both lie in one buffer `kv` [batch, kv_heads, num_slots * block_size + window capacity, kv_dim], so that attention reads one
contiguous range: order does not matter to attention. The window holds the recent blocks and the unsealed tail in order.
"""

from __future__ import annotations

import copy

import torch

from oasis_cache import kernels
from oasis_cache.blocks import FetchPlan, LayerShape


class WorkingSet:
    """Slots, window and staging area. Mutated by the layer and by landing transfers only.

    The staging area takes prefetched blocks (`on_miss="fetch"`), and those that left the slots last (a victim cache): what enters
    and leaves a selection is largely the same few blocks. Which slot a block gets is decided by selections alone, so that
    prefetching changes neither the slots' order nor, by it, one bit of attention's sums.
    """

    def __init__(
        self, shape: LayerShape, block_size: int, num_slots: int, window_capacity: int, num_staged: int = 0
    ) -> None:
        self.shape = shape
        self.block_size = block_size
        self.num_slots = num_slots
        self.num_staged = num_staged
        self.window_capacity = window_capacity
        self.has_empty_slots = True
        self.kv = torch.zeros(
            shape.batch,
            shape.kv_heads,
            num_slots * block_size + window_capacity,
            shape.kv_dim,
            dtype=shape.dtype,
            device=shape.device,
        )
        table = (shape.batch, shape.kv_heads, num_slots)
        self.block_of_slot = torch.full(table, -1, dtype=torch.int64, device=shape.device)
        self.last_wanted = torch.full(table, -1, dtype=torch.int64, device=shape.device)
        staged = (shape.batch, shape.kv_heads, num_staged)
        self.staging = torch.zeros(*staged, block_size, shape.kv_dim, dtype=shape.dtype, device=shape.device)
        self.block_of_staged = torch.full(staged, -1, dtype=torch.int64, device=shape.device)
        self.last_staged = torch.full(staged, -1, dtype=torch.int64, device=shape.device)
        self.window_start = 0  # position in the sequence of the window's first token
        self.window_length = 0
        self.clock = 0

    _TENSORS = ("kv", "block_of_slot", "last_wanted", "staging", "block_of_staged", "last_staged")

    def __deepcopy__(self, memo: dict) -> WorkingSet:
        twin = copy.copy(self)
        for name in self._TENSORS:
            setattr(twin, name, getattr(self, name).clone())
        return twin

    @property
    def slot_tokens(self) -> int:
        return self.num_slots * self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens in use: all slots and the window."""
        return self.slot_tokens + self.window_length

    @property
    def num_bytes(self) -> int:
        """Device bytes of slots, window, staging area and tables."""
        return sum(getattr(self, name).numel() * getattr(self, name).element_size() for name in self._TENSORS)

    @property
    def slots(self) -> torch.Tensor:
        """[batch, kv_heads, num_slots, block_size, kv_dim], a view of the buffer."""
        return self.kv[:, :, : self.slot_tokens].unflatten(2, (self.num_slots, self.block_size))

    @property
    def window(self) -> torch.Tensor:
        """[batch, kv_heads, window_length, kv_dim], a view of the buffer."""
        return self.kv[:, :, self.slot_tokens : self.num_tokens]

    def append(self, kv: torch.Tensor) -> None:
        """Put new tokens [batch, kv_heads, tokens, kv_dim] at the window's end."""
        tokens = kv.shape[2]
        assert self.window_length + tokens <= self.window_capacity, "the window overflows"
        self.kv[:, :, self.num_tokens : self.num_tokens + tokens] = kv
        self.window_length += tokens

    def advance_window(self, start: int) -> None:
        """Drop the tokens before position `start` from the window's front."""
        drop = start - self.window_start
        if drop <= 0:
            return
        kept = self.window[:, :, drop:].clone()
        self.window_start, self.window_length = start, kept.shape[2]
        self.window.copy_(kept)

    def replace_window(self, kv: torch.Tensor, start: int) -> None:
        """Make the window hold tokens [batch, kv_heads, tokens, kv_dim] whose first is at position `start`."""
        self.window_start, self.window_length = start, 0
        self.append(kv)

    def forget_from(self, block: int) -> None:
        """Empty the slots that hold blocks from number `block` on: those blocks are gone, or in the window."""
        gone = self.block_of_slot >= block
        self.block_of_slot.masked_fill_(gone, -1)
        self.last_wanted.masked_fill_(gone, -1)
        self.has_empty_slots = True

    def forget_staged(self) -> None:
        """Empty the staging area."""
        self.block_of_staged.fill_(-1)
        self.last_staged.fill_(-1)

    def want(self, wanted: torch.Tensor, num_blocks: int, max_fetch: int, generation: int) -> FetchPlan:
        """Enter a wanted set in the slots' table and return what must be fetched into `slots` for it.

        Args:
            wanted: [batch, kv_heads, count] distinct block numbers, best first, count at most `num_slots`.
            num_blocks: Blocks that exist before the window.
            max_fetch: Most fetches per KV head.
        """
        self.clock += 1
        if wanted.shape[2] == self.num_slots and max_fetch >= self.num_slots:
            self.has_empty_slots = False
        return _want(wanted, self.block_of_slot, self.last_wanted, num_blocks, max_fetch, self.clock, generation)

    def want_staged(self, scores: torch.Tensor, max_fetch: int, generation: int) -> FetchPlan:
        """Choose the best absent blocks for the staging area and return what must be fetched into `staging` for them.

        Args:
            scores: [batch, kv_heads, blocks] float32, the prediction; negative for blocks nobody may see.
            max_fetch: Most fetches per KV head; blocks that are staged already are none.
        """
        num_blocks = scores.shape[2]
        held = self.block_of_slot.masked_fill(self.block_of_slot < 0, num_blocks)
        padded = torch.nn.functional.pad(scores, (0, 1)).scatter(2, held, -1.0)[..., :num_blocks]
        best = padded.topk(min(self.num_staged, num_blocks), dim=-1)
        return _want(
            best.indices.masked_fill(best.values < 0, -1),
            self.block_of_staged,
            self.last_staged,
            num_blocks,
            min(max_fetch, self.num_staged),
            self.clock,
            generation,
        )

    def exchange_staged(self, plan: FetchPlan, evicted: torch.Tensor) -> tuple[FetchPlan, torch.Tensor]:
        """Move blocks that a plan wants and the staging area holds into their slots, and evicted ones into the staging area.

        Args:
            evicted: [batch, kv_heads, entries] int64, the block that each entry's slot held before the plan, -1: none.

        Returns:
            The plan without what was staged, and its number (a device scalar).
        """
        tables = (self.block_of_staged, self.last_staged, self.clock)
        left = kernels.exchange_blocks(plan.blocks, plan.slots, plan.mask, evicted, *tables, self.staging, self.slots)
        return FetchPlan(plan.blocks, plan.slots, left, plan.generation), (plan.mask ^ left).sum()

    def token_positions(self) -> torch.Tensor:
        """Sequence position of each token in use: [batch, kv_heads, num_tokens] int64; empty slots hold negative ones."""
        inside = torch.arange(self.block_size, device=self.kv.device)
        slots = (self.block_of_slot.unsqueeze(-1) * self.block_size + inside).flatten(2)
        window = torch.arange(self.window_start, self.window_start + self.window_length, device=self.kv.device)
        return torch.cat([slots, window.expand(*slots.shape[:2], -1)], dim=-1)

    def selected_rows(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors whose batch row i is the present row `rows[i]`, by name; rows: int64 [new batch]."""
        rows = rows.to(self.kv.device)
        return {name: getattr(self, name).index_select(0, rows) for name in self._TENSORS}

    def replace_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `selected_rows` gave."""
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def check_integrity(self) -> None:
        """Assert that no block has two slots in one head, and that no slot holds a block of the window."""
        held = self.block_of_slot.sort(dim=2).values
        assert not ((held[..., 1:] == held[..., :-1]) & (held[..., 1:] >= 0)).any(), "a block lies in two slots"
        assert bool((self.block_of_slot * self.block_size < max(self.window_start, 1)).all()), (
            "a slot holds a windowed block"
        )
        staged = self.block_of_staged.unsqueeze(-1)
        assert not ((staged == self.block_of_slot.unsqueeze(2)) & (staged >= 0)).any(), (
            "a block is staged and in a slot"
        )
        twice = (staged == self.block_of_staged.unsqueeze(2)) & (staged >= 0)
        assert bool((twice.sum(-1) <= 1).all()), "a block is staged twice"
        assert 0 <= self.window_length <= self.window_capacity


def _want(
    wanted: torch.Tensor,
    held: torch.Tensor,
    last_wanted: torch.Tensor,
    num_blocks: int,
    max_fetch: int,
    clock: int,
    generation: int,
) -> FetchPlan:
    """`delta_select` on a table of held blocks [batch, kv_heads, entries], which is brought up to date in place."""
    blocks, slots, mask = kernels.delta_select(wanted, held, last_wanted, num_blocks, max_fetch, clock)
    return FetchPlan(blocks, slots, mask, generation)
