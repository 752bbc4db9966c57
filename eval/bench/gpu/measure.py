"""Measuring: interleaved repeats, rows of the ledger, and what one part of the run is given.

Candidates take turns (A B A B), so that a drift of the machine meets all of them; a row gives the median and the spread.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

FLUSH_BYTES = 1 << 28  # inputs rotate among sets of at least this size together, so that no cache holds them


@dataclass
class Row:
    """One measured line of the ledger, environment aside.

    Attributes:
        part, case, shape, provider: What ran, on what.
        p20_ms, p50_ms, p80_ms: Percentiles over `samples`.
        bytes_moved: The fewest bytes that the operation must read and write on the device (or over the link).
        gb_per_s: bytes_moved over the median.
        copy_percent: gb_per_s of the measured device copy bandwidth, which counts bytes read plus written, in percent.
        link_percent: The same of the measured bandwidth of a page-locked copy from the host.
        ratio: The median of `baseline` over the own one, or the median of ratios taken pair by pair: how many times as fast.
        quantity: What was timed, where a case times several things.
        ratio_p20, ratio_p80: Percentiles of ratios taken pair by pair.
        static_ratio: As `ratio`, pair by pair against StaticCache.
        bytes_read: The fewest bytes that the operation must read, the weights included.
        read_percent: bytes_read over the median, of the measured bandwidth of reading, in percent.
        device_bytes, index_bytes: What the cache holds where the model computes, and the index's part of it.
        kv_bytes: The dense keys and values of the same context.
        peak_bytes: The most memory that the process took, beyond what it held before.
    """

    part: str
    case: str
    shape: str
    provider: str
    p20_ms: float | None = None
    p50_ms: float | None = None
    p80_ms: float | None = None
    samples: int = 0
    bytes_moved: int | None = None
    gb_per_s: float | None = None
    copy_percent: float | None = None
    link_percent: float | None = None
    ratio: float | None = None
    baseline: str = ""
    note: str = ""
    quantity: str = ""
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    static_ratio: float | None = None
    bytes_read: int | None = None
    read_percent: float | None = None
    device_bytes: int | None = None
    index_bytes: int | None = None
    kv_bytes: int | None = None
    peak_bytes: int | None = None


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    ordered = sorted(samples)
    low, high = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.2, 0.8))
    return low, statistics.median(ordered), high


@dataclass
class Bench:
    """What a part is given: where to run, how long, where results go.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Small shapes, that only show that the code runs.
        seconds: The part's time, from its construction.
        rows: Where rows and statements go, as lines of JSON.
        ceilings: Bandwidths measured before, in bytes per second: "copy", "to_device", "to_host".
    """

    device: torch.device
    tiny: bool
    seconds: float
    rows: Path
    ceilings: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.started + self.seconds - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def sets(self, num_bytes: int) -> int:
        """How many sets of inputs of `num_bytes` to rotate among."""
        return 2 if self.tiny else max(2, min(64, -(-FLUSH_BYTES // num_bytes)))

    # --- Timing -------------------------------------------------------------------------------------------------------

    def wall_ms(self, function: Callable[[], object]) -> float:
        """Milliseconds from the call until the device is through: what a caller waits, host work included."""
        self.synchronize()
        begin = time.perf_counter()
        function()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3

    def step_ms(self, function: Callable[[], object]) -> float:
        """Milliseconds from the call until the current stream is through; what runs on others goes on, as it does for a caller."""
        begin = time.perf_counter()
        function()
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        return (time.perf_counter() - begin) * 1e3

    def device_ms(self, function: Callable[[], object]) -> float:
        """Milliseconds between two events on the current stream."""
        if not self.on_gpu:
            return self.wall_ms(function)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        function()
        end.record()
        self.synchronize()
        return begin.elapsed_time(end)

    def replay(self, function: Callable[[], object]) -> Callable[[], object]:
        """The function as a captured graph, so that launch gaps do not count; itself where there are no graphs."""
        function()
        self.synchronize()
        if not self.on_gpu:
            return function
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                function()
        except RuntimeError as error:
            self.say(f"a candidate could not be captured as a graph, its launch gaps count: {str(error)[:150]}")
            return function
        graph.replay()
        self.synchronize()
        return graph.replay

    def rotating(self, calls: Iterable[Callable[[], object]]) -> Callable[[], float]:
        """A sampler: the milliseconds of one call, the mean over calls on different inputs, made one after the other."""
        calls = list(calls)

        def all_of_them() -> None:
            for call in calls:
                call()

        replay = self.replay(all_of_them)
        return lambda: self.device_ms(replay) / len(calls)

    def interleave(
        self, samplers: Mapping[str, Callable[[], float | list[float]]], seconds: float, rounds: int
    ) -> dict[str, list[float]]:
        """Samples of each candidate, taken in turns: `rounds` turns, or as many as fit in `seconds`, and one at least."""
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        stop = time.monotonic() + min(seconds, self.left)
        for _ in range(2 if self.tiny else rounds):
            for name, sampler in samplers.items():
                sample = sampler()
                samples[name] += sample if isinstance(sample, list) else [sample]
            if time.monotonic() > stop:
                break
        return samples

    # --- Results ------------------------------------------------------------------------------------------------------

    def record(self, row: Row) -> None:
        self._write({"row": asdict(row)})

    def say(self, statement: str) -> None:
        """A plain statement for the reader, about what did not run or what to know about a number."""
        self._write({"statement": statement})

    def _write(self, line: dict) -> None:
        with self.rows.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def compare(
        self,
        part: str,
        case: str,
        shape: str,
        samplers: dict[str, Callable[[], float]],
        bytes_moved: dict[str, int] | int | None = None,
        baseline: str = "",
        seconds: float = 5.0,
        rounds: int = 30,
        notes: dict[str, str] | None = None,
        over_link: bool = False,
    ) -> dict[str, float]:
        """Measure candidates in turns and record a row for each; returns their medians."""
        samples = self.interleave(samplers, seconds, rounds)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        for name, values in samples.items():
            p20, p50, p80 = percentiles(values)
            moved = bytes_moved.get(name) if isinstance(bytes_moved, dict) else bytes_moved
            rate = moved / (p50 * 1e-3) if moved else None
            copy, link = self.ceilings.get("copy"), self.ceilings.get("to_device")
            self.record(
                Row(
                    part,
                    case,
                    shape,
                    name,
                    p20,
                    p50,
                    p80,
                    len(values),
                    moved,
                    rate / 1e9 if rate else None,
                    100 * rate / copy if rate and copy and not over_link else None,
                    100 * rate / link if rate and link and over_link else None,
                    medians[baseline] / p50 if baseline in medians else None,
                    baseline if baseline in medians else "",
                    (notes or {}).get(name, ""),
                )
            )
        return medians


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; infinite where anything is not finite."""
    out, reference = out.float(), reference.float()
    if not torch.isfinite(out).all():
        return float("inf")
    return ((out - reference).norm() / reference.norm()).item()


def check(name: str, out: torch.Tensor, reference: torch.Tensor, tolerance: float = 2e-2) -> str:
    """Raise `ArithmeticError` unless a candidate is right: what is wrong is not timed. Returns a note of its error."""
    error = relative_error(out, reference)
    if not error <= tolerance:
        raise ArithmeticError(f"{name}: relative error {error:.2e} is above {tolerance}")
    return f"relative error {error:.1e}"
