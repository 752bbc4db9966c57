"""What `--suite small` and `--suite full` consist of: which tasks, at which lengths, on how many contexts, within which budgets."""

from __future__ import annotations

from dataclasses import dataclass

HEADLINE = 1 / 8  # of the context


@dataclass(frozen=True)
class Part:
    """A family of tasks at one length.

    Attributes:
        family: Module of eval/quality/tasks/.
        length: Nominal prompt length in tokens.
        contexts: Texts to draw.
        shares: Budgets as shares of the length.
        without: Names of methods that are left out.
    """

    family: str
    length: int
    contexts: int
    shares: tuple[float, ...] = (HEADLINE,)
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.contexts < 1 or self.length < 512 or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"{self} needs a context, at least 512 tokens, and shares above 0 and up to 1")


# Most parts skip misses within one cap only.
_ONE_CAP = {"without": ("oasis-skip-25",)}
# Contexts on which only the default configuration is held against the dense cache, for sure numbers where the claims are made.
_DEFAULT = {"without": ("oasis-minmax", "oasis-skip", "oasis-skip-25", "quest", "streaming", "oracle")}

_SMALL = (
    Part("needle", 1024, 3),
    Part("numbers", 2048, 1, **_ONE_CAP),
    Part("lookup", 1024, 1, **_ONE_CAP),
    Part("prose", 1024, 1, **_ONE_CAP),
)
# What matters most comes first, so that a run that is cut short says most about it; a later part of the same family and length only
# adds contexts or budgets. One of 8,192 tokens takes a core a minute to read.
_FULL = (
    Part("needle", 4096, 4),
    Part("numbers", 4096, 3, **_ONE_CAP),
    Part("lookup", 4096, 4, **_ONE_CAP),
    Part("prose", 4096, 2, **_ONE_CAP),
    Part("needle", 8192, 4, **_ONE_CAP),
    Part("numbers", 8192, 1, **_ONE_CAP),
    Part("needle", 1024, 5, (HEADLINE, 1 / 4, 1 / 2), **_ONE_CAP),
    Part("numbers", 1024, 2, **_ONE_CAP),
    Part("lookup", 1024, 2, **_ONE_CAP),
    Part("prose", 1024, 1, **_ONE_CAP),
    Part("variables", 1024, 1, **_ONE_CAP),
    Part("words", 1024, 2, **_ONE_CAP),
    Part("ruler", 1024, 1, **_ONE_CAP),
    Part("lookup", 4096, 12, **_DEFAULT),
    Part("numbers", 4096, 10, **_DEFAULT),
    Part("needle", 8192, 8, **_DEFAULT),
    Part("needle", 4096, 10, **_DEFAULT),
    Part("needle", 4096, 4, (1 / 32, 1 / 16), **_ONE_CAP),
    Part("needle", 2048, 5, (HEADLINE, 1 / 16, 1 / 4), **_ONE_CAP),
    Part("numbers", 2048, 2, **_ONE_CAP),
    Part("lookup", 2048, 2, **_ONE_CAP),
    Part("prose", 2048, 1, **_ONE_CAP),
)
# lm-eval's needle tasks at all lengths, a part by itself because each of their documents is read for one answer.
_RULER = tuple(Part("ruler", length, 1) for length in (8192, 4096, 2048, 1024))
SUITES: dict[str, tuple[Part, ...]] = {"small": _SMALL, "full": _FULL, "ruler": _RULER}
