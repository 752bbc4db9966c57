"""oasis_cache: run contexts whose KV cache does not fit the accelerator, from one argument of `generate`."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Imported when they are first asked for: the command line need not wait for PyTorch and transformers to say what it can do.
_MODULES = {
    "LayerStats": "stats",
    "OasisCache": "cache",
    "OasisConfig": "config",
    "OasisStats": "stats",
    "OasisWarning": "runtime",
    "StepTrace": "stats",
    "uninstall": "attention",
}


if not TYPE_CHECKING:  # a type checker shall not take every name for one of the package

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
