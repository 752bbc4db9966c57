"""Measurements of oasis_cache: run from the root of the repository, not part of the installed package."""
