"""Density ratios of diagonal Gaussians in float64: the same bits on every backend and at any batch size.

exp is made of additions and multiplications. Channels are added in one order, whatever the shape: lane c of LANES
takes the channels c, c + LANES, and so on; then the upper half of the lanes is added to the lower half until one
lane is left.
"""
import math

import torch
from torch import Tensor

from ._checks import check, check_one_of

VARIANTS = ("paper", "released", "path")
LANES = 16
MIN_EXP, MAX_EXP = -708.0, 709.0  # where 2**n is a normal number: below, exp is 0; above, it is exp(MAX_EXP)
LOG2_E = 1.4426950408889634
LN2_HIGH = 2977044471 / 2**32     # 32 bits of log 2, so that n * LN2_HIGH is exact, and the rest of log 2
LN2_LOW = 1.9082149292705877e-10
TERMS = 13                        # of the series, for |x| <= log(2) / 2: more of them change no bit


def check_last_step(variant: str, tokens: Tensor, sizes: dict[str, int], temperature: Tensor | None,
                    **last_step: Tensor | None) -> None:
    """Raise ValueError unless the variant exists and has the last step's distributions, or for `path` none."""
    check_one_of("variant", variant, VARIANTS)
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


def exp(x: Tensor) -> Tensor:
    """exp(x) of float64, to about two units in the last place. A NaN gives 0."""
    clamped = torch.where(x > MIN_EXP, x, MIN_EXP)
    clamped = torch.where(clamped < MAX_EXP, clamped, MAX_EXP)
    n = (clamped * LOG2_E + 0.5).floor()
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, 1 / math.factorial(TERMS))
    for k in reversed(range(TERMS)):
        y = y * r + 1 / math.factorial(k)
    power = ((n.long() + 1023) << 52).view(torch.float64)  # 2**n
    return torch.where(x > MIN_EXP, y * power, 0.0)


def add_channels(terms: Tensor) -> Tensor:
    """Sum float64 terms (..., C) over the channels -> (...)."""
    lanes = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = lanes[..., 0, :]
    for i in range(1, lanes.shape[-2]):
        total = total + lanes[..., i, :]
    half = LANES // 2
    while half:
        total = total[..., :half] + total[..., half:]
        half //= 2
    return total[..., 0]


def distance_factor(temperature: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a squared distance is multiplied by: 1 / (2 temperature^2).

    Returns:
        factor:        (B,) float64  of temperature 1 where the temperature is undefined
        is_undefined:  (B,) bool     the temperature is not positive or not finite
    """
    if temperature is None:
        temperature = tokens.new_ones(tokens.shape[0])
    is_undefined = ~((temperature > 0) & (temperature < torch.inf))
    temperature = torch.where(is_undefined, 1.0, temperature).double()
    return 0.5 / (temperature * temperature), is_undefined


def last_step_log_ratio(x: Tensor, target_means: Tensor, target_log_sigmas: Tensor, draft_means: Tensor,
                        draft_log_sigmas: Tensor, factor: Tensor) -> Tensor:
    """log P(x) - log Q(x) of the last denoising step: (..., C) float32 each -> (...) float64."""
    target_distance = (x.double() - target_means.double()) * exp(-target_log_sigmas.double())
    draft_distance = (x.double() - draft_means.double()) * exp(-draft_log_sigmas.double())
    shift = draft_log_sigmas.double() - target_log_sigmas.double()
    squares = draft_distance * draft_distance - target_distance * target_distance
    return add_channels(shift + squares * factor.unsqueeze(-1))
