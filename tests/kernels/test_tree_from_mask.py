"""tree_from_mask on trees small enough to check by hand, and the way back from tree_mask."""
import pytest
import torch

from specvis_kernels import INVALID_TREE, tree_from_mask, tree_links, tree_mask
from tests.cases import DEVICE, three_trees


def parents(rows):
    """The parents of a mask, whose rows are strings with x where a node is seen."""
    return tree_from_mask(torch.tensor([[c == "x" for c in row] for row in rows.split()], device=DEVICE))


def test_by_hand():
    """The diagonal may be missing; who sees no other node is unused, but for the root."""
    assert parents("x.... xx... x.x.. xx.x. ....x").tolist() == [[-1, 0, 0, 1, -2]]
    assert parents("..... x.... x.... xx... .....").tolist() == [[-1, 0, 0, 1, -2]]
    assert parents(".").tolist() == [[-1]]


@pytest.mark.parametrize("rows, expected", [
    ("x... xx.. x.x. xxxx", [-1, 0, 0, 4]),   # causal: sees its parent's sibling
    ("x... xx.. x.x. .x.x", [-1, 0, 0, 4]),   # does not see its parent's parent
    ("x... .x.. .xx. .x.x", [-1, -2, 1, 1]),  # below a node that is not used
    ("xxxx .xxx ..xx ...x", [4, 4, 4, -2]),   # transposed
    ("x... xxx. x.x. x..x", [-1, 4, 0, 0]),   # sees a later node
])
def test_what_is_no_tree_is_reported_by_tree_links(rows, expected):
    got = parents(rows)
    assert got.tolist() == [expected] and tree_links(got).status.tolist() == [INVALID_TREE]


@pytest.mark.parametrize("N, reach", [(1, 1), (59, 9), (60, 60), (65, 20), (130, 130)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.int64])
def test_there_and_back(N, reach, dtype):
    expected = three_trees(N, reach)
    mask = tree_mask(tree_links(expected).ancestors).to(dtype)
    assert torch.equal(tree_from_mask(mask), expected)
    assert torch.equal(tree_from_mask(mask[1]), expected[1:2])
    assert torch.equal(tree_from_mask(mask[:, None]), expected)  # (B, 1, N, N), as EAGLE's
