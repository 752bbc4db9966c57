"""Scores of predictions: means, losses against the dense cache, and how sure they are."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from eval.quality.runner import DENSE_RIGHT, Prediction

RESAMPLES = 2000
PROSE = "prose"  # scored by log-likelihood, and so in no average of answers

# A cell's losses by context: contexts are the independent draws, samples of one context are not.
Losses = dict[str, list[float]]


def score_of(prediction: Prediction) -> float:
    """Mean over turns."""
    return sum(prediction.scores) / len(prediction.scores)


def dense_score(predictions: Iterable[Prediction], task: str, length: int) -> float:
    """Mean score of the dense cache at a task and length; 0.0 without predictions."""
    scores = [
        score_of(prediction)
        for prediction in predictions
        if (prediction.method, prediction.task, prediction.length) == ("dense", task, length)
    ]
    return sum(scores) / len(scores) if scores else 0.0


@dataclass(frozen=True)
class Pairs:
    """Answers of a method beside the dense cache's to the same questions.

    Attributes:
        both: Right with both.
        lost: Right with the dense cache only.
        gained: Right with the method only.
        answers: All, those that neither gets right included.
    """

    both: int = 0
    lost: int = 0
    gained: int = 0
    answers: int = 0

    @property
    def dense_right(self) -> int:
        return self.both + self.lost

    @property
    def p_value(self) -> float:
        """Exact McNemar test, two-sided: how often chance alone parts the differing answers at least as unevenly."""
        differing = self.lost + self.gained
        tail = sum(math.comb(differing, count) for count in range(min(self.lost, self.gained) + 1))
        return min(1.0, 2 * tail / 2**differing)

    @property
    def lost_interval(self) -> tuple[float, float]:
        """95 % interval of the share of the dense cache's right answers that is lost (Wilson's score interval); (0, 1) for none."""
        return wilson(self.lost, self.dense_right)

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def wilson(count: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share, which has a width where none or all of few are counted; (0, 1) of none."""
    if of == 0:
        return 0.0, 1.0
    share, scale = count / of, 1 + z * z / of
    middle = (share + z * z / (2 * of)) / scale
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def pairs(predictions: Sequence[Prediction], share: float) -> dict[tuple[str, int, str], Pairs]:
    """Answers by method, length and way, each turn for itself, of all tasks that were given to the method."""
    dense = {_sample(prediction): prediction for prediction in predictions if prediction.method == "dense"}
    counts: dict[tuple[str, int, str], Pairs] = defaultdict(Pairs)
    for prediction in predictions:
        if prediction.share != share or prediction.task == PROSE:
            continue
        for ours, its in zip(prediction.scores, dense[_sample(prediction)].scores, strict=True):
            mine, right = ours == 1, its == 1
            cell = prediction.method, prediction.length, prediction.way
            counts[cell] += Pairs(mine and right, right and not mine, mine and not right, 1)
    return dict(counts)


def interval(cells: Sequence[Losses], seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over cells of each cell's mean, by drawing each cell's contexts anew with replacement."""
    rng = random.Random(seed)
    sums = [[(sum(values), len(values)) for values in cell.values()] for cell in cells]
    means = []
    for _ in range(RESAMPLES):
        total = 0.0
        for cell in sums:
            drawn = rng.choices(cell, k=len(cell))
            total += sum(value for value, _ in drawn) / sum(count for _, count in drawn)
        means.append(total / len(sums))
    means.sort()
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def failed(predictions: Sequence[Prediction]) -> list[tuple[str, int]]:
    """Tasks and lengths at which the dense cache is right less than half of the time."""
    dense = [prediction for prediction in predictions if prediction.method == "dense" and prediction.task != PROSE]
    cells = sorted({(prediction.task, prediction.length) for prediction in dense})
    return [cell for cell in cells if dense_score(dense, *cell) < DENSE_RIGHT]


def common(predictions: Sequence[Prediction], methods: Sequence[str], share: float) -> list[Prediction]:
    """Predictions of the dense cache and of these methods for the samples that all of the methods answered at a budget."""
    answered: dict[tuple, set[str]] = defaultdict(set)
    for prediction in predictions:
        if prediction.share == share:
            answered[_sample(prediction)].add(prediction.method)
    samples = {sample for sample, by in answered.items() if by >= set(methods)}
    wanted = {"dense", *methods}
    return [prediction for prediction in predictions if prediction.method in wanted and _sample(prediction) in samples]


def summary(predictions: Sequence[Prediction], fails: Sequence[tuple[str, int]] | None = None) -> dict[str, Any]:
    """What the report reads: `cells` (task, length, way, method, share), `averages` over tasks, and `prose`.

    Losses are in points: 100 times the dense score less the method's, sample by sample.

    Args:
        fails: Tasks and lengths that averages leave out; default: those that the dense cache fails on these predictions.
    """
    dense = {_sample(prediction): prediction for prediction in predictions if prediction.method == "dense"}
    fails = failed(predictions) if fails is None else fails
    grouped: dict[tuple, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        if prediction.task != PROSE:
            cell = (prediction.task, prediction.length, prediction.way, prediction.method, prediction.share)
            grouped[cell].append(prediction)
    cells, losses = [], {}
    for cell, members in grouped.items():
        losses[cell] = _losses(members, dense)
        cells.append(_cell(cell, members, losses[cell]))
    return {
        "cells": cells,
        "averages": _averages({cell: lost for cell, lost in losses.items() if cell[:2] not in fails}),
        "dense_fails": [
            {"task": task, "length": length, "score": dense_score(dense.values(), task, length)}
            for task, length in fails
        ],
        "prose": _prose(predictions, dense),
    }


def _sample(prediction: Prediction) -> tuple[str, int, str, str]:
    return prediction.task, prediction.length, prediction.name, prediction.way


def _losses(members: Sequence[Prediction], dense: dict[tuple, Prediction]) -> Losses:
    losses: Losses = defaultdict(list)
    for member in members:
        losses[member.context].append(100 * (score_of(dense[_sample(member)]) - score_of(member)))
    return losses


def _cell(cell: tuple, members: Sequence[Prediction], losses: Losses) -> dict[str, Any]:
    flat = [value for values in losses.values() for value in values]
    low, high = interval([losses])
    sparse = [member.counters for member in members]
    return {
        **dict(zip(("task", "length", "way", "method", "share"), cell, strict=True)),
        "samples": len(members),
        "answers": sum(len(member.scores) for member in members),
        "contexts": len(losses),
        "score": sum(map(score_of, members)) / len(members),
        "loss": sum(flat) / len(flat),
        "loss_low": low,
        "loss_high": high,
        "sparse_steps": sum(counters.get("sparse_steps", 0) for counters in sparse),
        "other_steps": sum(counters.get("other_steps", 0) for counters in sparse),
        "tokens_read": sum(counters["tokens_read"] for counters in sparse) / len(sparse),
    }


def _averages(losses: dict[tuple, Losses]) -> list[dict[str, Any]]:
    """Mean loss over tasks, each task and way of asking counting once, by length, method and share; and over all lengths."""
    groups: dict[tuple, list[Losses]] = defaultdict(list)
    for (_, length, _, method, share), lost in losses.items():
        groups[length, method, share].append(lost)
        groups[None, method, share].append(lost)
    rows = []
    for (length, method, share), cells in groups.items():
        means = [
            sum(value for values in cell.values() for value in values) / sum(map(len, cell.values())) for cell in cells
        ]
        low, high = interval(cells)
        rows.append(
            {
                "length": length,
                "method": method,
                "share": share,
                "tasks": len(cells),
                "samples": sum(len(values) for cell in cells for values in cell.values()),
                "loss": sum(means) / len(means),
                "loss_low": low,
                "loss_high": high,
                "worst": max(means),
            }
        )
    return rows


def _prose(predictions: Sequence[Prediction], dense: dict[tuple, Prediction]) -> list[dict[str, Any]]:
    """Perplexity by length, method and share, and its ratio to the dense cache's."""
    groups: dict[tuple, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        if prediction.task == PROSE:
            groups[prediction.length, prediction.method, prediction.share].append(prediction)
    rows = []
    for (length, method, share), members in groups.items():
        mean = sum(map(score_of, members)) / len(members)
        dense_mean = sum(score_of(dense[_sample(member)]) for member in members) / len(members)
        rows.append(
            {
                "length": length,
                "method": method,
                "share": share,
                "texts": len(members),
                "perplexity": math.exp(-mean),
                "ratio": math.exp(dense_mean - mean),
                "sparse_steps": sum(member.counters.get("sparse_steps", 0) for member in members),
                "tokens_read": sum(member.counters["tokens_read"] for member in members) / len(members),
            }
        )
    return rows
