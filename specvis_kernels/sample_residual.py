"""sample_residual: the token that replaces a rejected draft."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check, check_dims, setting
from ._define import define
from ._numbers import FIXED_ONE, draw, to_fixed_point
from .status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE


class SampleResidualResult(NamedTuple):
    tokens: Tensor  # (R,) int64
    status: Tensor  # (R,) int32


def sample_residual(target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor, *,
                    omega: Tensor | float | None = None, backend: str | None = None) -> SampleResidualResult:
    """Draw one token per row from the residual max(P - Q, (1 - omega) P, 0), normalized.

    This is the rule `optimal` of verify_tree, for decoders that accept and reject in a loop of their own. Such a
    loop draws x from Q and u in [0, 1), accepts x if u * Q(x) < omega * P(x), and otherwise takes this op's
    token. For omega <= 1 its tokens are then distributed as P.

    Without draft_probs, and if the residual is empty, the token is drawn from P. Both rows are in fixed point,
    floor(p * 2**42), and each is divided by its total, so rows whose sum is not 1 are renormalized. The draw is by
    inverse CDF in vocabulary order.

    (Leviathan et al., arXiv:2211.17192, section 2.3; COOL-SD, arXiv:2601.09212.)

    Args:
        target_probs:  (R, V) float32          the target's distributions, P
        draft_probs:   (R, V) float32 or None  the distributions that the rejected tokens were drawn from, Q
        uniforms:      (R,)   float32          in [0, 1)
        omega:         (R,) float32 or a number >= 0   the factor on the accept test; None is 1
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:  (R,) int64  in [0, V)
        status:  (R,) int32  EMPTY_RESIDUAL: the residual was 0 everywhere and the token comes from P.
                             INVALID_ROW: P has an entry that is NaN, negative or above 2, or is 0 in fixed point;
                             the token is 0.
                             INVALID_DRAFT: the same errors, in Q; the token comes from P.
                             INVALID_RULE: omega is negative or NaN; the token comes from P

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, or V is 0

    Examples:
        >>> P, Q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
        >>> sample_residual(P, Q, torch.tensor([0.9])).tokens  # of P - Q only token 0 is positive
        tensor([0])
        >>> sample_residual(P, None, torch.tensor([0.9])).tokens
        tensor([2])
    """
    R, V = check_dims("target_probs", target_probs, "RV", torch.float32, not_empty="V")
    if draft_probs is not None:
        check("draft_probs", draft_probs, torch.float32, like=target_probs, R=R, V=V)
    check("uniforms", uniforms, torch.float32, like=target_probs, R=R)
    if omega is not None:
        omega = setting("omega", omega, torch.float32, target_probs, at_least=0, R=R)
    return _call(backend, target_probs, draft_probs, uniforms, omega)


def _oracle(target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor, omega: Tensor | None):
    mass, total, is_valid = to_fixed_point(target_probs)
    omega = torch.ones_like(uniforms) if omega is None else omega
    is_undefined = ~(omega >= 0)
    status = torch.where(is_undefined, INVALID_RULE, 0)
    if draft_probs is not None:
        draft_mass, draft_total, draft_is_valid = to_fixed_point(draft_probs)
        slack = torch.where(omega < 1, 1 - omega.double(), 0.0).unsqueeze(1)
        p = mass.double() * (1 / total.double()).unsqueeze(1)
        q = draft_mass.double() * (1 / draft_total.double()).unsqueeze(1)
        residual = torch.maximum(p - q, slack * p)
        residual = (torch.where(residual > 0, residual, 0.0) * FIXED_ONE).to(torch.int64)
        is_empty = residual.sum(1) == 0
        from_target = is_undefined | ~draft_is_valid
        status = status | torch.where(draft_is_valid, 0, INVALID_DRAFT)
        status = status | torch.where(is_valid & ~from_target & is_empty, EMPTY_RESIDUAL, 0)
        mass = torch.where((is_empty | from_target).unsqueeze(1), mass, residual)
        total = mass.sum(1)
    status = status | torch.where(is_valid, 0, INVALID_ROW)
    return torch.where(is_valid, draw(mass, total, uniforms), 0), status.int()


def _meta(target_probs, uniforms):
    R = target_probs.shape[0]
    return uniforms.new_empty(R, dtype=torch.int64), uniforms.new_empty(R, dtype=torch.int32)


_call = define("sample_residual", oracle=_oracle, meta=_meta, result=SampleResidualResult)
