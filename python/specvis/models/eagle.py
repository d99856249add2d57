"""The EAGLE draft model for LlamaGen (arXiv:2401.15077; LANTERN's weights): one layer on the target's hidden states.

Entry j holds token j and the target's hidden state before it, and predicts the hidden state at token j, which
the target's own head turns into logits. The first entry is the second position of the target's sequence (EAGLE's
shift by one), so there is one condition entry fewer; condition entries carry token 0 beside their hidden state.
(LANTERN's release lets the draft model see the padding of short captions; here it is masked, as for the target.)
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import DecoderLayer, pack_weight, packed_linear
from specvis_kernels.compat._layers import IN_PANELS, packed, together

from .interface import Nodes
from .layers import Cache, NodesReading, Packing, Reading, RMSNorm, grid_rotations, rotations_of
from .llamagen import GPT, GPTConfig, condition_mask, condition_nodes
from .threads import cast, cat, embed

NORM_EPS = 1e-6  # LANTERN's draft model has it, whatever the target has


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, reading: Reading, layer: int) -> Tensor:
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(reading.attend(qkv, self.heads, layer))


class MLP(nn.Module):
    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, ffn_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A Llama layer without a norm before attention, as EAGLE's first layer is."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.self_attn = SelfAttention(config.dim, config.heads)
        self.mlp = MLP(config.dim, config.ffn_dim)
        self.post_attention_layernorm = RMSNorm(config.dim, NORM_EPS)

    def forward(self, x: Tensor, reading: Reading, layer: int) -> Tensor:
        x = x + self.self_attn(x, reading, layer)
        return x + self.mlp(self.post_attention_layernorm(x))

    def weights(self) -> DecoderLayer:
        a, mlp = self.self_attn, self.mlp
        qkv = a.q_proj.weight, a.k_proj.weight, a.v_proj.weight
        return DecoderLayer(together(qkv), a.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight,
                            mlp.down_proj.weight, self.post_attention_layernorm.weight, None)


class EagleHead(nn.Module):
    """Drafts for a GPT of the same config, whose output layer turns its hidden states into logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.dim)
        self.fc = nn.Linear(2 * config.dim, config.dim)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.rotations = grid_rotations(config.grid, config.head_dim, config.condition_tokens - 1, spare=1,
                                        base=config.rope_base)
        self.packing = Packing()

    def check(self, target: GPT) -> None:
        """Raise ValueError unless the head is for a GPT of the target's sizes, of its dtype and on its device."""
        sizes = ("dim", "vocabulary", "grid", "condition_tokens")
        for what, of_gpt, of_head in ((", ".join(sizes), *([getattr(c, size) for size in sizes]
                                                          for c in (target.config, self.config))),
                                      ("dtype", target.output.weight.dtype, self.fc.weight.dtype),
                                      ("device", target.output.weight.device, self.fc.weight.device)):
            if of_gpt != of_head:
                raise ValueError(f"head must have the target's {what}, {of_gpt}, got {of_head}")

    def read(self, tokens: Tensor, previous_hidden: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """Predict the target's hidden states at `tokens`. The other arguments are the arguments of GPT.read.

        Args:
            tokens:          (R, N) int64
            previous_hidden: (R, N, dim)  the hidden state before each token, the target's or the head's own
            position_ids:    (R or 1, N) int64  where each token is in [condition less one | raster grid]
        Returns:
            (R, N, dim)
        """
        return self(tokens, previous_hidden, Reading(self, position_ids, mask, previous_hidden.dtype))

    def teacher_forced(self, condition: Tensor, padding_mask: Tensor, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Predict the target's hidden states at the first L - 1 tokens. See `TransformersEagleHead.teacher_forced`."""
        prefix_len = condition.shape[1] - 1
        tokens = F.pad(tokens[:, :-1], (prefix_len, 0))  # token 0 beside a condition
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = condition_mask(padding_mask[:, :-1], tokens.shape[1])
        return self.read(tokens, hidden, position_ids, mask)[:, prefix_len:]

    def prefill(self, condition: Tensor, hidden: Tensor, padding_mask: Tensor, cache: Cache) -> None:
        """Read hidden states (R, S, dim) at conditions but for their last entries. padding_mask (R, S - 1) bool"""
        no_tokens = torch.zeros_like(padding_mask, dtype=torch.int64)
        self(no_tokens, hidden[:, :-1], NodesReading(self, condition_nodes(padding_mask), cache))

    def extend(self, tokens: Tensor, previous_hidden: Tensor, nodes: Nodes, cache: Cache) -> Tensor:
        """Predict after what the cache holds. See `DraftModel.extend`."""
        return self(tokens, previous_hidden, NodesReading(self, nodes, cache))

    def forward(self, tokens: Tensor, previous_hidden: Tensor, reading: Reading) -> Tensor:
        x = cat([embed(self.embed_tokens, tokens), previous_hidden], -1)
        packed = self.packing.get(x, self.pack)
        if packed is not None and isinstance(reading, NodesReading):
            fc, bias, layers, rotations = packed
            x = self.fc(x) if fc is None else cast(packed_linear(x, fc, self.config.dim, bias), x.dtype)
            return reading.read(x, layers, rotations)
        x = self.fc(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, reading, index)
        return x

    def pack(self) -> None:
        def pack():
            layers = packed((layer.weights() for layer in self.layers), None, heads=self.config.heads, eps=NORM_EPS)
            return pack_weight(self.fc.weight) if on_cpu else None, self.fc.bias.detach().float(), layers, rotations_of(
                self, self.fc.weight.device)

        on_cpu = self.fc.weight.device.type in IN_PANELS
        fits = (self.config.head_dim % 16 == 0 or not on_cpu) and self.fc.bias is not None
        parts = [self.fc, self.layers] if fits else []
        self.packing.check(parts, (nn.ModuleList, EagleLayer, SelfAttention, MLP, nn.Linear, RMSNorm), pack,
                           without_bias=[self.layers], on_gpu=True)

    def new_cache(self, rows: int, columns: int) -> Cache:
        self.pack()
        weight, c = self.fc.weight, self.config
        return Cache(len(self.layers), rows, c.heads, columns, c.head_dim, device=weight.device, dtype=weight.dtype)
