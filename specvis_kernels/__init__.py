"""Fused kernels for speculative decoding of visual autoregressive models: tensors in, tensors out."""
from ._dispatch import EMPTY_RESIDUAL, INVALID_ROW, INVALID_RULE, INVALID_TREE, backends, ops
from .guided_probs import guided_probs

__version__ = "0.1.0"
__all__ = [
    "guided_probs",
    "backends", "ops", "EMPTY_RESIDUAL", "INVALID_ROW", "INVALID_RULE", "INVALID_TREE",
]
