"""select_tree on trees small enough to check by hand, its own laws, and all of EAGLE-2 in plain Python."""
import math
import random

import numpy as np
import pytest
import torch

from specvis_kernels import INVALID_TREE, expand_tree, select_tree, tree_links
from tests.cases import DEVICE, exact_probs, tensor

INF, NAN = math.inf, math.nan


def one_tree(scores, parents, size=4, N=4, backend=None):
    """Tokens, parents, source (lists) and status of one request; the tokens are 10 + m, the root's is 7."""
    out = select_tree(tensor([[10 + m for m in range(len(scores))]], torch.int64), tensor([scores]),
                      tensor([parents], torch.int32), tensor([7], torch.int64), tensor([size], torch.int32),
                      num_nodes=N, backend=backend)
    return [a[0].tolist() for a in out]


# Candidates a, b are the root's children; c, d are a's, e is b's.
SCORES, PARENTS = [-1.0, -2.0, -1.5, -4.0, -3.0], [-1, -1, 0, 0, 1]


@pytest.mark.parametrize("size, N, source, parents", [
    (6, 6, [0, 1, 2, 3, 4], [0, 0, 1, 1, 2]),  # everything
    (4, 4, [0, 1, 2], [0, 0, 1]),              # -1, -1.5, -2: a, c, b, in the candidates' order a, b, c
    (3, 4, [0, 2], [0, 1]),                    # a and c: node 2 is c, and its parent a is node 1
    (2, 4, [0], [0]),
    (1, 4, [], []),                            # leaf only
    (0, 4, [], []),                            # clamped to 1
    (-2**31, 4, [], []),
    (9, 4, [0, 1, 2], [0, 0, 1]),              # clamped to N
    (9, 3, [0, 2], [0, 1]),                    # to a and c, not to a and b, the first ones
    (5, 5, [0, 1, 2, 4], [0, 0, 1, 2]),        # e before d
    (9, 9, [0, 1, 2, 3, 4], [0, 0, 1, 1, 2]),  # N > M + 1
    (1, 1, [], []),
])
def test_by_hand(backend, size, N, source, parents):
    padding = N - 1 - len(source)
    assert one_tree(SCORES, PARENTS, size, N, backend) == [
        [7, *[10 + m for m in source], *[0] * padding], [-1, *parents, *[-2] * padding],
        [-1, *source, *[-1] * padding], 0]


@pytest.mark.parametrize("scores, size, source", [
    ([-1.0, -1.0, -1.0, -1.0, -1.0], 4, [0, 1, 2]),        # all tie
    ([-1.0, -2.0, -2.0, -2.0, -2.0], 4, [0, 1, 2]),
    ([-0.0, 0.0, -0.0, 0.0, -1.0], 3, [0, 1]),             # the zeros are one
    ([-1.0, -INF, -1.5, -INF, -INF], 6, [0, 2]),           # a candidate that does not exist is never kept
    ([-1.0, NAN, -1.5, -NAN, -INF], 6, [0, 2]),
    ([-INF] * 5, 6, []),
    ([5.0, 4.0, 3.0, 2.0, 1.0], 4, [0, 1, 2]),             # any floats will do
    ([INF, 1e-40, 0.0, -1e-40, -3.4028234e38], 6, [0, 1, 2, 3, 4]),
    ([INF, 1e-40, 0.0, -1e-40, -3.4028234e38], 3, [0, 1]),
])
def test_ranks(backend, scores, size, source):
    assert [m for m in one_tree(scores, PARENTS, size, 6, backend)[2] if m >= 0] == source


@pytest.mark.parametrize("scores, parents, expected, source", [
    ([-3.0, -1.0], [-1, 0], [-1, -2, -2], [-1, -1, -1]),   # its parent was not kept
    ([-3.0, -1.0, -1.0], [-1, -1, 0], [-1, 0, -2], [-1, 1, -1]),  # nor the first one after that
    ([-1.0, -1.0], [-1, 1], [-1, 0, -2], [-1, 0, -1]),     # its own parent
    ([-1.0, -1.0], [1, -1], [-1, -2, 0], [-1, -1, 1]),     # a parent after it: a hole in the middle
    ([-1.0, -1.0], [-1, 2], [-1, 0, -2], [-1, 0, -1]),
    ([-1.0, -1.0], [-1, -2], [-1, 0, -2], [-1, 0, -1]),
    ([-1.0, -1.0], [2**31 - 1, -2**31], [-1, -2, -2], [-1, -1, -1]),
    ([-1.0, -1.0], [-7, 0], [-1, -2, 1], [-1, -1, 1]),     # a child of an unused slot still points to it
])
def test_an_invalid_parent_is_reported_and_not_followed(backend, scores, parents, expected, source):
    size = len(scores) if min(scores) < -1 else 3
    tokens, node_parents, got_source, status = one_tree(scores, parents, size, 3, backend)
    assert node_parents == expected and got_source == source and status == INVALID_TREE
    assert tokens == [7, *[10 + m if m >= 0 else 0 for m in source[1:]]]


@pytest.mark.parametrize("M", [50, 1100, 2100])
def test_an_invalid_parent_of_many(backend, M):
    """The first candidate's: every third one hangs from it, and points to a slot that is unused."""
    parents = [-7] + [-1 if m % 3 else 0 for m in range(1, M)]
    _, node_parents, source, status = one_tree([-1.0] * M, parents, M + 1, M + 1, backend)
    assert node_parents == [-1, -2] + [parent + 1 for parent in parents[1:]] and status == INVALID_TREE
    assert source == [-1, -1, *range(1, M)]


def test_what_is_not_kept_may_have_any_parent_and_there_may_be_no_candidates(backend):
    assert one_tree([-1.0, -5.0, -INF], [-1, 99, -99], 2, 4, backend) == [[7, 10, 0, 0], [-1, 0, -2, -2],
                                                                         [-1, 0, -1, -1], 0]
    assert one_tree([], [], 3, 3, backend) == [[7, 0, 0], [-1, -2, -2], [-1, -1, -1], 0]


@pytest.mark.parametrize("M, N", [(30, 12), (90, 65), (2200, 1900)])
def test_a_kept_nodes_parent_is_kept(backend, M, N):
    """Scores that never rise along a path, most of them equal: three requests with sizes of their own."""
    rng = random.Random(M)
    parents = [[rng.randrange(-1, m) for m in range(M)] for _ in range(3)]
    scores = [[0.0] * M for _ in range(3)]
    for row, score in zip(parents, scores):
        for m, parent in enumerate(row):
            score[m] = (score[parent] if parent >= 0 else 0.0) - rng.choice([0.0, 0.0, 0.5])
    size = [N, N // 2, 3]
    tokens = torch.arange(3 * M, device=DEVICE).view(3, M)
    node_tokens, node_parents, source, status = select_tree(
        tokens, torch.tensor(scores, device=DEVICE), torch.tensor(parents, dtype=torch.int32, device=DEVICE),
        torch.tensor([7, 8, 9], device=DEVICE), torch.tensor(size, dtype=torch.int32, device=DEVICE),
        num_nodes=N, backend=backend)
    assert not status.any() and not tree_links(node_parents, backend="oracle").status.any()
    for b in range(3):
        best = sorted(sorted(range(M), key=lambda m: (-scores[b][m], m))[:size[b] - 1])
        padding = N - size[b]
        assert source[b].tolist() == [-1, *best, *[-1] * padding]
        assert node_parents[b].tolist() == [
            -1, *[1 + best.index(parents[b][m]) if parents[b][m] >= 0 else 0 for m in best],
            *[-2] * padding]
        assert node_tokens[b].tolist() == [7 + b, *[b * M + m for m in best], *[0] * padding]


def eagle_2(distribution, root, K, depth, N):
    """EAGLE-2's tree as tokens and parents: grow `depth` levels, K best nodes at each, then rerank them all.
    `distribution(path)` lists the probabilities after a path's tokens; a candidate is a path and its score."""
    frontier, candidates = [((), np.float32(0))], []
    for _ in range(depth):
        level = []
        for path, score in frontier:
            probs = distribution(path)
            best = sorted((v for v in range(len(probs)) if probs[v] > 0), key=lambda v: (-probs[v], v))[:K]
            level += [(path + (v,), score + np.float32(math.log(probs[v]))) for v in best]
        frontier = sorted(level, key=lambda candidate: -candidate[1])[:K]  # stable: ties keep their order
        candidates += level
    chosen = sorted(range(len(candidates)), key=lambda m: (-candidates[m][1], m))[:N - 1]
    paths = [()] + [candidates[m][0] for m in sorted(chosen)]
    return [root, *[path[-1] for path in paths[1:]]], [-1, *[paths.index(path[:-1]) for path in paths[1:]]]


@pytest.mark.parametrize("V, K, depth, N", [(8, 3, 3, 10), (5, 7, 2, 40), (24, 4, 4, 12), (3, 2, 4, 30)])
@pytest.mark.parametrize("ties", [False, True])
def test_grows_eagle_2s_tree(backend, V, K, depth, N, ties):
    """Two requests, the second one level shallower and one child narrower, by the ops and in plain Python."""
    table = exact_probs(61, V, seed=V).double()
    if ties:
        table = (table * 8).round() / 8
    rows = table.tolist()

    def distribution(b, path):
        return rows[hash((b, *path)) % 61]

    root, widths, depths = [3, 4], [K, max(K - 1, 1)], [depth, depth - 1]
    scores = torch.zeros(2, 1, device=DEVICE)
    level_parents, paths, candidates = [[-1], [-1]], [[()], [()]], []
    for level in range(depth):
        exists = torch.tensor([level < d for d in depths], device=DEVICE).unsqueeze(1)
        probs = torch.tensor([[distribution(b, path) for path in paths[b]] for b in range(2)])
        F = probs.shape[1]
        tokens, child_scores, frontier, _ = expand_tree(
            probs.to(DEVICE, torch.float32), scores.masked_fill(~exists, -INF),
            torch.tensor(widths, dtype=torch.int32, device=DEVICE), num_children=K, backend=backend)
        offset = sum(c[0].shape[1] for c in candidates)
        parents = torch.tensor([[level_parents[b][f] for f in range(F) for _ in range(K)] for b in range(2)],
                               dtype=torch.int32, device=DEVICE)
        candidates.append((tokens.flatten(1), child_scores.flatten(1), parents))
        chosen = frontier.clamp(min=0)
        scores = child_scores.flatten(1).gather(1, chosen.long()).masked_fill(frontier < 0, -INF)
        level_parents = (chosen + offset).tolist()
        paths = [[paths[b][i // K] + (tokens[b].flatten()[i].item(),) for i in chosen[b].tolist()] for b in range(2)]
    tokens, scores, parents = (torch.cat(part, 1) for part in zip(*candidates))
    tokens, parents, _, status = select_tree(
        tokens, scores, parents, torch.tensor(root, device=DEVICE),
        torch.full((2,), N, dtype=torch.int32, device=DEVICE), num_nodes=N, backend=backend)
    assert not status.any()
    for b in range(2):
        expected = eagle_2(lambda path, b=b: distribution(b, path), root[b], widths[b], depths[b], N)
        padding = N - len(expected[0])
        assert tokens[b].tolist() == expected[0] + [0] * padding
        assert parents[b].tolist() == expected[1] + [-2] * padding
