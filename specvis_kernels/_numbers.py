"""Probabilities as integers, so that a sum does not depend on the order in which it was taken.

A probability p stands as floor(p * 2**42) in int64. That is exact for every float32 p >= 2**-19, and a row of
total 1 sums to about 2**42, which float64 holds exactly. A row of up to 2**19 entries cannot overflow,
whatever it holds.
"""
import torch
from torch import Tensor

FIXED_BITS = 42
FIXED_ONE = 2.0 ** FIXED_BITS
LARGEST = 2.0              # an entry above this is no probability, whatever its rounding
MAX_THRESHOLD = 2.0 ** 62  # where a threshold saturates: no row's total is larger


def to_fixed_point(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V) float32 -> fixed_probs (..., V) int64, their totals (...) int64, and is_valid (...) bool.

    A row is invalid if an entry is NaN, negative or above LARGEST (such an entry becomes 0), or if all of it is
    0 in fixed point.
    """
    is_prob = (probs >= 0) & (probs <= LARGEST)
    fixed_probs = (torch.where(is_prob, probs, 0.0) * FIXED_ONE).to(torch.int64)
    total = fixed_probs.sum(-1)
    return fixed_probs, total, is_prob.all(-1) & (total > 0)


def draw(mass: Tensor, total: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: mass (..., V) int64, total and uniforms (...) -> tokens (...) int64.

    The token is the smallest v whose running sum of mass exceeds floor(uniform * total).
    """
    threshold = (uniforms.double() * total.double()).floor()
    threshold = torch.where(threshold > 0, threshold, 0.0)  # a NaN counts as 0
    threshold = torch.where(threshold < total.double(), threshold.to(torch.int64), total - 1)
    return (mass.cumsum(-1) <= threshold.unsqueeze(-1)).sum(-1).clamp(max=mass.shape[-1] - 1)
