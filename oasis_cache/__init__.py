"""oasis_cache: run contexts whose KV cache does not fit the accelerator, from one argument of `generate`."""

from oasis_cache.attention import uninstall
from oasis_cache.cache import OasisCache
from oasis_cache.config import OasisConfig
from oasis_cache.runtime import OasisWarning
from oasis_cache.stats import LayerStats, OasisStats, StepTrace

__version__ = "0.1.0"

__all__ = [
    "LayerStats",
    "OasisCache",
    "OasisConfig",
    "OasisStats",
    "OasisWarning",
    "StepTrace",
    "__version__",
    "uninstall",
]
