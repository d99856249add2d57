"""verify_tree with neighbors, on trees small enough to verify by hand: cutoffs, residuals and their ends."""
import pytest

from specvis_kernels import EMPTY_RESIDUAL
from tests.cases import cells
from tests.kernels.test_verify_tree import NAN, ROW, TABLE, verify


@pytest.mark.parametrize("cutoff, delta, relaxed_mass, masses", [
    ("tvd", 0.124, 0.125, [4, 2, 0, 1]), ("tvd", 0.125, 0.25, [4, 2, 0, 0]), ("tvd", 0.375, 0.5, [4, 0, 0, 0]),
    ("tvd", NAN, 0.125, [4, 2, 0, 1]), ("tvd", -1.0, 0.125, [4, 2, 0, 1]),
    # S = r = 1/8: h = 3/16, [1/8 ln 2 + 1/8 ln(2/3) + 1/4 ln(4/3)] / 2 = 0.05394
    ("jsd", 0.0539, 0.125, [4, 2, 0, 1]), ("jsd", 0.0540, 0.25, [4, 2, 0, 0]),
])
def test_neighbors_far_down_the_list(backend, cutoff, delta, relaxed_mass, masses):
    """Token 2's neighbors 3 and 1 are among ids that do not exist, further apart than one warp looks at once."""
    neighbors = [[7] * 70 + [3] + [7] * 140 + [1]] * 4
    tree = dict(tokens=[9, 2], parents=[-1, 0], neighbors=neighbors, delta=delta, cutoff=cutoff, residual="relaxed")
    assert verify(backend, [ROW], uniforms=[0.0, relaxed_mass - 2.0**-10], **tree)[0] == [1]
    for uniform, token in cells(masses):
        got = verify(backend, [ROW], uniforms=[uniform, relaxed_mass], **tree)
        assert got == ([], token, relaxed_mass - 0.125, 0)


def test_an_id_listed_twice_is_removed_once(backend, triton_takes):
    """Out of the contract, but equal on all backends: its mass counts twice in the relaxed mass."""
    triton_takes(k=1)
    tree = dict(tokens=[9, 2], parents=[-1, 0], neighbors=[[1, 2], [0, 2], [3, 3], [2, 1]], delta=0.25)
    assert verify(backend, [ROW], uniforms=[0.0, 0.374], **tree)[0] == [1]
    # relaxed: 4 2 0 0 (of 8) remains
    assert verify(backend, [ROW], uniforms=[0.66, 0.375], residual="relaxed", **tree)[:2] == ([], 0)
    assert verify(backend, [ROW], uniforms=[0.99, 0.375], residual="relaxed", **tree)[:2] == ([], 1)
    # released: 4 2 1 1 less 2 1 4 -, token 3 protected, is 2 1 0 1
    tree |= dict(draft=[[0.25, 0.125, 0.5, 0.125]], residual="released")
    for uniform, token in cells([2, 1, 0, 1]):
        assert verify(backend, [ROW], uniforms=[uniform, 0.9], **tree)[:2] == ([], token)


@pytest.mark.parametrize("cutoff", ["tvd", "ratio", "jsd"])
def test_neighbors_never_lend_more_than_there_is(backend, cutoff):
    """Token 2 has 1/8. Its neighbor with 1/2 is listed 20000 times, and counts once: twice would be 9/8."""
    tree = dict(tokens=[9, 2], parents=[-1, 0], neighbors=[[code] * 20000 for code in (1, 2, 0, 1)], delta=1e30,
                cutoff=cutoff, residual="relaxed")
    assert verify(backend, [ROW], uniforms=[0.0, 0.624], **tree)[0] == [1]
    assert verify(backend, [ROW], uniforms=[0.66, 0.625], **tree)[:2] == ([], 1)  # 0 2 0 1 (of 8) remains
    assert verify(backend, [ROW], uniforms=[0.67, 0.625], **tree)[:2] == ([], 3)
    tree |= dict(draft=[[0.5, 0.25, 0.25, 0.0]], omega=[0.0])  # 0 2 5 1 less 4 2 2 0 is 0 0 3 1
    assert verify(backend, [ROW], uniforms=[0.74, 0.0], **tree)[:2] == ([], 2)
    assert verify(backend, [ROW], uniforms=[0.75, 0.0], **tree)[:2] == ([], 3)


def test_a_token_that_is_its_own_neighbor_keeps_what_was_moved_to_it(backend):
    """Out of the contract, but equal on all backends. Omega 1/2: token 2 has 1/8 and moves its own and 3's 1/8 to
    itself, 3/8, against 2/8 drafted: accepted iff u * 2 < 3 / 2. Otherwise 4 2 3 0 less 4 2 2 0 leaves it."""
    tree = dict(tokens=[9, 2], parents=[-1, 0], neighbors=[[1, 2], [0, 2], [2, 3], [2, 1]], delta=0.25,
                omega=[0.5], residual="relaxed", draft=[[0.5, 0.25, 0.25, 0.0]])
    assert verify(backend, [ROW], uniforms=[0.0, 0.749], **tree)[0] == [1]
    assert verify(backend, [ROW], uniforms=[0.0, 0.75], **tree)[::3] == ([], 0)
    assert verify(backend, [ROW], uniforms=[0.0, 0.75], **tree)[1] == 2


def test_an_empty_residual_becomes_uniform(backend):
    """Released: token 2 and all its neighbors are zeroed, which is all there is. Each token has 1/4 then."""
    tree = dict(neighbors=TABLE, delta=0.125, residual="released", empty="uniform")
    for token in range(4):
        got = verify(backend, [ROW], [9, 2], [-1, 0], [(token + 0.5) / 4, 0.5], **tree)
        assert got[:2] == ([], token) and got[3] == EMPTY_RESIDUAL
    # Emptied twice: of two tokens only the second remains, and goes as well.
    twice = dict(omega=[0.5], residual="relaxed", empty="uniform", max_depth=1)
    got = verify(backend, [[1.0, 0.0]], [9, 0, 0, 1], [-1, 0, 0, 0], [0.75, 0.5, 0.25, 0.5], **twice)
    assert got == ([], 1, 0, EMPTY_RESIDUAL)
    # In fixed point three tokens have 2**42 // 3 each, and the row's total is three times that.
    third = dict(rows=[[1.0, 0.0, 0.0]], tokens=[9, 0], parents=[-1, 0], **twice)
    tokens = [verify(backend, uniforms=[u, 0.5], **third)[1] for u in (0.333, 0.334, 0.666, 0.667, 1.0)]
    assert tokens == [0, 1, 1, 2, 2]
