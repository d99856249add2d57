"""What relaxed acceptance does to the distribution of a chain of drafts: exactly, by enumeration of a small vocabulary.

The theory is COOL-SD's (arXiv:2601.09212), whose equations are named by their numbers. A chain over V tokens is a pair
of tables: P[i] and Q[i], float64 (V,) * (i + 1), hold in their last dimension the target's and the draft's distribution
of the token after each prefix of i tokens. Two kinds of functions say what a decoder does with such rows:

    accept(P, Q)       -> f  (..., V)  the probability of accepting each token, were it the draft
    residual(P, Q, f)  -> G  (..., V)  what a token is drawn from after a rejection; (..., V, V) where it depends on
                                       the rejected token, which is then the dimension before the last
"""
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Accept = Callable[[Tensor, Tensor], Tensor]
Residual = Callable[[Tensor, Tensor, Tensor], Tensor]


def tables(conditional: Callable[[tuple[int, ...]], Sequence[float]], V: int, length: int) -> list[Tensor]:
    """Conditional distributions x_i given x_<i, as in eq. (3), from a function of the prefix: (V,) * (i + 1) each.

    Raises:
        ValueError: a row is not V numbers of at least 0 whose total is 1
    """
    result = []
    for i in range(length):
        prefixes = itertools.product(range(V), repeat=i)
        rows = torch.stack([torch.as_tensor(conditional(prefix), dtype=torch.float64) for prefix in prefixes])
        if rows.shape[1:] != (V,) or not (rows >= 0).all() or not ((rows.sum(1) - 1).abs() < 1e-9).all():
            raise ValueError(f"each row after {i} tokens must be V={V} probabilities of total 1")
        result.append(rows.view((V,) * (i + 1)))
    return result


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """The left side of eq. (4), half the L1 distance of two laws of one shape: ()."""
    return (a - b).abs().sum() / 2


def _odds(mass: Tensor, Q: Tensor) -> Tensor:
    """min(1, mass / Q), and 0 where there is no mass."""
    return torch.where(mass >= Q, (mass > 0).to(Q.dtype), mass / torch.where(Q > 0, Q, 1.0))


def vanilla(P: Tensor, Q: Tensor) -> Tensor:
    """min(1, P / Q), the strict rule that eq. (6)'s residual belongs to."""
    return _odds(P, Q)


def scaled(omega: float | Tensor) -> Accept:
    """min(1, omega P / Q), COOL-SD's f_i. omega: a number, or (B, 1) for rows (B, V)."""
    return lambda P, Q: _odds(omega * P, Q)


def point_mass(P: Tensor, Q: Tensor) -> Tensor:
    """min(1, P), eq. (3)'s f for deterministic drafts: all of the proposal's mass is on the draft, whatever Q says."""
    return P.clamp(max=1)


def _kept(P: Tensor, table: Tensor, cutoff: float, kind: str) -> tuple[Tensor, Tensor]:
    """Whether each token's neighbor is kept (..., V, k), and rho, its mass with theirs (..., V)."""
    near = P[..., table]
    S, r = near.cumsum(-1), P[..., None]
    if kind == "jsd":
        whole, h = r + S, torch.where(r + S > 0, r + S / 2, 1.0)
        fits = (S * math.log(2) + torch.xlogy(r, r / h) + torch.xlogy(whole, whole / h)) / 2 <= cutoff
    elif kind in ("tvd", "ratio"):
        fits = S <= (cutoff * r if kind == "ratio" else cutoff)
    else:
        raise ValueError(f"kind must be one of tvd, ratio, jsd, got {kind!r}")
    return fits, P + (near * fits).sum(-1)  # a prefix: no kind lets a larger S in


def neighborhood(table: Tensor, cutoff: float, kind: str = "tvd") -> Accept:
    """min(1, rho / Q), LANTERN's f, which Proposition 1 is about: rho is P with the neighbors that the cutoff keeps.

    table: (V, k) int64, nearest first. Kinds and cutoffs are those of `specvis_kernels.neighborhood_sum`.

    Raises (when called):
        ValueError: an unknown kind
    """
    return lambda P, Q: _odds(_kept(P, table, cutoff, kind)[1], Q)


def _normalized(mass: Tensor, otherwise: Tensor) -> Tensor:
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / torch.where(total > 0, total, 1.0), otherwise)


def optimal_residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
    """G* = norm([P - Q f]+), eq. (5); P where that is empty. It minimizes `level_tv`, to sum [Q f - P]+."""
    return _normalized((P - Q * f).clamp(min=0), P)


def vanilla_residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
    """norm([P - Q]+), eq. (6). It is G* for f >= vanilla (Proposition 1) and biased below (Algorithm 1, line 12)."""
    return _normalized((P - Q).clamp(min=0), P)


def omega_residual(omega: float) -> Residual:
    """norm([max(P - Q, (1 - omega) P)]+), what eq. (5) is for min(1, omega P / Q); verify_tree's `optimal`."""
    return lambda P, Q, f: _normalized(torch.maximum(P - Q, (1 - omega) * P).clamp(min=0), P)


def relaxed_residual(table: Tensor, cutoff: float, kind: str = "tvd") -> Residual:
    """norm([P' - Q]+), LANTERN's eq. (3): P' is P with the kept neighbors' mass moved onto the rejected token.

    It brings a level as near as eq. (5)'s G* does: a rejected x is resampled to at most the share (Q - rho)(x) /
    sum [P' - Q]+ of [P - Q]+, and these shares add to at most 1, so no token gets more than P.
    """
    def residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
        kept, rho = _kept(P, table, cutoff, kind)
        V = P.shape[-1]
        taken = torch.zeros(*P.shape, V, dtype=torch.bool).scatter(-1, table.expand(kept.shape), kept)
        moved = torch.where(torch.eye(V, dtype=torch.bool), rho[..., None], P[..., None, :].masked_fill(taken, 0))
        return _normalized((moved - Q[..., None, :]).clamp(min=0), P[..., None, :])
    return residual


def level_law(P: Tensor, Q: Tensor, f: Tensor, G: Tensor) -> Tensor:
    """Q f + sum_x Q(x) (1 - f(x)) G: what is emitted (..., V) where a draft from Q is tried, as in eq. (4)."""
    rejected = Q * (1 - f)
    if G.ndim > P.ndim:
        return Q * f + (rejected[..., None] * G).sum(-2)
    return Q * f + rejected.sum(-1, keepdim=True) * G


def level_tv(P: Tensor, Q: Tensor, f: Tensor, G: Tensor) -> Tensor:
    """TV(level_law, P), a term of eq. (4): (...). With G* and omega it is sum [min(Q, omega P) - P]+, which is
    beta_omega - beta_1 from omega = 1 on and 0 below, beta_omega = sum min(Q, omega P).
    """
    return (level_law(P, Q, f, G) - P).abs().sum(-1) / 2


def _levels(P: Sequence[Tensor], Q: Sequence[Tensor],
            accepts: Sequence[Accept]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each level i the probability that its prefix was drafted and accepted (V,) * (i - 1), P, Q and f."""
    if not len(accepts) <= min(len(P), len(Q)):
        raise ValueError(f"{len(accepts)} acceptance functions need as many tables, got {len(P)} and {len(Q)}")
    reach = torch.ones((), dtype=torch.float64)
    for p, q, accept in zip(P, Q, accepts):
        f = accept(p, q)
        yield reach, p, q, f
        reach = reach[..., None] * q * f


def expected_length(P: Sequence[Tensor], Q: Sequence[Tensor], accepts: Sequence[Accept]) -> float:
    """sum_i E_Q[f_1 .. f_i], the expected number of accepted drafts of a round, eq. (3); a token more is emitted.

    Raises:
        ValueError: fewer tables than acceptance functions
    """
    return sum((reach * (q * f).sum(-1)).sum().item() for reach, p, q, f in _levels(P, Q, accepts))


def tv_bound(P: Sequence[Tensor], Q: Sequence[Tensor], accepts: Sequence[Accept],
             residual: Residual = optimal_residual) -> float:
    """sum_i E_Q[f_1 .. f_(i-1) TV(level_law_i, P_i)], eq. (4): no less than a round's TV from the target.

    For f >= vanilla and the optimal residual it is expected_length - sum_i E_Q[f_1 .. f_(i-1) sum min(P_i, Q_i)].

    Raises:
        ValueError: fewer tables than acceptance functions
    """
    return sum((reach * level_tv(p, q, f, residual(p, q, f))).sum().item() for reach, p, q, f in _levels(P, Q, accepts))


def output_law(P: Sequence[Tensor], Q: Sequence[Tensor], accepts: Sequence[Accept],
               residual: Residual = optimal_residual, again: bool = False) -> tuple[Tensor, float]:
    """The exact law of the first T = len(P) tokens, (V,) * T, and the bound of eq. (4) on its TV from the target's.

    After the first round the target goes on by itself (what eq. (4) is about), or with `again` further rounds, each
    from accepts[0], and the bound is the sum of eq. (4) over rounds, each weighted by its probability. No draft stands
    for the last token.

    Raises:
        ValueError: fewer than T - 1 tables of the draft
    """
    T, V = len(P), P[0].shape[-1]
    if len(Q) < T - 1:
        raise ValueError(f"{T} tokens need {T - 1} tables of the draft, got {len(Q)}")
    begun = [torch.zeros((V,) * t, dtype=torch.float64) for t in range(T + 1)]  # a round begins after this prefix
    begun[0] += 1
    bound = 0.0
    for s in range(T):
        reach, drafts = begun[s], min(len(accepts), T - 1 - s) if again or s == 0 else 0
        for t, accept in zip(range(s, s + drafts), accepts):
            f = accept(P[t], Q[t])
            G = residual(P[t], Q[t], f)
            bound += (reach * level_tv(P[t], Q[t], f, G)).sum().item()
            begun[t + 1] += reach[..., None] * (level_law(P[t], Q[t], f, G) - Q[t] * f)
            reach = reach[..., None] * Q[t] * f
        begun[s + drafts + 1] += reach[..., None] * P[s + drafts]
    return begun[T], bound


def target_law(P: Sequence[Tensor]) -> Tensor:
    """The target's law of len(P) tokens, (V,) * len(P): what eq. (4) measures from."""
    return output_law(P, P, [])[0]


def chain_bound(P: Tensor, Q: Tensor, tokens: Tensor, accepts: Sequence[Accept],
                residual: Residual = optimal_residual, levels: Tensor | None = None) -> Tensor:
    """Eq. (4) as one step of the decoder sees it: sum_i f_1(x_1) .. f_(i-1)(x_(i-1)) TV(level_law_i, P_i).

    An estimate, and no bound by itself. Over chains that were sampled from Q its expectation is eq. (4) of the round,
    exactly, given the step's prefix. Summed over an image's steps, its expectation is at least the TV of the images'
    law from the target's. At temperature 0, with drafts not sampled from Q, or for siblings it says nothing. A NaN in
    a level that is tried gives NaN.

    Args:
        P, Q:     (B, L, V)     target and draft distribution before each drafted token
        tokens:   (B, L) int64  the drafted tokens
        accepts:  L functions of rows (B, V): `scaled(omega[:, i:i + 1])` for omega (B, L)
        levels:   (B,)          how many levels each request can accept, where not all L
    Returns:
        (B,) float64
    """
    P, Q = P.double(), Q.double()
    f = torch.stack([accept(P[:, i], Q[:, i]) for i, accept in enumerate(accepts)], 1)
    passed = f.gather(2, tokens[..., None]).squeeze(2).cumprod(1)
    reach = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1)
    terms = reach * level_tv(P, Q, f, residual(P, Q, f))
    if levels is not None:
        terms = torch.where(torch.arange(P.shape[1], device=P.device) < levels[:, None], terms, 0.0)
    return terms.sum(1)


def schedule_mu(length: int, nu: float) -> float:
    """mu = ln((1 / L) sum_(i=1..L) exp(-nu i)) in closed form: eq. (10)'s constant, which makes the mean delta.

    Raises:
        ValueError: length < 1 or nu not finite
    """
    if length < 1 or not math.isfinite(nu):
        raise ValueError(f"length must be at least 1 and nu finite, got {length} and {nu}")
    return 0.0 if nu == 0 else -nu + math.log(math.expm1(-nu * length) / (length * math.expm1(-nu)))


def omega_schedule(delta: float, length: int, nu: float) -> list[float]:
    """omega_i = delta exp(-nu i - mu), i = 1..L, eq. (10); its mean is delta, and nu = 0 is UniformRSD.

    An omega below 1 buys nothing where no later one is above 1: raised to 1 it accepts more, and eq. (4)'s bound and
    the round's law, with optimal residuals, stay as they are.

    Raises:
        ValueError: delta < 0, length < 1 or nu not finite
    """
    if not delta >= 0:
        raise ValueError(f"delta must be at least 0, got {delta}")
    mu = schedule_mu(length, nu)
    return [delta * math.exp(-nu * i - mu) for i in range(1, length + 1)]


def compensation(f1: float, f2: float, c2: float) -> float:
    """c_1 = -f1 c_2 / (1 + f2 + c_2): eq. (8), its misprint corrected. f1 and f2 are E_Q[f_1] and E_Q[f_2].

    With two drafts, f_1 + c_1 and f_2 + c_2 then have the expected length of f_1 and f_2, whatever the prefix does.
    Proposition 2: of two such rules the one that accepts more at first has the lower bound. Precisely, for two drafts,
    g_1 >= f_1 >= vanilla, g_2 and f_2 >= vanilla, optimal residuals and equal expected lengths, g's bound (eq. (4)) is
    lower by E_Q[(g_1 - f_1) sum min(P_2, Q_2)]. It ends where g_2 falls below vanilla: from there it rises again.

    Raises:
        ValueError: 1 + f2 + c_2 is not above 0
    """
    if not 1 + f2 + c2 > 0:
        raise ValueError(f"1 + f2 + c2 must be above 0, got {1 + f2 + c2}")
    return -f1 * c2 / (1 + f2 + c2)
