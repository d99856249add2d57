"""COOL-SD's equations (arXiv:2601.09212) against exact enumeration, and against what verify_tree does."""
import itertools
import math

import pytest
import torch

from specvis.decoding import bounds
from specvis.decoding.bounds import omega_schedule, optimal_residual, scaled, vanilla_residual
from specvis_kernels import backends, neighborhood_sum, verify_tree
from tests.cases import DEVICE
from tests.decoding.theory import (
    expected_length,
    neighborhood,
    output_law,
    relaxed_residual,
    target_law,
    total_variation,
)

V, L, DRAWS = 5, 3, 40_000
BACKENDS = [backend for backend in backends("verify_tree", DEVICE) if backend in ("cpu", "cuda", "oracle")]
TABLE = torch.tensor([[1, 2, 4], [0, 3, 2], [4, 0, 1], [1, 4, 0], [2, 3, 1]])  # (V, 3) nearest first
SCHEDULES = {
    "lossless": [1.0] * 4, "uniform": [1.5] * 4, "strict": [0.6] * 4, "cool": omega_schedule(1.5, 4, 0.7),
    "wild": [4.0, 0.3, 2.0, 0.1], "all": [1e9] * 4,
}
CUTOFFS = [("tvd", 0.0), ("tvd", 0.15), ("tvd", 0.5), ("ratio", 1.0), ("jsd", 0.1)]


def rows(*shape, seed):
    g = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(*shape, generator=g, dtype=torch.float64)).softmax(-1)


def chain(seed, length=L, size=V):
    """A target with a row for the bonus token and a draft that is half like it."""
    P = [rows(*(size,) * (i + 1), seed=seed + i) for i in range(length + 1)]
    Q = [(p + rows(*p.shape, seed=seed + 100 + i)) / 2 for i, p in enumerate(P)]
    return P, Q


def rules():
    """(acceptance functions, residual) of every kind."""
    for omegas in SCHEDULES.values():
        for residual in (optimal_residual, vanilla_residual):
            yield [scaled(omega) for omega in omegas[:L]], residual
    for cutoff, delta in CUTOFFS:
        for residual in (optimal_residual, relaxed_residual(TABLE, delta, cutoff)):
            yield [neighborhood(TABLE, delta, cutoff)] * L, residual


def test_two_tokens_by_hand():
    """P = (1/4, 3/4), Q = (3/4, 1/4), omega 2: f = (2/3, 1), beta_2 = 3/4, beta_1 = 1/2."""
    P, Q = torch.tensor([0.25, 0.75]).double(), torch.tensor([0.75, 0.25]).double()
    f = scaled(2.0)(P, Q)
    assert f.tolist() == pytest.approx([2 / 3, 1])
    G = optimal_residual(P, Q, f)
    assert G.tolist() == [0, 1]
    assert bounds.level_law(P, Q, f, G).tolist() == pytest.approx([0.5, 0.5])
    assert bounds.level_tv(P, Q, f, G).item() == pytest.approx(0.25)
    assert expected_length([P], [Q], [scaled(2.0)]) == pytest.approx(0.75)


@pytest.mark.parametrize("cutoff, delta", CUTOFFS)
def test_the_neighborhood_is_that_of_the_op(cutoff, delta):
    """A draft that is likely everywhere: f Q is the mass that neighborhood_sum gives."""
    P = rows(20, V, seed=3)
    P[::2, 1] = 0  # a neighbor without probability
    P = P / P.sum(-1, keepdim=True)
    relaxed_mass = neighborhood(TABLE, delta, cutoff)(P, 2 * torch.ones_like(P)) * 2
    for x in range(V):
        mass, _, _ = neighborhood_sum(P.float().to(DEVICE), torch.full((20,), x, device=DEVICE),
                                      TABLE.int().to(DEVICE), torch.full((20,), delta, device=DEVICE), cutoff=cutoff)
        assert torch.allclose(mass.cpu().double(), relaxed_mass[:, x], atol=1e-6)


def test_a_neighborhood_by_hand():
    """Token 1's neighbors are 2, then 0. A delta equal to the sum admits it; eq. (3) then moves it onto token 1."""
    P, Q = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.5, 0.25]).double()
    table = torch.tensor([[1, 2], [2, 0], [0, 1]])
    f = neighborhood(table, 0.25)(P, 4 * Q)
    assert f.tolist() == [0.75, 0.25, 0.25]
    assert neighborhood(table, 1.0, "ratio")(P, 4 * Q).tolist() == [1, 0.25, 0.25]
    assert neighborhood(table, 0.2499)(P, 4 * Q).tolist() == [0.5, 0.125, 0.25]
    G = relaxed_residual(table, 0.25)(P, Q, f)
    assert G.tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    G = relaxed_residual(table, 0.75)(P, Q, f)
    assert G.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


SIMULATED = [
    ("lossless", None, "optimal"), ("cool", None, "optimal"), ("wild", None, "optimal"),
    (None, ("tvd", 0.2), "optimal"), (None, ("tvd", 0.2), "relaxed"), (None, ("ratio", 1.0), "relaxed"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule, cutoff, residual", SIMULATED)
def test_verify_tree_is_what_is_enumerated(backend, schedule, cutoff, residual):
    """Chains drawn from Q: the length of eq. (3) and the law of the first token after the root, all within 4
    standard errors. Draft n is node n, so its rows are at node n - 1."""
    P, Q = chain(7)
    g = torch.Generator().manual_seed(1)
    tokens, target, draft = torch.zeros(DRAWS, 1, dtype=torch.int64), [], []
    for i in range(L + 1):
        past = tuple(tokens[:, 1:].unbind(1))
        target.append(P[i][past].expand(DRAWS, V))
        if i < L:
            draft.append(Q[i][past].expand(DRAWS, V))
            tokens = torch.cat([tokens, torch.multinomial(draft[i], 1, generator=g)], 1)
    node = torch.arange(L + 1, dtype=torch.int32).expand(DRAWS, -1)
    rule = optimal_residual
    if cutoff:
        cutoff, delta = cutoff
        accepts = [neighborhood(TABLE, delta, cutoff)] * L
        options = {"neighbors": TABLE.int(), "delta": torch.full((DRAWS,), delta), "cutoff": cutoff}
        if residual == "relaxed":
            rule = relaxed_residual(TABLE, delta, cutoff)
    else:
        accepts = [scaled(omega) for omega in SCHEDULES[schedule][:L]]
        options = {"omega": torch.tensor(SCHEDULES[schedule][:L]).expand(DRAWS, -1)}
    target, draft = torch.stack(target, 1), torch.stack(draft, 1)
    options = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in options.items()}
    _, num_accepted, next_token, _, status = (t.cpu() for t in verify_tree(
        target.float().to(DEVICE), tokens.to(DEVICE), torch.where(node < L, node + 1, -1).to(DEVICE),
        torch.full_like(node, -1).to(DEVICE), torch.rand(DRAWS, L + 1, generator=g).to(DEVICE),
        draft_probs=draft.float().to(DEVICE), draft_row=torch.where(node < L, node, -1).to(DEVICE),
        residual=residual, max_depth=L, **options, backend=backend))
    assert not status.any()

    def agrees(sample, exact):
        sample = sample.double()
        return abs(sample.mean() - exact) <= 4 * sample.std() / DRAWS ** 0.5 + 1e-7

    assert agrees(num_accepted, expected_length(P, Q, accepts))
    first = torch.where(num_accepted > 0, tokens[:, 1], next_token)
    exact = output_law(P, Q, accepts, rule)[0].sum(tuple(range(1, L + 1)))
    assert all(agrees(first == v, exact[v]) for v in range(V))


@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_farther_than_equation_4(seed):
    P, Q = chain(1000 * seed)
    positive = 0
    for accepts, residual in rules():
        law, bound = output_law(P, Q, accepts, residual)
        tv = total_variation(law, target_law(P)).item()
        assert law.sum().item() == pytest.approx(1) and law.min() >= 0
        assert tv <= bound + 1e-12
        positive += tv > 0.01
    assert positive >= 12  # of 22 rules


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_at_most_omega_1_is_lossless_with_the_optimal_residual(seed, again):
    P, Q = chain(seed)
    target = target_law(P)
    for omegas in ([1.0] * L, [0.5] * L, [1.0, 0.7, 0.2], [0.0, 1.0, 0.9]):
        law = output_law(P, Q, [scaled(omega) for omega in omegas], again=again)[0]
        assert total_variation(law, target) < 1e-6
        if min(omegas) < 1:  # Algorithm 1, line 12
            biased = output_law(P, Q, [scaled(omega) for omega in omegas], vanilla_residual, again)[0]
            assert total_variation(biased, target) > 0.02
    assert total_variation(output_law(P, Q, [scaled(1.2)] * L, again=again)[0], target) > 1e-3


@pytest.mark.parametrize("nu", [0.0, 0.3, 0.7, -0.4])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_the_schedule_has_mean_delta(nu, length):
    omegas = omega_schedule(1.1, length, nu)
    assert sum(omegas) / length == pytest.approx(1.1)
    assert bounds.schedule_mu(length, nu) == pytest.approx(
        math.log(sum(math.exp(-nu * i) for i in range(1, length + 1)) / length))
    for a, b in itertools.pairwise(omegas):
        assert b / a == pytest.approx(math.exp(-nu))


def test_the_schedule_at_the_papers_nu():
    assert bounds.schedule_mu(5, 0.7) == pytest.approx(-1.6538, abs=1e-4)
    assert omega_schedule(1.0, 5, 0.7) == pytest.approx([2.595, 1.289, 0.640, 0.318, 0.158], abs=1e-3)
    assert omega_schedule(2.0, 3, 0.0) == [2.0, 2.0, 2.0]
    for wrong in [(-1, 5, 0.7), (1, 0, 0.7), (1, 5, math.inf), (math.nan, 5, 0.7)]:
        with pytest.raises(ValueError):
            omega_schedule(*wrong)
