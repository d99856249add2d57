"""rotate_into_cache on numbers worked out by hand, against complex products, and its messages."""
import pytest
import torch

from specvis_kernels import rotate_into_cache
from tests import cases
from tests.cases import DEVICE

HALF_TURN = torch.tensor([[[1., 0.], [1., 0.]], [[-1., 0.], [0., 1.]]])  # position 1: by a half and a quarter


@pytest.mark.parametrize("halves, turned", [(False, [-1., -2., -4., 3.]), (True, [-1., -4., -3., 2.])])
def test_pairs_turn_by_their_positions_and_values_do_not(halves, turned, backend):
    heads = torch.tensor([1., 2., 3., 4.])
    qkv = torch.cat([heads, heads * 10, heads * 100, heads * 7]).repeat(1, 2, 1).to(DEVICE)  # 2 queries, a key, a value
    cache = torch.full((1, 4, 2, 1, 4), 5., device=DEVICE)
    q = rotate_into_cache(qkv, cache, torch.tensor([1], device=DEVICE), torch.tensor([[9, -9]], device=DEVICE),
                          HALF_TURN.to(DEVICE), first_node=1, rotates_halves=halves, backend=backend)
    turned = torch.tensor(turned)
    assert q[0].tolist() == [[turned.tolist(), (turned * 10).tolist()], [heads.tolist(), (heads * 10).tolist()]]
    assert cache[0, 2:, 0, 0].tolist() == [(turned * 100).tolist(), (heads * 100).tolist()]  # columns 1 + 1, 1 + 2
    assert cache[0, 2:, 1, 0].tolist() == [(heads * 7).tolist()] * 2 and (cache[0, :2] == 5).all()


def test_a_column_outside_the_cache_is_not_written(backend):
    (qkv, cache, _, positions, rotations), _ = cases.rotate_into_cache(2, 3, 1, 1, 4)
    T = cache.shape[1]
    for length, written in ((0, range(3)), (T - 1, (T - 1,)), (T, ()), (-1, ()), (2**63 - 1, ()), (-2**63, ())):
        new = torch.full_like(cache, 9.0)
        lengths = torch.tensor([length, 4], device=DEVICE)
        rotate_into_cache(qkv, new, lengths, positions, rotations, backend=backend)
        for rows, columns in ((0, written), (1, range(4, 7))):
            changed = (new[rows::2] != 9.0).flatten(2).any(2)
            assert [t for t in range(T) if changed[:, t].all()] == list(columns) and changed.sum() == 2 * len(columns)


def test_equals_complex_products():
    (qkv, cache, lengths, positions, rotations), kwargs = cases.rotate_into_cache(2, 7, 4, 2, 20)
    q = rotate_into_cache(qkv, cache, lengths, positions, rotations, **kwargs)
    turns = torch.view_as_complex(rotations[positions.clamp(0, len(rotations) - 1)]).repeat(2, 1, 1)[:, :, None]
    expected = torch.view_as_complex(qkv[..., :80].reshape(4, 7, 4, 10, 2)) * turns
    torch.testing.assert_close(q, torch.view_as_real(expected).flatten(-2))


@pytest.mark.parametrize("changes, message", [
    (dict(qkv=torch.zeros(2, 1, 4)), r"qkv must have Q = \(H \+ 2 Hkv\) D with H >= 1, .* got Q=4, Hkv=1 and D=2"),
    (dict(qkv=torch.zeros(2, 1, 7)), "qkv must have Q = .* got Q=7"),
    (dict(qkv=torch.zeros(3, 1, 6)), r"kv_cache must be float32 \(R=3, T=4, two=2, Hkv=1, D=2\), got float32 \(2, 4, "),
    (dict(kv_cache=torch.zeros(2, 4, 2, 1, 4)[..., :2]), "kv_cache must be contiguous, since it is written to"),
    (dict(lengths=torch.zeros(3, dtype=torch.int64)), "qkv must be a multiple of .* lengths, B=3, got 2"),
    (dict(positions=torch.zeros(1, 2, dtype=torch.int64)), r"positions must be int64 or int32 \(Y=1, N=1\), got int64"),
    (dict(rotations=torch.zeros(5, 2, 2)), r"rotations must be float32 \(P=5, pairs=1, two=2\), got float32 \(5, 2, 2"),
    (dict(rotations=torch.zeros(0, 1, 2)), r"rotations must have P >= 1, got shape \(0, 1, 2\)"),
    (dict(positions=torch.zeros(3, 1, dtype=torch.int64)), "qkv must be .* rows of positions, Y=3, got 2"),
    (dict(rotates_halves="no"), "rotates_halves must be a bool, got 'no'"),
    (dict(first_node=-1), "first_node must be an integer >= 0, got -1"),
])
def test_says_which_argument_is_wrong(changes, message):
    arguments = dict(qkv=torch.zeros(2, 1, 6), kv_cache=torch.zeros(2, 4, 2, 1, 2), rotations=torch.zeros(5, 1, 2),
                     lengths=torch.zeros(1, dtype=torch.int64), positions=torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        rotate_into_cache(**arguments | changes)
