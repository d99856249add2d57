"""LlamaGen's GPT (arXiv:2406.06525), class- or text-conditional, with the official parameter names."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import DecoderLayer, pack_weight, packed_linear
from specvis_kernels.compat._layers import IN_PANELS, packed

from .interface import Nodes
from .layers import Cache, NodesReading, Packing, Reading, RMSNorm, grid_rotations, rotations_of
from .sizes import check_sizes
from .threads import embed


@dataclass(frozen=True)
class GPTConfig:
    """The numbers of a GPT. `classes` and `caption_dim` say how it is conditioned: exactly one is set."""

    dim: int
    layers: int
    heads: int
    vocabulary: int = 16384        # codes of the tokenizer
    grid: int = 16                 # an image is grid x grid tokens
    condition_tokens: int = 1      # 1 for a class, 120 for LlamaGen's captions
    classes: int | None = None     # class-conditional: class `classes` is the null class
    caption_dim: int | None = None  # text-conditional: width of the caption features (FLAN-T5-XL: 2048)
    ffn_multiple: int = 256
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self)
        if (self.classes is None) == (self.caption_dim is None):
            raise ValueError("set exactly one of classes and caption_dim, "
                             f"got classes={self.classes}, caption_dim={self.caption_dim}")
        if self.dim % self.heads or self.dim // self.heads % 4 or self.dim > 256 * self.heads:
            raise ValueError(f"dim / heads must be a multiple of 4 and at most 256, got {self.dim} / {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        return self.grid * self.grid

    @property
    def ffn_dim(self) -> int:
        return -(-int(8 * self.dim / 3) // self.ffn_multiple) * self.ffn_multiple


SIZES = {  # the published sizes: layers, heads, dim
    "B": (12, 12, 768), "L": (24, 16, 1024), "XL": (36, 20, 1280), "XXL": (48, 24, 1536), "XXXL": (48, 40, 2560),
    "1B": (22, 32, 2048), "3B": (24, 32, 3200), "7B": (32, 32, 4096),
}


def class_config(size: str, resolution: int = 256) -> GPTConfig:
    """LlamaGen's class-conditional model of a published size for `resolution` pixels a side, 16 a token."""
    layers, heads, dim = SIZES[size]
    return GPTConfig(dim, layers, heads, grid=resolution // 16, classes=1000)


def text_config(size: str, resolution: int = 256) -> GPTConfig:
    """LlamaGen's text-conditional model of a published size for `resolution` pixels a side, 16 a token."""
    layers, heads, dim = SIZES[size]
    return GPTConfig(dim, layers, heads, grid=resolution // 16, condition_tokens=120, caption_dim=2048)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, reading: Reading, layer: int) -> Tensor:
        return self.wo(reading.attend(self.wqkv(x), self.heads, layer))


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, reading: Reading, layer: int) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), reading, layer))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))

    def weights(self) -> DecoderLayer:
        attention, ffn = self.attention, self.feed_forward
        return DecoderLayer(attention.wqkv.weight, attention.wo.weight, ffn.w1.weight, ffn.w3.weight, ffn.w2.weight,
                            self.ffn_norm.weight, self.attention_norm.weight)


PACKABLE = nn.ModuleList, Block, Attention, FeedForward, nn.Linear, RMSNorm, nn.Dropout


class ClassEmbedding(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embedding_table = nn.Embedding(config.classes + 1, config.dim)  # the last row is the null class


class CaptionProjection(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedding(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.cap_proj = CaptionProjection(config)
        features = torch.randn(config.condition_tokens, config.caption_dim) / config.caption_dim ** 0.5
        self.uncond_embedding = nn.Parameter(features)


class GPT(nn.Module):
    """Tokens of an image in raster order after a class or a caption; rows of a batch are independent.

    Conditions and tokens are read by `decoder_layers` where it has a kernel. On a CPU, in float32 and bfloat16, not a
    bit depends on how many nodes are read at once, on other rows, or on the number of threads. So seed-exact methods
    draw exactly the baseline's tokens. Blocks that were changed (adapters, hooks), gradients and, on a CPU, heads whose
    size is no multiple of 16 take PyTorch's modules; `packing.why_not` says so. On CUDA w1 and w3 of a block share
    memory.
    """

    can_replay = True

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.prefix_len, self.grid, self.vocab_size = config.condition_tokens, config.grid, config.vocabulary
        self.cls_embedding = (ClassEmbedding if config.caption_dim is None else CaptionEmbedding)(config)
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.rotations = grid_rotations(config.grid, config.head_dim, config.condition_tokens, spare=1,
                                        base=config.rope_base)
        self.packing, self.output_packing = Packing(), Packing()
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "uncond" not in name:
                nn.init.normal_(parameter, std=0.02)

    def condition(self, source: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed conditions.

        Args:
            source:       class-conditional: (B,) int64 class ids
                          text-conditional: (B, S, caption_dim) caption features, padded on the left
            padding_mask: text-conditional: (B, S) bool, True where the condition is real; None: everywhere
        Returns:
            embeddings (B, S, dim), padding_mask (B, S) bool: True where the condition is real
        """
        if self.config.caption_dim is None:
            embedded = self.cls_embedding.embedding_table(source)[:, None]
        else:
            embedded = self.cls_embedding.cap_proj(source)
        if padding_mask is None:
            padding_mask = torch.ones(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
        return embedded, padding_mask

    def null_condition(self, batch: int) -> Tensor:
        """The condition that guidance is measured against: (B, S, dim) embeddings."""
        if self.config.caption_dim is None:
            null = torch.full((batch,), self.config.classes, device=self.output.weight.device)
            return self.condition(null)[0]
        features = self.cls_embedding.uncond_embedding
        return self.condition(features.expand(batch, *features.shape))[0]

    def read(self, x: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states after the last norm.

        Args:
            x:            (R, N, dim)  embeddings of conditions or tokens
            position_ids: (R or 1, N) int64  where each is in [condition | raster grid]; all positions after the
                grid are one spare position
            mask:         (R or 1, N, N) bool  which of them each may see
        Returns:
            (R, N, dim)
        """
        return self(x, Reading(self, position_ids, mask, x.dtype))

    def forward(self, x: Tensor, reading: Reading) -> Tensor:
        """Embeddings (R, N, dim) -> hidden states (R, N, dim) after the last norm."""
        packed = self.packing.get(x, self.pack_layers)
        if packed is not None and isinstance(reading, NodesReading):
            return reading.read(x, *packed)
        for layer, block in enumerate(self.layers):
            x = block(x, reading, layer)
        return self.norm(x)

    def prefill(self, condition: Tensor, padding_mask: Tensor, cache: Cache) -> Tensor:
        """Read conditions (R, S, dim) into an empty cache; hidden states (R, S, dim). See `TargetModel.prefill`."""
        cache.check(*condition.shape[:2], self.output.weight.dtype)
        return self(condition, NodesReading(self, condition_nodes(padding_mask), cache))

    def extend(self, tokens: Tensor, nodes: Nodes, cache: Cache) -> Tensor:
        """Read tokens (R, N) after what the cache holds; hidden states (R, N, dim). See `TargetModel.extend`."""
        return self(embed(self.tok_embeddings, tokens), NodesReading(self, nodes, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, dim) hidden states -> (R, N, V) float32 by `packed_linear`, otherwise of the model's dtype."""
        packed = self.output_packing.get(hidden, self.pack_output)
        return self.output(hidden) if packed is None else packed_linear(hidden, packed, self.vocab_size)

    def pack_layers(self) -> None:
        def pack():
            layers = packed((block.weights() for block in self.layers), self.norm.weight, heads=self.config.heads,
                            eps=self.config.norm_eps)
            return layers, rotations_of(self, device)

        parts, device = [self.layers, self.norm], self.output.weight.device
        fits = self.config.head_dim % 16 == 0 or device.type not in IN_PANELS
        self.packing.check(parts, PACKABLE, pack, without_bias=parts, on_gpu=True,
                           why_not=None if fits else "heads whose size is no multiple of 16")

    def pack_output(self) -> None:
        parts = [self.output]
        self.output_packing.check(parts, PACKABLE, lambda: pack_weight(self.output.weight), without_bias=parts)

    def teacher_forced(self, condition: Tensor, padding_mask: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states (B, S + L - 1, dim) at the S conditions and at all but the last of `tokens` (B, L)."""
        x = torch.cat([condition, self.tok_embeddings(tokens[:, :-1])], 1)
        position_ids = torch.arange(x.shape[1], device=x.device)
        return self.read(x, position_ids[None], condition_mask(padding_mask, x.shape[1]))

    def new_cache(self, rows: int, columns: int) -> Cache:
        self.pack_layers()
        self.pack_output()
        weight, c = self.output.weight, self.config
        return Cache(len(self.layers), rows, c.heads, columns, c.head_dim, device=weight.device, dtype=weight.dtype)


def condition_mask(padding_mask: Tensor, columns: int) -> Tensor:
    """The causal mask (B, columns, columns) bool in which a padded condition is seen by itself alone.

    padding_mask (B, S) bool: True where the condition is real.
    """
    is_real = F.pad(padding_mask, (0, columns - padding_mask.shape[1]), value=True)
    causal = torch.ones(columns, columns, dtype=torch.bool, device=padding_mask.device).tril()
    return causal & (is_real[:, None] | torch.eye(columns, dtype=torch.bool, device=padding_mask.device))


def condition_nodes(padding_mask: Tensor) -> Nodes:
    """Conditions in the first columns, that see what `condition_mask` says. padding_mask (R, S) bool"""
    R, S = padding_mask.shape
    bit = torch.arange(64, device=padding_mask.device)
    mask = F.pad(condition_mask(padding_mask, S), (0, -S % 64)).view(R, S, -1, 64)
    ancestors = (mask.long() << bit).sum(-1)
    return Nodes(torch.arange(S, device=bit.device)[None], bit.new_zeros(R), ancestors, padding_mask, S)
