"""Continuous tokens: CSpD's loop where the target's distribution is known, what it records, and what is refused.

A toy pair denoises Gaussians in three steps. Their mean depends on the known tokens. Images of the loop are compared
with images of the target alone, by the Kolmogorov-Smirnov test on each token, on sums, differences and products. Wrong
rules must fail the test.
"""
import math
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from specvis.decoding import continuous
from specvis.decoding.continuous import (
    ContinuousSampling,
    KnownTokens,
    continuous_decode,
    denoising_steps,
    mask_lengths,
    parallel_decode,
)
from specvis.decoding.methods import CONTINUOUS, method, parameters_of, parse_method
from specvis.decoding.sampling import (
    ACCEPT,
    FRESH,
    NOISE,
    ORDER,
    RESAMPLE,
    RESAMPLE_NOISE,
    UNALIGNED,
    Sampling,
    philox_normals,
)
from specvis.models.diffloss import cosine_alpha_bar
from specvis.models.mar import MAR, MARConfig
from specvis.models.words import UnknownWords
from specvis.pipelines.mar import MARPair
from specvis_kernels import philox_uniforms
from tests.tiny import TINY, tiny_pair, tiny_pipeline

PROMPTS = ["red heart", "blue heart", "plain red heart", "heart", "plain", "blue"]
SEEDS = torch.tensor([3, 1, 4, 1, 5, 9])
METHODS = ["cspd", "cspd:gamma=2:prefill=0.3:distance_temperature=20", "cspd:aligned=false", "cspd:truncate=false",
           "cspd-path", "cspd-path:gamma=7:prefill=0.5", "cspd-path:gamma=1:truncate=false",
           "cspd-path:conditioning=block", "cspd-released", "cspd-released:truncate=true"]
NUM_REQUESTS, ACCEPT_ABOVE, REFUSE_BELOW = 16384, 1e-4, 1e-8


class Perfect(nn.Module):
    """The output of a perfect network where tokens are N(z, sigma^2), with the same var_values everywhere."""

    def __init__(self, channels, sigma, var_values):
        super().__init__()
        self.sigma, self.var_values, self.alpha_bar = sigma, var_values, cosine_alpha_bar(1000).float()
        self.cond_embed = nn.Linear(channels, channels + 1, bias=False)      # the last is the time's
        self.cond_embed.weight.data = torch.eye(channels + 1, channels)

    def time_embed(self, timesteps):
        return timesteps[..., None] * self.cond_embed.weight.new_tensor([0.0] * self.cond_embed.in_features + [1.0])

    def forward(self, x, y):
        z, a = y[..., :-1], self.alpha_bar[y[..., -1:].nan_to_num().round().long()]
        epsilon = (1 - a).sqrt() * (x - a.sqrt() * z) / (a * self.sigma ** 2 + 1 - a)
        return torch.cat([epsilon, torch.full_like(epsilon, self.var_values)], -1)


class Toy(MAR):
    """z is the condition, plus `coupling` times the sum of the known tokens, plus a number for the position.

    `num_known` collects the number of known tokens of each row of each forward. A row of class 2 that knows `breaks`
    tokens or more gives NaN.
    """

    def __init__(self, sigma, shift=0.0, coupling=0.8, var_values=0.6, tokens=3, channels=1, breaks=math.inf):
        super().__init__(MARConfig(channels, 1, 0, 0, 1, 0, tokens=tokens, channels=channels, buffer=1, classes=3,
                                   num_sampling_steps=3))
        self.diffloss.net = Perfect(channels, sigma, var_values)
        self.class_emb.weight.data = torch.tensor([0.0, 1.0, 2.0])[:, None].repeat(1, channels)
        self.fake_latent.data.fill_(-0.5)
        self.shift, self.coupling, self.breaks, self.num_known = shift, coupling, breaks, []
        self.requires_grad_(False)

    def forward(self, tokens, is_known, condition, max_known=None, wanted=None):
        counts = is_known.sum(1)
        assert max_known is None or counts.max() <= max_known
        self.num_known.append(counts.tolist())
        z = condition + self.coupling * tokens.masked_fill(~is_known[..., None], 0.0).sum(1) + self.shift
        z = z.masked_fill(((counts >= self.breaks) & (condition[:, 0] == 2))[:, None], torch.nan)
        positions = torch.arange(self.config.tokens)[None] if wanted is None else wanted
        return z[:, None] + 0.2 * positions[..., None]


def toys(**settings):
    """Target and drafter."""
    return Toy(0.6, **settings), Toy(0.9, **{"shift": 0.7, "coupling": 0.5, "var_values": 0.7} | settings)


@pytest.fixture(scope="module")
def tiny():
    return tiny_pair()


def classes(num_requests):
    return torch.arange(num_requests) % 2


def z_of(model, source, tokens, is_known):
    return model(tokens, is_known, model.condition(source))


def in_order(decoded, field="tokens"):
    """What is at the position of the n-th token, for n = 0, 1, .."""
    values = getattr(decoded, field)
    return values.gather(1, decoded.order[..., None].expand_as(values))


def features(decoded):
    """(B, F): the n-th tokens, those at each position, and sums, differences and products of them."""
    x = in_order(decoded)
    parts = [x, decoded.tokens, x.diff(dim=1), x.cumsum(1), x[:, 1:] * x[:, :-1], x.cumsum(1)[:, :-1] * x[:, 1:]]
    parts += [x[..., :1] - x[..., 1:], x[..., :1] * x[..., 1:]]
    return torch.cat([part.flatten(1) for part in parts], 1).double()


def p_value(one, other):
    """Kolmogorov's two-sample test on each column (B, F): the smallest p times their number."""
    n, smallest = len(one), 1.0
    assert len(other) == n
    for a, b in zip(one.T.contiguous(), other.T.contiguous()):
        both = torch.cat([a, b]).sort().values
        gap = torch.searchsorted(a.sort().values, both, right=True) - torch.searchsorted(b.sort().values, both,
                                                                                         right=True)
        x = (gap.abs().max() / n).item() ** 2 * n / 2
        smallest = min(smallest, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x) for k in range(1, 101)))
    return min(1.0, smallest * one.shape[1])


REFERENCES = {}


def reference(channels=1, guidance=1.0, temperature=1.0):
    """Features of images that the target draws alone, with other seeds."""
    key = channels, guidance, temperature
    if key not in REFERENCES:
        sampling = ContinuousSampling(10 ** 6 + torch.arange(NUM_REQUESTS), guidance, temperature)
        REFERENCES[key] = features(parallel_decode(toys(channels=channels)[0], classes(NUM_REQUESTS), sampling))
    return REFERENCES[key]


def compare(m, channels=1, guidance=1.0, temperature=1.0):
    """The p-value of the method's images being the target's, and the images."""
    sampling = ContinuousSampling(torch.arange(NUM_REQUESTS), guidance, temperature)
    decoded = continuous_decode(*toys(channels=channels), classes(NUM_REQUESTS), sampling, parse_method(m))
    assert not decoded.failed.any()
    return p_value(features(decoded), reference(channels, guidance, temperature)), decoded


def test_the_test_knows_the_target_and_refuses_the_drafter():
    target, drafter = toys()
    sampling = ContinuousSampling(torch.arange(NUM_REQUESTS))
    assert p_value(features(parallel_decode(target, classes(NUM_REQUESTS), sampling)), reference()) > ACCEPT_ABOVE
    assert p_value(features(parallel_decode(drafter, classes(NUM_REQUESTS), sampling)), reference()) < REFUSE_BELOW
    independent = parallel_decode(target, classes(NUM_REQUESTS), sampling, num_iter=1)
    assert p_value(features(independent), reference()) < REFUSE_BELOW
    x = torch.randn(2, NUM_REQUESTS, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert p_value(*x) > ACCEPT_ABOVE and p_value(x[0], x[1] + 0.1) < REFUSE_BELOW


@pytest.mark.parametrize("m, settings", [
    ("cspd-path:gamma=1:truncate=false", {}), ("cspd-path:gamma=1:truncate=false", {"guidance": 2.0}),
    ("cspd-path:gamma=1", {}), ("cspd-path:gamma=2", {}), ("cspd-path:gamma=3", {}), ("cspd-path:gamma=4", {}),
    ("cspd-path:gamma=2:prefill=0.3", {}), ("cspd-path:gamma=2", {"channels": 2}),
    ("cspd-path:gamma=2", {"guidance": 2.0}), ("cspd-path:gamma=2", {"temperature": 0.7}),
], ids=str)
def test_paths_draw_the_targets_images(m, settings):
    p, decoded = compare(m, **settings)
    assert p > ACCEPT_ABOVE
    assert 0.3 < decoded.acceptance_rate < 0.95 and decoded.num_tries.max() > 8    # more than one turn of resampling
    assert decoded.out_of_tries.float().mean() < 1e-3


def test_every_turn_of_resampling_has_numbers_of_its_own(monkeypatch):
    monkeypatch.setattr(continuous, "NUM_FIRST_PATHS", 1)
    p, decoded = compare("cspd-path:gamma=2")
    assert p > ACCEPT_ABOVE
    for name in ("philox_normals", "philox_uniforms"):
        numbers = getattr(continuous, name)
        with monkeypatch.context() as patched:
            patched.setattr(continuous, name, lambda *args, stream, numbers=numbers, **_: numbers(*args, stream=stream))
            repeated = compare("cspd-path:gamma=2")[1]
        assert (repeated.tokens != decoded.tokens).any(2).float().mean() > 0.05


@pytest.mark.parametrize("m", ["cspd:distance_temperature=42", "cspd-released",
                               "cspd-path:conditioning=block", "cspd-path:gamma=3:truncate=false"])
def test_methods_that_are_not_exact_do_not(m):
    assert compare(m)[0] < REFUSE_BELOW


@pytest.mark.parametrize("wrong", ["sign", "first try", "the drafter's noise"])
def test_paths_accepted_or_resampled_wrongly_do_not(monkeypatch, wrong):
    accept, resample = continuous.accept_gaussian, continuous.resample_gaussian

    def negated(op, i):
        return lambda *args, **options: op(*args[:i], -args[i], *args[i + 1:], **options)

    def first_try(*args, **options):
        result = resample(*args, **options)
        return result._replace(tokens=args[3][:, :, 0], status=torch.zeros_like(result.status))

    if wrong == "sign":
        monkeypatch.setattr(continuous, "accept_gaussian", negated(accept, 1))
        monkeypatch.setattr(continuous, "resample_gaussian", negated(resample, 4))
    if wrong == "first try":
        monkeypatch.setattr(continuous, "resample_gaussian", first_try)
    if wrong == "the drafter's noise":
        monkeypatch.setattr(continuous, "RESAMPLE_NOISE", NOISE)
    assert compare("cspd-path:gamma=2")[0] < REFUSE_BELOW


def decode(pair, m, seeds=SEEDS, prompts=PROMPTS, guidance=2.0, drafter=None, **options):
    return continuous_decode(pair.mar, drafter or pair.mar_draft, pair.features(prompts[:len(seeds)]),
                             ContinuousSampling(seeds, guidance), parse_method(m), **options)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("m", ["cspd", "cspd-path", "cspd:truncate=false", "cspd-released:conditioning=exact",
                               "cspd-path:gamma=16"])
def test_a_draft_of_the_target_itself_is_accepted(tiny, m, guidance):
    baseline = decode(tiny, "mar", guidance=guidance)
    decoded = decode(tiny, m, guidance=guidance, drafter=tiny.mar)
    torch.testing.assert_close(decoded.tokens, baseline.tokens, rtol=1e-4, atol=1e-4)
    assert torch.equal(decoded.order, baseline.order) and decoded.acceptance_rate == 1
    assert not decoded.num_tries.any() and not decoded.out_of_tries.any()
    c = parse_method(m)
    prefill, num_new = round(16 * c.prefill), c.gamma + c.truncate
    assert decoded.target_forwards.tolist() == [prefill + math.ceil((16 - prefill) / num_new)] * 6
    assert (decoded.tau == 16 / decoded.target_forwards).all()
    assert (decoded.log_r[decoded.acceptance == 1].abs() < 0.1).all()


@pytest.mark.parametrize("m", ["mar:num_iter=5", "cspd", "cspd-path"])  # all: tests/slow/test_continuous.py
def test_a_request_does_not_depend_on_its_batch(tiny, m):
    together = decode(tiny, m)
    reverse = torch.arange(5, -1, -1)
    reversed_batch = decode(tiny, m, SEEDS[reverse], PROMPTS[::-1])
    for i in range(6):
        alone = decode(tiny, m, SEEDS[i:i + 1], PROMPTS[i:i + 1])
        for other, row in ((together, i), (reversed_batch, 5 - i)):
            for field in ("order", "target_forwards", "draft_forwards", "acceptance", "num_tries", "out_of_tries",
                          "failed"):
                assert torch.equal(getattr(alone, field)[0], getattr(other, field)[row]), field
            for field in ("tokens", "drafts"):
                torch.testing.assert_close(getattr(alone, field)[0], getattr(other, field)[row], rtol=1e-3, atol=1e-4,
                                           equal_nan=True)


def test_requests_advance_at_their_own_pace(tiny):
    """Otherwise the test above would not have had batches whose rows differ."""
    decoded = decode(tiny, "cspd-path")
    forwards = decoded.target_forwards
    assert len(set(forwards.tolist())) > 1 and forwards.min() < forwards.max() < 16


@pytest.mark.parametrize("num_iter", [1, 2, 7, 15, 16])
def test_parallel_decoding_draws_every_token_once(tiny, num_iter):
    assert mask_lengths(16, 4) == [14, 11, 6, 0] and mask_lengths(4, 4) == [3, 2, 1, 0]
    lengths = [16, *mask_lengths(16, num_iter)]
    assert len(lengths) == num_iter + 1 and lengths[-1] == 0 and all(a > b for a, b in zip(lengths, lengths[1:]))
    reports = []
    decoded = decode(tiny, f"mar:num_iter={num_iter}", progress=reports.append)
    assert decoded.tokens.shape == (6, 16, 4) and decoded.tokens.isfinite().all() and sum(reports) == 96
    assert reports == [6 * (a - b) for a, b in zip(lengths, lengths[1:])]
    assert decoded.target_forwards.tolist() == [num_iter] * 6 and not decoded.draft_forwards.any()
    assert torch.equal(decoded.order.sort(1).values, torch.arange(16).expand(6, -1))
    if num_iter == 16:
        assert torch.equal(decoded.tokens, decode(tiny, "mar").tokens)


@pytest.mark.parametrize("captions, schedule", [(False, "linear"), (True, "linear"), (True, "constant"),
                                                (True, "released")])
def test_parallel_decoding_by_hand(tiny, captions, schedule):
    """Three iterations. Guidance follows how many tokens each leaves unknown, or is the same in all."""
    target = tiny.mar if captions else toys(tokens=16, coupling=0.1)[0]
    source = tiny.features(PROMPTS[:2]) if captions else torch.tensor([0, 1])
    seeds, T, C = torch.tensor([8, 9]), target.config.num_sampling_steps, target.config.channels
    decoded = parallel_decode(target, source, ContinuousSampling(seeds, 3.0, 0.7), num_iter=3,
                              guidance_schedule=schedule)
    order = philox_uniforms(seeds, 1, 16, stream=ORDER)[:, 0].argsort(1)
    noise = philox_normals(seeds, 16, T * C, stream=NOISE).unflatten(-1, (T, C))
    tokens, is_known = torch.zeros(2, 16, C), torch.zeros(2, 16, dtype=torch.bool)
    last = {"linear": 3.0, "constant": 3.0, "released": 1 + 2 * 15 / 16}[schedule]
    for start, end in ((0, 3), (3, 8), (8, 16)):                   # 16 cos(30 degrees) = 13.9, 16 cos(60 degrees) = 8
        guidance = last if schedule == "constant" or end == 16 else 1 + 2 * end / 16
        z, uncond = z_of(target, source, tokens, is_known), target(tokens, is_known, target.null_condition(2))
        denoiser = target.diffloss.denoiser(z, uncond=uncond, guidance=guidance, temperature=0.7)
        sampled = denoiser.sample(noise).mean
        for b in range(2):
            positions = order[b, start:end]
            tokens[b, positions], is_known[b, positions] = sampled[b, positions], True
    torch.testing.assert_close(decoded.tokens, tokens, rtol=1e-3, atol=1e-4)


def test_denoising_steps_fall_linearly():
    assert denoising_steps(50, 5, 4) == [50, 35, 20, 5] and denoising_steps(8, 2, 1) == [8]
    assert denoising_steps(5, 8, 2) == [5, 8] and denoising_steps(8, 8, 3) == [8, 8, 8]


def test_fewer_steps_denoise_the_last_noise(tiny):
    """Two iterations: 8 steps, then 3. The other draws do not notice."""
    decoded, usual = (decode(tiny, f"mar:num_iter=2{more}", guidance=3.0) for more in (":steps_last=3", ""))
    first, = mask_lengths(16, 2)[:1]
    positions = decoded.order[:, :16 - first, None].expand(-1, -1, 4)
    assert torch.equal(decoded.tokens.gather(1, positions), usual.tokens.gather(1, positions))
    T, C = 8, 4
    noise = philox_normals(SEEDS, 16, T * C, stream=NOISE).unflatten(-1, (T, C))[:, :, -3:]
    is_known = torch.zeros(6, 16, dtype=torch.bool).scatter(1, decoded.order[:, :16 - first], True)
    source = tiny.features(PROMPTS)
    known = usual.tokens.masked_fill(~is_known[..., None], 0.0)
    z, uncond = z_of(tiny.mar, source, known, is_known), tiny.mar(known, is_known, tiny.mar.null_condition(6))
    expected = tiny.mar.diffloss.denoiser(z, uncond=uncond, guidance=3.0, num_steps=3).sample(noise).mean
    torch.testing.assert_close(decoded.tokens[~is_known], expected[~is_known], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=3", *METHODS])
def test_progress_counts_every_token(tiny, m):
    reports = []
    decoded = decode(tiny, m, progress=reports.append)
    assert sum(reports) == 96 and min(reports) > 0 and decoded.num_drawn == 16
    is_known = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 5
    reports.clear()
    known = KnownTokens(decoded.tokens, is_known, num_new=7)
    assert decode(tiny, m, progress=reports.append, known=known).num_drawn == 7 and sum(reports) == 42


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=4", *METHODS])
def test_known_tokens_stay(tiny, m):
    is_known = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 5
    tokens = torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(1))
    holes = tokens.masked_fill(~is_known[..., None], torch.nan)
    decoded = decode(tiny, m, known=KnownTokens(holes, is_known))
    assert torch.equal(decoded.tokens[is_known], tokens[is_known]) and decoded.tokens.isfinite().all()
    assert holes.isnan().any() and not decoded.failed.any()                        # the caller's tensor is unchanged
    for b in range(6):
        assert decoded.order[b, :5].tolist() == is_known[b].nonzero()[:, 0].tolist()
    assert (decoded.acceptance[:, :5] == -1).all() and (decoded.tau == 11 / decoded.target_forwards).all()
    other = decode(tiny, m, known=KnownTokens(torch.where(is_known[..., None], -tokens, 0.0), is_known))
    assert not torch.allclose(decoded.tokens[~is_known], other.tokens[~is_known], atol=0.01)
    if parse_method(m).gamma:                                      # known tokens are part of the prefill
        first = max(5, round(16 * parse_method(m).prefill))
        assert (decoded.acceptance[:, 5:first] == -1).all() and (decoded.acceptance[:, first] >= 0).all()
    some = decode(tiny, m, known=KnownTokens(tokens, is_known, num_new=6))
    assert torch.equal(some.order, decoded.order) and not in_order(some)[:, 11:].any()
    assert in_order(some)[:, :11].all() and (some.acceptance[:, 11:] == -1).all()
    none = decode(tiny, m, known=KnownTokens(tokens, is_known, num_new=0))
    assert torch.equal(none.tokens, tokens.masked_fill(~is_known[..., None], 0.0)) and not none.target_forwards.any()
    assert none.tau.isnan().all()


@pytest.mark.parametrize("m", ["mar", "cspd-path:gamma=1:truncate=false", "cspd:gamma=4:truncate=false:prefill=0"])
def test_an_image_drawn_in_two_parts_is_the_image_drawn_at_once(tiny, m):
    at_once = decode(tiny, m)
    none = KnownTokens(torch.zeros(6, 16, 4), torch.zeros(6, 16, dtype=torch.bool), num_new=8)
    first_half = decode(tiny, m, known=none)
    is_known = first_half.order.argsort(1) < 8
    second_half = decode(tiny, m, known=KnownTokens(first_half.tokens, is_known))
    torch.testing.assert_close(second_half.tokens, at_once.tokens, rtol=1e-3, atol=1e-4)
    assert torch.equal(first_half.target_forwards + second_half.target_forwards, at_once.target_forwards)


@pytest.mark.parametrize("broken", ["target", "drafter"])
@pytest.mark.parametrize("m", ["mar", "cspd:prefill=0.125", "cspd:prefill=0.9", "cspd-path", "cspd-released",
                               "cspd-path:truncate=false"])
def test_nan_ends_one_image_and_leaves_the_others(m, broken):
    target, drafter = toys(tokens=16, coupling=0.1)
    source, sampling, breaks = torch.tensor([0, 2, 1, 0]), ContinuousSampling(torch.arange(4), 1.5), 9
    complete = continuous_decode(target, drafter, source, sampling, parse_method(m))
    assert not complete.failed.any() and not complete.tau.isnan().any()
    (target if broken == "target" else drafter).breaks = breaks
    reports = []
    ended = continuous_decode(target, drafter, source, sampling, parse_method(m), reports.append)
    if broken == "drafter" and m == "mar":
        assert torch.equal(ended.tokens, complete.tokens)
        return
    assert ended.failed.tolist() == ended.tau.isnan().tolist() == [False, True, False, False]
    assert sum(reports) == 64
    for name in [field.name for field in fields(complete)][:-1]:
        others = [0, 2, 3]
        torch.testing.assert_close(getattr(ended, name)[others], getattr(complete, name)[others], equal_nan=True)
    x, n = in_order(ended)[1, :, 0], (in_order(ended)[1, :, 0] != 0).sum()
    torch.testing.assert_close(x[:n], in_order(complete)[1, :n, 0])
    assert not x[n:].any() and (ended.acceptance[1, n:] == -1).all() and not ended.num_tries[1, n:].any()
    assert not ended.out_of_tries[1, n:].any() and ended.log_r[1, n:].isnan().all()
    assert in_order(ended, "drafts")[1, n:].isnan().all()
    c = parse_method(m)
    assert n == breaks if m == "mar" else 0 < n <= max(breaks, round(16 * c.prefill)) + c.gamma
    assert ended.target_forwards[1] <= complete.target_forwards[1]


def test_nan_from_the_start_leaves_an_empty_image(tiny):
    for m in ("mar", "mar:num_iter=3", *METHODS):
        target, drafter = toys(tokens=6, coupling=0.1, breaks=0)
        ended = continuous_decode(target, drafter, torch.tensor([2, 0]), ContinuousSampling(SEEDS[:2]), parse_method(m))
        assert ended.failed.tolist() == [True, False]
        assert not ended.tokens[0].any() and ended.tokens[1].all() and ended.target_forwards[0] == 1


@pytest.mark.parametrize("m", ["cspd:prefill=0", "cspd-path"])
def test_a_resample_that_is_not_finite_ends_its_image(monkeypatch, m):
    target, drafter = toys(tokens=16, coupling=0.05)
    philox_normals = continuous.philox_normals

    def broken(seeds, *others, stream, **options):
        numbers = philox_normals(seeds, *others, stream=stream, **options)
        return numbers.masked_fill((seeds == 1)[:, None, None], torch.nan) if stream == RESAMPLE_NOISE else numbers

    sampling = ContinuousSampling(torch.arange(3))
    complete = continuous_decode(target, drafter, classes(3), sampling, parse_method(m))
    monkeypatch.setattr(continuous, "philox_normals", broken)
    ended = continuous_decode(target, drafter, classes(3), sampling, parse_method(m))
    assert ended.failed.tolist() == [False, True, False]
    assert torch.equal(ended.tokens[::2], complete.tokens[::2])
    x = in_order(ended)[1, :, 0]
    n = (x != 0).sum()
    assert torch.equal(x[:n], in_order(complete)[1, :n, 0]) and not x[n:].any() and n < 16


@pytest.mark.parametrize("m, prefill, gamma", [("cspd-path:gamma=3:prefill=0.25", 4, 3), ("cspd:gamma=5", 1, 5),
                                               ("cspd-path:gamma=1", 0, 1)])
def test_forwards_are_counted(m, prefill, gamma):
    target, drafter = toys(tokens=16, coupling=0.05)
    for seed in range(5):
        target.num_known.clear(), drafter.num_known.clear()
        decoded = continuous_decode(target, drafter, torch.tensor([1]), ContinuousSampling(torch.tensor([seed])),
                                    parse_method(m))
        assert decoded.target_forwards.tolist() == [len(target.num_known)]
        assert decoded.draft_forwards.tolist() == [len(drafter.num_known)]
        assert target.num_known[:prefill] == [[n] for n in range(prefill)]
        count, draft_counts, acceptance = prefill, iter(drafter.num_known), decoded.acceptance[0].tolist()
        for counts in target.num_known[prefill:]:                  # a row for each draft, and one for the token behind
            num_drafted = min(gamma, 16 - count)
            assert counts == [*range(count, min(count + num_drafted + 1, 16))] + [15] * (count + num_drafted == 16)
            assert [next(draft_counts) for _ in range(num_drafted)] == [[count + g] for g in range(num_drafted)]
            num_accepted = next((g for g in range(num_drafted) if acceptance[count + g] != 1), num_drafted)
            if num_accepted < num_drafted:
                assert acceptance[count + num_accepted] == 0
            elif count + num_drafted < 16:
                assert acceptance[count + num_drafted] == -1                 # the target's own
            count += num_accepted + (count + num_accepted < 16)
        assert count == 16 and next(draft_counts, None) is None
        assert decoded.tau.item() == pytest.approx(16 / len(target.num_known))


@pytest.mark.parametrize("m, target_forwards, draft_forwards", [
    ("cspd-released", 2 + 2, 14), ("cspd-released:gamma=5:prefill=0", 4, 16), ("cspd-released:prefill=1", 16, 0),
    ("cspd-path:truncate=false:gamma=3", 6, 16), ("cspd:prefill=1", 16, 0), ("mar", 16, 0), ("mar:num_iter=7", 7, 0),
])
def test_forwards_without_truncation_are_known_before(m, target_forwards, draft_forwards):
    target, drafter = toys(tokens=16, coupling=0.05)
    decoded = continuous_decode(target, drafter, classes(5), ContinuousSampling(torch.arange(5)), parse_method(m))
    assert decoded.target_forwards.tolist() == [target_forwards] * 5
    assert decoded.draft_forwards.tolist() == [draft_forwards] * 5
    assert (decoded.acceptance >= 0).sum(1).tolist() == [draft_forwards] * 5
    assert math.isnan(decoded.acceptance_rate) == (draft_forwards == 0)
    if m == "cspd-released":
        assert target.num_known == [[0] * 5, [1] * 5, [2] * 5, [10] * 5]  # one row for each image, however many drafts


@pytest.mark.parametrize("m", [*METHODS, "cspd:max_tries=1", "cspd-path:max_tries=1", "cspd-path:max_tries=9"])
def test_the_records_agree(m):
    target, drafter = toys(tokens=16, coupling=0.05)
    seeds = torch.arange(40)
    decoded = continuous_decode(target, drafter, classes(40), ContinuousSampling(seeds), parse_method(m))
    is_draft, is_accepted = decoded.acceptance >= 0, decoded.acceptance == 1
    assert is_draft.any() and ((decoded.num_tries > 0) == (decoded.acceptance == 0)).all()
    assert (decoded.num_tries <= parse_method(m).max_tries).all()
    assert (~decoded.out_of_tries | (decoded.num_tries == parse_method(m).max_tries)).all()
    assert torch.equal(decoded.log_r.isfinite(), is_draft)
    assert torch.equal(in_order(decoded, "drafts").isfinite()[..., 0], is_draft)
    uniforms = philox_uniforms(seeds, 16, 1, stream=ACCEPT)[..., 0].gather(1, decoded.order)
    assert torch.equal(is_accepted, is_draft & (uniforms.double() < decoded.log_r.double().exp()))
    assert decoded.acceptance_rate == pytest.approx(is_accepted.sum().item() / is_draft.sum().item())
    if parse_method(m).variant != "path":                          # with it, the token is of the target's last step
        assert torch.equal(in_order(decoded)[is_accepted], in_order(decoded, "drafts")[is_accepted])
    assert not torch.isclose(in_order(decoded)[decoded.acceptance == 0],
                             in_order(decoded, "drafts")[decoded.acceptance == 0]).any()


@pytest.mark.parametrize("m", ["cspd-path:gamma=1:truncate=false:max_tries=1",
                               "cspd-path:gamma=1:truncate=false:max_tries=3",
                               "cspd:gamma=1:truncate=false:prefill=0:max_tries=1:distance_temperature=42"])
def test_out_of_tries_the_target_draws_anew(monkeypatch, m):
    monkeypatch.setattr(continuous, "NUM_FIRST_PATHS", 2)
    target, drafter = toys(coupling=0.3)
    seeds, source = torch.arange(2000), classes(2000)
    decoded = continuous_decode(target, drafter, source, ContinuousSampling(seeds), parse_method(m))
    noise = philox_normals(seeds, 3, 3, stream=FRESH).unflatten(-1, (3, 1))
    ranks, num_given_up = decoded.order.argsort(1), 0
    for n in range(3):
        sampled = target.diffloss.denoiser(z_of(target, source, decoded.tokens, ranks < n)).sample(noise).mean
        sampled = sampled.gather(1, decoded.order[:, n, None, None])[:, 0]
        given_up = decoded.out_of_tries[:, n]
        torch.testing.assert_close(in_order(decoded)[:, n][given_up], sampled[given_up], rtol=1e-4, atol=1e-4)
        num_given_up += given_up.sum()
    assert num_given_up > 10


def by_hand(m, guidance, coupling=0.3):
    """A decoding of one token a step. For each n: its position, the denoisers of target and drafter, and the noise."""
    target, drafter = toys(coupling=coupling)
    seeds, source = torch.arange(500), classes(500)
    decoded = continuous_decode(target, drafter, source, ContinuousSampling(seeds, guidance), parse_method(m))
    ranks, steps = decoded.order.argsort(1), []
    for n in range(3):
        denoisers = []
        for model in (target, drafter):
            z = z_of(model, source, decoded.tokens, ranks < n)
            uncond = model(decoded.tokens, ranks < n, model.null_condition(500))
            z, uncond = (part.gather(1, decoded.order[:, n, None, None])[:, 0] for part in (z, uncond))
            denoisers.append(model.diffloss.denoiser(z, uncond=uncond, guidance=1 + (guidance - 1) * (n + 1) / 3))
        position = decoded.order[:, n, None]
        noise = philox_normals(seeds, position, 3, stream=NOISE)[:, 0, :, None]
        steps.append((n, position, *denoisers, noise))
    return decoded, seeds, steps


def test_a_path_is_accepted_or_resampled_as_a_whole():
    decoded, seeds, steps = by_hand("cspd-path:gamma=1:truncate=false", 2.0)
    for n, position, target, drafter, noise in steps:
        sample = drafter.sample(noise, keep_path=True)
        log_r = (target.log_density(sample.path) - drafter.log_density(sample.path)).float()
        torch.testing.assert_close(decoded.log_r[:, n], log_r, rtol=1e-4, atol=1e-4)
        x, is_accepted = in_order(decoded)[:, n], decoded.acceptance[:, n] == 1
        token = target.transition(sample.path[:, 1], 1)[0]
        torch.testing.assert_close(x[is_accepted], token[is_accepted], rtol=0, atol=1e-5)
        assert ((x - sample.mean)[is_accepted].abs() > 2e-5).float().mean() > 0.5  # the drafter's own last step
        new = target.sample(philox_normals(seeds, position, 3, stream=RESAMPLE_NOISE)[:, 0, :, None], keep_path=True)
        ratio = target.log_density(new.path) - drafter.log_density(new.path)
        uniforms = philox_uniforms(seeds, position, 1, stream=RESAMPLE)[:, 0, 0]
        first_try = ~is_accepted & (uniforms < 1 - torch.exp(-ratio))
        assert torch.equal(decoded.num_tries[:, n] == 1, first_try)
        assert 20 < first_try.sum() < (~is_accepted).sum() - 20
        torch.testing.assert_close(x[first_try], new.mean[first_try], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant, sign, resample_temperature", [("paper", 1, 42.0), ("released", -1, 1.0)])
@pytest.mark.parametrize("aligned", ["true", "false"])
def test_the_last_step_is_accepted_or_resampled(variant, sign, resample_temperature, aligned):
    decoded, seeds, steps = by_hand(f"cspd:gamma=1:truncate=false:prefill=0:distance_temperature=42:variant={variant}:"
                                    f"aligned={aligned}", 2.0)
    num_first_tries = 0
    for n, position, target, drafter, noise in steps:
        unaligned = philox_normals(seeds, position, 3, stream=UNALIGNED)[:, 0, :, None]
        p = target.sample(noise if aligned == "true" else unaligned)
        q = drafter.sample(noise)

        def log_r(x, temperature, p=p, q=q):
            distances = [((x - s.mean) / s.log_sigma.exp() / temperature).double() for s in (p, q)]
            last_step = q.log_sigma - p.log_sigma + (distances[1] ** 2 - distances[0] ** 2) / 2
            return sign * (q.log_sigma_sum - p.log_sigma_sum) + last_step.sum(1)

        torch.testing.assert_close(decoded.log_r[:, n], log_r(q.mean, 42.0).float(), rtol=1e-3, atol=1e-3)
        x, is_accepted = in_order(decoded)[:, n], decoded.acceptance[:, n] == 1
        torch.testing.assert_close(x[is_accepted], q.mean[is_accepted], rtol=1e-5, atol=1e-5)
        new = p.mean + p.log_sigma.exp() * philox_normals(seeds, position, 1, stream=RESAMPLE_NOISE)[:, 0]
        accept_prob = 1 - torch.exp(-log_r(new, resample_temperature))
        first_try = ~is_accepted & (philox_uniforms(seeds, position, 1, stream=RESAMPLE)[:, 0, 0] < accept_prob)
        assert torch.equal(decoded.num_tries[:, n] == 1, first_try)
        torch.testing.assert_close(x[first_try], new[first_try], rtol=1e-4, atol=1e-4)
        num_first_tries += first_try.sum()
    assert num_first_tries > 100 and 0 < decoded.acceptance_rate < 1


@pytest.mark.parametrize("name, parameters, message", [
    ("cspd", {"gamma": 0}, "gamma must be a whole number within 1..1023, got 0"),
    ("cspd", {"gamma": -1}, "gamma must be a whole number within 1..1023, got -1"),
    ("cspd", {"prefill": -0.1}, r"prefill must be within \[0, 1\], got -0.1"),
    ("cspd", {"prefill": 1.1}, r"prefill must be within \[0, 1\], got 1.1"),
    ("cspd", {"prefill": math.nan}, r"prefill must be within \[0, 1\], got nan"),
    ("cspd", {"variant": "paths"}, "variant must be one of paper, released, path, got 'paths'"),
    ("cspd", {"conditioning": "none"}, "conditioning must be one of exact, block, got 'none'"),
    ("cspd", {"distance_temperature": 0.0}, "distance_temperature must be positive and finite in 32 bits, got 0.0"),
    ("cspd", {"distance_temperature": math.inf}, "distance_temperature must be positive and finite in 32 bits, got"),
    ("cspd-path", {"distance_temperature": 42.0}, "distance_temperature must be 1 where variant is path.* got 42.0"),
    ("cspd", {"variant": "path", "aligned": False}, "aligned must be true where variant is path.* got False"),
    ("cspd", {"max_tries": 0}, "max_tries must be a whole number within 1..1000000, got 0"),
    ("cspd", {"num_iter": 3}, "method cspd has no parameter 'num_iter'.* its parameters: gamma, prefill"),
    ("cspd", {"gama": 3}, "method cspd has no parameter 'gama'; did you mean gamma"),
    ("mar", {"num_iter": -1}, "num_iter must be a whole number within 1..65536, or 0 for one target forward a token"),
    ("mar", {"gamma": 2}, "method mar has no parameter 'gamma'.* its parameters: num_iter"),
    ("cspd", {"gamma": 2.0}, "gamma must be a whole number within 1..1023, got 2.0"),
    ("cspd", {"gamma": "2"}, "gamma must be a whole number within 1..1023, got '2'"),
    ("cspd", {"max_tries": True}, "max_tries must be a whole number within 1..1000000, got True"),
    ("mar", {"num_iter": 4.0}, "num_iter must be a whole number within 1..65536, or 0 for .*, got 4.0"),
    ("mar", {"steps_last": 1}, "steps_last must be a whole number within 2..100000, or 0 for the model.s own number"),
    ("mar", {"guidance_schedule": "cubic"}, "guidance_schedule must be one of linear, constant, released, got 'cubic'"),
    ("mar", {"steps_first": 5.0}, "steps_first must be a whole number within 2..100000, or 0 for .*, got 5.0"),
    ("cspd", {"steps_last": 5}, "method cspd has no parameter 'steps_last'"),
    ("cspd", {"truncate": "false"}, "truncate must be True or False, got 'false'"),
    ("cspd", {"aligned": 0}, "aligned must be True or False, got 0"),
    ("cspd", {"prefill": "a"}, "prefill must be within .*, got 'a'"),
    ("cspd-paths", {}, "unknown method 'cspd-paths'; did you mean cspd-path"),
])
def test_methods_for_continuous_tokens_are_checked(name, parameters, message):
    with pytest.raises(ValueError, match=message):
        method(name, **parameters)


@pytest.mark.parametrize("text, message", [
    ("cspd:truncate=maybe", "truncate must be true or false, got 'maybe'"),
    ("cspd:aligned=1", "aligned must be true or false, got '1'"),
    ("cspd:num_iter=3", "method cspd has no parameter 'num_iter'"),
    ("cspd:gamma=two", "gamma must be an integer, got 'two'"),
    ("cspd:gamma=2.5", "gamma must be an integer, got '2.5'"),
    ("cspd:prefill=much", "prefill must be a number, got 'much'"),
    ("cspd:gamma", "method must be like name:parameter=value, got 'cspd:gamma'"),
])
def test_how_methods_for_continuous_tokens_are_not_written(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


@pytest.mark.parametrize("text", ["mar:num_iter=8", "mar:steps_first=8:steps_last=5",
                                  "cspd:gamma=2:prefill=0.5:truncate=false", "cspd-released:max_tries=7",
                                  "cspd-path:conditioning=block", "cspd:variant=released:aligned=false",
                                  "cspd:guidance_schedule=constant", "mar:guidance_schedule=released"])
def test_a_label_names_its_method(text):
    m = parse_method(text)
    assert sorted(m.label.split(":")) == sorted(text.split(":")) and parse_method(m.label) == m


@pytest.mark.parametrize("name", CONTINUOUS)
def test_every_continuous_recipe_says_what_it_is(name):
    m = CONTINUOUS[name]
    assert m.name == name == m.label and "arXiv" in m.source and method(name) == m
    assert ("num_iter" in parameters_of(m)) == (name == "mar") == (m.drafting == "none")


@pytest.mark.parametrize("settings, message", [
    ({"seeds": torch.zeros(2)}, r"seeds must be int64 \(B,\) with B >= 1, got torch.float32 \(2,\)"),
    ({"seeds": torch.zeros(0, dtype=torch.int64)}, r"seeds must be int64 .* got torch.int64 \(0,\)"),
    ({"seeds": torch.zeros(2, 1, dtype=torch.int64)}, r"seeds must be int64 .* got torch.int64 \(2, 1\)"),
    ({"temperature": 0.0}, "temperature must be positive and finite in 32 bits for continuous tokens, got 0.0"),
    ({"temperature": -1.0}, "temperature must be positive and finite in 32 bits for continuous tokens, got -1.0"),
    ({"temperature": math.inf}, "temperature must be positive and finite in 32 bits for continuous tokens, got inf"),
    ({"seeds": [1, 2]}, "seeds must be an int64 tensor .* got list; ContinuousSampling.of takes a list"),
    ({"guidance": [1.0, 2.0]}, r"guidance must be one number for the whole batch, got \[1.0, 2.0\]"),
    ({"temperature": torch.ones(2)}, "temperature must be one number for the whole batch"),
    ({"guidance": math.nan}, "guidance must be a finite number in 32 bits, got nan"),
    ({"guidance": math.inf}, "guidance must be a finite number in 32 bits, got inf"),
])
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ContinuousSampling(**{"seeds": SEEDS} | settings)


@pytest.mark.parametrize("name, got", [("tokens", 9), ("channels", 5), ("num_sampling_steps", 6),
                                       ("num_train_timesteps", 500), ("classes", 9)])
def test_a_drafter_of_other_tokens_is_refused(name, got):
    wanted = getattr(TINY, name)
    with pytest.raises(ValueError, match=f"drafter must have the target's {name}={wanted}, got {name}={got}"):
        continuous_decode(MAR(TINY), MAR(replace(TINY, **{name: got})), torch.tensor([1]),
                          ContinuousSampling(SEEDS[:1]), method("cspd"))


ZEROS, HALF = torch.zeros(6, 16, 4), torch.arange(16).expand(6, -1) < 8


@pytest.mark.parametrize("known, message", [
    (KnownTokens(ZEROS[:2], HALF),
     r"tokens must be float32 \(B, L, C\) = \(6, 16, 4\), got torch.float32 \(2, 16, 4\)"),
    (KnownTokens(ZEROS[..., :2], HALF), r"tokens must be .* got torch.float32 \(6, 16, 2\)"),
    (KnownTokens(ZEROS.double(), HALF), r"tokens must be float32 .* got torch.float64 \(6, 16, 4\)"),
    (KnownTokens(ZEROS, HALF[0]), r"is_known must be bool \(6, 16\), got torch.bool \(16,\)"),
    (KnownTokens(ZEROS, HALF.long()), r"is_known must be bool \(6, 16\), got torch.int64 \(6, 16\)"),
    (KnownTokens(ZEROS, torch.arange(16) < torch.tensor([8, 8, 9, 8, 8, 8])[:, None]),
     r"is_known must have the same number of tokens in each image, got \[8, 8, 9, 8, 8, 8\]"),
    (KnownTokens(ZEROS, HALF, num_new=9), r"num_new must be an integer within 0\.\.8 \(the unknown tokens\), got 9"),
    (KnownTokens(ZEROS, HALF, num_new=1.0), "num_new must be an integer within"),
    (KnownTokens(ZEROS * math.nan, HALF), "tokens must be finite where they are known"),
    (KnownTokens(ZEROS, HALF, order=torch.zeros(6, 16)), "order must be int64 and hold each of the 16 positions once"),
    (KnownTokens(ZEROS, HALF, num_new=-1), r"num_new must be an integer within 0\.\.8 \(the unknown tokens\), got -1"),
])
@pytest.mark.parametrize("m", ["mar", "cspd"])
def test_known_tokens_that_do_not_fit_are_refused(tiny, m, known, message):
    with pytest.raises(ValueError, match=message):
        decode(tiny, m, known=known)


def test_other_arguments_are_checked(tiny):
    with pytest.raises(ValueError, match="guidance_schedule must be one of linear, constant, released, got 'x'"):
        parallel_decode(tiny.mar, tiny.features(PROMPTS), ContinuousSampling(SEEDS), guidance_schedule="x")
    with pytest.raises(ValueError, match=r"steps_last must be within 2\.\.8 \(the model's denoising steps\), got 9"):
        decode(tiny, "mar:steps_last=9")
    with pytest.raises(ValueError, match=r"num_iter must be within 1\.\.16 \(the tokens to draw\), got 17"):
        decode(tiny, "mar:num_iter=17")
    with pytest.raises(ValueError, match=r"num_iter must be within 1\.\.8 \(the tokens to draw\), got 9"):
        decode(tiny, "mar:num_iter=9", known=KnownTokens(ZEROS, HALF))
    for m in ("mar", "cspd"):
        with pytest.raises(ValueError, match="there must be a condition for each of the 6 seeds, got 2"):
            continuous_decode(tiny.mar, tiny.mar_draft, tiny.features(PROMPTS[:2]), ContinuousSampling(SEEDS),
                              method(m))
        with pytest.raises(ValueError, match=r"caption features must be \(R, S, 8\), got \(6, 6\)"):
            continuous_decode(tiny.mar, tiny.mar_draft, torch.zeros(6, 6), ContinuousSampling(SEEDS), method(m))


@pytest.mark.parametrize("prompts, m, message", [
    (["red hart"], "cspd", r"prompt 'red hart' has unknown words: 'hart' \(near: heart\)"),
    (["green"], "mar", "prompt 'green' has unknown words: 'green'"),
    ([""], "mar", "a prompt must have 1 to 6 words, style included, got 0"),
    (["heart"], "lantern", "method must be one for continuous tokens .mar, cspd, cspd-path, cspd-released.* 'lantern'"),
    (["heart"], "cspd:gamma=0", "gamma must be a whole number within 1..1023, got 0"),
    ("heart", "cspd", "prompts must be a list of strings, got 'heart'"),
    (["heart", "heart"], "cspd", "sampling must have a seed for each of the 2 prompts, got 1"),
    ([], "cspd", "sampling must have a seed for each of the 0 prompts, got 1"),
])
def test_a_pair_is_asked_for_what_it_can_draw(tiny, prompts, m, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny.tokens(prompts, m, ContinuousSampling(SEEDS[:1]))
    assert isinstance(error.value, UnknownWords) == ("unknown words" in message)


def test_a_pair_draws_by_prompt(tiny):
    sampling = ContinuousSampling(SEEDS, 2.0)
    decoded = tiny.tokens(PROMPTS, "cspd-path:gamma=2", sampling)
    expected = decode(tiny, "cspd-path:gamma=2")
    assert torch.equal(decoded.tokens, expected.tokens) and decoded.tokens.isfinite().all()
    assert torch.equal(tiny.tokens(PROMPTS, method("cspd-path", gamma=2), sampling).tokens, expected.tokens)
    same_seed = tiny.tokens(["red heart", "blue"], "mar", ContinuousSampling(torch.tensor([1, 1]), 2.0))
    assert torch.equal(*same_seed.order) and not torch.allclose(*same_seed.tokens, atol=0.05)
    pictures = tiny.pictures(decoded.tokens)
    assert len(pictures) == 6 and pictures[0].size == (8, 8)


def test_known_tokens_and_tokens_of_other_shapes(tiny):
    decoded = tiny.tokens(PROMPTS, "cspd", ContinuousSampling.of(SEEDS.tolist()),
                          known=KnownTokens(ZEROS, HALF, num_new=2))
    assert decoded.num_drawn == 2 and not decoded.tokens[:, :8].any()
    with pytest.raises(ValueError, match=r"tokens must be \(B, L, C\) = \(B, 16, 4\), got \(6, 9, 4\)"):
        tiny.pictures(decoded.tokens[:, :9])


@pytest.mark.parametrize("ids", [torch.tensor([10]), torch.tensor([-1]), torch.tensor([1.0]), torch.tensor([[1]])])
def test_class_ids_that_do_not_exist_are_refused(ids):
    with pytest.raises(ValueError, match=r"class ids must be int64 \(R,\) within 0\.\.9, got"):
        continuous_decode(MAR(TINY), MAR(TINY), ids, ContinuousSampling.of([1]), "cspd")


def test_a_pair_saved_is_the_pair_loaded(tiny, tmp_path):
    pipeline = tiny_pipeline()
    pipeline.prompts, pipeline.tokenizer = tiny.prompts, tiny.tokenizer
    pipeline.save(tmp_path)
    tiny.save(tmp_path)
    loaded = MARPair.load(tmp_path)
    rounded = tiny_pair()                                       # files hold float16
    for parameter in rounded.parameters():
        parameter.copy_(parameter.half())
    assert loaded.mar.config == tiny.mar.config and loaded.mar_draft.config == tiny.mar_draft.config
    assert loaded.scaling == tiny.scaling and loaded.words.ids == tiny.words.ids
    for m in ("mar", "cspd-path"):
        one, other = (pair.tokens(PROMPTS, m, ContinuousSampling(SEEDS, 2.0)) for pair in (loaded, rounded))
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.acceptance, other.acceptance)
    assert [a.tobytes() for a in loaded.pictures(one.tokens)] == [b.tobytes() for b in rounded.pictures(other.tokens)]


def test_normal_numbers_are_normal():
    x = philox_normals(torch.arange(100), 50, 20, stream=NOISE).double()
    assert x.shape == (100, 50, 20) and x.mean().abs() < 5 / 10 ** 2.5
    assert (x.var() - 1).abs() < 5 * math.sqrt(2e-5) and (x ** 3).mean().abs() < 5 * math.sqrt(15e-5)
    assert ((x ** 4).mean() - 3).abs() < 5 * math.sqrt(96e-5) and x.abs().max() < 5.6
    z = torch.special.ndtr(x.flatten().sort().values)
    steps = torch.arange(len(z) + 1) / len(z)
    assert max((steps[1:] - z).max(), (z - steps[:-1]).max()) < 2.2 / 10 ** 2.5    # p = 1e-4
    for dim in range(3):                                                           # neighbors know nothing
        a, b = x.movedim(dim, 0)[:-1].flatten(), x.movedim(dim, 0)[1:].flatten()
        assert (a * b).mean().abs() < 5 / len(a) ** 0.5


def test_normal_numbers_depend_on_seed_position_and_turn_alone():
    seeds = torch.tensor([5, 6, 2 ** 40 + 5])
    numbers = philox_normals(seeds, 9, 10, stream=NOISE)
    assert torch.equal(philox_normals(seeds, 9, 7, stream=NOISE), numbers[..., :7])
    assert torch.equal(philox_normals(seeds[1:2], 4, 10, stream=NOISE)[0], numbers[1, :4])
    assert torch.equal(philox_normals(seeds, 9, 10, stream=NOISE, turn=0), numbers)
    others = [philox_normals(seeds, 9, 10, stream=NOISE, turn=1), philox_normals(seeds, 9, 10, stream=FRESH),
              numbers.roll(1, 0), numbers.roll(1, 1), numbers.roll(1, 2)]
    assert all((other != numbers).float().mean() > 0.999 for other in others)


@pytest.mark.parametrize("turn", [0, 3])
def test_given_positions_have_the_numbers_of_all_positions(turn):
    seeds = torch.tensor([5, 6, 7])
    positions = torch.tensor([[8, 0, 3, 3], [1, 2, 3, 4], [7, 7, 0, 5]])
    given, every = (philox_normals(seeds, at, 6, stream=ACCEPT, turn=turn) for at in (positions, 9))
    assert torch.equal(given, every.gather(1, positions[..., None].expand(-1, -1, 6)))


def test_the_two_kinds_of_tokens_are_not_mixed_up(tiny):
    discrete, continuous_ = Sampling.of([0]), ContinuousSampling.of([0])
    for method_, sampling in (("mar", discrete), ("vanilla", continuous_)):
        with pytest.raises(ValueError, match="must be for discrete tokens.*MARPair decodes continuous ones"):
            tiny_pipeline().tokens(["red heart"], method_, sampling)
    with pytest.raises(ValueError, match="sampling must be a ContinuousSampling, got Sampling"):
        tiny.tokens(["red heart"], "mar", discrete)
