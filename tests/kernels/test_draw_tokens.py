"""draw_tokens on numbers small enough to check by hand, and the law of its draws."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, backends, draw_tokens, guided_probs, gumbel_noise
from specvis_kernels._numbers import exp, log, log1p_of_negative
from tests.cases import DEVICE
from tests.kernels.test_guided_probs import INVALID

INF, NAN = math.inf, math.nan


def draw(logits, uncond=None, guidance=1.0, temperature=1.0, top_k=0, top_p=1.0, seeds=7, positions=0, **kwargs):
    """draw_tokens of logits (B, N, V) or a list, one row. A setting is a number or a list, one for each request."""
    def tensor(value, dtype):
        return torch.as_tensor(value, dtype=dtype, device=DEVICE)

    def rows(values):
        return values if values is None or isinstance(values, torch.Tensor) else tensor([[values]], torch.float32)

    logits = rows(logits)
    B, N, _ = logits.shape
    per_request = [tensor(value, dtype).expand(B) for value, dtype in (
        (guidance, torch.float32), (temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32))]
    kwargs |= {name: tensor(kwargs[name], torch.int64) for name in ("guesses", "id_range")
               if name in kwargs and not isinstance(kwargs[name], tuple)}
    return draw_tokens(logits, rows(uncond), *per_request, tensor(seeds, torch.int64).expand(B),
                       tensor(positions, torch.int64).expand(B, N), **kwargs)


def probs_of(logits, temperature=1.0, top_k=0, top_p=1.0, uncond=None, guidance=1.0, **kwargs):
    return guided_probs(logits, uncond, guidance, temperature, top_k, top_p, **kwargs).probs.flatten()


def noise(positions, n, seed=7):
    return gumbel_noise(torch.tensor([seed], device=DEVICE), torch.as_tensor([positions], device=DEVICE), n)[0]


def test_the_functions_are_right_to_rounding():
    """The error in units in the last place of float32, compared with float64."""
    def error(got, expected):
        return ((got.double() - expected).abs() / (expected.abs() * 2.0**-23).clamp(min=2.0**-149)).max()

    g = torch.Generator().manual_seed(0)
    x = -torch.rand(100000, generator=g) * 87
    assert error(exp(x), x.double().exp()) < 1.5
    x = (torch.rand(100000, generator=g) * 170 - 85).exp()
    assert error(log(x), x.double().log()) < 1.5
    v = (torch.rand(100000, generator=g) * -23).exp().clamp(max=1 - 2.0**-24)
    assert error(log1p_of_negative(v), torch.log1p(-v.double())) < 2


def test_the_largest_sum_wins(backend):
    """The noise of four ids at eight positions, as numbers, so that a change is seen."""
    g = noise(range(8), 4)
    assert g[0].tolist() == pytest.approx([0.160515, 0.242036, -0.374804, 2.575711], abs=1e-6)
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0], device=DEVICE).expand(1, 8, 4)
    out = draw(logits, positions=range(8), backend=backend)
    assert out.tokens[0].tolist() == (logits[0] + g).argmax(-1).tolist() and len(set(out.tokens[0].tolist())) > 1
    assert out.status.eq(0).all() and out.num_accepted.eq(0).all() and torch.equal(out.ahead_tokens, out.tokens)


def test_temperature_0_takes_the_lowest_of_the_best(backend):
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0], [-0.0, -1.0, 0.0, -INF]]], device=DEVICE)
    for filters in ({}, {"top_k": 1}, {"top_p": 0.1}):
        out = draw(logits, temperature=0.0, ahead=2, backend=backend, **filters)
        assert out.tokens.tolist() == out.ahead_tokens.tolist() == [[1, 0]]


def test_guidance_comes_first(backend):
    """2 c - u is 3, 1, 5, though c alone is largest at 0. An id that the condition forbids stays so."""
    assert draw([3.0, 1.0, 2.5, -INF], [3.0, 1.0, 0.0, -9.0], 2.0, 0.0, backend=backend).tokens.item() == 2


@pytest.mark.parametrize("V, position, tied", [
    (2, 17428806, [0, 1]), (2, 18739714, [0, 1]), (8, 6328359, [1, 3]), (8, 25205259, [4, 5])])
def test_the_lowest_id_wins_a_tie(backend, V, position, tied):
    """Positions at which the two largest numbers of the noise are equal, found by a search."""
    g = noise([position], V)[0]
    assert (g == g.max()).nonzero().flatten().tolist() == tied
    assert draw([0.0] * V, positions=position, backend=backend).tokens.item() == tied[0]


@pytest.mark.parametrize("logits, settings", INVALID + [
    ([0.0, 1.0, 2.0], {"id_range": [[[1, 1]]]}),
    ([0.0, 1.0, 2.0], {"id_range": [[[2, 1]]]}),
    ([0.0, 1.0, 2.0], {"id_range": [[[-1, 2]]]}),
    ([0.0, 1.0, 2.0], {"id_range": [[[1, 4]]]}),
    ([0.0, 1.0, 2.0], {"id_range": [[[-2**40, 2**40]]]}),
    ([0.0, 1.0, 2.0], {"id_range": [[[0, 2**40]]], "top_k": 4}),
])
def test_an_invalid_row_is_0_and_accepts_nothing(backend, logits, settings):
    out = draw(logits, guesses=[[0]], ahead=1, backend=backend, **settings)
    assert [x.item() for x in out] == [0, 0, 0, INVALID_ROW]


def test_what_lies_outside_the_range_is_not_looked_at(backend):
    out = draw([NAN, 0.0, INF], id_range=[[[1, 2]]], backend=backend)
    assert (out.tokens.item(), out.status.item()) == (1, 0)


def test_leading_guesses_that_stand_are_counted(backend):
    """Up to the first that is wrong, missing, or at an invalid row."""
    logits = torch.zeros(4, 5, 9, device=DEVICE)
    logits[3, 1, 0] = NAN
    positions = torch.arange(20).view(4, 5)
    guesses = draw(logits, positions=positions, backend=backend).tokens
    guesses[1, 2] = (guesses[1, 2] + 1) % 9
    guesses[2, 0] = -1
    out = draw(logits, positions=positions, guesses=guesses, backend=backend)
    assert out.num_accepted.tolist() == [5, 2, 0, 1] and guesses[3, 1] == out.tokens[3, 1] == 0


@pytest.mark.parametrize("settings", [{}, {"top_k": 30}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.9}])
def test_the_second_draw_is_that_of_the_position_ahead(backend, settings):
    logits = torch.randn(2, 6, 700, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    positions = torch.arange(12).view(2, 6) * 5 + 2**32 - 20
    out = draw(logits, positions=positions, ahead=16, backend=backend, **settings)
    assert torch.equal(out.ahead_tokens, draw(logits, positions=positions + 16, backend=backend, **settings).tokens)
    assert not torch.equal(out.ahead_tokens, out.tokens)


def test_a_row_is_drawn_alike_wherever_it_stands(backend):
    g = torch.Generator().manual_seed(1)
    row = torch.randn(300, generator=g)
    logits = torch.randn(3, 4, 300, generator=g)
    logits[2, 3] = row
    positions = torch.randint(2**31, (3, 4), generator=g)
    alone = draw(row.view(1, 1, -1).to(DEVICE), top_k=40, seeds=5, positions=[[9]], backend=backend).tokens.item()
    for position in (9, 9 + 2**32, 9 - 2**32):                   # the low 32 bits count
        positions[2, 3] = position
        out = draw(logits.to(DEVICE), top_k=[300, 5, 40], seeds=[1, 2, 5], positions=positions, backend=backend)
        assert out.tokens[2, 3] == alone
    others = {draw(row.view(1, 1, -1).to(DEVICE), top_k=40, seeds=5 + (s << 32), positions=[[9]],
                   backend=backend).tokens.item() for s in range(20)}
    assert len(others) > 5                                       # and so do both halves of a seed


@pytest.mark.parametrize("V, id_range", [(47, (0, 47)), (500, (0, 500)), (47, (11, 40))])
@pytest.mark.parametrize("filters", ["k_then_p", "p_then_k"])
@pytest.mark.parametrize("guidance, temperature, top_k, top_p", [
    (1.0, 1.0, 0, 1.0), (3.0, 1.0, 10, 1.0), (1.5, 0.7, 0, 0.8), (2.0, 1.3, 20, 0.9), (2.0, 0.0, 3, 0.5),
    (2.0, INF, 3, 0.5), (1.0, 1.3, 30, 0.7), (1.0, 1.3, 200, 0.95), (1.0, 1.3, 3, 0.95)])
def test_the_ids_kept_are_those_of_guided_probs(backend, V, id_range, guidance, temperature, top_k, top_p, filters):
    """Logits that tie often: the draw is the argmax over the ids of positive probability."""
    N = 30 if backend == "triton" else 300
    g = torch.Generator().manual_seed(V)
    logits, uncond = (torch.randn(2, 1, 1, V, generator=g) * 4).round().div(2).to(DEVICE)
    options = {"filters": filters, "id_range": id_range}
    probs = probs_of(logits, temperature, top_k, top_p, uncond, guidance, **options)
    kept = probs.nonzero().flatten().tolist()
    rows = logits.expand(1, N, V), uncond.expand(1, N, V), guidance, temperature, top_k, top_p
    tokens = draw(*rows, positions=range(N), **options, backend=backend).tokens[0].tolist()
    x = (uncond + guidance * (logits - uncond))[0, 0, kept] / (temperature or 1.0)
    scores = x - x.max() + (noise(range(N), V)[:, kept] if temperature else 0.0)
    assert tokens == [kept[i] for i in scores.expand(N, len(kept)).argmax(-1).tolist()]


@pytest.mark.parametrize("V", [1, 3, 255, 256, 257, 515])
def test_the_first_and_the_last_ids_are_drawn(backend, V):
    for best in {0, V // 2, V - 1}:
        for k in (0, 1):
            for first in {0, min(1, best), min(3, best)}:
                logits = torch.zeros(1, 1, V, device=DEVICE)
                logits[..., best] = 60.0
                out = draw(logits, top_k=k, id_range=[[[first, V]]], backend=backend)
                assert out.tokens.item() == best and out.status.item() == 0


OTHERS = [(backend, 9000, {}) for backend in backends("draw_tokens", DEVICE) if backend != "oracle"]
GPUS = [(9000, {"SMS": 1}), (9001, {"SMS": 24}), (9000, {"CAPABILITY": 8}), (17001, {"CAPABILITY": 8}),
        (17001, {"CAPABILITY": 8, "SHARED": 26_000}), (17001, {"CAPABILITY": 8, "SHARED": 40_000})]
EMULATED = [("cuda_emulated", V, gpu) for V, gpu in GPUS if ("cuda_emulated", 9000, {}) in OTHERS]


@pytest.mark.parametrize("backend, V, gpu", OTHERS + EMULATED)
def test_long_rows_are_drawn_alike(backend, V, gpu, monkeypatch):
    """Rows that Triton takes in several tiles, that hold more ids than CUDA lists, all of them equally good, or that do
    not fit into the registers of a team, or into shared memory: no row, or only that of a short range."""
    for name, setting in gpu.items():
        monkeypatch.setenv(f"CUDA_ON_CPU_{name}", str(setting))
    g = torch.Generator().manual_seed(0)
    B = 6
    logits, uncond = (torch.randn(2, B, 2, V, generator=g) * 4).round().div(2).to(DEVICE)
    logits[5] = uncond[5] = 0.0
    if V % 2:
        logits, uncond = logits.bfloat16(), uncond.bfloat16()  # exactly
    settings = {"guidance": [1.0, 3.0, 1.5, 2.0, 2.0, 1.0], "temperature": [1.0, 1.0, 0.7, 1.3, 0.0, 0.0],
                "top_k": [0, 6000, 1000, 0, 0, 0], "top_p": [1.0, 1.0, 1.0, 0.8, 1.0, 1.0], "ahead": 16,
                "seeds": range(B), "positions": [3, 4], "id_range": [[[0, V], [1003, 3001]]] * B}
    guesses = draw(logits, uncond, backend="oracle", **settings).tokens
    guesses[:3, 1] += 1
    expected = draw(logits, uncond, guesses=guesses, backend="oracle", **settings)
    got = draw(logits, uncond, guesses=guesses, backend=backend, **settings)
    assert all(map(torch.equal, got, expected)) and got.num_accepted.tolist() == [1, 1, 1, 2, 2, 2]


def z_of_counts(counts, probs):
    """Chi-square of counts against probabilities, in standard deviations. Rare ids count as one."""
    expected = probs.double() / probs.double().sum() * counts.sum()
    is_rare = expected < 5
    counts, expected = (torch.cat([t.double()[~is_rare], t.double()[is_rare].sum()[None]]) for t in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def counts_of(logits, settings, draws, seed=3, rows=500):
    counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=DEVICE)
    many = logits.expand(1, rows, -1).contiguous()
    for start in range(0, draws, rows):
        tokens = draw(many, seeds=seed, positions=torch.arange(start, start + rows), **settings).tokens
        counts += torch.bincount(tokens.flatten(), minlength=len(counts))
    return counts


@pytest.mark.parametrize("V, settings, draws, hotter", [
    (7, {}, 100_000, 1.1),
    (40, {"temperature": 0.7, "top_k": 12}, 100_000, 1.1),
    (300, {"top_p": 0.8}, 100_000, 1.1),
    (16384, {"top_k": 1000}, 100_000, 1.1),
    (16384, {}, 100_000, 1.2),
])
def test_tokens_have_the_probabilities_of_guided_probs(V, settings, draws, hotter):
    """Control: these counts do not fit the probabilities at a slightly higher temperature."""
    logits = torch.randn(1, 1, V, generator=torch.Generator().manual_seed(V)).mul(2).to(DEVICE)
    counts = counts_of(logits, settings, draws)
    assert counts[probs_of(logits, **settings) == 0].sum() == 0
    assert abs(z_of_counts(counts, probs_of(logits, **settings))) < 4
    control = settings | {"temperature": settings.get("temperature", 1.0) * hotter}
    assert z_of_counts(counts, probs_of(logits, **control)) > 8


def test_draws_are_independent():
    """Draws of the next position, of the next seed, and the second draw. Control: draws of one position are not."""
    V, seeds = 6, torch.arange(50_000, device=DEVICE)
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    positions = torch.tensor([20, 21, 36], device=DEVICE)
    out = draw(logits.expand(len(seeds), 3, V), seeds=seeds, positions=positions, ahead=16)
    first, after, below = out.tokens.unbind(1)
    assert torch.equal(out.ahead_tokens[:, 0], below)

    def z_of(a, b):
        table = torch.bincount(a * V + b, minlength=V * V).view(V, V).double()
        expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
        freedom = (V - 1) ** 2
        return (((table - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)

    for other in (after, below, first.roll(1), after.roll(1)):
        assert abs(z_of(first, other)) < 4
    assert z_of(first, first) > 1000
