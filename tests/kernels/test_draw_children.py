"""draw_children on rows small enough to check by hand."""
import itertools
import math
from fractions import Fraction as F

import pytest
import torch

from specvis_kernels import INVALID_ROW, backends, draw_children, draw_tokens, verify_tree
from specvis_kernels._numbers import log
from specvis_kernels.noise import GUMBEL_STREAM, philox_words
from tests.cases import DEVICE, links, tensor

BACKENDS = backends("draw_children", DEVICE)
NAN, INF = float("nan"), float("inf")
LAST = 1 - 2.0**-24  # the largest uniform


def draws(backend, row, uniforms):
    """One node: its tokens, how many they are, its status."""
    out = draw_children(torch.tensor([[row]], device=DEVICE), torch.tensor([[uniforms]], device=DEVICE),
                        backend=backend)
    return tuple(a[0, 0].tolist() for a in out)


@pytest.mark.parametrize("total", [1.0, 0.5])
@pytest.mark.parametrize("uniforms, tokens", [
    # Sixteenths of the total: 8 4 2 2; each draw sees the rest.
    ([0.5, 0.5, 0.5, 0.5], [1, 0, 3, 2]),     # 8 of 16, 6 of 8 0 2 2, 2 of 0 0 2 2, 1 of 0 0 2 0
    ([0.499, 0.499, 0.499, 0.9], [0, 1, 2, 3]),
    ([0.75, 0.0, 0.67, 0.0], [2, 0, 3, 1]),   # 12 of 16, 0 of 14, 4.02 of 0 4 0 2
    ([0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]),
    ([LAST, LAST, LAST, LAST], [3, 2, 1, 0]),
    ([0.8], [2]),
])
def test_draws_by_hand(backend, uniforms, tokens, total):
    row = [total * p for p in (0.5, 0.25, 0.125, 0.125)]
    assert draws(backend, row, uniforms) == (tokens, len(tokens), 0)


@pytest.mark.parametrize("K", [2, 3, 5])
def test_once_nothing_is_left_there_are_no_more_children(backend, K):
    """Tokens without mass are no children, whatever the uniform."""
    assert draws(backend, [0.0, 0.5, 0.0, 0.5, 0.0], [LAST] * K) == ([3, 1] + [0] * (K - 2), 2, 0)
    assert draws(backend, [0.0, 0.5, 0.0, 0.5, 0.0], [0.0] * K) == ([1, 3] + [0] * (K - 2), 2, 0)


@pytest.mark.parametrize("uniform, token", [(NAN, 1), (-1.0, 1), (-INF, 1), (1.0, 3), (INF, 3)])
def test_no_uniform_leads_outside(backend, uniform, token):
    assert draws(backend, [0.0, 0.5, 0.0, 0.5, 0.0], [uniform, 0.5]) == ([token, 4 - token], 2, 0)


def test_the_smallest_mass_has_its_turn(backend):
    assert draws(backend, [2.0**-42, 1.0], [0.0, 0.0, 0.0]) == ([0, 1, 0], 2, 0)
    assert draws(backend, [2.0**-42, 1.0], [2.0**-42, LAST, 0.0]) == ([1, 0, 0], 2, 0)
    assert draws(backend, [2.0**-43, 1.0], [0.0, 0.0]) == ([1, 0], 1, 0)  # less than that is nothing


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("bad", [[NAN, 0.5, 0.5], [INF, 0, 0.0], [0.5, 0.5, -0.5], [0.5, 2.5, 0.5], 3 * [0.0],
                                 3 * [2.0**-43]])
def test_bad_rows_have_no_children(backend, bad, noise):
    """The nodes beside them do not change. With noise each of these has one child."""
    rows = tensor([[[0.5, 0.5, 0.0], bad], [bad, [0.0, 0.5, 2.0]]])
    if noise:
        rows[0, 0, 0] = rows[1, 1, 1] = 0.0
        out = noisy_draws(backend, rows, [1, 2], [[0, 0], [7, 8]], 2)
    else:
        out = draw_children(rows, torch.full((2, 2, 2), 0.5, device=DEVICE), backend=backend)
    n = 1 if noise else 2
    assert out.tokens.tolist() == [[[1, 0], [0, 0]], [[0, 0], [2, 0 if noise else 1]]]
    assert out.num_children.tolist() == [[n, 0], [0, n]] and out.status.tolist() == [[0, INVALID_ROW], [INVALID_ROW, 0]]


def order_probabilities(masses, K):
    """The probability of every order of K children, drawn one after another from the rest."""
    probabilities = {}
    for order in itertools.permutations([v for v, mass in enumerate(masses) if mass], K):
        probability, remaining = F(1), F(sum(masses))
        for v in order:
            probability, remaining = probability * F(masses[v]) / remaining, remaining - F(masses[v])
        probabilities[order] = probability
    return probabilities


@pytest.mark.parametrize("masses, K, cells", [
    ([1, 1, 0, 2], 3, (4, 6, 2)),        # the rest has mass 4; 3 or 2; 2 or 1
    ([4, 1, 0, 1], 2, (6, 2 * 5)),
])
def test_every_order_has_its_probability(backend, masses, K, cells):
    """The uniforms are a grid on which every draw falls evenly."""
    grid = torch.cartesian_prod(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in cells]).float()
    row = torch.tensor(masses) / sum(masses)
    tokens, num_children, _ = draw_children(row.to(DEVICE).expand(len(grid), 1, -1), grid.unsqueeze(1).to(DEVICE),
                                            backend=backend)
    assert num_children.eq(K).all()
    orders, counts = tokens[:, 0].unique(dim=0, return_counts=True)
    got = {tuple(order): F(n, len(grid)) for order, n in zip(orders.tolist(), counts.tolist())}
    assert got == order_probabilities(masses, K)


def test_draws_that_fall_between_two_blocks(backend, triton_takes):
    """Quarters: exactly half of the mass is before token 128, which has none."""
    triton_takes(V=64)
    row = torch.zeros(260)
    row[[100, 127, 130, 259]] = 0.25
    assert draws(backend, row.tolist(), [0.5, 0.5, 0.5, 0.5, 0.5]) == ([130, 127, 259, 100, 0], 4, 0)
    assert draws(backend, row.tolist(), [0.499, 0.0, LAST, LAST]) == ([127, 100, 259, 130], 4, 0)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("V, K", [(1, 1), (5, 5), (33, 40), (200, 200)])
def test_all_of_a_row(backend, V, K, noise, triton_takes):
    triton_takes(V=32)
    g = torch.Generator().manual_seed(V)
    rows = torch.rand(1, 2, V, generator=g).add(0.1).to(DEVICE) / V
    draws = {"uniforms": torch.rand(1, 2, K, generator=g).to(DEVICE)}
    if noise:
        draws = {"seeds": tensor([9], torch.int64), "positions": tensor([[0, 1]], torch.int64), "num_children": K}
    tokens, num_children, _ = draw_children(rows, **draws, backend=backend)
    assert num_children.eq(V).all() and tokens[..., V:].eq(0).all()
    assert tokens[..., :V].sort().values.eq(torch.arange(V, device=DEVICE)).all()
    assert tokens.equal(draw_children(rows, **draws, backend="oracle").tokens)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("oracle", "triton")])
@pytest.mark.parametrize("V, K", [(16384, 5), (16388, 70), (131072, 5), (140001, 70)])
def test_children_that_stand_close_together(backend, V, K):
    """The sums of a row that one warp searches are of 16 ids, of 32, of 128 and of 256; and few of these have mass."""
    g = torch.Generator().manual_seed(K)
    rows = torch.zeros(1, 2, V)
    for row, first in zip(rows[0], (V // 3, V - 90)):
        row[first:first + 80] = torch.rand(80, generator=g) / 80
        row[[0, V - 1]] = 1 / 64
    uniforms = torch.rand(1, 2, K, generator=g)
    got, expected = (draw_children(rows.to(DEVICE), uniforms.to(DEVICE), backend=b) for b in (backend, "oracle"))
    assert all(a.equal(b) for a, b in zip(got, expected)) and expected.num_children.eq(K).all()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in backends("verify_tree", DEVICE)])
def test_children_that_are_not_there_leave_verification_exact(backend):
    """P is a quarter each, Q half of tokens 1 and 2: of three children the third, token 0, does not exist. A child is
    accepted with probability (1/4) / (1/2), the other one, with Q = 1 and nothing left of P, never; then tokens 0 and 3
    are equally likely."""
    first, accept, end = torch.cartesian_prod(*[torch.tensor([0.25, 0.75])] * 3).to(DEVICE).unbind(1)
    B, low = len(first), torch.full_like(first, 0.25)
    draft = torch.tensor([0.0, 0.5, 0.5, 0.0], device=DEVICE).expand(B, 1, -1)
    children, num_children, _ = draw_children(draft, torch.stack([first, low, low], 1).unsqueeze(1), backend=backend)
    assert num_children.eq(2).all()
    tokens = torch.cat([torch.zeros_like(children[:, 0, :1]), children[:, 0]], 1)
    accepted_nodes, _, next_token, _, status = verify_tree(
        torch.full((B, 4, 4), 0.25, device=DEVICE), tokens, *links(torch.tensor([[-1, 0, 0, 0]] * B)),
        torch.stack([end, accept, low, low], 1), draft_probs=draft,
        draft_row=torch.zeros(B, 4, dtype=torch.int32, device=DEVICE), max_depth=1, backend=backend)
    drafted = tokens.gather(1, accepted_nodes.clamp(min=0).long())[:, 0]
    emitted = torch.where(accepted_nodes[:, 0] < 0, next_token, drafted)
    assert emitted.bincount().tolist() == [B // 4] * 4 and not status.any()


def noisy_draws(backend, rows, seeds, positions, K):
    """rows (B, F, V), seeds (B), positions (B, F) as lists or tensors."""
    rows, seeds, positions = (torch.as_tensor(a).to(DEVICE) for a in (rows, seeds, positions))
    return draw_children(rows, seeds=seeds, positions=positions, num_children=K, backend=backend)


def scores_by_hand(row, seed, position):
    """log p + g in Python's floats, for the ids that have mass."""
    words = philox_words(torch.tensor([seed]), torch.tensor([[position]]), len(row), GUMBEL_STREAM)[0, 0].tolist()
    uniforms = [(word // 2 + 0.5) / 2**31 for word in words]
    return {v: math.log(p) - math.log(-math.log1p(-u)) for v, (p, u) in enumerate(zip(row, uniforms)) if p >= 2**-42}


@pytest.mark.parametrize("K", [1, 3, 9])
def test_with_noise_the_children_are_the_highest_scores(backend, K):
    g = torch.Generator().manual_seed(K)
    rows = torch.randn(2, 3, 7, generator=g).softmax(-1)
    rows[1, 2, 2:] = 0
    rows[0, 0] *= 0.01  # the total does not matter
    seeds, positions = [5, -3], [[0, 1, 2], [575, 2**31 + 7, 9]]
    tokens, num_children, status = noisy_draws(backend, rows, seeds, positions, K)
    for b, f in itertools.product(range(2), range(3)):
        scores = scores_by_hand(rows[b, f].tolist(), seeds[b], positions[b][f])
        order = sorted(scores, key=scores.get, reverse=True)[:K]
        assert tokens[b, f].tolist() == order + [0] * (K - len(order)) and num_children[b, f] == len(order)
    assert not status.any()


def test_with_noise_a_token_without_mass_is_no_child(backend):
    tokens, num_children, status = noisy_draws(backend, [[[0.0, 2.0**-42, 2.0**-43, 1.0, 0.0]]] * 2, [3, 4],
                                               [[0], [1]], 4)
    assert tokens.tolist() == [[[3, 1, 0, 0]]] * 2 and num_children.eq(2).all() and not status.any()


def test_with_noise_the_lower_of_two_equal_scores_comes_first(backend):
    """Under seed 1 at position 346 the noise of ids 61 and 296 is equal, as a search has found."""
    row = torch.zeros(1, 1, 300)
    row[..., [61, 296]] = 0.5
    assert noisy_draws(backend, row, [1], [[346]], 1).tokens.tolist() == [[[61]]]
    assert noisy_draws(backend, row, [1], [[346]], 2).tokens.tolist() == [[[61, 296]]]
    row[..., 296] += 2.0**-10
    assert noisy_draws(backend, row, [1], [[346]], 2).tokens.tolist() == [[[296, 61]]]


def test_the_seed_and_the_position_decide_and_nothing_else(backend):
    rows = torch.full((1, 1, 50), 0.02)
    alone = noisy_draws(backend, rows, [-8], [[41]], 5).tokens[0, 0].tolist()
    among = noisy_draws(backend, rows.expand(2, 3, -1), [1, -8], [[41, 41, 41], [40, 41 + 2**32, 41]], 5).tokens
    assert [list(map(int, node)) == alone for node in among.flatten(0, 1)] == [False, False, False, False, True, True]


def test_the_first_child_is_what_the_target_draws(backend, triton_takes):
    """Bit for bit where the target's logits are the logarithms that draw_children takes, whatever the row's total."""
    triton_takes(V=16)
    B, F, V = (2, 4, 29) if backend == "triton" and DEVICE == "cpu" else (3, 30, 53)
    g = torch.Generator().manual_seed(6)
    rows = torch.randn(B, F, V, generator=g).mul(2).softmax(-1).to(DEVICE)
    rows[:, ::2, ::3] = 0
    seeds = torch.arange(B, device=DEVICE)
    positions = torch.arange(B * F, device=DEVICE).view(B, F)
    logits = torch.where(rows > 0, log(torch.where(rows > 0, rows, 1.0)), -INF)
    one, off = torch.ones(B, device=DEVICE), torch.zeros(B, dtype=torch.int32, device=DEVICE)
    drawn = draw_tokens(logits, None, one, one, off, one, seeds, positions)
    children = noisy_draws(backend, rows, seeds, positions, 4).tokens
    assert children[..., 0].equal(drawn.tokens) and not drawn.status.any()
    shifted = noisy_draws(backend, rows, seeds, positions + 1, 4).tokens  # other noise
    assert not shifted[..., 0].equal(drawn.tokens)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in ("oracle", DEVICE)])
def test_with_noise_every_order_has_its_probability(backend):
    """Chi-square over seeds and positions. Rows of another law, and children that are drawn in another order, fail.
    Emulated and interpreted kernels take minutes for this many rows; they give the oracle's children, bit for bit."""
    masses, K, n = [1, 4, 0, 2, 1], 3, 200 * 200
    row = (torch.tensor(masses) / sum(masses)).expand(200, 200, -1)
    tokens = noisy_draws(backend, row, torch.arange(200), torch.arange(200).expand(200, 200), K).tokens
    orders, counts = tokens.flatten(0, 1).unique(dim=0, return_counts=True)
    counts = {tuple(order): n for order, n in zip(orders.tolist(), counts.tolist())}

    def z_of(expected):
        statistic = sum((counts.get(order, 0) - n * p) ** 2 / (n * p) for order, p in expected.items())
        return (statistic - (len(expected) - 1)) / (2 * (len(expected) - 1)) ** 0.5

    expected = order_probabilities(masses, K)
    assert len(expected) == 24 and counts.keys() <= expected.keys()
    assert z_of(expected) < 4
    assert z_of({order[::-1]: p for order, p in expected.items()}) > 20
    assert z_of(order_probabilities([1, 4, 0, 2, 1.5], K)) > 5
