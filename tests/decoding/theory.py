"""What relaxed acceptance does to the distribution of a chain of drafts: exactly, by enumeration of a small vocabulary.

The theory is COOL-SD's (arXiv:2601.09212). Equations are named by the paper's numbers; accept and residual functions
are in specvis.decoding.bounds. A chain over V tokens is a pair of tables: P[i] and Q[i], float64 (V,) * (i + 1),
hold in their last dimension the target's and the draft's distribution of the token after each prefix of i tokens.
"""
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specvis.decoding.bounds import Accept, Residual, accept_prob, level_law, level_tv, normalized, optimal_residual


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """The left side of eq. (4), half the L1 distance of two laws of one shape: ()."""
    return (a - b).abs().sum() / 2


vanilla = accept_prob  # min(1, P / Q), the strict rule that eq. (6)'s residual belongs to


def _lent(P: Tensor, table: Tensor, delta: float, cutoff: str) -> tuple[Tensor, Tensor]:
    """Whether each token's neighbors lend their mass (..., V, k), and the token's mass with theirs (..., V)."""
    near = P[..., table]
    S, r = near.cumsum(-1), P[..., None]
    if cutoff == "jsd":
        whole, h = r + S, torch.where(r + S > 0, r + S / 2, 1.0)
        fits = (S * math.log(2) + torch.xlogy(r, r / h) + torch.xlogy(whole, whole / h)) / 2 <= delta
    else:
        fits = S <= {"tvd": delta, "ratio": delta * r}[cutoff]
    return fits, P + (near * fits).sum(-1)  # a prefix: no cutoff lets a larger S in


def neighborhood(table: Tensor, delta: float, cutoff: str = "tvd") -> Accept:
    """min(1, rho / Q), LANTERN's f, which Proposition 1 is about: rho is P with the neighbors that the cutoff admits.

    table: (V, k) int64, nearest first. Cutoffs and deltas are as in `specvis_kernels.neighborhood_sum`.
    """
    return lambda P, Q: accept_prob(_lent(P, table, delta, cutoff)[1], Q)


def relaxed_residual(table: Tensor, delta: float, cutoff: str = "tvd") -> Residual:
    """norm([P' - Q]+), LANTERN's eq. (3): P' is P with the admitted neighbors' mass moved onto the rejected token. It
    brings a level as near as eq. (5)'s G* does: a rejected x is resampled to at most the share (Q - rho)(x) / sum [P' -
    Q]+ of [P - Q]+, and these shares add to at most 1, so no token gets more than P."""
    def residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        lends, relaxed_mass = _lent(P, table, delta, cutoff)
        V = P.shape[-1]
        taken = torch.zeros(*P.shape, V, dtype=torch.bool).scatter(-1, table.expand(lends.shape), lends)
        relaxed = torch.where(torch.eye(V, dtype=torch.bool), relaxed_mass[..., None],
                              P[..., None, :].masked_fill(taken, 0))
        return normalized((relaxed - Q[..., None, :]).clamp(min=0), P[..., None, :])
    return residual


def expected_length(P: Sequence[Tensor], Q: Sequence[Tensor], accepts: Sequence[Accept]) -> float:
    """sum_i E_Q[f_1 .. f_i], the expected number of accepted drafts of a step, eq. (3); a token more is emitted."""
    reach_prob, length = torch.ones((), dtype=torch.float64), 0.0
    for p, q, accept in zip(P, Q, accepts):
        reach_prob = reach_prob[..., None] * q * accept(p, q)
        length += reach_prob.sum().item()
    return length


def output_law(P: Sequence[Tensor], Q: Sequence[Tensor], accepts: Sequence[Accept],
               residual: Residual = optimal_residual, again: bool = False) -> tuple[Tensor, float]:
    """The exact law of the first T = len(P) tokens, (V,) * T, and the bound of eq. (4) on its TV from the target's.

    After the first step the target goes on by itself (what eq. (4) is about), or with `again` further steps, each from
    accepts[0], and the bound is the sum of eq. (4) over steps, each weighted by its probability. No draft stands for
    the last token.
    """
    T, V = len(P), P[0].shape[-1]
    begun = [torch.zeros((V,) * t, dtype=torch.float64) for t in range(T + 1)]  # a step begins after this prefix
    begun[0] += 1
    bound = 0.0
    for s in range(T):
        reach_prob, drafts = begun[s], min(len(accepts), T - 1 - s) if again or s == 0 else 0
        for t, accept in zip(range(s, s + drafts), accepts):
            f = accept(P[t], Q[t])
            G = residual(P[t], Q[t], f)
            bound += (reach_prob * level_tv(P[t], Q[t], f, G)).sum().item()
            begun[t + 1] += reach_prob[..., None] * (level_law(P[t], Q[t], f, G) - Q[t] * f)
            reach_prob = reach_prob[..., None] * Q[t] * f
        begun[s + drafts + 1] += reach_prob[..., None] * P[s + drafts]
    return begun[T], bound


def target_law(P: Sequence[Tensor]) -> Tensor:
    """The target's law of len(P) tokens, (V,) * len(P): what eq. (4) measures from."""
    return output_law(P, P, [])[0]
