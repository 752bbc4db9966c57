"""What a task hands to the runner: a context that is read exactly, and turns that are asked about it."""

from __future__ import annotations

from dataclasses import dataclass

from eval.quality.needle import WAYS


@dataclass(frozen=True)
class Turn:
    """One question, and what its answer must hold.

    Attributes:
        question_ids: Tokens fed after all that came before; at least one.
        references: Texts that the answer should contain; the score is the share of them that it does.
        new_tokens: Tokens to generate.
        ends: Whether a stop token ends the answer early. Without it exactly `new_tokens` are generated, as a grammar would.
    """

    question_ids: tuple[int, ...]
    references: tuple[str, ...]
    new_tokens: int
    ends: bool = False

    def __post_init__(self) -> None:
        if not self.question_ids or not self.references or self.new_tokens < 1:
            raise ValueError(
                f"a turn needs a question, references and new_tokens of at least 1, got {len(self.question_ids)} tokens, "
                f"{len(self.references)} references, new_tokens={self.new_tokens}"
            )

    def score(self, answer: str) -> float:
        """Share of the references in an answer, letter case aside (RULER's string match)."""
        found = sum(reference.lower() in answer.lower() for reference in self.references)
        return found / len(self.references)


@dataclass(frozen=True)
class Sample:
    """A context and what is asked, or, where `target_ids` are given, a text to go on with.

    Attributes:
        task: The task's name, under which scores are averaged.
        length: Nominal length of context and questions in tokens; budgets are shares of it.
        name: Tells samples of a task and length apart.
        context: Tells contexts of a length apart: samples that share it have the same `context_ids`, and are no independent draws.
        context_ids: Read exactly, by one forward or several.
        turns: Asked one after another, each on what the last left in the cache. In a later turn a short question is always a
            sparse step.
        way: "answer": the first question is read exactly too, but for its last token. "question": it comes as a second forward on
            the filled cache and is read sparsely.
        depth: Where in the context the first answer lies, 0 to 1, if it lies in one place.
        target_ids: The text's true continuation, fed token by token; the score is its mean log-likelihood.
    """

    task: str
    length: int
    name: str
    context: str
    context_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    way: str = "answer"
    depth: float | None = None
    target_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way={self.way!r} must be one of {', '.join(map(repr, WAYS))}")
        if bool(self.turns) == bool(self.target_ids):
            raise ValueError(f"sample {self.name!r} of {self.task!r} needs turns or target_ids, and not both")

    @property
    def exact_ids(self) -> tuple[int, ...]:
        """What is read exactly before the first sparse step."""
        if self.target_ids:
            return self.context_ids[:-1]
        if self.way == "answer" and self.turns:
            return self.context_ids + self.turns[0].question_ids[:-1]
        return self.context_ids

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """What is fed to be asked for `target_ids`, token by token."""
        return (self.context_ids[-1], *self.target_ids[:-1])

    def asked_ids(self, number: int) -> tuple[int, ...]:
        """What is fed of a turn's question: of one that `exact_ids` hold, its last token."""
        question = self.turns[number].question_ids
        return question[-1:] if number == 0 and self.way == "answer" else question

    @property
    def sparse_rows(self) -> int:
        """Tokens of the longest question that is to be read in one sparse step, with the token generated before it."""
        later = [len(turn.question_ids) + 1 for turn in self.turns[1:]]
        first = [len(self.turns[0].question_ids)] if self.turns and self.way == "question" else []
        return max(first + later, default=1)

    @property
    def num_tokens(self) -> int:
        """Positions that the whole sample takes."""
        turns = sum(len(turn.question_ids) + turn.new_tokens for turn in self.turns)
        return len(self.context_ids) + turns + len(self.target_ids)
