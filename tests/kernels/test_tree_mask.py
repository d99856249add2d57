"""tree_mask on trees small enough to check by hand, and its own laws."""
import math
import random

import numpy as np
import pytest
import torch

from specvis_kernels import tree_links, tree_mask
from tests.cases import DEVICE


def ancestors_of(*trees):
    return tree_links(torch.tensor(trees, dtype=torch.int32, device=DEVICE), backend="oracle").ancestors


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def picture(mask):
    return ["".join(".x"[x] for x in row) for row in mask.int().tolist()]


TREE = [-1, 0, 0, 2, -2]  # 0 -> 1, 2; 2 -> 3; slot 4 is unused


def test_the_nodes_alone(backend):
    assert picture(tree_mask(ancestors_of(TREE), backend=backend)[0]) == [
        "x....",
        "xx...",
        "x.x..",
        "x.xx.",
        "....x"]


@pytest.mark.parametrize("length, columns, expected", [
    (2, 8, ["xxx.....", "xxxx....", "xxx.x...", "xxx.xx..", "......x."]),  # two cached, the nodes, nothing
    (0, 6, ["x.....", "xx....", "x.x...", "x.xx..", "....x."]),
    (3, 5, ["xxxx.", "xxxxx", "xxxx.", "xxxx.", "....."]),                # columns end within the tree
    (9, 3, ["xxx", "xxx", "xxx", "xxx", "..."]),                          # and before it
    (2**31 - 1, 3, ["xxx", "xxx", "xxx", "xxx", "..."]),
    (1, 1, ["x", "x", "x", "x", "."]),
])
def test_cached_columns_come_first(backend, length, columns, expected):
    """The unused slot sees itself only, not even the cache."""
    mask = tree_mask(ancestors_of(TREE, TREE), lengths(length, 0), columns=columns, backend=backend)
    assert picture(mask[0]) == expected
    alone = tree_mask(ancestors_of(TREE), lengths(0), columns=columns, backend=backend)
    assert torch.equal(mask[1], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_additive(backend, dtype):
    mask = tree_mask(ancestors_of([-1, 0, 0]), lengths(1), columns=4, form="additive", dtype=dtype, backend=backend)
    assert mask.dtype == dtype
    by_name = tree_mask(ancestors_of([-1, 0, 0]), lengths(1), columns=4, form="additive", dtype=str(dtype)[6:],
                        backend=backend)
    assert by_name.dtype == dtype
    assert mask[0].tolist() == [[0, 0, -math.inf, -math.inf], [0, 0, 0, -math.inf], [0, 0, -math.inf, 0]]


def test_packed_by_hand(backend):
    """x.. xx. x.x is 100 110 101 in row order: bits 0, 3, 4, 6 and 8, so 1 + 8 + 16 + 64 = 89 and 1."""
    assert tree_mask(ancestors_of([-1, 0, 0]), form="packed", backend=backend).tolist() == [[89, 1]]


@pytest.mark.parametrize("length, start, columns, expected", [
    (2, 4, 9, ["xx..x....", "xx..xx...", "xx..x.x..", "xx..x.xx.", "........x"]),  # columns 2 and 3 are of nobody
    (None, 1, 6, [".x....", ".xx...", ".x.x..", ".x.xx.", ".....x"]),             # nothing is cached
    (3, 1, 6, ["xxx...", "xxx...", "xxxx..", "xxxxx.", ".....x"]),                # the nodes begin among the cached
    (2, -2, 4, ["xx..", "xx..", "xx..", "xx..", "..x."]),                         # nodes 0 and 1 are out of sight
    (1, 2**63 - 1, 3, ["x..", "x..", "x..", "x..", "..."]),
    (1, -2**63, 3, ["x..", "x..", "x..", "x..", "..."]),
])
def test_nodes_may_stand_away_from_what_is_cached(backend, length, start, columns, expected):
    length = None if length is None else lengths(length)
    for dtype in (torch.int64, torch.int32) if abs(start) < 100 else (torch.int64,):
        mask = tree_mask(ancestors_of(TREE), length, start=torch.tensor([start], dtype=dtype, device=DEVICE),
                         columns=columns, backend=backend)
        assert picture(mask[0]) == expected


def test_packed_rows_by_hand(backend):
    """9 columns: xx..x.... is 1 + 2 + 16 = 19 and 0; the unused slot's last column is bit 0 of the second byte."""
    mask = tree_mask(ancestors_of(TREE), lengths(2), start=lengths(4), columns=9, form="packed_rows", backend=backend)
    assert mask.tolist() == [[[19, 0], [51, 0], [83, 0], [211, 0], [0, 1]]]


def test_a_long_cache(backend):
    """Longer than a program's block of columns; the packed rows begin within bytes."""
    args = ancestors_of([-1, 0, -2]), lengths(2500)
    mask = tree_mask(*args, columns=2503, backend=backend)
    assert mask[0].nonzero().tolist() == [*[[0, c] for c in range(2501)], *[[1, c] for c in range(2502)], [2, 2502]]
    packed = tree_mask(*args, columns=2503, form="packed", backend=backend).cpu().numpy()
    assert np.array_equal(packed, np.packbits(mask.flatten(1).cpu().numpy(), axis=1, bitorder="little"))


def test_bits_count_as_they_are(backend):
    """Node 1 does not say that the root is its ancestor."""
    ancestors = torch.tensor([[[1], [2]]], device=DEVICE)
    assert picture(tree_mask(ancestors, lengths(2), columns=4, backend=backend)[0]) == ["xxx.", "xx.x"]


def random_trees(N):
    rng = random.Random(N)
    trees = [[-1] + [rng.randrange(n) for n in range(1, N)],
             [-1] + [max(0, n - rng.randint(1, 3)) for n in range(1, N)]]
    trees[1][N - N // 3:] = [-2] * (N // 3)
    return trees


@pytest.mark.parametrize("N, columns", [(1, 1), (3, 3), (7, 19), (8, 24), (65, 130)])
def test_the_forms_say_the_same(backend, N, columns):
    """FlashInfer's segment_packbits is numpy's packbits, little bits first, of each request's flat mask."""
    args = ancestors_of(*random_trees(N)), lengths(0, columns - N + 1)
    visible = tree_mask(*args, columns=columns, backend=backend)
    packed = tree_mask(*args, columns=columns, form="packed", backend=backend)
    additive = tree_mask(*args, columns=columns, form="additive", backend=backend)
    rows = tree_mask(*args, columns=columns, form="packed_rows", backend=backend)
    assert np.array_equal(rows.cpu().numpy(), np.packbits(visible.cpu().numpy(), axis=2, bitorder="little"))
    assert packed.dtype == torch.uint8 and visible.dtype == torch.bool
    assert np.array_equal(packed.cpu().numpy(),
                          np.packbits(visible.flatten(1).cpu().numpy(), axis=1, bitorder="little"))
    assert torch.equal(additive, torch.zeros_like(additive).masked_fill(~visible, -math.inf))


@pytest.mark.parametrize("N", [1, 6, 64, 65, 130])
def test_what_is_seen_is_the_way_up(backend, N):
    trees = random_trees(N)
    mask = tree_mask(ancestors_of(*trees), lengths(3, 0), columns=N + 4, backend=backend).tolist()
    for b, parents in enumerate(trees):
        length = [3, 0][b]
        for n in range(N):
            seen, node = {length + n}, n
            while parents[node] >= 0:
                node = parents[node]
                seen.add(length + node)
            if parents[n] != -2:
                seen |= set(range(length))
            assert {c for c in range(N + 4) if mask[b][n][c]} == seen


@pytest.mark.parametrize("N", [1, 63, 65])
def test_bits_beyond_the_last_node_are_nothing(backend, N):
    """A slot whose only bits lie there is unused, and no column shows them."""
    ancestors = ancestors_of([-1] + [0] * (N - 1))
    stray = ancestors.clone()
    stray[0, :, -1] |= -1 << N % 64
    assert torch.equal(tree_mask(stray, lengths(1), columns=N + 9, backend=backend),
                       tree_mask(ancestors, lengths(1), columns=N + 9, backend="oracle"))
    stray[0, N - 1] = 0
    stray[0, N - 1, -1] = -1 << N % 64
    assert tree_mask(stray, lengths(1), columns=N + 9, backend=backend)[0, -1].nonzero().tolist() == [[N]]
