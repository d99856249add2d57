"""draft_frontier on numbers small enough to check by hand, and compared with the ops that it replaces."""
import math
from functools import partial

import pytest
import torch

from benchmarks.baselines import level_by_ops
from specvis_kernels import draft_frontier, guided_probs
from tests.cases import DEVICE, backends_but

INF, NAN = math.inf, math.nan
PLAIN = dict(guidance=1.0, temperature=1.0, top_k=0, top_p=1.0)


def tensors(**values):
    dtypes = {float: torch.float32, int: torch.int64}
    int32 = {"candidates", "width", "top_k"}
    out = {}
    for name, value in values.items():
        t = torch.tensor(value)
        out[name] = t.to(DEVICE, torch.int32 if name in int32 else dtypes[float if t.is_floating_point() else int])
    return out


def frontier(rows, scores=(0.0,), ancestors=(1,), candidates=(-1,), width=2, depth=9, K=2, level=1, first_node=1,
             first_candidate=0, backend=None):
    """One request whose rows are probabilities, without guidance and filters. The result as lists."""
    logits = torch.tensor([rows], dtype=torch.float64).log().float().to(DEVICE)
    given = tensors(scores=[scores], ancestors=[[[word] for word in ancestors]], candidates=[candidates],
                    width=[width], depth=[depth]) | PLAIN
    out = draft_frontier(logits, None, **given, num_children=K, level=level, first_node=first_node,
                         first_candidate=first_candidate, backend=backend)
    lists = {name: t[0].tolist() for name, t in out._asdict().items()}
    return lists | {"ancestors": [word for word, in lists["ancestors"]]}


def near(scores):
    return pytest.approx(scores, abs=1e-6)


def ln(p):
    return math.log(p)


def test_the_root_by_hand(backend):
    """Probabilities 1/8, 1/2, 1/8, 1/4: tokens 1 and 3 are nodes 1 and 2, below node 0."""
    out = frontier([[1/8, 1/2, 1/8, 1/4]], backend=backend)
    assert out == {
        "child_tokens": [1, 3], "child_scores": near([ln(1/2), ln(1/4)]), "child_parents": [-1, -1],
        "tokens": [1, 3], "scores": near([ln(1/2), ln(1/4)]), "rows": [0, 0], "ancestors": [0b011, 0b101],
        "candidates": [0, 1], "status": [0]}


def test_the_second_level_by_hand(backend):
    """Nodes 1 and 2, of scores ln 1/2 and ln 1/4, were candidates 0 and 1. Four children: 9/20, 1/20, 1/5, 1/20."""
    out = frontier([[0.9, 0.1, 0], [0, 0.2, 0.8]], [ln(1/2), ln(1/4)], [0b011, 0b101], [0, 1], level=2, first_node=3,
                   first_candidate=2, backend=backend)
    assert out == {
        "child_tokens": [0, 1, 2, 1], "child_scores": near([ln(0.45), ln(0.05), ln(0.2), ln(0.05)]),
        "child_parents": [0, 0, 1, 1], "tokens": [0, 2], "scores": near([ln(0.45), ln(0.2)]), "rows": [0, 1],
        "ancestors": [0b01011, 0b10101], "candidates": [2, 4], "status": [0, 0]}


def test_a_slot_that_is_not_used_has_no_children_and_is_not_looked_at(backend):
    out = frontier([[NAN, 1/2], [1/4, 3/4], [1/4, 3/4]], [-INF, -1.0, NAN], [0, 5, 0], [-1, 7, -1], first_node=4,
                   first_candidate=9, backend=backend)
    assert out["child_tokens"] == [0, 0, 1, 0, 0, 0] and out["child_parents"] == [-1, -1, 7, 7, -1, -1]
    assert out["tokens"] == [1, 0] and out["rows"] == [1, 1] and out["candidates"] == [11, 12]
    assert out["ancestors"] == [0b010101, 0b100101] and out["status"] == [0, 0, 0]


def test_the_last_bit_of_a_word_and_the_first_of_the_next(backend):
    """Nodes 63 and 64, below a node whose ancestors are nodes 1 and 65."""
    given = tensors(scores=[[0.0]], ancestors=[[[2, 2]]], candidates=[[-1]], width=[2], depth=[9]) | PLAIN
    out = draft_frontier(torch.zeros(1, 1, 4, device=DEVICE), None, **given, num_children=2, level=1, first_node=63,
                         first_candidate=0, backend=backend)
    assert out.ancestors.tolist() == [[[2 - 2**63, 2], [2, 3]]]
    full = frontier([[1/2, 1/2]], first_node=62, backend=backend)  # a word has no room for more
    assert full["ancestors"] == [1 | 1 << 62, 1 - 2**63]


@pytest.mark.parametrize("V, K, max_depth, dtype", [(40, 3, 4, torch.float32), (300, 10, 7, torch.float32),
                                                    (1500, 6, 3, torch.bfloat16)])
def test_equals_the_ops_that_it_stands_for(backend, V, K, max_depth, dtype):
    """Level by level: each output of each level, bit for bit. Requests differ in all that they may differ in."""
    if backend == "triton" and DEVICE == "cpu":
        V, K, max_depth = 40, 3, 3
    g = torch.Generator().manual_seed(V)
    B = 6
    given = tensors(guidance=[1.0, 7.5, 3.0, 2.0, 1.2, 4.0], temperature=[1.0, 0.7, 1.0, 0.0, 1.3, 1.0],
                    top_k=[0, 20, 3, 0, 100, 1], top_p=[1.0, 1.0, 0.9, 1.0, 0.8, 1.0])
    width = torch.tensor([K, K - 1, 2, K, 1, K], dtype=torch.int32, device=DEVICE)
    depth = torch.tensor([max_depth, max_depth - 1, max_depth, 1, max_depth, 2], device=DEVICE)

    def logits(F):
        x = torch.randn(B, F, V, generator=g).mul(3)
        x[0] = x[0].round()              # ties
        x[4, F - 1, V // 2] = NAN        # the root's row among them
        return x.to(DEVICE, dtype)

    W = -(-(1 + max_depth * K) // 64)
    scores = torch.zeros(B, 1, device=DEVICE)
    candidates = torch.full((B, 1), -1, dtype=torch.int32, device=DEVICE)
    ancestors = torch.zeros(B, 1, W, dtype=torch.int64, device=DEVICE)
    ancestors[..., 0] = 1
    first_node, first_candidate = 1, 0
    for level in range(1, max_depth + 1):
        rows = [logits(1 if level == 1 else K) for _ in range(2)]
        out, expected = (draft(*rows, scores, ancestors, candidates, width, depth, **given, num_children=K, level=level,
                               first_node=first_node, first_candidate=first_candidate)
                         for draft in (partial(draft_frontier, backend=backend), level_by_ops))
        for name, got, wanted in zip(out._fields, out, expected):
            assert got.dtype == wanted.dtype and got.equal(wanted), f"{name} of level {level}"
        scores, ancestors, candidates = out.scores, out.ancestors, out.candidates
        first_node, first_candidate = first_node + K, first_candidate + out.child_tokens.shape[1]
    assert not (scores > -INF).any() and (out.child_scores[0] > -INF).all()


@pytest.mark.parametrize("backend", backends_but("draft_frontier", "oracle", "triton", "cuda_emulated"))
@pytest.mark.parametrize("V", [4096, 16384, 5003])
@pytest.mark.parametrize("top_k, top_p", [(100, 0.8), (1000, 1.0), (0, 1.0), (0, 0.9), (7, 1.0)])
def test_agrees_with_the_oracle_on_long_rows(backend, V, top_k, top_p):
    g = torch.Generator().manual_seed(V + top_k)
    logits, uncond = torch.randn(2, 2, 6, V, generator=g).to(DEVICE)
    given = tensors(scores=[[0.0, -1.0, -2.0, -0.5, -INF, -0.1]] * 2, ancestors=[[[1], [3], [5], [7], [0], [9]]] * 2,
                    candidates=[[3, 4, 5, 6, -1, 8]] * 2, width=[10, 6], depth=[5, 4], guidance=[1.2, 2.0],
                    temperature=[1.0, 0.9], top_k=[top_k] * 2, top_p=[top_p] * 2)
    got, expected = (draft_frontier(logits, uncond, **given, num_children=10, level=3, first_node=20, first_candidate=9,
                                    backend=name) for name in (backend, "oracle"))
    assert all(a.equal(b) for a, b in zip(got, expected)) and (expected.candidates >= 0).sum() >= 13


def test_probabilities_that_round_alike_are_ties(backend):
    """exp of the two logits differs in its last bit and their quotients by the total do not: the lower id is first."""
    g = torch.Generator().manual_seed(1)
    x = -torch.rand(1, 1, 64, generator=g) * 2**-20
    given = tensors(scores=[[0.0]], ancestors=[[[1]]], candidates=[[-1]], width=[64], depth=[1]) | PLAIN
    probs = guided_probs(x.to(DEVICE), None, **PLAIN, backend="oracle").probs[0, 0]
    out = draft_frontier(x.to(DEVICE), None, **given, num_children=60, level=1, first_node=1, first_candidate=0,
                         backend=backend)
    order = sorted(range(64), key=lambda v: (-probs[v].item(), v))[:60]
    assert out.child_tokens[0].tolist() == order and order != sorted(range(64), key=lambda v: -x[0, 0, v].item())[:60]
