"""A layer that attends and keeps a recurrent state beside it (Falcon-H1): an `OasisLayer` and transformers' own in one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from oasis_cache.layer import OasisLayer
from oasis_cache.runtime import Runtime


class OasisHybridLayer(LinearAttentionLayer, OasisLayer):
    """Keys and values as in an `OasisLayer`; convolution and recurrent states as transformers keeps them, on the device."""

    is_compileable = False

    def __init__(self, runtime: Runtime, number_of_states: int = 1, **_: Any) -> None:
        OasisLayer.__init__(self, runtime)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def __deepcopy__(self, memo: dict) -> OasisHybridLayer:
        twin = OasisLayer.__deepcopy__(self, memo)
        for name, value in vars(self).items():
            if isinstance(value, dict):  # states and what is known of them, by number
                setattr(twin, name, {key: copy.deepcopy(part, memo) for key, part in value.items()})
        return twin

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Two positional tensors are keys and values, anything else is for the states."""
        if len(args) == 2:
            OasisLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    @property
    def states(self) -> list[torch.Tensor]:
        """The states there are."""
        return [state for state in (*self.conv_states.values(), *self.recurrent_states.values()) if state is not None]

    def crop(self, tokens_to_remove: int) -> None:
        """Raises `RuntimeError` unless past states are recorded, as they are in assisted decoding."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        OasisLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        OasisLayer.reset(self)

    def _select_states(self, rows: torch.Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = state.index_select(0, rows.to(state.device))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select_states(beam_idx.to(torch.int64))
        OasisLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.shape is not None:
            self._select_states(torch.arange(self.shape.batch).repeat_interleave(repeats))
        OasisLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.shape is not None:
            self._select_states(torch.arange(self.shape.batch)[torch.as_tensor(indices).cpu()].flatten())
        OasisLayer.batch_select_indices(self, indices)

    def offload(self) -> None:
        """Nothing to do, as in an `OasisLayer`."""

    def prefetch(self) -> None:
        """Nothing to do, as in an `OasisLayer`."""
