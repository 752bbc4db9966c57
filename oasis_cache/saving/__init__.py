"""Saved caches: one file, read lazily, refused when it is damaged or another model's.

`OasisCache.save` and `OasisCache.load` are the way in.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from oasis_cache.config import OasisConfig
from oasis_cache.layer import OasisLayer
from oasis_cache.saving.container import Container, refuse, write
from oasis_cache.saving.fingerprint import describe_model, differences, digest, sample_weights
from oasis_cache.saving.state import Tensors, describe_oasis, describe_other, restore_oasis, restore_other

FORMAT = 1
# What a file cannot know of the machine and the use that it is loaded for. All other settings are in what was saved.
_OF_THE_PROCESS = (
    "max_host_bytes", "spill", "engine", "trace", "stream_tokens", "lookahead", "max_fetch", "spare_blocks", "on_miss",
)  # fmt: skip
_NOT_SAVED = ("max_host_bytes", "spill", "engine", "trace")


def save_layers(
    path: str,
    layers: list[Any],
    config: OasisConfig,
    model_config: PretrainedConfig | None,
    model: PreTrainedModel | None,
) -> None:
    """Write what `OasisCache.save` writes; see there."""
    tensors: Tensors = {}
    described = []
    for number, layer in enumerate(layers):
        describe = describe_oasis if isinstance(layer, OasisLayer) else describe_other
        described.append({"type": type(layer).__name__, "state": describe(layer, f"layers.{number}.", tensors)})
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_SAVED}
    described_model = None if model_config is None else describe_model(model_config)
    description = {
        "format": FORMAT,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "config": settings,
        "model": described_model,
        "model_digest": None if described_model is None else digest(described_model),
        "weights": None if model is None else sample_weights(model),
        "layers": described,
    }
    write(path, description, tensors)


def open_saved(path: str) -> Container:
    """The file, if it is a saved cache of a version that this library reads."""
    file = Container(path)
    version = file.description.get("format")
    if version != FORMAT:
        file.close()
        raise refuse(path, f"its format is {version!r}, and this version of oasis-cache reads format {FORMAT}")
    return file


def check_model(file: Container, model: PreTrainedModel | PretrainedConfig | None) -> PretrainedConfig | None:
    """Raise `ValueError` with what differs unless the file is of that model; returns the model's config."""
    saved = file.description["model"]
    if model is None:
        if saved is not None:
            raise ValueError(
                f"{file.path!r} was saved for a {saved.get('model_type')} model: pass the model, or its config, that will use it"
            )
        return None
    model_config = model.config if isinstance(model, PreTrainedModel) else model
    if not isinstance(model_config, PretrainedConfig):
        raise ValueError(f"model must be a transformers model or its config, got {type(model).__name__}")
    if saved is None:
        return model_config
    found = differences(saved, describe_model(model_config))
    if found:
        raise refuse(file.path, f"it is of another model. {'; '.join(found[:8])}{' ...' if len(found) > 8 else ''}")
    if isinstance(model, PreTrainedModel):
        dtypes = {layer["state"]["shape"]["dtype"] for layer in file.description["layers"] if "shape" in layer["state"]}
        given = str(model.dtype).removeprefix("torch.")
        if dtypes and given not in dtypes:
            raise refuse(
                file.path, f"its keys and values are {', '.join(sorted(dtypes))}, and the model computes in {given}"
            )
        weights = file.description["weights"]
        if weights is not None and weights != sample_weights(model):
            raise refuse(file.path, "the model has the same config, but other weights than the one it was saved for")
    return model_config


def config_of(file: Container, overrides: dict[str, Any]) -> OasisConfig:
    """The settings to load a file with.

    Raises:
        ValueError: An override would change what was saved.
    """
    saved = file.description["config"]
    fixed = {
        name: value
        for name, value in overrides.items()
        if name in saved and name not in _OF_THE_PROCESS and value != saved[name]
    }
    if fixed:
        changed = ", ".join(f"{name}={value!r} (saved with {saved[name]!r})" for name, value in fixed.items())
        raise ValueError(
            f"{changed}: a saved cache can only be loaded with other settings of {', '.join(_OF_THE_PROCESS)}"
        )
    return OasisConfig.from_options(OasisConfig(**saved), overrides)


def restore_layers(file: Container, layers: list[Any], device: torch.device | None) -> None:
    """Give fresh layers what the file says of them.

    Raises:
        ValueError: The file's layers are of other types, or a tensor is damaged.
    """
    described = file.description["layers"]
    kinds, saved = [type(layer).__name__ for layer in layers], [each["type"] for each in described]
    if kinds != saved:
        raise refuse(
            file.path,
            f"transformers {file.description['transformers']} gave the model layers {saved}, the installed one gives it {kinds}",
        )
    for number, (layer, each) in enumerate(zip(layers, described, strict=True)):
        if isinstance(layer, OasisLayer):
            restore_oasis(layer, f"layers.{number}.", each["state"], file, device)
        else:
            restore_other(layer, each["state"], file, device)
