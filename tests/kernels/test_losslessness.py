"""The tokens of verify_tree and sample_residual are distributed as the target, or as far from it as the rule says.

By enumeration: `rule` computes with fractions when a child is accepted and the rest after the last, so a
grid of uniforms on which the op's decisions fall evenly is known, and its counts give exact probabilities. By
chi-square on 2*10^5 draws where trees are drawn too. Either way `broken`, which holds every sibling against
the unmodified target, must fail.

The emulated CUDA kernel takes small grids. Of a large one it takes some cells, and must decide as the oracle does.
"""
import itertools
import math
from fractions import Fraction as F

import pytest
import torch
from torch.utils._pytree import tree_map_only

from specvis_kernels import backends, sample_residual, verify_tree
from tests.cases import DEVICE, links
from tests.cases.comparing import assert_agree

MOST_EMULATED = 1000  # cells of a grid
BACKENDS = [backend for backend in backends("verify_tree", DEVICE) if backend != "triton" or DEVICE != "cpu"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def normalized(counts):
    return [F(count) / sum(counts) for count in counts]


def kept_neighbors(R, x, neighbors, cutoff, delta):
    """The longest prefix of x's neighbors that the cutoff, "tvd" or "ratio", allows."""
    if neighbors is None:
        return []
    sums = list(itertools.accumulate(R[v] for v in neighbors[x]))
    return neighbors[x][:sum(s <= (delta if cutoff == "tvd" else delta * R[x]) for s in sums)]


def rule(P, children, Q=None, omega=F(1), neighbors=None, cutoff=None, delta=None, residual="optimal"):
    """Each child's probability of being accepted once the earlier ones were not; the rest at the end."""
    R, accept_probs = list(P), []
    for i, x in enumerate(children):
        proposal = [F(v == x) for v in range(len(P))] if Q is None else normalized(
            [0 if v in children[:i] else Q[v] for v in range(len(P))])
        A = kept_neighbors(R, x, neighbors, cutoff, delta)
        accept_probs.append(min(F(1), omega * (R[x] + sum(R[a] for a in A)) / proposal[x]))
        if residual == "relaxed":
            R = [R[v] + sum(R[a] for a in A) if v == x else 0 if v in A else R[v] for v in range(len(P))]
            R = [max(r - q, 0) for r, q in zip(R, proposal)]
        else:
            R = [max(r - q, (1 - omega) * r, 0) for r, q in zip(R, proposal)]
        R = normalized(R) if sum(R) else list(P)
    return accept_probs, R


def grid(*denominators):
    """Uniforms at the middle of every cell, one column per denominator: (product of them, how many)."""
    assert math.prod(denominators) <= 10**6
    cells = torch.cartesian_prod(*[(torch.arange(d, dtype=torch.float64) + 0.5) / d for d in denominators])
    return cells.view(-1, len(denominators)).float()


def verified(backend, args, options):
    B = len(args[0])
    if backend != "cuda_emulated" or B <= MOST_EMULATED:
        return verify_tree(*args, **options, backend=backend)
    some = torch.randperm(B, generator=torch.Generator().manual_seed(0))[:MOST_EMULATED]
    result = verify_tree(*args, **options, backend="oracle")
    args, options = tree_map_only(torch.Tensor, lambda a: a[some] if len(a) == B else a, (args, options))
    assert_agree("verify_tree", verify_tree(*args, **options, backend=backend), [a[some] for a in result])
    return result


def emit(backend, P, children, Q, uniforms, neighbors=None, cutoff=None, delta=None, omega=None, **options):
    """The first token after the root, be it the accepted child or drawn instead. And the expected tv_excess."""
    B, N = uniforms.shape
    assert N == len(children) + 1
    tokens = torch.tensor([0, *children]).repeat(B, 1)
    first_child, next_sibling = links(torch.tensor([[-1] + [0] * (N - 1)]).repeat(B, 1))
    if Q is not None:
        options["draft_probs"] = torch.tensor([float(q) for q in Q]).repeat(B, 1, 1).to(DEVICE)
        options["draft_row"] = torch.zeros(B, N, dtype=torch.int32, device=DEVICE)
    if neighbors is not None:
        options |= {"neighbors": torch.tensor(neighbors, dtype=torch.int32, device=DEVICE), "cutoff": cutoff,
                    "delta": torch.full((B,), float(delta), device=DEVICE)}
    if omega is not None:
        options["omega"] = torch.full((B, 1), float(omega), device=DEVICE)
    result = verified(backend, (torch.tensor([float(p) for p in P]).repeat(B, N, 1).to(DEVICE), tokens.to(DEVICE),
                                first_child, next_sibling, uniforms.to(DEVICE)), options | {"max_depth": 1})
    assert not result.status.any()
    accepted = tokens.to(DEVICE).gather(1, result.accepted_nodes.clamp(min=0).long()).squeeze(1)
    token = torch.where(result.num_accepted > 0, accepted, result.next_token)
    return token.cpu(), result.tv_excess.double().mean().item()


def broken(P, children, Q, uniforms):
    """The negative control, wrong: every sibling against the unmodified P (B, V), and at the end [P - Q]+."""
    B, V = P.shape
    token, left = torch.full((B,), -1), torch.ones(B, V) if Q is None else Q.clone()
    for i in range(children.shape[1]):
        x = children[:, i:i + 1]
        share = torch.ones(B, 1) if Q is None else left.gather(1, x) / left.sum(1, keepdim=True)
        yes = (token < 0) & (uniforms[:, i + 1:i + 2] * share < P.gather(1, x)).squeeze(1)
        token = torch.where(yes, x.squeeze(1), token)
        left = left.scatter(1, x, 0.0)
    residual = P * left if Q is None else (P - Q).clamp(min=0)
    drawn = (residual.cumsum(1) <= uniforms[:, :1] * residual.sum(1, keepdim=True)).sum(1).clamp(max=V - 1)
    return torch.where(token < 0, drawn, token)


def broken_rule(P, children, Q=None, omega=None):
    accept_probs, left = [], [F(1)] * len(P) if Q is None else list(Q)
    for x in children:
        accept_probs.append(min(F(1), P[x] / (1 if Q is None else left[x] / sum(left))))
        left[x] = F(0)
    residual = [p * q for p, q in zip(P, left)] if Q is None else [max(p - q, 0) for p, q in zip(P, Q)]
    return accept_probs, normalized(residual)


def distribution(emit_one, rule_of, P, orders, Q=None):
    """Exact distribution of the first token over drafts and uniforms, and its exact expected tv_excess."""
    result, tv_excess = [F(0)] * len(P), 0.0
    for children in orders:
        draft_prob, left = F(1), F(1)
        if Q is not None:  # the probability of drawing these children in this order
            for x in children:
                draft_prob, left = draft_prob * Q[x] / left, left - Q[x]
        accept_probs, residual = rule_of(P, children, Q)
        draws = math.lcm(*[c.denominator for c in itertools.accumulate(residual)])
        uniforms = grid(draws, *[a.denominator for a in accept_probs])
        tokens, mean_excess = emit_one(P, children, Q, uniforms)
        for token, count in zip(*tokens.unique(return_counts=True)):
            result[token] += draft_prob * F(count.item(), len(uniforms))
        tv_excess += float(draft_prob) * mean_excess
    return result, tv_excess


def total_variation(a, b):
    return sum(abs(x - y) for x, y in zip(a, b)) / 2


def assert_lossless(emit_one, rule_of, P, orders, Q=None):
    assert distribution(emit_one, rule_of, P, orders, Q) == (P, 0)  # tv_excess


SIX = normalized([3, 3, 2, 2, 1, 1])
FOUR, DRAFT = normalized([5, 4, 2, 1]), normalized([3, 3, 3, 3])
SKEWED, UNLIKE = normalized([2, 3, 2, 1]), normalized([3, 1, 2, 2])


def emit_broken(P, children, Q, uniforms):
    B = len(uniforms)
    rows = torch.tensor([float(p) for p in P]).repeat(B, 1)
    drafts = None if Q is None else torch.tensor([float(q) for q in Q]).repeat(B, 1)
    return broken(rows, torch.tensor(children).repeat(B, 1), drafts, uniforms), 0.0


@each_backend
@pytest.mark.parametrize("omega", [F(1), F(1, 2), F(0)])
@pytest.mark.parametrize("children", [(0,), (3,), (0, 1), (4, 1), (0, 1, 2, 3), (5, 2, 0)])
def test_point_masses_are_lossless(backend, omega, children):
    def emit_one(*args):
        return emit(backend, *args, omega=omega)

    assert_lossless(emit_one, lambda P, c, Q: rule(P, c, Q, omega), SIX, [children])


@each_backend
@pytest.mark.parametrize("P, Q, siblings, omega", [
    (FOUR, DRAFT, 1, F(1)), (FOUR, DRAFT, 2, F(1)), (FOUR, DRAFT, 4, F(1)),
    (SKEWED, UNLIKE, 1, F(1)), (SKEWED, UNLIKE, 2, F(1)), (SKEWED, UNLIKE, 4, F(1)),
    (FOUR, DRAFT, 1, F(1, 2)), (FOUR, DRAFT, 2, F(1, 2)),
    (SKEWED, UNLIKE, 1, F(3, 4)), (SKEWED, UNLIKE, 2, F(3, 4)),
])
def test_children_drawn_without_replacement_are_lossless(backend, P, Q, siblings, omega):
    def emit_one(*args):
        return emit(backend, *args, omega=None if omega == 1 else omega)

    orders = list(itertools.permutations(range(4), siblings))
    assert_lossless(emit_one, lambda P, c, Q: rule(P, c, Q, omega), P, orders, Q)


@pytest.mark.parametrize("P, Q, orders, distance", [
    (SIX, None, [(0, 1)], 0.05),
    (SIX, None, [(0, 1, 2, 3)], 0.1),
    (SKEWED, UNLIKE, list(itertools.permutations(range(4), 2)), 0.05),
    (FOUR, DRAFT, list(itertools.permutations(range(4), 4)), 0.05),
])
def test_the_same_enumeration_rejects_the_negative_control(P, Q, orders, distance):
    with pytest.raises(AssertionError):
        assert_lossless(emit_broken, broken_rule, P, orders, Q)
    assert total_variation(distribution(emit_broken, broken_rule, P, orders, Q)[0], P) > distance


def test_the_negative_control_is_right_with_a_single_draft():
    """So it is the siblings that it gets wrong, and the enumeration is not at fault."""
    assert_lossless(emit_broken, broken_rule, SKEWED, [(v,) for v in range(4)], UNLIKE)


@each_backend
def test_every_node_of_a_path_is_followed_by_its_own_row(backend):
    """A tree of depth 3 with a row for every node: once it is visited, the next token has that row."""
    parents = [-1, 0, 0, 1, 1, 3]
    tokens = [0, 0, 1, 2, 0, 1]
    rows = [normalized(counts) for counts in (
        [4, 2, 1, 1], [2, 1, 4, 1], [1, 1, 1, 1], [1, 4, 2, 1], [1, 2, 1, 4], [1, 1, 2, 4])]
    accept_probs, draws = {}, []
    for n in range(6):
        children = [c for c in range(6) if parents[c] == n]
        of_children, residual = rule(rows[n], [tokens[c] for c in children])
        accept_probs |= dict(zip(children, of_children))
        draws += [c.denominator for c in itertools.accumulate(residual)]
    uniforms = grid(math.lcm(*draws), *[accept_probs[n].denominator for n in range(1, 6)]).to(DEVICE)
    B = len(uniforms)
    first_child, next_sibling = links(torch.tensor([parents]).repeat(B, 1))
    result = verify_tree(
        torch.tensor([[[float(p) for p in row] for row in rows]]).repeat(B, 1, 1).to(DEVICE),
        torch.tensor([tokens]).repeat(B, 1).to(DEVICE), first_child, next_sibling, uniforms, max_depth=3,
        backend=backend)
    nodes, num_accepted, next_token = (t.cpu() for t in result[:3])
    visits = torch.cat([torch.zeros_like(nodes[:, :1]), nodes], 1)  # node 0, then the accepted ones
    emitted = torch.tensor(tokens)[nodes.clamp(min=0).long()]
    emitted = torch.cat([emitted, emitted[:, :1]], 1).scatter(1, num_accepted.long().unsqueeze(1),
                                                              next_token.unsqueeze(1))
    for n in range(6):
        followed_by = emitted[visits == n]
        assert len(followed_by) > 0
        assert [F((followed_by == v).sum().item(), len(followed_by)) for v in range(4)] == rows[n]


@pytest.mark.parametrize("backend", [b for b in backends("sample_residual", DEVICE) if b in BACKENDS])
@pytest.mark.parametrize("omega", [F(1), F(1, 2)])
def test_a_loop_of_its_own_with_sample_residual_is_lossless(backend, omega):
    def emit_one(P, children, Q, uniforms):
        B, (x,) = len(uniforms), children
        rows, drafts = (torch.tensor([float(p) for p in row]).repeat(B, 1).to(DEVICE) for row in (P, Q))
        token, status = sample_residual(rows, drafts, uniforms[:, 0].contiguous().to(DEVICE),
                                        omega=torch.full((B,), float(omega), device=DEVICE), backend=backend)
        yes = uniforms[:, 1] * float(Q[x]) < float(omega * P[x])
        assert not status[~yes.to(DEVICE)].any()
        return torch.where(yes, x, token.cpu()), 0.0

    assert_lossless(emit_one, lambda P, c, Q: rule(P, c, Q, omega), SKEWED, [(v,) for v in range(4)], UNLIKE)


@each_backend
@pytest.mark.parametrize("P, Q, omega", [
    (FOUR, DRAFT, F(3, 2)), (FOUR, DRAFT, F(3)), (SKEWED, UNLIKE, F(1)), (SKEWED, UNLIKE, F(5, 4)),
    (SKEWED, UNLIKE, F(2)), (SIX, normalized([1, 2, 3, 1, 2, 3]), F(2)),
])
def test_one_relaxed_draft_is_as_far_as_the_formula_says(backend, P, Q, omega):
    """TV = sum min(Q, omega P) - sum min(Q, P), and that is the mean of tv_excess."""
    def emit_one(*args):
        return emit(backend, *args, omega=omega)

    orders = [(v,) for v in range(len(P))]
    got, tv_excess = distribution(emit_one, lambda P, c, Q: rule(P, c, Q, omega), P, orders, Q)
    expected = sum(min(q, omega * p) - min(q, p) for p, q in zip(P, Q))
    assert total_variation(got, P) == expected
    assert tv_excess == pytest.approx(float(expected), abs=1e-6)


@each_backend
@pytest.mark.parametrize("Q", [None, UNLIKE])
@pytest.mark.parametrize("cutoff, delta", [("ratio", F(1)), ("ratio", F(3)), ("tvd", F(1, 4)), ("tvd", F(1, 2))])
def test_tv_excess_is_the_distance_with_neighborhoods_too(backend, Q, cutoff, delta):
    table = [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    options = dict(neighbors=table, cutoff=cutoff, delta=delta)
    for children in [(v,) for v in range(4)] if Q is None else [None]:
        orders = [(v,) for v in range(4)] if children is None else [children]
        got, tv_excess = distribution(lambda *args: emit(backend, *args, **options),
                                      lambda P, c, Q: rule(P, c, Q, **options), SKEWED, orders, Q)
        assert tv_excess == pytest.approx(float(total_variation(got, SKEWED)), abs=1e-6)


@each_backend
@pytest.mark.parametrize("x, delta, S", [
    (3, F(0), 0), (3, F(1, 4), 2), (3, F(5, 8), 5), (0, F(3, 8), 3), (1, F(1, 8), 0),
])
def test_a_tvd_cutoff_moves_exactly_its_mass(backend, x, delta, S):
    """One point mass, relaxed: what is emitted is P with the kept neighbors' mass S (in eighths) on x."""
    table = [[1, 2, 3], [0, 3, 2], [3, 0, 1], [2, 1, 0]]
    options = dict(neighbors=table, cutoff="tvd", delta=delta, residual="relaxed")
    got, tv_excess = distribution(lambda *args: emit(backend, *args, **options),
                                  lambda P, c, Q: rule(P, c, Q, **options), SKEWED, [(x,)])
    A = kept_neighbors(SKEWED, x, table, "tvd", delta)
    moved = [0 if v in A else p + (F(S, 8) if v == x else 0) for v, p in enumerate(SKEWED)]
    assert got == moved and total_variation(got, SKEWED) == F(S, 8)
    assert tv_excess == pytest.approx(S / 8, abs=1e-6)


DRAWS, ACCEPT_ABOVE, REJECT_BELOW = 2 * 10**5, 1e-4, 1e-30


def p_value(counts, probs):
    """Pearson's chi-square of counts (R, V) against probs (R, V), with R (V - 1) degrees of freedom."""
    expected = counts.sum(1, keepdim=True).double() * probs.double()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(counts.numel() - len(counts), dtype=torch.float64)
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def histogram(pairs, R, V):
    return torch.bincount(pairs, minlength=R * V).view(R, V)


@pytest.mark.parametrize("siblings, sampled, omega", [
    (1, True, None), (2, True, None), (4, True, None), (2, False, None), (4, False, None), (4, True, 0.7),
])
def test_random_trees_by_chi_square(siblings, sampled, omega):
    """A Markov chain over 8 tokens and trees of depth 2, drawn anew each time: both tokens follow the chain. The draft
    is a chain of its own. Point masses are the draft's most probable tokens."""
    V, m, g = 8, siblings, torch.Generator().manual_seed(siblings + 10 * sampled)
    target, draft = ((torch.randn(V, V, generator=g) * 1.2).softmax(-1) for _ in range(2))
    N = 1 + m + m * 2                              # the root's m children, then 2 of each
    parents = [-1] + [0] * m + [1 + i // 2 for i in range(2 * m)]
    backend = "cpu" if "cpu" in BACKENDS else BACKENDS[0]

    def propose(contexts, count):
        noise = -(-torch.rand(len(contexts), V, generator=g).clamp(min=1e-30).log()).log() if sampled else 0
        return (draft[contexts].log() + noise).topk(count, dim=1).indices

    first, second, control = torch.zeros(1, V), torch.zeros(V, V), torch.zeros(1, V)
    chunk = 50000
    for _ in range(DRAWS // chunk):
        root = torch.zeros(chunk, 1, dtype=torch.int64)
        children = propose(root[:, 0], m)
        grandchildren = propose(children.flatten(), 2).view(chunk, 2 * m)
        tokens = torch.cat([root, children, grandchildren], 1)
        uniforms = torch.rand(chunk, N, generator=g)
        options = {}
        if sampled:
            rows = torch.cat([root, children], 1)
            draft_row = torch.arange(N, dtype=torch.int32).clamp(max=m)
            options = {"draft_probs": draft[rows].to(DEVICE), "draft_row": draft_row.repeat(chunk, 1).to(DEVICE)}
        if omega:
            options["omega"] = torch.tensor([1.0, omega]).flip(0).repeat(chunk, 1).to(DEVICE)
        first_child, next_sibling = (t.repeat(chunk, 1) for t in links(torch.tensor([parents])))
        accepted_nodes, num_accepted, next_token, _, status = (t.cpu() for t in verify_tree(
            target[tokens].to(DEVICE), tokens.to(DEVICE), first_child, next_sibling, uniforms.to(DEVICE),
            max_depth=2, **options, backend=backend))
        assert not status.any()
        emitted = torch.cat([tokens.gather(1, accepted_nodes.clamp(min=0).long()), root], 1)
        emitted = emitted.scatter(1, num_accepted.long().unsqueeze(1), next_token.unsqueeze(1))
        first += histogram(emitted[:, 0], 1, V)
        deep = num_accepted > 0
        second += histogram(emitted[deep, 0] * V + emitted[deep, 1], V, V)
        control += histogram(broken(target[root[:, 0]], children, draft[root[:, 0]] if sampled else None,
                                    uniforms[:, :m + 1]), 1, V)
    assert p_value(first, target[:1]) > ACCEPT_ABOVE
    enough = (second.sum(1, keepdim=True) * target).min(1).values > 5
    assert enough.any() and p_value(second[enough], target[enough]) > ACCEPT_ABOVE
    if m == 1:
        assert p_value(control, target[:1]) > ACCEPT_ABOVE
    else:
        assert p_value(control, target[:1]) < REJECT_BELOW
