"""Accuracy against the dense cache and other methods.

python -m eval.quality run --suite small --out FOLDER     measure
python -m eval.quality report [FOLDER]                    tables and plots of a run, into docs/ where no folder is named
python -m eval.quality lm-eval ...                        lm-eval's own command line, where --model oasis is known
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eval.quality import accuracy, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run.add_arguments(commands.add_parser("run", help="a suite through methods", description=run.__doc__))
    accuracy.add_arguments(commands.add_parser("report", help="tables and plots", description=accuracy.__doc__))
    commands.add_parser("lm-eval", help="lm-eval's command line", add_help=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["lm-eval"]:
        from eval.quality import lm_eval_model  # here, because lm-eval comes with the eval extra

        return lm_eval_model.main(given[1:])
    options = parser.parse_args(given)
    return {"run": run.main, "report": accuracy.main}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
