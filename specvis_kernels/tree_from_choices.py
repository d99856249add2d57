"""tree_from_choices: from ranks, as Medusa and EAGLE-1 write a static tree, to parents."""
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def tree_from_choices(choices: Sequence[Sequence[int]], device: torch.device | str | None = None
                      ) -> tuple[Tensor, Tensor]:
    """Make parents from the ranks on each path: Medusa's and EAGLE-1's `tree_choices`.

    Nodes are numbered by the length of their path, then in lexicographic order, as `generate_tree_buffers` does it: of
    siblings a lower rank is tried first.

    Args:
        choices:  for each node but the root its path: which child of the root, which child of that, and so on. The
                  list also has every shorter path with which a path begins
        device:   of the results; None: the CPU

    Returns:
        parents:  (1, N) int32   N = len(choices) + 1; -1 for the root
        rank:     (1, N) int64   which child of its parent each node is, so which candidate becomes its token: the
                  parent's best one is rank 0. The root has 0

    Raises:
        ValueError: a path is no sequence of integers, is empty, negative, given twice, or its parent's is not in the
            list

    Examples:
        >>> parents, rank = tree_from_choices([[0], [1], [0, 0], [0, 2]])
        >>> parents
        tensor([[-1,  0,  0,  1,  1]], dtype=torch.int32)
        >>> rank
        tensor([[0, 0, 1, 0, 2]])
    """
    paths = sorted(sorted(_paths(choices)), key=len)
    index = {(): 0}
    parents, rank = [-1], [0]
    for ranks in paths:
        parent = index.get(ranks[:-1])
        if parent is None or ranks in index or ranks[-1] < 0:
            what = "without its parent's" if parent is None else "twice" if ranks and ranks in index else "among them"
            raise ValueError("choices must be different paths of ranks >= 0, each with its parent's, "
                             f"got {list(ranks)} {what}")
        index[ranks] = len(parents)
        parents.append(parent)
        rank.append(ranks[-1])
    return (torch.tensor([parents], dtype=torch.int32, device=device),
            torch.tensor([rank], dtype=torch.int64, device=device))


def _paths(choices):
    path = choices
    try:
        for path in choices:
            yield tuple(map(operator.index, path))
    except TypeError:
        raise ValueError(f"choices must be paths of integers, e.g. [[0], [1], [0, 0]], got {path!r}") from None
