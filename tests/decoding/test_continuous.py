"""CSpD's loop where the target's distribution is known, and what it records. Wrong rules must fail the test."""
import math
from dataclasses import fields

import pytest
import torch

from specvis.decoding import continuous_state, continuous_verify
from specvis.decoding.continuous import continuous_decode, denoising_steps, mask_lengths, parallel_decode
from specvis.decoding.continuous_state import ContinuousSampling, KnownTokens
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import ACCEPT, FRESH, NOISE, ORDER, RESAMPLE, RESAMPLE_NOISE, UNALIGNED, philox_normals
from specvis_kernels import philox_uniforms
from tests.decoding.toys import (
    ACCEPT_ABOVE,
    METHODS,
    NUM_REQUESTS,
    PROMPTS,
    REFUSE_BELOW,
    SEEDS,
    classes,
    compare,
    decode,
    features,
    in_order,
    p_value,
    reference,
    toys,
    z_of,
)


def test_the_test_knows_the_target_and_refuses_the_draft_model():
    target, draft_model = toys()
    sampling = ContinuousSampling(torch.arange(NUM_REQUESTS))
    assert p_value(features(parallel_decode(target, classes(NUM_REQUESTS), sampling)), reference()) > ACCEPT_ABOVE
    assert p_value(features(parallel_decode(draft_model, classes(NUM_REQUESTS), sampling)), reference()) < REFUSE_BELOW
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
    monkeypatch.setattr(continuous_verify, "NUM_FIRST_PATHS", 1)
    p, decoded = compare("cspd-path:gamma=2")
    assert p > ACCEPT_ABOVE
    for module, name in ((continuous_state, "philox_normals"), (continuous_verify, "philox_uniforms")):
        numbers = getattr(module, name)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *args, stream, numbers=numbers, **_: numbers(*args, stream=stream))
            repeated = compare("cspd-path:gamma=2")[1]
        assert (repeated.tokens != decoded.tokens).any(2).float().mean() > 0.05


@pytest.mark.parametrize("m", ["cspd:distance_temperature=42", "cspd-released",
                               "cspd-path:conditioning=block", "cspd-path:gamma=3:truncate=false"])
def test_methods_that_are_not_exact_do_not(m):
    assert compare(m)[0] < REFUSE_BELOW


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("m", ["cspd", "cspd-path", "cspd:truncate=false", "cspd-released:conditioning=exact",
                               "cspd-path:gamma=16"])
def test_a_draft_of_the_target_itself_is_accepted(pair, m, guidance):
    baseline = decode(pair, "mar", guidance=guidance)
    decoded = decode(pair, m, guidance=guidance, draft_model=pair.mar)
    torch.testing.assert_close(decoded.tokens, baseline.tokens, rtol=1e-4, atol=1e-4)
    assert torch.equal(decoded.order, baseline.order) and decoded.acceptance_rate == 1
    assert not decoded.num_tries.any() and not decoded.out_of_tries.any()
    c = parse_method(m)
    prefill, num_new = round(16 * c.prefill), c.gamma + c.truncate
    assert decoded.target_forwards.tolist() == [prefill + math.ceil((16 - prefill) / num_new)] * 6
    assert (decoded.tau == 16 / decoded.target_forwards).all()
    assert (decoded.log_r[decoded.acceptance == 1].abs() < 0.1).all()


@pytest.mark.parametrize("m", ["mar:num_iter=5", "cspd", "cspd-path"])  # all: tests/slow/test_asked_of_all.py
def test_a_request_does_not_depend_on_its_batch(pair, m):
    together = decode(pair, m)
    if m == "cspd-path":  # rows advance at their own pace
        assert together.target_forwards.min() < together.target_forwards.max() < 16
    reverse = torch.arange(5, -1, -1)
    reversed_batch = decode(pair, m, SEEDS[reverse], PROMPTS[::-1])
    for i in range(6):
        alone = decode(pair, m, SEEDS[i:i + 1], PROMPTS[i:i + 1])
        for other, row in ((together, i), (reversed_batch, 5 - i)):
            for field in ("order", "target_forwards", "draft_forwards", "acceptance", "num_tries", "out_of_tries",
                          "failed"):
                assert torch.equal(getattr(alone, field)[0], getattr(other, field)[row]), field
            for field in ("tokens", "drafts"):
                torch.testing.assert_close(getattr(alone, field)[0], getattr(other, field)[row], rtol=1e-3, atol=1e-4,
                                           equal_nan=True)


@pytest.mark.parametrize("num_iter", [1, 2, 7, 15, 16])
def test_parallel_decoding_draws_every_token_once(pair, num_iter):
    assert mask_lengths(16, 4) == [14, 11, 6, 0] and mask_lengths(4, 4) == [3, 2, 1, 0]
    lengths = [16, *mask_lengths(16, num_iter)]
    assert len(lengths) == num_iter + 1 and lengths[-1] == 0 and all(a > b for a, b in zip(lengths, lengths[1:]))
    reports = []
    decoded = decode(pair, f"mar:num_iter={num_iter}", progress=reports.append)
    assert decoded.tokens.shape == (6, 16, 4) and decoded.tokens.isfinite().all() and sum(reports) == 96
    assert reports == [6 * (a - b) for a, b in zip(lengths, lengths[1:])]
    assert decoded.target_forwards.tolist() == [num_iter] * 6 and not decoded.draft_forwards.any()
    assert torch.equal(decoded.order.sort(1).values, torch.arange(16).expand(6, -1))
    if num_iter == 16:
        assert torch.equal(decoded.tokens, decode(pair, "mar").tokens)


@pytest.mark.parametrize("captions, schedule", [(False, "linear"), (True, "linear"), (True, "constant"),
                                                (True, "released")])
def test_parallel_decoding_by_hand(pair, captions, schedule):
    """Three iterations. Guidance follows how many tokens each leaves unknown, or is equal in all."""
    target = pair.mar if captions else toys(tokens=16, coupling=0.1)[0]
    source = pair.features(PROMPTS[:2]) if captions else torch.tensor([0, 1])
    seeds, T, C = torch.tensor([8, 9]), target.config.num_sampling_steps, target.config.channels
    decoded = continuous_decode(target, target, source, ContinuousSampling(seeds, 3.0, 0.7),
                                parse_method(f"mar:num_iter=3:guidance_schedule={schedule}"))
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


def test_fewer_steps_denoise_the_last_noise(pair):
    """Two iterations: 8 steps, then 3. The other draws do not notice."""
    decoded, usual = (decode(pair, f"mar:num_iter=2{more}", guidance=3.0) for more in (":steps_last=3", ""))
    first, = mask_lengths(16, 2)[:1]
    positions = decoded.order[:, :16 - first, None].expand(-1, -1, 4)
    assert torch.equal(decoded.tokens.gather(1, positions), usual.tokens.gather(1, positions))
    T, C = 8, 4
    noise = philox_normals(SEEDS, 16, T * C, stream=NOISE).unflatten(-1, (T, C))[:, :, -3:]
    is_known = torch.zeros(6, 16, dtype=torch.bool).scatter(1, decoded.order[:, :16 - first], True)
    source = pair.features(PROMPTS)
    known = usual.tokens.masked_fill(~is_known[..., None], 0.0)
    z, uncond = z_of(pair.mar, source, known, is_known), pair.mar(known, is_known, pair.mar.null_condition(6))
    expected = pair.mar.diffloss.denoiser(z, uncond=uncond, guidance=3.0, num_steps=3).sample(noise).mean
    torch.testing.assert_close(decoded.tokens[~is_known], expected[~is_known], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=3", *METHODS])
def test_progress_counts_every_token(pair, m):
    reports = []
    decoded = decode(pair, m, progress=reports.append)
    assert sum(reports) == 96 and min(reports) > 0 and decoded.num_drawn == 16
    is_known = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 5
    reports.clear()
    known = KnownTokens(decoded.tokens, is_known, num_new=7)
    assert decode(pair, m, progress=reports.append, known=known).num_drawn == 7 and sum(reports) == 42


@pytest.mark.parametrize("m", ["mar", "mar:num_iter=4", *METHODS])
def test_known_tokens_stay(pair, m):
    is_known = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)).argsort(1) < 5
    tokens = torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(1))
    holes = tokens.masked_fill(~is_known[..., None], torch.nan)
    decoded = decode(pair, m, known=KnownTokens(holes, is_known))
    assert torch.equal(decoded.tokens[is_known], tokens[is_known]) and decoded.tokens.isfinite().all()
    assert holes.isnan().any() and not decoded.failed.any()                        # the caller's tensor is unchanged
    for b in range(6):
        assert decoded.order[b, :5].tolist() == is_known[b].nonzero()[:, 0].tolist()
    assert (decoded.acceptance[:, :5] == -1).all() and (decoded.tau == 11 / decoded.target_forwards).all()
    other = decode(pair, m, known=KnownTokens(torch.where(is_known[..., None], -tokens, 0.0), is_known))
    assert not torch.allclose(decoded.tokens[~is_known], other.tokens[~is_known], atol=0.01)
    if parse_method(m).gamma:                                      # known tokens are part of the prefill
        first = max(5, round(16 * parse_method(m).prefill))
        assert (decoded.acceptance[:, 5:first] == -1).all() and (decoded.acceptance[:, first] >= 0).all()
    some = decode(pair, m, known=KnownTokens(tokens, is_known, num_new=6))
    assert torch.equal(some.order, decoded.order) and not in_order(some)[:, 11:].any()
    assert in_order(some)[:, :11].all() and (some.acceptance[:, 11:] == -1).all()
    none = decode(pair, m, known=KnownTokens(tokens, is_known, num_new=0))
    assert torch.equal(none.tokens, tokens.masked_fill(~is_known[..., None], 0.0)) and not none.target_forwards.any()
    assert none.tau.isnan().all()


@pytest.mark.parametrize("m", ["mar", "cspd-path:gamma=1:truncate=false", "cspd:gamma=4:truncate=false:prefill=0"])
def test_an_image_drawn_in_two_parts_is_the_image_drawn_at_once(pair, m):
    at_once = decode(pair, m)
    none = KnownTokens(torch.zeros(6, 16, 4), torch.zeros(6, 16, dtype=torch.bool), num_new=8)
    first_half = decode(pair, m, known=none)
    is_known = first_half.order.argsort(1) < 8
    second_half = decode(pair, m, known=KnownTokens(first_half.tokens, is_known))
    torch.testing.assert_close(second_half.tokens, at_once.tokens, rtol=1e-3, atol=1e-4)
    assert torch.equal(first_half.target_forwards + second_half.target_forwards, at_once.target_forwards)


@pytest.mark.parametrize("broken", ["target", "draft_model"])
@pytest.mark.parametrize("m", ["mar", "cspd:prefill=0.125", "cspd:prefill=0.9", "cspd-path", "cspd-released",
                               "cspd-path:truncate=false"])
def test_nan_ends_one_image_and_leaves_the_others(m, broken):
    target, draft_model = toys(tokens=16, coupling=0.1)
    source, sampling, breaks = torch.tensor([0, 2, 1, 0]), ContinuousSampling(torch.arange(4), 1.5), 9
    complete = continuous_decode(target, draft_model, source, sampling, parse_method(m))
    assert not complete.failed.any() and not complete.tau.isnan().any()
    (target if broken == "target" else draft_model).breaks = breaks
    reports = []
    ended = continuous_decode(target, draft_model, source, sampling, parse_method(m), reports.append)
    if broken == "draft_model" and m == "mar":
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


def test_nan_from_the_start_leaves_an_empty_image(pair):
    for m in ("mar", "mar:num_iter=3", *METHODS):
        target, draft_model = toys(tokens=6, coupling=0.1, breaks=0)
        ended = continuous_decode(target, draft_model, torch.tensor([2, 0]), ContinuousSampling(SEEDS[:2]),
                                  parse_method(m))
        assert ended.failed.tolist() == [True, False]
        assert not ended.tokens[0].any() and ended.tokens[1].all() and ended.target_forwards[0] == 1


@pytest.mark.parametrize("m", ["cspd:prefill=0", "cspd-path"])
def test_a_resample_that_is_not_finite_ends_its_image(monkeypatch, m):
    target, draft_model = toys(tokens=16, coupling=0.05)
    philox_normals = continuous_state.philox_normals

    def broken(seeds, *others, stream, **options):
        numbers = philox_normals(seeds, *others, stream=stream, **options)
        return numbers.masked_fill((seeds == 1)[:, None, None], torch.nan) if stream == RESAMPLE_NOISE else numbers

    sampling = ContinuousSampling(torch.arange(3))
    complete = continuous_decode(target, draft_model, classes(3), sampling, parse_method(m))
    monkeypatch.setattr(continuous_state, "philox_normals", broken)
    ended = continuous_decode(target, draft_model, classes(3), sampling, parse_method(m))
    assert ended.failed.tolist() == [False, True, False]
    assert torch.equal(ended.tokens[::2], complete.tokens[::2])
    x = in_order(ended)[1, :, 0]
    n = (x != 0).sum()
    assert torch.equal(x[:n], in_order(complete)[1, :n, 0]) and not x[n:].any() and n < 16


@pytest.mark.parametrize("m, prefill, gamma", [("cspd-path:gamma=3:prefill=0.25", 4, 3), ("cspd:gamma=5", 1, 5),
                                               ("cspd-path:gamma=1", 0, 1)])
def test_forwards_are_counted(m, prefill, gamma):
    target, draft_model = toys(tokens=16, coupling=0.05)
    for seed in range(5):
        target.num_known.clear(), draft_model.num_known.clear()
        decoded = continuous_decode(target, draft_model, torch.tensor([1]), ContinuousSampling(torch.tensor([seed])),
                                    parse_method(m))
        assert decoded.target_forwards.tolist() == [len(target.num_known)]
        assert decoded.draft_forwards.tolist() == [len(draft_model.num_known)]
        assert target.num_known[:prefill] == [[n] for n in range(prefill)]
        count, draft_counts, acceptance = prefill, iter(draft_model.num_known), decoded.acceptance[0].tolist()
        for counts in target.num_known[prefill:]:                  # a row for each draft, and one for the token after
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
    target, draft_model = toys(tokens=16, coupling=0.05)
    decoded = continuous_decode(target, draft_model, classes(5), ContinuousSampling(torch.arange(5)), parse_method(m))
    assert decoded.target_forwards.tolist() == [target_forwards] * 5
    assert decoded.draft_forwards.tolist() == [draft_forwards] * 5
    assert (decoded.acceptance >= 0).sum(1).tolist() == [draft_forwards] * 5
    assert math.isnan(decoded.acceptance_rate) == (draft_forwards == 0)
    if m == "cspd-released":
        assert target.num_known == [[0] * 5, [1] * 5, [2] * 5, [10] * 5]  # one row for each image, however many drafts


@pytest.mark.parametrize("m", [*METHODS, "cspd:max_tries=1", "cspd-path:max_tries=1", "cspd-path:max_tries=9"])
def test_the_records_agree(m):
    target, draft_model = toys(tokens=16, coupling=0.05)
    seeds = torch.arange(40)
    decoded = continuous_decode(target, draft_model, classes(40), ContinuousSampling(seeds), parse_method(m))
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
    monkeypatch.setattr(continuous_verify, "NUM_FIRST_PATHS", 2)
    target, draft_model = toys(coupling=0.3)
    seeds, source = torch.arange(2000), classes(2000)
    decoded = continuous_decode(target, draft_model, source, ContinuousSampling(seeds), parse_method(m))
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
    """A decoding of one token a step. For each n: its position, the denoisers of both models, and the noise."""
    target, draft_model = toys(coupling=coupling)
    seeds, source = torch.arange(500), classes(500)
    decoded = continuous_decode(target, draft_model, source, ContinuousSampling(seeds, guidance), parse_method(m))
    ranks, steps = decoded.order.argsort(1), []
    for n in range(3):
        denoisers = []
        for model in (target, draft_model):
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
    for n, position, target, draft_model, noise in steps:
        sample = draft_model.sample(noise, keep_path=True)
        log_r = (target.log_density(sample.path) - draft_model.log_density(sample.path)).float()
        torch.testing.assert_close(decoded.log_r[:, n], log_r, rtol=1e-4, atol=1e-4)
        x, is_accepted = in_order(decoded)[:, n], decoded.acceptance[:, n] == 1
        token = target.transition(sample.path[:, 1], 1)[0]
        torch.testing.assert_close(x[is_accepted], token[is_accepted], rtol=0, atol=1e-5)
        assert ((x - sample.mean)[is_accepted].abs() > 2e-5).float().mean() > 0.5  # the draft model's own last step
        new = target.sample(philox_normals(seeds, position, 3, stream=RESAMPLE_NOISE)[:, 0, :, None], keep_path=True)
        ratio = target.log_density(new.path) - draft_model.log_density(new.path)
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
    for n, position, target, draft_model, noise in steps:
        unaligned = philox_normals(seeds, position, 3, stream=UNALIGNED)[:, 0, :, None]
        p = target.sample(noise if aligned == "true" else unaligned)
        q = draft_model.sample(noise)

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
