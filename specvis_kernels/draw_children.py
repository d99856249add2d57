"""draw_children: the children of a static draft tree's nodes, sampled without replacement."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_ROW, check, check_dims, define
from ._numbers import draw, to_fixed_point


class DrawChildrenResult(NamedTuple):
    """What `draw_children` returns. Its docstring explains the fields."""
    tokens: Tensor        # (B, F, K) int64
    num_children: Tensor  # (B, F)    int32
    status: Tensor        # (B, F)    int32


def draw_children(draft_probs: Tensor, uniforms: Tensor, *, backend: str | None = None) -> DrawChildrenResult:
    """Draw K different tokens for each node, one after the other, without replacement.

    The row counts in fixed point, floor(p * 2**42). Child k is drawn by inverse CDF in vocabulary order, from what
    the earlier children have left of the row. It is the first token whose running sum of the remaining mass exceeds
    floor(uniforms[b, f, k] * the remaining total). Then its mass is removed. Once no mass is left the other children
    do not exist: their tokens are 0, and `num_children` says how many exist.

    verify_tree, with these rows as its draft_probs, removes mass in the same way. It skips a child that does not
    exist, so it stays exact even on a tree that has such children.

    (The static trees of EAGLE, arXiv:2401.15077; LANTERN++, arXiv:2502.06352; COOL-SD, arXiv:2601.09212.)

    Args:
        draft_probs:   (B, F, V) float32   the draft's probabilities after each of F nodes
        uniforms:      (B, F, K) float32   in [0, 1), one for each child
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:        (B, F, K) int64     the children, in the order in which they were drawn
        num_children:  (B, F)    int32     how many of them exist
        status:        (B, F)    int32     INVALID_ROW: an entry of the row is NaN, negative or above 2, or the whole
                                           row is 0 in fixed point; then the node has no children

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above, or F, V or K is 0

    Example:
        >>> import torch
        >>> from specvis_kernels import draw_children
        >>> draft_probs = torch.tensor([[[0.5, 0.25, 0.25, 0.0]]])
        >>> uniforms = torch.tensor([[[0.6, 0.7, 0.0, 0.0]]])
        >>> children = draw_children(draft_probs, uniforms)
        >>> children.tokens, children.num_children
        (tensor([[[1, 2, 0, 0]]]), tensor([[3]], dtype=torch.int32))
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
    mass, total, is_valid = to_fixed_point(draft_probs)
    total = torch.where(is_valid, total, 0)
    tokens, num_children = [], torch.zeros_like(total)
    for uniform in uniforms.unbind(-1):
        exists = total > 0
        token = torch.where(exists, draw(mass, total, uniform), 0).unsqueeze(-1)
        total = total - torch.where(exists, mass.gather(-1, token)[..., 0], 0)
        mass = mass.scatter(-1, token, 0)
        tokens.append(token)
        num_children = num_children + exists
    return torch.cat(tokens, -1), num_children.int(), torch.where(is_valid, 0, INVALID_ROW).int()


def _meta(draft_probs, uniforms):
    nodes = uniforms.shape[:2]
    return (torch.empty_like(uniforms, dtype=torch.int64), uniforms.new_empty(nodes, dtype=torch.int32),
            uniforms.new_empty(nodes, dtype=torch.int32))


_call = define(
    "draw_children(Tensor draft_probs, Tensor uniforms) -> (Tensor tokens, Tensor num_children, Tensor status)",
    oracle=_oracle, meta=_meta, result=DrawChildrenResult)
