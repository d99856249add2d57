"""tree_attention against numbers worked out by hand, a masked softmax, and itself in other company."""
import pytest
import torch

from specvis_kernels import backends, tree_attention, tree_links
from tests import cases
from tests.cases import DEVICE

BACKENDS = backends("tree_attention", DEVICE)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
TOLERANCE = {torch.float32: dict(rtol=2e-5, atol=2e-5), torch.float16: dict(rtol=2e-3, atol=2e-3),
             torch.bfloat16: dict(rtol=1e-2, atol=1e-2)}


def ancestors_of(*parents):
    return tree_links(torch.tensor(parents, dtype=torch.int32, device=DEVICE)).ancestors


def chain(N):
    return ancestors_of([*range(-1, N - 1)])


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_hand(q, k, v, lengths, ancestors, key_mask=None, scale=None):
    """A loop over rows, heads and queries, each over the keys that it sees, in float64."""
    (R, N, H, D), T, B = q.shape, k.shape[1], len(lengths)
    out = torch.zeros(R, N, H, D, dtype=torch.float64)
    for r in range(R):
        length = int(lengths[r % B])
        for n in range(N):
            words = [int(word) for word in ancestors[r % B, n]]
            seen = [t for t in range(min(length, T)) if key_mask is None or t >= key_mask.shape[1] or key_mask[r, t]]
            seen += [length + j for j in range(64 * len(words)) if words[j // 64] >> j % 64 & 1 and length + j < T]
            for h in range(H if seen else 0):
                keys, values = (x[r, seen, h * k.shape[2] // H].cpu().double() for x in (k, v))
                scores = keys @ q[r, n, h].cpu().double() * (D ** -0.5 if scale is None else scale)
                out[r, n, h] = scores.softmax(0) @ values
    return out.to(DEVICE, q.dtype)


@each_backend
def test_numbers_by_hand(backend):
    """Weights of 1 and e: a score is 0 or 1. A cached column, a root with two children, one of which has a child. The
    values are 1, 10, 100, 1000, 10000."""
    k, v = torch.zeros(1, 5, 1, 32, device=DEVICE), torch.zeros(1, 5, 1, 32, device=DEVICE)
    k[0, 2, 0, 3] = 0.5
    v[0, :, 0] = (10.0 ** torch.arange(5, device=DEVICE))[:, None]
    q = torch.zeros(1, 4, 1, 32, device=DEVICE)
    q[..., 3] = 2.0
    got = tree_attention(q, k, v, torch.tensor([1], device=DEVICE), ancestors_of([-1, 0, 0, 1]), scale=1.0,
                         backend=backend)
    e = 2.718281828
    expected = [11 / 2, (11 + 100 * e) / (2 + e), 1011 / 3, (10011 + 100 * e) / (3 + e)]
    torch.testing.assert_close(got[0, :, 0, 7], torch.tensor(expected, device=DEVICE), rtol=1e-5, atol=0)
    assert got[0, :, 0].equal(got[0, :, 0, 7:8].expand(4, 32))


@each_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("D", [32, 48, 64, 80, 100, 128])
def test_equals_a_masked_softmax(backend, D, dtype):
    """Ragged lengths, rows with and without the condition, grouped heads, a padded condition, strided caches."""
    cache = random(4, 40, 2, 2, D, dtype=dtype)
    k, v = cache.unbind(2)
    q = random(4, 7, 3, 4, D, dtype=dtype, seed=1)[:, :, 1]
    lengths = torch.tensor([33, 18], device=DEVICE)
    ancestors = ancestors_of([-1, 0, 0, 1, 1, 3, -2], [-1, 0, 1, 2, 3, 4, 5])
    key_mask = random(4, 11, seed=2) > 0
    got = tree_attention(q, k, v, lengths, ancestors, key_mask=key_mask, backend=backend)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got, by_hand(q, k, v, lengths, ancestors, key_mask), **TOLERANCE[dtype])


@each_backend
@pytest.mark.parametrize("N, length", [(1, 0), (1, 130), (2, 64), (5, 70), (33, 17), (70, 3), (130, 0)])
def test_chains_of_any_length(backend, N, length):
    """More than 64 nodes have two or three words of bits."""
    q, (k, v) = random(2, N, 2, 32, seed=N), random(2, N + length, 2, 2, 32).unbind(2)
    lengths = torch.tensor([length], device=DEVICE)
    got = tree_attention(q, k, v, lengths, chain(N), backend=backend)
    torch.testing.assert_close(got, by_hand(q, k, v, lengths, chain(N)), **TOLERANCE[torch.float32])


@each_backend
def test_a_level_alone(backend):
    """The queries are some of the nodes; their ancestors' keys are there already."""
    q, (k, v) = random(2, 7, 2, 32, seed=1), random(2, 30, 2, 2, 32).unbind(2)
    lengths, ancestors = torch.tensor([20], device=DEVICE), ancestors_of([-1, 0, 0, 1, 1, 2, 2])
    whole = tree_attention(q, k, v, lengths, ancestors, backend=backend)
    level = tree_attention(q[:, 3:], k, v, lengths, ancestors[:, 3:], backend=backend)
    torch.testing.assert_close(level, whole[:, 3:], **TOLERANCE[torch.float32])


@each_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_not_seen_may_hold_anything(backend, dtype):
    """Columns that the mask hides, unused columns between the nodes, and columns after them."""
    q, cache = random(2, 2, 2, 64, dtype=dtype, seed=1), random(2, 40, 2, 2, 64, dtype=dtype)
    lengths, ancestors = torch.tensor([9], device=DEVICE), torch.tensor([[[1], [0b1001]]], device=DEVICE)
    key_mask = torch.tensor([[True, False, True], [False, True, True]], device=DEVICE)
    clean = tree_attention(q, *cache.unbind(2), lengths, ancestors, key_mask=key_mask, backend=backend)
    cache[0, 1], cache[1, 0], cache[:, 10:12], cache[:, 13:] = torch.nan, torch.inf, torch.nan, torch.nan
    got = tree_attention(q, *cache.unbind(2), lengths, ancestors, key_mask=key_mask, backend=backend)
    assert got.equal(clean) and not got.isnan().any()


@each_backend
def test_a_query_that_sees_nothing_is_zero(backend):
    q, (k, v) = random(2, 2, 2, 32, seed=1), random(2, 8, 2, 2, 32).unbind(2)
    key_mask = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
    got = tree_attention(q, k, v, torch.tensor([4], device=DEVICE), torch.tensor([[[0], [1]]], device=DEVICE),
                         key_mask=key_mask, backend=backend)
    assert not got[:, 0].any() and got[:, 1].equal(v[:, 4])


@each_backend
@pytest.mark.parametrize("length", [-3, -1, 6, 8, 2**40, -2**62, 2**63 - 1])
def test_columns_outside_of_the_cache_are_not_seen(backend, length):
    """The request beside it does not notice."""
    q, (k, v) = random(2, 3, 1, 32, seed=1), random(2, 8, 2, 1, 32).unbind(2)
    lengths = torch.tensor([length, 2], device=DEVICE)
    ancestors = chain(3).repeat(2, 1, 1)
    got = tree_attention(q, k, v, lengths, ancestors, backend=backend)
    if 0 <= length:
        clipped = lengths.clamp(max=8)
        torch.testing.assert_close(got, by_hand(q, k, v, clipped, ancestors), **TOLERANCE[torch.float32])
    else:
        assert not got[0].any()
    alone = tree_attention(q[1:], k[1:], v[1:], lengths[1:], ancestors[1:], backend=backend)
    torch.testing.assert_close(got[1:], alone, **TOLERANCE[torch.float32])


@each_backend
def test_large_scores_do_not_overflow(backend):
    q, (k, v) = random(1, 4, 2, 32, seed=1) * 1e4, random(1, 30, 2, 2, 32).unbind(2)
    lengths = torch.tensor([20], device=DEVICE)
    got = tree_attention(q, k, v, lengths, chain(4), backend=backend)
    torch.testing.assert_close(got, by_hand(q, k, v, lengths, chain(4)), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="it is the C++ kernel that promises it")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("D, G", [(32, 1), (48, 1), (64, 1), (100, 2), (128, 1)])
@pytest.mark.parametrize("length", [0, 3, 64, 100])
def test_bits_depend_on_what_a_query_sees_alone(length, D, G, dtype):
    """A chain read one by one, as the cache grows; read at once; within a tree with siblings; in parts. And after a
    condition's padding of any width."""
    N, H = 19, 2 * G
    q, cache = random(2, N, H, D, dtype=dtype, seed=1), random(2, length + 3 * N, 2, 2, D, dtype=dtype)
    k, v = cache.unbind(2)

    def attend(q, k, v, length, ancestors, **options):
        return tree_attention(q, k, v, torch.tensor([length]), ancestors, backend="cpu", **options)

    whole = attend(q, k, v, length, chain(N))
    for n in range(N):  # the nodes before it are cached by now
        assert attend(q[:, n:n + 1], k, v, length + n, chain(1)).equal(whole[:, n:n + 1])
    for first, last in ((0, 2), (2, 5), (5, 9), (9, 19)):
        assert attend(q[:, first:last], k, v, length + first, chain(last - first)).equal(whole[:, first:last])
        assert attend(q[:, first:last], k, v, length, chain(N)[:, first:last]).equal(whole[:, first:last])

    at = torch.arange(N) * 3  # two siblings follow each node of the chain
    parents = torch.tensor([[-1] + [(n - 1) // 3 * 3 for n in range(1, 3 * N)]])
    assert parents[0, at[1:]].equal(at[:-1])
    tree_cache = random(2, length + 3 * N, 2, 2, D, dtype=dtype, seed=5)
    tree_cache[:, :length], tree_cache[:, length + at] = cache[:, :length], cache[:, length:length + N]
    tree_q = random(2, 3 * N, H, D, dtype=dtype, seed=6)
    tree_q[:, at] = q
    in_tree = attend(tree_q, *tree_cache.unbind(2), length, ancestors_of(*parents.tolist()))
    assert in_tree[:, at].equal(whole)

    padded = torch.cat([random(2, 7, 2, 2, D, dtype=dtype, seed=7), cache], 1)
    key_mask = torch.zeros(2, 7, dtype=torch.bool)
    assert attend(q, *padded.unbind(2), length + 7, chain(N), key_mask=key_mask).equal(whole)
    assert attend(q[:1], k[:1], v[:1], length, chain(N)).equal(whole[:1])


def test_the_makers_trees_branch_and_lengths_differ():
    """The inputs make a comparison of backends worth something."""
    for case in cases.CASES["tree_attention"][1:]:
        (q, k, _, lengths, ancestors), _ = cases.tree_attention(*case)
        assert len(set(lengths.tolist())) == min(len(lengths), 3) and not k.is_contiguous()
        assert not ancestors.equal(chain(q.shape[1]).expand_as(ancestors))
