"""Which kinds of models OasisCache serves, and how: `python -m eval.compatibility` writes docs/compatibility.md's table.

Every family of causal language models of the installed transformers is built tiny from its config (what cannot be is listed with
the reason), and used in the ways of the table's columns beside `DynamicCache`. A cell is what happened, never typed by hand.

    python -m eval.compatibility run [--only llama,phi3]   # measures, into eval/quality/results/compatibility.json
    python -m eval.compatibility                           # writes the table from that file
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oasis_cache import OasisCache, OasisConfig
from oasis_cache.layer import OasisLayer
from tests import models, oracle

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "quality" / "results" / "compatibility.json"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
SECONDS = 240
MOST_PARAMETERS = 8_000_000
TOLERANCE = 1e-4
EXACT = OasisConfig(budget=1024)
SMALL = OasisConfig(budget=40, block_size=8, sink_blocks=1, recent_blocks=2, sparse_rows=8, stream_tokens=24)

# Field of a config -> its value in a tiny model, set where the family's default config has the field.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), models.VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "dim_model", "width"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dim_ff", "n_inner", "ffn_hidden_size", "ffn_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feedforward_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "d_kv", "rotary_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8
    ),
    **dict.fromkeys(("index_head_dim", "index_n_heads", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("index_topk", "original_max_position_embeddings"), 512),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(
        ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_state", "state_size", "ssm_state_size"),
        4,
    ),
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "local_window_size"), 16
    ),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "query_pre_attn_scalar", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_chunk_size", "chunk_size"), 1),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "mamba_d_ssm"), 32),
    "pad_token_id": models.PADDING,
    "bos_token_id": 1,
    "eos_token_id": None,
    "is_decoder": True,
    "use_cache": True,
    "tie_word_embeddings": False,
}

WHERE_SET = ("sliding_window", "attention_chunk_size", "window_size", "q_lora_rank")
"""Fields whose None means that the family goes without."""

# What the sizes above do not fit, by family.
OVERRIDES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},  # as from version 0.2 on
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "phi": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
FULL = "full_attention"


class Skipped(Exception):
    """Why a family is not in the table."""


class TooLong(Exception):
    """A cell took longer than it may."""


def tiny_config(family: str) -> Any:
    """A config of a family with all sizes small; its layers are one of each kind that the family's own layers are of."""
    default = CONFIG_MAPPING[family]()
    if getattr(default, "text_config", None) is not None:
        raise Skipped("several modalities: its language model is a family of its own")
    if getattr(default, "is_encoder_decoder", False) and not hasattr(default, "is_decoder"):
        raise Skipped("an encoder-decoder")
    options = {name: value for name, value in SIZES.items() if _can_set(default, name)}
    for name in WHERE_SET:
        if name in options and getattr(default, name) is None:
            del options[name]
    if getattr(default, "kv_lora_rank", None) is not None:
        options["num_key_value_heads"] = options.get("num_attention_heads", 4)
    kinds = getattr(default, "layer_types", None)
    if kinds and _can_set(default, "layer_types"):
        options["layer_types"] = _one_of_each(list(kinds))
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if name in options:
                options[name] = len(options["layer_types"])
    for name in (
        "mlp_layer_types",
        "moe_layers",
        "mlp_only_layers",
        "no_rope_layers",
        "rope_parameters",
        "rope_scaling",
    ):
        if name == "mlp_layer_types" and getattr(default, name, None):
            options[name] = _as_many(list(getattr(default, name)), options.get("num_hidden_layers", 2))
        elif name == "no_rope_layers" and getattr(default, name, None):
            options[name] = [1, 0, 1, 0, 1, 0][: options.get("num_hidden_layers", 2)]
    own = OVERRIDES.get(family, {})
    if "layer_types" in own:
        options["num_hidden_layers"] = len(own["layer_types"])
    options.update(own)
    return CONFIG_MAPPING[family](**options)


def _can_set(config: Any, name: str) -> bool:
    """Whether a config has a field of that name, under it or its own, that is not computed from others."""
    name = type(config).attribute_map.get(name, name)
    computed = getattr(type(config), name, None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001 # fields that differ by layer raise when asked for as one
        return False


def _one_of_each(kinds: list[str]) -> list[str]:
    chosen = list(dict.fromkeys(kinds))[:4]
    if len(chosen) == 1:
        chosen *= 2
    return sorted(chosen, key=lambda kind: kind == FULL)


def _as_many(kinds: list[str], count: int) -> list[str]:
    chosen = list(dict.fromkeys(kinds))
    return (chosen + [chosen[-1]] * count)[:count]


def build(family: str, attention: str | None = None) -> PreTrainedModel:
    """The tiny model of a family, the same weights at every call."""
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(part.numel() for part in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise Skipped(f"no tiny config found: {size:,} parameters")
    return models.from_config(config, AutoModelForCausalLM, attention)


# --- The ways of the columns: each returns what to compare, from a cache ----------------------------------------------------------

Way = Callable[[PreTrainedModel, Callable[[], Any]], Any]


def _repeating() -> torch.Tensor:
    ids = models.prompt(60)
    ids[:, 40:55] = ids[:, 10:25]
    return ids


def _answer(model: PreTrainedModel, ids: torch.Tensor, cache: Any, count: int = 10, **arguments: Any) -> torch.Tensor:
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    return models.generate(model, ids, cache, count, attention_mask=mask, **arguments)


def exact(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    out = _answer(model, models.prompt(60), make())
    return out.sequences, torch.stack(out.logits)


def lookup(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    return (_answer(model, _repeating(), make(), prompt_lookup_num_tokens=3).sequences,)


def beam(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    return (_answer(model, models.prompt(60), make(), num_beams=3).sequences,)


def padded(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    ids, mask = models.left_padded(60, (0, 23))
    out = _answer(model, ids, make(), attention_mask=mask)
    return out.sequences, torch.stack(out.logits)


def chunked(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    out = _answer(model, models.prompt(60), make(), prefill_chunk_size=17)
    return out.sequences, torch.stack(out.logits)


def second_turn(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    cache = make()
    first = _answer(model, models.prompt(40), cache, 6).sequences
    out = _answer(model, torch.cat([first, models.prompt(9, seed=3)], 1), cache, 6)
    return out.sequences, torch.stack(out.logits)


def deepcopy(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    cache, ids = make(), models.prompt(61)
    models.forward(model, ids[:, :60], cache)
    twin = copy.deepcopy(cache)
    first, second = _answer(model, ids, twin, 6), _answer(model, ids, cache, 6)
    return first.sequences, second.sequences, torch.stack(first.logits), torch.stack(second.logits)


def saved(model: PreTrainedModel, make: Callable[[], Any]) -> Any:
    """An answer from a cache that was written to a file and read again; `DynamicCache` just goes on."""
    cache, ids = make(), models.prompt(61)
    models.forward(model, ids[:, :60], cache)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(cache, OasisCache):
            path = Path(folder, "saved.safetensors")
            cache.save(path, model=model)
            cache.close()
            cache = OasisCache.load(path, model)
        out = _answer(model, ids, cache, 6)
    return out.sequences, torch.stack(out.logits)


COLUMNS: dict[str, Way] = {
    "exact": exact,
    "prompt lookup": lookup,
    "beam": beam,
    "left-padded": padded,
    "chunked prefill": chunked,
    "second turn": second_turn,
    "deepcopy": deepcopy,
    "save/load": saved,
}


def compare(got: Any, expected: Any) -> str | None:
    """How results differ, or None."""
    for mine, theirs in zip(got, expected, strict=True):
        if mine.dtype.is_floating_point:
            finite = torch.isfinite(theirs)
            error = models.relative_error(mine[finite], theirs[finite])
            if not error < TOLERANCE:
                return f"logits off by {error:.1e}"
        elif not torch.equal(mine, theirs):
            return "other tokens"
    return None


def outcome(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What an action returned, or the error it ended in: its class and first words."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            return action(), None
    except TooLong:
        raise
    except Exception as error:  # noqa: BLE001 # whatever a model raises goes into the table
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def measure(family: str) -> dict[str, Any]:
    """A row of the table."""
    model = build(family)
    dense = DynamicCache(config=model.config)
    kinds = sorted({type(layer).__name__ for layer in dense.layers})
    reference, error = outcome(lambda: exact(model, lambda: DynamicCache(config=model.config)))
    if error is not None:
        raise Skipped(f"transformers itself fails with DynamicCache: {error}")
    if not torch.isfinite(reference[1]).all():
        raise Skipped("random weights give no finite logits")
    cells: dict[str, str] = {}
    for name, way in COLUMNS.items():
        expected, refused = outcome(lambda way=way: way(model, lambda: DynamicCache(config=model.config)))
        got, error = outcome(lambda way=way: way(model, lambda: OasisCache(EXACT, model_config=model.config)))
        if error is not None and refused is not None:
            cells[name] = f"refused by transformers ({error.partition(':')[0]})"
        elif error is not None:
            cells[name] = f"refused ({error})"
        elif refused is not None:
            cells[name] = "works, where DynamicCache fails"
        else:
            difference = compare(got, expected)
            cells[name] = "works" if difference is None else f"DIFFERS: {difference}"
            if name == "second turn" and difference is None and not same_as_cold(model, expected):
                cells[name] = "as DynamicCache, whose second turn differs from a cold run"
    cells["sparse"] = sparse_cell(family, model)
    return {"family": family, "model": type(model).__name__, "layers": kinds, "cells": cells}


def same_as_cold(model: PreTrainedModel, turns: Any) -> bool:
    """Whether a second turn's answer is that of a run without the first turn's cache."""
    sequence, logits = turns
    cold, error = outcome(lambda: _answer(model, sequence[:, :-6], DynamicCache(config=model.config), 6))
    return error is None and compare((cold.sequences, torch.stack(cold.logits)), (sequence, logits)) is None


def sparse_cell(family: str, model: PreTrainedModel) -> str:
    """Whether steps on a small budget are sparse, and follow the rules of tests/oracle.py."""
    cache = OasisCache(SMALL, model_config=model.config)
    got, error = outcome(lambda: exact(model, lambda: cache))
    if error is not None:
        return f"refused ({error})"
    stats = cache.stats()
    served = f"{stats.oasis_layers} of {stats.oasis_layers + stats.other_layers} layers"
    if stats.steps == stats.other_device_bytes == 0 and not stats.warnings:
        return "takes no cache"
    if stats.sparse_steps == 0:
        return f"dense: {reason(stats.warnings)}" if stats.warnings else "DIFFERS: dense, and nothing said"
    if stats.fallback_steps:
        return f"sparse ({served}), partly dense: {reason(stats.warnings)}"
    truth, error = outcome(lambda: build(family, oracle.NAME))
    if error is not None:
        return f"sparse ({served}; rules not checked)"
    sparse = frozenset(n for n, layer in enumerate(cache.layers) if isinstance(layer, OasisLayer))

    def by_rules(config: OasisConfig) -> Any:
        with oracle.rules(config, sparse):
            return exact(truth, lambda: DynamicCache(config=model.config))

    plain, error = outcome(lambda: by_rules(EXACT))
    reference, _ = outcome(lambda: exact(model, lambda: DynamicCache(config=model.config)))
    if error is not None or compare(plain, reference) is not None:
        return f"sparse ({served}; rules not checked)"
    difference = compare(got, outcome(lambda: by_rules(SMALL))[0])
    return f"sparse ({served})" if difference is None else f"DIFFERS from the rules: {difference}"


def reason(messages: tuple[str, ...]) -> str:
    """In a word or two, why a model is dense, by what the cache said."""
    text = " ".join(messages)
    for words, short in (
        ("no full-attention layer", "no full attention"),
        ("outside of attention", "attention of its own"),
        ("does not know", "attention of its own"),
        ("sinks are not passed", "attention of its own"),
        ("attention argument", "position bias"),
    ):
        if words in text:
            return short
    return "see its warning"


def run(only: list[str] | None) -> None:
    """Measure all families, or some of them, into the file of results."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and only else {"rows": {}, "skipped": {}}

    def ring(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, ring)
    for family in sorted(only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.perf_counter()
        known["rows"].pop(family, None)
        known["skipped"].pop(family, None)
        signal.alarm(SECONDS)
        try:
            known["rows"][family] = measure(family)
            note = "; ".join(f"{name}: {cell}" for name, cell in known["rows"][family]["cells"].items())
        except Skipped as reason:
            known["skipped"][family] = note = str(reason)
        except TooLong:
            known["skipped"][family] = note = f"took more than {SECONDS} seconds"
        except Exception as error:  # noqa: BLE001 # configs that cannot be shrunk by field names fail in any way
            words = " ".join(str(error).split())[:90].replace("|", "/")
            known["skipped"][family] = note = f"not built: {type(error).__name__}: {words}"
        finally:
            signal.alarm(0)
        print(f"{family} ({time.perf_counter() - started:.0f} s): {note}", flush=True)
        known["environment"] = {"transformers": transformers.__version__, "torch": torch.__version__}
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


ORDER = (
    "exact",
    "sparse",
    "prompt lookup",
    "beam",
    "left-padded",
    "chunked prefill",
    "second turn",
    "deepcopy",
    "save/load",
)


def table() -> str:
    """What stands between the markers of docs/compatibility.md."""
    known = json.loads(RESULTS.read_text())
    rows = known["rows"]
    lines = ["| family | " + " | ".join(ORDER) + " |", "|---" * (len(ORDER) + 1) + "|"]
    notes: dict[str, int] = {}
    for family in sorted(rows):
        cells = []
        for name in ORDER:
            cell = rows[family]["cells"][name].replace("|", "/")
            if len(cell) > 40:
                number = notes.setdefault(cell, len(notes) + 1)
                cell = f"{cell.split('(')[0].split(',')[0].split(':')[0].strip()} [{number}]"
            cells.append(cell)
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    counts = {
        name: sum(rows[family]["cells"][name].startswith(("works", "sparse")) for family in rows) for name in ORDER
    }
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    lines += ["", f"Of {len(rows)} families, so many work (or are sparse): {summary}.", ""]
    lines += [f"transformers {known['environment']['transformers']}, torch {known['environment']['torch']}; made by"]
    lines += ["`python -m eval.compatibility run` and `python -m eval.compatibility`.", "", "Not in the table:", ""]
    lines += [f"- `{family}`: {reason}" for family, reason in sorted(known["skipped"].items())]
    return "\n".join(lines)


def write() -> None:
    """Put the table into the document."""
    text = DOCUMENT.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=("run", "write"), default="write")
    parser.add_argument("--only", help="families, separated by commas")
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.only.split(",") if arguments.only else None)
        known = json.loads(RESULTS.read_text())
        return any("DIFFERS" in cell for row in known["rows"].values() for cell in row["cells"].values())
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
