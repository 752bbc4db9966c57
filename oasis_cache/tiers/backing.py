"""What a page's home is to the tiers above it: something that gives pages by key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Backing(ABC):
    """Pages that rest outside of this process's memory: a spill file, a saved file, another machine.

    Attributes:
        rereads: Whether a page that was read may be dropped, because reading it again costs as much as from a spill file. If not,
            pages stay in host memory once read, or go to the spill file.
    """

    rereads = True

    @abstractmethod
    def read(self, keys: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Bring pages into memory. Called from several threads at once, and by none that holds a lock.

        Args:
            keys: [n] int64, what the pages were registered by, ascending.
            out: n writable uint8 arrays, one a page, each contiguous, at least as long as the page, and changed in place.

        Raises:
            OSError: A page could not be had whole. What `out` holds then is not used.
        """

    def close(self) -> None:
        """Give back what is held. Idempotent."""
