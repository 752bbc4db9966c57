"""The lm-eval model `oasis`: lm-eval's Hugging Face model with a fresh `OasisCache` for every batch of requests.

    python -m eval.quality lm-eval --model oasis --model_args pretrained=PATH,budget=512,index=int2 --tasks niah_single_1
    lm_eval.simple_evaluate(model=OasisLM("PATH", budget=512), tasks=[...])

Importing this module registers the name. Generation is sparse. Log-likelihoods are, by default, those of one prefill, which is
exact in an `OasisCache`: they measure dense attention. With `scoring="decode"` continuations are fed token by token, so that
sparsity is in force; a request takes as many forwards as its continuation has tokens.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import psutil
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.quality.ruler import offline
from oasis_cache import OasisCache, OasisConfig
from oasis_cache.demo import cache_argument, pick_dtype
from oasis_cache.packaged import PACKAGED, load_model, packaged_model_dir

SCORING = ("prefill", "decode")
_OPTIONS = frozenset(field.name for field in fields(OasisConfig))
_CACHES = ("past_key_values", "cache")
_SUMMED = (
    "prefill_steps",
    "dense_steps",
    "sparse_steps",
    "streamed_steps",
    "fallback_steps",
    "blocks_read",
    "hits",
    "misses",
    "bytes_fetched",
    "bytes_written",
)
_LARGEST = ("tokens_read_max", "context_tokens", "device_bytes", "index_bytes", "host_bytes")


@register_model("oasis")
class OasisLM(HFLM):
    """`HFLM` for decoder models that keep their KV in an `OasisCache`.

    Args:
        pretrained: Folder, hub name, a model, or "packaged" for SmolLM2-135M-Instruct out of a package.
        scoring: How log-likelihoods are computed, see the module's docstring.
        **options: Fields of `OasisConfig`; all others go to `HFLM`.

    Raises:
        ValueError: A field or `scoring` is out of range, or the model is no decoder.
    """

    def __init__(self, pretrained: str | PreTrainedModel = PACKAGED, scoring: str = "prefill", **options: Any) -> None:
        if scoring not in SCORING:
            raise ValueError(f"scoring={scoring!r} must be one of {', '.join(map(repr, SCORING))}")
        chosen = {name: options.pop(name) for name in list(options) if name in _OPTIONS}
        self.oasis_config = OasisConfig.from_options(None, chosen)
        self.scoring = scoring
        self._sums: Counter[str] = Counter()
        self._largest: dict[str, int] = dict.fromkeys(_LARGEST, 0)
        self._warnings: dict[str, None] = {}
        if pretrained == PACKAGED:
            dtype, device = options.pop("dtype", "float32"), options.get("device") or "cpu"
            if device.startswith("cuda") and not torch.cuda.is_available():  # what lm-eval names by default
                device = options["device"] = "cpu"
            dtype = torch.float32 if dtype == "auto" else pick_dtype(str(dtype).removeprefix("torch."))
            pretrained, options["tokenizer"] = load_model(PACKAGED, dtype, device)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise ValueError(f"the model is {self.backend}, but the oasis model of lm-eval takes decoders only")

    @contextmanager
    def _fresh_cache(self) -> Iterator[OasisCache]:
        """A cache for one batch, whose statistics are added to those of the run."""
        with OasisCache(self.oasis_config, model_config=self.model.config) as cache:
            yield cache
            stats = cache.stats()
        self._sums.update({name: getattr(stats, name) for name in _SUMMED})
        self._sums["caches"] += 1
        for name in _LARGEST:
            self._largest[name] = max(self._largest[name], getattr(stats, name))
        self._warnings |= dict.fromkeys(stats.warnings)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        given = [name for name in _CACHES if generation_kwargs.get(name) is not None]
        if given:
            raise ValueError(
                f"generation argument {given[0]!r}: lm-eval copies generation arguments for every request, and requests must not "
                "share a cache. The oasis model makes its own; set it up with model_args"
            )
        with self._fresh_cache() as cache:
            argument = cache_argument(self.model, cache)
            return super()._model_generate(context, max_length, stop, **{**generation_kwargs, **argument})

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self.scoring == "prefill":
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        scores = []
        for key, context, continuation in tqdm(requests, disable=disable_tqdm, desc="Scoring by decoding"):
            scores.append(self._score_by_decoding(context, continuation))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, scores[-1])
        return scores

    @torch.no_grad()
    def _score_by_decoding(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether greedy decoding would have given it.

        Tokens up to the context's last but one, and all that the cache keeps dense anyway, are read by one forward.
        """
        ids = torch.tensor([(context + continuation)[-(self.max_length + 1) :]], device=self.device)
        targets, fed = ids[0, -len(continuation) :], ids[:, :-1]
        first = fed.shape[1] - len(continuation)  # the last token before this place is the first that predicts a target
        exact = max(first, min(fed.shape[1], self.oasis_config.dense_tokens))
        logits = []
        with self._fresh_cache() as cache:
            argument = cache_argument(self.model, cache)
            if exact:
                keep = exact - first
                out = self.model(fed[:, :exact], use_cache=True, logits_to_keep=max(1, keep), **argument).logits[0]
                logits += [out] if keep else []
            for place in range(exact, fed.shape[1]):
                logits.append(self.model(fed[:, place : place + 1], use_cache=True, **argument).logits[0])
        scores = torch.cat(logits).float().log_softmax(-1)
        assert scores.shape[0] == len(targets)
        total = float(scores.gather(1, targets.unsqueeze(1)).sum())
        return total, bool((scores.argmax(-1) == targets).all())

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        """For `batch_size="auto"`. On a CPU nothing fails before the machine does, so memory is counted instead of tried."""
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)
        length = len(requests[pos][1]) + len(requests[pos][2]) if requests else self.max_length
        config = self.model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.model.dtype.itemsize
        # Logits of a scored prefill and their softmax in float32; half of what is free, for all that is not counted.
        row_bytes = length * (2 * kv_bytes + 2 * 4 * config.vocab_size)
        fits = max(1, psutil.virtual_memory().available // 2 // row_bytes)
        return int(min(self.max_batch_size, 2 ** (int(fits).bit_length() - 1)))

    @property
    def oasis_stats(self) -> dict[str, Any]:
        """Counters of all caches of this model so far: sums, the largest sizes, and warnings."""
        asked = self._sums["hits"] + self._sums["misses"]
        return {
            "caches": self._sums["caches"],
            **{name: self._sums[name] for name in _SUMMED},
            **self._largest,
            "hit_rate": self._sums["hits"] / asked if asked else 0.0,
            "warnings": list(self._warnings),
        }

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into the `config` of its results: the model, the cache's settings, and what the caches did."""
        return {
            **super().get_model_info(),
            "oasis_config": asdict(self.oasis_config),
            "oasis_scoring": self.scoring,
            "oasis_stats": self.oasis_stats,
        }


def main(arguments: Sequence[str]) -> int:
    """lm-eval's own command line with `oasis` registered and RULER offline."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    sys.argv = ["lm_eval", *_with_tokenizer(arguments)]  # which it reads, whatever it is given
    with offline():
        parser = HarnessCLI()
        parser.execute(parser.parse_args())
    return 0


def _with_tokenizer(arguments: Sequence[str]) -> list[str]:
    """RULER counts the tokens of its prompts with a tokenizer that it loads itself: say where the packaged one is."""
    given = list(arguments)
    if not any(f"pretrained={PACKAGED}" in part.split(",") for part in given):
        return given
    place = given.index("--metadata") + 1 if "--metadata" in given else None
    metadata = json.loads(given[place]) if place is not None else {}
    metadata = json.dumps({"tokenizer": str(packaged_model_dir()), **metadata})
    if place is None:
        return [*given, "--metadata", metadata]
    given[place] = metadata
    return given
