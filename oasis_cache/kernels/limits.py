"""What the Triton kernels take; PyTorch serves the rest."""

from __future__ import annotations

import torch

MAX_DIM = 256  # widest key or value of a head, and tokens of a block
MAX_SLOTS = 2048  # per KV head
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASS_BLOCKS = (1, 2, 4, 8, 16)
