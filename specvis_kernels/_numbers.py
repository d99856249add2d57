"""Probabilities as integers, so that a sum does not depend on the order in which it was taken.

A probability p stands as floor(p * 2**42) in int64: exact for float32 p >= 2**-19, and a row of total
mass 1 sums to about 2**42, exact as float64. No row overflows, whatever it holds, up to 2**19 entries.
"""
import torch
from torch import Tensor

FIXED_BITS = 42
FIXED_ONE = 2.0 ** FIXED_BITS
LARGEST = 2.0        # an entry above this is no probability, whatever its rounding
CEILING = 2.0 ** 62  # where a threshold saturates: no row's total is larger


def to_fixed(probs: Tensor) -> Tensor:
    """Probabilities, float32 or float64, -> int64. NaN, infinite and negative ones must be gone."""
    return (probs * FIXED_ONE).to(torch.int64)


def weigh(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V) float32 -> weights (..., V) int64, their totals (...), and which rows are valid (...) bool.

    A row is invalid if an entry is NaN, negative or above LARGEST (such an entry weighs 0), or if nothing is
    left of it in fixed point.
    """
    sound = (probs >= 0) & (probs <= LARGEST)
    weights = to_fixed(torch.where(sound, probs, 0.0))
    total = weights.sum(-1)
    return weights, total, sound.all(-1) & (total > 0)


def draw(weights: Tensor, total: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: weights (..., V), total and uniforms (...) -> tokens (...) int64.

    The token is the smallest v whose running sum of weights exceeds floor(uniform * total).
    """
    aim = (uniforms.double() * total.double()).floor()
    aim = torch.where(aim > 0, aim, 0.0)  # a NaN counts as 0
    aim = torch.where(aim < total.double(), aim.to(torch.int64), total - 1)
    return (weights.cumsum(-1) <= aim.unsqueeze(-1)).sum(-1).clamp(max=weights.shape[-1] - 1)
