"""verify_chain by its rules "block" and "fly": by hand, and by the law of the tokens that they emit.

The law is exact. `thresholds` computes with fractions where each draft's uniform number decides, and which tokens may
follow; so one number on each side of a threshold stands for all on that side.
"""
import itertools
import math
import random
from collections import defaultdict
from fractions import Fraction as F

import pytest
import torch

from specvis_kernels import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_TREE, verify_chain
from tests.cases import DEVICE, exact_probs, exact_uniforms, tensor

ROW = [0.5, 0.25, 0.125, 0.125]
LN2 = math.log(2)  # the entropy of 1/2, 1/4, 1/8 is 1.375 of it


def verify(backend, rows, drafts, uniforms, draft_rows=None, **options):
    """One request. Results without the batch."""
    draft_probs = None if draft_rows is None else tensor(draft_rows).view(len(drafts), -1)
    result = verify_chain(tensor(rows), tensor(drafts, torch.int64), tensor([len(drafts)], torch.int64),
                          tensor(uniforms), draft_probs=draft_probs, backend=backend, **options)
    return [x.item() for x in result]


# --- by hand ----------------------------------------------------------------------------------------------------------

P1, Q1 = [0.25, 0.75], [0.5, 0.5]   # draft 0 has the ratio 1/2
P2, Q2 = [0.75, 0.25], [0.25, 0.75]  # after it the sum of max(P / 2 - Q, 0) is 1/8: it is kept below 1/8 / (5/8) = 0.2


@pytest.mark.parametrize("u1, u2, num_accepted, next_token", [
    (0.19, 0.99, 1, 0),    # from max(P / 2 - Q, 0): only token 0 has some
    (0.21, 0.99, 0, 1),    # of max(P - Q, 0) only token 1
    (0.99, 0.99, 0, 1),
])
def test_a_prefix_is_kept_by_its_own_uniform(backend, u1, u2, num_accepted, next_token):
    # The second draft, 1, has the ratio 1/2 1/3.
    got = verify(backend, [P1, P2, P1], [0, 1], [0.3, u1, u2], [Q1, Q2], rule="block")
    assert got == [num_accepted, next_token, 0, 0]


def test_a_later_draft_brings_back_those_before_it(backend):
    """0 and 0 have the ratios 1/2 and 1: the second is always accepted, and with it the first."""
    got = verify(backend, [P1, P2, P1], [0, 0], [0.3, 0.99, 0.99], [Q1, Q2], rule="block")
    assert got == [2, 1, 0, 0]
    assert verify(backend, [P1, P2, P1], [0, 0], [0.3, 0.99, 0.99], [Q1, Q2])[0] == 0  # by the strict rule neither
    bonus = verify(backend, [P1, P2], [0, 0], [0.3, 0.99, 0.99], [Q1, Q2], rule="block",
                   bonus_tokens=tensor([-7], torch.int64))
    assert bonus == [2, -7, 0, 0]


def test_a_last_draft_is_kept_below_its_ratio(backend):
    for u, expected in ((0.49, [1, 0, 0, 0]), (0.5, [0, 1, 0, 0])):
        assert verify(backend, [P1, P2], [0], [0.3, u], [Q1], rule="block") == expected


def test_no_mass_is_never_accepted(backend):
    """Also at 0, and the drafts after it are not looked at."""
    certain, none = [0.0, 1.0], [math.nan, 1.0]
    assert verify(backend, [certain, none, none], [0, 0], [0.5, 0.0, 0.0], [Q1, Q1], rule="block") == [0, 1, 0, 0]
    assert verify(backend, [certain, P2, P2], [0, 0], [0.5, 0.0, 0.0], rule="fly", window=1, entropy=0.0)[:2] == [0, 1]


def test_what_ends_the_drafts_of_a_block(backend):
    """A bad row, draft row or token: the drafts before it are a block, here of one draft with the ratio 1/2."""
    bad = [math.nan, 1.0]
    for rows, draft_rows, drafts, bit in (([P1, bad, P1], [Q1, Q2], [0, 0], INVALID_ROW),
                                          ([P1, P2, P1], [Q1, bad], [0, 0], INVALID_DRAFT),
                                          ([P1, P2, P1], [Q1, [0.0, 1.0]], [0, 0], INVALID_DRAFT),
                                          ([P1, P2, P1], [Q1, Q2], [0, 2], INVALID_TREE)):
        kept = verify(backend, rows, drafts, [0.8, 0.49, 0.0], draft_rows, rule="block")
        assert kept == [1, 0 if bit == INVALID_ROW else 1, 0, bit]  # 0.8 draws 1 from P2
        assert verify(backend, rows, drafts, [0.8, 0.5, 0.0], draft_rows, rule="block") == [0, 1, 0, bit]
    assert verify(backend, [bad, P2], [0], [0.8, 0.0], [Q1], rule="block") == [0, 0, 0, INVALID_ROW]


def test_an_empty_residual_is_the_row(backend):
    """1 is no uniform number in [0, 1), but rejects where the residual has nothing."""
    for options in ({"rule": "block"}, {"rule": "fly", "window": 1, "entropy": 0.0}):
        assert verify(backend, [P1, P2], [0], [0.3, 1.0], [P1], **options) == [0, 1, 0, EMPTY_RESIDUAL]


@pytest.mark.parametrize("drafts, uniforms, window, entropy, expected", [
    # Token 1 has 1/4, and is rejected at 0.3; token 0 after it is accepted at 0.4.
    ([1, 0], [0.7, 0.3, 0.4], 1, 1.3 * LN2, [2, 1, 0.75, 0]),
    ([1, 0], [0.7, 0.3, 0.4], 1, 1.4 * LN2, [0, 2, 0.0, 0]),     # the entropy is not so high
    ([1, 0], [0.7, 0.3, 0.6], 1, 0.0, [0, 2, 0.0, 0]),           # the next draft is rejected too
    ([1, 0], [0.7, 0.3, 0.4], 2, 0.0, [0, 2, 0.0, 0]),           # there is no second one
    ([0, 1], [0.7, 0.4, 0.3], 1, 0.0, [1, 2, 0.0, 0]),           # nor one after the last
    ([1, 0, 0], [0.7, 0.2, 0.4, 0.4], 2, 0.0, [3, 1, 0.75, 0]),  # what might have been rejected counts as well
    # 1 is kept for the sake of the second draft, which counts only by itself; then 1 again for the sake of the fourth.
    ([1, 0, 1, 0], [0.7, 0.3, 0.4, 0.3, 0.4], 1, 0.0, [4, 1, 1.5, 0]),
    ([1, 0, 0, 1], [0.7, 0.3, 0.4, 0.4, 0.3], 1, 0.0, [3, 2, 0.75, 0]),
])
def test_fly_keeps_a_rejected_draft(backend, drafts, uniforms, window, entropy, expected):
    got = verify(backend, [ROW] * (len(drafts) + 1), drafts, uniforms, rule="fly", window=window, entropy=entropy)
    assert got == expected


def test_the_entropy_is_of_three_tokens(backend):
    """Of five tokens with 1/5 each: 3/5 log 5."""
    for entropy, num_accepted in ((0.6 * math.log(5) - 1e-6, 2), (0.6 * math.log(5) + 1e-6, 0)):
        assert verify(backend, [[0.2] * 5] * 3, [1, 0], [0.0, 0.3, 0.1], rule="fly", window=1,
                      entropy=entropy)[0] == num_accepted


def test_an_entropy_reaches_an_equal_threshold(backend):
    for entropy, num_accepted in ((LN2, 2), (LN2 + 1e-7, 0)):
        assert verify(backend, [[0.5, 0.5]] * 3, [1, 0], [0.0, 0.6, 0.1], rule="fly", window=1,
                      entropy=entropy)[0] == num_accepted


def test_fly_keeps_nothing_that_is_invalid(backend):
    """A token outside of the vocabulary, and a draft whose row is bad, before a draft that is accepted."""
    options = {"rule": "fly", "window": 1, "entropy": 0.0}
    assert verify(backend, [ROW] * 3, [4, 0], [0.7, 0.3, 0.4], **options) == [0, 1, 0, INVALID_TREE]
    for draft_row in [0.0] * 4, [1.0, 0.0, 0.0, 0.0]:
        got = verify(backend, [ROW] * 3, [1, 0], [0.7, 0.0, 0.4], [draft_row, ROW], **options)
        assert got == [0, 1, 0, INVALID_DRAFT]
    # One after a rejected draft does not keep it.
    assert verify(backend, [ROW] * 3, [1, 4], [0.7, 0.3, 0.0], **options) == [0, 2, 0, 0]
    bad = [math.nan, *ROW[1:]]
    assert verify(backend, [ROW, bad, ROW], [1, 0], [0.7, 0.3, 0.0], **options) == [0, 2, 0, 0]
    assert verify(backend, [bad, ROW, ROW], [1, 0], [0.7, 0.3, 0.0], **options) == [0, 0, 0, INVALID_ROW]


def test_a_greedy_request(backend):
    """0 is the argmax. By "fly" a 1 before it is kept; by "block" nothing else is accepted, at any uniform number."""
    drafts, rows = [0, 1, 0], [ROW] * 4
    options = {"greedy": True, "draft_rows": [ROW] * 3}
    assert verify(backend, rows, drafts, [0.9] * 4, rule="block", **options) == [1, 0, 0, 0]
    assert verify(backend, rows, drafts, [0.9] * 4, rule="fly", window=1, entropy=0.5, **options) == [3, 0, 1, 0]
    assert verify(backend, rows, drafts, [0.9] * 4, rule="fly", window=2, entropy=0.5, **options) == [1, 0, 0, 0]


@pytest.mark.parametrize("greedy", [None, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_fly_that_never_keeps_is_the_strict_rule(backend, sampled, greedy):
    V, num_drafts = 40, torch.tensor([3, 0, 5, 1])
    D, B = int(num_drafts.sum()), len(num_drafts)
    rows, draft_probs = exact_probs(D + B, V, exact=False), exact_probs(D, V, seed=1, exact=False)
    arguments = (rows, rows[:D].argmax(1), num_drafts.cumsum(0).to(DEVICE), exact_uniforms(D + B, seed=3) / 2)
    options = {"draft_probs": draft_probs if sampled else None, "greedy": greedy, "backend": backend}
    strict = verify_chain(*arguments, **options)
    for never in ({"window": 1, "entropy": math.inf}, {"window": 2**31 - 1, "entropy": 0.0}):
        assert all(map(torch.equal, strict, verify_chain(*arguments, rule="fly", **never, **options)))
    assert strict.num_accepted.sum() > 2


# --- laws -------------------------------------------------------------------------------------------------------------

def random_model(V, n, seed):
    """Every prefix's row of fractions of 16. Some are 0."""
    r = random.Random(seed)

    def row():
        cuts = sorted(r.randint(0, 16) for _ in range(V - 1))
        return [F(b - a, 16) for a, b in itertools.pairwise([0, *cuts, 16])]

    return {prefix: row() for i in range(n + 1) for prefix in itertools.product(range(V), repeat=i)}


def normalized(row):
    return [p / sum(row) for p in row] if sum(row) else row


def residual(P, Q, scale=F(1)):
    return [max(scale * p - q, F(0)) for p, q in zip(P, Q)]


def ratio(p, q):
    return min(F(1), p / q) if q else F(p > 0)


def strict(P, Q, x):
    """The thresholds of the drafts x, and the row after each prefix."""
    return ([ratio(P[x[:i]][v], Q[x[:i]][v]) for i, v in enumerate(x)],
            [normalized(residual(P[x[:i]], Q[x[:i]])) for i in range(len(x))] + [P[x]])


def ratios_of(P, Q, x):
    ratios = [F(1)]
    for i, v in enumerate(x):
        ratios.append(ratio(ratios[-1] * P[x[:i]][v], Q[x[:i]][v]))
    return ratios


def block(P, Q, x):
    ratios = ratios_of(P, Q, x)
    residuals = [residual(P[x[:i]], Q[x[:i]], ratios[i]) for i in range(len(x))]
    kept = [sum(row) / (sum(row) + 1 - p) if p < 1 else F(sum(row) > 0) for row, p in zip(residuals[1:], ratios[1:])]
    return [*kept, ratios[-1]] if x else [], [*map(normalized, residuals), P[x]]


def block_by_ratio(P, Q, x):
    """The control: a prefix is kept below its ratio."""
    return ratios_of(P, Q, x)[1:], block(P, Q, x)[1]


def sides(threshold):
    """(a uniform number, the weight of all that decide as it does)"""
    below = [(max(threshold - F(1, 4096), threshold / 2), threshold)] if threshold > 0 else []
    return below + ([(min(threshold + F(1, 4096), F(4095, 4096)) if threshold else F(0), 1 - threshold)]
                    if threshold < 1 else [])


def outcomes(P, Q, n, thresholds, decide):
    """(weight, drafts, uniforms, num_accepted, next_token, tv_excess) of all draft chains and cells of uniforms."""
    cells = []
    for x in itertools.product(range(len(P[()])), repeat=n):
        weight = math.prod(Q[x[:i]][v] for i, v in enumerate(x))
        if weight == 0:
            continue
        limits, rows = thresholds(P, Q, x)
        points = sorted({F(0), F(1), *itertools.chain.from_iterable(map(itertools.accumulate, rows))})
        draws = [((a + b) / 2, b - a) for a, b in itertools.pairwise(points)]
        for cell in itertools.product(draws, *map(sides, limits)):
            cells.append((weight * math.prod(w for _, w in cell), x, [u for u, _ in cell]))
    return [(*cell, *out) for cell, out in zip(cells, decide(P, Q, cells))]


def by_op(backend, **options):
    def decide(P, Q, cells):
        def rows_of(M, last):
            return tensor([[float(p) for p in M[x[:i]]] for _, x, _ in cells for i in range(len(x) + last)])

        num_drafts = torch.tensor([len(x) for _, x, _ in cells])
        result = verify_chain(rows_of(P, 1), tensor([v for _, x, _ in cells for v in x], torch.int64),
                              num_drafts.cumsum(0).to(DEVICE), tensor([float(u) for *_, us in cells for u in us]),
                              draft_probs=rows_of(Q, 0), backend=backend, **options)
        assert not result.status.any()
        return zip(*(x.tolist() for x in result[:3]))
    return decide


def by_fractions(thresholds, first=False):
    """The longest prefix that its own uniform number accepts; first: all drafts before the first that is rejected."""
    def decide(P, Q, cells):
        for _, x, (u, *us) in cells:
            limits, rows = thresholds(P, Q, x)
            kept = [i for i in range(1, len(x) + 1) if us[i - 1] < limits[i - 1]]
            n = max(kept, default=0)
            if first:
                n = next(i for i in range(len(x) + 1) if i + 1 not in kept)
            yield n, sum(total <= u for total in itertools.accumulate(rows[n])), 0.0
    return decide


def law(P, n, results):
    """The probability of each chain of n + 1 tokens: what is emitted, and then the target's tokens."""
    total = defaultdict(F)
    for weight, x, _, num_accepted, token, _ in results:
        emitted = (*x[:num_accepted], token)
        for rest in itertools.product(range(len(P[()])), repeat=n + 1 - len(emitted)):
            chain = emitted + rest
            total[chain] += weight * math.prod(P[chain[:i]][chain[i]] for i in range(len(emitted), n + 1))
    return total


def distance(P, n, results):
    target = {x: math.prod(P[x[:i]][v] for i, v in enumerate(x))
              for x in itertools.product(range(len(P[()])), repeat=n + 1)}
    got = law(P, n, results)
    assert sum(got.values()) == sum(target.values()) == 1
    return sum(abs(got[x] - p) for x, p in target.items()) / 2


def mean_accepted(results):
    return sum(weight * num_accepted for weight, *_, num_accepted, _, _ in results)


@pytest.mark.parametrize("V, n, seed", [(2, 1, 0), (3, 1, 1), (2, 2, 2), (3, 2, 3), (2, 3, 4)])
def test_block_verification_is_lossless_and_accepts_more(backend, V, n, seed):
    P, Q = random_model(V, n, 2 * seed), random_model(V, n, 2 * seed + 1)
    results = outcomes(P, Q, n, block, by_op(backend, rule="block"))
    assert distance(P, n, results) == 0
    of_strict = outcomes(P, Q, n, strict, by_fractions(strict, first=True))
    assert distance(P, n, of_strict) == 0
    if n == 1:
        assert mean_accepted(results) == mean_accepted(of_strict)
    else:
        assert mean_accepted(results) > mean_accepted(of_strict)


def test_the_rule_itself_never_accepts_less():
    """And with a point mass for every draft it accepts as much as the strict rule does."""
    for seed in range(40):
        V, n = 2 + seed % 2, 1 + seed % 3
        P, Q = random_model(V, n, seed), random_model(V, n, seed + 1000)
        if seed % 4 == 0:
            x = tuple(random.Random(seed).choices(range(V), k=n))
            Q = {prefix: [F(v == x[len(prefix)]) for v in range(V)] if len(prefix) < n else None for prefix in P}
        means = []
        for thresholds, first in ((block, False), (strict, True)):
            results = outcomes(P, Q, n, thresholds, by_fractions(thresholds, first))
            assert distance(P, n, results) == 0
            means.append(mean_accepted(results))
        assert means[0] == means[1] if seed % 4 == 0 or n == 1 else means[0] >= means[1]


def test_the_law_sees_a_biased_rule():
    P, Q = random_model(2, 2, 4), random_model(2, 2, 5)
    assert distance(P, 2, outcomes(P, Q, 2, block, by_fractions(block))) == 0
    assert distance(P, 2, outcomes(P, Q, 2, block_by_ratio, by_fractions(block_by_ratio))) > 0.01


@pytest.mark.parametrize("V, n, window, entropy, seed", [
    (2, 2, 1, 0.0, 0), (3, 2, 1, 0.0, 1), (3, 2, 1, 0.9, 2), (2, 3, 1, 0.0, 3), (2, 3, 2, 0.0, 3), (2, 4, 2, 0.5, 4)])
def test_tv_excess_of_fly_is_its_distance_from_the_target(backend, V, n, window, entropy, seed):
    """If one draft can be kept although rejected. Else it is the mean number of such drafts, which bounds it."""
    P, Q = random_model(V, n, 2 * seed), random_model(V, n, 2 * seed + 1)
    results = outcomes(P, Q, n, strict, by_op(backend, rule="fly", window=window, entropy=entropy))
    tv_excess = sum(float(weight) * excess for weight, *_, excess in results)
    num_kept = sum(weight * sum(u >= limit for u, limit in list(zip(us[1:], strict(P, Q, x)[0]))[:num_accepted])
                   for weight, x, us, num_accepted, *_ in results)
    assert tv_excess == pytest.approx(float(num_kept), abs=1e-6) and num_kept > 0.01
    far = distance(P, n, results)
    assert far == num_kept if n == window + 1 else 0 < far < num_kept
    assert mean_accepted(results) > mean_accepted(outcomes(P, Q, n, strict, by_fractions(strict, first=True)))
