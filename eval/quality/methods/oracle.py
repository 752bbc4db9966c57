"""The best choice that there is: blocks ranked by the attention mass that the step's own queries give their true keys."""

from __future__ import annotations

from eval.quality.methods.oasis import Oasis


class Oracle(Oasis):
    """Exact top-k of blocks per KV head."""

    def __init__(self) -> None:
        super().__init__(
            "oracle",
            "exact top-k blocks",
            "an oracle: blocks ranked by their exact attention mass, as a bound for every index",
            index="exact",
        )
