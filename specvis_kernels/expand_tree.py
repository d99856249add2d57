"""expand_tree: one level of a draft tree that grows where the draft model is confident."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._dispatch import INVALID_ROW, check, check_count, check_dims, define
from ._numbers import to_fixed_point


class ExpandTreeResult(NamedTuple):
    """What `expand_tree` returns."""
    tokens: Tensor    # (B, F, K) int64
    scores: Tensor    # (B, F, K) float32
    frontier: Tensor  # (B, K) int32
    status: Tensor    # (B, F) int32


def expand_tree(draft_probs: Tensor, scores: Tensor, width: Tensor, *, num_children: int,
                backend: str | None = None) -> ExpandTreeResult:
    """The children of a level of nodes, and which of the children are the next level.

    A node's children are the width[b] most probable tokens of its row, most probable first, ties to the lower
    id. A child's score is its path's log-probability: its parent's score plus min(0, log p), the log taken in
    float64 and rounded to float32, the sum in float32; so a child never scores above its parent. The next
    level is the width[b] best of all children, best first, ties to the smaller index. A child that does not
    exist has score -inf and token 0: one beyond the width, of probability 0, of a node whose own score is
    -inf or NaN, or of an invalid row. So the root is a level of one node with score 0, and padding is a node
    with score -inf.

    (EAGLE-2, arXiv:2406.16858, section 4.1.)

    Args:
        draft_probs:  (B, F, V) float32   the draft's probabilities after each node of the level
        scores:       (B, F)    float32   the nodes' scores
        width:        (B,)      int32     children per node and size of the next level; clamped to 1..K
        num_children: K, the largest width
        backend:      None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:       (B, F, K) int64     the children's tokens
        scores:       (B, F, K) float32   their scores
        frontier:     (B, K)    int32     the next level as flat indices f * K + k into them; -1 pads
        status:       (B, F)    int32     INVALID_ROW where a node's row is invalid: an entry is NaN, negative
                                          or above 2, or nothing is left of it in fixed point; not looked at
                                          if the node's score is -inf

    Raises:
        ValueError: a dtype, shape or device differs from the above, F or V is 0, or K < 1
    """
    B, F, V = check_dims("draft_probs", draft_probs, "BFV")
    check("draft_probs", draft_probs, torch.float32, B=B, F=F, V=V)
    check("scores", scores, torch.float32, like=draft_probs, B=B, F=F)
    check("width", width, torch.int32, like=draft_probs, B=B)
    if F < 1 or V < 1:
        raise ValueError(f"draft_probs must have F >= 1 and V >= 1, got shape ({B}, {F}, {V})")
    check_count("num_children", num_children, 1)
    return _call(backend, draft_probs.contiguous(), scores.contiguous(), width.contiguous(), num_children)


def _oracle(draft_probs, scores, width, K):
    V = draft_probs.shape[-1]
    alive = scores > -torch.inf  # a NaN is not
    valid = to_fixed_point(draft_probs)[2]
    within = torch.arange(K, device=width.device) < width.clamp(1, K).unsqueeze(1)  # (B, K)

    probs, tokens = draft_probs.sort(dim=-1, descending=True, stable=True)
    probs, tokens = (pad(a[..., :K], (0, K - min(K, V))) for a in (probs, tokens))
    kept = (alive & valid).unsqueeze(-1) & within.unsqueeze(1) & (probs > 0)
    steps = torch.where(kept, probs, 1.0).double().log().float()
    children = scores.unsqueeze(-1) + torch.where(steps < 0, steps, 0.0)
    kept = kept & (children > -torch.inf)
    children = torch.where(kept, children, -torch.inf)

    best, frontier = children.flatten(1).sort(dim=-1, descending=True, stable=True)
    frontier = torch.where(within & (best[:, :K] > -torch.inf), frontier[:, :K], -1)
    status = torch.where(alive & ~valid, INVALID_ROW, 0)
    return torch.where(kept, tokens, 0), children, frontier.int(), status.int()


def _meta(draft_probs, scores, width, K):
    B, F, _ = draft_probs.shape
    return (draft_probs.new_empty(B, F, K, dtype=torch.int64), draft_probs.new_empty(B, F, K),
            width.new_empty(B, K), width.new_empty(B, F))


_call = define(
    "expand_tree(Tensor draft_probs, Tensor scores, Tensor width, SymInt num_children)"
    " -> (Tensor tokens, Tensor child_scores, Tensor frontier, Tensor status)",
    oracle=_oracle, meta=_meta, result=ExpandTreeResult)
