"""The tables of the pages, made from the committed results: `python -m eval.report` rewrites them in place.

Reads eval/quality/results/ (`python -m eval.quality.needle --out ...`, and so on); no number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eval.quality import accuracy, forced
from eval.quality.accuracy import describe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "quality" / "results"
NAMES = {"dense": "DynamicCache", "recency": "sink + recent tokens only"}


def needle_table(needle: dict[str, Any]) -> str:
    """Numbers found of numbers hidden, per method and length, with the budget and how the question was read."""
    rows = needle["summary"]
    lengths = sorted({row["length"] for row in rows})
    ways = {"": "exactly", "answer": "exactly", "question": "sparsely"}
    cells: dict[tuple[str, int | None, str], dict[int, str]] = {}
    for row in rows:
        key = (row["method"], row["budget"], row["way"])
        cells.setdefault(key, {})[row["length"]] = f"{row['found']}/{row['samples']}"
    lines = [
        "| cache | tokens read per step | question read | "
        + " | ".join(f"{length:,} tokens" for length in lengths)
        + " |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for (method, budget, way), found in cells.items():
        name = NAMES.get(method, f"OasisCache, `{method}`")
        read = "all" if budget is None else f"at most {budget}"
        lines.append(
            f"| {name} | {read} | {ways[way]} | " + " | ".join(found.get(length, "") for length in lengths) + " |"
        )
    return "\n".join(lines)


def needle_block() -> str:
    """What stands between the markers."""
    needle = json.loads((RESULTS / "needle.json").read_text())
    first = needle["arguments"]["first_seed"]
    return (
        "A seven-digit number hidden in a long text at five depths: how often the answer is right. The seeds (from "
        f"{first} on) were chosen because the dense model answers all; the last two rows retrieve nothing, as a control.\n\n"
        f"{needle_table(needle)}\n\n{describe(needle['environment'])}. Made by `python -m eval.quality.needle` and\n"
        "`python -m eval.report`; the answers are in eval/quality/results/."
    )


def ranking_table(rows: list[dict[str, Any]]) -> str:
    """Mass kept and overlap, a line per length and index, by the query that ranks."""
    counts = sorted({row["chosen_blocks"] for row in rows})
    lines = [
        "| tokens | index | " + " | ".join(f"mass, {k} blocks" for k in counts) + f" | overlap, {counts[-1]} blocks | "
        f"mass with the query before, {counts[-1]} blocks |",
        "|---|---|" + "---|" * (len(counts) + 2),
    ]
    for length in sorted({row["length"] for row in rows}):
        for index in dict.fromkeys(row["index"] for row in rows):
            mine = {
                (row["predictor"], row["chosen_blocks"]): row
                for row in rows
                if row["length"] == length and row["index"] == index
            }
            own = [mine["own query", count] for count in counts]
            cells = [f"{row['mass']:.3f} ({row['mass_p5']:.2f})" for row in own]
            cells += [f"{own[-1]['overlap']:.2f}", f"{mine['previous', counts[-1]]['mass']:.3f}"]
            lines.append(f"| {length:,} | `{index}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def residency_table(rows: list[dict[str, Any]]) -> str:
    """Hit rates, a line per budget, length and drafter, by cap; then with fewer spare blocks."""
    return "\n\n".join(
        _residency_table([row for row in rows if row["budget"] == budget])
        for budget in sorted({row["budget"] for row in rows})
    )


def _residency_table(rows: list[dict[str, Any]]) -> str:
    settings = list(dict.fromkeys((row["max_fetch"], row["spare"]) for row in rows))

    def name(setting: tuple[float | None, int]) -> str:
        cap, spare = setting
        return f"cap {'none' if cap is None else f'{cap:.0%}'}, {spare} spare"

    lines = [
        "| budget | tokens | drafts | right | " + " | ".join(map(name, settings)) + " |",
        "|---|---|---|---|" + "---|" * len(settings),
    ]
    for length in sorted({row["length"] for row in rows}):
        for drafter in dict.fromkeys(row["drafter"] for row in rows):
            mine = {
                (row["max_fetch"], row["spare"]): row
                for row in rows
                if row["length"] == length and row["drafter"] == drafter
            }
            if not mine:
                continue
            right = next(iter(mine.values()))["drafts_right"]
            cells = [f"{mine[setting]['hit_rate']:.3f}" for setting in settings]
            lines.append(
                f"| {rows[0]['budget']:,} | {length:,} | {drafter} | {'' if right is None else f'{right:.0%}'} | "
                + " | ".join(cells)
                + " |"
            )
    return "\n".join(lines)


def prediction_blocks() -> dict[str, str]:
    """What stands between the markers of docs/lookahead.md, by their names."""
    prediction = json.loads((RESULTS / "prediction.json").read_text())
    assisted = json.loads((RESULTS / "assisted.json").read_text())
    names = list(assisted["summary"][0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(line[name]) for name in names) + " |" for line in assisted["summary"]]
    arguments = assisted["arguments"]
    return {
        "ranking": f"{ranking_table(prediction['ranking'])}\n\n{describe(prediction['environment'])}; "
        f"{prediction['steps']} steps, all layers and KV heads.",
        "residency": residency_table(prediction["residency"]),
        "assisted": "\n".join(lines)
        + f"\n\n{arguments['length']:,} tokens, budget {arguments['budget']}, {arguments['new_tokens']} new tokens, three prompts; "
        f"{describe(assisted['environment'])}.",
    }


def handoff_block() -> str:
    """What crossed in one hand-off."""
    run = json.loads((RESULTS / "handoff.json").read_text())
    rows = {
        "dense keys and values": run["dense_bytes"],
        "before the first step: working set": run["of_which_working_set_bytes"],
        "before the first step: windows, tables": run["of_which_windows_and_tables_bytes"],
        "before the first step: block index": run["of_which_index_bytes"],
        f"later, in {run['new_tokens']} steps": run["bytes_later"],
    }
    lines = ["| | MB | share of dense |", "|---|---|---|"]
    lines += [f"| {name} | {size / 1e6:.1f} | {size / run['dense_bytes']:.1%} |" for name, size in rows.items()]
    less, with_index = run["dense_over_admitted_without_index"], run["dense_over_admitted"]
    equal = "equal" if run["equal_to_one_process"] else "not equal"
    text = [
        f"{run['context_tokens']:,} tokens, budget {run['budget']}: {less:.1f} times less KV than dense before the first step, "
        f"{with_index:.1f} times less with the block index.",
        f"{run['pages_at_first']:,} of {run['pages']:,} pages came at first, {run['pages_later']:,} later; tokens {equal} to those "
        "of one process.",
        f"{describe(run['environment'])}.",
        "Made by `python examples/handoff.py --context 8000 --new-tokens 32 --json eval/quality/results/handoff.json`.",
    ]
    return "\n".join([*lines, "", *text])


def tiers_block() -> str:
    """What stands between the markers of docs/tiers.md."""
    tiers = json.loads((RESULTS / "tiers.json").read_text())
    names = list(dict.fromkeys(row["tier"] for row in tiers["bytes"]))
    ratios = {(row["cache"], row["tier"]): row["ratio"] for row in tiers["bytes"]}
    types = list(dict.fromkeys(row["cache"] for row in tiers["bytes"]))
    logits = {row["tier"]: row for row in tiers["logits"]}
    lines = [
        "| `tier_dtype` | "
        + " | ".join(f"host bytes, {name}" for name in types)
        + " | KL, mean | 95 % | max | same token |",
        "|---|" + "---|" * (len(types) + 4),
    ]
    for name in names:
        row = logits[name]
        cells = [f"{ratios[cache, name]:.3f}" for cache in types]
        cells += [f"{row[key]:.1e}" for key in ("kl_mean", "kl_p95", "kl_max")] + [f"{row['top1']:.1%}"]
        label = "`None`, against the dense cache" if row["against"] == "dense" else f"`{name}`, against `None`"
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    ways = {"answer": "exactly", "question": "sparsely"}
    lines += [
        "",
        "| tokens | budget | question read | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for key in dict.fromkeys((row["length"], row["budget"], row["way"]) for row in tiers["answers"]):
        mine = {row["tier"]: row for row in tiers["answers"] if (row["length"], row["budget"], row["way"]) == key}
        cells = [f"{row['found']}/{row['samples']} ({row['unchanged']}/{row['samples']})" for row in mine.values()]
        lines.append(f"| {key[0]:,} | {key[1]} | {ways[key[2]]} | " + " | ".join(cells) + " |")
    arguments = tiers["arguments"]
    positions = logits[names[0]]["positions"]
    return (
        f"Host bytes of {tiers['bytes'][0]['tokens']:,} tokens against those of `None`; divergence of the next token's "
        f"distribution in nats, over {positions} positions behind {arguments['length']:,} tokens, budget {arguments['budget']}:\n\n"
        + "\n".join(lines[: 2 + len(names)])
        + "\n\nNumbers found of those hidden, and (in brackets) answers that are those of `None` word for word:\n"
        + "\n".join(lines[2 + len(names) :])
        + f"\n\n{describe(tiers['environment'])}. Made by `python -m eval.quality.tiers` and `python -m eval.report`."
    )


def two_levels_block() -> str:
    """What stands between the markers in docs/performance.md."""
    report = json.loads((RESULTS / "two_levels.json").read_text())
    what = {"text": "natural text", "number": "a hidden number"}
    lines = [
        "| attention mass of | budget | blocks ranked, besides the newest | kept, of what a full ranking keeps | in the layer that "
        "loses most |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        lines.append(
            f"| {what[row['what']]} | {row['budget']} | {row['candidates']} of {row['blocks']} | {row['mean']:.1%} | "
            f"{row['worst_layer']:.1%} |"
        )
    return (
        "\n".join(lines)
        + f"\n\n{report['length']:,} tokens; each hidden number is at another depth of the part that is clustered. "
        + f"{describe(report['environment'])}. Made by\n`python -m eval.quality.two_levels` and `python -m eval.report`."
    )


def forced_block() -> str:
    """Where answers are lost: steps that are fed the dense cache's tokens."""
    report = json.loads((RESULTS / "forced.json").read_text())
    contexts = report["contexts"]
    return (
        f"{forced.table(report)}\n\n{report['length']:,} tokens, {contexts} contexts, "
        f"{min(contexts, forced.PROSE_CONTEXTS)} of prose. "
        f"{describe(report['environment'])}. "
        f"Made by `python -m eval.quality.forced --contexts {contexts}` and\n`python -m eval.report`."
    )


def ruler_block() -> str:
    """lm-eval's own needle tasks at all lengths."""
    run = accuracy.Run(RESULTS / "ruler")
    return (
        f"{accuracy.task_table(run)}\n\n{run.describe()}; {run.config['seconds'] / 60:.0f} minutes. Made by\n"
        "`python -m eval.quality run --suite ruler --methods oasis` and `python -m eval.report`."
    )


def filled(text: str, name: str, block: str) -> str:
    """A page with another block between the markers of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{block}\n{end}{after}"


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    readme, lookahead = ROOT / "README.md", ROOT / "docs" / "lookahead.md"
    new = {readme: readme.read_text(), lookahead: lookahead.read_text()}
    for name, block in prediction_blocks().items():
        new[lookahead] = filled(new[lookahead], name, block)
    handoff, scores = ROOT / "docs" / "handoff.md", ROOT / "docs" / "accuracy.md"
    new[handoff] = filled(handoff.read_text(), "handoff", handoff_block())
    tiers = ROOT / "docs" / "tiers.md"
    new[tiers] = filled(tiers.read_text(), "tiers", tiers_block())
    performance = ROOT / "docs" / "performance.md"
    new[performance] = filled(performance.read_text(), "two-levels", two_levels_block())
    run = accuracy.Run(accuracy.COMMITTED)
    new[readme] = filled(new[readme], "accuracy", accuracy.readme_block(run))
    new[scores] = filled(scores.read_text(), "needles", needle_block())
    for name, block in (accuracy.blocks(run) | {"forced": forced_block(), "ruler": ruler_block()}).items():
        new[scores] = filled(new[scores], name, block)
    return new


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="only say whether the pages are up to date (exit code 1 if not)"
    )
    options = parser.parse_args(arguments)
    outdated = {page: text for page, text in pages().items() if page.read_text() != text}
    if options.check:
        return int(bool(outdated))
    for page, text in outdated.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
