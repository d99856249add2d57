"""couple_tokens on numbers small enough to check by hand; what its draws follow is in test_jacobi_losslessness.py."""
import itertools

import pytest
import torch

from specvis_kernels import couple_tokens, verify_tree
from specvis_kernels.status import INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE
from tests.cases import DEVICE, neighbor_table, tensor

NAN, INF = float("nan"), float("inf")
P, Q = [0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.25, 0.0]  # 8 4 2 2 and 4 8 4 0 sixteenths


def one(backend, guess, accept, redraw=0.0, target=P, draft=Q, omega=None, group=None, neighbors=None, delta=None,
        **options):
    """One position: its token, whether the guess was kept, its tv_excess and status."""
    if omega is not None:
        options["omega"] = tensor([[omega]])
    if group is not None:
        options["groups"] = tensor([[group]], torch.int64)
    if neighbors is not None:
        options |= {"neighbors": tensor(neighbors, torch.int32), "delta": tensor([delta])}
    tokens, is_kept, num_kept, tv_excess, status = couple_tokens(
        tensor([[target]]), tensor([[draft]]), tensor([[guess]], torch.int64), tensor([[[accept, redraw]]]), **options,
        backend=backend)
    assert num_kept.item() == is_kept.item()
    return tokens.item(), is_kept.item(), tv_excess.item(), status.item()


@pytest.mark.parametrize("guess, accept, redraw, token, is_kept", [
    (0, 0.99, 0.0, 0, True),     # P(0) / Q(0) = 2
    (1, 0.49, 0.0, 1, True),     # 1 / 2; equality rejects
    (1, 0.5, 0.66, 0, False),    # of P - Q, tokens 0 and 3 have 4 and 2 sixteenths left
    (1, 0.5, 0.67, 3, False),
    (2, NAN, NAN, 0, False),     # a NaN is not below anything, and draws like 0
    (2, 1.0, 1.0, 3, False),
])
def test_the_strict_rule(backend, guess, accept, redraw, token, is_kept):
    assert one(backend, guess, accept, redraw) == (token, is_kept, 0.0, 0)
    assert one(backend, guess, accept, redraw, draft=[q / 2 for q in Q]) == (token, is_kept, 0.0, 0)


def test_a_guess_without_mass_is_never_kept(backend):
    assert one(backend, 0, 0.0, 0.99, target=[0.0, 0.5, 0.5, 0.0]) == (2, False, 0.0, 0)
    assert one(backend, 0, -0.5, 0.99, target=[0.0, 0.5, 0.5, 0.0]) == (2, False, 0.0, 0)


NEIGHBORS = [[1, 2, 3], [3, 2, 0], [1, 0, 3], [2, 1, 0]]  # nearest first; the third column only "released" looks at


@pytest.mark.parametrize("cutoff, delta, accept_prob", [
    ("tvd", 0.1249, 0.5), ("tvd", 0.125, 0.75), ("tvd", 0.25, 1.0), ("ratio", 0.5, 0.75), ("ratio", 1.0, 1.0),
    ("jsd", 0.0, 0.5), ("jsd", 1.0, 1.0), ("tvd", NAN, 0.5), ("tvd", -1.0, 0.5),
])
def test_cutoffs(backend, cutoff, delta, accept_prob):
    """Guess 1 with a neighbor of 1/8, then one of 1/8, then one of 1/2, which Q = 1/2 does not need."""
    got = one(backend, 1, 0.0, neighbors=NEIGHBORS, delta=delta, cutoff=cutoff)
    assert got == (1, True, accept_prob - 0.5, 0)


@pytest.mark.parametrize("group, accept_prob", [
    ([], 0.5), ([-1, -1], 0.5), ([2], 0.5),  # 4 + 2 of 8 + 4: as before
    ([3], 0.75),                             # 4 + 2 of 8 + 0
    ([0], 1.0), ([0, 2], 0.875),             # 4 + 8 of 8 + 4, and with 2 of 4 more
    ([1, 3], 0.75), ([3, -1, 1, 7, -9], 0.75),  # the guess counts once; ids outside the vocabulary do not count
    ([0, 2, 3], 1.0),
])
def test_groups(backend, group, accept_prob):
    for accept, is_kept in ((accept_prob - 0.001, True), (min(accept_prob, 0.999), accept_prob == 1.0)):
        token = 1 if is_kept else 3
        assert one(backend, 1, accept, 0.67, group=group) == (token, is_kept, accept_prob - 0.5, 0)


def test_a_group_may_keep_less_or_nothing(backend):
    """Token 0 alone is always kept. With token 1 it has 12 of 12, with token 2 10 of 8, with 1 and 2 14 of 16."""
    assert one(backend, 0, 0.874, group=[1, 2]) == (0, True, 0.0, 0)
    assert one(backend, 0, 0.875, 0.67, group=[1, 2]) == (3, False, 0.0, 0)
    assert one(backend, 0, 0.999, group=[1, 2], omega=1.5) == (0, True, 0.0, 0)
    # without mass
    assert one(backend, 0, 0.0, target=[0.0, 0.0, 0.5, 0.5], draft=[0.5, 0.5, 0.0, 0.0], group=[1]) == (
        2, False, 0.0, 0)


@pytest.mark.parametrize("bad", [[NAN, 0.5, 0.5, 0.0], [INF, 0, 0, 0.0], [-0.5, 0.5, 0.5, 0.5], 4 * [0.0]])
def test_a_bad_row(backend, bad):
    """There is no draw from a bad P. With a bad Q the guess counts as none, and P answers."""
    assert one(backend, 1, 0.0, 0.5, target=bad) == (0, False, 0.0, INVALID_ROW)
    assert one(backend, 1, 0.0, 0.5, draft=bad) == (1, False, 0.0, INVALID_DRAFT)
    assert one(backend, 1, 0.0, 0.76, draft=bad) == (2, False, 0.0, INVALID_DRAFT)


def test_a_guess_that_its_row_gives_no_mass(backend):
    """It is kept where neighbors or a group may have kept it before, when its row was another one."""
    assert one(backend, 3, 0.0, 0.49) == (0, False, 0.0, INVALID_DRAFT)
    assert one(backend, 3, 0.0, 0.5) == (1, False, 0.0, INVALID_DRAFT)
    for options in dict(group=[3]), dict(neighbors=NEIGHBORS, delta=1.0):
        token, is_kept, _, status = one(backend, 3, 0.99, 0.0, **options)
        assert (token, is_kept, status) == (3, True, 0)


def test_what_is_reported_first(backend):
    """An invalid rule or row, then the guess: later checks are skipped."""
    bad = 4 * [NAN]
    assert one(backend, 9, 0.0, 0.5, draft=bad) == (1, False, 0.0, INVALID_DRAFT)
    assert one(backend, 9, 0.0, 0.5, draft=bad, omega=NAN) == (1, False, 0.0, INVALID_RULE)
    assert one(backend, 9, 0.0, 0.5, omega=NAN) == (1, False, 0.0, INVALID_RULE)
    assert one(backend, 9, 0.0, 0.5, target=bad) == (0, False, 0.0, INVALID_ROW)


@pytest.mark.parametrize("guess", [-1, 4, 2**40, -2**63])
def test_a_guess_outside_the_vocabulary_is_drawn_anew_from_the_target(backend, guess):
    assert one(backend, guess, 0.0, 0.5) == (1, False, 0.0, INVALID_TREE)
    assert one(backend, guess, 0.0, 0.5, neighbors=NEIGHBORS, delta=1.0) == (1, False, 0.0, INVALID_TREE)
    assert one(backend, guess, 0.0, 0.5, group=[guess, 0]) == (1, False, 0.0, INVALID_TREE)


@pytest.mark.parametrize("options", [
    dict(omega=-0.5), dict(omega=NAN), dict(omega=0.99, neighbors=NEIGHBORS, delta=1.0), dict(omega=0.99, group=[0]),
    dict(omega=0.99, group=[]),
])
def test_an_undefined_rule_draws_from_the_target(backend, options):
    assert one(backend, 1, 0.0, 0.5, **options) == (1, False, 0.0, INVALID_RULE)
    assert one(backend, 1, 0.0, 0.76, **options) == (2, False, 0.0, INVALID_RULE)
    assert one(backend, 1, 0.0, 0.76, target=4 * [NAN], **options) == (0, False, 0.0, INVALID_RULE | INVALID_ROW)


def test_the_leading_ones_are_counted_and_those_behind_are_treated_alike(backend):
    guesses = tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], torch.int64)
    omega = tensor([[1.0] * 4, [1.0] * 4, [1.0, 1.0, NAN, 1.0]])
    uniforms = tensor([0.5, 0.0]).repeat(3, 4, 1)
    rows = [tensor(row).repeat(3, 4, 1) for row in (P, Q)]
    tokens, is_kept, num_kept, _, status = couple_tokens(*rows, guesses, uniforms, omega=omega, backend=backend)
    assert is_kept.tolist() == [[True, False, True, False], [False, True, True, True], [True, True, False, True]]
    assert num_kept.tolist() == [1, 0, 2] and num_kept.dtype == torch.int32
    assert tokens.tolist() == [[0] * 4] * 3
    assert status.tolist() == [[0] * 4, [0] * 4, [0, 0, INVALID_RULE, 0]]


@pytest.mark.parametrize("V", [31, 32, 33, 64, 2560])
def test_every_length_of_row(backend, V):
    """P has a half at each end, Q a quarter at the first token and the rest on the second: P - Q is 1/4 and 1/2."""
    target, draft = [0.5] + [0.0] * (V - 2) + [0.5], [0.25, 0.75] + [0.0] * (V - 2)
    assert one(backend, 1, 0.0, 0.33, target, draft) == (0, False, 0.0, 0)
    assert one(backend, 1, 0.0, 0.34, target, draft) == (V - 1, False, 0.0, 0)


@pytest.mark.parametrize("draft", [[1.0] + [0.0] * 7, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
def test_a_draw_that_falls_between_two_blocks(backend, draft, triton_takes):
    """Exactly half of the rest is before token 4, which has nothing."""
    triton_takes(V=4)
    row = [0.0, 0.5, 0.0, 0.0, 0.0, 0.25, 0.25, 0.0]
    assert one(backend, 2, 0.0, 0.5, row, draft)[:2] == (5, False)
    assert one(backend, 2, 0.0, 0.499, row, draft)[:2] == (1, False)


def rows_of(count, V, seed):
    """Rows whose sums are not exact, a draft near its target, guesses of the draft."""
    g = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, count, V, generator=g) * 2
    target, draft = logits.softmax(-1), (logits + noise / 2).softmax(-1)
    draft[::11] = target[::11]  # only rounding remains
    guesses = torch.multinomial(draft, 1, generator=g)
    return target.to(DEVICE), draft.to(DEVICE), guesses.to(DEVICE), torch.rand(count, 2, generator=g).to(DEVICE)


OPTIONS = [
    dict(residual=residual, cutoff=cutoff, omega=omega)
    for residual, cutoff, omega in itertools.product(
        ("optimal", "relaxed", "released"), (None, "tvd", "ratio", "jsd"), (None, 0.5, 1.5))
    if not (residual == "optimal" and cutoff and omega == 0.5)
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_is_what_verify_tree_does_with_one_sampled_child(backend, options):
    """A root and one child: equal decisions, draws after a rejection, tv_excess and status."""
    B, W, V = (2, 6, 40) if backend == "triton" else (5, 60, 40)
    target, draft, guesses, uniforms = rows_of(B * W, V, seed=len(str(options)))
    target[3, 5], draft[4, 6], guesses[5] = NAN, -1.0, V
    settings, per_row = {"residual": options["residual"]}, {}
    if options["cutoff"]:
        delta = torch.tensor([0.5, 0.125, 1.0, 0.0, -1.0], device=DEVICE)[:B]
        settings |= {"neighbors": neighbor_table(V - 6, 5), "cutoff": options["cutoff"], "offset": 3}
        per_row["delta"] = delta.repeat_interleave(W)
    else:
        delta = None
    omega = None
    if options["omega"]:
        omega = torch.full((B * W, 1), options["omega"], device=DEVICE)
        omega[-1] = NAN
        per_row["omega"] = omega
    links = torch.tensor([[1, -1]], dtype=torch.int32, device=DEVICE).repeat(B * W, 1)
    tree = verify_tree(
        target.unsqueeze(1).repeat(1, 2, 1), torch.cat([guesses, guesses], 1), links, torch.full_like(links, -1),
        uniforms.flip(1), draft_probs=draft.unsqueeze(1), draft_row=torch.zeros_like(links), max_depth=1, **per_row,
        **settings, backend=backend)
    window = couple_tokens(
        target.view(B, W, V), draft.view(B, W, V), guesses.view(B, W), uniforms.view(B, W, 2),
        omega=None if omega is None else omega.view(B, W), delta=delta, **settings, backend=backend)
    is_kept, status = window.is_kept.flatten(), window.status.flatten()
    assert torch.equal(is_kept, tree.num_accepted == 1)
    assert torch.equal(window.tokens.flatten()[~is_kept], tree.next_token[~is_kept])
    assert torch.equal(window.tokens.flatten()[is_kept], guesses.flatten()[is_kept])
    assert torch.equal(window.tv_excess.flatten(), tree.tv_excess)
    # An accepted child has a row of its own after it, here an equal row: nothing else is reported there.
    assert torch.equal(status, tree.status) and {INVALID_ROW, INVALID_TREE} <= set(status.tolist())
    assert 0 < is_kept.sum() < len(is_kept)
