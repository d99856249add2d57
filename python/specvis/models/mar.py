"""MAR (arXiv:2406.11838): masked autoregression over continuous tokens, with the official parameter names.

An encoder sees the known tokens behind `buffer` condition tokens, a decoder fills in the rest, and what it says at a
place conditions the diffusion (diffloss.py) of the token there. Attention is bidirectional: a cache is not possible.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .diffloss import NORM_EPS, DiffLoss
from .llamagen import CaptionProjection


@dataclass(frozen=True)
class MARConfig:
    """The numbers of a MAR; at most one of `classes` and `caption_dim` is set, see MAR.condition."""

    dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    diffusion_width: int
    diffusion_blocks: int
    tokens: int = 256              # of an image
    channels: int = 16             # of a token
    buffer: int = 64               # condition tokens
    classes: int | None = None     # class-conditional
    caption_dim: int | None = None  # text-conditional: width of the caption features
    mlp_ratio: float = 4.0
    noisings: int = 1000           # of the diffusion in training
    steps: int = 100               # of the denoising
    dropout: float = 0.0
    bound: float | None = None     # no token's numbers are larger, so no guess of one is taken to be; None: not known

    def __post_init__(self):
        if self.classes is not None and self.caption_dim is not None:
            raise ValueError("set at most one of classes and caption_dim, "
                             f"got classes={self.classes}, caption_dim={self.caption_dim}")
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads, got {self.dim} / {self.heads}")


SIZES = {  # the published sizes: layers of encoder and of decoder, heads, dim, blocks and width of the diffusion
    "B": (12, 12, 768, 6, 1024), "L": (16, 16, 1024, 8, 1280), "H": (20, 16, 1280, 12, 1536),
}


def class_config(size: str) -> MARConfig:
    """The class-conditional model of a published size, for ImageNet at 256 pixels and the KL-16 autoencoder."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    layers, heads, dim, blocks, width = SIZES[size]
    return MARConfig(dim, heads, layers, layers, width, blocks, classes=1000)


TINY = MARConfig(dim=32, heads=2, encoder_layers=2, decoder_layers=2, diffusion_width=32, diffusion_blocks=2,
                 tokens=16, channels=4, buffer=6, classes=10, steps=8)  # for tests


def linear_guidance(guidance: float, unknown: int, tokens: int) -> float:
    """MAR's guidance schedule: from 1 at no known token to `guidance` at all.

    `unknown` counts the tokens that the step at hand leaves unknown; the release lets it stay 1 in the last step.
    """
    return 1 + (guidance - 1) * (tokens - unknown) / tokens


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: MARConfig):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.dim, eps=NORM_EPS) for _ in range(2))
        self.attn = Attention(config.dim, config.heads)
        self.mlp = MLP(config.dim, int(config.dim * config.mlp_ratio))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class MAR(nn.Module):
    """Conditions of the tokens' diffusions, given any set of known tokens; rows of a batch are independent."""

    def __init__(self, config: MARConfig):
        super().__init__()
        self.config = c = config
        if c.classes is not None:
            self.class_emb = nn.Embedding(c.classes, c.dim)
        if c.caption_dim is not None:
            self.cap_proj = CaptionProjection(c)
        self.fake_latent = nn.Parameter(torch.zeros(1, c.dim))
        self.z_proj, self.z_proj_ln = nn.Linear(c.channels, c.dim), nn.LayerNorm(c.dim, eps=NORM_EPS)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, c.buffer + c.tokens, c.dim))
        self.encoder_blocks = nn.ModuleList(Block(c) for _ in range(c.encoder_layers))
        self.encoder_norm = nn.LayerNorm(c.dim, eps=NORM_EPS)
        self.decoder_embed = nn.Linear(c.dim, c.dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, c.dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, c.buffer + c.tokens, c.dim))
        self.decoder_blocks = nn.ModuleList(Block(c) for _ in range(c.decoder_layers))
        self.decoder_norm = nn.LayerNorm(c.dim, eps=NORM_EPS)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, c.tokens, c.dim))
        for name, parameter in self.named_parameters():
            if "." not in name or name == "class_emb.weight":
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.diffloss = DiffLoss(c.channels, c.dim, c.diffusion_width, c.diffusion_blocks, c.noisings, c.steps,
                                 c.bound)

    def condition(self, source: Tensor) -> Tensor:
        """Embed conditions.

        Args:
            source: class-conditional: (R,) int64 class ids; text: (R, S, caption_dim) caption features;
                    neither: (R, dim) or (R, S, dim), embedded elsewhere
        Returns:
            (R, dim) or (R, S, dim)
        """
        c = self.config
        if c.caption_dim is not None:
            if source.ndim != 3 or source.shape[-1] != c.caption_dim:
                raise ValueError(f"caption features must be (R, S, {c.caption_dim}), got {tuple(source.shape)}")
            return self.cap_proj(source)
        if c.classes is None:
            return source
        if source.ndim != 1 or source.dtype != torch.int64 or not ((source >= 0) & (source < c.classes)).all():
            raise ValueError(f"class ids must be int64 (R,) within 0..{c.classes - 1}, "
                             f"got {source.dtype} {tuple(source.shape)}, {source.tolist()}")
        return self.class_emb(source)

    def null_condition(self, rows: int) -> Tensor:
        """The condition that guidance is measured against: (R, dim)."""
        return self.fake_latent.expand(rows, -1)

    def forward(self, tokens: Tensor, known: Tensor, condition: Tensor, most: int | None = None) -> Tensor:
        """What conditions the diffusion of each token, given the known ones.

        Args:
            tokens:    (R, L, C)  what stands at unknown places does not matter
            known:     (R, L) bool  any set per row
            condition: (R, dim), or (R, S, dim) which is repeated over the buffer
            most:      no row knows more tokens than this (the caller answers for it): the encoder is that much
                       shorter; the result does not change. None: no row's number is looked at
        Returns:
            (R, L, dim)
        """
        c = self.config
        R, L = tokens.shape[0], c.tokens
        if tokens.shape[1:] != (L, c.channels):
            raise ValueError(f"tokens must be (R, L={L}, C={c.channels}), got {tuple(tokens.shape)}")
        if known.shape != (R, L) or known.dtype != torch.bool:
            raise ValueError(f"known must be bool (R={R}, L={L}), got {known.dtype} {tuple(known.shape)}")
        if condition.ndim == 2:
            condition = condition[:, None]
        if condition.ndim != 3 or condition.shape[::2] != (R, c.dim) or not 1 <= condition.shape[1] <= c.buffer:
            raise ValueError(f"condition must be (R={R}, {c.dim}) or (R={R}, S, {c.dim}) with S within 1..{c.buffer}, "
                             f"got {tuple(condition.shape)}")
        repeats = torch.arange(c.buffer, device=tokens.device) % condition.shape[1]
        tokens = tokens.masked_fill(~known[..., None], 0).to(self.z_proj.weight.dtype)
        x = torch.cat([condition[:, repeats].to(tokens.dtype), self.z_proj(tokens)], 1)
        x = self.z_proj_ln(x + self.encoder_pos_embed_learned)

        # known tokens first, then as many unknown ones as the longest row needs, seen by none
        places = known.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        valid = known.gather(1, places)
        columns = places[..., None].expand(-1, -1, c.dim)
        x = torch.cat([x[:, :c.buffer], x[:, c.buffer:].gather(1, columns)], 1)
        mask = F.pad(valid, (c.buffer, 0), value=True)[:, None, None]
        for block in self.encoder_blocks:
            x = block(x, mask)
        x = self.decoder_embed(self.encoder_norm(x))

        seen = torch.where(valid[..., None], x[:, c.buffer:], self.mask_token)
        x = torch.cat([x[:, :c.buffer], self.mask_token.expand(R, L, -1).scatter(1, columns, seen)], 1)
        x = x + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, c.buffer:] + self.diffusion_pos_embed_learned
