"""Drafters: what may come next in each sequence of a batch, guessed without the model that decides.

All sequences of a batch share columns: column i of `DraftRequest.tokens` is column i of every sequence, real tokens begin at its
`starts` entry (left padding before) and end before its `lengths` entry. Guesses are deterministic given the request, which is
what lets sampling keep the target's distribution with no probabilities from the drafter; a drafter that draws its guesses at
random draws them independently of the target's own draws.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer


@dataclass(frozen=True)
class DraftRequest:
    """The state of a batch when drafts are wanted.

    Attributes:
        tokens: [batch, columns] int64; what lies outside of a sequence's `starts`..`lengths` means nothing.
        starts: First column of each sequence's own tokens.
        lengths: Column after the last token of each sequence.
        limits: Most drafts that each sequence can use now; 0 for one that is finished or waits.
        num_prompt: Columns of the prompt; what follows is generated.
    """

    tokens: torch.Tensor
    starts: Sequence[int]
    lengths: Sequence[int]
    limits: Sequence[int]
    num_prompt: int

    def sequence(self, row: int) -> torch.Tensor:
        """One sequence's own tokens, without padding: [tokens] int64."""
        return self.tokens[row, self.starts[row] : self.lengths[row]]

    def nothing(self) -> list[torch.Tensor]:
        """No draft for any sequence."""
        return [self.tokens.new_empty(0) for _ in self.lengths]


class Drafter(ABC):
    """Guesses the next tokens of each sequence. One run at a time: `start`, any number of `draft`, `finish`."""

    def start(self, model: PreTrainedModel) -> None:
        """Begin a run in which `model` decides; forgets earlier runs.

        Raises:
            ValueError: The drafter cannot work with this model.
        """

    @abstractmethod
    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        """Guess, for each sequence, the tokens behind its last one: [at most its limit] int64 each, possibly empty.

        May change the drafter's own state, never the request.
        """

    def finish(self) -> None:
        """End the run, also after an exception; gives memory back."""


class NoDrafter(Drafter):
    """Never guesses: decoding with it is plain decoding."""

    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        return request.nothing()


class RandomDrafter(Drafter):
    """Guesses random tokens, nearly all wrong: the worst case, for tests and measurements.

    Args:
        vocab_size: Token ids are drawn below this.
        seed: Of the drawing, the same in every run.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def start(self, model: PreTrainedModel) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        device = request.tokens.device
        return [
            torch.randint(self.vocab_size, (limit,), generator=self.generator).to(device) for limit in request.limits
        ]


class ReplayDrafter(Drafter):
    """Guesses the tokens of given continuations: the best case, for tests, or an earlier answer that is likely to come again.

    Args:
        continuations: For each sequence, the token ids that may follow the prompt.
    """

    def __init__(self, continuations: Sequence[Sequence[int] | torch.Tensor]) -> None:
        self.continuations = [torch.as_tensor(tokens, dtype=torch.int64) for tokens in continuations]

    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        if len(self.continuations) != len(request.lengths):
            raise ValueError(
                f"{len(self.continuations)} continuations do not fit a batch of {len(request.lengths)} sequences"
            )
        drafts = []
        for tokens, length, limit in zip(self.continuations, request.lengths, request.limits, strict=True):
            position = length - request.num_prompt
            drafts.append(tokens[position : position + limit].to(request.tokens.device))
        return drafts


class PromptLookupDrafter(Drafter):
    """Guesses that what followed the newest n-gram earlier in the same sequence follows again.

    Of the earlier places, the newest that is followed by as many tokens as are wanted counts; longer n-grams go first.
    (Prompt lookup decoding, as `generate(prompt_lookup_num_tokens=...)`, here per sequence of a batch.)

    Args:
        max_ngram: Longest n-gram looked for.
        min_ngram: Shortest.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram={min_ngram} and max_ngram={max_ngram} must satisfy 1 <= min_ngram <= max_ngram"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        return [self._lookup(request.sequence(row), limit) for row, limit in enumerate(request.limits)]

    def _lookup(self, tokens: torch.Tensor, limit: int) -> torch.Tensor:
        """The guess for one sequence: tokens [tokens] -> [at most limit]."""
        for n in range(min(self.max_ngram, tokens.numel() - 1), self.min_ngram - 1, -1) if limit else ():
            places = (tokens[:-1].unfold(0, n, 1) == tokens[-n:]).all(dim=1).nonzero().flatten() + n
            if places.numel():
                roomy = places[places <= tokens.numel() - limit]
                place = int(roomy[-1]) if roomy.numel() else int(places[0])
                return tokens[place : place + limit]
        return tokens[:0]


class AssistantDrafter(Drafter):
    """Guesses what a smaller model with the same vocabulary would say, greedily.

    The assistant has its own cache, whose columns are the batch's. Where sequences have become uneven, the assistant goes from the
    shortest one's end to the longest one's guess, one column and one small forward at a time.

    Args:
        assistant: A decoder-only model.
        make_cache: Makes the assistant's cache from its config. Default: `DynamicCache`, which keeps the whole context of the
            assistant on the device; `lambda config: OasisCache(model_config=config, ...)` does not.
    """

    def __init__(
        self, assistant: PreTrainedModel, make_cache: Callable[[PretrainedConfig], Cache] | None = None
    ) -> None:
        self.assistant = assistant
        self.make_cache = make_cache if make_cache is not None else lambda config: DynamicCache(config=config)
        self.cache: Cache | None = None

    def start(self, model: PreTrainedModel) -> None:
        config = self.assistant.config
        sizes = [c.get_text_config(decoder=True).vocab_size for c in (model.config, config)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the assistant has {sizes[1]} tokens and the model {sizes[0]}: they must share one vocabulary"
            )
        if config.is_encoder_decoder or getattr(self.assistant, "_is_stateful", False):
            raise ValueError(
                f"{type(self.assistant).__name__} cannot assist: its cache cannot take back rejected tokens"
            )
        self.cache = self.make_cache(config.get_text_config(decoder=True))
        if any(getattr(layer, "is_sliding", False) for layer in self.cache.layers) and not _windows_record_forwards():
            raise ValueError(
                f"{type(self.assistant).__name__} has sliding-window layers, which cannot take several tokens back in the "
                "installed transformers: use 5.20 or newer, or an assistant without them"
            )
        self.fed: torch.Tensor | None = None  # [batch, cached columns], what the cache holds

    def finish(self) -> None:
        if self.cache is not None:
            self.cache.reset()
        self.cache = self.fed = None

    def draft(self, request: DraftRequest) -> list[torch.Tensor]:
        rows = [row for row, limit in enumerate(request.limits) if limit > 0]
        if not rows:
            return request.nothing()
        lengths = request.lengths
        first = min(lengths[row] for row in rows)
        last = max(lengths[row] + request.limits[row] for row in rows)
        drafts: list[list[torch.Tensor]] = [[] for _ in lengths]
        columns = request.tokens[:, self._keep_matching(request, rows, first) : first]
        for column in range(first, last):
            guesses = self._forward(columns, request.starts)
            next_column = guesses.clone()
            for row, length in enumerate(lengths):
                if column < length:
                    next_column[row] = request.tokens[row, column]
                elif column < length + request.limits[row]:
                    drafts[row].append(guesses[row])
            columns = next_column.unsqueeze(1)
        return [torch.stack(tokens) if tokens else request.tokens.new_empty(0) for tokens in drafts]

    def _keep_matching(self, request: DraftRequest, rows: Sequence[int], first: int) -> int:
        """Take rejected columns back, and the last known one, whose logits are wanted; returns how many columns are cached."""
        if self.fed is None:
            return 0
        assert self.cache is not None
        common = min(self.fed.shape[1], first - 1)
        same = (self.fed[rows, :common] == request.tokens[rows, :common]).all(dim=0)
        keep = int(same.cumprod(0).sum())
        self.cache.crop(keep - self.fed.shape[1])
        self.fed = self.fed[:, :keep]
        return keep

    def _forward(self, columns: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        """Feed columns [batch, columns] and return the greedy next token of each sequence: [batch]."""
        assert self.cache is not None
        self.fed = columns if self.fed is None else torch.cat([self.fed, columns], dim=1)
        total = self.fed.shape[1]
        device = self.assistant.device
        offsets = torch.arange(total, device=device) - torch.tensor(starts, device=device).unsqueeze(1)
        parameters = inspect.signature(self.assistant.forward).parameters
        arguments = {"cache" if "cache" in parameters else "past_key_values": self.cache, "use_cache": True}
        if "position_ids" in parameters:
            arguments["position_ids"] = offsets[:, total - columns.shape[1] :].clamp_min(0)
        if "logits_to_keep" in parameters:
            arguments["logits_to_keep"] = 1
        outputs = self.assistant(
            columns.to(device), attention_mask=(offsets >= 0).long(), return_dict=True, **arguments
        )
        if total == columns.shape[1] and not self.cache.is_croppable:
            raise ValueError(
                f"{type(self.assistant).__name__} cannot assist: its cache cannot take back rejected tokens"
            )
        self.cache.activate_past_recording()
        return outputs.logits[:, -1].argmax(dim=-1).to(columns.device)


@functools.cache
def _windows_record_forwards() -> bool:
    """Whether a sliding-window layer answers rightly in several forwards without a crop between them (from 5.20 on)."""
    layer = DynamicSlidingWindowLayer(sliding_window=2)
    layer.activate_past_recording()
    tokens = torch.zeros(1, 1, 1, 1)
    for _ in range(3):
        kv_length = layer.get_mask_sizes(1)[0]
        keys, _ = layer.update(tokens, tokens)
    return keys.shape[2] == kv_length


class EarlyExitDrafter(AssistantDrafter):
    """Guesses what the deciding model's own first layers would say through its output head.

    Good with models trained for it (LayerSkip); any decoder works. The layers are shared, their keys and values are not: the
    drafter caches those of its layers a second time.

    Args:
        num_layers: How many of the model's layers to use.
        make_cache: As for `AssistantDrafter`.
    """

    def __init__(self, num_layers: int, make_cache: Callable[[PretrainedConfig], Cache] | None = None) -> None:
        self.num_layers = num_layers
        self.make_cache = make_cache if make_cache is not None else lambda config: DynamicCache(config=config)
        self.cache = None

    def start(self, model: PreTrainedModel) -> None:
        self.assistant = first_layers(model, self.num_layers)
        super().start(model)


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of the first `num_layers` decoder layers of another, which shares its parameters and leaves it untouched.

    Raises:
        ValueError: The model has no such layers, or its forward was replaced on the instance (by device maps, for example), where a
            copy would call the original's.
    """
    decoder = model.get_decoder()
    count = decoder.config.num_hidden_layers
    if not 1 <= num_layers < count:
        raise ValueError(f"num_layers={num_layers} must be at least 1 and below the model's {count}")
    lists = [
        name
        for name, child in decoder.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        raise ValueError(f"{type(decoder).__name__} has no single list of {count} layers to take the first ones of")
    path = next(name for name, module in model.named_modules() if module is decoder)
    shallow = _shallow_copy(model)
    node: Any = shallow
    for part in path.split("."):
        node._modules[part] = _shallow_copy(node._modules[part])
        node = node._modules[part]
    node._modules[lists[0]] = torch.nn.ModuleList(list(decoder._modules[lists[0]])[:num_layers])
    node.config = copy.deepcopy(decoder.config)
    if getattr(node.config, "layer_types", None) is not None:
        node.config.layer_types = node.config.layer_types[:num_layers]
    node.config.num_hidden_layers = num_layers
    if model.config is decoder.config:
        shallow.config = node.config
    return shallow


def _shallow_copy(module: Any) -> Any:
    if "forward" in vars(module):
        raise ValueError(
            f"the forward of this {type(module).__name__} was replaced (by a device map or a wrapper), so that its first layers "
            "cannot be used alone; load the model without device_map, or use another drafter"
        )
    twin = object.__new__(type(module))
    twin.__dict__ = dict(vars(module))
    twin._modules = dict(module._modules)
    return twin
