"""Jacobi decoding with couple_tokens: the exact joint law of a short sequence over all its iterations.

The op's own decisions over a grid of uniforms on which they fall evenly give the probability of each new token as a
fraction, and the loop below carries the law of its whole state from forward to forward. A loop that hands over the rows
of the iteration before must fail.
"""
import itertools
import math
from collections import defaultdict
from fractions import Fraction as F
from functools import cache

import pytest
import torch

from specvis_kernels import backends, couple_tokens
from tests.cases import DEVICE
from tests.kernels.test_losslessness import grid, normalized, rule, total_variation

BACKENDS = [backend for backend in backends("couple_tokens", DEVICE) if backend != "triton" or DEVICE != "cpu"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)

V, WINDOW = 3, 3
ROWS = [normalized(counts) for counts in ([4, 2, 2], [1, 5, 2], [2, 1, 5], [4, 3, 1], [1, 1, 6])]


def row_after(prefix):
    """The model: which of the rows follows a prefix. Every token of it counts."""
    return (sum((i + 1) * token for i, token in enumerate(prefix)) + len(prefix)) % len(ROWS)


def law_of_the_model(length):
    law = {}
    for sequence in itertools.product(range(V), repeat=length):
        law[sequence] = math.prod(ROWS[row_after(sequence[:i])][token] for i, token in enumerate(sequence))
    return law


def within(delta):
    """Groups: the other ids whose probability is within delta of the guess's."""
    return lambda row, guess: [v for v in range(V) if v != guess and abs(row[v] - row[guess]) <= delta]


def below(row, guess):
    """The ids that are less probable."""
    return [v for v in range(V) if row[v] < row[guess]]


class Step:
    """One position of one forward, by the op: step(target, draft, guess) is the law of (token, is_kept)."""

    def __init__(self, backend, omega=F(1), group_of=None):
        self.backend, self.omega, self.group_of = backend, omega, group_of
        self.of = cache(self.of)

    def of(self, target, draft, guess):
        """{(token, is_kept): probability}, and tv_excess."""
        (accept_prob,), residual = rule(ROWS[target], [guess], ROWS[draft], self.omega)
        options = {}
        group = self.group_of(ROWS[target], guess) if self.group_of else []
        if group:
            mass, draft_mass = (sum(row[v] for v in [guess, *group]) for row in (ROWS[target], ROWS[draft]))
            accept_prob = min(F(1), mass / draft_mass)
        uniforms = grid(accept_prob.denominator, math.lcm(*[c.denominator for c in itertools.accumulate(residual)]))
        W = len(uniforms)
        if group:
            options["groups"] = torch.tensor(group, device=DEVICE).repeat(1, W, 1)
        if self.omega != 1:
            options["omega"] = torch.full((1, W), float(self.omega), device=DEVICE)
        target_probs, draft_probs = (
            torch.tensor([float(p) for p in ROWS[row]], device=DEVICE).repeat(1, W, 1) for row in (target, draft))
        result = couple_tokens(target_probs, draft_probs, torch.full((1, W), guess, device=DEVICE),
                               uniforms.unsqueeze(0).to(DEVICE), **options, backend=self.backend)
        counts = defaultdict(int)
        for pair in zip(result.tokens[0].tolist(), result.is_kept[0].tolist()):
            counts[pair] += 1
        return {pair: F(count, W) for pair, count in counts.items()}, F(result.tv_excess[0, 0].item())


def decode(step, length, hands_over=lambda new_row, old_row: new_row):
    """The law of the emitted sequence, the expected sum of tv_excess over all tests, and the mean of the forwards. A
    state is the emitted tokens, the guesses after them, and the rows that they were drawn from. A forward over the
    guesses gives each position its new row. `hands_over` says which row a position keeps until the next forward."""
    states, law, tv_excess, forwards = defaultdict(F), defaultdict(F), F(0), F(0)
    for guesses in itertools.product(range(V), repeat=WINDOW):
        first = row_after(())
        states[(), guesses, (first,) * WINDOW] += math.prod(ROWS[first][guess] for guess in guesses)
    while states:
        after = defaultdict(F)
        for (emitted, guesses, drafts), prob in states.items():
            forwards += prob
            W = len(guesses)
            targets = [row_after(emitted + guesses[:j]) for j in range(W + 1)]
            steps = [step.of(*position) for position in zip(targets, drafts, guesses)]
            tv_excess += prob * sum(excess for _, excess in steps)
            for outcome in itertools.product(*[pairs.items() for pairs, _ in steps]):
                outcome_prob = prob * math.prod(share for _, share in outcome)
                tokens = tuple(token for (token, _), _ in outcome)
                num_kept = next((j for j, ((_, is_kept), _) in enumerate(outcome) if not is_kept), W)
                # The kept ones and the token after them. After a whole window that is a draw from the last row.
                ends = [(tokens[:num_kept + 1], F(1))]
                if num_kept == W and len(emitted) + W < length:
                    ends = [((*tokens, v), p) for v, p in enumerate(ROWS[targets[W]])]
                rows = tuple(map(hands_over, targets, drafts))[num_kept + 1:]
                for new, new_prob in ends:
                    now = emitted + new
                    others = tokens[num_kept + 1:]
                    num_new = min(WINDOW, length - len(now)) - len(others)  # positions that enter, from the last row
                    if len(now) == length:
                        law[now] += outcome_prob * new_prob
                        continue
                    for entering in itertools.product(range(V), repeat=num_new):
                        share = math.prod(ROWS[targets[W]][v] for v in entering)
                        state = now, others + entering, rows + (targets[W],) * num_new
                        after[state] += outcome_prob * new_prob * share
        states = after
    assert sum(law.values()) == 1
    return law, tv_excess, forwards


def distance(law):
    model = law_of_the_model(len(next(iter(law))))
    return total_variation([law[sequence] for sequence in model], model.values())


@each_backend
@pytest.mark.parametrize("omega, length", [(F(1), 5), (F(1, 2), 4)])
def test_the_joint_law_is_the_models(backend, omega, length):
    """The law is exact, in fewer forwards than tokens."""
    law, tv_excess, forwards = decode(Step(backend, omega), length)
    assert law == law_of_the_model(length) and tv_excess == 0
    assert forwards < length - 1


def test_rows_of_the_iteration_before_are_found():
    """The control: each guess comes with the row that its predecessor, one forward ago, was drawn from."""
    law, _, _ = decode(Step("oracle"), 5, hands_over=lambda new_row, old_row: old_row)
    assert distance(law) > 0.05


PAIRS = list(itertools.product(range(len(ROWS)), repeat=2))


def law_of_one_step(step, target, draft):
    """For a guess drawn from the row `draft`: the token's law, how often it is kept, the mean of tv_excess."""
    law, kept_prob, tv_excess = [F(0)] * V, F(0), F(0)
    for guess in range(V):
        pairs, excess = step.of(target, draft, guess)
        tv_excess += ROWS[draft][guess] * excess
        for (token, is_kept), prob in pairs.items():
            law[token] += ROWS[draft][guess] * prob
            kept_prob += ROWS[draft][guess] * prob * is_kept
    return law, kept_prob, tv_excess


@each_backend
def test_as_many_guesses_are_kept_as_any_rule_can(backend):
    step = Step(backend)
    for target, draft in PAIRS:
        law, kept_prob, _ = law_of_one_step(step, target, draft)
        assert law == ROWS[target] and kept_prob == 1 - total_variation(ROWS[target], ROWS[draft])


@each_backend
@pytest.mark.parametrize("options", [
    {"omega": F(5, 4)}, {"omega": F(2)}, {"group_of": within(F(1, 8))}, {"group_of": within(F(1, 2))},
], ids=["1.25", "2", "groups of 0.125", "groups of 0.5"])
def test_the_distance_of_one_step_is_its_mean_tv_excess(backend, options):
    step = Step(backend, **options)
    distances = []
    for target, draft in PAIRS:
        law, kept_prob, tv_excess = law_of_one_step(step, target, draft)
        assert kept_prob >= 1 - total_variation(ROWS[target], ROWS[draft])
        distances.append(total_variation(law, ROWS[target]))
        assert float(distances[-1]) == pytest.approx(float(tv_excess), abs=1e-6)
    assert max(distances) > 0.1


@each_backend
def test_groups_that_keep_less_than_the_strict_rule_are_further_by_at_most_that(backend):
    step, missing = Step(backend, group_of=below), []
    for target, draft in PAIRS:
        law, kept_prob, tv_excess = law_of_one_step(step, target, draft)
        missing.append(max(1 - total_variation(ROWS[target], ROWS[draft]) - kept_prob, 0))
        tv = float(total_variation(law, ROWS[target]))
        assert tv <= float(tv_excess + missing[-1]) + 1e-6
        assert missing[-1] or tv == pytest.approx(float(tv_excess), abs=1e-6)
    assert max(missing) > 0.1


@pytest.mark.parametrize("options", [
    {"omega": F(3, 2)}, {"group_of": within(F(1, 8))}, {"group_of": within(F(1, 4))}, {"group_of": within(F(1, 2))},
], ids=["1.5", "groups of 0.125", "groups of 0.25", "groups of 0.5"])
def test_relaxed_decoding_is_lossy_and_stays_below_the_sum_of_tv_excess(options):
    """The joint law moves, by less than all tests add up to, in fewer forwards."""
    law, tv_excess, forwards = decode(Step("oracle", **options), 5)
    assert 0.1 < distance(law) < tv_excess
    assert forwards < decode(Step("oracle"), 5)[2]
