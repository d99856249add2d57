"""tree_paths and tree_from_paths on trees small enough to check by hand, and there and back."""
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specvis_kernels import INVALID_TREE, _define, tree_from_paths, tree_links, tree_paths
from tests.cases import DEVICE, three_trees


def paths(*parents, max_depth=None, dtype=torch.int32):
    return tree_paths(torch.tensor(parents, dtype=dtype, device=DEVICE), max_depth).tolist()


def parents(paths, num_nodes, dtype=torch.int64):
    return tree_from_paths(torch.tensor(paths, dtype=dtype, device=DEVICE), num_nodes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_paths_by_hand(dtype):
    """0 -> 1, 2, 5; 1 -> 3; 2 -> 4; 3 -> 6: by their indices the leaves are 4, 5, 6, by their paths 6, 4, 5."""
    assert paths([-1, 0, 0, 1, 2, 0, 3], max_depth=3, dtype=dtype) == [[
        [0, 1, 3, 6], [0, 2, 4, -1], [0, 5, -1, -1], *[[-1] * 4] * 4]]


def test_nodes_below_max_depth_are_left_out():
    tree = [-1, 0, 1, 2, 1, 0]
    assert paths(tree, max_depth=2)[0][:4] == [[0, 1, 2], [0, 1, 4], [0, 5, -1], [-1, -1, -1]]
    assert paths(tree, max_depth=1)[0][:3] == [[0, 1], [0, 5], [-1, -1]]
    assert paths(tree, max_depth=0)[0] == [[0], *[[-1]] * 5]


def test_unused_and_invalid_nodes_are_on_no_path(monkeypatch):
    """As in tree_links: a node before its parent, a second root, no root, and the nodes below them. It is no error,
    even if ops check values."""
    monkeypatch.setattr(_define, "CHECKS", True)
    assert [rows[:3] for rows in paths(
        [-1, -2, 0, 2], [-1, 2, 0, 1], [-1, 0, -1, 2], [0, 0, 1, 1], [-2, 0, 0, 0], max_depth=2)] == [
        [[0, 2, 3], [-1] * 3, [-1] * 3], [[0, 2, -1], [-1] * 3, [-1] * 3], [[0, 1, -1], [-1] * 3, [-1] * 3],
        [[-1] * 3] * 3, [[-1] * 3] * 3]


@pytest.mark.parametrize("N, reach", [(1, 1), (59, 9), (60, 60), (65, 20), (130, 130), (300, 300)])
def test_there_and_back(N, reach):
    """The order is that of Python's lists."""
    parents = three_trees(N, reach)
    depth = tree_links(parents).depth.max().item()
    got = tree_paths(parents, depth)
    assert torch.equal(tree_from_paths(got, N), parents)
    for rows in got.tolist():
        used = [[n for n in row if n >= 0] for row in rows if row[0] >= 0]
        assert used == sorted(used) and all(row[0] == -1 for row in rows[len(used):])
        assert all(row == [*path, *[-1] * (depth + 1 - len(path))] for row, path in zip(rows, used))


def test_nothing_is_read_back():
    """Both work where there are no values: compiled, mapped and with fake tensors."""
    def there_and_back(parents):
        got = tree_paths(parents, 2)
        return got, tree_from_paths(got, 4)

    trees = torch.tensor([[[-1, 0, 0, 1], [-1, 0, 1, -2]], [[-1, -2, -2, 0], [-1, 0, 0, 0]]], device=DEVICE)
    expected = [torch.stack(each) for each in zip(*map(there_and_back, trees))]
    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
    for got in (torch.func.vmap(there_and_back)(trees), [torch.stack(each) for each in zip(*map(compiled, trees))]):
        assert all(map(torch.equal, got, expected))
    of_one = trees[0].clone()
    with FakeTensorMode() as mode:
        got, back = there_and_back(mode.from_tensor(of_one))
    assert got.shape == (2, 4, 3) and got.dtype == torch.int64 and back.shape == (2, 4) and back.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_parents_by_hand(dtype):
    """EAGLE's rows, in any order, padded with any negative number; nodes 4 and 7 are on none."""
    rows = [[0, 2, 5, -1], [0, 1, 3, 6], [0, 1, -7, -2], [-1, -1, -1, -1]]
    got = parents(rows, 8, dtype)
    assert got.tolist() == [[-1, 0, 0, 1, -2, 2, 3, -2]] and got.dtype == torch.int32
    assert tree_links(got).status.tolist() == [0]


def test_several_trees_and_the_root_alone():
    assert parents([[[0, 1], [0, 2]], [[0, 2], [0, -1]], [[0, -1], [-1, -1]]], 3).tolist() == [
        [-1, 0, 0], [-1, -2, 0], [-1, -2, -2]]
    assert parents([[0]], 1).tolist() == [[-1]]
    assert tree_from_paths(torch.zeros(2, 0, 3, dtype=torch.int64, device=DEVICE), 2).tolist() == [[-1, -2]] * 2


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
def test_what_is_no_tree_is_reported_by_tree_links(rows, expected):
    got = parents([rows, [[0, 1, 2]] * len(rows)], 4)
    assert got.tolist() == [expected, [-1, 0, 1, -2]]
    assert tree_links(got).status.tolist() == [INVALID_TREE, 0]
