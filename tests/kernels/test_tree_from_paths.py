"""tree_from_paths on trees small enough to check by hand; test_tree_paths.py goes there and back."""
import pytest
import torch

from specvis_kernels import INVALID_TREE, tree_from_paths, tree_links
from tests.cases import DEVICE


def parents(paths, num_nodes, backend, dtype=torch.int64):
    return tree_from_paths(torch.tensor(paths, dtype=dtype, device=DEVICE), num_nodes, backend=backend)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_by_hand(backend, dtype):
    """EAGLE's rows, in any order, padded with any negative number; nodes 4 and 7 are on none."""
    rows = [[0, 2, 5, -1], [0, 1, 3, 6], [0, 1, -7, -2], [-1, -1, -1, -1]]
    got = parents(rows, 8, backend, dtype)
    assert got.tolist() == [[-1, 0, 0, 1, -2, 2, 3, -2]] and got.dtype == torch.int32
    assert tree_links(got).status.tolist() == [0]


def test_several_trees(backend):
    assert parents([[[0, 1], [0, 2]], [[0, 2], [0, -1]], [[0, -1], [-1, -1]]], 3, backend).tolist() == [
        [-1, 0, 0], [-1, -2, 0], [-1, -2, -2]]


def test_the_root_alone(backend):
    assert parents([[0]], 1, backend).tolist() == [[-1]]
    assert tree_from_paths(torch.zeros(2, 0, 3, dtype=torch.int64, device=DEVICE), 2,
                           backend=backend).tolist() == [[-1, -2]] * 2


@pytest.mark.parametrize("rows, expected", [
    ([[0, 1, 3], [0, 2, 3]], [-1, 0, 0, 4]),             # two parents
    ([[0, 2, 3], [0, 1, 3], [0, 2, 3]], [-1, 0, 0, 4]),
    ([[0, 3, -1], [-1, -1, 3]], [-1, -2, -2, 4]),
    ([[0, -1, 3]], [-1, -2, -2, -1]),                    # after padding
    ([[0, 3, 1]], [-1, 3, -2, 0]),                       # a parent after its child
    ([[1, 3, -1]], [-1, -2, -2, 1]),                     # not from the root on
    ([[0, 1, 0]], [4, 0, -2, -2]),                       # a node above the root
    ([[-1, 0, 1]], [4, 0, -2, -2]),
    ([[0, 1, 4]], [4, 0, -2, -2]),                       # too many nodes
    ([[4, 1, 2]], [4, 4, 1, -2]),
    ([[0, 2**62, 2]], [4, -2, 4, -2]),
])
def test_what_is_no_tree_is_reported_by_tree_links(backend, rows, expected):
    got = parents([rows, [[0, 1, 2]] * len(rows)], 4, backend)
    assert got.tolist() == [expected, [-1, 0, 1, -2]]
    assert tree_links(got).status.tolist() == [INVALID_TREE, 0]


@pytest.mark.parametrize("arguments, message", [
    (([[0, 1]], 2), "paths must be a tensor, got list"),
    ((torch.zeros(2, 2), 2), r"paths must be int64 or int32 \(B=1, L=2, D=2\), got float32 \(1, 2, 2\)"),
    ((torch.zeros(2, dtype=torch.int64), 2), r"paths must have 3 dimensions \(B, L, D\), got shape \(2,\)"),
])
def test_says_which_argument_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        tree_from_paths(*arguments)
