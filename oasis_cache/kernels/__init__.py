"""The device operations of a decode step: for each, the fastest version that the tensors' device has."""

from oasis_cache.kernels.torch_ops import attention, sparse_attention, sparse_attention_with_mass

__all__ = ["attention", "sparse_attention", "sparse_attention_with_mass"]
