"""Density ratios of diagonal Gaussians in float64, bit for bit as in specvis_kernels/_gaussian.py."""
import triton
import triton.language as tl

from ._rows import INVALID_RULE

LANES = tl.constexpr(16)
MIN_EXP = tl.constexpr(-708.0)
MAX_EXP = tl.constexpr(709.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(2977044471 / 2**32)
LN2_LOW = tl.constexpr(1.9082149292705877e-10)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def is_finite(x):
    """Whether a float32, or a float64 that was one, is neither NaN nor infinite."""
    return (x >= -LARGEST) & (x <= LARGEST)


@triton.jit
def exp64(x):
    """exp(x) of float64, to about two units in the last place. A NaN gives 0."""
    clamped = tl.where(x > MIN_EXP, x, MIN_EXP)
    clamped = tl.where(clamped < MAX_EXP, clamped, MAX_EXP)
    n = tl.floor(clamped * LOG2_E + 0.5)
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
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
    return tl.where(x > MIN_EXP, y * power, 0.0)


@triton.jit
def distance_factor(temperature, b):
    """1 / (2 temperature^2) of request b, and INVALID_RULE or 0. An undefined temperature counts as 1."""
    factor = 0.5
    status_bits = 0
    if temperature is not None:
        t = tl.load(temperature + b)
        is_valid = (t > 0.0) & is_finite(t)
        t = tl.where(is_valid, t, 1.0).to(tl.float64)
        factor = 0.5 / (t * t)
        status_bits = tl.where(is_valid, 0, INVALID_RULE)
    return factor, status_bits


@triton.jit
def log_ratio_terms(x, target_mean, target_log_sigma, draft_mean, draft_log_sigma, factor):
    """The terms of the channels, whose sum is log P(x) - log Q(x) of the last denoising step."""
    target_log_sigma = target_log_sigma.to(tl.float64)
    draft_log_sigma = draft_log_sigma.to(tl.float64)
    target_distance = (x.to(tl.float64) - target_mean.to(tl.float64)) * exp64(-target_log_sigma)
    draft_distance = (x.to(tl.float64) - draft_mean.to(tl.float64)) * exp64(-draft_log_sigma)
    squares = draft_distance * draft_distance - target_distance * target_distance
    return (draft_log_sigma - target_log_sigma) + squares * factor


@triton.jit
def add_lanes(x, ROWS: tl.constexpr):
    """(ROWS, LANES) -> (ROWS), two halves at a time, so that no layout can change the order."""
    x = tl.sum(tl.reshape(x, [ROWS, 2, 8]), axis=1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 4]), axis=1)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 2]), axis=1)
    return tl.sum(x, axis=1)
