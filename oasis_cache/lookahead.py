"""Lookahead decoding of a batch: each forward carries the newest token of every sequence and drafts of what may follow.

Through `generate(custom_generate=LookaheadDecoding(drafter))`. With `accept=True` verified drafts are kept (speculative
decoding); with `accept=False` they are always rejected and only tell an `OasisCache` which blocks the next step will want
(OasisKV's loop).

**How sequences that advance unevenly share a cache.** All sequences of a batch share columns, as left padding makes them, and
the cache holds columns. It keeps only those that are final for every sequence: after each forward it is cropped to the slowest
sequence. A sequence that is ahead keeps its tokens, and is fed them again in place of drafts until the slowest has come there.
So the cache has no holes, masks and positions are those of `generate`, sliding windows stay right, nothing is copied within the
cache, and its length follows `generate`'s rule. The cost: forwards of up to `max_rows` query rows per sequence, and a sequence
that is further ahead than that waits. docs/lookahead_decoding.md has the numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, QuantizedLayer
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from oasis_cache.cache import OasisCache
from oasis_cache.drafters import (
    AssistantDrafter,
    Drafter,
    DraftRequest,
    EarlyExitDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    ReplayDrafter,
)
from oasis_cache.sequences import Sequences, TokenChooser

__all__ = [
    "AssistantDrafter",
    "DraftRequest",
    "Drafter",
    "EarlyExitDrafter",
    "LookaheadDecoding",
    "LookaheadReport",
    "NoDrafter",
    "PromptLookupDrafter",
    "RandomDrafter",
    "ReplayDrafter",
]

_CACHE_NAMES = ("cache", "past_key_values")  # transformers from 5.24 on, and before


@dataclass
class LookaheadReport:
    """What one run did, the prefill not counted.

    Attributes:
        forwards: Forwards of the model after the prefill.
        query_rows: Query rows of those forwards, per sequence of the batch.
        drafted: Drafts that were fed, over all sequences.
        accepted: Drafts that were kept.
        tokens: New tokens, over all sequences, without padding.
    """

    forwards: int = 0
    query_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0


class LookaheadDecoding:
    """Decoding with drafts for a batch, for `model.generate(**inputs, custom_generate=LookaheadDecoding(...))`.

    Greedy output is that of plain `generate`, token for token as far as the forwards' rounding allows; sampled output has its
    distribution (and with `accept=False` its very tokens for the same seed). Logits processors, stop criteria, streamers,
    `max_new_tokens`, `output_logits`, `output_scores`, chunked prefill and a filled cache work as in `generate`. After the run the
    cache holds all columns but the last, batched or not.

    Processors and criteria are called with the tokens that a sequence has at that position, accepted ones only; in a batch the
    rows of the other sequences may then hold drafts or padding, and what comes of them is not used. In `output_logits` and
    `output_scores`, entries of a sequence behind its end are zero with `accept=True`.

    Args:
        drafter: Guesses the next tokens, see `oasis_cache.drafters`.
        num_drafts: Most drafts per sequence and forward.
        accept: Keep verified drafts. False: reject all of them; then all sequences advance by one token a forward.
        max_rows: Most query rows per sequence and forward, for a batch whose sequences advance unevenly. Default:
            2 * (num_drafts + 1), cut to the `sparse_rows` of an `OasisCache`.

    Attributes:
        report: What the last run did.

    Raises:
        ValueError: A value is out of range; in `generate`, before anything is computed: what cannot be supported was asked for.

    Examples:
        >>> decoding = LookaheadDecoding(PromptLookupDrafter(), num_drafts=4)
        >>> model.generate(**inputs, custom_generate=decoding, past_key_values=OasisCache(model_config=model.config))
        >>> decoding.report.accepted / decoding.report.forwards
    """

    def __init__(
        self, drafter: Drafter, num_drafts: int = 4, *, accept: bool = True, max_rows: int | None = None
    ) -> None:
        if not isinstance(drafter, Drafter):
            raise ValueError(f"drafter must be a Drafter, got {type(drafter).__name__}")
        if isinstance(num_drafts, bool) or not isinstance(num_drafts, int) or num_drafts < 1:
            raise ValueError(f"num_drafts={num_drafts!r} must be an int of at least 1")
        if max_rows is not None and (not isinstance(max_rows, int) or max_rows < num_drafts + 1):
            raise ValueError(f"max_rows={max_rows!r} must be an int of at least num_drafts + 1 = {num_drafts + 1}")
        self.drafter = drafter
        self.num_drafts = num_drafts
        self.accept = accept
        self.max_rows = max_rows
        self.report = LookaheadReport()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Generate; `generate` calls this with its own, prepared arguments: input_ids [batch, tokens] int64."""
        asked = {"streamer": streamer} if streamer is not None else _arguments_of_generate(sys._getframe(1))
        name = next((name for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
        cache = model_kwargs[name] if name is not None else None
        self._check(model, input_ids, logits_processor, generation_config, asked, cache)
        assert name is not None
        run = _Run(self, model, input_ids, logits_processor, stopping_criteria, generation_config, name, model_kwargs)
        self.report = run.report
        run.streamer = asked.get("streamer")
        try:
            run.prefill()
            while run.running:
                run.step()
            run.complete_cache()
        finally:
            run.stop_recording()
            self.drafter.finish()
        if run.streamer is not None:
            run.streamer.end()
        return run.result()

    def rows_for(self, cache: Cache) -> int:
        """Most query rows per sequence and forward with this cache."""
        rows = 2 * (self.num_drafts + 1) if self.max_rows is None else self.max_rows
        return min(rows, cache.config.sparse_rows) if isinstance(cache, OasisCache) else rows

    def _check(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        asked: dict[str, Any],
        cache: Any,
    ) -> None:
        """Raise `ValueError` for what this decoding cannot do, before anything is computed."""
        name = type(model).__name__
        mode = config.get_generation_mode(asked.get("assistant_model"))
        if mode is GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                "LookaheadDecoding has its own drafts: leave out assistant_model, prompt_lookup_num_tokens and the like, and "
                "give it an AssistantDrafter, PromptLookupDrafter or EarlyExitDrafter"
            )
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"LookaheadDecoding does greedy search and sampling, not {mode.value} (num_beams={config.num_beams})"
            )
        if model.config.is_encoder_decoder:
            raise ValueError(f"LookaheadDecoding is for decoder-only models, and {name} is an encoder-decoder")
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"{name} has recurrent layers, whose state cannot take back rejected drafts")
        if not config.use_cache or not isinstance(cache, Cache):
            raise ValueError("LookaheadDecoding needs a cache: use_cache=True and a model that takes a Cache")
        if not cache.is_croppable or any(isinstance(layer, QuantizedLayer) for layer in cache.layers):
            raise ValueError(f"{type(cache).__name__} cannot be cropped, so that it cannot take back rejected drafts")
        if isinstance(cache, OasisCache) and cache.config.sparse_rows < self.num_drafts + 1:
            raise ValueError(
                f"num_drafts={self.num_drafts} makes forwards of {self.num_drafts + 1} rows, and this OasisCache streams more than "
                f"sparse_rows={cache.config.sparse_rows}: draft less, or raise sparse_rows"
            )
        if config.output_attentions or config.output_hidden_states:
            raise ValueError(
                "LookaheadDecoding returns neither attentions nor hidden states: sequences advance unevenly"
            )
        if asked.get("synced_gpus"):
            raise ValueError("LookaheadDecoding cannot keep several processes in step (synced_gpus=True)")
        if asked.get("streamer") is not None and input_ids.shape[0] > 1:
            raise ValueError(f"a streamer takes one sequence, and this batch has {input_ids.shape[0]}")
        stateful = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
        for processor in processors:
            if isinstance(processor, stateful) and self.accept and input_ids.shape[0] > 1:
                raise ValueError(
                    f"{type(processor).__name__} counts on one call per token of the whole batch: use accept=False, or batch 1"
                )


class _Run:
    """One call of `LookaheadDecoding`."""

    def __init__(
        self,
        decoding: LookaheadDecoding,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        cache_name: str,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.decoding, self.model, self.criteria, self.config = decoding, model, criteria, config
        self.cache_name, self.model_kwargs = cache_name, model_kwargs
        self.cache: Cache = model_kwargs[cache_name]
        self.max_rows = decoding.rows_for(self.cache)
        self.report = LookaheadReport()
        self.streamer: Any = None
        returned = config.return_dict_in_generate
        self.chooser = TokenChooser(
            processors,
            config.do_sample,
            bool(returned and config.output_scores),
            bool(returned and config.output_logits),
        )
        batch, self.num_prompt = input_ids.shape
        padding = config._pad_token_tensor
        self.sequences = Sequences(
            input_ids,
            [self.num_prompt] * batch,
            [None] * batch,
            pads=any(hasattr(criterion, "eos_token_id") for criterion in criteria),
            padding=0 if padding is None else int(padding),
        )
        self.starts = _first_tokens(model_kwargs.get("attention_mask"), batch, self.num_prompt)
        limits = [config.max_length, criteria.max_length]
        self.max_length = min(limit for limit in limits if limit is not None)
        self.cached = 0  # columns of the sequences that the cache holds, all final

    @property
    def running(self) -> bool:
        return any(self.sequences.wants_more(row) for row in range(len(self.sequences.lengths)))

    def prefill(self) -> None:
        """Feed the prompt and take the first token of each sequence."""
        self.decoding.drafter.start(self.model)
        outputs = self.model._prefill(self.sequences.tokens, self.config, self.model_kwargs)
        self.cache = self.model_kwargs[self.cache_name] = outputs[self.cache_name]
        if not self.cache.is_croppable:
            raise ValueError(
                f"{type(self.cache).__name__} cannot be cropped, so that it cannot take back rejected drafts"
            )
        self.cache.activate_past_recording()
        self.cached = self.num_prompt
        self.sequences.lay_out([], self.num_prompt)
        self._take_tokens(outputs.logits, self.num_prompt, [[] for _ in self.sequences.lengths])

    def step(self) -> None:
        """One forward: the known tokens that are not in the cache, and drafts; then the tokens that follow from it."""
        sequences = self.sequences
        drafts = self._draft()
        open_rows = [row for row in range(len(drafts)) if not sequences.is_final(row)] if self.decoding.accept else [0]
        known = {row: min(sequences.lengths[row] - self.cached, self.max_rows) for row in open_rows}
        if self.decoding.accept:
            rows = max(known[row] + drafts[row].numel() for row in open_rows)
        else:
            rows = 1 + max(draft.numel() for draft in drafts)
        stop = self.cached + rows
        ids = sequences.lay_out(drafts, stop)
        keep = rows if not self.decoding.accept else rows - min(known.values()) + 1
        with self._roles(rows, [known.get(row, 1) for row in range(len(drafts))], [d.numel() for d in drafts]):
            logits = self._forward(ids, rows, keep).logits
        self.report.forwards += 1
        self.report.query_rows += rows
        self.report.drafted += sum(draft.numel() for draft in drafts)
        if self.decoding.accept:
            self._take_tokens(logits, stop, [draft.tolist() for draft in drafts])
            # Newest tokens stay out: their logits are what the next forward is for.
            final = min(stop, min(sequences.lengths[row] for row in open_rows) - 1)
        else:
            self._take_tokens(logits[:, : logits.shape[1] - rows + 1], self.cached + 1, [[] for _ in drafts])
            final = self.cached + 1
        self.cache.crop(final - stop)
        self.cached = final

    def _roles(self, rows: int, known: list[int], drafted: list[int]) -> contextlib.AbstractContextManager[None]:
        """Tell an `OasisCache` which of the next forward's rows are worth blocks.

        Args:
            rows: Query rows per sequence.
            known, drafted: Of each sequence: rows with final tokens, and behind them rows with drafts; the rest is filler.
        """
        if not isinstance(self.cache, OasisCache):
            return contextlib.nullcontext()
        numbers = torch.arange(rows)
        certain = (
            numbers < torch.tensor(known).unsqueeze(1) if self.decoding.accept else (numbers < 1).expand(len(known), -1)
        )
        real = numbers < (torch.tensor(known) + torch.tensor(drafted)).unsqueeze(1)
        return self.cache.row_roles(real if self.decoding.accept else certain, real | certain)

    def _draft(self) -> list[torch.Tensor]:
        sequences = self.sequences
        limits = []
        for row, length in enumerate(sequences.lengths):
            known = length - self.cached
            room = min(sequences.room(row, self.max_length) - 1, self.max_rows - known, self.decoding.num_drafts)
            limits.append(max(0, room) if sequences.wants_more(row) else 0)
        request = DraftRequest(sequences.tokens, self.starts, tuple(sequences.lengths), tuple(limits), self.num_prompt)
        if not any(limits):
            return request.nothing()
        drafts = self.decoding.drafter.draft(request)
        if len(drafts) != len(limits) or any(d.numel() > limit for d, limit in zip(drafts, limits, strict=True)):
            raise ValueError(
                f"{type(self.decoding.drafter).__name__} gave {[d.numel() for d in drafts]} drafts for sequences that can use "
                f"at most {limits}"
            )
        return drafts

    def _forward(self, ids: torch.Tensor, rows: int, keep: int) -> Any:
        """The model on the last `rows` of the columns `ids` [batch, columns], with logits of the last `keep`."""
        model = self.model
        arguments = {**self.model_kwargs, **dict(_extended(self.model_kwargs, ids.shape[1] - self.num_prompt))}
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = keep
        inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=rows, **arguments)
        with (
            model._optimize_model_for_decode()
            if hasattr(model, "_optimize_model_for_decode")
            else contextlib.nullcontext()
        ):
            return model(**inputs, return_dict=True)

    def _take_tokens(self, logits: torch.Tensor, stop: int, drafts: list[list[int]]) -> None:
        """Give each sequence its next tokens: accepted drafts and the one behind them.

        Args:
            logits: [batch, rows, vocabulary], of the columns that end before `stop`.
            drafts: Of each sequence, laid out behind its known tokens.
        """
        sequences, everyone = self.sequences, range(len(drafts))
        # A sequence leaves when a draft of it was rejected, it has none left, or it ended.
        going = {row for row in everyone if sequences.wants_more(row) or not self.decoding.accept}
        starts = list(sequences.lengths)
        for length in range(min(sequences.lengths[row] for row in going), stop + 1):
            rows = [row for row in everyone if row in going and sequences.lengths[row] == length]
            if not rows:
                continue
            proposals = [
                drafts[row][length - starts[row]] if length - starts[row] < len(drafts[row]) else None for row in rows
            ]
            ids = sequences.tokens[:, :length]
            tokens, accepted = self.chooser.choose(
                ids, logits[:, length - 1 - stop], length - self.num_prompt, rows, proposals
            )
            sequences.append(rows, tokens)
            self._judge(rows, length + 1)
            if self.streamer is not None:
                self.streamer.put(sequences.tokens[rows, length].cpu())
            self.report.accepted += sum(accepted)
            going -= {
                row for row, kept in zip(rows, accepted, strict=True) if not kept or not sequences.wants_more(row)
            }

    def _judge(self, rows: list[int], length: int) -> None:
        """Ask the stop criteria about sequences that have just reached a length."""
        sequences = self.sequences
        self.report.tokens += sum(not sequences.is_final(row) for row in rows)
        scores = tuple(self.chooser.scores[: length - self.num_prompt]) if self.chooser.keep_scores else None
        done = self.criteria(sequences.tokens[:, :length], scores).tolist()
        for row in rows:
            if done[row]:
                sequences.mark_done(row)

    def complete_cache(self) -> None:
        """Bring the cache to all columns but the last, as `generate` leaves it, if it outlives the run."""
        end = self.sequences.end
        missing = end - 1 - self.cached
        if missing > 0 and (self.config.return_dict_in_generate or getattr(self.cache, "_is_user_defined", False)):
            self._forward(self.sequences.tokens[:, : end - 1], missing, 1)
            self.cache.crop(0)
            self.cached = end - 1

    def stop_recording(self) -> None:
        """Let windowed layers drop what leaves their window again, as before the run."""
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `generate` returns."""
        sequences = self.sequences.tokens[:, : self.sequences.end].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        names = {f.name for f in fields(GenerateDecoderOnlyOutput)}
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(self.chooser.scores) if self.chooser.keep_scores else None,
            logits=tuple(self.chooser.logits) if self.chooser.keep_logits else None,
            **{next(name for name in _CACHE_NAMES if name in names): self.cache},
        )


def _first_tokens(mask: torch.Tensor | None, batch: int, columns: int) -> list[int]:
    """First real column of each sequence, from the mask [batch, columns or more] (the newest columns count)."""
    if mask is None or columns == 0:
        return [0] * batch
    return mask[:, -columns:].long().argmax(dim=1).tolist()


def _extended(model_kwargs: dict[str, Any], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The prompt's tensors of one entry per column, lengthened by `count` columns as `generate` does it."""
    for name in ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"):
        values = model_kwargs.get(name)
        if values is None:
            continue
        new = values[..., -1:].expand(*values.shape[:-1], count)
        if name == "attention_mask":
            new = torch.ones_like(new)
        elif name == "position_ids":
            new = new + torch.arange(1, count + 1, device=values.device, dtype=values.dtype)
        elif name == "mm_token_type_ids":
            new = torch.zeros_like(new)
        yield name, torch.cat([values, new], dim=-1)


def _arguments_of_generate(frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the `generate` call around `frame` that transformers does not pass on to a callable.

    It drops `streamer`, `assistant_model` and `synced_gpus` for any `custom_generate` callable, without a word. A streamer would
    then wait for ever, so they are read where they are.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
