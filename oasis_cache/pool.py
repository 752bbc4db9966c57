"""The working set of one layer on the device: head-wise block slots, and behind them the window of newest tokens.

Both lie in one buffer `kv` [batch, kv_heads, num_slots * block_size + window capacity, kv_dim], so that attention reads one
contiguous range: order does not matter to attention. The window holds the recent blocks and the unsealed tail in order.
"""

from __future__ import annotations

import copy

import torch

from oasis_cache.blocks import FetchPlan, LayerShape
from oasis_cache.kernels import reference


class WorkingSet:
    """Slots and window. Mutated by the layer and by landing transfers only."""

    def __init__(self, shape: LayerShape, block_size: int, num_slots: int, window_capacity: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self.num_slots = num_slots
        self.window_capacity = window_capacity
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
        self.window_start = 0  # position in the sequence of the window's first token
        self.window_length = 0
        self.clock = 0

    def __deepcopy__(self, memo: dict) -> WorkingSet:
        twin = copy.copy(self)
        twin.kv, twin.block_of_slot, twin.last_wanted = self.kv.clone(), self.block_of_slot.clone(), self.last_wanted.clone()
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
        """Device bytes of the buffer and its tables."""
        return sum(t.numel() * t.element_size() for t in (self.kv, self.block_of_slot, self.last_wanted))

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

    def want(self, wanted: torch.Tensor, num_blocks: int, max_fetch: int, generation: int) -> FetchPlan:
        """Enter a wanted set in the table and return what must be fetched for it.

        Args:
            wanted: [batch, kv_heads, count] distinct block numbers, best first, count at most `num_slots`.
            num_blocks: Blocks that exist before the window.
            max_fetch: Most fetches per KV head.
        """
        blocks, slots, mask = reference.delta_select(wanted, self.block_of_slot, self.last_wanted, num_blocks, max_fetch)
        self.clock += 1
        self.block_of_slot.scatter_(2, slots, torch.where(mask, blocks, self.block_of_slot.gather(2, slots)))
        is_wanted = torch.zeros(*wanted.shape[:2], num_blocks + 1, dtype=torch.bool, device=wanted.device)
        is_wanted.scatter_(2, wanted, True)
        held = self.block_of_slot.masked_fill(self.block_of_slot < 0, num_blocks)
        self.last_wanted.masked_fill_(is_wanted.gather(2, held), self.clock)
        return FetchPlan(blocks, slots, mask, generation)

    def token_positions(self) -> torch.Tensor:
        """Sequence position of each token in use: [batch, kv_heads, num_tokens] int64; empty slots hold negative ones."""
        inside = torch.arange(self.block_size, device=self.kv.device)
        slots = (self.block_of_slot.unsqueeze(-1) * self.block_size + inside).flatten(2)
        window = torch.arange(self.window_start, self.window_start + self.window_length, device=self.kv.device)
        return torch.cat([slots, window.expand(*slots.shape[:2], -1)], dim=-1)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Batch row i becomes the former row `rows[i]`; rows: int64 [new batch]."""
        rows = rows.to(self.kv.device)
        self.kv = self.kv.index_select(0, rows)
        self.block_of_slot = self.block_of_slot.index_select(0, rows)
        self.last_wanted = self.last_wanted.index_select(0, rows)

    def check_integrity(self) -> None:
        """Assert that no block has two slots in one head, and that no slot holds a block of the window."""
        held = self.block_of_slot.sort(dim=2).values
        assert not ((held[..., 1:] == held[..., :-1]) & (held[..., 1:] >= 0)).any(), "a block lies in two slots"
        assert bool((self.block_of_slot * self.block_size < max(self.window_start, 1)).all()), "a slot holds a windowed block"
        assert 0 <= self.window_length <= self.window_capacity
