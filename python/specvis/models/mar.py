"""MAR (arXiv:2406.11838): masked autoregression over continuous tokens, with the official parameter names.

An encoder reads `buffer` condition tokens and the known tokens. A decoder fills in the rest: its output z at a position
conditions the diffusion (diffloss.py) of the token there. Attention is bidirectional, so there can be no cache.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import TransformerBlock, pack_blocks, pack_weight, packed_linear, transformer_blocks

from .diffloss import NORM_EPS, DiffLoss
from .layers import Packing
from .llamagen import CaptionProjection
from .sizes import check_sizes
from .threads import cast, cat, in_parts, layer_norm


@dataclass(frozen=True)
class MARConfig:
    """The numbers of a MAR. At most one of `classes` and `caption_dim` is set, see MAR.condition."""

    dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    diffusion_width: int
    diffusion_blocks: int
    tokens: int = 256                        # of an image
    channels: int = 16                       # numbers of a token
    buffer: int = 64                         # condition tokens
    classes: int | None = None               # for a class-conditional model
    caption_dim: int | None = None           # for a text-conditional model: the width of the caption features
    mlp_ratio: float = 4.0
    num_train_timesteps: int = 1000          # of the diffusion
    num_sampling_steps: int = 100            # of denoising
    dropout: float = 0.0
    clip_sample_range: float | None = None   # a denoising step clamps its predicted x_0 to this; None: it does not

    def __post_init__(self):
        check_sizes(self)
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


def scheduled_guidance(guidance: float, num_unknown: Tensor, num_tokens: int, schedule: str = "linear") -> Tensor:
    """The guidance of tokens that are drawn together, by how many are unknown after them, `num_unknown` (any shape).

    "linear" grows from 1 where no token is known to `guidance` where all are. "released" is the release's "linear":
    its last iteration counts one unknown token, and has 1 + (guidance - 1) (L - 1) / L. "constant" is `guidance`.
    """
    if schedule == "constant":
        return torch.full_like(num_unknown, guidance, dtype=torch.float32)
    if schedule == "released":
        num_unknown = num_unknown.clamp(min=1)
    return 1 + (guidance - 1) * (num_tokens - num_unknown) / num_tokens


class Attention(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)  # training on a CPU takes another, see train/mar.py

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None, queries: Tensor | None = None) -> Tensor:
        """queries (R, n, dim): of those entries of x (R, N, dim) that are wanted; None: all"""
        if queries is None:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        else:
            dim, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            q = F.linear(queries, weight[:dim], bias[:dim]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k, v = F.linear(x, weight[dim:], bias[dim:]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, config: MARConfig):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.dim, eps=NORM_EPS) for _ in range(2))
        self.attn = Attention(config.dim, config.heads)
        self.mlp = MLP(config.dim, int(config.dim * config.mlp_ratio))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, wanted: Tensor | None = None) -> Tensor:
        """x (R, N, dim) -> (R, N, dim), or at the entries `wanted` (R, n) int64 alone (R, n, dim)."""
        y = self.norm1(x)
        if wanted is None:
            x = x + self.dropout(self.attn(y, mask))
        else:
            x = entries_at(x, wanted) + self.dropout(self.attn(y, mask, entries_at(y, wanted)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def weights(self) -> TransformerBlock:
        parts = self.norm1, self.attn.qkv, self.attn.proj, self.norm2, self.mlp.fc1, self.mlp.fc2
        return TransformerBlock(*(tensor for part in parts for tensor in (part.weight, part.bias)))


PACKABLE = nn.ModuleList, Block, Attention, MLP, nn.LayerNorm, nn.Linear, nn.Dropout


def entries_at(x: Tensor, index: Tensor) -> Tensor:
    """x (R, N, dim) at index (R, n) int64: (R, n, dim)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


class MAR(nn.Module):
    """The z of each token's diffusion, given any set of known tokens. The rows of a batch are independent."""

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
        self.diffloss = DiffLoss(c.channels, c.dim, c.diffusion_width, c.diffusion_blocks, c.num_train_timesteps,
                                 c.num_sampling_steps, c.clip_sample_range)
        self.packing = Packing()

    def pack(self) -> None:
        """Copy weights for the CPU's kernels, where those can read them. A decoding begins with it."""
        self.diffloss.pack()
        self.pack_blocks()

    def pack_blocks(self) -> None:
        def pack():
            blocks = [pack_blocks([block.weights() for block in stack], (norm.weight, norm.bias), heads=c.heads,
                                  eps=NORM_EPS) for stack, norm in zip(stacks, norms)]
            linears = [(pack_weight(linear.weight), c.dim, linear.bias.float()) for linear in linear_layers]
            return *blocks, *linears

        c, norms, linear_layers = self.config, [self.encoder_norm, self.decoder_norm], [self.z_proj, self.decoder_embed]
        stacks = [self.encoder_blocks, self.decoder_blocks]
        fits = all(map(len, stacks)) and c.dim // c.heads <= 256 and c.channels % 2 == 0 and all(
            size % 16 == 0 for size in (c.dim, int(c.dim * c.mlp_ratio))) and all(
            module.bias is not None for module in (*linear_layers, self.z_proj_ln))
        parts = [*stacks, *norms, *linear_layers, self.z_proj_ln] if fits else []
        self.packing.check(parts, PACKABLE, pack, multiple=2)

    def condition(self, source: Tensor) -> Tensor:
        """Embed conditions.

        Args:
            source: (R,) int64 class ids, or (R, S, caption_dim) caption features; where the config has neither,
                    (R, dim) or (R, S, dim), which is returned as it is
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

    def null_condition(self, num_rows: int) -> Tensor:
        """(R, dim): the condition that guidance leads away from."""
        return self.fake_latent.expand(num_rows, -1)

    def checked(self, tokens: Tensor, is_known: Tensor, condition: Tensor) -> Tensor:
        """The condition as (R, S, dim). ValueError for inputs of `forward` that have other shapes."""
        c = self.config
        R, L = tokens.shape[0], c.tokens
        if tokens.shape[1:] != (L, c.channels):
            raise ValueError(f"tokens must be (R, L={L}, C={c.channels}), got {tuple(tokens.shape)}")
        if is_known.shape != (R, L) or is_known.dtype != torch.bool:
            raise ValueError(f"is_known must be bool (R={R}, L={L}), got {is_known.dtype} {tuple(is_known.shape)}")
        if condition.ndim == 2:
            condition = condition[:, None]
        if condition.ndim != 3 or condition.shape[::2] != (R, c.dim) or not 1 <= condition.shape[1] <= c.buffer:
            raise ValueError(f"condition must be (R={R}, {c.dim}) or (R={R}, S, {c.dim}) with S within 1..{c.buffer}, "
                             f"got {tuple(condition.shape)}")
        return condition

    def forward(self, tokens: Tensor, is_known: Tensor, condition: Tensor, max_known: int | None = None,
                wanted: Tensor | None = None) -> Tensor:
        """The z of each token's diffusion, given the known tokens.

        Args:
            tokens:    (R, L, C)    the values at unknown positions do not matter
            is_known:  (R, L) bool  any set in each row
            condition: (R, dim), or (R, S, dim), which is repeated over the buffer
            max_known: no row knows more tokens than this, which is not checked. The encoder gets that much shorter,
                       and the result stays the same. None: all L
            wanted:    (R, n) int64  the positions whose z is wanted, to which the last block is kept; None: all
        Returns:
            (R, L, dim) or (R, n, dim)
        """
        c, R, condition = self.config, tokens.shape[0], self.checked(tokens, is_known, condition)
        # The encoder reads the known tokens. Shorter rows are padded with unknown ones, which the mask hides.
        positions = is_known.byte().argsort(dim=1, descending=True, stable=True)[:, :max_known]
        padding_mask = is_known.gather(1, positions)  # True where a token is known
        read = entries_at(tokens, positions).masked_fill(~padding_mask[..., None], 0).to(self.z_proj.weight.dtype)
        packed = self.packing.get(read, self.pack_blocks)
        if packed is not None:
            encoder, decoder, z_proj, decoder_embed = packed
            z = cast(packed_linear(read, *z_proj), read.dtype)
        else:
            z = self.z_proj(read)
        S, dtype = condition.shape[1], torch.promote_types(read.dtype, z.dtype)  # under autocast z has another dtype
        condition = condition.to(read.dtype).to(dtype)
        buffer = [condition.expand(-1, c.buffer, -1)] if S == 1 else [
            *[condition] * (c.buffer // S), condition[:, : c.buffer % S]]
        x, columns = cat([*buffer, z.to(dtype)], 1), self.after_buffer(c.buffer + positions)
        if packed is not None:
            norm = partial(layer_norm, self.z_proj_ln)
            x = in_parts(partial(self.encoder_input, norm), c.dim, x.flatten(0, 1), columns.flatten()).view(x.shape)
        else:
            x = self.encoder_input(self.z_proj_ln, x, columns)

        mask = F.pad(padding_mask, (c.buffer, 0), value=True)
        if packed is not None:
            x = transformer_blocks(x, encoder, key_mask=mask)
            x = cast(packed_linear(x, *decoder_embed), x.dtype)
        else:
            for block in self.encoder_blocks:
                x = block(x, mask[:, None, None])
            x = self.decoder_embed(self.encoder_norm(x))

        # The decoder reads them where they are, and the mask token everywhere else.
        dtype = torch.promote_types(x.dtype, self.mask_token.dtype)
        sources = cat([x.to(dtype), self.mask_token.to(dtype).expand(R, 1, -1)], 1)
        ranks = c.buffer - 1 + is_known.cumsum(1)
        index = self.after_buffer(torch.where(is_known, ranks, x.shape[1]).clamp(max=x.shape[1]))
        index = index + sources.shape[1] * torch.arange(R, device=index.device)[:, None]
        columns = torch.arange(index.shape[1], device=index.device).repeat(R)
        x = in_parts(partial(self.decoder_input, sources.flatten(0, 1)), c.dim, index.flatten(), columns)
        x = x.view(*index.shape, c.dim)
        columns = None if wanted is None else c.buffer + wanted
        if packed is not None:
            x = transformer_blocks(x, decoder, wanted=columns)
        else:
            for block in self.decoder_blocks if wanted is None else self.decoder_blocks[:-1]:
                x = block(x)
            if wanted is not None:
                x = self.decoder_blocks[-1](x, None, columns) if self.decoder_blocks else entries_at(x, columns)
            x = self.decoder_norm(x)
        if wanted is None:
            return x[:, c.buffer:] + self.diffusion_pos_embed_learned
        return in_parts(self.output, c.dim, x.flatten(0, 1), wanted.flatten()).view(x.shape)

    def after_buffer(self, index: Tensor) -> Tensor:
        """index (R, n), and before it the numbers of the buffer's entries"""
        buffer = torch.arange(self.config.buffer, device=index.device)
        return torch.cat([buffer.expand(len(index), -1), index], 1)

    def encoder_input(self, norm: Callable[[Tensor], Tensor], x: Tensor, columns: Tensor) -> Tensor:
        return norm(x + F.embedding(columns, self.encoder_pos_embed_learned[0]))

    def decoder_input(self, sources: Tensor, index: Tensor, columns: Tensor) -> Tensor:
        return F.embedding(index, sources) + F.embedding(columns, self.decoder_pos_embed_learned[0])

    def output(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + F.embedding(positions, self.diffusion_pos_embed_learned[0])
