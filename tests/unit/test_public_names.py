"""The package's names are there when they are asked for, and no others."""

from __future__ import annotations

import importlib
import inspect

import pytest

import oasis_cache


@pytest.mark.parametrize("name", [name for name in oasis_cache.__all__ if name != "__version__"])
def test_public_names_are_those_of_their_modules(name, monkeypatch):
    monkeypatch.delitem(vars(oasis_cache), name, raising=False)  # as before it was asked for
    found = getattr(oasis_cache, name)
    assert name in dir(oasis_cache)
    assert found.__name__ == name and inspect.getdoc(found)
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert vars(oasis_cache)[name] is found


def test_a_name_that_is_not_there_is_named():
    assert oasis_cache.config.OasisConfig is oasis_cache.OasisConfig
    with pytest.raises(AttributeError, match="module 'oasis_cache' has no attribute 'OasisCash'"):
        oasis_cache.OasisCash  # noqa: B018
