"""Distances between samples of distributions over a few numbers, beside what chance alone makes of them."""
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SPLITS = 200     # of the target's samples, from which the noise is taken
DIRECTIONS = 64  # that samples are projected on
SURE = 5.0       # standard deviations of the noise from which a difference is believed: it is skewed upwards


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'| of samples (n, d) and (m, d), unbiased: 0 in the mean for equal distributions.

    It is 0 for equal distributions only (Szekely and Rizzo, 2013); the mean is over pairs of different samples.
    """
    def apart(x: Tensor, y: Tensor) -> float:
        return torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").sum().item()

    n, m = len(a), len(b)
    return 2 * apart(a, b) / (n * m) - apart(a, a) / (n * (n - 1)) - apart(b, b) / (m * (m - 1))


def sliced_distance(a: Tensor, b: Tensor) -> float:
    """Mean Wasserstein-1 distance of as many samples a and b (n, d) along DIRECTIONS fixed random directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(a.shape[1], DIRECTIONS, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=0)
    return ((a.double() @ directions).sort(0).values - (b.double() @ directions).sort(0).values).abs().mean().item()


DISTANCES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "energy distance": energy_distance, "sliced Wasserstein": sliced_distance}


@dataclass
class Compared:
    """A distance to the target's samples, and those of sets of the target's own samples from one another."""

    value: float
    floor: float   # mean of these
    spread: float  # their standard deviation

    @property
    def deviations(self) -> float:
        """How many standard deviations of the noise it is above the noise."""
        if not self.spread:
            return math.inf if self.value > self.floor else 0.0
        return (self.value - self.floor) / self.spread


def floor(a: Tensor, b: Tensor, distance: Callable[[Tensor, Tensor], float]) -> list[float]:
    """Distances between halves of samples a and b (n, d) of one distribution, split anew SPLITS times."""
    both, generator = torch.cat([a, b]), torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(both), generator=generator) for _ in range(SPLITS)]
    return [distance(both[order[:len(a)]], both[order[len(a):]]) for order in orders]


def compare(samples: dict[str, Tensor], a: Tensor, b: Tensor) -> dict[str, dict[str, Compared]]:
    """Every distance of each set of samples (n, d) to the target's a (n, d); b is more of the target's."""
    floors = {name: floor(a, b, distance) for name, distance in DISTANCES.items()}
    return {label: {name: Compared(distance(x, a), float(np.mean(floors[name])), float(np.std(floors[name], ddof=1)))
                    for name, distance in DISTANCES.items()} for label, x in samples.items()}


def joint(parts: list[Compared]) -> float:
    """Deviations of independent comparisons together."""
    return sum(part.deviations for part in parts) / len(parts) ** 0.5
