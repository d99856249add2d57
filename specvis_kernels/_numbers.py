"""Numbers with the same bits on every backend: probabilities as integers, and exp and log in float32.

A sum of integers does not depend on the order in which it was taken. A probability p is kept as floor(p * 2**42) in
int64. That is exact for every float32 p >= 2**-19, and a row of total 1 sums to about 2**42, which float64 holds
exactly. A row of up to 2**19 entries cannot overflow, whatever it holds.
"""
import torch
from torch import Tensor

FIXED_BITS = 42
FIXED_ONE = 2.0 ** FIXED_BITS
LARGEST = 2.0  # an entry above this is no probability, whatever its rounding


def to_fixed_point(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., V) float32 -> fixed_probs (..., V) int64, their totals (...) int64, and is_valid (...) bool.

    A row is invalid if an entry is NaN, negative or above LARGEST (such an entry becomes 0), or if all of it is
    0 in fixed point.
    """
    is_prob = (probs >= 0) & (probs <= LARGEST)
    fixed_probs = (torch.where(is_prob, probs, 0.0) * FIXED_ONE).to(torch.int64)
    total = fixed_probs.sum(-1)
    return fixed_probs, total, is_prob.all(-1) & (total > 0)


def uniform_mass(V: int) -> int:
    """Each token's mass in the uniform distribution over a vocabulary of V."""
    return (1 << FIXED_BITS) // V


def draw(mass: Tensor, total: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: mass (..., V) int64, total and uniforms (...) -> tokens (...) int64.

    The token is the smallest v whose running sum of mass exceeds floor(uniform * total).
    """
    threshold = (uniforms.double() * total.double()).floor()
    threshold = torch.where(threshold > 0, threshold, 0.0)  # a NaN counts as 0
    threshold = torch.where(threshold < total.double(), threshold.to(torch.int64), total - 1)
    return (mass.cumsum(-1) <= threshold.unsqueeze(-1)).sum(-1).clamp(max=mass.shape[-1] - 1)


def exp(x: Tensor) -> Tensor:
    """exp(x) of float32 x <= 0, to one unit in the last place or so; 0 below -87. As `exp_of` in shared/floats.h."""
    clamped = torch.where(x < -100.0, -100.0, x)
    shifted = clamped * 1.44269504 + 12582912.0  # 1.5 * 2**23: the low bits are the integer nearest to the product
    n = shifted - 12582912.0
    r = (clamped - n * 0.693359375) + n * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    for c in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + c
    y = (y * r) * r + r + 1.0
    power = ((shifted.view(torch.int32) - 0x4B400000 + 127) << 23).view(torch.float32)  # 2**n
    return torch.where(x < -87.0, 0.0, y * power)


def log(x: Tensor) -> Tensor:
    """log(x) of positive, normal float32, to about one unit in the last place. As `log_of` in csrc/shared/floats.h."""
    exponent, mantissa = split(x)
    return log_of_parts(exponent, mantissa - 1.0)


def log1p_of_negative(v: Tensor) -> Tensor:
    """log(1 - v) of float32 v in (0, 1 - 2**-24], as exact as `log` where v is small too."""
    exponent, mantissa = split(1.0 - v)
    return log_of_parts(exponent, torch.where(exponent == 0, -v, mantissa - 1.0))


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = mantissa * 2**exponent, with the mantissa within [sqrt(1/2), sqrt(2)). exponent is int32."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32)


def log_of_parts(exponent: Tensor, r: Tensor) -> Tensor:
    """log((1 + r) 2**exponent), by a polynomial in r (Cephes, logf)."""
    y = r * 7.0376836292e-2 - 1.1514610310e-1
    for c in (1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
              -2.4999993993e-1, 3.3333331174e-1):
        y = y * r + c
    n, z = exponent.float(), r * r
    y = (y * r) * z
    y = y + n * -2.12194440e-4
    y = y - z * 0.5
    return (r + y) + n * 0.693359375
