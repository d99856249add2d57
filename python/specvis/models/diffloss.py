"""DiffLoss (MAR, arXiv:2406.11838): a token's distribution as the diffusion of a small MLP, official parameter names.

A token is x_0 of a path x_T .. x_0. Step t = T .. 1 draws x_(t-1) from N(mean, sigma^2), which the network predicts
from x_t; the last step, t = 1, adds no noise. All noise is passed in, so two models can share it.
"""
import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

MAX_BETA = 0.999      # where the cosine falls to 0
TIME_FEATURES = 256
NORM_EPS = 1e-6


def cosine_alpha_bar(steps: int) -> Tensor:
    """(steps,) float64: the share of the signal's variance left after 1..steps noisings, the cosine schedule.

    cos((s + 0.008) / 1.008 * pi / 2)^2 at s = t / steps over its value at 0, but no noising takes more than MAX_BETA.
    """
    times = torch.linspace(0, 1, steps + 1, dtype=torch.float64, device="cpu")
    curve = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
    return (curve[1:] / curve[:-1]).clamp(min=1 - MAX_BETA).cumprod(0)


class Schedule:
    """The Gaussians of `kept` denoising steps spread evenly over the `steps` noisings that the network was trained on.

    Entry t - 1 of each table (kept,) float64 is of step t:
        timesteps:  int64  the noising, counted from 0, that the network is told
        alpha_bar:  of x_t
        beta:       the variance that the noising from x_(t-1) to x_t adds
        from_start, from_here:  mean of x_(t-1) given x_0 and x_t: from_start * x_0 + from_here * x_t
        least, most:  log sigma between which the network chooses: that of x_(t-1) given x_0 and x_t (0 at t = 1, so
                    step 2's stands in), and that of beta
    """

    def __init__(self, steps: int, kept: int):
        if not 2 <= kept <= steps:
            raise ValueError(f"denoising steps must be within 2..{steps} (the noisings trained on), got {kept}")
        # summed rather than multiplied, as in the release: the sum's rounding errors decide where a half goes
        places = accumulate([(steps - 1) / (kept - 1)] * (kept - 1), initial=0.0)
        self.timesteps = torch.tensor([round(place) for place in places], device="cpu")
        self.alpha_bar = cosine_alpha_bar(steps)[self.timesteps]
        before = F.pad(self.alpha_bar[:-1], (1, 0), value=1.0)
        self.beta = 1 - self.alpha_bar / before
        self.from_start = self.beta * before.sqrt() / (1 - self.alpha_bar)
        self.from_here = (1 - before) * (1 - self.beta).sqrt() / (1 - self.alpha_bar)
        posterior = self.beta * (1 - before) / (1 - self.alpha_bar)
        self.least = torch.cat([posterior[1:2], posterior[1:]]).log() / 2
        self.most = self.beta.log() / 2
        self._rows = torch.stack([self.timesteps.double(), self.alpha_bar.rsqrt(), (1 / self.alpha_bar - 1).sqrt(),
                                  self.from_start, self.from_here, self.least, self.most], -1).float()
        self._copies: dict[torch.device, Tensor] = {}  # of the rows, which stay on the CPU

    def __len__(self) -> int:
        return len(self.timesteps)

    def rows(self, device: torch.device) -> Tensor:
        """(kept, 7) float32 per step: timestep, what x_t and its noise weigh in x_0, and the last four tables.

        Not a buffer: Module.to(torch.bfloat16) would round it.
        """
        if device not in self._copies:
            self._copies[device] = self._rows.to(device)
        return self._copies[device]

    def transition(self, x: Tensor, epsilon: Tensor, share: Tensor, t: int | Tensor,
                   bound: float = math.inf) -> tuple[Tensor, Tensor]:
        """Mean and log sigma of x_(t-1) from what the network says about x = x_t.

        Args:
            x, epsilon: (..., C) float32  x_t and the noise in it
            share:      (..., C) float32  where log sigma lies: -1 at `least`, 1 at `most`, and linearly beyond
            t:          1..T, or int64 (P, 1, ..) that broadcasts against (...,)
            bound:      x_0 is known to lie within plus and minus this
        """
        _, inverse, noise, from_start, from_here, least, most = self.rows(x.device)[t - 1][..., None, :].unbind(-1)
        start = (inverse * x - noise * epsilon).clamp(-bound, bound)
        share = (share + 1) / 2
        return from_start * start + from_here * x, share * most + (1 - share) * least


class TimeEmbedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timesteps: Tensor) -> Tensor:
        """(...,) counted from 0 -> (..., width)."""
        half = TIME_FEATURES // 2
        places = torch.arange(half, device=timesteps.device, dtype=torch.float32)
        angles = timesteps[..., None].float() * torch.exp(places * (-math.log(10000.0) / half))
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(self.mlp[0].weight.dtype))


def modulation(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


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
    def __init__(self, width: int, outside: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False)
        self.linear = nn.Linear(width, outside)
        self.adaLN_modulation = modulation(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Network(nn.Module):
    """The MLP: (x_t, time and condition) -> the noise in x_t and where log sigma lies, side by side.

    It keeps its dtype, float32, whatever the model around it is cast to.
    """

    def __init__(self, channels: int, condition: int, width: int, blocks: int):
        super().__init__()
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(blocks))
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
        """Moves go through, casts do not: at t = T the mean is 316 times the noise found and sigma is 1.

        In bfloat16 one rounding of that noise would weigh as much as what a step draws, and the density of a path
        would depend on the batch in which it was evaluated.
        """
        def same_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)
        return super()._apply(same_dtype, recurse)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x (..., C), y = time_embed(timesteps) + cond_embed(z) (..., width) -> (..., 2 C) float32."""
        x = self.input_proj(x.to(self.input_proj.weight.dtype))
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y).float()


@dataclass
class Sample:
    """Tokens and what an acceptance rule needs to know of how they came about; R stands for any dimensions."""

    mean: Tensor            # (R, C) float32  the last step's mean: the token itself, since that step adds no noise
    log_sigma: Tensor       # (R, C) float32  the last step's, temperature included
    log_sigma_sum: Tensor   # (R,) float64  over channels and steps T .. 2
    log_density: Tensor     # (R,) float64  of x_(T-1) .. x_1 given x_T
    path: Tensor | None     # (R, T + 1, C) float32, entry t is x_t


class Denoising:
    """The diffusion of tokens under one model and its conditions; made by DiffLoss.given."""

    def __init__(self, diffloss: "DiffLoss", z: Tensor, null: Tensor | None, guidance: float | Tensor,
                 temperature: float):
        width = diffloss.net.cond_embed.in_features
        if z.ndim < 1 or z.shape[-1] != width:
            raise ValueError(f"z must be (..., {width}), got {tuple(z.shape)}")
        if null is not None and null.shape != z.shape:
            raise ValueError(f"null must have z's shape {tuple(z.shape)}, got {tuple(null.shape)}")
        if null is None and (isinstance(guidance, Tensor) or guidance != 1.0):
            raise ValueError(f"guidance {guidance} needs null, z under the null condition")
        if isinstance(guidance, Tensor) and guidance.shape not in (z.shape[:-1], ()):
            raise ValueError(f"guidance must be a number or {tuple(z.shape[:-1])}, got {tuple(guidance.shape)}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        self.net, self.schedule, self.channels = diffloss.net, diffloss.schedule, diffloss.channels
        self.bound = diffloss.bound
        self.rows, self.guided = z.shape[:-1], null is not None
        self.guidance = guidance[..., None] if isinstance(guidance, Tensor) else guidance
        self.log_temperature = math.log(temperature)
        z = torch.stack([z, null] if self.guided else [z], -2)
        self.conditions = self.net.cond_embed(z.to(self.net.cond_embed.weight.dtype))
        self.times = self.net.time_embed(self.schedule.rows(z.device)[:, 0])

    def transition(self, x: Tensor, t: int | Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log sigma (..., C) float32 of x_(t-1) given x = x_t (..., C), under this model.

        t is 1..T, or int64 (P, 1, ..) where x is (P, R, C): steps side by side. Guidance moves the noise only;
        log sigma is the conditional one's, plus that of the temperature.
        """
        both = self.net(x[..., None, :], self.conditions + self.times[t - 1][..., None, :])
        epsilon, share = both.split(self.channels, -1)
        if self.guided:
            epsilon = epsilon[..., 1, :] + self.guidance * (epsilon[..., 0, :] - epsilon[..., 1, :])
        else:
            epsilon = epsilon[..., 0, :]
        mean, log_sigma = self.schedule.transition(x, epsilon, share[..., 0, :], t, self.bound)
        return mean, log_sigma + self.log_temperature

    def sample(self, noise: Tensor, keep_path: bool = False) -> Sample:
        """Denoise.

        Args:
            noise: (R, T, C) float32 standard normals; entry t - 1 makes x_t (the last entry is x_T)
            keep_path: also return the path
        """
        T = len(self.schedule)
        self._check("noise", noise, T, "T")
        x = noise[..., T - 1, :]
        path, log_sigmas = [x], torch.zeros(self.rows, dtype=torch.float64, device=noise.device)
        for t in range(T, 1, -1):
            mean, log_sigma = self.transition(x, t)
            log_sigmas = log_sigmas + log_sigma.double().sum(-1)
            x = mean + log_sigma.exp() * noise[..., t - 2, :]
            if keep_path:
                path.append(x)
        mean, log_sigma = self.transition(x, 1)
        drawn = noise[..., : T - 1, :].double()
        log_density = -(drawn.square() + math.log(2 * math.pi)).sum((-2, -1)) / 2 - log_sigmas
        return Sample(mean, log_sigma, log_sigmas, log_density,
                      torch.stack([mean, *reversed(path)], -2) if keep_path else None)

    def log_density(self, path: Tensor, at_once: int = 16384) -> Tensor:
        """(R,) float64: log density of x_(T-1) .. x_1 given x_T along a path of any model.

        Args:
            path:    (R, T + 1, C) float32, entry t is x_t; x_0 is not looked at: the last step is deterministic
            at_once: transitions that are evaluated side by side (memory)
        """
        T = len(self.schedule)
        self._check("path", path, T + 1, "T + 1")
        states = path.movedim(-2, 0)
        total = torch.zeros(self.rows, dtype=torch.float64, device=path.device)
        steps = torch.arange(2, T + 1, device=path.device).view(-1, *[1] * len(self.rows))
        piece = max(1, at_once // max(1, self.rows.numel()))
        for t, here, there in zip(steps.split(piece), states[2:].split(piece), states[1:-1].split(piece)):
            mean, log_sigma = self.transition(here, t)
            drawn = (there.double() - mean) * torch.exp(-log_sigma.double())
            total = total - (drawn.square() / 2 + log_sigma + math.log(2 * math.pi) / 2).sum((0, -1))
        return total

    def _check(self, name: str, value: Tensor, entries: int, letters: str) -> None:
        expected = (*self.rows, entries, self.channels)
        if value.shape != expected:
            raise ValueError(f"{name} must be (R, {letters}, C) = {expected}, got {tuple(value.shape)}")


class DiffLoss(nn.Module):
    """Distributions of tokens of `channels` numbers given a vector z of `condition` numbers each."""

    def __init__(self, channels: int, condition: int, width: int, blocks: int, steps: int = 1000, kept: int = 100,
                 bound: float | None = None):
        super().__init__()
        self.channels = channels
        self.bound = math.inf if bound is None else bound  # of tokens, see Schedule.transition
        self.net = Network(channels, condition, width, blocks)
        self.schedule = Schedule(steps, kept)

    def given(self, z: Tensor, *, null: Tensor | None = None, guidance: float | Tensor = 1.0,
              temperature: float = 1.0) -> Denoising:
        """The diffusion of tokens (R, C) given their conditions; R stands for any dimensions.

        Args:
            z:           (R, condition), of any dtype
            null:        (R, condition)  z under the null condition; None: no guidance
            guidance:    a number, or (R,): the noise is null + guidance * (conditional - null)
            temperature: scales each step's sigma (not x_T), positive and finite
        Raises:
            ValueError: shapes other than these, guidance without null, or a temperature that is not positive
                and finite
        """
        return Denoising(self, z, null, guidance, temperature)
