"""What tells one model from another: its config, rotary settings included, and if asked for a sample of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

# Says where a config came from, how a model is run, or what its outputs look like: nothing about keys and values.
_IRRELEVANT = frozenset(
    "_name_or_path transformers_version architectures dtype torch_dtype use_cache id2label label2id num_labels problem_type "
    "output_attentions output_hidden_states return_dict return_dict_in_generate attn_implementation _attn_implementation "
    "_experts_implementation experts_implementation bos_token_id eos_token_id pad_token_id sep_token_id tie_word_embeddings "
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout initializer_range pretraining_tp "
    "chunk_size_feed_forward quantization_config base_model_tp_plan base_model_pp_plan base_model_ep_plan auto_map".split()
)
_SAMPLES = 64  # numbers of each parameter


def describe_model(model_config: PretrainedConfig) -> dict[str, Any]:
    """The settings that keys and values depend on, flat: dotted name -> value as JSON has it."""
    flat: dict[str, Any] = {}

    def enter(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key not in _IRRELEVANT:
                    enter(f"{prefix}{key}.", part)
        else:
            flat[prefix[:-1]] = json.loads(json.dumps(value, default=str))

    enter("", model_config.to_dict())
    return flat


def digest(description: dict[str, Any]) -> str:
    """SHA-256 of such settings."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def sample_weights(model: PreTrainedModel) -> str:
    """SHA-256 of the names, shapes and some numbers of all parameters, the same on every device and in every order."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        count = min(_SAMPLES, flat.numel())
        at = (
            torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(1, count - 1)
        )  # integers: floats would overshoot
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(flat[at].to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def differences(saved: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """How the settings of two models differ, in words."""
    absent = object()
    return [
        f"{name}: {_say(saved.get(name, absent), absent)} in the file, {_say(given.get(name, absent), absent)} here"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name, absent) != given.get(name, absent)
    ]


def _say(value: Any, absent: object) -> str:
    return "none" if value is absent else repr(value)
