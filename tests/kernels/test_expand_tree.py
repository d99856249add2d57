"""expand_tree on numbers small enough to check by hand, and its own laws."""
import math

import numpy as np
import pytest
import torch

from specvis_kernels import INVALID_ROW, expand_tree
from tests.cases import DEVICE, backends_but, exact_probs

INF, NAN = math.inf, math.nan


def log(p):
    return float(np.float32(math.log(p)))


def one_level(rows, scores=(0.0,), width=3, K=3, backend=None):
    """Tokens and scores (lists of lists), frontier and status (lists) of one request."""
    out = expand_tree(torch.tensor([rows], dtype=torch.float32, device=DEVICE),
                      torch.tensor([scores], dtype=torch.float32, device=DEVICE),
                      torch.tensor([width], dtype=torch.int32, device=DEVICE), num_children=K, backend=backend)
    return [a[0].tolist() for a in out]


def test_the_root_by_hand(backend):
    """ln 1/2, ln 1/4, ln 1/8; of the two eighths the lower id."""
    assert one_level([[1/8, 1/2, 1/8, 1/4]], backend=backend) == [
        [[1, 3, 0]], [[log(1/2), log(1/4), log(1/8)]], [0, 1, 2], [0]]


def test_two_nodes_by_hand(backend):
    """Children 0..2 are of node 0, 3..5 of node 1; scores are ln of 1/2, 1/4, 1/8 and 3/8, 1/8, nothing. The next level
    is 1/2, 3/8, 1/4."""
    tokens, scores, frontier, status = one_level(
        [[1/2, 1/4, 1/8, 1/8], [0, 0, 1/4, 3/4]], [0.0, log(1/2)], backend=backend)
    assert tokens == [[0, 1, 2], [3, 2, 0]]
    half = np.float32(log(1/2))
    assert scores == [[log(1/2), log(1/4), log(1/8)], [half + np.float32(log(3/4)), half + np.float32(log(1/4)), -INF]]
    assert frontier == [0, 3, 1] and status == [0, 0]


def test_ties_between_nodes_go_to_the_smaller_index(backend):
    """2 ln 1/2 rounds to exactly ln 1/4: children 1, 3 and 4 tie for two slots."""
    frontier = one_level([[1/2, 1/4, 1/4, 0], [1/2, 1/2, 0, 0]], [0.0, log(1/2)], backend=backend)[2]
    assert frontier == [0, 1, 2]
    frontier = one_level([[1/2, 1/4, 1/8, 1/8], [1/2, 1/2, 0, 0]], [0.0, log(1/2)], backend=backend)[2]
    assert frontier == [0, 1, 3]


@pytest.mark.parametrize("width, num_kept", [(3, 3), (2, 2), (1, 1), (0, 1), (-7, 1), (4, 3), (2**31 - 1, 3)])
def test_width_is_clamped(backend, width, num_kept):
    tokens, scores, frontier, _ = one_level([[1/8, 1/2, 1/8, 1/4]], width=width, backend=backend)
    assert tokens == [[1, 3, 0][:num_kept] + [0] * (3 - num_kept)]
    assert scores == [[log(1/2), log(1/4), log(1/8)][:num_kept] + [-INF] * (3 - num_kept)]
    assert frontier == [0, 1, 2][:num_kept] + [-1] * (3 - num_kept)


@pytest.mark.parametrize("row, K, children", [
    ([0, 0, 1, 0], 3, [2]),                        # one-hot: the others have probability 0
    ([1/4, 1/4, 1/4, 1/4], 3, [0, 1, 2]),          # all tie
    ([1/4, 1/4, 1/4, 1/4], 6, [0, 1, 2, 3]),       # K > V
    ([1], 2, [0]),                                 # one token
    ([0.0, -0.0, 1/2, 1/2], 4, [2, 3]),            # no zero has a child
    ([1e-40, 1/2, 1/2, 0], 4, [1, 2, 0]),          # a subnormal probability does
])
def test_only_tokens_of_positive_probability_are_children(backend, row, K, children):
    tokens, scores, frontier, status = one_level([row], width=K, K=K, backend=backend)
    padding = K - len(children)
    assert tokens == [children + [0] * padding] and status == [0]
    assert scores == [[log(np.float32(row[v])) for v in children] + [-INF] * padding]
    assert frontier == [*range(len(children)), *[-1] * padding]


@pytest.mark.parametrize("row", [
    [1/2, NAN, 1/4, 1/4], [-NAN, 1/2, 1/4, 1/4], [INF, 0, 0, 0], [-INF, 1, 0, 0], [1, 1/2, -1/2, 0],
    [0, 0, 0, 0], [3, 0, 0, 0], [2.0**-49] * 4,
])
def test_an_invalid_row_has_no_children(backend, row):
    valid = [1/2, 1/2, 0, 0]
    tokens, scores, frontier, status = one_level([valid, row, valid], [0.0, 0.0, -1.0], backend=backend)
    assert status == [0, INVALID_ROW, 0]
    assert tokens[1] == [0, 0, 0] and scores[1] == [-INF] * 3
    assert frontier == [0, 1, 6]
    assert one_level([row], backend=backend)[2:] == [[-1, -1, -1], [INVALID_ROW]]


@pytest.mark.parametrize("score", [-INF, NAN])
def test_an_unused_node_is_not_looked_at(backend, score):
    tokens, scores, frontier, status = one_level([[NAN] * 4, [1/2, 1/2, 0, 0]], [score, 0.0], backend=backend)
    assert status == [0, 0] and tokens[0] == [0, 0, 0] and scores[0] == [-INF] * 3 and frontier == [3, 4, -1]


def test_no_child_scores_above_its_parent(backend):
    """Not even where rounding made a probability larger than 1; and 1 itself costs nothing."""
    above = float(np.nextafter(np.float32(1), np.float32(2)))
    scores = one_level([[above, 0], [1, 0], [1 - 2**-24, 2**-24]], [0.0, -2.0, -2.0**30], backend=backend)[1]
    assert [s[0] for s in scores] == [0.0, -2.0, -2.0**30]


def test_the_log_is_taken_in_float64(backend):
    """The float32 logarithm of the first two probabilities is often one unit off."""
    row = [469/1024, 457/1024, 98/1024]
    assert one_level([row], backend=backend)[1] == [[log(p) for p in row]]


def test_the_lowest_score_has_children_of_its_own_score(backend):
    """So far down every log-probability is lost in the rounding."""
    lowest = float(np.finfo(np.float32).min)
    rows = [[0, 1/2, 0], [0, 2.0**-40, 1]]
    tokens, scores, frontier, _ = one_level(rows, [0.0, lowest], backend=backend)
    assert tokens == [[1, 0, 0], [2, 1, 0]] and scores[1] == [lowest, lowest, -INF] and frontier == [0, 3, 4]


@pytest.mark.parametrize("V, max_chunks", [(50, 4), (50, 16), (64, 64), (9000, 4096)])
def test_the_best_may_stand_anywhere(backend, V, max_chunks, triton_takes):
    """All in one of the chunks that a program divides its row into, in either order, or in one each."""
    triton_takes(V=max_chunks)
    K = 7
    together = [v for v in range(3, V, max_chunks)][:K]
    ids = torch.tensor([together + [v for v in range(V) if v not in together][:K - len(together)],
                        list(range(K)), list(range(V - K, V))])
    values = torch.tensor([[7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1]]) / 64
    probs = torch.full((3, V), 2.0**-20).scatter(1, ids, values)
    order = [ids[0].tolist(), ids[1].flip(0).tolist(), ids[2].tolist()]
    for width in (K, 2):
        tokens, _, _, status = one_level(probs.tolist(), [0.0] * 3, width=width, K=K, backend=backend)
        assert [row[:width] for row in tokens] == [row[:width] for row in order] and status == [0, 0, 0]


@pytest.mark.parametrize("backend", backends_but("expand_tree", "triton"))
@pytest.mark.parametrize("V, ties", [(600, 512), (600, 513), (2100, 560)])
def test_many_children_of_one_probability(backend, V, ties):
    """As many children as a block of the CUDA kernel ranks at once, one more, and its last threads. (Slow in
    Triton.)"""
    row = [0.0] * (V - ties) + [2.0**-10] * ties
    tokens, scores, frontier, status = one_level([row], width=V, K=V, backend=backend)
    assert tokens == [[*range(V - ties, V), *[0] * (V - ties)]] and status == [0]
    assert frontier == [*range(ties), *[-1] * (V - ties)]


def test_equals_a_sort_of_every_row(backend):
    """Widths and unused nodes differ in the batch; probabilities are few, so ties are many."""
    B, F, V, K = 3, 4, 33, 5
    probs = exact_probs(B * F, V).view(B, F, V)
    probs = (probs * 32).round() / 32
    probs[..., 0] += (probs.sum(-1) == 0)
    scores = [[0.0, -1.0, -1.0, -2.0], [-1.0, -INF, -0.5, -INF], [-INF] * 4]
    width = [5, 2, 3]
    out = expand_tree(probs, torch.tensor(scores, device=DEVICE),
                      torch.tensor(width, dtype=torch.int32, device=DEVICE), num_children=K, backend=backend)
    tokens, child_scores, frontier, status = [a.tolist() for a in out]
    assert not out.status.any()
    for b in range(B):
        level = []
        for f in range(F):
            row = probs[b, f].tolist()
            best = sorted((v for v in range(V) if row[v] > 0), key=lambda v: (-row[v], v))[:width[b]]
            best = best if scores[b][f] > -INF else []
            expected = [float(np.float32(scores[b][f]) + np.float32(log(row[v]))) for v in best]
            padding = K - len(best)
            assert tokens[b][f] == best + [0] * padding and child_scores[b][f] == expected + [-INF] * padding
            level += child_scores[b][f]
        best = sorted((i for i in range(F * K) if level[i] > -INF), key=lambda i: (-level[i], i))[:width[b]]
        assert frontier[b] == best + [-1] * (K - len(best))


@pytest.mark.parametrize("backend", backends_but("expand_tree", "oracle", "triton"))
@pytest.mark.parametrize("F, V, K", [(8, 40, 3), (9, 40, 12), (17, 33, 40), (2, 16384, 33), (2, 16388, 9)])
def test_equals_the_oracle(backend, F, V, K):
    """Blocks of a cluster with one, two or three nodes; the longest row that stays in registers, and a longer one."""
    g = torch.Generator().manual_seed(V)
    probs = torch.randn(2, F, V, generator=g).mul(2).softmax(-1).bfloat16().float().to(DEVICE)  # with ties
    probs[0, F - 1, V - 1] = NAN
    scores = torch.randn(2, F, generator=g).to(DEVICE)
    width = torch.tensor([K, K - 1], dtype=torch.int32, device=DEVICE)
    got, expected = (expand_tree(probs, scores, width, num_children=K, backend=b) for b in (backend, "oracle"))
    assert all(a.equal(b) for a, b in zip(got, expected)) and (expected.status != 0).sum() == 1


def test_valid_rows_after_invalid_ones(backend):
    """A block of the CUDA kernel takes rows 0 and 8, and so on; some of its warps may be at the second already."""
    probs = torch.full((1, 16, 512), 1 / 512, device=DEVICE)
    probs[0, :8, 0] = NAN
    out = expand_tree(probs, torch.zeros(1, 16, device=DEVICE), torch.tensor([3], dtype=torch.int32, device=DEVICE),
                      num_children=3, backend=backend)
    assert out.status[0].tolist() == [INVALID_ROW] * 8 + [0] * 8
    assert out.tokens[0].tolist() == [[0, 0, 0]] * 8 + [[0, 1, 2]] * 8
