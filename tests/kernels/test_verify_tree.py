"""verify_tree on trees small enough to verify by hand: the strict rule, omega, what is invalid, and temperature 0.

Its distributions are in test_losslessness.py.
"""
import ctypes
import math
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from specvis_kernels import EMPTY_RESIDUAL, INVALID_DRAFT, INVALID_ROW, INVALID_RULE, INVALID_TREE, verify_tree
from tests.cases import links, tensor

NAN, INF = float("nan"), float("inf")
ROOT = Path(__file__).parent.parent.parent


def verify(backend, rows, tokens, parents, uniforms, *, max_depth=None, draft=None, draft_row=None, neighbors=None,
           delta=None, omega=None, greedy=False, first_child=None, next_sibling=None, **options):
    """One request: its accepted nodes, the token after them, its tv_excess and status."""
    N, V = len(tokens), len(rows[0])
    max_depth = N - 1 if max_depth is None else max_depth
    rows = rows * N if len(rows) == 1 else rows   # one row: at every node
    links_of = links(torch.tensor([parents])) if parents else (tensor([first_child], torch.int32),
                                                               tensor([next_sibling], torch.int32))
    if draft is not None:
        options |= {"draft_probs": tensor([draft]), "draft_row": tensor([draft_row or [0] * N], torch.int32)}
    if neighbors is not None:
        options |= {"neighbors": tensor(neighbors, torch.int32), "delta": tensor([delta])}
    if omega is not None:
        options |= {"omega": tensor([omega])}

    def run():
        return verify_tree(tensor([rows]), tensor([tokens], torch.int64), *links_of, tensor([uniforms]),
                           max_depth=max_depth, greedy=tensor([greedy], torch.bool), **options, backend=backend)

    accepted_nodes, num_accepted, next_token, tv_excess, status = out = run()
    if backend == "oracle":  # which emulated CUDA repeats: also where nothing fits into shared memory
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_ON_CPU_SHARED", "0")
            assert all(map(torch.equal, run(), out))
    assert accepted_nodes.shape == (1, max_depth) and 0 <= next_token.item() < V
    num_accepted = num_accepted.item()
    accepted_nodes, padding = accepted_nodes[0].tolist()[:num_accepted], accepted_nodes[0].tolist()[num_accepted:]
    assert -1 not in accepted_nodes and padding == [-1] * (max_depth - num_accepted)
    return accepted_nodes, next_token.item(), tv_excess.item(), status.item()


ROW = [0.5, 0.25, 0.125, 0.125]
TABLE = [[1, 2, 3], [0, 2, 3], [3, 1, 0], [2, 1, 0]]


@pytest.mark.parametrize("uniforms, accepted_nodes, token", [
    # Node 1 proposes token 0, which has 1/2; node 2, after it, token 1: 1/4 of the remaining 1/2.
    ([0.0, 0.0, 0.0], [1], 0),
    ([0.6, 0.49, 0.0], [1], 1),     # an accepted leaf: the next token comes from its row, .5 <= .6 < .75
    ([0.0, 0.5, 0.49], [2], 0),     # equality rejects; then 0.49 < 1/2
    ([0.0, 0.5, 0.5], [], 2),       # both rejected: tokens 2 and 3 share the rest
    ([0.49, 0.99, 0.99], [], 2),
    ([0.5, 0.99, 0.99], [], 3),
    ([NAN, 0.99, 0.99], [], 2),     # a NaN is not below anything, and draws like 0
    ([0.99, NAN, NAN], [], 3),
    ([1.0, 1.0, 1.0], [], 3),
])
def test_point_masses(backend, uniforms, accepted_nodes, token):
    assert verify(backend, [ROW], [9, 0, 1], [-1, 0, 0], uniforms)[::3] == (accepted_nodes, 0)
    assert verify(backend, [ROW], [9, 0, 1], [-1, 0, 0], uniforms)[1] == token


def test_a_token_without_mass_is_never_accepted_nor_drawn(backend):
    row = [0.0, 0.5, 0.0, 0.5]
    assert verify(backend, [row], [0, 0, 2], [-1, 0, 0], [0.0, 0.0, 0.0]) == ([], 1, 0.0, 0)
    assert verify(backend, [row], [0, 0, 0], [-1, 0, 0], [0.5, 0.0, -0.5]) == ([], 3, 0.0, 0)
    assert verify(backend, [row], [0, 0], [-1, 0], [0.5, -0.5], draft=[ROW]) == ([], 3, 0.0, 0)


@pytest.mark.parametrize("V", [31, 32, 33, 64, 2560])
def test_every_length_of_row(backend, V):
    """Tokens 0 and V - 1 have 1/2. The draft 1/4 1/4 1/2 0 .. gave token 2, which has nothing: 1/4 and 1/2 are left.
    Token 0 of the rest of the draft is accepted iff u / 2 < 1/3; otherwise the last one remains."""
    tree = dict(tokens=[9, 2, 0], parents=[-1, 0, 0], draft=[[0.25, 0.25, 0.5] + [0.0] * (V - 3)])
    row = [0.5] + [0.0] * (V - 2) + [0.5]
    assert verify(backend, [row], uniforms=[0.0, 0.0, 0.66], **tree)[0] == [2]
    assert verify(backend, [row], uniforms=[0.0, 0.0, 0.67], **tree)[:2] == ([], V - 1)


def test_the_draft_need_not_sum_to_one(backend):
    """Its total is carried along: half of every draft probability is an equal draft."""
    for draft in ([0.25, 0.5, 0.25, 0.0], [0.125, 0.25, 0.125, 0.0]):
        assert verify(backend, [ROW], [0, 1], [-1, 0], [0.0, 0.49], draft=[draft])[0] == [1]
        assert verify(backend, [ROW], [0, 1], [-1, 0], [0.67, 0.5], draft=[draft])[:2] == ([], 3)


def test_a_sibling_after_all_draft_mass_is_skipped(backend):
    """The draft has token 1 only. It is rejected at u >= 1/4; nothing proposes token 0, which stays in R."""
    got = verify(backend, [ROW], [0, 1, 0, 2], [-1, 0, 0, 0], [0.0, 0.25, 0.0, 0.0], draft=[[0.0, 1, 0, 0]])
    assert got == ([], 0, 0.0, 0)


def test_rows_of_drafts(backend):
    """Node 0's children come from draft row 1, node 1's are point masses, node 2's come from row 0."""
    draft = [[0.25, 0.5, 0.25, 0.0], [0.0, 0.5, 0.0, 0.5]]
    tree = dict(tokens=[0, 1, 3, 0, 1], parents=[-1, 0, 0, 1, 2], draft=draft, draft_row=[1, -1, 0, 7, -5])
    # node 1: u / 2 < 1/4; then node 3, a point mass at 1/2
    assert verify(backend, [ROW], uniforms=[0.0, 0.49, 0.9, 0.49, 0.9], **tree) == ([1, 3], 0, 0.0, 0)
    assert verify(backend, [ROW], uniforms=[0.0, 0.49, 0.9, 0.5, 0.9], **tree) == ([1], 1, 0.0, 0)
    # node 1 rejected: R = 1/2 - 0, 1/4 - 1/2, 1/8 - 0, 1/8 - 1/2, so 4/5, 0, 1/5, 0, and node 2 has nothing
    assert verify(backend, [ROW], uniforms=[0.79, 0.5, 0.0, 0.0, 0.0], **tree)[:2] == ([], 0)
    assert verify(backend, [ROW], uniforms=[0.81, 0.5, 0.0, 0.0, 0.0], **tree)[:2] == ([], 2)
    # node 1 rejected: R = 0, 0, 1/4, 3/4 - 1/2, so node 2 has 1/2, and the rest of the draft is on it;
    # then node 4 from row 0: u / 2 < 1/4
    rows = [[0.0, 0.0, 0.25, 0.75], ROW, ROW, ROW, ROW]
    assert verify(backend, rows, uniforms=[0.0, 0.0, 0.49, 0.0, 0.49], **tree)[0] == [2, 4]
    assert verify(backend, rows, uniforms=[0.0, 0.0, 0.49, 0.0, 0.5], **tree)[0] == [2]
    assert verify(backend, rows, uniforms=[0.0, 0.0, 0.5, 0.0, 0.0], **tree)[:2] == ([], 2)


@pytest.mark.parametrize("uniform, token", [(0.0, 0), (0.49, 0), (0.5, 1), (0.74, 1), (0.75, 2), (0.875, 3), (0.99, 3)])
def test_a_tree_of_the_root_alone_draws_from_its_row(backend, uniform, token):
    assert verify(backend, [ROW], [9], [-1], [uniform]) == ([], token, 0.0, 0)
    assert verify(backend, [ROW], [9], [-1], [uniform], greedy=True) == ([], 0, 0.0, 0)


def test_one_word_vocabulary(backend):
    assert verify(backend, [[1.0]], [0, 0, 0], [-1, 0, 1], [0.9, 0.9, 0.9]) == ([1, 2], 0, 0.0, 0)


@pytest.mark.parametrize("bad", [[NAN, 0.5, 0.5, 0.0], [INF, 0, 0, 0.0], [-0.5, 0.5, 0.5, 0.5], 4 * [0.0]])
def test_bad_rows(backend, bad):
    chain = dict(tokens=[9, 0, 0], parents=[-1, 0, 1], uniforms=[0.9, 0.0, 0.0])
    assert verify(backend, [bad, ROW, ROW], **chain) == ([], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW, bad, ROW], **chain) == ([1], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW, ROW, bad], **chain) == ([1, 2], 0, 0.0, INVALID_ROW)
    # Rows that are not visited do not matter, nor do draft rows that are not used.
    assert verify(backend, [ROW, ROW, bad], **(chain | {"uniforms": [0.9, 0.0, 0.5]}))[::3] == ([1], 0)
    # A bad draft row: the node counts as a leaf.
    drafts = dict(draft=[bad, ROW], draft_row=[1, 0, 0])
    assert verify(backend, [ROW], **chain, **drafts) == ([1], 3, 0.0, INVALID_DRAFT)
    assert verify(backend, [ROW, bad, ROW], **chain, **drafts) == ([1], 0, 0.0, INVALID_ROW)  # not looked at any more
    drafts["draft_row"] = [1, -1, 0]
    assert verify(backend, [ROW], **chain, **drafts)[::3] == ([1, 2], 0)


@pytest.mark.parametrize("omega, token", [(1.0, 2), (0.5, 1)])
def test_a_link_back_to_the_first_sibling_keeps_what_was_rejected(backend, omega, token):
    """Of tokens 0 and 1 a rejection leaves nothing, or a half: 0.45 draws from 0 0 1 1, or from 2 1 1 1."""
    got = verify(backend, [ROW], [9, 0, 1], None, [0.45, 0.99, 0.99], first_child=[1, -1, -1], next_sibling=[-1, 2, 1],
                 omega=[omega] * 2)
    assert got == ([], token, 0.0, INVALID_TREE)


def test_a_child_that_its_row_gives_no_mass(backend):
    """It is rejected, also at 0, and R stays: token 0 after it is accepted at 0.99, and 0.49 draws 0."""
    draft = [[0.5, 0.5, 0.0, 0.0]]
    assert verify(backend, [ROW], [9, 2], [-1, 0], [0.49, 0.0], draft=draft) == ([], 0, 0.0, INVALID_DRAFT)
    assert verify(backend, [ROW], [9, 2], [-1, 0], [0.49, 0.0], draft=draft, draft_row=[-1, 0]) == ([1], 0, 0.0, 0)
    siblings = dict(tokens=[9, 2, 0], parents=[-1, 0, 0], uniforms=[0.49, 0.0, 0.99])
    assert verify(backend, [ROW], **siblings, draft=draft, max_depth=1) == ([2], 0, 0.0, INVALID_DRAFT)
    # Token 0 is rejected, and comes again. Then R has token 1 alone, and Q too; after it the row is used up.
    twice = dict(parents=[-1, 0, 0, 0], uniforms=[0.0, 0.5, 0.0, 0.99], draft=draft, max_depth=1)
    rows = [[0.25, 0.75, 0.0, 0.0]]
    assert verify(backend, rows, [9, 0, 0, 1], **twice) == ([3], 0, 0.0, INVALID_DRAFT)
    twice["uniforms"] = [0.0, 0.5, 1.0, 0.0]
    assert verify(backend, rows, [9, 0, 1, 0], **twice)[::3] == ([], EMPTY_RESIDUAL)


@pytest.mark.parametrize("first_child, next_sibling, accepted_nodes", [
    ([0, -1, -1, -1], [-1] * 4, []),          # its own child
    ([4, -1, -1, -1], [-1] * 4, []),          # beyond the tree
    ([2**31 - 1, -1, -1, -1], [-1] * 4, []),
    ([1, 1, -1, -1], [-1] * 4, [1]),          # node 1 its own child
    ([1, 0, -1, -1], [-1] * 4, [1]),          # node 1 the root's parent
    ([2, -1, -1, -1], [-1, -1, 1, -1], []),   # back to an earlier sibling
    ([2, -1, -1, -1], [-1, -1, 2, -1], []),   # its own sibling
    ([3, -1, -1, -1], [-1, -1, -1, 4], []),   # a sibling beyond the tree
])
@pytest.mark.parametrize("greedy", [False, True])
def test_bad_links_are_reported_and_not_followed(backend, first_child, next_sibling, accepted_nodes, greedy):
    """Node 1 would be accepted, nodes 2 and 3 are not (their token is 3, at 1/8; the argmax is 0)."""
    got = verify(backend, [ROW], [9, 0, 3, 3], None, [0.0, 0.0, 0.9, 0.9], max_depth=3, first_child=first_child,
                 next_sibling=next_sibling, greedy=greedy)
    assert got == (accepted_nodes, 0, 0.0, INVALID_TREE)


def test_there_is_no_node_beyond_the_last(backend):
    """A kernel that keeps the row after its nodes would find token 1."""
    got = verify(backend, [[2.0**-42, 0.5, 0.25, 0.25]], [9, 0, 3, 3], None, [0.99, 0.0, 0.0, 0.0], max_depth=3,
                 first_child=[4, -1, -1, -1], next_sibling=[-1] * 4)
    assert got == ([], 3, 0.0, INVALID_TREE)


@pytest.mark.parametrize("token", [-1, 4, 2**63 - 1, -2**63])
@pytest.mark.parametrize("greedy", [False, True])
def test_bad_tokens_end_the_siblings(backend, token, greedy):
    """Siblings 3, bad, 0: the first is rejected, the last never tried. The root's token is not looked at."""
    got = verify(backend, [ROW], [token, 3, token, 0], [-1, 0, 0, 0], [0.0, 0.9, 0.0, 0.0], greedy=greedy)
    assert got == ([], 0, 0.0, INVALID_TREE)
    got = verify(backend, [ROW], [token, 0, token, 0], [-1, 0, 0, 0], [0.0, 0.0, 0.0, 0.0])
    assert got == ([1], 0, 0.0, 0)  # never seen


def test_a_draft_row_out_of_range_makes_a_leaf(backend):
    got = verify(backend, [ROW], [9, 0, 0], [-1, 0, 1], [0.9, 0.0, 0.0], draft=[ROW], draft_row=[0, 1, 0])
    assert got == ([1], 3, 0.0, INVALID_TREE)
    got = verify(backend, [ROW], [9, 0, 0], [-1, 0, 1], [0.9, 0.0, 0.0], draft=[ROW], draft_row=[0, 0, 1])
    assert got == ([1, 2], 3, 0.0, 0)  # node 2 has no children to draw


@pytest.mark.parametrize("omega, options, status", [
    ([1.0, 0.9], dict(neighbors=TABLE, delta=0.125), INVALID_RULE),   # below 1 at any depth
    ([1.0, 0.9], dict(neighbors=TABLE, delta=-1.0), INVALID_RULE),    # with neighbors, kept or not
    ([1.0, 0.9], dict(neighbors=TABLE, delta=0.125, residual="relaxed"), 0),
    ([1.0, 1.0], dict(neighbors=TABLE, delta=0.125), 0),
    ([1.0, 0.9], dict(), 0),
    ([1.0, NAN], dict(), INVALID_RULE),
    ([-0.1, 1.0], dict(residual="relaxed"), INVALID_RULE),
    ([1.0, 0.0], dict(), 0),
])
def test_an_undefined_rule_accepts_nothing(backend, omega, options, status):
    tree = dict(tokens=[9, 0, 0], parents=[-1, 0, 1], uniforms=[0.75, 0.0, 0.9], omega=omega, **options)
    got = verify(backend, [ROW], **tree)
    assert got[3] == status
    if status:
        assert got == ([], 2, 0.0, INVALID_RULE)  # from the root's row
        assert verify(backend, [[NAN] * 4], **tree) == ([], 0, 0.0, INVALID_RULE | INVALID_ROW)
    else:
        assert got[0] == [1]
    assert verify(backend, [ROW], greedy=True, **tree) == ([1, 2], 0, 0.0, 0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_factor_saves_a_token_without_mass(backend):
    """Infinity times 0 is not a number; the token is rejected, and adds nothing to tv_excess."""
    got = verify(backend, [[0.0, 0.5, 0.5, 0.0]], [9, 0], [-1, 0], [0.75, 0.0], omega=[INF])
    assert got == ([], 2, 0.0, 0)
    got = verify(backend, [ROW], [9, 1], [-1, 0], [0.0, 0.999], omega=[INF], draft=[[0.25, 0.5, 0.25, 0.0]])
    assert got == ([1], 0, 0.5, 0)  # one with mass is always accepted, strictly at 1/2


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_the_whole_part_of_a_number(tmp_path):
    """Equal to floor(), for numbers of every size and next to integers and halves."""
    (tmp_path / "whole.cpp").write_text("""
        #include "rules.h"
        extern "C" double whole_part(double x) { return specvis::whole_part(x); }""")
    subprocess.run(["g++", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'csrc/shared'}", "whole.cpp",
                    "-o", "whole.so"], cwd=tmp_path, check=True)
    whole_part = ctypes.CDLL(tmp_path / "whole.so").whole_part
    whole_part.argtypes, whole_part.restype = [ctypes.c_double], ctypes.c_double
    r = random.Random(0)
    for _ in range(20000):
        x = r.choice([r.random(), r.randrange(2**12) + 0.5, float(r.randrange(2**52))]) * 2.0 ** r.randrange(-60, 1)
        for near in (math.nextafter(x, 0), x, math.nextafter(x, INF), math.nextafter(round(x), 0.0)):
            assert whole_part(near) == math.floor(near), near
    assert [whole_part(x) for x in (2.0**52, 2.0**52 - 0.5, 2.0**51 + 0.5)] == [2.0**52, 2.0**52 - 1, 2.0**51]


def test_a_tie_over_blocks_goes_to_the_lowest_id(backend, triton_takes):
    triton_takes(V=2)
    row = [0.0, 0.25, 0.0, 0.25, 0.25, 0.25]
    for token in range(6):
        got = verify(backend, [row], [9, token], [-1, 0], [0.0, 0.0], greedy=True)
        assert got[:2] == ([1] * (token == 1), 1)


def test_a_tie_over_a_long_row_goes_to_the_lowest_id(backend):
    row = torch.full((700,), 2.0 ** -11)
    row[[5, 130, 300, 699]] = 2.0 ** -4
    assert verify(backend, [row.tolist()], [9], [-1], [0.0], max_depth=1, greedy=True) == ([], 5, 0, 0)
    row[5] = 0.0
    assert verify(backend, [row.tolist()], [9], [-1], [0.0], max_depth=1, greedy=True) == ([], 130, 0, 0)


@pytest.mark.parametrize("heavy, top", [([0, 69], 0), ([33], 33), ([69], 69), ([33, 69], 33), ([31, 32], 31)])
def test_greedy_finds_the_argmax_wherever_it_is(backend, heavy, top):
    row = [1 / len(heavy) if v in heavy else 0.0 for v in range(70)]
    assert verify(backend, [row], [9, 68, top], [-1, 0, 0], [0.0] * 3, greedy=True)[:2] == ([2], top)


def test_greedy_with_bad_rows(backend):
    bad = [0.5, NAN, 0.5, 0.0]
    tree = dict(tokens=[0, 0, 0, 0, 0], parents=[-1, 0, 0, 1, 2], uniforms=[0.0] * 5, greedy=True)
    # Node 1's children are not accepted; node 2's path is deeper and ends in a good row.
    assert verify(backend, [ROW, bad, ROW, ROW, ROW], **tree) == ([2, 4], 0, 0.0, 0)
    assert verify(backend, [ROW, bad, bad, ROW, ROW], **tree) == ([1], 0, 0.0, INVALID_ROW)
    assert verify(backend, [ROW, ROW, ROW, bad, ROW], **tree) == ([1, 3], 0, 0.0, INVALID_ROW)
    assert verify(backend, [bad, ROW, ROW, ROW, ROW], **tree) == ([], 0, 0.0, INVALID_ROW)
