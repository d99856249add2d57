"""verify_tree at temperature 0, on trees small enough to verify by hand."""
import pytest
import torch

from specvis_kernels import INVALID_ROW
from tests.kernels.test_verify_tree import NAN, ROW, TABLE, verify


@pytest.mark.parametrize("row, tokens, neighbors, delta, accepted_nodes, token, tv_excess", [
    (ROW, [0, 1], None, None, [1], 0, 0),
    (ROW, [1, 0], None, None, [2], 0, 0),
    (ROW, [1, 2], None, None, [], 0, 0),
    ([0.25, 0.375, 0.375, 0.0], [2, 1], None, None, [2], 1, 0),    # a tie: the lowest id is the argmax
    ([0.25, 0.375, 0.375, 0.0], [2, 2], None, None, [], 1, 0),
    # Raised: token 2 of 1/8, its neighbors 3 and 1 of 1/8 and 1/4, the argmax 0 of 1/2.
    (ROW, [2, 2], TABLE, 0.124, [], 0, 0),
    (ROW, [2, 2], TABLE, 0.25, [], 0, 0),                          # 1/4
    (ROW, [2, 2], TABLE, 0.375, [], 0, 0),                         # 1/2: a tie with token 0, the lower id
    (ROW, [2, 2], TABLE, 1.0, [1], 0, 1),                          # 1: token 0 itself is a neighbor
    # Token 3 has 1/2. Raised, tokens 1 and 0 have 3/8 and 1/4, or 1/2 and 1/2: ties, and they the lower ids.
    ([0.125, 0.25, 0.125, 0.5], [1, 0], [[2, 1], [2, 0], [1, 0], [1, 2]], 0.249, [], 3, 0),
    ([0.125, 0.25, 0.125, 0.5], [1, 0], [[2, 1], [2, 0], [1, 0], [1, 2]], 0.375, [1], 3, 1),
    ([0.125, 0.25, 0.125, 0.5], [0, 0], [[2, 1], [2, 0], [1, 0], [1, 2]], 0.375, [1], 3, 1),
])
def test_greedy_by_hand(backend, row, tokens, neighbors, delta, accepted_nodes, token, tv_excess):
    """Two children of the root; uniforms that would reject everything do not matter."""
    got = verify(backend, [row], [9, *tokens], [-1, 0, 0], [0.999] * 3, neighbors=neighbors, delta=delta, greedy=True)
    assert got == (accepted_nodes, token, tv_excess, 0)


def test_a_tie_over_blocks_goes_to_the_lowest_id(backend, triton_takes):
    triton_takes(V=2)
    row = [0.0, 0.25, 0.0, 0.25, 0.25, 0.25]
    for token in range(6):
        got = verify(backend, [row], [9, token], [-1, 0], [0.0, 0.0], greedy=True)
        assert got[:2] == ([1] * (token == 1), 1)


def test_a_tie_over_a_long_row_goes_to_the_lowest_id(backend):
    row = torch.full((700,), 2.0 ** -11)
    row[[5, 130, 300, 699]] = 2.0 ** -4
    assert verify(backend, [row.tolist()], [9], [-1], [0.0], max_depth=1, greedy=True) == ([], 5, 0, 0)
    row[5] = 0.0
    assert verify(backend, [row.tolist()], [9], [-1], [0.0], max_depth=1, greedy=True) == ([], 130, 0, 0)


@pytest.mark.parametrize("heavy, top", [([0, 69], 0), ([33], 33), ([69], 69), ([33, 69], 33), ([31, 32], 31)])
def test_greedy_finds_the_argmax_wherever_it_is(backend, heavy, top):
    row = [1 / len(heavy) if v in heavy else 0.0 for v in range(70)]
    assert verify(backend, [row], [9, 68, top], [-1, 0, 0], [0.0] * 3, greedy=True)[:2] == ([2], top)


def test_greedy_counts_the_tokens_that_are_not_the_argmax(backend):
    """Token 2 with all its neighbors is more than the argmax 0; nodes 1 and 3 leave it, node 2 does not."""
    got = verify(backend, [ROW], [9, 2, 0, 2], [-1, 0, 1, 2], [0.0] * 4, neighbors=TABLE, delta=1.0, greedy=True)
    assert got == ([1, 2, 3], 0, 2.0, 0)


@pytest.mark.parametrize("tokens, max_depth, accepted_nodes", [
    # 0 -> 1 2; 1 -> 3; 2 -> 4 5; 5 -> 6; the argmax is 0 everywhere
    ([0, 0, 0, 0, 0, 0, 0], 6, [2, 5, 6]),   # the deepest
    ([0, 0, 0, 0, 0, 0, 0], 2, [1, 3]),      # the first of depth 2 in node order
    ([0, 0, 0, 1, 0, 0, 1], 6, [2, 4]),
    ([0, 0, 0, 0, 1, 1, 0], 6, [1, 3]),      # an accepted node below a rejected one does not count
    ([0, 1, 0, 0, 1, 0, 0], 6, [2, 5, 6]),
    ([0, 1, 1, 0, 0, 0, 0], 6, []),
    ([0, 0, 0, 0, 0, 0, 0], 0, []),
    ([0, 0, 0, 0, 0, 0, 0], 1, [1]),
])
def test_greedy_takes_the_deepest_path(backend, tokens, max_depth, accepted_nodes):
    rows = [ROW] * 7
    rows[(accepted_nodes or [0])[-1]] = [0.5, 0.0, 0.0, 0.5] if tokens[0] else ROW
    got = verify(backend, rows, tokens, [-1, 0, 0, 1, 2, 2, 5], [0.999] * 7, max_depth=max_depth, greedy=True)
    assert got == (accepted_nodes, 0, 0.0, 0)


def test_greedy_with_bad_rows(backend):
    bad = [0.5, NAN, 0.5, 0.0]
    tree = dict(tokens=[0, 0, 0, 0, 0], parents=[-1, 0, 0, 1, 2], uniforms=[0.0] * 5, greedy=True)
    # Node 1's children are not accepted; node 2's path is deeper and ends in a good row.
    assert verify(backend, [ROW, bad, ROW, ROW, ROW], **tree) == ([2, 4], 0, 0.0, 0)
    assert verify(backend, [ROW, bad, bad, ROW, ROW], **tree) == ([1], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW, ROW, ROW, bad, ROW], **tree) == ([1, 3], 0, 0.0, INVALID_ROW)
    assert verify(backend, [bad, ROW, ROW, ROW, ROW], **tree) == ([], 0, 0.0, INVALID_ROW)
