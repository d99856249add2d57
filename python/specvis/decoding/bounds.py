"""COOL-SD's schedule of factors, and the law of one relaxed draft (arXiv:2601.09212).

Equations are named by the paper's numbers. A draft x from Q is accepted with the probability f(x); after a rejection a
token is drawn from the residual G. Two kinds of functions say what a method does with rows P (target) and Q (draft):

    accept(P, Q)       -> f  (..., V)  the probability of accepting each token, were it the draft
    residual(P, Q, f)  -> G  (..., V)  what a token is drawn from after a rejection; (..., V, V) where it depends on
                                       the rejected token, which is then the dimension before the last

tests/decoding/theory.py enumerates whole chains of drafts by these functions, and tests hold them to the paper.
"""
import math
from collections.abc import Callable

import torch
from torch import Tensor

Accept = Callable[[Tensor, Tensor], Tensor]
Residual = Callable[[Tensor, Tensor, Tensor], Tensor]


def accept_prob(mass: Tensor, Q: Tensor) -> Tensor:
    """min(1, mass / Q), and 0 where there is no mass."""
    return torch.where(mass >= Q, (mass > 0).to(Q.dtype), mass / torch.where(Q > 0, Q, 1.0))


def scaled(omega: float) -> Accept:
    """min(1, omega P / Q), COOL-SD's f_i."""
    return lambda P, Q: accept_prob(omega * P, Q)


def normalized(mass: Tensor, otherwise: Tensor) -> Tensor:
    """mass / sum(mass) in the last dimension; `otherwise` where the sum is 0."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / torch.where(total > 0, total, 1.0), otherwise)


def optimal_residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
    """G* = norm([P - Q f]+), eq. (5); P where that is empty. It minimizes `level_tv`, to sum [Q f - P]+."""
    return normalized((P - Q * f).clamp(min=0), P)


def vanilla_residual(P: Tensor, Q: Tensor, f: Tensor) -> Tensor:
    """norm([P - Q]+), eq. (6).

    It is G* where f is at least min(1, P / Q) (Proposition 1), and biased where f is below (Algorithm 1, line 12).
    """
    return normalized((P - Q).clamp(min=0), P)


def level_law(P: Tensor, Q: Tensor, f: Tensor, G: Tensor) -> Tensor:
    """Q f + sum_x Q(x) (1 - f(x)) G: the distribution (..., V) of the token where a draft from Q is tried (eq. 4)."""
    rejected = Q * (1 - f)
    if G.ndim > P.ndim:
        return Q * f + (rejected[..., None] * G).sum(-2)
    return Q * f + rejected.sum(-1, keepdim=True) * G


def level_tv(P: Tensor, Q: Tensor, f: Tensor, G: Tensor) -> Tensor:
    """TV(level_law, P), a term of eq. (4): (...).

    With G* and `scaled(omega)` it is sum [min(Q, omega P) - P]+. From omega = 1 on that is beta_omega - beta_1, where
    beta_omega = sum min(Q, omega P); below it is 0.
    """
    return (level_law(P, Q, f, G) - P).abs().sum(-1) / 2


def schedule_mu(length: int, nu: float) -> float:
    """mu = ln((1 / L) sum_(i=1..L) exp(-nu i)) in closed form: eq. (10)'s constant, which makes the mean delta.

    Raises:
        ValueError: length < 1 or nu not finite
    """
    if length < 1 or not math.isfinite(nu):
        raise ValueError(f"length must be at least 1 and nu finite, got {length} and {nu}")
    return 0.0 if nu == 0 else -nu + math.log(math.expm1(-nu * length) / (length * math.expm1(-nu)))


def omega_schedule(delta: float, length: int, nu: float) -> list[float]:
    """omega_i = delta exp(-nu i - mu), i = 1..L, eq. (10). The mean is delta, and nu = 0 is UniformRSD.

    An omega below 1 buys nothing where no later one is above 1. Raised to 1 it accepts more drafts, and with optimal
    residuals neither eq. (4)'s bound nor the distribution of the tokens changes.

    Raises:
        ValueError: delta < 0, length < 1 or nu not finite
    """
    if not delta >= 0:
        raise ValueError(f"delta must be at least 0, got {delta}")
    mu = schedule_mu(length, nu)
    return [delta * math.exp(-nu * i - mu) for i in range(1, length + 1)]
