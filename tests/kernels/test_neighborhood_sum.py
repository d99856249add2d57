"""neighborhood_sum on numbers small enough to check by hand, and what its cutoffs mean."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, INVALID_TREE, neighborhood_sum
from tests.cases import DEVICE, backends_but, neighbor_table

NAN, INF = float("nan"), float("inf")


def one(backend, row, token, neighbors, delta, dtype=torch.int32, **options):
    """The op on one row; `neighbors` is the whole table."""
    relaxed_mass, num_neighbors, status = neighborhood_sum(
        torch.tensor([row], device=DEVICE), torch.tensor([token], device=DEVICE),
        torch.tensor(neighbors, device=DEVICE).to(dtype), torch.tensor([delta], device=DEVICE), **options,
        backend=backend)
    return relaxed_mass.item(), num_neighbors.item(), status.item()


@pytest.mark.parametrize("cutoff, delta, relaxed_mass, num_neighbors", [
    # The token has 1/2; its neighbors, nearest first, 1/4, 1/8, 1/8: running sums 1/4, 3/8, 1/2.
    ("tvd", 0.0, 0.5, 0),
    ("tvd", 0.249, 0.5, 0),
    ("tvd", 0.25, 0.75, 1),      # a sum equal to delta is kept
    ("tvd", 0.374, 0.75, 1),
    ("tvd", 0.375, 0.875, 2),
    ("tvd", 1.0, 1.0, 3),
    ("tvd", INF, 1.0, 3),
    ("tvd", -0.5, 0.5, 0),
    ("tvd", NAN, 0.5, 0),
    ("ratio", 0.49, 0.5, 0),     # 0.49 * 1/2 < 1/4
    ("ratio", 0.5, 0.75, 1),     # 1/2 * 1/2 = 1/4
    ("ratio", 0.74, 0.75, 1),
    ("ratio", 0.75, 0.875, 2),   # 3/4 * 1/2 = 3/8
    ("ratio", 1.0, 1.0, 3),
    ("ratio", -1.0, 0.5, 0),
    # S = 1/4: h = 5/8,   [1/4 ln 2 + 1/2 ln(4/5) + 3/4 ln(6/5)] / 2    = (0.17329 - 0.11157 + 0.13674) / 2
    # S = 3/8: h = 11/16, [3/8 ln 2 + 1/2 ln(8/11) + 7/8 ln(14/11)] / 2 = (0.25993 - 0.15923 + 0.21102) / 2
    # S = 1/2: h = 3/4,   [1/2 ln 2 + 1/2 ln(2/3) + 1 ln(4/3)] / 2      = (0.34657 - 0.20273 + 0.28768) / 2
    # which are 0.09923, 0.15586 and 0.21576.
    ("jsd", 0.0992, 0.5, 0),
    ("jsd", 0.0993, 0.75, 1),
    ("jsd", 0.1558, 0.75, 1),
    ("jsd", 0.1559, 0.875, 2),
    ("jsd", 0.2157, 0.875, 2),
    ("jsd", 0.2158, 1.0, 3),
    ("jsd", NAN, 0.5, 0),
])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_cutoffs_by_hand(backend, cutoff, delta, relaxed_mass, num_neighbors, dtype):
    table = [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    got = one(backend, [0.5, 0.25, 0.125, 0.125], 0, table, delta, dtype, cutoff=cutoff)
    assert got == (relaxed_mass, num_neighbors, 0)


@pytest.mark.parametrize("cutoff, delta, relaxed_mass, num_neighbors", [
    ("tvd", 0.0, 0.5, 1),    # the neighbor of probability 0 takes a place and no budget; 1/4 does not fit
    ("ratio", 0.0, 0.5, 1),
    ("jsd", 0.0, 0.5, 1),
    ("tvd", 0.25, 0.75, 2),
])
def test_a_neighbor_without_probability_takes_a_place(backend, cutoff, delta, relaxed_mass, num_neighbors):
    table = [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert one(backend, [0.5, 0.0, 0.25, 0.25], 0, table, delta, cutoff=cutoff) == (relaxed_mass, num_neighbors, 0)


@pytest.mark.parametrize("cutoff, delta, relaxed_mass, num_neighbors", [
    ("tvd", 0.25, 0.25, 1),
    ("ratio", 5.0, 0.0, 0),  # 5 * 0 < 1/4
    ("jsd", 0.17, 0.0, 0),   # JSD(1/4, 0) = 1/4 ln 2 = 0.1733
    ("jsd", 0.18, 0.25, 1),
])
def test_a_token_without_probability(backend, cutoff, delta, relaxed_mass, num_neighbors):
    got = one(backend, [0.0, 0.25, 0.75], 0, [[1, 2], [0, 2], [0, 1]], delta, cutoff=cutoff)
    assert got == (relaxed_mass, num_neighbors, 0)


@pytest.mark.parametrize("token, relaxed_mass, num_neighbors", [
    (0, 0.25, 0),   # below the codebook: no neighbors
    (1, 0.125, 0),
    (2, 0.375, 2),  # code 0, neighbors codes 1 and 2, ids 3 and 4: 1/4 + 1/8 + 0
    (3, 0.375, 2),  # code 1: codes 0 and 2
    (4, 0.375, 2),  # code 2: codes 0 and 1
    (5, 0.25, 0),   # above
])
def test_an_offset_table(backend, token, relaxed_mass, num_neighbors):
    row = [0.25, 0.125, 0.25, 0.125, 0.0, 0.25]
    assert one(backend, row, token, [[1, 2], [0, 2], [0, 1]], 1.0, offset=2) == (relaxed_mass, num_neighbors, 0)


@pytest.mark.parametrize("strange", [100, -3, 2**31 - 1, -2**31])
def test_an_id_outside_the_vocabulary_adds_nothing(backend, strange):
    table = [[strange, 1], [0, 2], [0, 1]]
    assert one(backend, [0.5, 0.25, 0.25], 0, table, 1.0) == (0.75, 2, 0)


def test_the_first_id_outside_the_vocabulary_is_not_the_next_row(backend):
    relaxed_mass, num_neighbors, _ = neighborhood_sum(
        torch.tensor([[0.5, 0.25, 0.25]] * 2, device=DEVICE), torch.tensor([0, 0], device=DEVICE),
        torch.tensor([[3, 1], [0, 2], [0, 1]], dtype=torch.int32, device=DEVICE),
        torch.ones(2, device=DEVICE), backend=backend)
    assert relaxed_mass.tolist() == [0.75, 0.75] and num_neighbors.tolist() == [2, 2]


@pytest.mark.parametrize("row, token, status", [
    ([0.5, NAN, 0.5], 0, INVALID_ROW),
    ([0.5, INF, 0.5], 0, INVALID_ROW),
    ([0.5, -INF, 0.5], 0, INVALID_ROW),
    ([0.5, -0.125, 0.5], 0, INVALID_ROW),
    ([0.5, 2.5, 0.5], 0, INVALID_ROW),   # no rounding of a probability
    ([0.0, 0.0, 0.0], 0, INVALID_ROW),
    ([2.0**-49, 0.0, 0.0], 0, INVALID_ROW),  # nothing left in fixed point
    ([0.5, 0.25, 0.25], -1, INVALID_TREE),
    ([0.5, 0.25, 0.25], 3, INVALID_TREE),
    ([0.5, 0.25, 0.25], 2**62, INVALID_TREE),
    ([0.5, 0.25, 0.25], -2**63, INVALID_TREE),
    ([0.5, 0.25, NAN], 3, INVALID_ROW | INVALID_TREE),
])
def test_bad_rows_and_tokens_are_reported(backend, row, token, status):
    assert one(backend, row, token, [[1, 2], [0, 2], [0, 1]], 1.0) == (0.0, 0, status)


@pytest.mark.parametrize("V", [1, 2, 7, 38])
def test_every_entry_of_a_row_is_looked_at(backend, V):
    """It reads no other row, wherever in memory a row begins and ends: every second one has a NaN."""
    probs = torch.full((2 * V, V), 2.0**-6)
    probs[::2].fill_diagonal_(NAN)
    zeros = torch.zeros(2 * V, dtype=torch.int64)
    _, _, status = neighborhood_sum(
        probs.to(DEVICE), zeros.to(DEVICE), zeros[:V].unsqueeze(1).to(DEVICE, torch.int32),
        zeros.float().to(DEVICE), backend=backend)
    assert status.tolist() == [INVALID_ROW, 0] * V


@pytest.mark.parametrize("backend", backends_but("neighborhood_sum", "triton"))
def test_a_row_for_more_blocks_than_a_cluster_has(backend):
    V = 70000
    probs = torch.full((2, V), 2.0**-17, device=DEVICE)
    probs[1, V - 1] = NAN
    table = torch.tensor([[0, 40000, 69999]], device=DEVICE).expand(V, 3).int()
    out = neighborhood_sum(probs, torch.tensor([69998, 69998], device=DEVICE), table,
                           torch.full((2,), 2.0**-16, device=DEVICE), backend=backend)
    assert out.relaxed_mass.tolist() == [3 * 2.0**-17, 0] and out.num_neighbors.tolist() == [2, 0]
    assert out.status.tolist() == [0, INVALID_ROW]


def test_narrow_tables_hold_large_ids(backend):
    V = 40000
    row = torch.zeros(1, V)
    row[0, 39999], row[0, 32768] = 0.75, 0.25
    table = torch.zeros(V, 1, dtype=torch.int64)
    table[39999] = 32768
    relaxed_mass, num_neighbors, _ = neighborhood_sum(
        row.to(DEVICE), torch.tensor([39999], device=DEVICE), table.to(DEVICE, torch.uint16),
        torch.tensor([0.25], device=DEVICE), backend=backend)
    assert relaxed_mass.item() == 1.0 and num_neighbors.item() == 1


def test_moving_the_kept_mass_is_that_far_in_total_variation(backend):
    """The bound of `tvd`: the row with the kept neighbors' mass on the token differs from the row by S."""
    g = torch.Generator().manual_seed(0)
    V, k, R = 24, 12, 8
    counts = torch.randint(1, 2**12, (R, V), generator=g).double()
    probs = (counts / 2**18).float()                  # exact
    table, tokens = neighbor_table(V, k), torch.arange(R, device=DEVICE)
    delta = torch.linspace(0, 0.1, R)
    relaxed_mass, num_neighbors, _ = neighborhood_sum(
        probs.to(DEVICE), tokens, table, delta.to(DEVICE), backend=backend)
    assert num_neighbors.unique().numel() > 2
    for r in range(R):
        moved = probs[r].double().clone()
        neighbors = table[r, :num_neighbors[r]].long().cpu()
        moved[r] += moved[neighbors].sum()
        moved[neighbors] = 0
        assert moved[r] == relaxed_mass[r].item()
        distance = (moved - probs[r].double()).abs().sum() / 2
        assert distance == relaxed_mass[r].item() - probs[r, r].item() and distance <= delta[r]
        one_more = probs[r, table[r, num_neighbors[r].item()].long().cpu()] + distance
        assert one_more > delta[r]


def test_jsd_is_the_divergence_it_is_named_after():
    """S and r alone decide: the closed form equals the divergence of the two whole rows."""
    def divergence(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)

    row, moved = [0.125, 0.25, 0.375, 0.25], [0.75, 0.0, 0.0, 0.25]  # 1/4 + 3/8 onto 1/8
    middle = [(a + b) / 2 for a, b in zip(row, moved)]
    distance = (divergence(row, middle) + divergence(moved, middle)) / 2
    table = [[1, 2], [0, 2], [0, 1]]
    assert one("oracle", row, 0, table, distance - 1e-6, cutoff="jsd")[1] == 1
    assert one("oracle", row, 0, table, distance + 1e-6, cutoff="jsd")[1] == 2
