"""The tokens of a batch whose sequences advance unevenly, and how the next ones are picked from logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList

_SPARE_COLUMNS = 128


@dataclass
class Sequences:
    """The tokens of a batch in shared columns; sequence i knows its first `lengths[i]` columns.

    Attributes:
        tokens: [batch, capacity] int64; drafts, copies of the last token and, for finished sequences, padding behind what is known.
        lengths: Known columns, the prompt's included.
        done_at: `lengths[i]` when a stop criterion first ended sequence i; None before.
        pads: Whether what is done is finished, and padded from then on, as `generate` does if there is an EOS token. Otherwise it
            goes on until the last sequence is done.
        padding: The token for that.
    """

    tokens: torch.Tensor
    lengths: list[int]
    done_at: list[int | None]
    pads: bool
    padding: int

    @property
    def end(self) -> int:
        """Columns of the longest sequence, as far as is known now."""
        return max(length if done is None else done for length, done in zip(self.lengths, self.done_at, strict=True))

    def wants_more(self, row: int) -> bool:
        if self.done_at[row] is None:
            return True
        return not self.pads and self.lengths[row] < self.end

    def is_final(self, row: int) -> bool:
        """Whether all columns from `done_at` on are padding."""
        return self.pads and self.done_at[row] is not None

    def room(self, row: int, max_length: int) -> int:
        """Most tokens that the sequence may still get."""
        return (max_length if self.done_at[row] is None else self.end) - self.lengths[row]

    def lay_out(self, drafts: list[torch.Tensor], columns: int) -> torch.Tensor:
        """Put drafts behind the known tokens, the last one again where there are too few; returns [batch, columns]."""
        if columns >= self.tokens.shape[1]:
            self.tokens = torch.nn.functional.pad(
                self.tokens, (0, columns + _SPARE_COLUMNS - self.tokens.shape[1]), value=self.padding
            )
        for row, draft in enumerate(drafts):
            stop = self.lengths[row] + draft.numel()
            if not self.is_final(row) and self.lengths[row] < columns:
                self.tokens[row, self.lengths[row] : stop] = draft
                self.tokens[row, stop:columns] = self.tokens[row, stop - 1]
        return self.tokens[:, :columns]

    def append(self, rows: list[int], tokens: torch.Tensor) -> None:
        """One token [len(rows)] for each of some sequences of equal length; padding for those that are finished."""
        column = self.lengths[rows[0]]
        finished = torch.tensor([self.is_final(row) for row in rows], device=tokens.device)
        self.tokens[rows, column] = tokens.masked_fill(finished, self.padding)
        for row in rows:
            assert self.lengths[row] == column
            self.lengths[row] += 1

    def mark_done(self, row: int) -> None:
        if self.done_at[row] is None:
            self.done_at[row] = self.lengths[row]
            if self.pads:
                self.tokens[row, self.lengths[row] :] = self.padding


@dataclass
class TokenChooser:
    """Picks tokens from logits as `generate` would, and records what `generate` would return of them."""

    processors: LogitsProcessorList
    do_sample: bool
    keep_scores: bool
    keep_logits: bool
    scores: list[torch.Tensor] = field(default_factory=list)  # [batch, vocabulary] per new column
    logits: list[torch.Tensor] = field(default_factory=list)

    def choose(
        self, ids: torch.Tensor, logits: torch.Tensor, position: int, rows: list[int], proposals: list[int | None]
    ) -> tuple[torch.Tensor, list[bool]]:
        """The next token of some sequences.

        Sampling keeps the target's distribution p: a proposal d is accepted with probability p(d), and otherwise the token is drawn
        from p without d, renormalised (speculative sampling, Leviathan et al. 2023, algorithm 1, with a drafter that is certain).

        Args:
            ids: [batch, columns], what `logits` follows. Processors see all sequences, so that each keeps its place in the batch.
            logits: [batch, vocabulary].
            position: Number of the new column, from 0.
            rows: The sequences that get a token.
            proposals: A draft for each of them, or None.

        Returns:
            Tokens [len(rows)] int64, and for each whether it is its proposal.
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        if self.keep_logits:
            self._record(self.logits, position, rows, logits)
        scores = self.processors(ids, logits)
        if self.keep_scores:
            self._record(self.scores, position, rows, scores)
        scores = scores[rows]
        drafts = torch.tensor([-1 if p is None else p for p in proposals], device=ids.device)
        if not self.do_sample:
            tokens = scores.argmax(dim=-1)
        else:
            tokens = self._sample(scores.softmax(dim=-1), drafts)
        return tokens, (tokens == drafts).tolist()

    @staticmethod
    def _sample(probabilities: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """probabilities [rows, vocabulary], drafts [rows] (-1: none) -> tokens [rows]."""
        given = drafts >= 0
        if not given.any():
            return torch.multinomial(probabilities, num_samples=1).squeeze(1)
        places = drafts.clamp_min(0).unsqueeze(1)
        accepted = given & (torch.rand(drafts.shape, device=drafts.device) < probabilities.gather(1, places).squeeze(1))
        rejected = (given & ~accepted).unsqueeze(1)
        rest = torch.where(rejected, probabilities.scatter(1, places, 0.0), probabilities)
        return torch.where(accepted, drafts, torch.multinomial(rest, num_samples=1).squeeze(1))

    @staticmethod
    def _record(record: list[torch.Tensor], position: int, rows: list[int], values: torch.Tensor) -> None:
        while len(record) <= position:
            record.append(torch.zeros_like(values))
        record[position][rows] = values[rows]
