"""couple_tokens: keep as many guesses as their new distributions allow, and draw the others anew."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._candidate import Candidate, check_relaxation, is_undefined, kept_neighbors, residual_mass
from ._checks import check, check_dims, integers, setting
from ._define import checked_once, define
from ._numbers import draw, to_fixed_point
from .status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE


class CoupleTokensResult(NamedTuple):
    tokens: Tensor     # (B, W) int64
    is_kept: Tensor    # (B, W) bool
    num_kept: Tensor   # (B,)   int32
    tv_excess: Tensor  # (B, W) float32
    status: Tensor     # (B, W) int32


@checked_once
def couple_tokens(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor, *,
                  omega: Tensor | float | None = None, neighbors: Tensor | None = None,
                  delta: Tensor | float | None = None, cutoff: str = "tvd", offset: int = 0,
                  groups: Tensor | None = None, residual: str = "optimal",
                  backend: str | None = None) -> CoupleTokensResult:
    """Turn guesses that were drawn from Q into draws from P, and keep as many of them as that allows.

    Every position is treated alone, all at once. P is its row of target_probs, Q the row of draft_probs that its
    guess x was drawn from. With u the first of its uniforms the guess is kept if

        u * Q(x) < omega * relaxed mass

    where the relaxed mass is P(x), plus P of the neighbors that the cutoff keeps. Otherwise a new token is drawn from
    the residual by the second uniform. `verify_tree` treats one sampled child in this way, bit for bit; its docstring
    explains the residuals. But here a rejection ends nothing: the positions after it are treated like the others.

    This is a maximal coupling of P and Q: no rule that draws from P keeps more guesses. Jacobi decoding uses it for a
    window of guesses. One target forward reads them and gives each position a new row P, this op makes a draw from P,
    and P is the Q of the next forward. The decoder emits the kept leading guesses and the token after them. A guess and
    its row do not depend on later positions. So the emitted tokens are distributed as the target's own if omega is at
    most 1 with the optimal residual, or is 1, without neighbors and groups. Q must be the row of the guess itself: with
    the row of an older guess the tokens have another distribution.

    With `groups` both masses are summed over the guess and the ids listed for it, A:

        u * Q(A) < omega * P(A)

    and a new token comes from the optimal residual, max(P - Q, 0). This is lossy; `tv_excess` says by how much.

    (Speculative Jacobi decoding: arXiv:2410.01699, coupled: arXiv:2510.24211; groups: GSD, arXiv:2508.07747.)

    Args:
        target_probs:  (B, W, V) float32       P, the distributions that the tokens follow now
        draft_probs:   (B, W, V) float32       Q, the distributions that they were drawn from
        tokens:        (B, W) int32 or int64   the guesses
        uniforms:      (B, W, 2) float32       in [0, 1): the first decides, the second draws
        omega:         (B, W) float32 or a number >= 0   the factor on the accept test; None is 1
        neighbors:     (C, k) uint16, int32 or int64  each code's neighbors, nearest first: distinct, itself excluded
        delta:         (B,) float32 or a number >= 0   how much the cutoff allows
        cutoff:        the rule by which delta limits the neighbors: "tvd", "ratio" or "jsd"
        offset:        the token id of code 0; a token outside [offset, offset + C) has no neighbors
        groups:        (B, W, k) int32 or int64   the ids that count with each guess, distinct. -1 pads: ids outside
                                               [0, V) do not count, and the guess counts once, listed or not
        residual:      "optimal", "relaxed" or "released"
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:     (B, W) int64    the guess where it was kept, else the new token, in [0, V)
        is_kept:    (B, W) bool     which guesses were kept
        num_kept:   (B,)   int32    how many leading guesses were kept
        tv_excess:  (B, W) float32  the added total variation, estimated: by how much the probability of keeping the
                                    guess exceeds the one with omega 1 and neither neighbors nor groups (0 if it does
                                    not). Its mean over guesses is the total variation that a position adds, if groups
                                    keep at least as much as the strict rule
        status:     (B, W) int32    EMPTY_RESIDUAL: the residual was empty after a rejection; the token comes from P.
                                    INVALID_ROW: P has an entry that is NaN, negative or above 2, or is 0 in fixed
                                    point; the token is 0.
                                    INVALID_DRAFT: the same errors, in Q; or Q(x) is 0 without neighbors and groups,
                                    which may keep a guess x that its new row gives nothing. The token comes from P.
                                    INVALID_TREE: the guess is outside [0, V); the token comes from P.
                                    INVALID_RULE: omega is negative or NaN, or is below 1 with groups or with
                                    neighbors and the optimal residual; the token comes from P.
                                    The guess is not kept in any of these cases

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, W or V is 0, neighbors come without
            delta, groups come with neighbors or another residual than "optimal", or "released" with a single column

    Examples:
        >>> P = torch.tensor([[0.5, 0.25, 0.25]]).repeat(1, 2, 1)   # one request, two positions with the same rows
        >>> Q = torch.tensor([[0.25, 0.5, 0.25]]).repeat(1, 2, 1)
        >>> uniforms = torch.tensor([[[0.6, 0.0], [0.4, 0.0]]])
        >>> result = couple_tokens(P, Q, torch.tensor([[1, 1]]), uniforms)
        >>> result.tokens, result.is_kept  # P / Q of token 1 is 1/2; the residual of P - Q is token 0
        (tensor([[0, 1]]), tensor([[False,  True]]))
        >>> result.num_kept
        tensor([0], dtype=torch.int32)
    """
    B, W, V = check_dims("target_probs", target_probs, "BWV", torch.float32, not_empty="WV")
    like = target_probs
    check("draft_probs", draft_probs, torch.float32, like=like, B=B, W=W, V=V)
    tokens = integers("tokens", tokens, torch.int64, like, B=B, W=W)
    check("uniforms", uniforms, torch.float32, like=like, **{"B": B, "W": W, "accept and draw": 2})
    if omega is not None:
        omega = setting("omega", omega, torch.float32, like, at_least=0, B=B, W=W)
    if delta is not None:
        delta = setting("delta", delta, torch.float32, like, at_least=0, B=B)
    offset = check_relaxation(neighbors, delta, cutoff, offset, residual, like)
    if groups is not None:
        if neighbors is not None:
            raise ValueError("neighbors must be None with groups")
        if residual != "optimal":
            raise ValueError(f"residual must be 'optimal' with groups, got {residual!r}")
        k = check_dims("groups", groups, "BWk")[2]
        groups = integers("groups", groups, torch.int64, like, B=B, W=W, k=k)
    return _call(backend, target_probs, draft_probs, tokens, uniforms, omega, neighbors, delta, groups, cutoff, offset,
                 residual)


def _oracle(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor, omega: Tensor | None,
            neighbors: Tensor | None, delta: Tensor | None, groups: Tensor | None, cutoff: str, offset: int,
            residual: str):
    B, W, V = target_probs.shape
    rows = B * W  # each is one candidate that was sampled
    mass, total, is_valid = to_fixed_point(target_probs.view(rows, V))
    draft_mass, draft_total, draft_is_valid = to_fixed_point(draft_probs.view(rows, V))
    tokens, uniforms = tokens.view(rows), uniforms.view(rows, 2)
    omega = torch.ones_like(total, dtype=torch.float64) if omega is None else omega.view(rows).double()
    in_vocabulary = (tokens >= 0) & (tokens < V)
    is_relaxed = neighbors is not None or groups is not None
    has_rule = ~is_undefined(omega, is_relaxed, residual)
    status = torch.where(has_rule, 0, INVALID_RULE) | torch.where(is_valid, 0, INVALID_ROW)

    def mass_at(ids, mass):
        return mass.gather(1, ids.clamp(0, V - 1)) * ((ids >= 0) & (ids < V))

    token = tokens.clamp(0, V - 1)
    column = token.unsqueeze(1)
    token_mass, token_draft_mass = mass_at(column, mass).squeeze(1), mass_at(column, draft_mass).squeeze(1)
    is_tried = is_valid & has_rule
    for is_good, bit in ((draft_is_valid, INVALID_DRAFT), (in_vocabulary, INVALID_TREE),
                         ((token_draft_mass > 0) | is_relaxed, INVALID_DRAFT)):
        status = status | torch.where(is_tried & ~is_good, bit, 0)
        is_tried = is_tried & is_good
    neighbor_mass, num_kept, ids = kept_neighbors(
        mass, total, token, neighbors, None if delta is None else delta.repeat_interleave(W), cutoff, offset, residual)
    candidate = Candidate(token, torch.ones_like(is_valid), token_mass, token_mass + neighbor_mass, total,
                          token_draft_mass, draft_total, omega)
    strict_prob = candidate.accept_prob(strict=True)
    if groups is not None:
        group = groups.view(rows, groups.shape[2])
        group = torch.where(group == column, -1, group)
        candidate = candidate._replace(relaxed_mass=token_mass + mass_at(group, mass).sum(1),
                                       draft_mass=token_draft_mass + mass_at(group, draft_mass).sum(1))
    is_kept = is_tried & candidate.accepts(uniforms[:, 0])
    tv_excess = torch.where(is_tried, (candidate.accept_prob() - strict_prob).clamp(min=0), 0.0)

    left = residual_mass(residual, mass, draft_mass, candidate, num_kept, ids)
    is_rejected = is_tried & ~is_kept
    is_empty = left.sum(1) == 0
    status = status | torch.where(is_rejected & is_empty, EMPTY_RESIDUAL, 0)
    mass = torch.where((is_rejected & ~is_empty).unsqueeze(1), left, mass)
    drawn = torch.where(is_valid, draw(mass, mass.sum(1), uniforms[:, 1]), 0)
    tokens, is_kept = torch.where(is_kept, tokens, drawn).view(B, W), is_kept.view(B, W)
    num_kept = is_kept.int().cumprod(1).sum(1)
    return tokens, is_kept, num_kept.int(), tv_excess.float().view(B, W), status.int().view(B, W)


def _meta(tokens):
    return (torch.empty_like(tokens), torch.empty_like(tokens, dtype=torch.bool),
            tokens.new_empty(tokens.shape[0], dtype=torch.int32), torch.empty_like(tokens, dtype=torch.float32),
            torch.empty_like(tokens, dtype=torch.int32))


_call = define("couple_tokens", oracle=_oracle, meta=_meta, result=CoupleTokensResult)
