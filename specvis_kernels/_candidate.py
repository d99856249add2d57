"""A candidate that is accepted or rejected, and the residual of the target after a rejection. For oracles."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_one_of, check_together
from ._numbers import FIXED_ONE
from .neighborhood_sum import check_neighbors, neighbor_prefix

RESIDUALS = ("optimal", "relaxed", "released")
EMPTY = ("target", "uniform")  # what takes the place of an empty residual


def check_relaxation(neighbors: Tensor | None, delta: Tensor | float | None, cutoff: str, offset: int, residual: str,
                     like: Tensor) -> int:
    """Raise ValueError unless these arguments fit together, and fit rows `like` (.., V). Returns the offset."""
    check_one_of("residual", residual, RESIDUALS)
    check_together(neighbors=neighbors, delta=delta)
    offset = check_neighbors(neighbors, cutoff, offset, like.shape[-1], like=like)
    if neighbors is not None and residual == "released" and neighbors.shape[1] < 2:
        raise ValueError("neighbors must have at least two columns under 'released', got one")
    return offset


class Candidate(NamedTuple):
    """A token of each of R rows, as `Candidate` in csrc/shared/rules.h. Masses and totals are in fixed point."""
    token: Tensor         # (R,) int64    in [0, V)
    is_sampled: Tensor    # (R,) bool     whether it was drawn from the draft's row; else it is a point mass
    token_mass: Tensor    # (R,) int64    its mass in the target
    relaxed_mass: Tensor  # (R,) int64    its mass and its kept neighbors'
    total: Tensor         # (R,) int64    of the target
    draft_mass: Tensor    # (R,) int64    its mass in the draft
    draft_total: Tensor   # (R,) int64    of the draft
    omega: Tensor         # (R,) float64

    def accepts(self, uniform: Tensor) -> Tensor:
        """u Q(x) < omega * relaxed mass, both sides times the totals of target and draft; never without mass."""
        need = (uniform.double() * self._proposal()) * self.total.double()
        return (need < self._numerator(strict=False)) & (self.relaxed_mass > 0)

    def accept_prob(self, strict: bool = False) -> Tensor:
        """The probability that a uniform number accepts; strict: if omega were 1 and there were no neighbors."""
        mass, numerator = self.token_mass if strict else self.relaxed_mass, self._numerator(strict)
        denominator = self._proposal() * self.total.double()
        is_possible = (mass > 0) & (numerator > 0)
        return torch.where(is_possible, torch.where(numerator >= denominator, 1.0, numerator / denominator), 0.0)

    def _proposal(self):
        return torch.where(self.is_sampled, self.draft_mass.double(), 1.0)

    def _numerator(self, strict):
        mass = self.token_mass.double() if strict else self.omega * self.relaxed_mass.double()
        return mass * torch.where(self.is_sampled, self.draft_total.double(), 1.0)


def is_undefined(omega: Tensor, has_neighbors: bool, residual: str) -> Tensor:
    """Where there is no rule: omega is negative or NaN, or below 1 with neighbors and the optimal residual."""
    return ~(omega >= (1 if has_neighbors and residual == "optimal" else 0))


def kept_neighbors(mass: Tensor, total: Tensor, token: Tensor, neighbors: Tensor | None, delta: Tensor | None,
                   cutoff: str, offset: int, residual: str,
                   in_range: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """neighbor_prefix() of rows (R, V), or of no neighbors. The last column of the table is for "released" alone.

    Tokens that are not `in_range`, if that is given, keep no neighbor.
    """
    if neighbors is None:
        return torch.zeros_like(token), torch.zeros_like(token), token.new_empty(len(token), 0)
    num_considered = neighbors.shape[1] - (residual == "released")
    neighbor_mass, num_kept, ids = neighbor_prefix(mass, total, token, neighbors, delta, cutoff, offset,
                                                   num_considered, limit=total)
    if in_range is not None:
        neighbor_mass, num_kept = torch.where(in_range, neighbor_mass, 0), torch.where(in_range, num_kept, 0)
    return neighbor_mass, num_kept, ids


def residual_mass(residual: str, mass: Tensor, draft_mass: Tensor, candidate: Candidate, num_kept: Tensor,
                  ids: Tensor) -> Tensor:
    """The residual of the target (R, V) after the candidate was rejected: (R, V) int64, of any total.

    mass and draft_mass (R, V) int64 are the rows of target and draft, num_kept and ids are of kept_neighbors().
    """
    (R, V), device = mass.shape, mass.device
    slack = torch.zeros_like(candidate.omega)  # the share of the target that stays at least
    if residual == "optimal":
        slack = torch.where(candidate.omega < 1, 1 - candidate.omega, 0.0)
    num_treated = {"optimal": torch.zeros_like(num_kept), "relaxed": num_kept,
                   "released": torch.where(num_kept >= 1, ids.shape[1], 0)}[residual]
    ids = torch.where(torch.arange(ids.shape[1], device=device) < num_treated.unsqueeze(1), ids, V)
    is_treated = torch.zeros(R, V + 1, dtype=torch.bool, device=device).scatter(1, ids, True)[:, :V]
    is_token = torch.arange(V, device=device) == candidate.token.unsqueeze(1)

    after_point_mass = torch.where(is_treated, 0, mass)
    left = (slack * candidate.token_mass.double()).to(torch.int64)
    after_point_mass = torch.where(is_token, left.unsqueeze(1), after_point_mass)

    if residual == "relaxed":
        mass = torch.where(is_token, candidate.relaxed_mass.unsqueeze(1), torch.where(is_treated, 0, mass))
    if residual == "released":
        draft_mass = torch.where(is_treated, 0, draft_mass)
    r = mass.double() * (1 / candidate.total.double()).unsqueeze(1)
    q = draft_mass.double() * (1 / candidate.draft_total.double()).unsqueeze(1)
    after_draft_row = torch.maximum(r - q, slack.unsqueeze(1) * r)
    after_draft_row = (torch.where(after_draft_row > 0, after_draft_row, 0.0) * FIXED_ONE).to(torch.int64)
    return torch.where(candidate.is_sampled.unsqueeze(1), after_draft_row, after_point_mass)
