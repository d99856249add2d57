"""draft_frontier: one level of a dynamic draft tree, from the draft model's logits to the nodes that it reads next."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import MOST, check, check_count, check_dims, for_each, integers
from ._define import checked_once, define
from ._filters import check_filters, check_logits, check_settings
from .expand_tree import _oracle as expand_tree
from .guided_probs import _oracle as guided_probs


class DraftFrontierResult(NamedTuple):
    child_tokens: Tensor   # (B, F * K) int64
    child_scores: Tensor   # (B, F * K) float32
    child_parents: Tensor  # (B, F * K) int32
    tokens: Tensor         # (B, K)     int64
    scores: Tensor         # (B, K)     float32
    rows: Tensor           # (B, K)     int64
    ancestors: Tensor      # (B, K, W)  int64
    candidates: Tensor     # (B, K)     int32
    status: Tensor         # (B, F)     int32


@checked_once
def draft_frontier(logits: Tensor, uncond: Tensor | None, scores: Tensor, ancestors: Tensor, candidates: Tensor,
                   width: Tensor, depth: Tensor, guidance: Tensor | float | None, temperature: Tensor | float,
                   top_k: Tensor | int | None, top_p: Tensor | float | None, *, num_children: int, level: int,
                   first_node: int, first_candidate: int, min_p: Tensor | float | None = None,
                   id_range: Tensor | tuple[int, int] | None = None, filters: str = "k_then_p",
                   backend: str | None = None) -> DraftFrontierResult:
    """Draft a level of a dynamic tree: the children of F nodes, and the K nodes that the draft model reads next.

    This is `guided_probs` and then `expand_tree`, bit for bit, but no row of probabilities is written. It also returns
    what the draft model needs to read the next level.

    The F nodes are the last frontier, or the root: one node with score 0, candidate -1, and the ancestors that
    `tree_links` gives a root. A drafted child is a candidate for the tree. Candidates are numbered over all levels.
    This level's F * K have the numbers from `first_candidate`. `select_tree` takes the three tensors `child_..` of all
    levels, side by side, and makes the tree.

    Slot k of the frontier is the k-th best child. The draft model reads it as its node first_node + k. A slot is unused
    if there are at most k children, or if the request's tree is not deeper than this level. Unused slots have score
    -inf and candidate -1, and the next level ignores them.

    (EAGLE-2, arXiv:2406.16858, section 4.1.)

    Args:
        logits:           (B, F, V) float32, float16 or bfloat16   of the draft model after each node
        uncond:           (B, F, V) the same dtype                 without the condition; None: no guidance
        scores:           (B, F)    float32   the nodes' scores; -inf: the slot is unused
        ancestors:        (B, F, W) or (1, F, W) int64   the nodes' ancestors among the nodes that the draft model
                                                         has read, as bits
        candidates:       (B, F) int32 or int64   which candidate each node was; -1: the root, or unused
        width:            (B,) int32 or int64     children per node and size of the next level; clamped to 1..K
        depth:            (B,) or (1,) int32 or int64   how many levels each request's tree has
        guidance:         (B,) float32 or a number   these five as in `guided_probs`; None without `uncond`
        temperature:      (B,) float32 or a number
        top_k:            (B,) int32 or int64, or a number
        top_p:            (B,) float32 or a number
        min_p:            (B,) float32 or a number
        num_children:     K, the largest width
        level:            the children's level: 1 for the root's children
        first_node:       how many nodes the draft model has read; first_node + K must fit in the W words
        first_candidate:  how many candidates the levels before had
        id_range:         two integers, (B, F, 2) int32 or int64, or None: the ids of a child, as in `guided_probs`
        filters:          "k_then_p" or "p_then_k", as in `guided_probs`
        backend:          None for the device's own kernel; a name from `backends()` to force one

    Returns:
        child_tokens:     (B, F*K)  int64     the children's tokens, K for each node; 0 for a missing child
        child_scores:     (B, F*K)  float32   their scores, -inf for a missing child
        child_parents:    (B, F*K)  int32     the candidate of each child's parent
        tokens:           (B, K)    int64     of the frontier; in an unused slot the token of some child
        scores:           (B, K)    float32   its scores, -inf in unused slots
        rows:             (B, K)    int64     which of the F nodes is the parent, whose hidden state a draft model
                                              takes along; in [0, F) everywhere
        ancestors:        (B, K, W) int64     the parent's, and the node itself; 0 in unused slots
        candidates:       (B, K)    int32     which candidate each is; -1 in unused slots
        status:           (B, F)    int32     INVALID_ROW as in `guided_probs`; then the node has no children. A row is
                                              not read if the node's score is -inf

    Raises:
        ValueError: a dtype, shape or device differs from the above, F is 0, V is 0 or above 2**19, num_children, level
                    or first_node is below 1, first_candidate is negative, the words are too few, or id_range or
                    filters is not as in `guided_probs`

    Examples:
        >>> settings = dict(width=torch.tensor([2], dtype=torch.int32), depth=torch.tensor([3]), guidance=1.0,
        ...                 temperature=1.0, top_k=0, top_p=1.0, num_children=2)
        >>> root = dict(scores=torch.zeros(1, 1), ancestors=torch.ones(1, 1, 1, dtype=torch.int64),
        ...             candidates=torch.full((1, 1), -1, dtype=torch.int32))
        >>> logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
        >>> level = draft_frontier(logits, None, **root, **settings, level=1, first_node=1, first_candidate=0)
        >>> level.tokens, level.candidates
        (tensor([[1, 2]]), tensor([[0, 1]], dtype=torch.int32))
        >>> level.ancestors[0, :, 0]      # nodes 1 and 2, both below node 0
        tensor([3, 5])
        >>> frontier = dict(scores=level.scores, ancestors=level.ancestors, candidates=level.candidates)
        >>> level = draft_frontier(logits.repeat(1, 2, 1), None, **frontier, **settings, level=2, first_node=3,
        ...                        first_candidate=2)
        >>> level.child_parents           # the two candidates of the first level
        tensor([[0, 0, 1, 1]], dtype=torch.int32)
        >>> level.ancestors[0, :, 0]      # node 3 is below nodes 0 and 1
        tensor([11, 19])
    """
    B, F, V = check_logits(logits, uncond, nodes="F")
    check("scores", scores, torch.float32, like=logits, B=B, F=F)
    W = check_dims("ancestors", ancestors, "BFW")[2]
    check("ancestors", ancestors, torch.int64, logits, may_be_one=True, B=B, F=F, W=W)
    candidates = integers("candidates", candidates, torch.int32, logits, B=B, F=F)
    width = integers("width", width, torch.int32, logits, B=B)
    depth = integers("depth", depth, torch.int64, logits, may_be_one=True, B=B)
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    ids = check_filters(id_range, filters, like=logits, nodes="F")
    num_children = check_count("num_children", num_children, 1, MOST // F)
    level = check_count("level", level, 1)
    first_node = check_count("first_node", first_node, 1)
    first_candidate = check_count("first_candidate", first_candidate, 0, MOST - F * num_children)
    if first_node + num_children > 64 * W:
        raise ValueError(f"ancestors must have words for first_node + num_children = {first_node + num_children} "
                         f"nodes, 64 each, got W={W}")
    return _call(backend, logits, uncond, scores, for_each(ancestors, B), candidates, width, depth,
                 *settings, *ids, filters, num_children, level, first_node, first_candidate)


def _oracle(logits: Tensor, uncond: Tensor | None, scores: Tensor, ancestors: Tensor, candidates: Tensor, width: Tensor,
            depth: Tensor, guidance: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None,
            id_range: Tensor | None, first_id: int, last_id: int, filters: str, num_children: int, level: int,
            first_node: int, first_candidate: int):
    (B, W), K = (len(logits), ancestors.shape[2]), num_children
    probs, _ = guided_probs(logits, uncond, guidance, temperature, top_k, top_p, min_p, id_range, first_id, last_id,
                            filters)
    tokens, child_scores, frontier, status = expand_tree(probs, scores, width, K)
    tokens, child_scores = tokens.flatten(1), child_scores.flatten(1)

    is_used = (frontier >= 0) & (depth > level)[:, None]
    chosen = frontier.clamp(min=0).long()
    rows = chosen // K
    node = first_node + torch.arange(K, device=logits.device)[:, None]
    own_bit = torch.where(torch.arange(W, device=logits.device) == node // 64, torch.ones_like(node) << node % 64, 0)
    node_ancestors = ancestors.gather(1, rows[..., None].expand(B, K, W)) | own_bit
    return (tokens, child_scores, candidates.repeat_interleave(K, 1), tokens.gather(1, chosen),
            torch.where(is_used, child_scores.gather(1, chosen), -torch.inf), rows,
            torch.where(is_used[..., None], node_ancestors, 0),
            torch.where(is_used, frontier + first_candidate, -1).int(), status)


def _meta(logits, scores, ancestors, width, depth, num_children):
    B, F, _ = logits.shape
    K = num_children
    return (depth.new_empty(B, F * K), scores.new_empty(B, F * K), width.new_empty(B, F * K),
            depth.new_empty(B, K), scores.new_empty(B, K), depth.new_empty(B, K),
            depth.new_empty(B, K, ancestors.shape[2]), width.new_empty(B, K), width.new_empty(B, F))


_call = define("draft_frontier", oracle=_oracle, meta=_meta, result=DraftFrontierResult)
