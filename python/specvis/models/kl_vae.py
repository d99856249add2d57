"""The KL-16 autoencoder of latent diffusion as MAR uses it (arXiv:2406.11838), with the official parameter names."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from . import vq
from .sizes import check_sizes
from .vq import AttnBlock, ResBlock, check_images


@dataclass(frozen=True)
class KLConfig:
    """The numbers of an autoencoder; the defaults are KL-16. Each latent encodes `stride` x `stride` pixels."""

    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2       # in a level of the encoder; one more in the decoder
    z_channels: int = 16
    groups: int = 32               # of the group norms
    scale: float = 0.2325          # a token is its latent times this

    def __post_init__(self):
        check_sizes(self)

    @property
    def stride(self) -> int:
        return 2 ** (len(self.multipliers) - 1)


class Level(vq.Level):
    BLOCKS = "block"


class Middle(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.block_1, self.block_2 = (ResBlock(channels, channels, groups) for _ in range(2))
        self.attn_1 = AttnBlock(channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """From images to means and log variances of latents, side by side. The lowest resolution has attention."""

    def __init__(self, c: KLConfig):
        super().__init__()
        widths = [c.channels * m for m in c.multipliers]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3, c.channels, 3, padding=1)
        self.down = nn.ModuleList(
            Level(in_channels, out_channels, c.residual_blocks, c.groups, i == last,
                  None if i == last else "downsample")
            for i, (in_channels, out_channels) in enumerate(zip([c.channels, *widths], widths)))
        self.mid = Middle(widths[-1], c.groups)
        self.norm_out = nn.GroupNorm(c.groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 2 * c.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """From latents to images. `up` counts from the highest resolution, which runs last. Only `mid` has attention."""

    def __init__(self, c: KLConfig):
        super().__init__()
        widths = [c.channels * m for m in c.multipliers]
        self.conv_in = nn.Conv2d(c.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], c.groups)
        self.up = nn.ModuleList(
            Level(in_channels, out_channels, c.residual_blocks + 1, c.groups, False, "upsample" if i else None)
            for i, (in_channels, out_channels) in enumerate(zip([*widths[1:], widths[-1]], widths)))
        self.norm_out = nn.GroupNorm(c.groups, widths[0], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class KL(nn.Module):
    def __init__(self, config: KLConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = Encoder(config), Decoder(config)
        self.quant_conv = nn.Conv2d(2 * config.z_channels, 2 * config.z_channels, 1)
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 1)

    def latents(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """The tokens of images: means of the latents, or samples, times `scale`.

        Args:
            images: (B, 3, H, W) in [-1, 1]
            noise:  (B, h, w, C) standard normals, for samples; None: means
        Returns:
            (B, h, w, C) float32
        """
        check_images(images, self.config.stride)
        moments = self.quant_conv(self.encoder(images)).permute(0, 2, 3, 1).float()
        mean, log_variance = moments.chunk(2, -1)
        if noise is not None:
            if noise.shape != mean.shape:
                raise ValueError(f"noise must be (B, h, w, C) = {tuple(mean.shape)}, got {tuple(noise.shape)}")
            mean = mean + torch.exp(log_variance.clamp(-30, 20) / 2) * noise
        return mean * self.config.scale

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Tokens (B, h, w, C) -> images (B, 3, H, W), about [-1, 1]."""
        C = self.config.z_channels
        if latents.ndim != 4 or latents.shape[-1] != C:
            raise ValueError(f"latents must be (B, h, w, C={C}), got {tuple(latents.shape)}")
        z = (latents / self.config.scale).permute(0, 3, 1, 2).to(self.post_quant_conv.weight.dtype)
        return self.decoder(self.post_quant_conv(z))
