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


def test_heads_are_normalized_before_they_turn(backend):
    qkv = torch.tensor([1., 3., 10., 30., 5., 6.]).view(1, 1, 6).to(DEVICE)  # a query, a key and a value of two entries
    cache, at = torch.zeros(1, 1, 2, 1, 2, device=DEVICE), torch.tensor([0], device=DEVICE)
    norms = tuple(torch.tensor([[[2., 2.], [1., 4.]], [[0., 1.], [5., 5.]]]).to(DEVICE))
    q = rotate_into_cache(qkv, cache, at, at[None], torch.tensor([[[0., 1.]]]).to(DEVICE), head_norms=norms, head_eps=0,
                          backend=backend)
    # (-1, 1) * (2, 2) + (0, 1) = (-2, 3) and (-1, 1) * (1, 4) + (5, 5) = (4, 9), turned by a quarter
    assert q.flatten().tolist() == [-3., -2.] and cache.flatten().tolist() == [-9., 4., 5., 6.]


def test_equals_complex_products():
    (qkv, cache, lengths, positions, rotations), kwargs = cases.rotate_into_cache(2, 7, 4, 2, 20)
    q = rotate_into_cache(qkv, cache, lengths, positions, rotations, **kwargs)
    turns = torch.view_as_complex(rotations[positions.clamp(0, len(rotations) - 1)]).repeat(2, 1, 1)[:, :, None]
    expected = torch.view_as_complex(qkv[..., :80].reshape(4, 7, 4, 10, 2)) * turns
    torch.testing.assert_close(q, torch.view_as_real(expected).flatten(-2))
