"""What commands share: reports as JSON, to a file or to the standard output in place of the words, and advice to install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STDOUT = "-"


def how_to_install(extra: str) -> str:
    """The command that brings an extra of this package, which is in no registry: it is installed from a clone."""
    return f'pip install -e ".[{extra}]", in a clone of the repository'


def check_report_file(json_file: str | None) -> None:
    """See to it that a report can be written, before what it is about takes time.

    Args:
        json_file: A path, whose folder is made; "-" for the standard output; None for no report.

    Raises:
        ValueError: The file cannot be written.
    """
    if json_file is None or json_file == STDOUT:
        return
    path = Path(json_file)
    if not json_file or path.is_dir():
        raise ValueError(f"json_file={json_file!r} names no file that could be written")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.touch()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"json_file={json_file!r} cannot be written: {error}") from error


def write_report(report: Any, json_file: str | None) -> None:
    """Write a report of plain values to where `check_report_file` says."""
    written = json.dumps(report, indent=2) + "\n"
    if json_file == STDOUT:
        print(written, end="")
    elif json_file is not None:
        Path(json_file).write_text(written, encoding="utf-8")
