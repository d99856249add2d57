"""The tokens of accept_gaussian and resample_gaussian together are distributed as the target where the rule is exact.

By Kolmogorov-Smirnov against the target's closed form at 10^6 samples: a single denoising step, and paths of
several. Rules that are wrong must fail: the release's sign, the paper's aligned paths over several steps.
"""
import math

import pytest
import torch

from specvis_kernels import OUT_OF_TRIES, accept_gaussian, backends, resample_gaussian
from tests.cases import DEVICE

BACKEND = "cpu" if "cpu" in backends("accept_gaussian", DEVICE) else backends("accept_gaussian", DEVICE)[0]
SAMPLES, ACCEPT_ABOVE, REJECT_BELOW = 10**6, 1e-4, 1e-30


def distance(samples, mean=0.0, sigma=1.0):
    """The largest gap between the samples' distribution function and N(mean, sigma)'s."""
    z = (samples.double().sort().values - mean) / sigma
    at = torch.special.ndtr(z)
    steps = torch.arange(len(z) + 1, dtype=torch.float64) / len(z)
    return torch.maximum((steps[1:] - at).max(), (at - steps[:-1]).max()).item()


def p_value(samples, mean=0.0, sigma=1.0):
    """Kolmogorov's, for many samples."""
    x = distance(samples, mean, sigma)**2 * len(samples)
    return min(1.0, 2 * sum((-1)**(k - 1) * math.exp(-2 * k * k * x) for k in range(1, 101)))


def test_the_test_knows_a_normal_distribution():
    z = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert p_value(z) > ACCEPT_ABOVE
    assert p_value(z + 0.02) < REJECT_BELOW and p_value(z * 1.04) < REJECT_BELOW


def rows(values, n):
    return torch.tensor(values, dtype=torch.float32).expand(n, 1, len(values))


def call(op, *args, **kwargs):
    out = op(*[None if a is None else a.to(DEVICE) for a in args], **kwargs, backend=BACKEND)
    return out._make(a.cpu() for a in out)


def one_step(target, draft, g, n=SAMPLES, M=64, S=0.0, still=0, **options):
    """Samples (n, C) of one denoising step and the acceptance rate of its drafts; target, draft: (means, sigmas). The
    last `still` channels do not move: neither the draft's noise nor the new tokens'."""
    (mp, sp), (mq, sq) = target, draft
    C = len(mp)
    moves = (torch.arange(C) < C - still).float()
    last_step = [rows(part, n) for part in (mp, [math.log(s) for s in sp], mq, [math.log(s) for s in sq])]
    x = last_step[2] + last_step[3].exp() * torch.randn(n, 1, C, generator=g) * moves
    S = torch.full((n, 1), S)
    uniforms = torch.rand(n, 1, generator=g)
    num_accepted, is_accepted, is_rejected, _, status = call(accept_gaussian, x, S, uniforms, *last_step, **options)
    assert not status.any()
    again = is_rejected[:, 0]
    n_again = again.sum()
    normals = torch.randn(n_again, 1, M, C, generator=g) * moves
    fallback = last_step[0][again] + last_step[1][again].exp() * torch.randn(n_again, 1, C, generator=g) * moves
    x[again], _, status = call(
        resample_gaussian, x[again], is_accepted[again], is_rejected[again], normals, S[again],
        torch.rand(n_again, 1, M, generator=g), fallback, *[part[again] for part in last_step], **options)
    assert not (status & ~OUT_OF_TRIES).any()
    return x[:, 0], num_accepted.double().mean().item()


@pytest.mark.parametrize("target, draft", [
    ((0.0, 1.0), (0.0, 1.0)),
    ((0.0, 1.0), (1.0, 1.0)),
    ((2.0, 1.0), (2.0, 2.0)),      # a wider draft
    ((-1.0, 0.006), (-1.0, 0.003)),  # a narrower one, as narrow as MAR's last step
    ((0.3, 0.01), (0.31, 0.015)),
    ((0.0, 1.0), (6.0, 1.0)),      # hardly anything in common
])
def test_one_step_is_the_target(target, draft):
    g = torch.Generator().manual_seed(1)
    (mp, sp), (mq, sq) = target, draft
    x, acceptance = one_step(*((([m], [s])) for m, s in (target, draft)), g)
    assert p_value(x[:, 0], mp, sp) > ACCEPT_ABOVE
    if sp == sq:
        overlap = math.erfc(abs(mp - mq) / sp / 2 / math.sqrt(2))  # 1 - TV
        assert acceptance == pytest.approx(overlap, abs=5 * math.sqrt(0.25 / SAMPLES))
    if target != draft and acceptance > 0.1:  # the draft itself is not
        z = mq + sq * torch.randn(SAMPLES, generator=g)
        assert p_value(z, mp, sp) < REJECT_BELOW


def test_one_step_in_three_dimensions():
    g = torch.Generator().manual_seed(2)
    mp, sp = [0.0, 1.0, -2.0], [1.0, 0.5, 0.1]
    mq, sq = [0.3, 0.9, -2.02], [1.2, 0.5, 0.08]
    x, _ = one_step((mp, sp), (mq, sq), g)
    for direction in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 2, 10], [1, -2, 10]):
        mean = sum(a * m for a, m in zip(direction, mp))
        sigma = math.sqrt(sum((a * s)**2 for a, s in zip(direction, sp)))
        assert p_value(x @ torch.tensor(direction, dtype=x.dtype), mean, sigma) > ACCEPT_ABOVE
    assert (x - torch.tensor(mp)).T.corrcoef().sub(torch.eye(3)).abs().max() < 5 / math.sqrt(SAMPLES)


@pytest.mark.parametrize("variant, exact", [("paper", True), ("released", False)])
def test_the_sign_of_the_earlier_steps(variant, exact):
    """A second channel does not move: its earlier steps' sigmas subtract from log r what its last step's add. With the
    paper's sign one exact step of the first channel remains; with the release's sign it is off by twice S."""
    g = torch.Generator().manual_seed(3)
    x, _ = one_step(([0.0, 0.0], [1.0, 1.0]), ([0.5, 0.0], [1.0, 1.5]), g, S=-math.log(1.5), still=1, variant=variant)
    if exact:
        assert p_value(x[:, 0]) > ACCEPT_ABOVE
    else:
        assert p_value(x[:, 0]) < REJECT_BELOW


@pytest.mark.parametrize("M", [1, 2, 5])
def test_too_few_tries_cost_no_more_than_the_bound(M):
    """1 / (e (M + 1)) in total variation, and so in this distance, which is less."""
    g = torch.Generator().manual_seed(4)
    apart = 2 * 2**0.5 * torch.erfinv(torch.tensor(1 / (M + 2))).item()  # TV 1 / (M + 2), where it costs most
    x, _ = one_step(([0.0], [1.0]), ([apart], [1.0]), g, M=M)
    assert p_value(x[:, 0]) < REJECT_BELOW
    assert distance(x[:, 0]) < 1 / (math.e * (M + 1))


class Chain:
    """x_3 ~ N(0, 1), x_t = slope * x_(t + 1) + shift + sigma * noise down to x_1, token = 1.5 x_1: all in float64."""

    def __init__(self, slope, shift, sigmas):
        self.slope, self.shift, self.sigmas = slope, shift, sigmas

    def path(self, start, noise):
        path = [start]
        for i, sigma in enumerate(self.sigmas):
            path.append(self.slope * path[-1] + self.shift + sigma * noise[..., i])
        return path

    def log_density(self, path):
        return sum(-0.5 * ((b - self.slope * a - self.shift) / sigma)**2 - math.log(sigma)
                   for a, b, sigma in zip(path, path[1:], self.sigmas))

    def moments(self):
        mean, variance = 0.0, 1.0
        for sigma in self.sigmas:
            mean, variance = self.slope * mean + self.shift, self.slope**2 * variance + sigma**2
        return 1.5 * mean, 1.5 * math.sqrt(variance)


P, Q = Chain(0.7, 0.2, [0.5, 0.3]), Chain(0.65, 0.25, [0.55, 0.33])


@pytest.mark.parametrize("sign, exact", [(1, True), (-1, False)])
def test_paths_of_several_steps_are_the_targets(sign, exact):
    """With the opposite sign of the path's log ratio they are not."""
    g, n, M = torch.Generator().manual_seed(5), SAMPLES, 32

    def draw(chain, *shape):
        path = chain.path(*(torch.randn(*shape, *more, generator=g, dtype=torch.float64) for more in ((), (2,))))
        return 1.5 * path[-1].float().unsqueeze(-1), sign * (P.log_density(path) - Q.log_density(path)).float()

    x, S = draw(Q, n, 1)
    _, is_accepted, is_rejected, _, status = call(
        accept_gaussian, x, S, torch.rand(n, 1, generator=g), None, None, None, None, variant="path")
    again = is_rejected[:, 0]
    n_again = again.sum()
    proposals, ratios = draw(P, n_again, 1, M)
    x[again], _, late = call(
        resample_gaussian, x[again], is_accepted[again], is_rejected[again], proposals, ratios,
        torch.rand(n_again, 1, M, generator=g), draw(P, n_again, 1)[0], None, None, None, None, variant="path")
    assert not status.any() and not (late & ~OUT_OF_TRIES).any()
    p = p_value(x[:, 0, 0], *P.moments())
    assert p > ACCEPT_ABOVE if exact else p < REJECT_BELOW


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_aligned_paths_of_several_steps_are_not(variant):
    """Each model on its own path with equal noise, the last step drawn anew: the paper's rule is not exact."""
    g, n, M = torch.Generator().manual_seed(6), SAMPLES, 64
    start, noise = (torch.randn(n, *more, generator=g, dtype=torch.float64) for more in ((), (2,)))
    before = [chain.path(start, noise)[-2] for chain in (P, Q)]
    last_step = []
    for chain, above in zip((P, Q), before):  # the last step that is drawn, as a token
        mean = (chain.slope * above + chain.shift).float().view(n, 1, 1)
        last_step += [mean, torch.full_like(mean, math.log(chain.sigmas[-1]))]
    x = Q.path(start, noise)[-1].float().view(n, 1, 1)
    S = torch.full((n, 1), math.log(Q.sigmas[0] / P.sigmas[0]))
    uniforms, try_uniforms = torch.rand(n, 1, generator=g), torch.rand(n, 1, M, generator=g)
    normals = torch.randn(n, 1, M, 1, generator=g)
    fallback = P.path(start, noise)[-1].float().view(n, 1, 1)
    _, is_accepted, is_rejected, _, _ = call(accept_gaussian, x, S, uniforms, *last_step, variant=variant)
    x, _, status = call(resample_gaussian, x, is_accepted, is_rejected, normals, S, try_uniforms, fallback, *last_step,
                        variant=variant)
    assert not (status & ~OUT_OF_TRIES).any()
    mean, sigma = P.moments()
    assert p_value(fallback[:, 0, 0], mean / 1.5, sigma / 1.5) > ACCEPT_ABOVE
    assert p_value(x[:, 0, 0], mean / 1.5, sigma / 1.5) < REJECT_BELOW
