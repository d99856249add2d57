"""verify_tree decides as the rule that docs/verification.md states in plain Python, on thousands of small trees.

The rule runs on fractions, so its decisions are exact, ties included. The op rounds what a rejection of a sampled
child leaves to 2**-42, and could decide otherwise where a test is as near to a tie as that: none of these cases is.
"""
import inspect
import random
import re
from collections import Counter
from fractions import Fraction as F
from pathlib import Path

import pytest
import torch

from specvis_kernels import EMPTY_RESIDUAL, backends, verify_tree
from specvis_kernels._candidate import EMPTY, RESIDUALS
from specvis_kernels.neighborhood_sum import CUTOFFS
from tests.cases import DEVICE, links, neighbor_table

BACKENDS = [backend for backend in backends("verify_tree", DEVICE) if backend != "triton" or DEVICE != "cpu"]
PAGE = Path(__file__).parent.parent.parent / "docs" / "verification.md"
RULE = {}
for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M):
    exec(block, RULE)
BATCHES, B = 72, 50


def exact_row(r, V):
    """V probabilities that are counts over 2**16: coarse ones, whose ties are frequent, or fine ones."""
    parts = r.choice([8, 16, 2**16])
    cuts = sorted(r.randrange(parts + 1) for _ in range(V - 1))
    row = [F(b - a, parts) for a, b in zip([0, *cuts], [*cuts, parts])]
    return r.sample(row, V)


def draw_without_replacement(r, row, count):
    """Distinct tokens; the tokens after the row's last mass were not drawn from it, and verification skips them."""
    left, tokens = list(row), []
    for _ in range(count):
        weights = left if sum(left) else [v not in tokens for v in range(len(row))]
        tokens += r.choices(range(len(row)), [float(w) for w in weights])
        left[tokens[-1]] = 0
    return tokens


def any_requests(seed):
    """One batch of requests, as arguments of the rule (a list of dicts) and of the op."""
    r = random.Random(seed)
    V, N = r.choice([2, 3, 4, 5, 6]), r.choice([2, 3, 5, 7])
    residual, cutoff, empty = RESIDUALS[seed % 3], CUTOFFS[seed // 3 % 3], EMPTY[seed // 9 % 2]
    max_depth = r.choice([1, 2, 3, N])
    C, table, offset = 0, None, 0
    if V >= 4 and seed % 5:
        C = r.randrange(3, V + 1)
        offset = r.randrange(V - C + 1)
        table = neighbor_table(C, r.randrange(2, C) if C > 3 else 2, seed=seed)
    requests = []
    for _ in range(B):
        parents = [-1]
        while len(parents) < N:  # a node has V children at most, as they are distinct tokens
            parents.append(r.choice([n for n in range(len(parents))[-3:] if parents.count(n) < V]))
        children = [[c for c in range(N) if parents[c] == n] for n in range(N)]
        is_sampled = r.random() < 0.5
        Q = [exact_row(r, V) if is_sampled and r.random() < 0.8 else None for _ in range(N)]
        P = [Q[n] if Q[n] and r.random() < 0.1 else exact_row(r, V) for n in range(N)]
        tokens = [0] * N
        for n in range(N):
            drawn = draw_without_replacement(r, Q[n] or exact_row(r, V), len(children[n]))
            for child, token in zip(children[n], drawn):
                tokens[child] = token
        omegas = [1, F(5, 4), F(3, 2), 2]
        if residual != "optimal" or table is None:
            omegas += [F(3, 4), F(1, 2), 0]
        steps = r.choice([8, 2**16])
        delta = {"tvd": F(r.randrange(9), 8), "ratio": F(r.randrange(9), 2), "jsd": F(r.randrange(1000), 4096)}[cutoff]
        requests.append(dict(
            P=P, Q=Q, tokens=tokens, parents=parents, children=children,
            uniforms=[F(r.randrange(steps), steps) for _ in range(N)],
            omega=[r.choice(omegas) if r.random() < 0.5 else 1 for _ in range(max_depth)], delta=delta,
            cutoff=cutoff, residual=residual, empty=empty, max_depth=max_depth, neighbors={} if table is None else {
                offset + c: [offset + v for v in row] for c, row in enumerate(table.tolist())}))

    def tensor(name, dtype=torch.float32):
        return torch.tensor([to_floats(request[name]) for request in requests], dtype=dtype, device=DEVICE)

    args = [tensor("P"), tensor("tokens", torch.int64), *links(torch.tensor([q["parents"] for q in requests])),
            tensor("uniforms")]
    draft_row = [[n if q else -1 for n, q in enumerate(request["Q"])] for request in requests]
    kwargs = dict(max_depth=max_depth, residual=residual, empty=empty, cutoff=cutoff, offset=offset,
                  omega=tensor("omega"),
                  draft_row=torch.tensor(draft_row, dtype=torch.int32, device=DEVICE),
                  draft_probs=torch.tensor([[to_floats(q or [0] * V) for q in request["Q"]] for request in requests],
                                           device=DEVICE))
    if table is not None:
        kwargs |= {"neighbors": table, "delta": tensor("delta")}
    return requests, args, kwargs


def to_floats(x):
    return [to_floats(y) for y in x] if isinstance(x, list) else float(x) if isinstance(x, F) else x


def run_rule(name, request, **changes):
    rule = RULE[name]
    arguments = request | changes
    return rule(**{name: arguments[name] for name in inspect.signature(rule).parameters})


def verify(request, **changes):
    return run_rule("verify", request, **changes)


def reached(request, outcome):
    """Which rules decided this request: another rule would have given another outcome, or another tv_excess."""
    accepted_nodes, _, tv_excess, was_empty = outcome
    end = accepted_nodes[-1] if accepted_nodes else 0
    proposals = ["point mass" if request["Q"][n] is None else "sampled" for n in (0, *accepted_nodes)]
    if accepted_nodes:
        yield f"accepted, {proposals[0]}"
    if request["children"][end] and len(accepted_nodes) < request["max_depth"]:
        yield f"rejected, {proposals[-1]}"
    if was_empty:
        yield f"empty residual, {request['residual']}"
    for empty in EMPTY:
        if verify(request, empty=empty) != outcome:
            yield f"{request['empty']} and not {empty}"
    if tv_excess:
        yield "tv_excess"
    if request["neighbors"] and verify(request, neighbors={}) != outcome:
        yield f"neighbors, {request['cutoff']}, {request['residual']}, {proposals[0]}"
    for cutoff in CUTOFFS:
        if request["neighbors"] and verify(request, cutoff=cutoff) != outcome:
            yield f"{request['cutoff']} and not {cutoff}"
    for residual in RESIDUALS:
        if verify(request, residual=residual) != outcome:
            yield f"{request['residual']} and not {residual}, {proposals[0]}"
    for side, limit in (("above", min), ("below", max)):
        if verify(request, omega=[limit(1, w) for w in request["omega"]]) != outcome:
            yield f"omega {side} 1, {request['residual']}, {proposals[0]}"
    if any(request["Q"]) and verify(request, Q=[None] * len(request["P"])) != outcome:
        yield "sampled and not point masses"
    if len(accepted_nodes) == request["max_depth"] and request["children"][end]:
        yield "max_depth"
    if accepted_nodes and accepted_nodes[0] != request["children"][0][0]:
        yield "a later sibling"


PROPOSALS = ("point mass", "sampled")
RULES = {
    *(f"{what}, {proposal}" for what in ("accepted", "rejected") for proposal in PROPOSALS),
    *(f"neighbors, {cutoff}, {residual}, {proposal}"
      for cutoff in CUTOFFS for residual in RESIDUALS for proposal in PROPOSALS),
    *(f"{cutoff} and not {other}" for cutoff in CUTOFFS for other in CUTOFFS if other != cutoff),
    *(f"{residual} and not {other}, {proposal}"
      for residual in RESIDUALS for other in RESIDUALS if other != residual for proposal in PROPOSALS),
    *(f"omega {side} 1, {residual}, {proposal}"
      for side in ("above", "below") for residual in RESIDUALS for proposal in PROPOSALS),
    "empty residual, relaxed", "empty residual, released", "target and not uniform", "uniform and not target",
    "tv_excess", "sampled and not point masses", "max_depth",
    "a later sibling",
}


@pytest.fixture(scope="module")
def batches():
    """Batches of requests, what the rule says of each, and what the op is given."""
    return [(requests, [verify(request) for request in requests], args, kwargs)
            for requests, args, kwargs in map(any_requests, range(BATCHES))]


def test_the_cases_reach_every_rule(batches):
    counts = Counter(rule for requests, outcomes, *_ in batches for request, outcome in zip(requests, outcomes)
                     for rule in reached(request, outcome))
    assert {rule for rule in RULES if counts[rule] < 3} == set()


def results(requests, args, kwargs):
    """For each request: accepted nodes, next token, whether a residual was empty; and tv_excess."""
    result = verify_tree(*args, **kwargs)
    assert set(result.status.tolist()) <= {0, EMPTY_RESIDUAL}
    for b in range(len(requests)):
        accepted_nodes = result.accepted_nodes[b, :result.num_accepted[b]].tolist()
        yield (accepted_nodes, result.next_token[b].item(), result.status[b].item() == EMPTY_RESIDUAL,
               result.tv_excess[b].item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_tree_decides_as_the_rule_says(batches, backend):
    for seed, (requests, outcomes, args, kwargs) in enumerate(batches):
        got = results(requests, args, kwargs | {"backend": backend})
        for b, (*decisions, tv_excess) in enumerate(got):
            *expected, expected_excess, was_empty = outcomes[b]
            assert decisions == [*expected, was_empty], f"request {b} of any_requests({seed})"
            assert tv_excess == pytest.approx(float(expected_excess), abs=1e-6), f"request {b} of any_requests({seed})"


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_tree_is_greedy_as_the_rule_says(batches, backend):
    counts = Counter()
    for seed, (requests, _, args, kwargs) in enumerate(batches):
        greedy = torch.ones(B, dtype=torch.bool, device=DEVICE)
        for b, got in enumerate(results(requests, args, kwargs | {"greedy": greedy, "backend": backend})):
            accepted_nodes, next_token, num_non_argmax = run_rule("verify_greedy", requests[b])
            assert got == (accepted_nodes, next_token, False, num_non_argmax), f"request {b} of any_requests({seed})"
            counts[len(accepted_nodes), num_non_argmax] += 1
    assert min(counts[0, 0], counts[1, 0], counts[2, 0], counts[1, 1], counts[2, 2]) > 3
