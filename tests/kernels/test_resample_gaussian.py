"""resample_gaussian on numbers small enough to check by hand."""
import math

import pytest
import torch

from specvis_kernels import INVALID_ROW, INVALID_RULE, OUT_OF_TRIES, accept_gaussian, resample_gaussian
from tests import cases
from tests.cases import DEVICE
from tests.cases.comparing import same

NAN, INF = float("nan"), float("inf")
DRAFT, FALLBACK = 9.0, 8.0
BELOW_ONE = 1 - 2.0**-24


def tensor(values, *shape):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE).view(shape)


def one(backend, normals, uniforms, S=0.0, is_accepted=False, is_rejected=True, draft=DRAFT, fallback=FALLBACK,
        target=(0.0, 0.0), other=(2.0, 0.0), **options):
    """One position of one channel: target N(0, 1), draft N(2, 1), so a try x has log r = S + 2 - 2 x."""
    M = len(normals)
    path = options.get("variant") == "path"
    last_step = [None] * 4 if path else [tensor([part], 1, 1, 1) for part in (*target, *other)]
    if "temperature" in options:
        options["temperature"] = tensor([options["temperature"]], 1)
    token, num_tries, status = resample_gaussian(
        tensor([draft], 1, 1, 1), *torch.tensor([[[is_accepted]], [[is_rejected]]], device=DEVICE),
        tensor(normals, 1, 1, M, 1), tensor(S, 1, 1, M) if path else tensor([S], 1, 1),
        tensor(uniforms, 1, 1, M), tensor([fallback], 1, 1, 1), *last_step, backend=backend, **options)
    return token.item(), num_tries.item(), status.item()


@pytest.mark.parametrize("normals, uniforms, S, options, expected", [
    ([0.5], [0.632], 0.0, {}, (0.5, 1, 0)),                        # log r = 1, 1 - 1/e = 0.63212
    ([0.5], [0.633], 0.0, {}, (FALLBACK, 1, OUT_OF_TRIES)),
    ([1.0], [0.0], 0.0, {}, (FALLBACK, 1, OUT_OF_TRIES)),          # log r = 0: never
    ([2.0], [0.0], 0.0, {}, (FALLBACK, 1, OUT_OF_TRIES)),          # log r = -2: never
    ([1.25], [-1.0], 0.0, {}, (FALLBACK, 1, OUT_OF_TRIES)),        # not for a uniform out of range either
    ([1.0], [0.632], 1.0, {}, (1.0, 1, 0)),                        # S = 1
    ([0.0], [0.632], 1.0, {"variant": "released"}, (0.0, 1, 0)),   # 2 - S
    ([0.0], [0.633], 1.0, {"variant": "released"}, (FALLBACK, 1, OUT_OF_TRIES)),
    ([0.0], [0.393], 0.0, {"temperature": 2.0}, (0.0, 1, 0)),      # 2 / 4, 1 - exp(-1/2) = 0.39347
    ([0.0], [0.394], 0.0, {"temperature": 2.0}, (FALLBACK, 1, OUT_OF_TRIES)),
    ([1.0, 2.0, 0.5, 0.0], [0.0, 0.0, 0.7, 0.5], 0.0, {}, (0.0, 4, 0)),   # the first that is accepted
    ([1.0, 2.0, 0.5, 0.0], [0.0, 0.0, 0.6, 0.5], 0.0, {}, (0.5, 3, 0)),
    ([-60.0], [BELOW_ONE], 0.0, {}, (-60.0, 1, 0)),
    ([3.0, 4.0, 5.0], [0.0, 0.64, 0.63], [0.0, 1.0, 1.0], {"variant": "path"}, (5.0, 3, 0)),
    ([3.0, 4.0, 5.0], [0.0, 0.6, 0.6], [-1.0, 1.0, 1.0], {"variant": "path"}, (4.0, 2, 0)),
    ([3.0, 4.0], [0.9, 0.9], [1.0, 1.0], {"variant": "path"}, (FALLBACK, 2, OUT_OF_TRIES)),
])
def test_tries_by_hand(backend, normals, uniforms, S, options, expected):
    assert one(backend, normals, uniforms, S, **options) == expected


def test_a_try_is_the_targets_last_step(backend):
    """mean + sigma * normal: 3 + 0.5 * 2 = 4."""
    token, num_tries, status = one(backend, [2.0], [0.0], target=(3.0, math.log(0.5)), other=(30.0, 0.0))
    assert token == pytest.approx(4.0, abs=1e-6) and (num_tries, status) == (1, 0)


def test_what_is_neither_accepted_nor_rejected_is_zero(backend):
    assert one(backend, [0.0], [0.0], is_accepted=True, is_rejected=False) == (DRAFT, 0, 0)
    assert one(backend, [0.0], [0.0], is_accepted=False, is_rejected=False) == (0.0, 0, 0)
    assert one(backend, [0.0], [0.0], is_accepted=True, is_rejected=True) == (0.0, 1, 0)


def test_any_try_may_be_the_first(backend):
    """More tries than a program of Triton looks at together."""
    M = 35
    for first in range(M + 1):
        normals = [1.0] * first + [0.25] + [0.5] * M
        expected = (0.25, first + 1, 0) if first < M else (FALLBACK, M, OUT_OF_TRIES)
        assert one(backend, normals[:M], [0.0] * M) == expected


def test_identical_models_leave_nothing_to_resample(backend):
    """accept_gaussian rejects nothing here; a rejected position gets the fallback."""
    M = 20
    normals = torch.randn(M, generator=torch.Generator().manual_seed(0)).tolist()
    assert one(backend, normals, [0.0] * M, other=(0.0, 0.0)) == (FALLBACK, M, OUT_OF_TRIES)


def test_disjoint_supports_accept_the_first_try(backend):
    for sigma in (1e-4, 1.0, 1e3):
        options = dict(target=(0.0, math.log(sigma)), other=(1e7 * sigma, math.log(sigma)))
        token, num_tries, status = one(backend, [1.0, 2.0], [BELOW_ONE, 0.0], **options)
        assert token == pytest.approx(sigma) and (num_tries, status) == (1, 0)


def test_sigmas_a_thousand_times_apart(backend):
    """A wide target over a narrow draft: only what falls under the draft's peak is rejected. And the reverse."""
    wide, narrow = (0.0, 0.0), (0.0, math.log(1e-3))
    # log r = -log(1000) + 8 = 1.092 at four sigmas of the draft, below 0 at three and a half
    assert one(backend, [0.001, 0.0035, 0.004], [0.0, 0.0, 0.66], target=wide, other=narrow)[1:] == (3, 0)
    log_r = math.log(1e3) - 0.5  # a narrow target one sigma from its mean; the draft there is at its peak
    for nudge, num_tries in ((-1e-6, 1), (1e-6, 2)):
        assert one(backend, [1.0, 0.0], [1 - math.exp(-log_r) + nudge, 0.0], target=narrow, other=wide)[1] == num_tries


def test_bad_numbers(backend):
    """Only what is looked at counts; the token is 0 and never NaN."""
    zero = (0.0, 1, INVALID_ROW)
    for bad in (NAN, INF, -INF):
        assert one(backend, [bad, 0.0], [0.0, 0.0]) == zero
        assert one(backend, [0.0, 0.0], [bad, 0.0]) == zero
        assert one(backend, [1.0, bad], [0.0, 0.0]) == (0.0, 2, INVALID_ROW)
        assert one(backend, [0.0, bad], [0.0, 0.0]) == (0.0, 1, 0)
        assert one(backend, [0.0], [0.0], S=bad) == zero
        for i in range(2):
            parts = [0.0, 0.0]
            parts[i] = bad
            assert one(backend, [0.0], [0.0], target=parts) == zero
            assert one(backend, [0.0], [0.0], other=parts) == zero
            assert one(backend, [0.0], [0.0], target=parts, is_accepted=True, is_rejected=False) == (DRAFT, 0, 0)
        assert one(backend, [0.0], [0.0], fallback=bad) == (0.0, 1, 0)
        assert one(backend, [1.0], [0.0], fallback=bad) == (0.0, 1, OUT_OF_TRIES | INVALID_ROW)
        assert one(backend, [0.5], [0.0], draft=bad) == (0.5, 1, 0)
        assert one(backend, [0.5], [0.0], draft=bad, is_accepted=True, is_rejected=False) == (0.0, 0, INVALID_ROW)
        assert one(backend, [0.5], [0.0], draft=bad, is_accepted=False, is_rejected=False) == (0.0, 0, 0)
        assert one(backend, [bad, 1.0], [0.0, 0.0], [1.0, 1.0], variant="path") == zero
        assert one(backend, [bad, 1.0], [0.0, 0.0], [-1.0, 1.0], variant="path") == zero
        assert one(backend, [1.0, 1.0], [0.0, 0.0], [bad, 1.0], variant="path") == zero
        assert one(backend, [1.0, bad], [0.0, 0.0], [1.0, bad], variant="path") == (1.0, 1, 0)
    assert one(backend, [1.0], [0.0], target=(0.0, 400.0)) == zero  # sigma overflows


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_an_undefined_temperature_resamples_nothing(backend, temperature):
    assert one(backend, [0.0], [0.0], temperature=temperature) == (0.0, 0, INVALID_RULE)
    assert one(backend, [0.0], [0.0], temperature=temperature, is_accepted=True, is_rejected=False) == (DRAFT, 0, 0)


def test_tests_a_try_as_accept_gaussian_tests_a_draft(backend):
    """An accepted try with uniform u, and no other, has u < 1 - exp(-log_r) for accept_gaussian's log_r of it."""
    B, G, C, M = (12, 3, 18, 5) if backend == "triton" else (300, 3, 18, 5)
    args, _ = cases.resample_gaussian(B, G, C, M)
    tokens, is_accepted, is_rejected, normals, S, uniforms, fallback, *last_step = args
    new_tokens, num_tries, status = resample_gaussian(*args, backend=backend)
    rejected_tries = 0
    for m in range(M):
        x, *_ = resample_gaussian(tokens, is_accepted, is_rejected, normals[:, :, m:m + 1], torch.full_like(S, 1e6),
                                  uniforms[:, :, m:m + 1] * 0, fallback, *last_step, backend=backend)
        log_r = accept_gaussian(x, S, uniforms[..., m].contiguous(), *last_step, backend=backend).log_r
        accepted = uniforms[..., m] < -torch.expm1(-log_r.double())
        mine = is_rejected & (num_tries == m + 1) & (status == 0)
        assert accepted[mine].all() and same(new_tokens[mine], x[mine])
        assert not accepted[is_rejected & (num_tries > m + 1)].any()
        rejected_tries += (is_rejected & (num_tries > m + 1)).sum()
    assert rejected_tries > 0 and (is_rejected & (status == 0)).any() and (status == OUT_OF_TRIES).any()


def test_one_position_of_each_request_may_be_gathered(backend):
    args, _ = cases.resample_gaussian(4, 3, 18, 5)
    which = torch.tensor([2, 0, 1, 2], device=DEVICE)
    part = [a[torch.arange(4), which].unsqueeze(1) for a in args]
    for got, expected in zip(resample_gaussian(*part, backend=backend), resample_gaussian(*args, backend=backend)):
        assert same(got[:, 0], expected[torch.arange(4), which])
