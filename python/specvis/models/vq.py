"""LlamaGen's VQ-16 image tokenizer (arXiv:2406.06525), with the official parameter names."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .sizes import check_sizes


@dataclass(frozen=True)
class VQConfig:
    """The numbers of a tokenizer; the defaults are VQ-16. A token stands for `stride` x `stride` pixels."""

    channels: int = 128
    decoder_channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2       # a level; the decoder has one more
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_dim: int = 8
    groups: int = 32               # of the group norms
    patch: int = 1                 # blocks of patch x patch pixels are folded into channels first; VQ-16: 1

    def __post_init__(self):
        check_sizes(self)

    @property
    def stride(self) -> int:
        return self.patch * 2 ** (len(self.multipliers) - 1)


class ResBlock(nn.Module):
    def __init__(self, inside: int, outside: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inside, eps=1e-6)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outside, eps=1e-6)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        if inside != outside:
            self.nin_shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).flatten(2).transpose(1, 2) for project in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unflatten(2, x.shape[2:])
        return x + self.proj_out(h)


class Resample(nn.Module):
    """Half the size by a strided convolution, or twice the size by repetition and a convolution."""

    def __init__(self, channels: int, down: bool):
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(channels, channels, 3, **({"stride": 2} if down else {"padding": 1}))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0))


class Level(nn.Module):
    """The blocks of one size; `resample` ("downsample", "upsample" or None) leads to the next."""

    BLOCKS = "res"  # the official name of the list of blocks

    def __init__(self, inside: int, outside: int, blocks: int, groups: int, attention: bool, resample: str | None):
        super().__init__()
        setattr(self, self.BLOCKS, nn.ModuleList(ResBlock(outside if i else inside, outside, groups)
                                                 for i in range(blocks)))
        self.attn = nn.ModuleList(AttnBlock(outside, groups) for _ in range(blocks if attention else 0))
        if resample:
            setattr(self, resample, Resample(outside, resample == "downsample"))
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(getattr(self, self.BLOCKS)):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        return getattr(self, self.resample)(x) if self.resample else x


def middle(channels: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels, groups), AttnBlock(channels, groups),
                          ResBlock(channels, channels, groups)])


class Encoder(nn.Module):
    def __init__(self, c: VQConfig):
        super().__init__()
        widths = [c.channels * m for m in c.multipliers]
        self.conv_in = nn.Conv2d(3 * c.patch ** 2, c.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, (inside, outside) in enumerate(zip([c.channels, *widths], widths)):
            last = i == len(widths) - 1
            self.conv_blocks.append(Level(inside, outside, c.residual_blocks, c.groups, attention=last,
                                          resample=None if last else "downsample"))
        self.mid = middle(widths[-1], c.groups)
        self.norm_out = nn.GroupNorm(c.groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], c.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in [*self.conv_blocks, *self.mid]:
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, c: VQConfig):
        super().__init__()
        widths = [c.decoder_channels * m for m in reversed(c.multipliers)]
        self.conv_in = nn.Conv2d(c.z_channels, widths[0], 3, padding=1)
        self.mid = middle(widths[0], c.groups)
        self.conv_blocks = nn.ModuleList()
        for i, (inside, outside) in enumerate(zip([widths[0], *widths], widths)):
            self.conv_blocks.append(Level(inside, outside, c.residual_blocks + 1, c.groups, attention=i == 0,
                                          resample=None if i == len(widths) - 1 else "upsample"))
        self.norm_out = nn.GroupNorm(c.groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 3 * c.patch ** 2, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        z = self.conv_in(z)
        for block in [*self.mid, *self.conv_blocks]:
            z = block(z)
        return self.conv_out(F.silu(self.norm_out(z)))


def check_images(images: Tensor, stride: int) -> None:
    """Raise ValueError unless the images have three channels, and sides that are multiples of `stride`."""
    if images.ndim != 4 or images.shape[1] != 3 or images.shape[2] % stride or images.shape[3] % stride:
        raise ValueError(f"images must be (B, 3, H, W), H and W multiples of {stride}, got {tuple(images.shape)}")


class Codes(nn.Module):
    def __init__(self, c: VQConfig):
        super().__init__()
        self.embedding = nn.Embedding(c.codebook_size, c.codebook_dim)
        self.register_buffer("codebook_used", torch.zeros(65536))  # in the official checkpoints; not read


class VQ(nn.Module):
    """Images (B, 3, H, W) in [-1, 1] <-> tokens (B, H/stride * W/stride) in raster order."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder, self.quantize = Encoder(config), Decoder(config), Codes(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    def codebook(self) -> Tensor:
        """The codes as they are used: (V, D) float32, rows of length 1."""
        return F.normalize(self.quantize.embedding.weight.float(), dim=-1)

    def latents(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, h, w, D) float32 of length 1, before quantization."""
        check_images(images, self.config.stride)
        z = self.quant_conv(self.encoder(F.pixel_unshuffle(images, self.config.patch)))
        return F.normalize(z.permute(0, 2, 3, 1).float(), dim=-1)

    def encode(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> tokens (B, h * w) int64: the nearest codes."""
        return (self.latents(images).flatten(1, 2) @ self.codebook().T).argmax(-1)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """(B, h, w, D) -> images (B, 3, H, W), about [-1, 1]."""
        z = self.post_quant_conv(latents.permute(0, 3, 1, 2).to(self.post_quant_conv.weight.dtype))
        return F.pixel_shuffle(self.decoder(z), self.config.patch)

    def decode(self, tokens: Tensor) -> Tensor:
        """Tokens (B, n * n) int64 of square images -> (B, 3, H, W) clamped to [-1, 1]."""
        side = round(tokens.shape[-1] ** 0.5) if tokens.ndim == 2 else 0
        if tokens.ndim != 2 or side * side != tokens.shape[1]:
            raise ValueError(f"tokens must be (B, n * n), got {tuple(tokens.shape)}")
        return self.decode_latents(self.codebook()[tokens].unflatten(1, (side, side))).clamp(-1, 1)
