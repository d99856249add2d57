"""tree_paths: from parents to the path to each leaf, as other decoders hold a tree."""
import torch
from torch import Tensor

from ._checks import check_count, check_parents
from ._define import NAMESPACE


def tree_paths(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """List the path from the root to each leaf: `retrieve_indices` of EAGLE, LANTERN and Medusa, in a fixed shape.

    A row is the path to one leaf, the root first. Rows are in lexicographic order of their nodes, the order in which
    `verify_tree` tries siblings. A node at max_depth counts as a leaf, and nodes below it are left out. Unused and
    invalid nodes, as `tree_links` finds them, are on no path. `tree_from_paths` is the way back.

    Args:
        parents:    (B, N) int32 or int64   -1 for the root, -2 for unused slots, else a node before this one
        max_depth:  P, how far down paths go; None: N - 1, down to every leaf

    Returns:
        paths:      (B, N, P + 1) int64   a row a leaf; -1 pads. Rows that no leaf needs are -1 and come last

    Raises:
        ValueError: the dtype or shape differs from the above, N is 0, or max_depth is no integer >= 0

    Examples:
        >>> tree_paths(torch.tensor([[-1, 0, 0, 1]]), max_depth=2)   # 0 -> 1, 2 and 1 -> 3
        tensor([[[ 0,  1,  3],
                 [ 0,  2, -1],
                 [-1, -1, -1],
                 [-1, -1, -1]]])
    """
    parents = check_parents(parents).contiguous()
    max_depth = check_count("max_depth", parents.shape[1] - 1 if max_depth is None else max_depth, 0)
    B, N = parents.shape
    node = torch.arange(N, device=parents.device)
    ancestors, depth, *_ = getattr(torch.ops, NAMESPACE).tree_links(parents)  # past the check of its status
    is_used = (depth >= 0) & (depth <= max_depth)
    bits = (ancestors.unsqueeze(-1) >> torch.arange(64, device=parents.device)) & 1  # (B, N, W, 64)
    is_on_path = (bits.flatten(2)[..., :N] == 1) & is_used.unsqueeze(2)  # (B, N, N): the column is on the row's path
    parent = torch.where(is_used, parents, -2)
    has_child = (parent.unsqueeze(1) == node.unsqueeze(1)).any(2)
    is_leaf = is_used & ~has_child

    # A leaf comes after the leaves under earlier siblings of the nodes on its path.
    num_leaves = (is_on_path & is_leaf.unsqueeze(2)).sum(1)  # under each node
    is_sibling = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (node < node.unsqueeze(1))
    num_left = (is_sibling & is_used.unsqueeze(1)).mul(num_leaves.unsqueeze(1)).sum(2)
    row = is_on_path.mul(num_left.unsqueeze(1)).sum(2)  # (B, N)

    width = max_depth + 1
    at = row.unsqueeze(2) * width + depth.unsqueeze(1)
    at = torch.where(is_on_path & is_leaf.unsqueeze(2), at, N * width)  # the last place takes all other nodes
    paths = torch.full((B, N * width + 1), -1, device=parents.device)
    paths = paths.scatter(1, at.flatten(1), node.expand(B, N, N).flatten(1))
    return paths[:, :-1].view(B, N, width).contiguous()
