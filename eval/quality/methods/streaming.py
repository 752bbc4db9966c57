"""StreamingLLM (arXiv 2309.17453): the first tokens and the newest ones, nothing between.

`index="recency"` of OasisCache is that method: all blocks that the budget leaves are the newest. Positions stay those of the text,
not those in the cache.
"""

from __future__ import annotations

from eval.quality.methods.oasis import Oasis


class Streaming(Oasis):
    """Sink and recent blocks."""

    def __init__(self) -> None:
        super().__init__(
            "streaming",
            "StreamingLLM",
            "the first block and the newest ones within the budget; positions stay those of the text",
            index="recency",
        )
