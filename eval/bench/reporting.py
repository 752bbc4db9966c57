"""The tables of docs/performance.md (and of README.md, where it has the markers), made of the ledger's newest rows."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from eval.bench.cases import CASES, FLAT_CONTEXTS
from eval.bench.generation import QUANTITIES
from eval.bench.gpu.ledger import COLUMNS, ROOT
from eval.bench.measuring import PART
from eval.bench.providers import DYNAMIC, OASIS, STATIC
from eval.report import filled

IN_BRIEF = ("step-8192-float32", "step-32768-float32", "step-8192-bfloat16", "step-32768-bfloat16")
IN_A_LINE = 32768
PERFORMANCE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
Row = dict[str, str]


def read(ledger: Path) -> list[Row]:
    """All rows; cells that a row has not are empty."""
    with ledger.open(newline="", encoding="utf-8") as file:
        return [dict.fromkeys(COLUMNS, "") | row for row in csv.DictReader(file)]


def newest(rows: list[Row], kind: str) -> dict[str, list[Row]]:
    """For each case of a kind, in the order of `CASES`, the rows of the last run that measured it."""
    groups: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        if row["part"] == f"{PART} {kind}":
            groups.setdefault(row["case"], {}).setdefault((row["date"], row["commit"]), []).append(row)
    last = {case: list(runs.values())[-1] for case, runs in groups.items()}
    order = {case.name: place for place, case in enumerate(CASES)}
    return {case: last[case] for case in sorted(last, key=lambda name: order.get(name, len(order)))}


def steps_table(rows: list[Row]) -> str:
    """Decode steps behind each context."""
    cases = newest(rows, "step")
    lines = [
        "| context | type | cache | ms per step (20th to 80th percentile) | x DynamicCache | x StaticCache | on the device, of the "
        "dense KV | fetched or read per step | least bytes read, of the bandwidth | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, group in cases.items():
        _, context, dtype = case.split("-")
        for row in group:
            lines.append(
                f"| {int(context):,} | {dtype} | {row['provider']} | {spread(row)} | {times(row['ratio'])} | "
                f"{times(row['static_ratio'])} | {share(row)} | {megabytes(row['bytes_moved'])} | "
                f"{percent(row['read_percent'])} | {row['note']} |"
            )
    return _with_origin(lines, cases)


def flat_table(rows: list[Row]) -> str:
    """OasisCache behind a short and a long context."""
    cases = newest(rows, "flat")
    lines = [
        "| type | cache | context | ms per step (20th to 80th percentile) | step time, of the shorter context's | on the device, "
        "of the dense KV | MB on the device (index among them) | fetched per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, group in cases.items():
        for row in group:
            relative = f"{1 / float(row['ratio']):.2f}x" if row["ratio"] else ""
            cache, context = row["provider"].rsplit(" at ", 1)
            lines.append(
                f"| {case.rsplit('-', 1)[1]} | {cache} | {context} | {spread(row)} | {relative} | {share(row)} | "
                f"{megabytes(row['device_bytes'])} ({megabytes(row['index_bytes'])}) | {megabytes(row['bytes_moved'])} |"
            )
    return _with_origin(lines, cases)


def short_table(rows: list[Row]) -> str:
    """Steps within the budget: step time relative to DynamicCache's, with its spread."""
    cases = newest(rows, "short")
    lines = ["| context | type | cache | ms per step | step time, of DynamicCache's |", "|---|---|---|---|---|"]
    for case, group in cases.items():
        _, context, dtype = case.split("-")
        for row in group:
            low, middle, high = (1 / float(row[name]) for name in ("ratio_p80", "ratio", "ratio_p20"))
            relative = "" if row["provider"] == DYNAMIC else f"{middle:.3f}x ({low:.3f} to {high:.3f})"
            lines.append(f"| {int(context):,} | {dtype} | {row['provider']} | {spread(row)} | {relative} |")
    return _with_origin(lines, cases)


def batch_table(rows: list[Row]) -> str:
    """Tokens per second of several sequences."""
    cases = newest(rows, "batch")
    lines = ["| sequences | type | cache | ms per step | tokens/s | x DynamicCache |", "|---|---|---|---|---|---|"]
    for case, group in cases.items():
        _, batch, dtype = case.split("-")
        for row in group:
            rate = 1e3 * int(batch) / float(row["p50_ms"])
            lines.append(
                f"| {batch} | {dtype} | {row['provider']} | {spread(row)} | {rate:.1f} | {times(row['ratio'])} |"
            )
    return _with_origin(lines, cases)


def profile_table(rows: list[Row]) -> str:
    """The parts of a step, a column for each context and type."""
    cases = newest(rows, "profile")
    heads = [f"{int(context):,} tokens, {dtype}" for _, context, dtype in (case.split("-") for case in cases)]
    parts: dict[str, dict[str, Row]] = {}
    for case, group in cases.items():
        for row in group:
            parts.setdefault(row["quantity"], {})[case] = row
    lines = ["| milliseconds of | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for part, cells in parts.items():
        lines.append(f"| {part} | " + " | ".join(spread(cells[case]) if case in cells else "" for case in cases) + " |")
    return _with_origin(lines, cases)


def generate_table(rows: list[Row]) -> str:
    """`model.generate` end to end."""
    cases = newest(rows, "generate")
    lines = [
        "| type | cache | total | first token | ms per further token | total, x DynamicCache | further, x DynamicCache | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, group in cases.items():
        for provider in dict.fromkeys(row["provider"] for row in group):
            parts = {row["quantity"]: row for row in group if row["provider"] == provider}
            total, first, further = (parts[quantity] for quantity in QUANTITIES)
            lines.append(
                f"| {case.rsplit('-', 1)[1]} | {provider} | {seconds(total)} | {seconds(first)} | {spread(further)} | "
                f"{times(total['ratio'])} | {times(further['ratio'])} | {total['note']} |"
            )
    return _with_origin(lines, cases)


def prefill_table(rows: list[Row]) -> str:
    """A long prompt read: time and memory."""
    cases = newest(rows, "prefill")
    lines = [
        "| type | prompt | cache | first token | x DynamicCache | peak of memory beyond the model | of the dense KV |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, group in cases.items():
        for row in group:
            peak = int(row["peak_bytes"])
            lines.append(
                f"| {case.rsplit('-', 1)[1]} | {row['shape'].rsplit(', ', 1)[0]} | {row['provider']} | {seconds(row)} | "
                f"{times(row['ratio'])} | {megabytes(row['peak_bytes'])} | {peak / int(row['kv_bytes']):.2f}x |"
            )
    return _with_origin(lines, cases)


def speed_table(rows: list[Row]) -> str:
    """The few lines that say most."""
    lines = ["| one decode step | OasisCache | DynamicCache | StaticCache |", "|---|---|---|---|"]
    used: dict[str, list[Row]] = {}
    for case, group in newest(rows, "step").items():
        held = {row["provider"]: row for row in group}
        if case not in IN_BRIEF or OASIS not in held:
            continue
        used[case] = group
        _, context, dtype = case.split("-")
        cells = [f"{float(held[OASIS]['p50_ms']):.0f} ms"]
        for peer, column in ((DYNAMIC, "ratio"), (STATIC, "static_ratio")):
            ratio = f" ({float(held[OASIS][column]):.1f}x)" if held[OASIS][column] else ""
            cells.append(f"{float(held[peer]['p50_ms']):.0f} ms{ratio}" if peer in held else "")
        lines.append(f"| {int(context):,} tokens, {dtype} | " + " | ".join(cells) + " |")
    for case, group in newest(rows, "flat").items():
        if len(group) < 2 or not group[1]["ratio"]:
            continue
        used[case] = group
        short = group[0]["provider"].rsplit(" ", 1)[1]
        for long in group[1:]:
            provider, tokens = long["provider"].rsplit(" at ", 1)
            how = provider.removeprefix(OASIS).strip()
            cell = f"{float(long['p50_ms']):.0f} ms: {1 / float(long['ratio']):.2f}x the step behind {short}"
            cell += f"; {share(long)} of the dense KV"
            where = f"{tokens} tokens, {case.rsplit('-', 1)[1]}" + (f", `{how}`" if how else "")
            lines.append(f"| {where} | {cell} on the device | | |")
    return _with_origin(lines, used)


def speed_line(rows: list[Row]) -> str:
    """A sentence for README.md: the step behind 32,768 tokens, and how it grows."""
    said = []
    for case, group in newest(rows, "step").items():
        held = {row["provider"]: row for row in group}
        _, context, dtype = case.split("-")
        if int(context) == IN_A_LINE and {OASIS, DYNAMIC, STATIC} <= set(held):
            times_of = [f"{float(held[name]['p50_ms']):.0f} ms" for name in (OASIS, DYNAMIC, STATIC)]
            said.append(f"{times_of[0]} in {dtype} (`DynamicCache` {times_of[1]}, `StaticCache` {times_of[2]})")
    grows = [
        f"{1 / float(row['ratio']):.1f} times in {case.rsplit('-', 1)[1]}"
        for case, group in newest(rows, "flat").items()
        for row in group[1:2]
    ]
    short, long = FLAT_CONTEXTS
    return (
        f"A decode step on a CPU behind {IN_A_LINE:,} tokens takes {' and '.join(said)}; behind {long:,} tokens it takes "
        f"{' and '.join(grows)} as long as behind {short:,}."
    )


BLOCKS: dict[str, tuple[Callable[[list[Row]], str], str]] = {
    "speed": (speed_table, "step,flat"),
    "speed-line": (speed_line, "step,flat"),
    "steps": (steps_table, "step"),
    "flat": (flat_table, "flat"),
    "short": (short_table, "short"),
    "batch": (batch_table, "batch"),
    "profile": (profile_table, "profile"),
    "generate": (generate_table, "generate"),
    "prefill": (prefill_table, "prefill"),
}


def pages(ledger: Path) -> dict[Path, str]:
    """The pages as they should be."""
    rows = read(ledger)
    new = {}
    for page in (PERFORMANCE, README):
        text = page.read_text(encoding="utf-8")
        for name, (table, cases) in BLOCKS.items():
            if f"<!-- {name}:begin -->" not in text:
                continue
            measured = any(newest(rows, kind) for kind in cases.split(","))
            block = table(rows) if measured else f"Not measured yet: `python -m eval.bench run --cases {cases}`."
            text = filled(text, name, block)
        new[page] = text
    return new


def spread(row: Row) -> str:
    """Milliseconds: the median, and in brackets the 20th and the 80th percentile."""
    low, middle, high = (float(row[name]) for name in ("p20_ms", "p50_ms", "p80_ms"))
    digits = 0 if middle >= 100 else 1
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def seconds(row: Row) -> str:
    low, middle, high = (float(row[name]) / 1e3 for name in ("p20_ms", "p50_ms", "p80_ms"))
    return f"{middle:,.1f} s" + ("" if row["samples"] == "1" else f" ({low:,.1f} to {high:,.1f})")


def times(cell: str) -> str:
    return f"{float(cell):.2f}x" if cell else ""


def percent(cell: str) -> str:
    return f"{float(cell):.0f} %" if cell else ""


def megabytes(cell: str) -> str:
    return f"{int(cell) / 1e6:,.1f} MB" if cell else ""


def share(row: Row) -> str:
    """Bytes on the device of those of the dense KV: "1/24.0"."""
    if not row["device_bytes"] or not row["kv_bytes"]:
        return ""
    return f"1/{int(row['kv_bytes']) / int(row['device_bytes']):.1f}"


def _with_origin(lines: list[str], cases: dict[str, list[Row]]) -> str:
    """The table, and on what, with what and how often its rows were measured."""
    origins: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for group in cases.values():
        first = group[0]
        numba = f", numba {first['numba']}" if first["numba"] else ""
        where = f"{first['hardware']}, torch {first['torch']}, transformers {first['transformers']}{numba}"
        commits, counts = origins.setdefault(where, ({}, {}))
        commits[first["commit"] + (" with changes" if first["dirty"] == "yes" else "")] = None
        counts.update(dict.fromkeys(row["samples"] for row in group))
    described = [
        f"{where}, commit {', '.join(commits)}, "
        + ("one run" if list(counts) == ["1"] else f"medians of {', '.join(counts)} in turns")
        for where, (commits, counts) in origins.items()
    ]
    return "\n".join([*lines, "", f"SmolLM2-135M-Instruct; {'; '.join(described)}."])
