"""Inputs of the ops on trees."""
import random

import torch

from tests.cases.common import CASES, DEVICE, ancestors_of, random_parents


def three_trees(N, reach):
    """Parents (3, N) int32. A node hangs below one of the `reach` before it; the second tree has unused leaves."""
    rng = random.Random(N + reach)
    trees = [[-1] + [rng.randrange(max(0, n - reach), n) for n in range(1, N)] for _ in range(3)]
    for n in rng.sample(range(N), N // 4):
        if n > 0 and n not in trees[1]:
            trees[1][n] = -2
    return torch.tensor(trees, dtype=torch.int32, device=DEVICE)


# No candidates; more than nodes, and fewer.
CASES["select_tree"] = [(1, 0, 1), (2, 12, 6), (3, 70, 33), (3, 9, 20)]


def select_tree(B, M, N):
    """Scores fall along every path and are often equal. Every seventh candidate does not exist."""
    g = torch.Generator().manual_seed(B + M + N)
    parents = random_parents(B, M, g, unused=False) - 1
    scores = torch.zeros(B, M)
    steps = torch.randint(0, 3, (B, M), generator=g) / 4
    for m in range(M):
        parent_scores = scores.gather(1, parents[:, m:m + 1].clamp(min=0))[:, 0]
        scores[:, m] = torch.where(parents[:, m] < 0, 0.0, parent_scores) - steps[:, m]
    scores[:, 6::7] = -torch.inf
    for m in range(M):  # nor are its descendants
        is_lost = scores.gather(1, parents[:, m:m + 1].clamp(min=0))[:, 0] == -torch.inf
        scores[:, m] = torch.where((parents[:, m] >= 0) & is_lost, -torch.inf, scores[:, m])
    tokens = torch.randint(2**40, (B, M), generator=g)
    size = torch.tensor([N, N // 2, 1], dtype=torch.int32).repeat(B)[:B]
    args = tokens, scores, parents.int(), torch.arange(B), size
    return tuple(a.to(DEVICE) for a in args), {"num_nodes": N}


# One word of ancestors, and three.
CASES["tree_links"] = [(1, 1), (2, 7), (3, 20), (4, 130)]


def tree_links(B, N):
    """Every third request has a parent that is out of range, every fourth no node, not even a root."""
    g = torch.Generator().manual_seed(B + N)
    parents = torch.cat([torch.full((B, 1), -1), random_parents(B, N - 1, g)], 1)
    parents[2::3, N // 2:N // 2 + 1] = N
    parents[3::4] = -2
    return (parents.to(DEVICE, torch.int32),), {}


# Each form and dtype; rows of bits that begin within a byte; more columns than nodes; other first columns.
CASES["tree_mask"] = [
    (1, 1),
    (2, 7, True, "packed", 20),
    (1, 65, True, "additive", 80, torch.float16),
    (3, 12, True, "bool", 20),
    (1, 5, True, "additive", 9, torch.bfloat16),
    (2, 9, False, "packed"),
    (3, 12, True, "packed_rows", 43, torch.float32, True),
    (2, 70, False, "bool", 100, torch.float32, True),
]


def tree_mask(B, N, lengths=False, form="bool", columns=None, dtype=torch.float32, start=False):
    """Ancestor bits of trees with unused slots; lengths from 0 to more than there are columns.

    start: nodes begin before the end of the cached columns, after it, and out of sight.
    """
    g = torch.Generator().manual_seed(B + N)
    ancestors = ancestors_of(random_parents(B, N - 1, g))
    if N % 64:
        ancestors[1::2, :, -1] |= -2**63  # bits beyond the last node are nothing
    each_length = torch.tensor([0, 3, 2**20], dtype=torch.int32).roll(-1 if B < 3 else 0).repeat(B)[:B].to(DEVICE)
    kwargs = {"form": form, "columns": columns, "dtype": dtype}
    if start:
        kwargs["start"] = torch.tensor([5, -2, 2**62]).repeat(B)[:B].to(DEVICE)
    return (ancestors.to(DEVICE), each_length if lengths else None), kwargs
