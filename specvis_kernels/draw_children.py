"""draw_children: the children of a static draft tree's nodes, sampled without replacement."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, check, check_dims, define
from ._numbers import draw, to_fixed_point


class DrawChildrenResult(NamedTuple):
    """What `draw_children` returns."""
    tokens: Tensor        # (B, F, K) int64
    num_children: Tensor  # (B, F) int32
    status: Tensor        # (B, F) int32


def draw_children(draft_probs: Tensor, uniforms: Tensor, *,
                  backend: str | None = None) -> DrawChildrenResult:
    """K different tokens for each node, one after the other, each from what the earlier ones left of its row.

    The row counts in fixed point, floor(p * 2**42). Child k is drawn by inverse CDF in vocabulary order: the
    first token whose running sum of the weights that are left exceeds floor(uniforms[b, f, k] * their total).
    Then its weight is gone. Once nothing is left the other children do not exist: their tokens are 0, and
    `num_children` says how many there are. verify_tree, with these rows as its draft_probs, takes the weights away
    likewise and skips children once the draft's mass is spent, so it stays exact even on a tree that has
    them.

    (The static trees of EAGLE, arXiv:2401.15077; LANTERN++, arXiv:2502.06352; COOL-SD, arXiv:2601.09212.)

    Args:
        draft_probs:  (B, F, V) float32   the draft's probabilities after each of F nodes
        uniforms:     (B, F, K) float32   in [0, 1), one for each child
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:       (B, F, K) int64     the children, in the order in which they were drawn
        num_children:        (B, F)    int32     how many of them exist
        status:       (B, F)    int32     INVALID_ROW where a row is invalid: an entry is NaN, negative or
                                          above 2, or nothing is left of it in fixed point; its num_children is 0

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, or F, V or K is 0
    """
    B, F, V = check_dims("draft_probs", draft_probs, "BFV")
    check("draft_probs", draft_probs, torch.float32, B=B, F=F, V=V)
    if F < 1 or V < 1:
        raise ValueError(f"draft_probs must have F >= 1 and V >= 1, got shape ({B}, {F}, {V})")
    K = check_dims("uniforms", uniforms, "BFK")[2]
    check("uniforms", uniforms, torch.float32, like=draft_probs, B=B, F=F, K=K)
    if K < 1:
        raise ValueError(f"uniforms must have K >= 1, got shape ({B}, {F}, {K})")
    return _call(backend, draft_probs.contiguous(), uniforms.contiguous())


def _oracle(draft_probs, uniforms):
    weights, total, valid = to_fixed_point(draft_probs)
    total = torch.where(valid, total, 0)
    tokens, num_children = [], torch.zeros_like(total)
    for uniform in uniforms.unbind(-1):
        some = total > 0
        token = torch.where(some, draw(weights, total, uniform), 0).unsqueeze(-1)
        total = total - torch.where(some, weights.gather(-1, token)[..., 0], 0)
        weights = weights.scatter(-1, token, 0)
        tokens.append(token)
        num_children = num_children + some
    return torch.cat(tokens, -1), num_children.int(), torch.where(valid, 0, INVALID_ROW).int()


def _meta(draft_probs, uniforms):
    nodes = uniforms.shape[:2]
    return (torch.empty_like(uniforms, dtype=torch.int64), uniforms.new_empty(nodes, dtype=torch.int32),
            uniforms.new_empty(nodes, dtype=torch.int32))


_call = define(
    "draw_children(Tensor draft_probs, Tensor uniforms) -> (Tensor tokens, Tensor num_children, Tensor status)",
    oracle=_oracle, meta=_meta, result=DrawChildrenResult)
