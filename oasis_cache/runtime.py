"""What the layers of one cache share: settings, engine, host account, counters of warnings, the mask of the current forward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from oasis_cache.config import OasisConfig
from oasis_cache.masks import MaskMemo
from oasis_cache.selector import RowRoles
from oasis_cache.store import HostMemory
from oasis_cache.tiers import PagePools, SpillFile
from oasis_cache.transfer import TransferEngine, make_engine


class OasisWarning(UserWarning):
    """Something works, but not as fast or as sparsely as asked for. Given once per cause and cache."""


@dataclass
class Runtime:
    """Shared state below the layers. A deep copy shares the engine, the host account and the pages, and nothing else."""

    config: OasisConfig
    engine: TransferEngine
    memory: HostMemory
    pools: PagePools | None = None  # where pages rest that need not be in host memory; None: all are
    messages: dict[str, None] = field(default_factory=dict)
    masks: MaskMemo = field(default_factory=MaskMemo)
    roles: RowRoles | None = None
    closed: bool = False

    @classmethod
    def create(cls, config: OasisConfig, tiered: bool = False) -> Runtime:
        """A new cache's; `tiered`: its pages may have homes outside of host memory even without `config.spill`.

        Raises:
            OSError: No spill file can be made.
        """
        memory = HostMemory(config.max_host_bytes)
        pools = PagePools(memory, SpillFile(config.spill) if config.spill is not None else None)
        tiered = tiered or config.spill is not None
        engine = make_engine("threads" if tiered and config.engine == "auto" else config.engine)
        return cls(config, engine, memory, pools if tiered else None)

    def __deepcopy__(self, memo: dict) -> Runtime:
        if self.pools is not None:
            self.pools.num_users += 1
        return Runtime(self.config, self.engine, self.memory, self.pools, dict(self.messages), closed=self.closed)

    def require(self, num_bytes: int, purpose: str) -> None:
        """Raise `MemoryError` or `OSError` with the numbers if pages of `num_bytes` more find no place; reserves nothing."""
        (self.pools or self.memory).require(num_bytes, purpose)

    def close(self) -> None:
        """Give back what is shared, with the last copy. Idempotent."""
        if not self.closed:
            self.closed = True
            self.engine.close()
            if self.pools is not None:
                self.pools.close()

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
