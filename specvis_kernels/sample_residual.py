"""sample_residual: one token from what the target has left after a drafted token was refused."""
import torch
from torch import Tensor

from ._dispatch import EMPTY_RESIDUAL, INVALID_ROW, INVALID_RULE, check, check_dims, define
from ._numbers import FIXED_ONE, draw, to_fixed_point


def sample_residual(target_probs: Tensor, draft_probs: Tensor | None, uniforms: Tensor, *,
                    omega: Tensor | None = None, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """One token per row from the normalized max(P - Q, (1 - omega) P, 0), or from P without a draft Q.

    It is the residual `optimal` of verify_tree, for decoders with a loop of their own: accept a draft x if
    u Q(x) < omega P(x), else take this op's token, and for omega <= 1 the result is distributed as P. Both
    rows count in fixed point, floor(p * 2**42) times one over their total. Sampling is by inverse CDF in
    vocabulary order. If nothing is left of the residual the token comes from P. (Leviathan et al.,
    arXiv:2211.17192; COOL-SD, arXiv:2601.09212.)

    Args:
        target_probs:  (R, V) float32          P
        draft_probs:   (R, V) float32 or None  Q
        uniforms:      (R,)   float32          in [0, 1)
        omega:         (R,)   float32          None is 1
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:  (R,) int64  in [0, V)
        status:  (R,) int32  EMPTY_RESIDUAL; INVALID_ROW (of P or of Q: the token is 0);
                             INVALID_RULE (omega negative or NaN: the token comes from P)

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, or V is 0
    """
    R, V = check_dims("target_probs", target_probs, "RV")
    check("target_probs", target_probs, torch.float32, R=R, V=V)
    if V < 1:
        raise ValueError(f"target_probs must have V >= 1, got shape ({R}, {V})")
    if draft_probs is not None:
        check("draft_probs", draft_probs, torch.float32, like=target_probs, R=R, V=V)
    check("uniforms", uniforms, torch.float32, like=target_probs, R=R)
    if omega is not None:
        check("omega", omega, torch.float32, like=target_probs, R=R)
    rows = [None if t is None else t.contiguous() for t in (target_probs, draft_probs, uniforms, omega)]
    return _call(backend, *rows)


def _oracle(target_probs, draft_probs, uniforms, omega):
    weights, total, valid = to_fixed_point(target_probs)
    factor = torch.ones_like(uniforms) if omega is None else omega
    refused = ~(factor >= 0)
    status = torch.where(refused, INVALID_RULE, 0)
    if draft_probs is not None:
        draft, draft_total, sound = to_fixed_point(draft_probs)
        slack = torch.where(factor < 1, 1 - factor.double(), 0.0).unsqueeze(1)
        r = weights.double() * (1 / total.double()).unsqueeze(1)
        rest = torch.maximum(r - draft.double() * (1 / draft_total.double()).unsqueeze(1), slack * r)
        rest = (torch.where(rest > 0, rest, 0.0) * FIXED_ONE).to(torch.int64)
        empty = rest.sum(1) == 0
        valid = valid & sound
        status = status | torch.where(valid & ~refused & empty, EMPTY_RESIDUAL, 0)
        weights = torch.where((empty | refused).unsqueeze(1), weights, rest)
        total = weights.sum(1)
    status = status | torch.where(valid, 0, INVALID_ROW)
    return torch.where(valid, draw(weights, total, uniforms), 0), status.int()


def _meta(target_probs, draft_probs, uniforms, omega):
    R = target_probs.shape[0]
    return uniforms.new_empty(R, dtype=torch.int64), uniforms.new_empty(R, dtype=torch.int32)


_call = define(
    "sample_residual(Tensor target_probs, Tensor? draft_probs, Tensor uniforms, Tensor? omega)"
    " -> (Tensor, Tensor)",
    oracle=_oracle, meta=_meta)
