"""tree_from_mask: from a mask by which nodes see their ancestors to parents."""
import torch
from torch import Tensor

from ._checks import check_dims


def tree_from_mask(mask: Tensor) -> Tensor:
    """Make parents from a mask by which each node attends to its ancestors: EAGLE's `tree_mask`, or `attn_mask`.

    The parent of a node is the last other node that it sees. A node that sees no other is unused, except the root.
    Siblings are in the order of their indices, as in `tree_links`.

    Args:
        mask:      (.., N, N) of any dtype: True, or not 0, where the row's node sees the column's. Parents come before
                   their children. The diagonal is not read. Give `mask == 0` for an additive mask of 0 and -inf,
                   and the last N columns of a mask that has columns of cached tokens

    Returns:
        parents:   (B, N) int32   B is the product of the leading sizes. -1 for the root, -2 for unused nodes. It is N,
                   so that `tree_links` reports INVALID_TREE, for a node that sees more or less than its parent and the
                   nodes that its parent sees, or that sees a later node

    Raises:
        ValueError: mask is no tensor, not square, or N is 0

    Examples:
        >>> mask = torch.tensor([[1, 0, 0, 0],
        ...                      [1, 1, 0, 0],
        ...                      [1, 0, 1, 0],
        ...                      [1, 1, 0, 1]])
        >>> tree_from_mask(mask)
        tensor([[-1,  0,  0,  1]], dtype=torch.int32)
    """
    if isinstance(mask, Tensor) and mask.ndim != 3 and mask.ndim > 1:
        mask = mask.reshape(mask.shape[:-2].numel(), *mask.shape[-2:])
    B, N, columns = check_dims("mask", mask, "BNN")
    if N != columns or N < 1:
        raise ValueError(f"mask must be (.., N, N) with N >= 1, got shape {tuple(mask.shape)}")
    mask = mask != 0
    node = torch.arange(N, device=mask.device)
    sees = mask & (node != node.unsqueeze(1))
    parents = torch.where(sees, node, -1).amax(2)
    parents_row = sees.gather(1, parents.clamp(min=0).unsqueeze(2).expand(-1, -1, N))
    is_tree = (sees == (parents_row | (node == parents.unsqueeze(2)))).all(2) & (parents < node)
    parents = torch.where(parents < 0, -1 - node.clamp(max=1), torch.where(is_tree, parents, N))
    return parents.int()
