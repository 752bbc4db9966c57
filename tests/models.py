"""Tiny random models of every architecture that the tests speak about: built from configs, fp32, no downloads.

Weights are drawn so large that attention is peaked and greedy output varies: a cache that loses or mixes up tokens changes it.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    DynamicCache,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
    WhisperConfig,
)

from tests import oracle
from tests.tracing import untraced

TRANSFORMERS = Version(Version(transformers.__version__).base_version)
CACHE_ARGUMENT = "cache" if Version("5.24") <= TRANSFORMERS else "past_key_values"
VOCABULARY = 101
PADDING = 0

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
_SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]

# name -> (config class, options on top of _COMMON)
ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 16}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 16, "layer_types": _SLIDING_THEN_FULL, "query_pre_attn_scalar": 16},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": _SLIDING_THEN_FULL,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": None,
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": _SLIDING_THEN_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "phi": (PhiConfig, {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "qwen3-moe": (Qwen3MoeConfig, {"head_dim": 8, **_MOE}),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            **_MOE,
        },
    ),
}

# Deeper models, and architectures that only some tests speak about; built as those above.
FURTHER: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama-deep": (LlamaConfig, {"hidden_size": 64, "num_hidden_layers": 4}),
    "gemma3-deep": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt-oss-deep": (
        GptOssConfig,
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": _SLIDING_THEN_FULL * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-next-deep": (
        Qwen3NextConfig,
        {
            **ARCHITECTURES["qwen3-next"][1],
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        },
    ),
    "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "jamba": (
        JambaConfig,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "falcon-h1": (
        FalconH1Config,
        {
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
    ),
    "llama4": (
        Llama4TextConfig,
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attn_temperature_tuning": False,
        },
    ),
    "phi3-long": (
        Phi3Config,
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-v32": (
        DeepseekV32Config,
        {
            **ARCHITECTURES["deepseek-v3"][1],
            "head_dim": 8,
            "index_topk": 12,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
    "mpt": (MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 4096}),
}


def eager_only(name: str) -> bool:
    """Whether transformers runs the architecture rightly with its eager attention only (softcap or sinks, which sdpa drops)."""
    return name in ("gemma2", "gpt-oss", "gpt-oss-deep")


@functools.cache
def build(name: str, attention: str | None = None, **options: Any) -> PreTrainedModel:
    """The tiny model of an architecture, the same weights at every call.

    Args:
        name: A key of `ARCHITECTURES` or `FURTHER`.
        attention: The attention implementation; None: the model's own default.
        **options: Config fields to change (hashable ones).
    """
    config_class, own = ARCHITECTURES[name] if name in ARCHITECTURES else FURTHER[name]
    config = config_class(**{**_COMMON, **own, **options})
    return from_config(config, transformers.AutoModelForCausalLM, attention)


def from_config(config: PretrainedConfig, factory: Any, attention: str | None = None) -> PreTrainedModel:
    """A model of a config, of one of transformers' auto classes, with weights drawn as described above."""
    if attention is not None:
        config._attn_implementation = attention
    generator = torch.Generator().manual_seed(20260)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = untraced(factory.from_config, config)
    for parameter_name, parameter in model.named_parameters():
        _draw(parameter_name, parameter, generator)
    model = model.float().eval().requires_grad_(False)
    if attention == oracle.NAME:
        oracle.record_latents(model)
    return model


@functools.cache
def build_encoder_decoder(name: str, attention: str | None = None) -> PreTrainedModel:
    """A tiny T5 or Whisper ("t5", "whisper"), with an attention implementation (None: its own default)."""
    special = {"pad_token_id": PADDING, "decoder_start_token_id": 1, "eos_token_id": None, "bos_token_id": 1}
    if name == "t5":
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            **special,
        )
        return from_config(config, transformers.AutoModelForSeq2SeqLM, attention)
    assert name == "whisper"
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=40,
        max_target_positions=256,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        **special,
    )
    return from_config(config, transformers.AutoModelForSpeechSeq2Seq, attention)


IMAGE_TOKEN, VISION_START, VISION_END, VIDEO_TOKEN = 97, 98, 99, 100


@functools.cache
def build_vision(name: str) -> PreTrainedModel:
    """A tiny Qwen2-VL or Gemma3 with images ("qwen2-vl", "gemma3-vision")."""
    if name == "qwen2-vl":
        text = {
            **_COMMON,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        }
        config: PretrainedConfig = Qwen2VLConfig(
            text_config=text,
            vision_config={
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "in_channels": 3,
            },
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            vision_start_token_id=VISION_START,
            vision_end_token_id=VISION_END,
            tie_word_embeddings=False,
        )
    else:
        assert name == "gemma3-vision"
        config = Gemma3Config(
            text_config={**_COMMON, **FURTHER["gemma3-deep"][1]},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 2,
            },
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=VISION_START,
            eoi_token_index=VISION_END,
        )
    return from_config(config, transformers.AutoModelForImageTextToText)


@torch.no_grad()
def _draw(name: str, parameter: torch.nn.Parameter, generator: torch.Generator) -> None:
    noise = torch.empty_like(parameter, dtype=torch.float32).normal_(generator=generator)
    last = name.rsplit(".", 1)[-1]
    if "sinks" in last:
        parameter.copy_(noise)
    elif last in ("A_log", "dt_bias") or "conv1d" in name:
        return  # recurrences keep their own, stable initialisation
    elif parameter.dim() == 1 or "bias" in last:
        if last.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:  # a norm's weight, around what it was made with
            parameter.add_(0.1 * noise)
    elif "embed" in name:
        parameter.copy_(noise)
    else:
        gain = 1.7 if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")) else 1.0
        parameter.copy_(gain * noise / math.sqrt(parameter.shape[-1]))


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """[batch, length] int64 random token ids, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def left_padded(length: int, pads: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [len(pads), length] int64, row i beginning with `pads[i]` padding tokens."""
    ids = prompt(length, len(pads), seed)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = PADDING
        mask[row, :count] = 0
    return ids, mask


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None, **arguments: Any
) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of new tokens behind those of `cache`.

    Args:
        ids: [batch, tokens].
        mask: [batch, past + tokens], 0 for padding; None: none.
    """
    past = int(cache.get_seq_length())
    if mask is not None:
        assert mask.shape[1] == past + ids.shape[1]
        arguments["attention_mask"] = mask
        arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, past:]
    return _call(model, ids, cache, arguments).logits


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, tokens: int, **arguments: Any) -> Any:
    """Greedy generation with logits: transformers' output object."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated.*")
        return _call(
            model.generate,
            ids,
            cache,
            {
                "max_new_tokens": tokens,
                "do_sample": False,
                "output_logits": True,
                "return_dict_in_generate": True,
                "pad_token_id": PADDING,
                **arguments,
            },
        )


def _call(function: Any, ids: torch.Tensor, cache: Any, arguments: dict[str, Any]) -> Any:
    """Call a model, or its `generate`, with a cache; out of coverage's sight if it is transformers' own."""
    arguments = {CACHE_ARGUMENT: cache, **arguments}
    return untraced(function, ids, **arguments) if type(cache) is DynamicCache else function(ids, **arguments)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||, infinite if `out` is not finite."""
    assert out.shape == reference.shape, f"{tuple(out.shape)} and {tuple(reference.shape)}"
    if not torch.isfinite(out).all():
        return math.inf
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()
