"""expand_tree: one level of a draft tree that grows where the draft model is confident."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._checks import MOST, check, check_count, check_dims, integers
from ._define import define
from ._numbers import to_fixed_point
from .status import INVALID_ROW


class ExpandTreeResult(NamedTuple):
    tokens: Tensor    # (B, F, K) int64
    scores: Tensor    # (B, F, K) float32
    frontier: Tensor  # (B, K)    int32
    status: Tensor    # (B, F)    int32


def expand_tree(draft_probs: Tensor, scores: Tensor, width: Tensor, *, num_children: int,
                backend: str | None = None) -> ExpandTreeResult:
    """Draft the children of a level of nodes, and choose which of these children are the next level.

    A node's children are the width[b] most probable tokens of its row, most probable first. Ties go to the lower id.

    A child's score is the log-probability of its path: its parent's score plus min(0, log p). The log is taken in
    float64 and rounded to float32; the sum is in float32. So no child scores above its parent.

    The next level, the frontier, holds the width[b] best of all children, best first. Ties go to the smaller index.

    A child that does not exist has score -inf and token 0: a child beyond the width, a child of probability 0, and
    every child of an invalid row or of a node whose own score is -inf or NaN. The root is a level of one node with
    score 0, and padding is a node with score -inf.

    The children are chosen and not sampled, so `verify_tree` takes each as a point mass: without draft_probs.

    (EAGLE-2, arXiv:2406.16858, section 4.1.)

    Args:
        draft_probs:   (B, F, V) float32   the draft's probabilities after each node of the level
        scores:        (B, F)    float32   the nodes' scores
        width:         (B,) int32 or int64   children per node and size of the next level; clamped to 1..K
        num_children:  K, the largest width
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:        (B, F, K) int64     the children's tokens
        scores:        (B, F, K) float32   their scores
        frontier:      (B, K)    int32     the next level as flat indices f * K + k into the children; -1 pads
        status:        (B, F)    int32     INVALID_ROW: an entry of the node's row is NaN, negative or above 2, or the
                                           whole row is 0 in fixed point; a row is not read if the node's score is -inf

    Raises:
        ValueError: a dtype, shape or device differs from the above, F or V is 0, or num_children < 1

    Examples:
        >>> draft_probs = torch.tensor([[[0.1, 0.6, 0.3],         # after node 0
        ...                              [0.9, 0.1, 0.0]]])       # after node 1
        >>> scores = torch.tensor([[0.7, 0.2]]).log()
        >>> width = torch.tensor([2], dtype=torch.int32)
        >>> level = expand_tree(draft_probs, scores, width, num_children=2)
        >>> level.tokens
        tensor([[[1, 2],
                 [0, 1]]])
        >>> level.scores.exp().round(decimals=2)
        tensor([[[0.4200, 0.2100],
                 [0.1800, 0.0200]]])
        >>> level.frontier                                        # both children of node 0
        tensor([[0, 1]], dtype=torch.int32)
    """
    B, F, V = check_dims("draft_probs", draft_probs, "BFV", torch.float32, not_empty="FV")
    check("scores", scores, torch.float32, like=draft_probs, B=B, F=F)
    width = integers("width", width, torch.int32, draft_probs, B=B)
    num_children = check_count("num_children", num_children, 1, MOST // F)
    return _call(backend, draft_probs, scores, width, num_children)


def _oracle(draft_probs: Tensor, scores: Tensor, width: Tensor, num_children: int):
    V, K = draft_probs.shape[-1], num_children
    exists = scores > -torch.inf  # a node whose score is NaN does not exist
    is_valid = to_fixed_point(draft_probs)[2]
    in_width = torch.arange(K, device=width.device) < width.clamp(1, K).unsqueeze(1)  # (B, K)

    probs, tokens = draft_probs.sort(dim=-1, descending=True, stable=True)
    probs, tokens = (pad(a[..., :K], (0, K - min(K, V))) for a in (probs, tokens))
    is_child = (exists & is_valid).unsqueeze(-1) & in_width.unsqueeze(1) & (probs > 0)
    log_probs = torch.where(is_child, probs, 1.0).double().log().float()
    child_scores = scores.unsqueeze(-1) + torch.where(log_probs < 0, log_probs, 0.0)
    is_child = is_child & (child_scores > -torch.inf)
    child_scores = torch.where(is_child, child_scores, -torch.inf)

    best, frontier = child_scores.flatten(1).sort(dim=-1, descending=True, stable=True)
    frontier = torch.where(in_width & (best[:, :K] > -torch.inf), frontier[:, :K], -1)
    status = torch.where(exists & ~is_valid, INVALID_ROW, 0)
    return torch.where(is_child, tokens, 0), child_scores, frontier.int(), status.int()


def _meta(draft_probs, width, num_children):
    B, F, _ = draft_probs.shape
    return (draft_probs.new_empty(B, F, num_children, dtype=torch.int64), draft_probs.new_empty(B, F, num_children),
            width.new_empty(B, num_children), width.new_empty(B, F))


_call = define("expand_tree", oracle=_oracle, meta=_meta, result=ExpandTreeResult)
