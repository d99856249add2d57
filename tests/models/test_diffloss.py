"""The denoising network of MAR: its schedules, steps, samples and densities."""
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from specvis.models.diffloss import DiffLoss, Schedule, cosine_alpha_bar
from tests.models.test_mar import Stable, diffusion, known_sets, mar, normals, stirred
from tests.tiny import TINY


def test_densities_are_exact_in_half_precision():
    model, tokens, is_known = mar(num_sampling_steps=100), normals(4, 16, 4), known_sets(4)
    torch.manual_seed(0)
    model.diffloss.net = stirred(Stable(channels=4, z_channels=32, width=32, num_blocks=2))
    weights = [weight.clone() for weight in model.diffloss.net.parameters()]
    for cast in (model.bfloat16, model.double, model.half, lambda: model.to("cpu", torch.bfloat16)):
        cast()
        assert all(torch.equal(now, weight) for now, weight in zip(model.diffloss.net.parameters(), weights))
    z = model(tokens, is_known, model.condition(torch.arange(4)))
    assert z.dtype == torch.bfloat16
    denoiser = model.diffloss.denoiser(z)
    sample = denoiser.sample(normals(4, 16, 100, 4, seed=3), keep_path=True)
    log_ratio = denoiser.log_density(sample.path) - sample.log_density                # of a model to itself
    assert log_ratio.abs().max() < 1e-3
    assert math.isclose(log_ratio.clamp(max=0).exp().mean(), 1, abs_tol=1e-3)      # the acceptance probability
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.to("meta").diffloss.net.parameters())
    guided = diffusion().denoiser(normals(4, 5).bfloat16(), uncond=normals(4, 5, seed=2).double(), guidance=2.0)
    assert guided.sample(normals(4, 12, 3)).mean.dtype == torch.float32            # any dtype of z, and of uncond


@pytest.mark.parametrize("num_sampling_steps", [2, 7, 100, 1000])
def test_schedule_in_closed_form(num_sampling_steps):
    schedule = Schedule(1000, num_sampling_steps)
    t = schedule.timesteps
    assert t[0] == 0 and t[-1] == 999 and len(schedule) == num_sampling_steps
    assert (t.diff() - 999 / (num_sampling_steps - 1)).abs().max() < 1                          # evenly spread
    angle = ((t[:-1] + 1).double() / 1000 + 0.008) / 1.008 * math.pi / 2           # the very last timestep is clipped
    assert torch.allclose(schedule.alpha_bar[:-1], (angle.cos() / math.cos(0.008 / 1.008 * math.pi / 2)) ** 2)
    assert torch.allclose(cosine_alpha_bar(1000)[999] / cosine_alpha_bar(1000)[998], torch.tensor(0.001).double())
    assert torch.equal(schedule.alpha_bar, cosine_alpha_bar(1000)[t])              # respacing keeps it
    assert torch.allclose((1 - schedule.beta).cumprod(0), schedule.alpha_bar)

    # Bayes: x_(t-1) ~ N(sqrt(a) x_0, 1 - a) before seeing x_t ~ N(sqrt(1 - beta) x_(t-1), beta)
    a, beta = schedule.alpha_bar[:-1], schedule.beta[1:]
    variance = 1 / (1 / (1 - a) + (1 - beta) / beta)
    assert torch.allclose(schedule.posterior_mean_coef1[1:], variance * a.sqrt() / (1 - a))
    assert torch.allclose(schedule.posterior_mean_coef2[1:], variance * (1 - beta).sqrt() / beta)
    assert torch.allclose(schedule.min_log_sigma[1:].exp() ** 2, variance)
    assert torch.allclose(schedule.max_log_sigma.exp() ** 2, schedule.beta)
    assert schedule.posterior_mean_coef1[0] == 1 and schedule.posterior_mean_coef2[0] == 0
    assert schedule.min_log_sigma[0] == schedule.min_log_sigma[1]


def test_timesteps_are_the_published_ones_of_a_summed_stride():
    schedule, differ = Schedule(1000, 100), []
    assert schedule.timesteps[:5].tolist() == [0, 10, 20, 30, 40] and schedule.timesteps[-2] == 989
    assert [round(sigma[0].exp().item(), 4) for sigma in (schedule.min_log_sigma, schedule.max_log_sigma)] == [
        0.0062, 0.0064]
    for num_sampling_steps in range(2, 1001):
        timestep, expected = 0.0, []
        for _ in range(num_sampling_steps):
            expected.append(round(timestep))
            timestep += 999 / (num_sampling_steps - 1)
        assert Schedule(1000, num_sampling_steps).timesteps.tolist() == expected
        if expected != [round(i * 999 / (num_sampling_steps - 1)) for i in range(num_sampling_steps)]:
            differ.append(num_sampling_steps)
    assert differ[:4] == [21, 23, 27, 35] and len(differ) == 283                   # from multiples of the stride


def test_a_step_from_what_the_network_predicts():
    schedule = Schedule(1000, 10)
    start, epsilon = normals(5, 3), normals(5, 3, seed=2)
    for t in (1, 2, 10):
        a = schedule.alpha_bar[t - 1].float()
        x = a.sqrt() * start + (1 - a).sqrt() * epsilon
        mean, _ = schedule.transition(x, epsilon, torch.zeros(5, 3), t)
        expected = schedule.posterior_mean_coef1[t - 1] * start + schedule.posterior_mean_coef2[t - 1] * x
        assert torch.allclose(mean, expected.float(), atol=1e-5 if t < 10 else 1e-3)  # at t = 1 this is x_0
        for var_values, weight in ((-1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (3.0, 2.0)):
            _, log_sigma = schedule.transition(x, epsilon, torch.full((5, 3), var_values), t)
            expected = torch.lerp(schedule.min_log_sigma[t - 1], schedule.max_log_sigma[t - 1], weight)
            assert torch.allclose(log_sigma, expected.float().expand(5, 3))
    side_by_side = schedule.transition(torch.stack([start, x]), epsilon, start, torch.tensor([3, 10])[:, None])
    for i, t in enumerate((3, 10)):
        alone = schedule.transition([start, x][i], epsilon, start, t)
        assert all(torch.equal(side[i], one) for side, one in zip(side_by_side, alone))


@pytest.mark.parametrize("clip_sample_range", [0.5, 2.0])
def test_a_guess_of_the_token_stays_within_its_range(clip_sample_range):
    schedule, start, epsilon = Schedule(1000, 10), 2 * normals(50, 3), normals(50, 3, seed=2)
    assert (start.abs() > clip_sample_range).any() and (start.abs() < clip_sample_range).any()
    for t in (1, 2, 10):
        a = schedule.alpha_bar[t - 1].float()
        x = a.sqrt() * start + (1 - a).sqrt() * epsilon
        free, log_sigma = schedule.transition(x, epsilon, torch.zeros(50, 3), t)
        clipped, same = schedule.transition(x, epsilon, torch.zeros(50, 3), t, clip_sample_range)
        clipped_start = start.clamp(-clip_sample_range, clip_sample_range)
        expected = schedule.posterior_mean_coef1[t - 1] * clipped_start + schedule.posterior_mean_coef2[t - 1] * x
        assert torch.allclose(clipped, expected.float(), atol=1e-3) and torch.equal(same, log_sigma)
        inside = start.abs() < clip_sample_range - 1e-3
        assert torch.equal(clipped[inside], free[inside]) and not torch.equal(clipped[~inside], free[~inside])


def test_only_a_model_with_a_range_clips_its_guesses():
    free, wide, clipped = mar(), mar(clip_sample_range=1e30), mar(clip_sample_range=1.5)
    z, noise = normals(20, TINY.dim), normals(20, TINY.num_sampling_steps, TINY.channels, seed=2)
    path = free.diffloss.denoiser(z).sample(noise, keep_path=True).path
    assert free.config.clip_sample_range is None and free.diffloss.clip_sample_range == math.inf
    assert path.abs().max() > 100
    for t in range(1, TINY.num_sampling_steps + 1):
        x = path[:, t]
        assert torch.equal(free.diffloss.denoiser(z).transition(x, t)[0], wide.diffloss.denoiser(z).transition(x, t)[0])
    tokens = clipped.diffloss.denoiser(z).sample(noise).mean                          # at t = 1 this is x_0
    assert tokens.abs().max() <= 1.5 + 1e-6 and (tokens.abs() < 1.4).any()
    both = clipped.diffloss.denoiser(z, uncond=z.flip(0), guidance=5.0).sample(noise).mean
    assert both.abs().max() <= 1.5 + 1e-6                                          # the guided guess is clipped


@torch.no_grad()
def test_another_schedule_of_as_many_steps_has_its_own_embeddings():
    model = mar()
    model.pack()
    z, embeddings = torch.zeros(1, model.diffloss.net.cond_embed.in_features), model.diffloss.time_embeddings
    for schedule in Schedule(1000, 8), Schedule(500, 8):
        expected = model.diffloss.net.time_embed(schedule.table(z.device)[:, 0])
        assert torch.equal(embeddings(schedule, z), expected)


def test_the_table_is_copied_to_each_device_once():
    schedule = Schedule(1000, 10)
    meta, cpu = (schedule.table(torch.device(name)) for name in ("meta", "cpu"))
    assert not cpu.is_meta and meta.is_meta                                        # meta gives no values back
    assert schedule.table(torch.device("cpu")) is cpu and schedule.table(torch.device("meta")) is meta


class Exact(nn.Module):
    """The output of a perfect network where tokens are N(z, 0.5^2), and var_values are -1."""

    def __init__(self, schedule):
        super().__init__()
        self.alpha_bar = cosine_alpha_bar(1000).float()
        self.cond_embed, self.schedule = nn.Linear(1, 1), schedule
        self.cond_embed.weight.data.fill_(1), self.cond_embed.bias.data.zero_()

    def time_embed(self, timesteps):
        return 100.0 * timesteps[:, None]                                          # z is small, and this is much larger

    def forward(self, x, y):
        z = (y + 50).remainder(100) - 50
        a = self.alpha_bar[((y - z) / 100).round().long()]
        epsilon = (1 - a).sqrt() * (x - a.sqrt() * z) / (a * 0.25 + 1 - a)
        return torch.cat([epsilon, -torch.ones_like(epsilon)], -1)


def test_a_perfect_network_samples_its_gaussian():
    diffloss = DiffLoss(channels=1, z_channels=1, width=1, num_blocks=0, num_sampling_steps=250)
    diffloss.net = Exact(diffloss.schedule).requires_grad_(False)
    z = torch.tensor([-2.0, 1.0])[:, None, None].expand(2, 20000, 1)
    tokens = diffloss.denoiser(z).sample(normals(2, 20000, 250, 1)).mean
    assert torch.allclose(tokens.mean((1, 2)), torch.tensor([-2.0, 1.0]), atol=0.015)
    assert torch.allclose(tokens.std((1, 2)), torch.tensor(0.5), atol=0.015)
    colder = diffloss.denoiser(z, temperature=0.5).sample(normals(2, 20000, 250, 1)).mean
    assert (colder.std((1, 2)) < 0.4).all()
    shifted = diffloss.denoiser(z, uncond=torch.zeros_like(z), guidance=2.0).sample(normals(2, 20000, 250, 1)).mean
    assert (shifted.mean((1, 2)).abs() > torch.tensor([2.5, 1.2])).all()           # away from uncond's 0


def test_sample_against_a_loop():
    model, z, noise = diffusion(), normals(2, 4, 5), normals(2, 4, 12, 3, seed=3)
    denoiser = model.denoiser(z, temperature=0.8)
    sample = denoiser.sample(noise, keep_path=True)
    x, log_density, log_sigma_sum = noise[..., 11, :], 0, 0
    assert torch.equal(sample.path[..., 12, :], x)
    for t in range(12, 1, -1):
        y = model.net.cond_embed(z) + model.net.time_embed(model.schedule.timesteps[t - 1])
        epsilon, var_values = model.net(x, y).chunk(2, -1)
        mean, log_sigma = model.schedule.transition(x, epsilon, var_values, t)
        step = Normal(mean.double(), log_sigma.double().exp() * 0.8)
        x = mean + step.scale.float() * noise[..., t - 2, :]
        log_density = log_density + step.log_prob(x.double()).sum(-1)
        log_sigma_sum = log_sigma_sum + step.scale.log().sum(-1)
        assert torch.allclose(sample.path[..., t - 1, :], x, rtol=1e-4, atol=1e-5)
        x = sample.path[..., t - 1, :]
    mean, log_sigma = denoiser.transition(x, 1)
    assert torch.allclose(sample.mean, mean, atol=1e-5) and torch.equal(sample.path[..., 0, :], sample.mean)
    assert torch.allclose(sample.log_sigma, log_sigma)
    assert torch.allclose(sample.log_sigma_sum, log_sigma_sum, atol=1e-4)
    assert torch.allclose(sample.log_density, log_density, atol=1e-3)
    assert denoiser.sample(noise).path is None and torch.equal(denoiser.sample(noise).mean, sample.mean)


def test_log_density_of_a_path_under_either_model():
    draft, target = diffusion(), diffusion(seed=1)
    z, other, noise = normals(2, 4, 5), normals(2, 4, 5, seed=2), normals(2, 4, 12, 3, seed=3)
    sample = draft.denoiser(z).sample(noise, keep_path=True)
    own = draft.denoiser(z).log_density(sample.path)
    assert own.shape == (2, 4) and own.dtype == torch.float64
    # in one batch instead of step by step, which rounds otherwise: by 2e-4 in torch 2.13, by 1.5e-3 in 2.14
    assert torch.allclose(own, sample.log_density, rtol=1e-4, atol=1e-3)
    under = target.denoiser(other, uncond=z, guidance=torch.full((2, 4), 1.5))
    density = under.log_density(sample.path)
    expected = 0
    for t in range(2, 13):
        mean, log_sigma = under.transition(sample.path[..., t, :], t)
        expected = expected + Normal(mean.double(), log_sigma.double().exp()).log_prob(
            sample.path[..., t - 1, :].double()).sum(-1)
    assert torch.allclose(density, expected, rtol=1e-4)
    assert torch.allclose(under.log_density(sample.path, chunk_size=20), density, rtol=1e-5)
    moved = sample.path.clone()
    moved[..., 0, :] = math.nan                                                    # the token is no part of it
    assert torch.equal(under.log_density(moved), density)
    aligned = target.denoiser(z).sample(noise, keep_path=True)                        # the same noise, another path
    assert torch.equal(aligned.path[..., 12, :], sample.path[..., 12, :])
    assert not torch.allclose(aligned.path[..., 11, :], sample.path[..., 11, :])


def test_guidance_moves_the_noise_only_and_temperature_scales_sigma():
    model, z, uncond, x = diffusion(), normals(4, 5), normals(4, 5, seed=2), normals(4, 3, seed=3)
    plain, other = model.denoiser(z), model.denoiser(uncond)
    for t in (1, 5, 12):
        guided = model.denoiser(z, uncond=uncond, guidance=3.0).transition(x, t)
        assert torch.equal(guided[1], plain.transition(x, t)[1])
        expected = other.transition(x, t)[0] + 3 * (plain.transition(x, t)[0] - other.transition(x, t)[0])
        assert torch.allclose(guided[0], expected, rtol=1e-4, atol=1e-4)
        cold, warm = model.denoiser(z, temperature=0.5).transition(x, t), plain.transition(x, t)
        assert torch.equal(cold[0], warm[0]) and torch.allclose(cold[1], warm[1] - math.log(2))
    noise = normals(4, 12, 3, seed=4)
    same = model.denoiser(z, uncond=uncond, guidance=1.0).sample(noise)
    assert torch.allclose(same.mean, plain.sample(noise).mean, rtol=1e-3, atol=1e-3)
    each = model.denoiser(z, uncond=uncond, guidance=torch.tensor([1.0, 2.0, 3.0, 4.0])).sample(noise).mean
    for row, guidance in enumerate((1.0, 2.0, 3.0, 4.0)):
        alone = model.denoiser(z, uncond=uncond, guidance=torch.tensor(guidance)).sample(noise).mean
        assert torch.equal(alone[row], each[row])


def test_leading_dimensions_and_thousand_steps():
    model = diffusion(num_sampling_steps=1000)
    z, noise = normals(2, 3, 5), normals(2, 3, 1000, 3, seed=3)
    sample = model.denoiser(z).sample(noise, keep_path=True)
    flat = model.denoiser(z.flatten(0, 1)).sample(noise.flatten(0, 1))
    assert torch.equal(flat.mean.view(2, 3, 3), sample.mean)
    assert sample.log_density.isfinite().all() and model.denoiser(z).log_density(sample.path).isfinite().all()
    assert model.denoiser(z[:0]).sample(noise[:0]).mean.shape == (0, 3, 3)


def test_mismatched_noise_and_paths():
    denoiser = diffusion().denoiser(torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"noise must be \(R, T, C\) = \(4, 12, 3\), got \(4, 11, 3\)"):
        denoiser.sample(torch.zeros(4, 11, 3))
    with pytest.raises(ValueError, match=r"path must be \(R, T \+ 1, C\) = \(4, 13, 3\), got \(4, 13, 2\)"):
        denoiser.log_density(torch.zeros(4, 13, 2))
