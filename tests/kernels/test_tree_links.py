"""tree_links on trees small enough to check by hand, and its own laws."""
import random

import pytest
import torch

from specvis_kernels import INVALID_TREE, tree_links
from tests.cases import DEVICE


def links(*parents, backend=None):
    """The outputs as lists; the words of ancestors as unsigned integers."""
    out = tree_links(torch.tensor(parents, dtype=torch.int32, device=DEVICE), backend=backend)
    ancestors, *others = [a.tolist() for a in out]
    return [[[word % 2**64 for word in words] for words in tree] for tree in ancestors], *others


def test_by_hand(backend):
    """0 -> 1, 2, 5; 1 -> 3; 2 -> 4; 3 -> 6. Node 6's ancestors are 6, 3, 1, 0: bits 64 + 8 + 2 + 1."""
    assert links([-1, 0, 0, 1, 2, 0, 3], backend=backend) == (
        [[[1], [3], [5], [11], [21], [33], [75]]],
        [[0, 1, 1, 2, 2, 1, 3]],
        [[1, 3, 4, 6, -1, -1, -1]],
        [[-1, 2, 5, -1, -1, -1, -1]],
        [0])


def test_unused_slots(backend):
    """Unused nodes at the end, in the middle, and all but the root; the other requests do not change."""
    assert links([-1, 0, 1, -2], [-1, -2, 0, 2], [-1, -2, -2, -2], [-1, 0, 0, 0], backend=backend) == (
        [[[1], [3], [7], [0]], [[1], [0], [5], [13]], [[1], [0], [0], [0]], [[1], [3], [5], [9]]],
        [[0, 1, 2, -1], [0, -1, 1, 2], [0, -1, -1, -1], [0, 1, 1, 1]],
        [[1, 2, -1, -1], [2, -1, 3, -1], [-1, -1, -1, -1], [1, -1, -1, -1]],
        [[-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, 2, 3, -1]],
        [0, 0, 0, 0])


@pytest.mark.parametrize("parents, depth, first_child, next_sibling", [
    ([-1, 0, -1, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),        # a second root
    ([-1, 0, 2, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),         # its own parent
    ([-1, 0, 3, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),         # a parent after it
    ([-1, 0, 4, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),         # no such node
    ([-1, 0, 2**31 - 1, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),
    ([-1, 0, -3, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),
    ([-1, 0, -2**31, 0], [0, 1, -1, 1], [1, -1, -1, -1], [-1, 3, -1, -1]),
    ([-1, -2, 1, 0], [0, -1, -1, 1], [3, -1, -1, -1], [-1, -1, -1, -1]),      # a parent that is unused
    ([-1, 3, 1, 2], [0, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),     # a cycle
    ([-1, 2, 0, 2], [0, -1, 1, 2], [2, -1, 3, -1], [-1, -1, -1, -1]),         # a used node's parent, after it
    ([-1, 5, 1, 1], [0, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),     # an invalid parent's children
    ([0, 0, 1, 0], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),     # no root: nothing is used
    ([-2, 0, 1, 0], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),
    ([-2, -2, -2, -2], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),
    ([7, -2, -2, -2], [-1, -1, -1, -1], [-1, -1, -1, -1], [-1, -1, -1, -1]),
])
def test_an_invalid_parent_is_reported_and_not_followed(backend, parents, depth, first_child, next_sibling):
    ancestors, *got, status = links(parents, [-1, 0, 1, 2], backend=backend)
    assert [output[0] for output in got] == [depth, first_child, next_sibling]
    assert [words == [0] for words in ancestors[0]] == [d < 0 for d in depth]
    assert ancestors[1] == [[1], [3], [7], [15]] and status == [INVALID_TREE, 0]


def test_int64_parents(backend):
    """torch's own integers; what does not fit into int32 stays out of range."""
    tree, *bad = [-1, 0, 1, 0], [-1, 0, 2**32 + 1, 0], [-1, 0, -2**32 + 1, 0], [2**32 - 1, 0, 0, 0]
    got = tree_links(torch.tensor([tree, *bad], device=DEVICE), backend=backend)
    assert got.depth[0].tolist() == [0, 1, 2, 1] and got.status.tolist() == [0] + [INVALID_TREE] * 3
    assert (got.depth[1:, 2] == -1).all()


def test_one_node(backend):
    assert links([-1], backend=backend) == ([[[1]]], [[0]], [[-1]], [[-1]], [0])
    assert links([0], backend=backend) == ([[[0]]], [[-1]], [[-1]], [[-1]], [INVALID_TREE])


@pytest.mark.parametrize("N", [63, 64, 65, 130])
def test_bits_run_on_through_the_words(backend, N):
    """A chain: node n's ancestors are 0..n, the low n + 1 bits of all its words."""
    ancestors, depth, first_child, next_sibling, status = links([*range(-1, N - 1)], backend=backend)
    assert all(len(words) == -(-N // 64) for words in ancestors[0])
    assert [sum(word << 64 * w for w, word in enumerate(words)) for words in ancestors[0]] == [
        2 ** (n + 1) - 1 for n in range(N)]
    assert depth == [[*range(N)]] and status == [0]
    assert first_child == [[*range(1, N), -1]] and next_sibling == [[-1] * N]


@pytest.mark.parametrize("n", [40, 128])
def test_a_second_root_far_behind(backend, n):
    """It is no sibling of the first one, and does not stay unnoticed."""
    ancestors, depth, first_child, next_sibling, status = links([-1] + [0] * n + [-1], backend=backend)
    assert status == [INVALID_TREE] and depth == [[0] + [1] * n + [-1]] and ancestors[0][n + 1] == [0] * (n // 64 + 1)
    assert first_child == [[1] + [-1] * (n + 1)] and next_sibling == [[-1, *range(2, n + 1), -1, -1]]


@pytest.mark.parametrize("N", [5, 64, 65, 130])
def test_the_links_say_what_the_parents_said(backend, N):
    """Parents can be read off the links; popcount is depth + 1; the bits are the nodes on the way up."""
    rng = random.Random(N)
    trees = [[-1] + [rng.randrange(max(0, n - 9), n) for n in range(1, N)],
             [-1] + [int(rng.random() ** 2 * n) for n in range(1, N)]]
    trees[1][-1] = -2
    ancestors, depth, first_child, next_sibling, status = links(*trees, backend=backend)
    assert status == [0, 0]
    for b, parents in enumerate(trees):
        rebuilt = [-2] * N
        rebuilt[0] = -1
        for n in range(N):
            child = first_child[b][n]
            while child >= 0:
                rebuilt[child], last = n, child
                child = next_sibling[b][child]
                assert child == -1 or child > last
        assert rebuilt == parents
        for n in range(N):
            bits = sum(word << 64 * w for w, word in enumerate(ancestors[b][n]))
            assert bits.bit_count() == depth[b][n] + 1
            node, ancestor_bits = n if parents[n] != -2 else -1, 0
            while node >= 0:
                ancestor_bits |= 1 << node
                node = parents[node]
            assert bits == ancestor_bits
