"""One sample through one method, on the keys and values of a prefill that all methods share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from eval.quality.methods import DENSE
from eval.quality.methods.base import Method
from eval.quality.samples import Sample
from oasis_cache.demo import cache_argument, prefill

# A task whose dense score at a length is lower says nothing about caches.
DENSE_RIGHT = 0.5
SMALLEST_BUDGET = 96
BLOCK = 16
CHUNK_TOKENS = 8192  # read at once: a first chunk is the cheapest, as its causal mask is never made

Snapshot = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Prediction:
    """What one method answered to one sample.

    Attributes:
        share: Budget as a share of the nominal length; None for the dense cache.
        budget: The same in tokens.
        answers: Generated text, a turn each.
        scores: Share of the references found, a turn each; for a text to go on with, its mean log-likelihood per token.
        counters: See `Counters.as_dict`.
    """

    task: str
    length: int
    name: str
    context: str
    way: str
    depth: float | None
    method: str
    share: float | None
    budget: int | None
    answers: list[str]
    scores: list[float]
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of(self.task, self.length, self.name, self.way, self.method, self.share)


def key_of(task: str, length: int, name: str, way: str, method: str, share: float | None) -> tuple[Any, ...]:
    """What tells predictions apart."""
    return task, length, name, way, method, share


def budget_of(length: int, share: float) -> int:
    """A budget in tokens: that share of a length, in whole blocks, and at least what an `OasisCache` needs."""
    return max(SMALLEST_BUDGET, int(length * share) // BLOCK * BLOCK)


def read_context(model: PreTrainedModel, ids: Sequence[int]) -> Snapshot | None:
    """Keys and values of an exact prefill, per layer [1, kv_heads, tokens, dim] in main memory.

    None for models with other layers than full attention, whose caches read for themselves.
    """
    cache = DynamicCache(config=model.config)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    prefill(model, torch.tensor([list(ids)], device=model.device), cache, chunk_tokens=CHUNK_TOKENS)
    return [(layer.keys.cpu(), layer.values.cpu()) for layer in cache.layers]


def fill(model: PreTrainedModel, cache: Cache, sample: Sample, snapshot: Snapshot | None) -> None:
    """Give an empty cache what the sample reads exactly; a snapshot holds at least its beginning."""
    device = model.device
    if snapshot is None:
        prefill(model, torch.tensor([list(sample.exact_ids)], device=device), cache)
        return
    for layer_idx, (keys, values) in enumerate(snapshot):
        tokens = len(sample.exact_ids)
        assert keys.shape[2] >= tokens, "the snapshot is of a shorter text"
        cache.update(keys[:, :, :tokens].to(device), values[:, :, :tokens].to(device), layer_idx)


def extended(model: PreTrainedModel, snapshot: Snapshot | None, sample: Sample) -> Snapshot | None:
    """The snapshot of a sample's context with that of its first question behind it, where the question is read exactly."""
    rest = sample.exact_ids[len(sample.context_ids) :]
    if snapshot is None or not rest:
        return snapshot
    cache = DynamicCache(config=model.config)
    for layer_idx, (keys, values) in enumerate(snapshot):
        cache.update(keys.to(model.device), values.to(model.device), layer_idx)
    forward(model, cache, rest)
    return [(layer.keys.cpu(), layer.values.cpu()) for layer in cache.layers]


@torch.no_grad()
def forward(model: PreTrainedModel, cache: Cache, ids: Sequence[int], keep: int = 1) -> torch.Tensor:
    """Logits of the last `keep` tokens, [keep, vocabulary]."""
    inputs = torch.tensor([list(ids)], device=model.device)
    return model(inputs, use_cache=True, logits_to_keep=keep, **cache_argument(model, cache)).logits[0]


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Cache, sample: Sample
) -> tuple[list[str], list[float]]:
    """Greedy answers to a sample's turns on a cache that holds `exact_ids`, and their scores."""
    stops = _stop_ids(model, tokenizer)
    answers, scores, before = [], [], []
    for number, turn in enumerate(sample.turns):
        fed = (*before, *sample.asked_ids(number))
        generated: list[int] = []
        logits = forward(model, cache, fed)[-1]
        while True:
            token = int(logits.argmax())
            if turn.ends and token in stops:
                break
            generated.append(token)
            if len(generated) == turn.new_tokens:
                break
            if turn.ends and number + 1 == len(sample.turns) and _complete(tokenizer, generated, turn.references):
                break
            logits = forward(model, cache, [token])[-1]
        before = generated[-1:] if len(generated) == turn.new_tokens else []
        answers.append(tokenizer.decode(generated, skip_special_tokens=True))
        scores.append(turn.score(answers[-1]))
    return answers, scores


def _complete(tokenizer: PreTrainedTokenizerBase, generated: list[int], references: tuple[str, ...]) -> bool:
    """Whether all references are there, so that nothing that follows can change the score."""
    text = tokenizer.decode(generated, skip_special_tokens=True).lower()
    return all(reference.lower() in text for reference in references)


def go_on(model: PreTrainedModel, cache: Cache, sample: Sample, at_once: bool) -> float:
    """Mean log-likelihood of a sample's true continuation behind the context's last token but one.

    Args:
        at_once: One forward, which reads everything; else token by token, so that every step is sparse.
    """
    fed = sample.fed_ids
    targets = torch.tensor(sample.target_ids, device=model.device)
    if at_once:
        logits = forward(model, cache, fed, keep=len(fed))
    else:
        logits = torch.stack([forward(model, cache, [token])[-1] for token in fed])
    return float(logits.float().log_softmax(-1).gather(1, targets.unsqueeze(1)).mean())


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {idx for idx in (*ids, tokenizer.eos_token_id) if idx is not None}


def predict(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    method: Method,
    share: float | None,
    snapshot: Snapshot | None,
) -> Prediction:
    """One sample through one method; `snapshot` covers `exact_ids`, or is None."""
    budget = None if share is None else budget_of(sample.length, share)
    with method.session(model, budget or 0, sample.sparse_rows) as (cache, counters):
        fill(model, cache, sample, snapshot)
        if sample.target_ids:
            answers, scores = [], [go_on(model, cache, sample, at_once=method is DENSE)]
        else:
            answers, scores = answer(model, tokenizer, cache, sample)
        return Prediction(
            sample.task,
            sample.length,
            sample.name,
            sample.context,
            sample.way,
            sample.depth,
            method.name,
            share,
            budget,
            answers,
            scores,
            counters.as_dict(),
        )
