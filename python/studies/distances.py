"""Distances between samples of distributions over a few numbers, beside what chance alone makes of them."""
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPLITS = 200     # the noise is taken from this many splits of the target's samples
DIRECTIONS = 64  # samples are projected on them
SURE = 5.0       # standard deviations of the noise from which a difference is believed: it is skewed upwards


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """(n, m) float64: how far apart samples (n, d) and (m, d) are."""
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (n, d) and (m, d), unbiased: 0 in the mean for equal distributions.

    It is 0 for equal distributions only (Szekely and Rizzo, 2013); the mean is over pairs of different samples.
    """
    n, m = len(a), len(b)
    return (2 * pairs(a, b).sum() / (n * m) - pairs(a, a).sum() / (n * (n - 1))
            - pairs(b, b).sum() / (m * (m - 1))).item()


def sliced_distance(a: Tensor, b: Tensor) -> float:
    """Mean Wasserstein-1 distance of as many samples a and b (n, d) along DIRECTIONS fixed random directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(a.shape[1], DIRECTIONS, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=0)
    return ((a.double() @ directions).sort(0).values - (b.double() @ directions).sort(0).values).abs().mean().item()


DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "energy distance": energy_distance, "sliced Wasserstein": sliced_distance}


@dataclass
class SampleDistance:
    """A distance of samples to the target's, beside the distances that two sets of the target's own samples have."""

    value: float
    chance: float  # mean of the latter
    spread: float  # standard deviation of the latter

    @property
    def deviations(self) -> float:
        """How many standard deviations of the noise it is above the noise."""
        if not self.spread:
            return math.inf if self.value > self.chance else 0.0
        return (self.value - self.chance) / self.spread


def chance_distances(a: Tensor, b: Tensor) -> dict[str, list[float]]:
    """Distances between halves of samples a and b (n, d) of one distribution, split anew SPLITS times."""
    both, n, m, generator = torch.cat([a, b]), len(a), len(b), torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(n + m, generator=generator) for _ in range(SPLITS)])
    first = torch.zeros(n + m, SPLITS, dtype=torch.float64).scatter_(0, orders[:, :n].T, 1.0)
    apart = pairs(both, both)  # once: every split's sums are quadratic forms of it
    from_first = apart @ first
    within = (first * from_first).sum(0)
    across = ((1 - first) * from_first).sum(0)
    others = apart.sum() - within - 2 * across
    energy = 2 * across / (n * m) - within / (n * (n - 1)) - others / (m * (m - 1))
    return {"energy distance": energy.tolist(),
            "sliced Wasserstein": [sliced_distance(both[order[:n]], both[order[n:]]) for order in orders]}


def compare(samples: dict[str, Tensor], a: Tensor, b: Tensor) -> dict[str, dict[str, SampleDistance]]:
    """Every distance of each set of samples (n, d) to the target's a (n, d); b is more of the target's."""
    chance = {name: (float(np.mean(values)), float(np.std(values, ddof=1)))
              for name, values in chance_distances(a, b).items()}
    return {label: {name: SampleDistance(distance(x, a), *chance[name]) for name, distance in DISTANCES.items()}
            for label, x in samples.items()}


def joint(parts: list[SampleDistance]) -> float:
    """Take independent comparisons together: how many standard deviations of the noise their sum is above the noise."""
    return sum(part.deviations for part in parts) / len(parts) ** 0.5
