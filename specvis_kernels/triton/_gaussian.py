"""Density ratios of diagonal Gaussians in float64, bit for bit as in specvis_kernels/_gaussian.py."""
import triton
import triton.language as tl

from ._rows import INVALID_RULE

LANES = tl.constexpr(16)
LEAST_EXP = tl.constexpr(-708.0)
MOST_EXP = tl.constexpr(709.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(2977044471 / 2**32)
LN2_LOW = tl.constexpr(1.9082149292705877e-10)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def finite(x):
    """False for NaN and the infinities, of float32 or of what was one."""
    return (x >= -LARGEST) & (x <= LARGEST)


@triton.jit
def exp64(x):
    inside = tl.where(x > LEAST_EXP, x, LEAST_EXP)
    inside = tl.where(inside < MOST_EXP, inside, MOST_EXP)
    n = tl.floor(inside * LOG2_E + 0.5)
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    y = r * (1 / 6227020800) + 1 / 479001600
    y = y * r + 1 / 39916800
    y = y * r + 1 / 3628800
    y = y * r + 1 / 362880
    y = y * r + 1 / 40320
    y = y * r + 1 / 5040
    y = y * r + 1 / 720
    y = y * r + 1 / 120
    y = y * r + 1 / 24
    y = y * r + 1 / 6
    y = y * r + 1 / 2
    y = y * r + 1.0
    y = y * r + 1.0
    power = ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)  # 2**n
    return tl.where(x > LEAST_EXP, y * power, 0.0)


@triton.jit
def distance_weight_of(temperature, b):
    """Half of 1 / temperature**2 of request b, and INVALID_RULE or 0; a temperature that is refused counts as 1."""
    distance_weight = 0.5
    found = 0
    if temperature is not None:
        t = tl.load(temperature + b)
        defined = (t > 0.0) & finite(t)
        t = tl.where(defined, t, 1.0).to(tl.float64)
        distance_weight = 0.5 / (t * t)
        found = tl.where(defined, 0, INVALID_RULE)
    return distance_weight, found


@triton.jit
def log_ratio_terms(x, target_mean, target_log_sigma, draft_mean, draft_log_sigma, distance_weight):
    """What each channel adds to log P(x) - log Q(x)."""
    p = target_log_sigma.to(tl.float64)
    q = draft_log_sigma.to(tl.float64)
    target = (x.to(tl.float64) - target_mean.to(tl.float64)) * exp64(-p)
    draft = (x.to(tl.float64) - draft_mean.to(tl.float64)) * exp64(-q)
    return (q - p) + (draft * draft - target * target) * distance_weight


@triton.jit
def add_lanes(x, ROWS: tl.constexpr):
    """(ROWS, LANES) -> (ROWS): two halves at a time, so that no layout can change the order."""
    x = tl.sum(tl.reshape(x, [ROWS, 2, 8]), axis=1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 4]), axis=1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 2]), axis=1)
    return tl.sum(x, axis=1)
