"""Trees as other decoders hold them, as the `parents` that `tree_links` takes. `tree_paths` is the way back."""
from collections.abc import Sequence

import torch
from torch import Tensor

from ._dispatch import check_count


def tree_from_paths(paths: Tensor, num_nodes: int) -> Tensor:
    """Make parents from the paths to the leaves: EAGLE's, LANTERN's and Medusa's `retrieve_indices`.

    Each row of paths is the way from the root, node 0, down to a leaf. A node that is on no path is unused (-2). No
    value is read from the device.

    verify_tree tries siblings in the order of their indices, and the released loops try them in the order of the rows
    of paths: sibling order is part of a relaxed method. If the draft model's candidates are numbered from the best one
    on, as EAGLE's are, the order of indices is that of the draft. (Leaf order in place of draft order took LANTERN's
    accepted length from 2.8 to 0.6 in one comparison.)

    Args:
        paths:      (L, D) or (B, L, D) int64 or int32   L paths of at most D nodes each; negative numbers pad
        num_nodes:  N, how many nodes a tree has

    Returns:
        parents:    (1 or B, N) int32   -1 for the root, -2 for unused nodes. A node with two parents, one that
                    follows padding, or one >= N is written so that `tree_links` reports INVALID_TREE

    Raises:
        ValueError: paths are not as above, or num_nodes is no integer >= 1

    Example:
        >>> import torch
        >>> from specvis_kernels import tree_from_paths, tree_links
        >>> paths = torch.tensor([[0, 1, 3], [0, 2, -1]])  # 0 -> 1, 2 and 1 -> 3
        >>> tree_from_paths(paths, num_nodes=5)            # node 4 is not used
        tensor([[-1,  0,  0,  1, -2]], dtype=torch.int32)
    """
    if not isinstance(paths, Tensor) or paths.dtype not in (torch.int64, torch.int32) or paths.ndim not in (2, 3):
        raise ValueError(f"paths must be int64 or int32 (L, D) or (B, L, D), got {_describe(paths)}")
    num_nodes = check_count("num_nodes", num_nodes, 1)
    paths = paths if paths.ndim == 3 else paths[None]
    # All is one higher than in `parents`. Column 0 takes what pads, column N + 1 what is out of range.
    numbers = paths.long().clamp(-1, num_nodes) + 1
    parent, child = numbers[:, :, :-1].flatten(1), numbers[:, :, 1:].flatten(1)
    table = numbers.new_full((len(numbers), num_nodes + 2), -1).scatter_(1, child, parent)
    # Of two parents of a node one is in the table now, so the other one differs from it.
    differs = (table.gather(1, child) != parent) & (child > 0)
    table.scatter_(1, torch.where(differs, child, 0), num_nodes + 1)
    parents = table[:, 1:-1] - 1
    # The root is well if nothing is above it and nothing is out of range: both columns are -1 then.
    parents[:, 0] += table[:, -1] + 2
    return parents.int()


def tree_from_mask(mask: Tensor) -> Tensor:
    """Make parents from a mask by which each node attends to its ancestors, as EAGLE's `tree_mask` or `attn_mask`.

    The parent of a node is the last other node that it sees. A node that sees no other and is seen by none is unused,
    except the root. Sibling order is part of a relaxed method, see `tree_from_paths`: here it is that of indices.
    No value is read from the device.

    Args:
        mask:      (.., N, N) of any dtype, True or not 0 where the row's node sees the column's; parents come before
                   their children. The diagonal is not looked at. An additive mask (0 and -inf) is `mask == 0` here

    Returns:
        parents:   (B, N) int32   B the product of the leading sizes; -1 for the root, -2 for unused nodes. A node that
                   sees another set than its parent's and its parent is written so that `tree_links` reports
                   INVALID_TREE

    Raises:
        ValueError: mask is no tensor of square matrices of at least one node

    Example:
        >>> import torch
        >>> from specvis_kernels import tree_from_mask
        >>> mask = torch.tensor([[1, 0, 0, 0],
        ...                      [1, 1, 0, 0],
        ...                      [1, 0, 1, 0],
        ...                      [1, 1, 0, 1]])
        >>> tree_from_mask(mask)
        tensor([[-1,  0,  0,  1]], dtype=torch.int32)
    """
    if not isinstance(mask, Tensor) or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 1:
        raise ValueError(f"mask must be (.., N, N) with N >= 1, got {_describe(mask)}")
    N = mask.shape[-1]
    sees = mask.reshape(-1, N, N) != 0
    sees.diagonal(dim1=1, dim2=2).fill_(False)
    node = torch.arange(N, device=mask.device)
    parents = torch.where(sees, node, -1 - node.clamp(max=1)[:, None]).amax(2)
    parents_rows = sees.gather(1, parents.clamp(min=0)[..., None].expand(-1, -1, N)) | (node == parents[..., None])
    is_tree = (parents_rows == sees).all(2) | (parents < 0)
    return torch.where(is_tree, parents, N).int()


def tree_from_choices(choices: Sequence[Sequence[int]], device: torch.device | str | None = None
                      ) -> tuple[Tensor, Tensor]:
    """Make parents from the ranks on each path: Medusa's and EAGLE-1's `tree_choices`.

    Nodes are numbered by the length of their path, then in lexicographic order, as `generate_tree_buffers` does it.
    Sibling order is part of a relaxed method, see `tree_from_paths`: here a lower rank is tried first.

    Args:
        choices:  for each node but the root its path: which child of the root, which child of that, and so on. The
                  shorter paths that a path begins with are in the list too
        device:   of the results; None: the CPU

    Returns:
        parents:  (1, N) int32   N = len(choices) + 1; -1 for the root
        rank:     (1, N) int64   which child of its parent each node is, so which candidate becomes its token: the
                  parent's best one is rank 0. The root has 0

    Raises:
        ValueError: a path is empty, negative, given twice, or its parent's is not in the list

    Example:
        >>> from specvis_kernels import tree_from_choices
        >>> parents, rank = tree_from_choices([[0], [1], [0, 0], [0, 2]])
        >>> parents
        tensor([[-1,  0,  0,  1,  1]], dtype=torch.int32)
        >>> rank
        tensor([[0, 0, 1, 0, 2]])
    """
    paths = sorted([tuple(path) for path in choices], key=lambda path: (len(path), path))
    index = {(): 0}
    parents, rank = [-1], [0]
    for path in paths:
        parent = index.get(path[:-1])
        if parent is None or path in index or path[-1] < 0:
            raise ValueError(f"choices must be different paths of ranks >= 0, each with its parent's, got {list(path)} "
                             + ("without its parent's" if parent is None else "twice" if path and path in index
                                else "among them"))
        index[path] = len(parents)
        parents.append(parent)
        rank.append(path[-1])
    return (torch.tensor([parents], dtype=torch.int32, device=device),
            torch.tensor([rank], dtype=torch.int64, device=device))


def _describe(value) -> str:
    return f"{str(value.dtype)[6:]} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
