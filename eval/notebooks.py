"""Run the notebooks from their first cell to their last: `python -m eval.notebooks [--write] [NAME ...]`.

With --write the outputs go into the files. Exit status 1 if a cell raises, or if outputs are too large to be committed.

Needs the extras `notebook` and `demo-tools` and the packaged model (`make notebooks`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
MOST_BYTES = 400_000  # of a notebook with its outputs
CELL_SECONDS = 1200


def run(path: Path) -> nbformat.NotebookNode:
    """Execute a notebook; what changes from run to run without meaning is left out of the result."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=CELL_SECONDS, coalesce_streams=True, resources=where).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to run, without .ipynb (default: all)")
    parser.add_argument("--write", action="store_true", help="write the outputs into the files")
    parsed = parser.parse_args(arguments)
    paths = [FOLDER / f"{name}.ipynb" for name in parsed.names] or sorted(FOLDER.glob("*.ipynb"))
    if missing := [path.name for path in paths if not path.is_file()]:
        parser.error(f"no notebook of that name: {', '.join(missing)}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    failed = 0
    for path in paths:
        started = time.perf_counter()
        try:
            notebook = run(path)
        except (CellExecutionError, CellTimeoutError) as error:
            print(f"{path.name}: a cell failed\n{error}", file=sys.stderr)
            failed += 1
            continue
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        if len(text) > MOST_BYTES:
            print(f"{path.name}: {len(text):,} bytes with outputs, at most {MOST_BYTES:,}", file=sys.stderr)
            failed += 1
        elif parsed.write:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {len(text) / 1000:.0f} kB", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
