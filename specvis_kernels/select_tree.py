"""select_tree: the best of all drafted candidates, as a tree."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check, check_count, check_dims, integers
from ._define import define
from .status import INVALID_TREE


class SelectTreeResult(NamedTuple):
    tokens: Tensor   # (B, N) int64
    parents: Tensor  # (B, N) int32
    source: Tensor   # (B, N) int32
    status: Tensor   # (B,)   int32


def select_tree(tokens: Tensor, scores: Tensor, parents: Tensor, root: Tensor, size: Tensor, *, num_nodes: int,
                backend: str | None = None) -> SelectTreeResult:
    """Keep the best candidates of a draft and number them, with their root, as the nodes of a tree.

    The size[b] - 1 best scores are kept. Ties go to the smaller index; -inf and NaN are never kept. Node 0 is the
    root. The kept candidates follow it in the order in which they were given. Candidates must be given level by
    level, each after its parent and with no higher score, so that a kept candidate's parent is kept too.

    (EAGLE-2, arXiv:2406.16858, section 4.2.)

    Args:
        tokens:     (B, M) int32 or int64   the candidates
        scores:     (B, M) float32          their scores, as `expand_tree` gives them
        parents:    (B, M) or (1, M) int32 or int64   each one's parent among the candidates, before itself; -1: the
                                                      root
        root:       (B,)   int32 or int64   the last accepted token
        size:       (B,)   int32 or int64   how many nodes to keep, the root included; clamped to 1..N
        num_nodes:  N, the largest size
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        tokens:     (B, N) int64     the nodes' tokens; 0 in unused slots
        parents:    (B, N) int32     the nodes' parents as nodes; -1 for the root, -2 in unused slots
        source:     (B, N) int32     which candidate each node was; -1 for the root and in unused slots
        status:     (B,)   int32     INVALID_TREE: a kept candidate's parent was not kept, is not before it, or is
                                     below -1; its slot is unused then, and its children still point to it

    Raises:
        ValueError: a dtype, shape or device differs from the above, or num_nodes < 1

    Examples:
        >>> tokens = torch.tensor([[11, 12, 13, 14]])
        >>> scores = torch.tensor([[-0.5, -2.0, -1.0, -3.0]])
        >>> parents = torch.tensor([[-1, -1, 0, 1]], dtype=torch.int32)
        >>> root, size = torch.tensor([10]), torch.tensor([4])
        >>> tree = select_tree(tokens, scores, parents, root, size, num_nodes=4)
        >>> tree.tokens
        tensor([[10, 11, 12, 13]])
        >>> tree.parents
        tensor([[-1,  0,  0,  1]], dtype=torch.int32)
    """
    B, M = check_dims("tokens", tokens, "BM")
    tokens = integers("tokens", tokens, torch.int64, B=B, M=M)
    check("scores", scores, torch.float32, like=tokens, B=B, M=M)
    parents = integers("parents", parents, torch.int32, tokens, may_be_one=True, B=B, M=M)
    root = integers("root", root, torch.int64, tokens, B=B)
    size = integers("size", size, torch.int32, tokens, B=B)
    num_nodes = check_count("num_nodes", num_nodes, 1)
    return _call(backend, tokens, scores, parents, root, size, num_nodes)


def _oracle(tokens: Tensor, scores: Tensor, parents: Tensor, root: Tensor, size: Tensor, num_nodes: int):
    (B, M), N = tokens.shape, num_nodes
    index = torch.arange(M, device=tokens.device).expand(B, M)
    scores = torch.where(scores > -torch.inf, scores, -torch.inf)  # a NaN never counts
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter(1, order, index)
    is_kept = (rank < size.clamp(1, N).unsqueeze(1) - 1) & (scores > -torch.inf)
    node = torch.where(is_kept, is_kept.cumsum(1), -2)

    parents = parents.long()
    is_before = (parents >= 0) & (parents < index)
    parent = torch.where(is_before, node.gather(1, torch.where(is_before, parents, 0)), -2)
    parent = torch.where(parents == -1, 0, parent)
    is_valid = is_kept & (parent >= 0)
    slot = torch.where(is_valid, node, N)  # slot N takes the rejected candidates

    def fill(values, unused, at_root):
        out = values.new_full((B, N + 1), unused).scatter(1, slot, values)
        return torch.cat([at_root.unsqueeze(1), out[:, 1:N]], 1)

    status = torch.where((is_kept & ~is_valid).any(1), INVALID_TREE, 0)
    return (fill(tokens, 0, root), fill(parent, -2, torch.full_like(root, -1)).int(),
            fill(index, -1, torch.full_like(root, -1)).int(), status.int())


def _meta(tokens, parents, num_nodes):
    B = tokens.shape[0]
    return (tokens.new_empty(B, num_nodes), parents.new_empty(B, num_nodes), parents.new_empty(B, num_nodes),
            parents.new_empty(B))


_call = define("select_tree", oracle=_oracle, meta=_meta, result=SelectTreeResult)
