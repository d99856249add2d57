"""verify_logits by hand, and against the ops that it puts together."""
import itertools
import math

import pytest
import torch

from specvis_kernels import draw_tokens, guided_probs, verify_greedy, verify_logits, verify_tree
from specvis_kernels.status import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE
from tests import cases
from tests.cases import DEVICE, links, tensor

NAN, INF = math.nan, math.inf
ROW = [8, 4, 2, 2]  # proportions of the four tokens


def verify(backend, rows, tokens, parents, uniforms, *, max_depth=None, neighbors=None, draft=None, draft_row=None,
           guidance=1.0, temperature=1.0, top_k=0, top_p=1.0, uncond=None, id_range=None, omega=None, seed=None,
           first_child=None, next_sibling=None, **options):
    """One request, of rows of proportions: its accepted nodes, the token after them, its tv_excess and status."""
    N = len(tokens)
    max_depth = N - 1 if max_depth is None else max_depth

    def logits(rows):
        rows = rows * N if len(rows) == 1 else rows  # one row: at every node
        return tensor([[[math.log(x) if x > 0 else x or -INF for x in row] for row in rows]])

    tree = links(torch.tensor([parents])) if parents else (tensor([first_child], torch.int32),
                                                           tensor([next_sibling], torch.int32))
    if neighbors is not None:
        options["neighbors"] = tensor(neighbors, torch.int32)
    if draft is not None:
        options |= {"draft_probs": tensor([draft]), "draft_row": tensor([draft_row or [0] * N], torch.int32)}
    if omega is not None:
        options["omega"] = tensor([omega])
    if isinstance(id_range, list):
        id_range = tensor([id_range], torch.int64)
    if seed is not None:
        options |= {"seeds": tensor([seed], torch.int64), "positions": torch.arange(N, device=DEVICE).view(1, N)}
    result = verify_logits(
        logits(rows), None if uncond is None else logits(uncond), tensor([tokens], torch.int64), *tree,
        None if seed is not None else tensor([uniforms]), guidance, temperature, top_k, top_p, max_depth=max_depth,
        id_range=id_range, **options, backend=backend)
    accepted_nodes, num_accepted, next_token, tv_excess, status = (t[0].tolist() for t in result)
    assert accepted_nodes[num_accepted:] == [-1] * (max_depth - num_accepted)
    return accepted_nodes[:num_accepted], next_token, tv_excess, status


@pytest.mark.parametrize("uniforms, accepted_nodes, token", [
    # Node 1 proposes token 0, which has 1/2; node 2, after it, token 1: 1/4 of the remaining 1/2.
    ([0.0, 0.0, 0.0], [1], 0),
    ([0.6, 0.49, 0.0], [1], 1),
    ([0.0, 0.51, 0.49], [2], 0),
    ([0.0, 0.51, 0.51], [], 2),
    ([0.51, 0.99, 0.99], [], 3),
])
def test_by_hand(backend, uniforms, accepted_nodes, token):
    assert verify(backend, [ROW], [9, 0, 1], [-1, 0, 0], uniforms) == (accepted_nodes, token, 0.0, 0)
    # Guidance 2 and 8, 4, 2, 2 squared by 8, 8, 4, 4: an equal row.
    cond, uncond = [[8, 8, 4, 4]], [[8, 16, 8, 8]]
    assert verify(backend, cond, [9, 0, 1], [-1, 0, 0], uniforms, uncond=uncond,
                  guidance=2.0) == (accepted_nodes, token, 0.0, 0)


@pytest.mark.parametrize("settings, uniform, is_accepted, token", [
    ({}, 0.24, True, 3),
    ({}, 0.26, False, 3),
    ({"top_k": 2}, 0.33, True, 1),                   # 4 of 12
    ({"top_k": 2}, 0.34, False, 0),
    ({"top_k": 1}, 0.0, False, 0),
    ({"top_k": 2, "top_p": 0.6}, 0.0, False, 0),     # top-k first: 8/12 >= 0.6
    ({"top_k": 2, "top_p": 0.6, "filters": "p_then_k"}, 0.33, True, 1),
    ({"temperature": 0.5}, 0.18, True, 1),           # 16 of 88, and 80 of 88 are below 0.9
    ({"temperature": 0.5}, 0.19, False, 2),
    ({"id_range": (1, 3)}, 0.66, True, 2),           # 4 of 6
    ({"id_range": (1, 3)}, 0.67, False, 2),
    ({"id_range": [[0, 1], [0, 4]]}, 0.0, False, 0),
    ({"id_range": [[1, 2], [3, 4]]}, 0.99, True, 3),  # forced, and a forced token after it
])
def test_settings_by_hand(backend, settings, uniform, is_accepted, token):
    """A child with token 1, and a last draw at 0.9."""
    accepted_nodes, next_token, _, status = verify(backend, [ROW], [9, 1], [-1, 0], [0.9, uniform], **settings)
    assert (bool(accepted_nodes), next_token, status) == (is_accepted, token, 0)


def test_temperature_0_is_greedy(backend):
    """Filters and uniforms have no part in it. Of the tokens 0 and 1 both paths are tried; the deeper one wins."""
    args = ([ROW, [1, 9, 1, 1], [1, 1, 1, 9], ROW], [9, 0, 1, 1], [-1, 0, 0, 1], 4 * [0.999])
    assert verify(backend, *args, temperature=0.0, top_k=1, top_p=0.1) == ([1, 3], 0, 0.0, 0)
    relaxed = dict(neighbors=[[1, 2], [0, 2], [3, 1], [2, 1]], delta=0.5)  # token 1 and 0: 3/4
    assert verify(backend, [ROW, ROW, [1, 1, 1, 9]], [9, 3, 1], [-1, 0, 0], 3 * [0.9], temperature=0.0,
                  **relaxed) == ([2], 3, 1.0, 0)


@pytest.mark.parametrize("residual", ["optimal", "relaxed", "released"])
def test_a_forced_token_is_never_relaxed(backend, residual):
    """Token 2 is forced at the root. Every token is a neighbor of every other, and all of them fit."""
    table = [[b for b in range(4) if b != a] for a in range(4)]
    settings = dict(neighbors=table, delta=1.0, residual=residual, id_range=[[2, 3], [0, 4], [0, 4], [0, 4]])
    for temperature in (1.0, 0.0):
        for token in (0, 1, 3):
            got = verify(backend, [ROW], [9, token, token, token], [-1, 0, 0, 0], 4 * [0.0], temperature=temperature,
                         **settings)
            assert got == ([], 2, 0.0, 0)
        got = verify(backend, [ROW], [9, 1, 2, 3], [-1, 0, 0, 0], [0.0, 0.0, 0.999, 0.0], temperature=temperature,
                     **settings)
        assert got == ([2], 0, 0.0, 0)
    # Without the range token 1 is taken for token 2.
    del settings["id_range"]
    assert verify(backend, [[0, 0, 1, 0]], [9, 1], [-1, 0], [0.0, 0.9], **settings)[0] == [1]


def test_no_token_outside_the_range_is_accepted(backend):
    """Its neighbors inside have mass, which does not count for it. Token 1 is inside, and relaxed as ever."""
    settings = dict(neighbors=[[1, 2], [2, 3], [1, 3], [1, 2]], delta=1.0)
    for ids in ((1, 3), [[1, 3], [1, 3]]):
        assert verify(backend, [ROW], [9, 0], [-1, 0], [0.0, 0.0], id_range=ids, **settings) == ([], 1, 0.0, 0)
        assert verify(backend, [ROW], [9, 3], [-1, 0], [0.0, 0.0], id_range=ids, **settings) == ([], 1, 0.0, 0)
        accepted_nodes, _, tv_excess, status = verify(backend, [ROW], [9, 1], [-1, 0], [0.0, 0.9], id_range=ids,
                                                      **settings)
        assert (accepted_nodes, status) == ([1], 0) and tv_excess == pytest.approx(1 / 3)


def test_the_order_of_the_candidates_is_that_of_their_ids(backend):
    """Under "relaxed" a rejected token without mass gets its neighbors' mass, and is drawn in its place."""
    settings = dict(top_k=3, neighbors=[[1, 2, 3], [2, 0, 3], [1, 0, 3], [2, 1, 0]], delta=0.3, residual="relaxed",
                    draft=[[0.0, 1.0, 0.0, 0.0]])
    rows = [[8, 0, 4, 4]]
    for u, token in ((0.0, 0), (0.9, 3)):  # all of the draft is token 1's, whose relaxed mass is 1/4
        assert verify(backend, rows, [9, 1], [-1, 0], [u, 0.3], **settings)[:2] == ([], token)
    settings["draft"] = [[0.0, 0.125, 0.875, 0.0]]  # R': 1/2, 1/4, 0, 1/4; R' - Q: 4/8, 1/8, 0, 2/8
    for u, token in ((0.5, 0), (0.6, 1), (0.7, 1), (0.72, 3)):
        assert verify(backend, rows, [9, 1], [-1, 0], [u, 1.0], omega=[0.0], **settings)[:2] == ([], token)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_rejected_sibling_is_no_longer_in_the_draft(backend, top_k):
    """R - Q leaves 6/10, 4/10, 0 after token 0. Without it Q is 0, 1/7, 2/7, 4/7, so token 0 then has 7/10."""
    draft = [[0.125, 0.125, 0.25, 0.5]]
    rows = [[8, 6, 2, 1 if top_k else 0]]
    for u, token in ((0.69, 0), (0.71, 1)):
        got = verify(backend, rows, [9, 0, 3], [-1, 0, 0], [u, 0.5, 0.5], draft=draft, omega=[0.0], residual="relaxed",
                     top_k=top_k, max_depth=1)
        assert got == ([], token, 0.0, 0)


def test_statuses(backend):
    chain = dict(tokens=[9, 0, 0], parents=[-1, 0, 1], uniforms=[0.9, 0.0, 0.0])
    bad = [NAN, 1, 1, 1]
    assert verify(backend, [bad, ROW, ROW], **chain) == ([], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW, ROW, bad], **chain) == ([1, 2], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW], **chain, temperature=tensor([-1.0])) == ([], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW], **chain, id_range=[[0, 4], [0, 5], [0, 4]]) == ([1], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW], **chain, id_range=[[0, 4], [0, 4], [3, 3]]) == ([1, 2], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW], **chain, draft=[4 * [0.0]]) == ([], 3, 0.0, INVALID_DRAFT)
    assert verify(backend, [ROW], **chain, top_k=2, draft=[[NAN, 1, 0, 0]]) == ([], 1, 0.0, INVALID_DRAFT)
    for top_k in 0, 2:  # token 0 has no mass in its row
        assert verify(backend, [ROW], **chain, top_k=top_k, draft=[[0.0, 1, 0, 0]])[::3] == ([], INVALID_DRAFT)
    assert verify(backend, [ROW], **chain, draft=[ROW], draft_row=[1, 0, 0]) == ([], 3, 0.0, INVALID_TREE)
    assert verify(backend, [ROW], **chain, omega=[1.0, -1.0]) == ([], 3, 0.0, INVALID_RULE)
    assert verify(backend, [ROW], [9, 4], [-1, 0], [0.9, 0.0]) == ([], 3, 0.0, INVALID_TREE)
    assert verify(backend, [ROW], [9, 0], None, [0.9, 0.0], first_child=[2, -1],
                  next_sibling=[-1, -1]) == ([], 3, 0.0, INVALID_TREE)
    one_id = dict(top_k=1, omega=[0.0])  # the only remaining token is rejected
    assert verify(backend, [ROW], [9, 0], [-1, 0], [0.9, 0.5], max_depth=1,
                  **(one_id | {"omega": [0.5]}))[1:] == (0, 0.0, 0)
    assert verify(backend, [ROW], [9, 0], [-1, 0], [0.9, 0.5], max_depth=1, residual="relaxed",
                  **one_id) == ([], 0, 0.0, EMPTY_RESIDUAL)


@pytest.mark.parametrize("V", [4, 300])
def test_an_empty_residual_becomes_uniform(backend, V):
    """The filters leave token 0 alone, and it is rejected. Then all tokens have 1/V, filtered ones too."""
    row = [4.0] + [1.0] * (V - 1)
    for options in ({"top_k": 1}, {"id_range": (0, 1)}):
        options |= {"omega": [0.5], "residual": "relaxed", "max_depth": 1}
        before = verify(backend, [row], [9, 0], [-1, 0], [0.9, 0.5], **options)
        assert before == ([], 0, 0.0, EMPTY_RESIDUAL)
        options["empty"] = "uniform"
        for token in (0, 2, V - 1):
            got = verify(backend, [row], [9, 0], [-1, 0], [(token + 0.5) / V, 0.5], **options)
            assert got == ([], token, 0.0, EMPTY_RESIDUAL)
        two = dict(tokens=[9, 0, 2], parents=[-1, 0, 0], **options)
        assert verify(backend, [row], uniforms=[0.9, 0.5, 0.49 / V], **two) == ([2], 0, 0.0, EMPTY_RESIDUAL)
        got = verify(backend, [row], uniforms=[2.5 / (V - 1), 0.5, 0.51 / V], **two)  # without token 2
        assert got == ([], 3, 0.0, EMPTY_RESIDUAL)
        del options["empty"]
        assert verify(backend, [row], [9, 0], [-1, 0], [0.9, 0.5], **options) == before


def both(args, kwargs, backend):
    """The outputs of verify_logits and of the ops that it replaces, and the rows' probabilities or statuses."""
    logits, uncond, tokens, first_child, next_sibling, uniforms, *settings = args
    own = {"id_range": kwargs.get("id_range"), "filters": kwargs.get("filters", "k_then_p"),
           "min_p": kwargs["min_p"], "backend": "oracle"}
    rule = {name: kwargs[name] for name in kwargs.keys() - {"id_range", "filters", "min_p", "seeds", "positions"}}
    got = verify_logits(*args, **kwargs, backend=backend)
    tree = (tokens, first_child, next_sibling)
    if uniforms is not None:
        probs, _ = guided_probs(logits, uncond, *settings, **own)
        return got, verify_tree(probs, *tree, uniforms, **rule, greedy=settings[1] == 0, backend="oracle"), probs
    drawn = draw_tokens(logits, uncond, *settings, kwargs["seeds"], kwargs["positions"], **own)
    return got, verify_greedy(drawn.tokens, *tree, max_depth=kwargs["max_depth"], backend="oracle"), drawn.status


RULES = [{}, {"num_draft_rows": 2, "omega": (0.75, 1.0, 1.25)}] + [
    {"k": 60, "cutoff": cutoff, "residual": residual, "offset": 7, "num_draft_rows": M, "omega": (1.25, 1.0)}
    for cutoff, residual, M in itertools.product(("tvd", "ratio", "jsd"), ("optimal", "relaxed", "released"), (0, 2))]
FILTERS = [  # each filter alone, both, none, and a greedy request beside another
    {"settings": settings, "filters": filters}
    for settings in ([(2.0, 1.0, 50, 1.0)], [(2.0, 1.0, 0, 0.9), (1.5, 0.0, 3, 0.5)], [(2.0, 2.0, 0, 1.0)],
                     [(1.5, 2.0, 70, 0.95), (2.0, 1.3, 30, 0.8)], [(2.0, 2.0, 0, 1.0, 0.05)])
    for filters in ("k_then_p", "p_then_k")]
LAWS = [rule | FILTERS[(3 * i + turn) % len(FILTERS)] for i, rule in enumerate(RULES) for turn in (0, 4)]


def test_it_is_guided_probs_and_verify_tree(backend):
    """For every law, with the root of a request before, in and after its range. Walks end early and late."""
    statuses, lengths, excess = set(), set(), 0
    laws = LAWS[::7] if backend in ("triton", "cuda_emulated") else LAWS
    for i, law in enumerate(laws):
        V, ids = (90, 300)[i % 2], [None, "each"][i % 3 == 1]
        args, kwargs = cases.verify_logits(3, 14, V, 4, law | {"branch": 3, "ranges": ids})
        if ids:  # so that the rule that ranges add has no part: every token lies inside
            parents = cases.parents_of(*args[3:5])
            for b, n in itertools.product(range(3), range(1, 14)):
                own = kwargs["id_range"][b, parents[b, n]]
                own[0], own[1] = torch.minimum(own[0], args[2][b, n]), torch.maximum(own[1], args[2][b, n] + 1)
        got, expected, _ = both(args, kwargs, backend)
        for name, a, b in zip(got._fields, got, expected):
            if name == "tv_excess":
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            else:
                assert torch.equal(a, b), (law, name)
        statuses |= set(got.status.tolist())
        lengths |= set(got.num_accepted.tolist())
        excess += got.tv_excess.sum().item()
    assert {0, INVALID_ROW} <= statuses and {0, 1, 2, 3} <= lengths and excess > 0


@pytest.mark.parametrize("filters", ["k_then_p", "p_then_k"])
@pytest.mark.parametrize("ranges", [None, "all", "each"])
def test_with_seeds_it_is_draw_tokens_and_verify_greedy(backend, filters, ranges):
    settings = [(2.0, 1.0, 100, 0.9), (2.0, 0.0, 5, 0.5), (1.5, 1.5, 0, 1.0)]
    args, kwargs = cases.verify_logits(3, 20, 300, 4, {"seeds": True, "filters": filters, "ranges": ranges,
                                                        "branch": 3, "settings": settings})
    got, expected, row_status = both(args, kwargs, backend)
    path = torch.nn.functional.pad(got.accepted_nodes, (1, 0)).long()
    end = path.gather(1, got.num_accepted[:, None].long())
    is_invalid = (row_status.gather(1, path.clamp(min=0)) != 0).any(1)
    assert torch.equal(got.status, row_status.gather(1, end)[:, 0])
    for a, b in zip(got[:3], expected[:3]):
        assert torch.equal(a[~is_invalid], b[~is_invalid])
    assert not got.next_token[is_invalid].any() and not got.tv_excess.any()
    assert got.num_accepted.max() >= 2 and (~is_invalid).sum() >= 1


def test_an_invalid_row_ends_the_path_of_draws(backend):
    """Draws of a row with one token are this token. The NaN's row would draw 0, which its child has."""
    sure = [[0, 1, 0], [0, 1, 0], [NAN, 1, 0]]
    assert verify(backend, sure, [9, 1, 1], [-1, 0, 1], None, seed=3) == ([1, 2], 0, 0.0, INVALID_ROW)
    sure[1] = [NAN, 1, 0]
    assert verify(backend, sure, [9, 1, 0], [-1, 0, 1], None, seed=3) == ([1], 0, 0.0, INVALID_ROW)
    assert verify(backend, [[0, 1, 0]], [9, 1, -1], [-1, 0, 1], None, seed=3) == ([1], 1, 0.0, 0)
    assert verify(backend, [[0, 1, 0]], [9, 1, 1], [-1, 0, 1], None, seed=3, max_depth=1) == ([1], 1, 0.0, 0)
    assert verify(backend, [[0, 1, 0]], [9, 2, 1], None, None, seed=3, first_child=[1, -1, -1],
                  next_sibling=[-1, 1, -1]) == ([], 1, 0.0, INVALID_TREE)
    assert verify(backend, [[0, 1, 0]], [9, 2, 1], None, None, seed=3, first_child=[1, -1, -1],
                  next_sibling=[-1, 1, -1], id_range=[[2, 3], [0, 3], [0, 3]]) == ([], 0, 0.0, INVALID_ROW)


@pytest.mark.parametrize("options", [
    {}, {"k": 60, "residual": "relaxed", "num_draft_rows": 2}, {"seeds": True}, {"settings": [(1.5, 0.0, 0, 1.0)]}])
def test_rows_that_are_not_visited_do_not_matter(backend, options):
    args, kwargs = cases.verify_logits(2, 14, 300, 4, {"branch": 3, "settings": [(2.0, 1.0, 100, 0.9)]} | options)
    expected = verify_logits(*args, **kwargs, backend=backend)
    logits = torch.full_like(args[0], NAN)
    for b in range(2):
        visited = [0, *expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()]
        if "settings" in options:  # a greedy request looks at every accepted node, not only at one path
            probs = guided_probs(args[0], args[1], *args[6:]).probs[b]
            parents = cases.parents_of(*args[3:5])[b].tolist()
            accepted = {0}
            for n in range(1, 14):
                if parents[n] in accepted and probs[parents[n]].argmax() == args[2][b, n]:
                    accepted.add(n)
            visited = sorted(accepted)
        logits[b, visited] = args[0][b, visited]
    for a, b in zip(verify_logits(logits, *args[1:], **kwargs, backend=backend), expected):
        assert torch.equal(a, b)
    for b in range(2):  # and the last one that is visited does
        again = args[0].clone()
        end = expected.accepted_nodes[b, expected.num_accepted[b] - 1] if expected.num_accepted[b] else 0
        again[b, end, 5] = NAN
        got = verify_logits(again, *args[1:], **kwargs, backend=backend)
        assert got.status[b] == INVALID_ROW and got.next_token[b] == 0 and got.status[1 - b] == 0


def test_calls_leave_nothing_behind(backend):
    """A thread's memory is used again: wide and narrow rows, with and without filters, one after another."""
    sizes = [(1, 14, V, 3, {"branch": 3, "settings": [setting], "k": 9, "residual": residual, "num_draft_rows": M})
             for V, setting, residual, M in itertools.product(
                 (40, 300), ((1.5, 1.0, 20, 1.0), (1.5, 1.0, 0, 1.0)), ("relaxed", "released"), (0, 1))]
    made = [cases.verify_logits(*case) for case in sizes]
    first = [verify_logits(*args, **kwargs, backend=backend) for args, kwargs in made]
    for (args, kwargs), expected in [*zip(made, first)][::-1]:
        for a, b in zip(verify_logits(*args, **kwargs, backend=backend), expected):
            assert torch.equal(a, b)
