"""What a cache looks like where someone looks at it: a few lines in a terminal, a small table in a notebook."""

from __future__ import annotations

import html

from oasis_cache.config import OasisConfig
from oasis_cache.stats import PHASES, OasisStats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """A number of bytes as people read it: `in_bytes(12_345_678)` is "11.8 MiB"."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} B"


def summary(stats: OasisStats, config: OasisConfig, closed: bool) -> list[tuple[str, str]]:
    """Labels and texts, in the order in which they are shown; the first one is the title."""
    title = "closed" if closed else "empty" if not stats.context_tokens else f"{stats.context_tokens:,} tokens"
    device = in_bytes(stats.device_bytes) + f", index {in_bytes(stats.index_bytes)}"
    if stats.other_device_bytes:
        device += f", other layers {in_bytes(stats.other_device_bytes)}"
    host = in_bytes(stats.host_bytes) + (", pinned" if stats.pinned else "")
    steps = ", ".join(f"{count:,} {phase}" for phase in PHASES if (count := getattr(stats, f"{phase}_steps")))
    if stats.fallback_steps:
        steps += f" ({stats.fallback_steps:,} by fallback)"
    rows = [
        ("OasisCache", title),
        ("settings", f"budget={config.budget}, index={config.index!r}, on_miss={config.on_miss!r}"),
        ("layers", f"{stats.oasis_layers} sparse on long contexts, {stats.other_layers} other"),
        ("device", device),
        ("host", host),
        ("steps", steps or "none yet"),
    ]
    if stats.sparse_steps:
        fetched = f"{in_bytes(stats.bytes_fetched)} fetched, waited {stats.stall_seconds:.2f} s"
        rows.append(("blocks", f"hit rate {stats.hit_rate:.3f}, {fetched}"))
    return rows + [("warning", message) for message in stats.warnings]


def as_text(rows: list[tuple[str, str]]) -> str:
    """Lines for a terminal."""
    (name, title), *rest = rows
    width = max(len(label) for label, _ in rest)
    return "\n".join([f"{name}: {title}", *(f"  {label:<{width}}  {text}" for label, text in rest)])


def as_html(rows: list[tuple[str, str]]) -> str:
    """A table without scripts or styles of its own beyond alignment."""
    (name, title), *rest = rows
    left = "text-align:left;vertical-align:top"
    cells = "".join(
        f'<tr><th style="{left}">{html.escape(label)}</th><td style="{left}">{html.escape(text)}</td></tr>'
        for label, text in rest
    )
    return f"<table><caption>{html.escape(name)}: {html.escape(title)}</caption>{cells}</table>"
