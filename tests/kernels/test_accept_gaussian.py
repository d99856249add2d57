"""accept_gaussian on numbers small enough to check by hand."""
import itertools
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, INVALID_RULE, accept_gaussian
from specvis_kernels._gaussian import exp
from tests import cases
from tests.cases import DEVICE
from tests.cases.comparing import same

NAN, INF = float("nan"), float("inf")
BELOW_ONE = 1 - 2.0**-24


def tensor(values, *shape):
    values = torch.as_tensor(values, dtype=torch.float32, device=DEVICE)
    return values.view(shape) if shape else values


def accept(backend, x, target, draft, S=0.0, uniforms=(0.5,), **options):
    """One draft with channels x under (means, log sigmas) of both models, for every uniform a request."""
    B, C = len(uniforms), len(x)
    last_step = [tensor(part, 1, 1, C).repeat(B, 1, 1) for part in (*target, *draft)] if target else [None] * 4
    if "temperature" in options:
        options["temperature"] = tensor([options["temperature"]]).repeat(B)
    return accept_gaussian(tensor(x, 1, 1, C).repeat(B, 1, 1), tensor([[S]]).repeat(B, 1), tensor(uniforms, B, 1),
                           *last_step, backend=backend, **options)


ONE, OTHER = ([1.0], [0.0]), ([0.0], [0.0])  # means and log sigmas


@pytest.mark.parametrize("x, target, draft, S, options, log_r", [
    ([1.0], ONE, OTHER, 0.0, {}, 0.5),                            # d_P = 0, d_Q = 1
    ([0.0], ONE, OTHER, 0.0, {}, -0.5),
    ([0.5], ONE, OTHER, 0.0, {}, 0.0),
    ([3.0], ONE, OTHER, 0.0, {}, 2.5),                            # (9 - 4) / 2
    ([1.0], ONE, OTHER, 0.25, {}, 0.75),
    ([1.0], ONE, OTHER, 0.25, {"variant": "released"}, 0.25),     # the sign of S
    ([1.0], ONE, OTHER, 0.0, {"temperature": 2.0}, 0.125),        # distances by 2
    ([1.0], ONE, OTHER, 1.0, {"variant": "released", "temperature": 0.5}, 1.0),
    ([1.0], ([1.0], [0.0]), ([1.0], [2.0]), 0.0, {}, 2.0),        # log sigma_Q - log sigma_P
    ([1.0], ([1.0], [2.0]), ([1.0], [0.0]), 0.0, {"temperature": 42.0}, -2.0),
    ([1.0, 2.0, 4.0], ([1.0, 0.0, 4.0], [0.0] * 3), ([0.0, 1.0, 2.0], [0.0] * 3), 0.0, {}, 1.0),  # (1 - 3 + 4) / 2
    ([7.0, 8.0], None, None, -1.25, {"variant": "path"}, -1.25),  # S, whatever the token
])
def test_log_ratios_by_hand(backend, x, target, draft, S, options, log_r):
    r = torch.tensor(math.exp(log_r))
    uniforms = [0.0, torch.nextafter(r, r * 0).item(), torch.nextafter(r, r * 2).item()]
    num_accepted, is_accepted, is_rejected, got, status = accept(backend, x, target, draft, S, uniforms, **options)
    assert got.flatten().tolist() == 3 * [log_r] and not status.any()
    assert is_accepted.flatten().tolist() == [u < math.exp(log_r) for u in uniforms] == [True, True, False]
    assert is_rejected.equal(~is_accepted) and num_accepted.tolist() == [1, 1, 0]


def test_what_is_accepted_by_enumeration(backend):
    """Every pattern of three decisions, every number of drafts."""
    G = 3
    patterns = list(itertools.product([True, False], repeat=G))
    tries = list(itertools.product(patterns, [-3, 0, 1, 2, 3, 9]))
    S = tensor([[0.0 if yes else -2.0 for yes in pattern] for pattern, _ in tries])
    num_drafted = torch.tensor([n for _, n in tries], dtype=torch.int32, device=DEVICE)
    tokens, uniforms = torch.zeros(len(tries), G, 1, device=DEVICE), torch.full_like(S, 0.5)
    for truncate in (True, False):
        num_accepted, is_accepted, is_rejected, log_r, status = accept_gaussian(
            tokens, S, uniforms, variant="path", num_drafted=num_drafted, truncate=truncate, backend=backend)
        for b, (pattern, n) in enumerate(tries):
            n = min(max(n, 0), G)
            first = next((g for g in range(n) if not pattern[g]), n)
            end = first + 1 if truncate else n
            assert is_accepted[b].tolist() == [g < end and g < n and pattern[g] for g in range(G)]
            assert is_rejected[b].tolist() == [g < end and g < n and not pattern[g] for g in range(G)]
            assert num_accepted[b] == is_accepted[b].sum() and (not truncate or num_accepted[b] == first)
            assert log_r[b].tolist() == [S[b, g] if g < n else 0.0 for g in range(G)]
        assert not status.any()


def test_without_a_count_all_are_drafts(backend):
    args, kwargs = cases.accept_gaussian(3, 5, 2)
    every = torch.full((3,), 5, dtype=torch.int32, device=DEVICE)
    for a, b in zip(accept_gaussian(*args, **kwargs, backend=backend),
                    accept_gaussian(*args, **kwargs, num_drafted=every, backend=backend)):
        assert same(a, b)


@pytest.mark.parametrize("temperature", [1.0, 42.0])
def test_identical_models_reject_nothing(backend, temperature):
    g = torch.Generator().manual_seed(0)
    uniforms = [0.0, 2.0**-24, 0.5, 0.999, BELOW_ONE]
    for sigma in (1e-4, 0.006, 1.0, 1e3):
        part = (torch.randn(16, generator=g).tolist(), [math.log(sigma)] * 16)
        x = (torch.randn(16, generator=g) * 3).tolist()
        _, is_accepted, is_rejected, log_r, _ = accept(backend, x, part, part, 0.0, uniforms, temperature=temperature)
        assert is_accepted.all() and not is_rejected.any() and not log_r.any()


def test_disjoint_supports_reject_everything(backend):
    sigma = [math.log(1e-4)] * 16
    target, draft = ([0.0] * 16, sigma), ([1000.0] * 16, sigma)
    for x, yes in ((draft[0], False), (target[0], True)):
        _, is_accepted, _, log_r, status = accept(backend, x, target, draft, 0.0, [0.0, 2.0**-24, BELOW_ONE])
        assert log_r.isfinite().all() and not status.any() and (is_accepted == yes).all()
        assert log_r[0, 0].item() == pytest.approx((8e14 if yes else -8e14), rel=1e-5)  # 16 * 1e7^2 / 2


@pytest.mark.parametrize("wide", ["target", "draft"])
def test_sigmas_a_thousand_times_apart(backend, wide):
    narrow, broad = ([0.0] * 4, [math.log(1e-3)] * 4), ([0.0] * 4, [0.0] * 4)
    pair = (broad, narrow) if wide == "target" else (narrow, broad)
    sign = -1 if wide == "target" else 1
    for far in (0.0, 0.001, 0.0035, 0.1):
        expected = sign * 4 * (math.log(1e3) + (far**2 - (far * 1e3)**2) / 2)
        _, is_accepted, _, log_r, _ = accept(backend, [far] * 4, *pair, 0.0, [0.0, 0.5, BELOW_ONE])
        assert log_r[0, 0].item() == pytest.approx(expected, rel=1e-5)
        assert is_accepted.flatten().tolist() == [expected > -708, expected > math.log(0.5), expected >= 0]


def test_a_thousand_steps_at_their_extremes(backend):
    """16 channels, a thousand steps, sigmas 1e3 apart: the sum is 1e5, and nothing overflows."""
    S = 1000 * 16 * math.log(1e3)
    small = ([0.25] * 16, [math.log(1e-4)] * 16)
    for sign in (1, -1):
        _, is_accepted, _, log_r, status = accept(backend, [0.25] * 16, small, small, sign * S, [0.0, BELOW_ONE])
        assert log_r[0, 0].item() == pytest.approx(sign * S) and not status.any()
        assert is_accepted.flatten().tolist() == 2 * [sign > 0]


def test_a_uniform_of_zero(backend):
    """It accepts whatever has a probability in float64, and nothing else."""
    for S, yes in ((-100.0, True), (-707.9, True), (-708.1, False), (-1e30, False)):
        assert accept(backend, [0.0], None, None, S, [0.0], variant="path").is_accepted.item() is yes


def test_near_ties(backend):
    """Uniforms one float beside exp(log r): decided as float64 says."""
    g = torch.Generator().manual_seed(3)
    B = 30 if backend == "triton" else 2000
    S = -torch.rand(B, 1, generator=g) * 10
    r = S.double().exp()
    for direction in (0.0, 0.5, 2.0):
        uniforms = torch.nextafter(r.float(), r.float() * direction) if direction else r.float()
        result = accept_gaussian(torch.zeros(B, 1, 1).to(DEVICE), S.to(DEVICE), uniforms.to(DEVICE), variant="path",
                                 backend=backend)
        assert result.is_accepted.cpu().equal(uniforms.double() < r)


def test_exp_is_exp():
    x = torch.cat([torch.linspace(-707.9, 708.9, 100001), torch.linspace(-1, 1, 100001)]).double()
    assert ((exp(x) - x.exp()).abs() <= 5e-16 * x.exp()).all()
    assert exp(torch.tensor([0.0, -INF, -709.0, NAN], dtype=torch.float64)).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert exp(torch.tensor([INF, 1e300], dtype=torch.float64)).isfinite().all()


def test_is_the_ratio_of_densities(backend):
    args, _ = cases.accept_gaussian(4, 6, 21)
    tokens, S, _, *last_step = (a.double() for a in args)
    target, draft = (torch.distributions.Normal(mean, log_sigma.exp()) for mean, log_sigma in
                     (last_step[:2], last_step[2:]))
    expected = S + (target.log_prob(tokens) - draft.log_prob(tokens)).sum(-1)
    torch.testing.assert_close(accept_gaussian(*args, backend=backend).log_r.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("large", [(0, 16), (0, 8), (3, 7), (4, 6), (32, 1)])
def test_channels_are_added_in_one_order(backend, large):
    """2^60 and -2^60 leave the 1 of channel 2 alone where they meet before it: 16 lanes, added by halves."""
    log_sigmas = torch.zeros(33)
    log_sigmas[2] = 1.0
    log_sigmas[large[0]], log_sigmas[large[1]] = 2.0**60, -2.0**60
    still = [0.0] * 33
    log_r = accept(backend, still, (still, still), (still, log_sigmas.tolist())).log_r.item()
    assert log_r == (0.0 if large in ((4, 6), (32, 1)) else 1.0)


def test_the_same_bits_where_sums_cancel(backend):
    """log r is what rounding to float32 took from a distance: the 48 first bits of its exp must agree."""
    B = 20 if backend == "triton" else 3000
    g = torch.Generator().manual_seed(7)
    log_sigmas = (torch.randn(B, 1, 1, generator=g) * 2).to(DEVICE)
    x, none = torch.ones_like(log_sigmas), torch.zeros_like(log_sigmas)
    S = (exp(-log_sigmas.double())**2 / 2).float()[..., 0]
    args = x, S, S * 0, none, log_sigmas, x, log_sigmas
    got, expected = (accept_gaussian(*args, backend=name).log_r for name in (backend, "oracle"))
    assert same(got, expected) and 0 < expected.abs().max() and (expected.abs() <= 2.0**-24 * S).all()


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_number_ends_its_request_alone(backend, which, bad):
    """log sigma = -inf is a sigma of 0, NaN what the logarithm of a negative one is."""
    args, kwargs = cases.accept_gaussian(3, 4, 17)
    num_drafted = torch.tensor([4, 3, 4], dtype=torch.int32, device=DEVICE)
    clean = accept_gaussian(*args, **kwargs, num_drafted=num_drafted, backend=backend)
    broken = [a.clone() for a in args]
    broken[which][0, 2].fill_(NAN if which == 2 else bad)  # one position of the first request
    broken[which].view(3, 4, -1)[1, 3] = bad               # beyond the drafts of the second: not looked at
    if args[which].ndim == 3:
        broken[which][0, 2] = args[which][0, 2]
        broken[which][0, 2, 16] = bad                      # one channel of it
    got = accept_gaussian(*broken, **kwargs, num_drafted=num_drafted, backend=backend)
    assert got.status.tolist() == [INVALID_ROW, 0, 0] and not got.log_r.isnan().any()
    assert got.num_accepted[0] == 0 and not got.log_r[0].any()
    assert not got.is_accepted[0].any() and not got.is_rejected[0].any()
    for a, b in zip(got, clean):
        assert same(a[1:], b[1:])


def test_what_overflows_is_a_bad_number_too(backend):
    tiny = ([0.0], [-400.0])
    assert accept(backend, [1.0], tiny, OTHER).status.item() == INVALID_ROW
    assert accept(backend, [0.0], tiny, OTHER).status.item() == 0  # no distance: log r is 400


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_an_undefined_temperature_accepts_nothing(backend, temperature):
    result = accept(backend, [1.0], ONE, OTHER, temperature=temperature)
    assert result.status.item() == INVALID_RULE and not any(output.any() for output in result[:4])
    status = accept(backend, [NAN], ONE, OTHER, temperature=temperature).status
    assert status.item() == INVALID_RULE | INVALID_ROW
