"""DiffLoss (MAR, arXiv:2406.11838): the distribution of a token is the diffusion of a small MLP.

The parameters have the official names. A token is x_0 of a path x_T .. x_0. Step t = T .. 1 draws x_(t-1) from
N(mean, sigma^2), and the network predicts both from x_t. The last step, t = 1, adds no noise. All noise is an argument,
so two models can share it.
"""
import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import DenoiserBlock, denoise_tokens, pack_denoiser, pack_weight, packed_linear

from .layers import Packing

MAX_BETA = 0.999      # the cosine falls to 0 at its end
TIME_FEATURES = 256
NORM_EPS = 1e-6


def cosine_alpha_bar(num_timesteps: int) -> Tensor:
    """(num_timesteps,) float64: the share of the signal's variance that remains after each timestep of noise.

    This is the cosine schedule, cos((s + 0.008) / 1.008 * pi / 2)^2 at s = t / num_timesteps over its value at 0.
    No timestep takes more than MAX_BETA.
    """
    s = torch.linspace(0, 1, num_timesteps + 1, dtype=torch.float64, device="cpu")
    curve = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    return (curve[1:] / curve[:-1]).clamp(min=1 - MAX_BETA).cumprod(0)


class Schedule:
    """The Gaussians of `num_sampling_steps` denoising steps.

    The steps are spread evenly over the `num_train_timesteps` that the network was trained on.
    Entry t - 1 of each table (num_sampling_steps,) float64 belongs to step t:

        timesteps             int64: the timestep, counted from 0, that the network gets
        alpha_bar             that of x_t
        beta                  the variance of the noise between x_(t-1) and x_t
        posterior_mean_coef1  the mean of x_(t-1) given x_0 and x_t is posterior_mean_coef1 * x_0
        posterior_mean_coef2      + posterior_mean_coef2 * x_t
        min_log_sigma         log sigma of x_(t-1) given x_0 and x_t. At t = 1 that is log 0, so step 2's is there
        max_log_sigma         log sqrt(beta). The network chooses between the two
    """

    def __init__(self, num_train_timesteps: int, num_sampling_steps: int):
        if not 2 <= num_sampling_steps <= num_train_timesteps:
            raise ValueError(f"num_sampling_steps must be within 2..{num_train_timesteps} (num_train_timesteps), "
                             f"got {num_sampling_steps}")
        # summed rather than multiplied, as in the release: the sum's rounding errors decide how a half is rounded
        stride = (num_train_timesteps - 1) / (num_sampling_steps - 1)
        spaced = accumulate([stride] * (num_sampling_steps - 1), initial=0.0)
        self.timesteps = torch.tensor([round(timestep) for timestep in spaced], device="cpu")
        self.alpha_bar = cosine_alpha_bar(num_train_timesteps)[self.timesteps]
        previous = F.pad(self.alpha_bar[:-1], (1, 0), value=1.0)  # alpha_bar of x_(t-1)
        self.beta = 1 - self.alpha_bar / previous
        self.posterior_mean_coef1 = self.beta * previous.sqrt() / (1 - self.alpha_bar)
        self.posterior_mean_coef2 = (1 - previous) * (1 - self.beta).sqrt() / (1 - self.alpha_bar)
        posterior_variance = self.beta * (1 - previous) / (1 - self.alpha_bar)
        self.min_log_sigma = torch.cat([posterior_variance[1:2], posterior_variance[1:]]).log() / 2
        self.max_log_sigma = self.beta.log() / 2
        self._table = torch.stack([
            self.timesteps.double(), self.alpha_bar.rsqrt(), (1 / self.alpha_bar - 1).sqrt(),
            self.posterior_mean_coef1, self.posterior_mean_coef2, self.min_log_sigma, self.max_log_sigma], -1).float()
        self._copies: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.timesteps)

    def table(self, device: torch.device) -> Tensor:
        """(num_sampling_steps, 7) float32: what a step needs, in a row.

        Its timestep, the coefficients of x_t and of the noise in x_0 = c_1 x_t - c_2 noise, and the last four tables.
        It is no buffer, because Module.to(torch.bfloat16) would round it.
        """
        if device not in self._copies:
            self._copies[device] = self._table.to(device)
        return self._copies[device]

    def transition(self, x: Tensor, epsilon: Tensor, var_values: Tensor, t: int | Tensor,
                   clip_sample_range: float = math.inf) -> tuple[Tensor, Tensor]:
        """Mean and log sigma of x_(t-1), from what the network predicts at x = x_t.

        Args:
            x:          (..., C) float32  x_t
            epsilon:    (..., C) float32  the noise in it
            var_values: (..., C) float32  -1 is min_log_sigma, 1 is max_log_sigma, and the rest is linear, beyond too
            t:          1..T, or int64 (P, 1, ..) that broadcasts against (...,)
            clip_sample_range: the predicted x_0 is clamped to plus and minus this
        """
        _, x_coef, noise_coef, coef1, coef2, min_log_sigma, max_log_sigma = (
            self.table(x.device)[t - 1][..., None, :].unbind(-1))
        x_0 = (x_coef * x - noise_coef * epsilon).clamp(-clip_sample_range, clip_sample_range)
        weight = (var_values + 1) / 2
        return coef1 * x_0 + coef2 * x, weight * max_log_sigma + (1 - weight) * min_log_sigma


class TimeEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timesteps: Tensor) -> Tensor:
        """timesteps (...,), counted from 0 -> (..., width)."""
        half = TIME_FEATURES // 2
        exponents = torch.arange(half, device=timesteps.device, dtype=torch.float32)
        angles = timesteps[..., None].float() * torch.exp(exponents * (-math.log(10000.0) / half))
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(self.mlp[0].weight.dtype))


def modulation(width: int, num_parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, num_parts * width))


class ResBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = modulation(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.linear = nn.Linear(width, out_channels)
        self.adaLN_modulation = modulation(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Network(nn.Module):
    """The MLP. From x_t, the timestep and z it predicts the noise in x_t and var_values, side by side. It stays float32
    when the model around it is cast."""

    def __init__(self, channels: int, z_channels: int, width: int, num_blocks: int):
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(z_channels, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(num_blocks))
        self.final_layer = FinalLayer(width, 2 * channels)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for index in (0, 2):
            nn.init.normal_(self.time_embed.mlp[index].weight, std=0.02)
        for block in [*self.res_blocks, self.final_layer]:
            nn.init.zeros_(block.adaLN_modulation[1].weight)  # a block starts as the identity
        nn.init.zeros_(self.final_layer.linear.weight)

    def _apply(self, fn, recurse: bool = True):
        """Move to another device, but keep the dtype.

        At t = T the mean is 316 times the predicted noise, and sigma is 1. In bfloat16 one rounding of that noise
        would weigh as much as what a step draws. The density of a path would then depend on its batch.
        """
        def keep_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)
        return super()._apply(keep_dtype, recurse)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x (..., C), y = time_embed(timesteps) + cond_embed(z) (..., width) -> (..., 2 C) float32."""
        x = self.input_proj(x.to(self.input_proj.weight.dtype))
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y).float()


@dataclass
class Sample:
    """Tokens, and what an acceptance rule needs to know of their paths. R means any dimensions."""

    mean: Tensor            # (R, C) float32  of the last step: this is the token, since that step adds no noise
    log_sigma: Tensor       # (R, C) float32  of the last step, temperature included
    log_sigma_sum: Tensor   # (R,) float64  over the channels and the steps T .. 2
    log_density: Tensor     # (R,) float64  of x_(T-1) .. x_1 given x_T
    path: Tensor | None     # (R, T + 1, C) float32: entry t is x_t


class Denoiser:
    """The diffusion of tokens, given one model and z. DiffLoss.denoiser makes it."""

    def __init__(self, diffloss: "DiffLoss", z: Tensor, uncond: Tensor | None, guidance: float | Tensor,
                 temperature: float, schedule: Schedule):
        z_channels = diffloss.net.cond_embed.in_features
        if z.ndim < 1 or z.shape[-1] != z_channels:
            raise ValueError(f"z must be (..., {z_channels}), got {tuple(z.shape)}")
        if uncond is not None and uncond.shape != z.shape:
            raise ValueError(f"uncond must have z's shape {tuple(z.shape)}, got {tuple(uncond.shape)}")
        if uncond is None and (isinstance(guidance, Tensor) or guidance != 1.0):
            raise ValueError(f"guidance {guidance} needs uncond, z under the null condition")
        if isinstance(guidance, Tensor) and guidance.shape not in (z.shape[:-1], ()):
            raise ValueError(f"guidance must be a number or {tuple(z.shape[:-1])}, got {tuple(guidance.shape)}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        self.diffloss, self.net, self.schedule, self.channels = diffloss, diffloss.net, schedule, diffloss.channels
        self.clip_sample_range = diffloss.clip_sample_range
        self.batch_shape, self.is_guided = z.shape[:-1], uncond is not None
        self.guidance = guidance[..., None] if isinstance(guidance, Tensor) else guidance
        self.temperature, self.log_temperature = float(temperature), math.log(temperature)
        z = torch.stack([z, uncond] if self.is_guided else [z], -2)
        self.z_embeddings = diffloss.cond_embeddings(z.to(self.net.cond_embed.weight.dtype))
        self.time_embeddings = diffloss.time_embeddings(schedule, self.z_embeddings)

    def transition(self, x: Tensor, t: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log sigma (..., C) float32 of x_(t-1), given x = x_t (..., C).

        t is 1..T. It may also be int64 (P, 1, ..) where x is (P, R, C): several steps side by side. Guidance moves the
        noise only. Log sigma is the conditional one, plus the logarithm of the temperature.
        """
        output = self.net(x[..., None, :], self.z_embeddings + self.time_embeddings[t - 1][..., None, :])
        epsilon, var_values = output.split(self.channels, -1)
        if self.is_guided:
            epsilon = epsilon[..., 1, :] + self.guidance * (epsilon[..., 0, :] - epsilon[..., 1, :])
        else:
            epsilon = epsilon[..., 0, :]
        mean, log_sigma = self.schedule.transition(x, epsilon, var_values[..., 0, :], t, self.clip_sample_range)
        return mean, log_sigma + self.log_temperature

    def sample(self, noise: Tensor, keep_path: bool = False) -> Sample:
        """Denoise.

        Args:
            noise:     (R, T, C) float32  standard normals: the last entry is x_T, and entry t - 1 goes into x_t
            keep_path: return the path too
        """
        T = len(self.schedule)
        self._check("noise", noise, T, "T")
        if self.diffloss.packing.get(noise, self.diffloss.pack) is not None:
            mean, log_sigma, log_sigma_sum, path = self.diffloss(noise, self)
        else:
            x = noise[..., T - 1, :]
            states, log_sigma_sum = [x], torch.zeros(self.batch_shape, dtype=torch.float64, device=noise.device)
            for t in range(T, 1, -1):
                mean, log_sigma = self.transition(x, t)
                log_sigma_sum = log_sigma_sum + log_sigma.double().sum(-1)
                x = mean + log_sigma.exp() * noise[..., t - 2, :]
                if keep_path:
                    states.append(x)
            mean, log_sigma = self.transition(x, 1)
            path = torch.stack([mean, *reversed(states)], -2) if keep_path else None
        step_noise = noise[..., : T - 1, :].double()
        log_density = -(step_noise.square() + math.log(2 * math.pi)).sum((-2, -1)) / 2 - log_sigma_sum
        return Sample(mean, log_sigma, log_sigma_sum, log_density, path if keep_path else None)

    def log_density(self, path: Tensor, chunk_size: int = 16384) -> Tensor:
        """(R,) float64: the log density of x_(T-1) .. x_1 given x_T, along a path that any model drew.

        Args:
            path:       (R, T + 1, C) float32  entry t is x_t; x_0 does not matter, since the last step adds no noise
            chunk_size: how many transitions are evaluated side by side, for the memory that they take
        """
        T = len(self.schedule)
        self._check("path", path, T + 1, "T + 1")
        states = path.movedim(-2, 0)
        log_density = torch.zeros(self.batch_shape, dtype=torch.float64, device=path.device)
        steps = torch.arange(2, T + 1, device=path.device).view(-1, *[1] * len(self.batch_shape))
        size = max(1, chunk_size // max(1, self.batch_shape.numel()))
        for t, x, next_x in zip(steps.split(size), states[2:].split(size), states[1:-1].split(size)):
            mean, log_sigma = self.transition(x, t)
            step_noise = (next_x.double() - mean) * torch.exp(-log_sigma.double())
            log_density = log_density - (step_noise.square() / 2 + log_sigma + math.log(2 * math.pi) / 2).sum((0, -1))
        return log_density

    def _check(self, name: str, value: Tensor, num_entries: int, letters: str) -> None:
        expected = (*self.batch_shape, num_entries, self.channels)
        if value.shape != expected:
            raise ValueError(f"{name} must be (R, {letters}, C) = {expected}, got {tuple(value.shape)}")


PACKABLE = ResBlock, FinalLayer, nn.ModuleList, nn.Sequential, nn.Linear, nn.LayerNorm, nn.SiLU


class DiffLoss(nn.Module):
    """The distributions of tokens of `channels` numbers, given a vector z of `z_channels` numbers for each."""

    def __init__(self, channels: int, z_channels: int, width: int, num_blocks: int, num_train_timesteps: int = 1000,
                 num_sampling_steps: int = 100, clip_sample_range: float | None = None):
        super().__init__()
        self.channels = channels
        self.clip_sample_range = math.inf if clip_sample_range is None else clip_sample_range
        self.net = Network(channels, z_channels, width, num_blocks)
        self.num_train_timesteps = num_train_timesteps
        self.schedule = Schedule(num_train_timesteps, num_sampling_steps)
        self._schedules = {num_sampling_steps: self.schedule}
        self.packing = Packing()

    def pack(self) -> None:
        """Copy the network's weights for `denoise_tokens`, where that can read them. A decoding begins with it."""
        def pack():
            (_, modulation), output, input = net.final_layer.adaLN_modulation, net.final_layer.linear, net.input_proj
            blocks = [DenoiserBlock(block.in_ln.weight, block.in_ln.bias, block.mlp[0].weight, block.mlp[0].bias,
                                    block.mlp[2].weight, block.mlp[2].bias, block.adaLN_modulation[1].weight,
                                    block.adaLN_modulation[1].bias) for block in net.res_blocks]
            return pack_denoiser(blocks, input.weight, input.bias, modulation.weight, modulation.bias, output.weight,
                                 output.bias, eps=NORM_EPS), pack_weight(net.cond_embed.weight), {}

        net = self.net
        fits = type(net) is Network and net.input_proj.out_features % 16 == 0 and self.channels % 2 == 0
        parts = [net.input_proj, net.res_blocks, net.final_layer, net.time_embed.mlp, net.cond_embed] if fits else []
        self.packing.check(parts, PACKABLE, pack, multiple=2)

    def forward(self, noise: Tensor, denoiser: Denoiser) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All denoising by the kernel: mean, log_sigma and log_sigma_sum of `Sample`, and the path."""
        R, z, guidance = denoiser.batch_shape, denoiser.z_embeddings, denoiser.guidance
        if isinstance(guidance, Tensor):
            guidance = guidance.float().expand(*R, 1).reshape(-1)
        path, log_sigma, log_sigma_sum = denoise_tokens(
            noise.reshape(-1, *noise.shape[-2:]), z.reshape(-1, *z.shape[-2:]), denoiser.time_embeddings,
            self.packing.packed[0], denoiser.schedule.table(noise.device), guidance=guidance,
            temperature=denoiser.temperature, clip_range=denoiser.clip_sample_range)
        path = path.view(*R, *path.shape[1:])
        return path[..., 0, :], log_sigma.view(*R, self.channels), log_sigma_sum.view(R), path

    def cond_embeddings(self, z: Tensor) -> Tensor:
        """z (.., z_channels) -> (.., width)"""
        packed, linear = self.packing.get(z, self.pack), self.net.cond_embed
        return linear(z) if packed is None else packed_linear(z, packed[1], linear.out_features, linear.bias)

    def time_embeddings(self, schedule: Schedule, like: Tensor) -> Tensor:
        """(T, width) on the device of `like`; the embeddings of packed weights are kept."""
        packed = self.packing.get(like, self.pack)
        kept = {} if packed is None else packed[2]
        if schedule not in kept:
            kept[schedule] = self.net.time_embed(schedule.table(like.device)[:, 0])
        return kept[schedule]

    def denoiser(self, z: Tensor, *, uncond: Tensor | None = None, guidance: float | Tensor = 1.0,
                 temperature: float = 1.0, num_steps: int | None = None) -> Denoiser:
        """The diffusion of tokens (R, C), given z. R means any dimensions.

        Args:
            z:           (R, z_channels), of any dtype
            uncond:      (R, z_channels)  z under the null condition; None: no guidance
            guidance:    a number, or (R,): the noise is that of uncond + guidance * (that of z - that of uncond)
            temperature: scales the sigma of each step, but not x_T; positive and finite
            num_steps:   how many denoising steps, at least 2; None: as many as `schedule` has
        Raises:
            ValueError: shapes other than these, guidance without uncond, or a temperature that is not positive
                and finite
        """
        if num_steps is not None and num_steps not in self._schedules:
            self._schedules[num_steps] = Schedule(self.num_train_timesteps, num_steps)
        schedule = self.schedule if num_steps is None else self._schedules[num_steps]
        return Denoiser(self, z, uncond, guidance, temperature, schedule)
