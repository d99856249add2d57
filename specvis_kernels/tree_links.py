"""tree_links: from parents to everything that a walk or an attention mask needs to know of a tree."""
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import INVALID_TREE, check, check_dims, define


class TreeLinksResult(NamedTuple):
    """What `tree_links` returns."""
    ancestors: Tensor     # (B, N, W) int64
    depth: Tensor         # (B, N) int32
    first_child: Tensor   # (B, N) int32
    next_sibling: Tensor  # (B, N) int32
    status: Tensor        # (B,) int32


def tree_links(parents: Tensor, *,
               backend: str | None = None) -> TreeLinksResult:
    """Ancestors, depths, first children and next siblings of the nodes of a tree.

    Node 0 is the root, parents precede their children, and a node's children are in the order of their
    indices. Bit j % 64 of word j // 64 of a node's ancestors is set iff node j is the node itself or one of
    its ancestors. An unused slot has no bits, depth -1 and no links. An invalid node is reported and treated
    as unused, and so is all that hangs from it.

    Args:
        parents:       (B, N)    int32   -1 for the root, -2 for unused slots, else a node before this one
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        ancestors:     (B, N, W) int64   W = ceil(N / 64) words of bits
        depth:         (B, N)    int32   0 for the root, -1 for unused slots
        first_child:   (B, N)    int32   -1: none
        next_sibling:  (B, N)    int32   -1: none
        status:        (B,)      int32   INVALID_TREE if the root's parent is not -1, or another node's is -1,
                                         is below -2, is not before it, or is itself unused or invalid

    Raises:
        ValueError: the dtype or shape differs from the above, or N is 0
    """
    B, N = check_dims("parents", parents, "BN")
    check("parents", parents, torch.int32, B=B, N=N)
    if N < 1:
        raise ValueError(f"parents must have N >= 1, got shape ({B}, {N})")
    return _call(backend, parents.contiguous())


def _oracle(parents):
    B, N = parents.shape
    W = (N + 63) // 64
    each = torch.arange(B, device=parents.device)
    ancestors = torch.zeros(B, N, W, dtype=torch.int64, device=parents.device)
    depth = torch.full((B, N), -1, device=parents.device)
    for n in range(N):
        at = parents[:, n].clamp(0, max(n - 1, 0)).long()
        used = parents[:, n] == -1
        if n > 0:
            used = (parents[:, n] == at) & (depth[each, at] >= 0)
        depth[:, n] = torch.where(used, depth[each, at] + 1, -1)
        ancestors[:, n] = torch.where(used.unsqueeze(1), ancestors[each, at], 0)
        bit = 1 << n % 64 if n % 64 < 63 else -(1 << 63)
        ancestors[:, n, n // 64] |= torch.where(used, bit, 0)

    used = depth >= 0
    wrong = ~used & (parents != -2)
    wrong[:, 0] = ~used[:, 0]
    node = torch.arange(N, device=parents.device)
    parent = torch.where(used, parents, -2)
    children = parent.unsqueeze(1) == node.unsqueeze(1)  # (B, N, N): is the column a child of the row
    siblings = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent >= 0).unsqueeze(2)
    siblings = siblings & (node > node.unsqueeze(1))

    def first(of):
        least = torch.where(of, node, N).amin(2)
        return torch.where(least < N, least, -1).int()

    status = torch.where(wrong.any(1), INVALID_TREE, 0)
    return ancestors, depth.int(), first(children), first(siblings), status.int()


def _meta(parents):
    B, N = parents.shape
    return (parents.new_empty(B, N, (N + 63) // 64, dtype=torch.int64), parents.new_empty(B, N),
            parents.new_empty(B, N), parents.new_empty(B, N), parents.new_empty(B))


_call = define(
    "tree_links(Tensor parents)"
    " -> (Tensor ancestors, Tensor depth, Tensor first_child, Tensor next_sibling, Tensor status)",
    oracle=_oracle, meta=_meta, result=TreeLinksResult)
