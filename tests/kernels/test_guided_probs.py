"""guided_probs on numbers small enough to check by hand, and its own laws."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, backends, guided_probs
from specvis_kernels._numbers import exp
from tests.cases import DEVICE

INF, NAN = math.inf, math.nan
LEAST = torch.finfo(torch.float32).min


def one_row(logits, uncond=None, guidance=1.0, temperature=1.0, top_k=0, top_p=1.0, **kwargs):
    """Probabilities (a list) and status of one row."""
    def row(values):
        return None if values is None else torch.tensor([[values]], device=DEVICE)

    def setting(value, dtype=torch.float32):
        return torch.tensor([value], dtype=dtype, device=DEVICE)

    probs, status = guided_probs(row(logits), row(uncond), setting(guidance), setting(temperature),
                                 setting(top_k, torch.int32), setting(top_p), **kwargs)
    return probs[0, 0].tolist(), status.item()


def logs(*proportions):
    """Logits of tokens in these proportions."""
    return [math.log(x) if x else -INF for x in proportions]


def close(expected):
    return pytest.approx(expected, rel=1e-6, abs=0)  # abs=0: a zero is a zero


@pytest.mark.parametrize("settings, expected", [
    ({}, [8, 4, 2, 1, 1]),                             # /16
    ({"temperature": 0.5}, [64, 16, 4, 1, 1]),         # squares, /86
    ({"temperature": INF}, [1, 1, 1, 1, 1]),
    ({"top_k": 2}, [8, 4, 0, 0, 0]),
    ({"top_k": 4}, [8, 4, 2, 1, 1]),                   # the fourth largest is 1: both ones are at least that
    ({"top_k": 5}, [8, 4, 2, 1, 1]),                   # all there are: off
    ({"top_k": -1}, [8, 4, 2, 1, 1]),                  # off
    ({"top_p": 0.4}, [8, 0, 0, 0, 0]),                 # the first crosses: 0 < 0.4 <= 8/16
    ({"top_p": 0.6}, [8, 4, 0, 0, 0]),                 # 8/16 < 0.6 <= 12/16
    ({"top_p": 0.9}, [8, 4, 2, 1, 1]),                 # 14/16 < 0.9: one of the ties crosses, both stay
    ({"top_p": 1e-30}, [8, 0, 0, 0, 0]),               # less than any mass: the best one stays
    ({"top_p": 0.0}, [8, 4, 2, 1, 1]),                 # off
    ({"min_p": 0.24}, [8, 4, 2, 0, 0]),                # 2/8 is above
    ({"min_p": 0.26, "temperature": 2.0}, [8**.5, 2, 2**.5, 1, 1]),  # temperature first: 1/8**.5 >= 0.26
    ({"min_p": 0.2, "top_k": 2}, [8, 4, 0, 0, 0]),
    ({"min_p": 0.5, "top_p": 0.9, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),
    ({"min_p": 1.0}, [8, 0, 0, 0, 0]),
    ({"min_p": 0.5, "temperature": 0.0}, [8, 4, 2, 1, 1]),  # greedy: no filter
    ({"top_p": 1.5}, [8, 4, 2, 1, 1]),                 # off
    ({"top_k": 2, "top_p": 0.6}, [8, 0, 0, 0, 0]),     # top-k first: 8/12 >= 0.6; else 8 and 4 would stay
    ({"temperature": 0.5, "top_p": 0.7}, [64, 0, 0, 0, 0]),  # temperature first: 64/86 >= 0.7 > 8/16
    ({"temperature": 0.0, "top_k": 1, "top_p": 0.1}, [8, 4, 2, 1, 1]),  # greedy: no filter
    ({"top_k": 2, "top_p": 0.6, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),  # 8/16 < 0.6, and both are among the best 2
    ({"top_k": 1, "top_p": 0.6, "filters": "p_then_k"}, [8, 0, 0, 0, 0]),
    ({"top_k": 3, "top_p": 0.9, "filters": "p_then_k"}, [8, 4, 2, 0, 0]),  # top-p leaves all of them
    ({"top_k": 4, "top_p": 0.9, "filters": "p_then_k"}, [8, 4, 2, 1, 1]),  # the fourth largest is a tie
    ({"top_k": 4, "top_p": 0.6, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),  # top-p leaves less than four
    ({"top_k": 2, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),
    ({"top_p": 0.6, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),
    ({"temperature": 0.0, "top_k": 1, "top_p": 0.1, "filters": "p_then_k"}, [8, 4, 2, 1, 1]),
    ({"id_range": (0, 3), "top_k": 2, "top_p": 0.6, "filters": "p_then_k"}, [8, 4, 0, 0, 0]),  # 8/14 < 0.6
    ({"id_range": (1, 4)}, [0, 4, 2, 1, 0]),
    ({"id_range": (1, 4), "top_k": 1}, [0, 4, 0, 0, 0]),  # the best of the range
    ({"id_range": [2, 3]}, [0, 0, 2, 0, 0]),
    ({"id_range": (0, 4), "top_k": 3}, [8, 4, 2, 0, 0]),  # all but one
])
def test_by_hand(backend, settings, expected):
    probs, status = one_row(logs(8, 4, 2, 1, 1), backend=backend, **settings)
    assert probs == close([x / sum(expected) for x in expected]) and status == 0


@pytest.mark.parametrize("best", [0.0, 9.0, -3.0, 1e-20, 3e4])
def test_min_p_keeps_the_border(backend, best):
    """The ids are those whose exp(x - best), in float32, is at least min_p: where this is some id's own number, or a
    float more. The logits lie around the border too, and around zero."""
    g = torch.Generator().manual_seed(1)
    for share in (1.0, 1 - 2**-24, 0.5, 0.03, 1e-30, 1e-45):
        x = best + math.log(share) * (1 + torch.randn(40, generator=g) * 1e-6)
        x = torch.cat([x, torch.tensor([best]), best - 3 * torch.rand(20, generator=g)]).clamp(max=best).to(DEVICE)
        e = exp(x - best)
        for min_p in {share, e[0].item(), e[45].item()}:
            one = torch.tensor([min_p], device=DEVICE)
            for number in (one, one.nextafter(torch.ones_like(one))):
                probs = guided_probs(x[None, None], None, None, 1.0, 0, 1.0, min_p=number, backend=backend).probs
                assert torch.equal(probs[0, 0] > 0, (e >= number) & (e > 0))


@pytest.mark.parametrize("cond, uncond, guidance, expected", [
    (logs(2, 4, 2), logs(1, 1, 4), 1.0, [2, 4, 2]),    # u + (c - u) = c
    (logs(2, 4, 2), logs(1, 1, 4), 0.0, [1, 1, 4]),
    (logs(2, 4, 2), logs(1, 1, 4), 2.0, [4, 16, 1]),   # c^2 / u
    (logs(0, 4, 2), logs(1, 1, 4), 2.0, [0, 16, 1]),   # -inf stays -inf
    (logs(0, 4, 2), logs(0, 1, 4), 2.0, [0, 16, 1]),   # and -inf - -inf is not NaN
    (logs(0, 4, 2), logs(1, 1, 4), 0.0, [0, 1, 4]),    # nor is 0 times -inf
])
def test_guidance_by_hand(backend, cond, uncond, guidance, expected):
    probs, status = one_row(cond, uncond, guidance, backend=backend)
    assert probs == close([x / sum(expected) for x in expected]) and status == 0


INVALID = [  # logits and settings of one row
    ([0.0, NAN, 1.0], {}),
    ([0.0, -NAN, 1.0], {"top_k": 1}),
    ([0.0, INF, 1.0], {}),
    ([-INF, -INF, -INF], {}),
    ([1.0, -INF, -INF], {"id_range": (1, 3)}),          # nothing within the range
    ([0.0, 1.0, 2.0], {"temperature": -1.0}),
    ([0.0, 1.0, 2.0], {"temperature": NAN}),
    ([-INF, 1.0, 2.0], {"uncond": [NAN, 0.0, 0.0]}),    # a -inf does not hide it
    ([-INF, 1.0, 2.0], {"uncond": [INF, 0.0, 0.0]}),
    ([0.0, 1.0, 2.0], {"uncond": [-INF, 0.0, 0.0]}),    # guidance away from -inf is +inf
    ([0.0, 3e38, 0.0], {"temperature": 0.5}),           # overflow
    ([LEAST] * 3, {}),                                  # masked by the model
    ([LEAST] * 3, {"temperature": 4.0}),
    ([LEAST, -INF, LEAST], {"temperature": 0.0}),
    ([LEAST] * 3, {"uncond": [LEAST] * 3, "guidance": 3.0}),
    ([LEAST] * 3, {"uncond": [0.0, 1.0, 2.0], "guidance": 0.0}),
    ([0.0, LEAST, LEAST], {"id_range": (1, 3)}),
]


@pytest.mark.parametrize("logits, settings", INVALID)
def test_an_invalid_row_is_zero(backend, logits, settings):
    assert one_row(logits, backend=backend, **settings) == ([0.0, 0.0, 0.0], INVALID_ROW)


@pytest.mark.parametrize("logits, settings, expected", [
    ([NAN, 0.0, INF], {"id_range": (1, 2)}, [0, 1, 0]),           # logits outside the range do not matter
    ([0.0, -0.0, -1.0], {"top_k": 1}, [0.5, 0.5, 0]),             # the two zeros are a tie
    ([1.0, 1 + 2**-23, 0.0], {"top_k": 1}, [0, 1, 0]),            # the last bit counts
    ([-INF, 0.0, -INF], {"top_k": 2, "top_p": 0.5}, [0, 1, 0]),
    ([-1e30, 1e30, 0.0], {"top_p": 0.5}, [0, 1, 0]),
    ([LEAST, -3.3e38, LEAST], {}, [0, 1, 0]),                     # one that the model has not masked
    ([LEAST, 0.0, LEAST], {"uncond": [LEAST, 1.0, LEAST], "guidance": 3.0, "temperature": 2.0}, [0, 1, 0]),
    ([7.0], {"top_p": 0.5, "top_k": 1}, [1]),
])
def test_extremes(backend, logits, settings, expected):
    assert one_row(logits, backend=backend, **settings) == (expected, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(backend, dtype):
    g = torch.Generator().manual_seed(0)
    cond, uncond = (torch.randn(1, 2, 40, generator=g).to(DEVICE, dtype) for _ in range(2))
    settings = [torch.tensor([x], device=DEVICE) for x in (7.5, 0.9)]
    filters = torch.tensor([20], dtype=torch.int32, device=DEVICE), torch.tensor([0.9], device=DEVICE)
    half = guided_probs(cond, uncond, *settings, *filters, backend=backend)[0]
    full = guided_probs(cond.float(), uncond.float(), *settings, *filters, backend=backend)[0]
    assert torch.equal(half, full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V, unmasked", [(3000, 2999), (5, 4), (5, 0)])
def test_rows_that_a_model_has_masked(backend, dtype, V, unmasked):
    """By the least finite number of its dtype. In float32 they may have been bfloat16; half of it is a logit."""
    least = torch.finfo(dtype).min
    rows = torch.full((1, 4, V), least, dtype=dtype, device=DEVICE)
    rows[0, 1, unmasked] = least / 2
    rows[0, 2:, :2] = torch.tensor([-INF, torch.finfo(torch.bfloat16).min] if dtype == torch.float32 else [-INF] * 2)
    rows[0, 3, unmasked] = 1
    uncond = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    for other, guidance in ((None, 1.0), (rows, 2.0), (uncond, 0.5)):
        probs, status = guided_probs(rows, other, guidance, 2.0, 0, 1.0, backend=backend)
        assert status.tolist() == [[INVALID_ROW, 0, INVALID_ROW, 0]] and not probs[0, ::2].any()
        assert probs[0, 3, unmasked] == 1 and (other is uncond or probs[0, 1, unmasked] == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first, second", [(0, 1), (1, 0), (1, 1), (3, 7), (2, 10)])
def test_rows_start_at_any_address(backend, dtype, first, second):
    """Each half of a pair at one of its own."""
    V = 45
    memory = torch.randn(2, V + 16, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    cond, uncond = (row[at:at + V].view(1, 1, V) for row, at in zip(memory.unbind(0), (first, second)))
    settings = [torch.tensor([x], device=DEVICE) for x in (2.0, 1.0, 9, 0.9)]
    settings[2] = settings[2].int()
    got = guided_probs(cond, uncond, *settings, backend=backend)
    for a, b in zip(got, guided_probs(cond.clone(), uncond.clone(), *settings, backend=backend)):
        assert torch.equal(a, b)


def plainly_filtered(logits, k, p, filters):
    """The ids that top-p keeps, and of these top-k, or the other way around, by sorting."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    if filters == "k_then_p" and k > 0:
        order = order[:k]
    probs = torch.tensor(logits, dtype=torch.float64)[order].softmax(0)
    kept, mass = [], 0.0
    for v, prob in zip(order, probs.tolist()):
        if not 0 < p < 1 or mass < p:
            kept.append(v)
        mass += prob
    return set(kept[:k] if k > 0 else kept)


@pytest.mark.parametrize("k", [0, 1, 7, 60, 500])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("filters", ["k_then_p", "p_then_k"])
def test_filters_are_the_plain_statement(backend, k, p, filters):
    logits = (torch.randn(300, generator=torch.Generator().manual_seed(k)) * 2).tolist()
    probs, status = one_row(logits, top_k=k, top_p=p, filters=filters, backend=backend)
    kept = plainly_filtered(logits, k, p, filters)
    assert {v for v in range(300) if probs[v] > 0} == kept and status == 0 and sum(probs) == pytest.approx(1, rel=1e-5)
    assert max(probs) == close(math.exp(max(logits)) / sum(math.exp(logits[v]) for v in kept))


def test_each_row_has_a_range_of_its_own(backend):
    """The last two are not ranges of ids."""
    ranges = torch.tensor([[[0, 5], [1, 4], [3, 4], [2, 2], [0, 6]]], device=DEVICE)
    logits = torch.tensor(logs(8, 4, 2, 1, 1), device=DEVICE).repeat(1, 5, 1)
    logits[0, 1, 0] = logits[0, 2, 2] = NAN  # outside: not looked at
    probs, status = guided_probs(logits, None, 1.0, 1.0, 2, 1.0, id_range=ranges, backend=backend)
    assert status.tolist() == [[0, 0, 0, INVALID_ROW, INVALID_ROW]]
    expected = [[8, 4, 0, 0, 0], [0, 4, 2, 0, 0], [0, 0, 0, 1, 0]]
    assert probs[0, :3].tolist() == [close([x / sum(row) for x in row]) for row in expected]
    assert not probs[0, 3:].any()
    for n, pair in enumerate([(0, 5), (1, 4), (3, 4)]):
        alone = guided_probs(logits[:, n:n + 1], None, 1.0, 1.0, 2, 1.0, id_range=pair, backend=backend)
        assert torch.equal(alone.probs[0, 0], probs[0, n])


def test_exp_is_right_to_rounding(backend):
    logits = torch.linspace(-60, 0, 2001, device=DEVICE).view(1, 1, -1)
    one, off = torch.ones(1, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    probs, _ = guided_probs(logits, None, one, one, off, one, backend=backend)
    expected = logits.double().softmax(-1)
    torch.testing.assert_close(probs.double(), expected, rtol=4e-7, atol=0)


def test_a_near_tie_of_top_p_is_decided_alike(backend):
    """The best token holds 0.5 up to the rounding of exp, and the n others hold the rest. They stay if it is less."""
    def num_kept(n, backend):
        probs, _ = one_row(logs(n, *n * [1]), top_p=0.5, backend=backend)
        return sum(x > 0 for x in probs)

    kept = {n: num_kept(n, backend) for n in range(2, 30)}
    assert kept == {n: num_kept(n, "oracle") for n in kept}
    assert {kept[n] == 1 for n in kept} == {True, False}  # rounding goes both ways
    assert all(kept[n] in (1, n + 1) for n in kept)


@pytest.mark.parametrize("units, num_kept", [(65536, 1), (65537, 2)])
def test_top_p_counts_exactly(backend, units, num_kept):
    """In units of 2**-40 the best token has mass 2**40, and top_p of all 2**40 - 0.004 or 2**40 + 0.996. Taken in
    float32 or rounded to whole units any other way, one of them is on the wrong side of 2**40."""
    probs, _ = one_row([0.0, math.log(units + 0.5) - 40 * math.log(2)], top_p=1 - 2**-24, backend=backend)
    assert sum(p > 0 for p in probs) == num_kept


@pytest.mark.parametrize("V", [70, 300])
def test_top_k_in_rows_of_any_length(backend, V):
    """Integers, whose low bits are zero: the kernels' digits of the threshold are the lowest or highest ones."""
    logits = [float(v % 32 - 16) for v in range(V)]
    for k in range(3, V, V // 16):
        probs, _ = one_row(logits, top_k=k, backend=backend)
        assert [p > 0 for p in probs] == [x >= sorted(logits)[-k] for x in logits]


EMULATED = pytest.mark.skipif("cuda_emulated" not in backends("guided_probs", DEVICE), reason="needs a C++ compiler")


def on_gpu(patch, capability=9, multiprocessors=132, shared=227 * 1024):
    """The emulated GPU."""
    patch.setenv("CUDA_ON_CPU_CAPABILITY", str(capability))
    patch.setenv("CUDA_ON_CPU_SMS", str(multiprocessors))
    patch.setenv("CUDA_ON_CPU_SHARED", str(shared))


def emulated_is_oracle(*args, **kwargs):
    for got, expected in zip(guided_probs(*args, backend="cuda_emulated", **kwargs),
                             guided_probs(*args, backend="oracle", **kwargs)):
        assert torch.equal(got, expected)


@EMULATED
@pytest.mark.parametrize("gpu", [
    {}, {"multiprocessors": 8}, {"multiprocessors": 1}, {"capability": 8}], ids=["8", "4", "1", "capability 8"])
@pytest.mark.parametrize("V", [33, 1000, 4096, 4101, 8192, 8200, 16384])
def test_rows_in_teams_of_any_size(gpu, V, monkeypatch):
    """In clusters of up to that many blocks; with logits that hardly tie and with some that often do."""
    on_gpu(monkeypatch, **gpu)
    dtype = torch.bfloat16 if V % 3 else torch.float32
    pair = torch.randn(2, 2, 1, V, generator=torch.Generator().manual_seed(V)).mul(3)
    pair[:, 1] = pair[:, 1].round()
    for filters in ("k_then_p", "p_then_k"):
        emulated_is_oracle(*pair.to(dtype), 2.3, 0.7, V // 8, 0.9, filters=filters)
    emulated_is_oracle(pair[0].to(dtype), None, 1.0, 1.0, V - V // 4, 1.0, id_range=(V // 5, V - 3))


@EMULATED
@pytest.mark.parametrize("V, gpu", [
    (16390, {"capability": 8}), (16390, {"capability": 8, "shared": 26_000}), (66_000, {"shared": 80_000})])
def test_rows_that_no_team_holds(V, gpu, monkeypatch):
    """They stay in shared memory, or are read again where that is small."""
    on_gpu(monkeypatch, **gpu)
    pair = torch.randn(2, 1, 1, V, generator=torch.Generator().manual_seed(V)).mul(3)
    emulated_is_oracle(*pair.bfloat16(), 2.3, 0.7, V // 8, 0.9)


@EMULATED
@pytest.mark.parametrize("gpu", [{}, {"capability": 8}], ids=["clusters", "capability 8"])
@pytest.mark.parametrize("k", [40, 300, 700, 990])
def test_masked_and_far_logits(gpu, k, monkeypatch):
    """A row's best 500 ids, then 3 far below, 200 masked by the lowest float, and the rest by -inf; and all but one
    masked. The k-th largest is one of each kind."""
    on_gpu(monkeypatch, **gpu)
    g = torch.Generator().manual_seed(k)
    logits = torch.full((3, 1, 1000), -INF)
    logits[0, 0, :500] = torch.randn(500, generator=g)
    logits[0, 0, 500:503] = torch.tensor([-1e30, -1e20, -2e20])
    logits[0, 0, 503:703] = torch.finfo(torch.float32).min
    logits[1, 0, 7] = 3.0
    logits[2, 0] = logits[0, 0]
    logits[2, 0, 501:] = -1e20
    logits = logits[..., torch.randperm(1000, generator=g)]
    for p in (1.0, 0.5, 1 - 2**-24):
        emulated_is_oracle(logits, None, 1.0, 1.0, k, p)
    emulated_is_oracle(logits, torch.zeros_like(logits), 1.5, 0.9, k, 0.9)


@EMULATED
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.3, 1.7, 3.0, 4e6, 1e30])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-29, 1.0, 1e4, 1e31])
def test_every_logit_is_divided_exactly(temperature, scale):
    """By its product with the inverse only where that can be corrected. Rounded otherwise, some of the 64 nearest
    floats would tie or not."""
    near = torch.tensor(scale).view(torch.int32) - torch.arange(64, dtype=torch.int32)
    logits = torch.cat([near.view(torch.float32), -near.view(torch.float32), torch.zeros(2)]).view(1, 1, -1)
    for k in range(1, 66, 4):
        emulated_is_oracle(logits, None, 1.0, temperature, k, 1.0)
