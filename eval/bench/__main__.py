"""Speed and memory on this machine's CPU: named cases, caches in turns, rows of the ledger, and the tables made of them.

    python -m eval.bench run --list                      # the cases
    python -m eval.bench run                             # decode steps: all that need no real prefill
    python -m eval.bench run --cases step-32768-float32 --rounds 15
    python -m eval.bench run --cases generate-8192-float32,prefill-32768-float32
    python -m eval.bench report                          # docs/performance.md's tables from the ledger

The model is the packaged SmolLM2-135M-Instruct. Names of cases may be shortened from behind: "step", "step-8192".
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from eval.bench import reporting
from eval.bench.cases import BY_DEFAULT, CASES, DTYPES, chosen, names_in
from eval.bench.filling import Source
from eval.bench.generation import measure_generation, measure_prefill, prompt
from eval.bench.gpu.ledger import LEDGER, append, environment
from eval.bench.gpu.measure import Row
from eval.bench.measuring import bandwidths, measure
from eval.bench.profile import measure_profile
from eval.bench.providers import QUANTO, compile_quanto, providers
from oasis_cache.packaged import load_model


def run(options: argparse.Namespace, console: Console) -> int:
    if options.list:
        for case in CASES:
            console.print(f"{case.name:<26} {case.shape}, {options.rounds or case.rounds} rounds", highlight=False)
        return 0
    try:
        cases, wanted = chosen(options.cases), providers()
        if options.providers is not None:
            named = names_in(options.providers, "caches", [provider.name for provider in wanted])
            wanted = [provider for provider in wanted if provider.name in named]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    known = environment("cpu") | {"tests": "make test"}

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    def keep(rows: list[Row]) -> None:
        append(options.ledger, [known | asdict(row) for row in rows])
        for row in rows:
            ratio = "" if row.ratio is None else f"{row.ratio:6.2f}x {row.baseline}"
            say(f"{row.case:<26} {row.quantity:<18} {row.provider:<28} {row.p50_ms:10.1f} ms {ratio}  {row.note}")

    ceilings = bandwidths()
    keep(ceilings)
    read_rate = next(row.gb_per_s * 1e9 for row in ceilings if row.case == "read" and row.gb_per_s)
    for dtype in DTYPES:
        mine = [case for case in cases if case.dtype == dtype]
        for case in mine:
            if case.kind == "prefill":
                tokens, rounds = options.prefill_tokens or case.context, options.rounds or case.rounds
                keep(measure_prefill(case, rounds, tokens, options.prefill_chunk, options.model, say))
        in_process = [case for case in mine if case.kind != "prefill"]
        if not in_process:
            continue
        model, tokenizer = load_model(options.model, DTYPES[dtype])
        if any(provider.name == QUANTO for provider in wanted) and any(case.kind == "step" for case in in_process):
            compile_quanto()
        steps = any(case.kind != "generate" for case in in_process)
        source = Source.of_text(model, tokenizer) if steps else None
        for case in in_process:
            rounds = options.rounds or case.rounds
            if source is None or case.kind == "generate":
                ids = prompt(tokenizer, options.prompt_tokens or case.context)
                keep(measure_generation(model, ids, case, rounds, options.new_tokens, say))
            elif case.kind == "profile":
                keep(measure_profile(model, source, case, rounds, say))
            else:
                keep(measure(model, source, case, rounds, wanted, read_rate, say))
        del model, source
    return 0


def report(options: argparse.Namespace, console: Console) -> int:
    pages = reporting.pages(options.ledger)
    outdated = {page: text for page, text in pages.items() if page.read_text(encoding="utf-8") != text}
    for page, text in outdated.items():
        console.print(f"{'outdated' if options.check else 'written'}: {page.name}")
        if not options.check:
            page.write_text(text, encoding="utf-8")
    return int(bool(outdated)) if options.check else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure, and append rows to the ledger")
    running.add_argument("--cases", default=BY_DEFAULT, help=f"comma-separated; default: {BY_DEFAULT}")
    running.add_argument("--rounds", type=int, help="turns of each cache; default: as --list says")
    running.add_argument("--list", action="store_true", help="only list the cases")
    running.add_argument(
        "--providers", help="comma-separated names of the caches in decode steps (others have their own); default: all"
    )
    running.add_argument("--model", help="path or hub id; default: the packaged SmolLM2-135M-Instruct")
    running.add_argument("--new-tokens", type=int, default=256, help="of the generate cases")
    running.add_argument("--prompt-tokens", type=int, help="of the generate cases; default: 7,900")
    running.add_argument("--prefill-tokens", type=int, help="of the prefill cases; default: as their name says")
    running.add_argument("--prefill-chunk", type=int, default=4096, help="tokens read at a time; 0: all at once")
    reports = commands.add_parser("report", help="write the tables of the pages from the ledger")
    reports.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is outdated")
    for command, function in ((running, run), (reports, report)):
        command.set_defaults(function=function)
        command.add_argument("--ledger", type=Path, default=LEDGER, help="the CSV file of results")
    options = parser.parse_args(arguments)
    result: int = options.function(options, Console(width=160))
    return result


if __name__ == "__main__":
    raise SystemExit(main())
