"""Where complete KV rests beyond host memory: pages that have a home elsewhere, and a bounded set of frames to read them in."""

from oasis_cache.tiers.backing import Backing
from oasis_cache.tiers.pages import PagePool
from oasis_cache.tiers.pools import PagePools
from oasis_cache.tiers.spill import SpillFile
from oasis_cache.tiers.store import TieredStore

__all__ = ["Backing", "PagePool", "PagePools", "SpillFile", "TieredStore"]
