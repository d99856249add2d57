"""draft_children on numbers small enough to check by hand, and compared with the ops that it replaces."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, draft_children, draw_children, expand_tree, guided_probs
from tests.cases import DEVICE, backends_but, tensor

INF, NAN = math.inf, math.nan


def draws(noise, B, F, K, uniform=0.5):
    """Arguments by which K children are drawn: uniforms, all of them equal, or seeds and positions."""
    if not noise:
        return {"uniforms": torch.full((B, F, K), uniform, device=DEVICE)}
    return {"uniforms": None, "seeds": tensor([5, -6][:B], torch.int64), "num_children": K,
            "positions": torch.arange(B * F, device=DEVICE).view(B, F)}


def settings(guidance=(1.0,), temperature=(1.0,), top_k=(0,), top_p=(1.0,)):
    return {name: torch.tensor(value, dtype=torch.int32 if name == "top_k" else torch.float32, device=DEVICE)
            for name, value in (("guidance", guidance), ("temperature", temperature), ("top_k", top_k),
                                ("top_p", top_p))}


def children(probs, uniforms, backend, **others):
    """One node, whose row is these probabilities: tokens and row as lists, and its status."""
    logits = torch.tensor([[probs]], dtype=torch.float64).log().float().to(DEVICE)
    out = draft_children(logits, None, torch.tensor([[uniforms]], device=DEVICE), **settings(**others), backend=backend)
    return out.tokens[0, 0].tolist(), out.probs[0, 0].tolist(), out.status.item()


@pytest.mark.parametrize("uniforms, tokens", [
    ([0.51, 0.51, 0.51, 0.5], [1, 0, 3, 2]),  # of sixteenths 8 4 2 2, then of 8 0 2 2, then of 0 0 2 2
    ([0.49, 0.49, 0.49, 0.9], [0, 1, 2, 3]),
    ([0.76], [2]),
])
def test_draws_by_hand(backend, uniforms, tokens):
    drawn, probs, status = children([1/2, 1/4, 1/8, 1/8], uniforms, backend)
    assert drawn == tokens and status == 0 and probs == pytest.approx([1/2, 1/4, 1/8, 1/8])


def test_of_many_equal_ids_the_lowest_are_the_likeliest(backend):
    """More than a GPU's block ranks at once, and in the parts of a row that its last blocks read."""
    logits = (torch.arange(4096, device=DEVICE) >= 3496).float()[None, None]
    out = draft_children(logits, None, torch.zeros(1, 1, 5, device=DEVICE), **settings(temperature=(0.0,)),
                         backend=backend)
    assert out.tokens.flatten().tolist() == list(range(3496, 3501)) and not out.status.any()


@pytest.mark.parametrize("noise", [False, True])
def test_fewer_finite_logits_than_top_k_keeps(backend, noise):
    """Only they can be drawn. The others tie at -inf with the padding of a row, which must not become candidates."""
    logits = torch.full((1, 40, 257), -INF, device=DEVICE)
    logits[..., [3, 100, 256]] = torch.tensor([0.0, 2.0, 1.0], device=DEVICE)
    for top_p in (1.0, 0.999999):
        out = draft_children(logits, None, **draws(noise, 1, 40, 4), **settings(top_k=(200,), top_p=(top_p,)),
                             backend=backend)
        assert not out.status.any() and not out.tokens[..., 3].any()
        assert out.tokens[..., :3].sort().values.equal(torch.tensor([3, 100, 256], device=DEVICE).expand(1, 40, 3))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_an_invalid_row(backend, bad, noise, temperature):
    """-INF: all of the row, which leaves no mass."""
    logits = torch.zeros(1, 3, 4, device=DEVICE)
    logits[0, 1] = bad
    out = draft_children(logits, None, **draws(noise, 1, 3, 2), **settings(temperature=(temperature,)), backend=backend)
    assert out.status.tolist() == [[0, INVALID_ROW, 0]]
    assert out.tokens[0, 1].tolist() == [0, 0] and out.probs[0].sum(-1).tolist() == [1, 0, 1]
    assert all(len(set(out.tokens[0, f].tolist())) == 2 for f in (0, 2))


def as_before(logits, uncond, uniforms, guidance, temperature, top_k, top_p, seeds=None, positions=None,
              num_children=None):
    """The drafting by guided_probs, draw_children and, for requests at temperature 0, expand_tree."""
    probs, _ = guided_probs(logits, uncond, guidance, temperature, top_k, top_p)
    drawn = draw_children(probs, uniforms, seeds=seeds, positions=positions, num_children=num_children)
    B, F, K = drawn.tokens.shape
    width = torch.full((B,), K, dtype=torch.int32, device=probs.device)
    likeliest = expand_tree(probs, probs.new_zeros(B, F), width, num_children=K).tokens
    return torch.where((temperature == 0)[:, None, None], likeliest, drawn.tokens), probs, drawn.status


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("F, V, K, dtype", [(1, 40, 3, torch.float32), (4, 1100, 10, torch.float32),
                                            (3, 300, 320, torch.bfloat16), (6, 4500, 4, torch.float16)])
def test_equals_the_ops_that_it_stands_for(backend, F, V, K, dtype, noise):
    """Bit for bit. Requests differ in all that they may differ in."""
    if DEVICE == "cpu" and backend in ("triton", "cuda_emulated"):
        F, V, K = min(F, 2), min(V, 70), min(K, 75)
    g = torch.Generator().manual_seed(V)
    B = 6
    logits, uncond = (torch.randn(B, F, V, generator=g).mul(3) for _ in range(2))
    logits[0] = logits[0].round()            # ties
    logits[4, F - 1, V // 2] = NAN
    logits[5, :, 2:] = -INF                  # two tokens are left, fewer than K
    given = settings((1.0, 7.5, 3.0, 2.0, 1.2, 4.0), (1.0, 0.7, 1.0, 0.0, 1.3, 1.0), (0, 20, 3, 0, 100, 0),
                     (1.0, 1.0, 0.9, 1.0, 0.8, 1.0))
    drawn_by = {"uniforms": torch.rand(B, F, K, generator=g).to(DEVICE)}
    if noise:
        drawn_by = {"uniforms": None, "num_children": K,
                    "seeds": torch.randint(-2**63, 2**63 - 1, (B,), generator=g).to(DEVICE),
                    "positions": torch.randint(2**40, (B, F), generator=g).to(DEVICE)}
    args = {"logits": logits.to(DEVICE, dtype), "uncond": uncond.to(DEVICE, dtype), **drawn_by, **given}
    got, expected = draft_children(**args, backend=backend), as_before(**args)
    for name, a, b in zip(got._fields, got, expected):
        assert a.dtype == b.dtype and a.equal(b), name
    assert got.status.count_nonzero() == 1 and got.tokens[5, :, 2:].eq(0).all()


@pytest.mark.parametrize("backend", backends_but("draft_children", "oracle", "triton", "cuda_emulated"))
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("V", [4096, 16384, 5003])
@pytest.mark.parametrize("top_k, top_p", [(100, 0.8), (1000, 1.0), (0, 1.0), (0, 0.9), (7, 1.0)])
def test_agrees_with_the_oracle_on_long_rows(backend, V, top_k, top_p, noise):
    g = torch.Generator().manual_seed(V + top_k)
    logits, uncond = torch.randn(2, 2, 6, V, generator=g).to(DEVICE)
    drawn_by = draws(True, 2, 6, 10) if noise else {"uniforms": torch.rand(2, 6, 10, generator=g).to(DEVICE)}
    given = settings((1.2, 2.0), (1.0, 0.9), (top_k, top_k), (top_p, top_p))
    got, expected = (draft_children(logits, uncond, **drawn_by, **given, backend=name) for name in (backend, "oracle"))
    assert all(a.equal(b) for a, b in zip(got, expected)) and (expected.tokens > 0).sum() >= 80
