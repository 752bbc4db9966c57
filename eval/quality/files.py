"""Results as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all: an interrupt leaves the old file. Its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)
