"""Density ratios of diagonal Gaussians in float64, the same bits on every backend and at any batch size.

exp is made of additions and multiplications, and channels are added in one order, whatever the shape: lane c of
LANES takes channels c, c + LANES, ...; then the upper half of the lanes is added to the lower until one is left.
"""
import math

import torch
from torch import Tensor

from ._dispatch import check

VARIANTS = ("paper", "released", "path")
LANES = 16
LEAST_EXP, MOST_EXP = -708.0, 709.0  # where 2**n is a normal number: below, exp is 0; above, that of MOST_EXP
LOG2_E = 1.4426950408889634
LN2_HIGH = 2977044471 / 2**32        # 32 bits of log 2, so that n * LN2_HIGH is exact, and the rest
LN2_LOW = 1.9082149292705877e-10
TERMS = 13                           # of the series, for |x| <= log(2) / 2: more change no bit


def check_last_step(variant: str, tokens: Tensor, sizes: dict[str, int], temperature: Tensor | None,
                    **last_step: Tensor | None) -> None:
    """Raise ValueError unless the variant exists and has the last step's distributions, or for `path` none."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if variant == "path":
        for name, tensor in {**last_step, "temperature": temperature}.items():
            if tensor is not None:
                raise ValueError(f"{name} must be None with variant 'path', whose log_ratio is the whole one, "
                                 f"got {type(tensor).__name__}")
        return
    for name, tensor in last_step.items():
        check(name, tensor, torch.float32, like=tokens, **sizes)
    if temperature is not None:
        check("temperature", temperature, torch.float32, like=tokens, B=sizes["B"])


def at_least_one(name: str, tensor: Tensor, **sizes: int) -> None:
    """Raise ValueError if one of these sizes is 0."""
    for letter, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must have {letter} >= 1, got shape {tuple(tensor.shape)}")


def exp(x: Tensor) -> Tensor:
    """float64 -> float64, to about two units in the last place. A NaN gives 0."""
    inside = torch.where(x > LEAST_EXP, x, LEAST_EXP)
    inside = torch.where(inside < MOST_EXP, inside, MOST_EXP)
    n = (inside * LOG2_E + 0.5).floor()
    r = (inside - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, 1 / math.factorial(TERMS))
    for k in reversed(range(TERMS)):
        y = y * r + 1 / math.factorial(k)
    power = ((n.long() + 1023) << 52).view(torch.float64)  # 2**n
    return torch.where(x > LEAST_EXP, y * power, 0.0)


def add_channels(terms: Tensor) -> Tensor:
    """(..., C) float64 -> (...)."""
    lanes = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = lanes[..., 0, :]
    for i in range(1, lanes.shape[-2]):
        total = total + lanes[..., i, :]
    half = LANES // 2
    while half:
        total = total[..., :half] + total[..., half:]
        half //= 2
    return total[..., 0]


def distance_weight_of(temperature: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) float64: what a squared distance counts, half of 1 / temperature^2; (B,) bool: it is refused."""
    if temperature is None:
        temperature = tokens.new_ones(tokens.shape[0])
    refused = ~((temperature > 0) & (temperature < torch.inf))
    temperature = torch.where(refused, 1.0, temperature).double()
    return 0.5 / (temperature * temperature), refused


def last_step_log_ratio(x: Tensor, target_means: Tensor, target_log_sigmas: Tensor, draft_means: Tensor,
                        draft_log_sigmas: Tensor, distance_weight: Tensor) -> Tensor:
    """log P(x) - log Q(x): (..., C) float32 each -> (...) float64."""
    target = (x.double() - target_means.double()) * exp(-target_log_sigmas.double())
    draft = (x.double() - draft_means.double()) * exp(-draft_log_sigmas.double())
    shift = draft_log_sigmas.double() - target_log_sigmas.double()
    return add_channels(shift + (draft * draft - target * target) * distance_weight.unsqueeze(-1))
