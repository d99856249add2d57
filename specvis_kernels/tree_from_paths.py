"""tree_from_paths: from the path to each leaf, as other decoders hold a tree, to parents."""
import torch
from torch import Tensor

from ._checks import check_count, check_dims, integers


def tree_from_paths(paths: Tensor, num_nodes: int) -> Tensor:
    """Make parents from the paths to the leaves: `retrieve_indices` of EAGLE, LANTERN and Medusa.

    Each row of paths is the way from the root, node 0, down to a leaf. A node on no path is unused, except the
    root. `tree_paths` is the way back.

    verify_tree tries siblings in the order of their indices, which is part of a relaxed method, the released loops in
    the order of the rows of paths. In EAGLE's dynamic trees the two orders agree if the rows are sorted.

    Args:
        paths:      (L, D) or (B, L, D) int64 or int32   L paths of at most D nodes; negative numbers pad
        num_nodes:  N, how many nodes a tree has

    Returns:
        parents:    (B, N) int32   B is 1 for paths of two dimensions. -1 for the root, -2 for unused nodes. It is N,
                    so that `tree_links` reports INVALID_TREE, for a node with two parents; and for the root if a path
                    has a node before it, or a node >= N. A node after padding has the parent -1, which is reported too

    Raises:
        ValueError: the dtype or shape differs from the above, or num_nodes is no integer >= 1

    Examples:
        >>> paths = torch.tensor([[0, 1, 3], [0, 2, -1]])  # 0 -> 1, 2 and 1 -> 3
        >>> tree_from_paths(paths, num_nodes=5)            # node 4 is not used
        tensor([[-1,  0,  0,  1, -2]], dtype=torch.int32)
    """
    if isinstance(paths, Tensor) and paths.ndim == 2:
        paths = paths[None]
    B, L, D = check_dims("paths", paths, "BLD")
    paths = integers("paths", paths, torch.int64, B=B, L=L, D=D)
    N = check_count("num_nodes", num_nodes, 1)
    paths = paths.clamp(-1, N)
    parent, child = paths[:, :, :-1].flatten(1), paths[:, :, 1:].flatten(1)
    # The largest and the smallest parent of each node; column N takes what is out of range, column N + 1 what pads.
    at = torch.where(child < 0, N + 1, child)
    largest, smallest = (paths.new_full((B, N + 2), -2).scatter_reduce(1, at, parent, reduce, include_self=False)
                         for reduce in ("amax", "amin"))
    parents = torch.where(largest == smallest, largest, N)[:, :N]
    is_root_wrong = (largest[:, 0] != -2) | (largest[:, N] != -2) | (paths == N).flatten(1).any(1)
    parents[:, 0] = torch.where(is_root_wrong, N, -1)
    return parents.int()
