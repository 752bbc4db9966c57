"""Filling caches without a prefill: the keys and values of a real text, again and again with a little noise.

Neighbouring steps then want alike blocks, as they do in use; every cache of a case gets the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from oasis_cache.cache import cache_argument
from oasis_cache.haystack import text

SEED_TOKENS = 4096
SPARE_TOKENS = 64
NOISE = 0.02  # of the keys' and values' own deviation


class Source:
    """Keys and values of a text, layer by layer, and the tokens that follow it.

    Args:
        ids: int64 [1, tokens]; all but the last `SPARE_TOKENS` are read by the model, the others are what steps are fed.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.tokens = ids.shape[1] - SPARE_TOKENS
        self.following = ids[:, self.tokens :]
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids[:, : self.tokens], **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        self.layers = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        self.weight_bytes = sum(
            weight.nbytes for weight in model.parameters()
        )  # tied ones once: a step reads them once

    @classmethod
    def of_text(cls, model: PreTrainedModel, tokenizer: Any) -> Source:
        wanted = SEED_TOKENS + SPARE_TOKENS
        ids = tokenizer(text(wanted + 200, tokenizer), return_tensors="pt", add_special_tokens=False).input_ids
        return cls(model, ids[:, :wanted])

    def kv_bytes(self, context: int, batch: int = 1) -> int:
        """Bytes of the dense keys and values of so many tokens."""
        return batch * context * sum((k.nbytes + v.nbytes) // self.tokens for k, v in self.layers)

    def ids_of(self, step: int, batch: int = 1) -> torch.Tensor:
        """What to feed at a step: int64 [batch, 1]."""
        place = step % SPARE_TOKENS
        return self.following[:, place : place + 1].expand(batch, 1)

    def fill(self, cache: Cache, context: int, batch: int = 1, whole: bool = False) -> Cache:
        """Give an empty cache `context` tokens and return it.

        Args:
            whole: A layer at a time with all of its tokens, for caches that copy or encode all that they hold with every piece.
                Otherwise a piece of all layers at a time, as a chunked prefill does.
        """
        noises = list(self._noises(context, batch))
        if not whole:
            for start, noise in noises:
                for number in range(len(self.layers)):
                    cache.update(*self._piece(number, start, noise), number)
            return cache
        for number, parts in enumerate(self.layers):
            sizes = [(batch, part.shape[1], context, part.shape[3]) for part in parts]
            full = [part.new_empty(size) for part, size in zip(parts, sizes, strict=True)]
            for start, noise in noises:
                for target, piece in zip(full, self._piece(number, start, noise), strict=True):
                    target[:, :, start : start + piece.shape[2]] = piece
            cache.update(*full, number)
        return cache

    def _noises(self, context: int, batch: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Where each piece begins, and the noise of its keys and of its values; the same in all layers."""
        for start in range(0, context, self.tokens):
            generator = torch.Generator().manual_seed(start)
            count = min(self.tokens, context - start)
            noise = [
                torch.randn((batch, part.shape[1], count, part.shape[3]), generator=generator).to(part.dtype)
                for part in self.layers[0]
            ]
            if start == 0:
                for each in noise:
                    each[0] = 0  # the text itself
            yield start, noise

    def _piece(self, number: int, start: int, noise: list[torch.Tensor]) -> list[torch.Tensor]:
        count = noise[0].shape[2]
        return [
            part[:, :, :count] + each * (NOISE * part.std())
            for part, each in zip(self.layers[number], noise, strict=True)
        ]
