"""What the layers of one cache share: settings, engine, host account, counters of warnings, the mask of the current forward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from oasis_cache.config import OasisConfig
from oasis_cache.masks import MaskMemo
from oasis_cache.selector import RowRoles
from oasis_cache.store import HostMemory
from oasis_cache.transfer import TransferEngine, make_engine


class OasisWarning(UserWarning):
    """Something works, but not as fast or as sparsely as asked for. Given once per cause and cache."""


@dataclass
class Runtime:
    """Shared state below the layers. A deep copy shares the engine and the host account, and nothing else."""

    config: OasisConfig
    engine: TransferEngine
    memory: HostMemory
    messages: dict[str, None] = field(default_factory=dict)
    masks: MaskMemo = field(default_factory=MaskMemo)
    roles: RowRoles | None = None
    closed: bool = False

    @classmethod
    def create(cls, config: OasisConfig) -> Runtime:
        return cls(config, make_engine(config.engine), HostMemory(config.max_host_bytes))

    def __deepcopy__(self, memo: dict) -> Runtime:
        return Runtime(self.config, self.engine, self.memory, dict(self.messages), closed=self.closed)

    def roles_of(self, batch: int, rows: int, device: torch.device) -> RowRoles | None:
        """What `OasisCache.row_roles` said of the current forward's rows.

        Raises:
            ValueError: It said so for a forward of another size.
        """
        if self.roles is not None and self.roles.decide.shape != (batch, rows):
            raise ValueError(
                f"row_roles were given for {tuple(self.roles.decide.shape)} batch rows and new tokens, but the forward has "
                f"{(batch, rows)}"
            )
        return None if self.roles is None else self.roles.on(device)

    def warn_once(self, message: str) -> None:
        """Warn, unless this cache said the same before."""
        if message not in self.messages:
            self.messages[message] = None
            warnings.warn(message, OasisWarning, stacklevel=2)

    def check_open(self) -> None:
        """Raise `RuntimeError` if the cache was closed."""
        if self.closed:
            raise RuntimeError("this OasisCache is closed and cannot be used again; make a new one")
