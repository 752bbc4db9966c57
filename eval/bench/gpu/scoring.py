"""Ranking all blocks of a context: the scoring kernels against PyTorch's operations, and the choice of the best."""

from __future__ import annotations

from eval.bench.gpu.measure import Bench, check
from oasis_cache import kernels
from oasis_cache.kernels import reference
from oasis_cache.selector import choose_blocks

KV_HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 16


def run(bench: Bench) -> None:
    contexts = (1024,) if bench.tiny else (8192, 32768, 131072)
    cases = [(kind, context, rows) for context in contexts for kind in ("int2", "minmax") for rows in (1, 5)]
    for place, case in enumerate(cases):
        measure(bench, *case, seconds=bench.left / (len(cases) - place))


def measure(bench: Bench, kind: str, context: int, rows: int, seconds: float) -> None:
    blocks = context // BLOCK
    keys = bench.random(1, KV_HEADS, blocks, BLOCK, DIM)
    arrays = reference.quantise_int2(keys) if kind == "int2" else (keys.amin(3), keys.amax(3))
    del keys
    num_bytes = sum(array.numel() * array.element_size() for array in arrays)
    sets = [arrays] + [tuple(array.clone() for array in arrays) for _ in range(min(8, bench.sets(num_bytes)) - 1)]
    queries = bench.random(1, KV_HEADS, GROUP * rows, DIM)
    score, plain = getattr(kernels, f"score_{kind}"), getattr(reference, f"score_{kind}")
    rest = (GROUP, DIM**-0.5)
    best = plain(queries, *arrays, *rest)[1]
    note = check(f"score_{kind}", score(queries, *arrays, *rest)[1], best)
    count = min(124, blocks)
    samplers = {
        "oasis": bench.rotating([lambda a=a: score(queries, *a, *rest) for a in sets]),
        "pytorch": bench.rotating([lambda a=a: plain(queries, *a, *rest) for a in sets[:2]]),
        "choice of the best": bench.rotating([lambda: choose_blocks(best, count, 1)] * 4),
    }
    bench.compare(
        "scoring",
        f"{kind}, {context} tokens, rows {rows}",
        f"{KV_HEADS}x{GROUP} heads of {DIM}, {blocks} blocks",
        samplers,
        {"oasis": num_bytes, "pytorch": num_bytes},
        baseline="pytorch",
        seconds=max(0.3, seconds - 1.5),
        rounds=20,
        notes={"oasis": note},
    )
