"""tree_paths on trees small enough to check by hand, and the way back through tree_from_paths."""
import random

import pytest
import torch

from specvis_kernels import tree_from_paths, tree_links, tree_paths
from tests.cases import DEVICE


def paths(*parents, max_depth=None, backend=None, dtype=torch.int32):
    return tree_paths(torch.tensor(parents, dtype=dtype, device=DEVICE), max_depth, backend=backend).tolist()


def test_by_hand(backend):
    """0 -> 1, 2, 5; 1 -> 3; 2 -> 4; 3 -> 6: by their indices the leaves are 4, 5, 6, by their paths 6, 4, 5."""
    assert paths([-1, 0, 0, 1, 2, 0, 3], max_depth=3, backend=backend) == [[
        [0, 1, 3, 6], [0, 2, 4, -1], [0, 5, -1, -1], *[[-1] * 4] * 4]]


def test_nodes_below_max_depth_are_left_out(backend):
    tree = [-1, 0, 1, 2, 1, 0]
    assert paths(tree, max_depth=2, backend=backend)[0][:4] == [[0, 1, 2], [0, 1, 4], [0, 5, -1], [-1, -1, -1]]
    assert paths(tree, max_depth=1, backend=backend)[0][:3] == [[0, 1], [0, 5], [-1, -1]]
    assert paths(tree, max_depth=0, backend=backend)[0] == [[0], *[[-1]] * 5]


def test_unused_and_invalid_nodes_are_on_no_path(backend):
    """As in tree_links: a node before its parent, a second root, no root, and the nodes below them."""
    assert [rows[:3] for rows in paths(
        [-1, -2, 0, 2], [-1, 2, 0, 1], [-1, 0, -1, 2], [0, 0, 1, 1], [-2, 0, 0, 0], max_depth=2, backend=backend)] == [
        [[0, 2, 3], [-1] * 3, [-1] * 3], [[0, 2, -1], [-1] * 3, [-1] * 3], [[0, 1, -1], [-1] * 3, [-1] * 3],
        [[-1] * 3] * 3, [[-1] * 3] * 3]


@pytest.mark.parametrize("N, reach", [(1, 1), (59, 9), (60, 60), (65, 20), (130, 130), (300, 300)])
def test_there_and_back(backend, N, reach):
    """Random trees, three a batch, with unused leaves; the order is that of Python's lists."""
    rng = random.Random(N + reach)
    trees = [[-1] + [rng.randrange(max(0, n - reach), n) for n in range(1, N)] for _ in range(3)]
    for n in rng.sample(range(N), N // 4):
        if n > 0 and n not in trees[1]:
            trees[1][n] = -2
    parents = torch.tensor(trees, dtype=torch.int32, device=DEVICE)
    depth = tree_links(parents).depth.max().item()
    got = tree_paths(parents, depth, backend=backend)
    assert torch.equal(tree_from_paths(got, N), parents)
    for rows in got.tolist():
        used = [[n for n in row if n >= 0] for row in rows if row[0] >= 0]
        assert used == sorted(used) and all(row[0] == -1 for row in rows[len(used):])
        assert all(row == [*path, *[-1] * (depth + 1 - len(path))] for row, path in zip(rows, used))


@pytest.mark.parametrize("arguments, message", [
    ({"parents": [[-1]]}, "parents must be a tensor, got list"),
    ({"parents": torch.zeros(2, 0).int()}, r"parents must have N >= 1, got shape \(2, 0\)"),
])
def test_says_which_argument_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        tree_paths(**arguments)
