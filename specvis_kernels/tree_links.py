"""tree_links: from parents to everything that verification and an attention mask need to know of a tree."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import check_parents
from ._define import define
from .status import INVALID_TREE


class TreeLinksResult(NamedTuple):
    ancestors: Tensor     # (B, N, W) int64
    depth: Tensor         # (B, N)    int32
    first_child: Tensor   # (B, N)    int32
    next_sibling: Tensor  # (B, N)    int32
    status: Tensor        # (B,)      int32


def tree_links(parents: Tensor, *, backend: str | None = None) -> TreeLinksResult:
    """Find the ancestors, the depth, the first child and the next sibling of every node of a tree.

    Node 0 is the root, parents precede their children, and siblings are in the order of their indices. That is the
    order in which verify_tree tries them, and sibling order is part of a relaxed method: number the children as the
    draft ordered them. `tree_from_paths`, `tree_from_mask` and `tree_from_choices` make parents of other formats.

    A node's ancestors are W words of bits: bit j % 64 of word j // 64 is set iff node j is the node itself or one of
    its ancestors. An unused slot has no bits, depth -1 and no links. An invalid node is reported. It is treated as
    unused, and so are its descendants.

    Args:
        parents:       (B, N)    int32 or int64   -1 for the root, -2 for unused slots, else a node before this one
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        ancestors:     (B, N, W) int64   W = ceil(N / 64) words of bits
        depth:         (B, N)    int32   0 for the root, -1 for unused slots
        first_child:   (B, N)    int32   -1: none
        next_sibling:  (B, N)    int32   -1: none
        status:        (B,)      int32   INVALID_TREE: the root's parent is not -1, or another node's parent is -1,
                                         is below -2, is not before it, or is itself unused or invalid

    Raises:
        ValueError: the dtype or shape differs from the above, or N is 0

    Examples:
        >>> parents = torch.tensor([[-1, 0, 0, 1]])    # 0 -> 1, 2 and 1 -> 3
        >>> links = tree_links(parents)
        >>> links.depth
        tensor([[0, 1, 1, 2]], dtype=torch.int32)
        >>> links.first_child
        tensor([[ 1,  3, -1, -1]], dtype=torch.int32)
        >>> links.next_sibling
        tensor([[-1,  2, -1, -1]], dtype=torch.int32)
        >>> links.ancestors[0, 3].item() == 0b1011                       # nodes 3, 1 and 0
        True
    """
    return _call(backend, check_parents(parents))


def _oracle(parents: Tensor):
    B, N = parents.shape
    W = (N + 63) // 64
    request = torch.arange(B, device=parents.device)
    ancestors = torch.zeros(B, N, W, dtype=torch.int64, device=parents.device)
    depth = torch.full((B, N), -1, device=parents.device)
    for n in range(N):
        parent = parents[:, n].clamp(0, max(n - 1, 0)).long()
        is_used = parents[:, n] == -1
        if n > 0:
            is_used = (parents[:, n] == parent) & (depth[request, parent] >= 0)
        depth[:, n] = torch.where(is_used, depth[request, parent] + 1, -1)
        ancestors[:, n] = torch.where(is_used.unsqueeze(1), ancestors[request, parent], 0)
        bit = 1 << n % 64 if n % 64 < 63 else -(1 << 63)
        ancestors[:, n, n // 64] |= torch.where(is_used, bit, 0)

    is_used = depth >= 0
    is_valid = is_used | (parents == -2)
    is_valid[:, 0] = is_used[:, 0]
    node = torch.arange(N, device=parents.device)
    parent = torch.where(is_used, parents, -2)
    is_child = parent.unsqueeze(1) == node.unsqueeze(1)  # (B, N, N): is the column a child of the row
    is_later_sibling = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent >= 0).unsqueeze(2)
    is_later_sibling = is_later_sibling & (node > node.unsqueeze(1))

    def first(columns):
        smallest = torch.where(columns, node, N).amin(2)
        return torch.where(smallest < N, smallest, -1).int()

    status = torch.where(is_valid.all(1), 0, INVALID_TREE)
    return ancestors, depth.int(), first(is_child), first(is_later_sibling), status.int()


def _meta(parents):
    B, N = parents.shape
    return (parents.new_empty(B, N, (N + 63) // 64, dtype=torch.int64), parents.new_empty(B, N),
            parents.new_empty(B, N), parents.new_empty(B, N), parents.new_empty(B))


_call = define("tree_links", oracle=_oracle, meta=_meta, result=TreeLinksResult)
