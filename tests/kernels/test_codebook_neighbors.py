"""codebook_neighbors on codes small enough to check by hand, and its laws."""
import pytest
import torch

from specvis_kernels import codebook_neighbors
from specvis_kernels.codebook_neighbors import BLOCK
from tests.cases import DEVICE

LINE = [[0], [1], [3], [7]]  # from 3 it is 2 to 1, 3 to 0, 4 to 7
FAR = [[1, 0], [9, 0], [0, 1], [2, 1]]  # (1, 0) and (9, 0) are in one direction; (2, 1) is between them and (0, 1)


@pytest.mark.parametrize("codes, k, options, expected", [
    (LINE, 3, {}, [[1, 2, 3], [0, 2, 3], [1, 0, 3], [2, 1, 0]]),
    (LINE, 1, {}, [[1], [0], [1], [2]]),
    # Angles 0, 90, 45, 0 degrees and a zero row, at a right angle to all: ties go to the lower id.
    ([[1, 0], [0, 2], [3, 3], [9, 0], [0, 0]], 4, {"metric": "cosine"},
     [[3, 2, 1, 4], [2, 0, 3, 4], [0, 1, 3, 4], [0, 2, 1, 4], [0, 1, 2, 3]]),
    (FAR, 3, {}, [[2, 3, 1], [3, 0, 2], [0, 3, 1], [0, 2, 1]]),  # 2 = 2 < 64 | 50 < 64 < 82
    (FAR, 3, {"normalize": True}, [[1, 3, 2], [0, 3, 2], [3, 0, 1], [0, 1, 2]]),
    ([[0], [1], [-1], [1], [0]], 4, {}, [[4, 1, 2, 3], [3, 0, 4, 2], [0, 4, 1, 3], [1, 0, 4, 2], [0, 1, 2, 3]]),
    ([[0.1, 0.7]] * 4, 3, {"normalize": True}, [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]),
    ([[0, 0]] * 3, 2, {}, [[1, 2], [0, 2], [0, 1]]),
])
def test_by_hand(codes, k, options, expected):
    codes = torch.tensor(codes, dtype=torch.float32, device=DEVICE)
    assert codebook_neighbors(codes, k, **options).tolist() == expected


@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("normalize", [False, True])
def test_equals_a_full_sort_of_distances(metric, normalize):
    """Several blocks of rows, the last one ragged; codes in general position: nothing is near a tie."""
    V = 1500
    assert BLOCK // V < V and V % (BLOCK // V)
    codes = torch.randn(V, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(DEVICE)
    unit = codes / codes.norm(dim=1, keepdim=True)
    points = unit if normalize or metric == "cosine" else codes  # on the sphere both metrics have one order
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    distance.fill_diagonal_(torch.inf)
    assert torch.equal(codebook_neighbors(codes, 20, metric=metric, normalize=normalize).long(),
                       distance.argsort(-1)[:, :20])


def test_random_is_a_permutation_of_the_others():
    codes = torch.zeros(30, 2, device=DEVICE)
    table = codebook_neighbors(codes, 29, metric="random", seed=1)
    others = [[j for j in range(30) if j != i] for i in range(30)]
    assert table.long().sort(-1).values.tolist() == others and table.tolist() != others
    assert torch.equal(table, codebook_neighbors(codes, 29, metric="random", seed=1))
    assert not torch.equal(table, codebook_neighbors(codes, 29, metric="random", seed=2))


@pytest.mark.parametrize("V, dtype", [(65536, torch.uint16), (65537, torch.int32)])
def test_ids_fit(V, dtype):
    table = codebook_neighbors(torch.zeros(V, 1, device="meta"), 2)
    assert table.dtype == dtype and table.shape == (V, 2)


def test_a_parameter_is_a_codebook():
    table = codebook_neighbors(torch.nn.Parameter(torch.randn(5, 2, device=DEVICE)), 2)
    assert not table.requires_grad
