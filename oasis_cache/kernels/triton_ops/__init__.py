"""The operations of reference.py as Triton kernels, with the same signatures. Needs triton; imported only where it is used.

On CPU tensors they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before triton was first imported.
"""

from oasis_cache.kernels.triton_ops.delta_select import delta_select
from oasis_cache.kernels.triton_ops.encoded_pages import gather_encoded, write_pages
from oasis_cache.kernels.triton_ops.exchange_blocks import exchange_blocks, plan_exchange
from oasis_cache.kernels.triton_ops.gather_blocks import gather_blocks, swap_blocks
from oasis_cache.kernels.triton_ops.score_minmax import score_minmax
from oasis_cache.kernels.triton_ops.score_packed import score_int1, score_int2
from oasis_cache.kernels.triton_ops.seal_blocks import seal_blocks
from oasis_cache.kernels.triton_ops.sparse_attention import sparse_attention

__all__ = [
    "delta_select",
    "exchange_blocks",
    "gather_blocks",
    "gather_encoded",
    "plan_exchange",
    "score_int1",
    "score_int2",
    "score_minmax",
    "seal_blocks",
    "sparse_attention",
    "swap_blocks",
    "write_pages",
]
