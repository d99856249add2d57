"""decoder_layers: all layers of a Llama-shaped decoder read the nodes of draft trees, in one call."""
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check, check_count, check_dims, check_eps, for_each, integers
from ._define import define
from .packed_linear import DTYPES, PANEL, pack_weight, padded, unpacked
from .rotate_into_cache import rotated
from .tree_attention import _oracle as attend


class DecoderLayer(NamedTuple):
    """The weights of one layer, as a model has them: all of one dtype, float32 or bfloat16.

    Args:
        qkv:            ((H + 2 Hkv) D, E)  of queries, keys and values, in this order
        out:            (E, H D)
        gate, up:       (F, E)
        down:           (E, F)
        ffn_norm:       (E,)
        attention_norm: (E,)  None: attention reads x as it is, as in EAGLE's head
        qkv_bias:       ((H + 2 Hkv) D,)
        out_bias:       (E,)
        head_norms:     (H + Hkv, D) each: scale and shift of the LayerNorms of q and k
    """

    qkv: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    ffn_norm: Tensor
    attention_norm: Tensor | None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    head_norms: tuple[Tensor, Tensor] | None = None


class PackedLayers(NamedTuple):
    """Layers for `decoder_layers`, as `pack_layers` makes them: a copy, which doubles the memory of the weights."""

    matrices: Tensor          # (L, m)  float32 or bfloat16
    vectors: Tensor           # (L, v)  float32
    last_norm: Tensor | None  # (E,)    float32
    heads: int                # H
    ffn_dim: int              # F
    eps: float
    head_eps: float
    has_first_norm: bool
    has_head_norms: bool
    rotates_halves: bool


def pack_layers(layers: Sequence[DecoderLayer], last_norm: Tensor | None = None, *, heads: int, eps: float = 1e-5,
                head_eps: float = 1e-5, rotates_halves: bool = False) -> PackedLayers:
    """Copy the weights of a decoder's layers for `decoder_layers`. Changes of the weights do not reach the copy.

    Args:
        layers:         from the first to the last, all of equal sizes
        last_norm:      (E,)  the RMSNorm after the last layer; None: no such norm
        heads:          H, how many heads the queries have
        eps, head_eps:  of the RMSNorms (in transformers `rms_norm_eps`, often 1e-6), and of the LayerNorms of q and k
        rotates_halves: a rotation turns entries i and i + D / 2, as in transformers; else 2 i and 2 i + 1, as in
                        LlamaGen

    Returns:
        layers:         the copy, in the order in which the kernel reads it

    Raises:
        ValueError: the sizes or dtypes do not fit together, or E or D is no multiple of 16
    """
    heads = check_count("heads", heads, 1)
    if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
        raise ValueError("layers must be DecoderLayers, at least one")
    first = layers[0]
    (Q, E), (_, HD), (ffn_dim, _) = (check_dims(f"layers[0].{name}", getattr(first, name), "oi")
                                     for name in ("qkv", "out", "gate"))
    if first.qkv.dtype not in DTYPES:
        raise ValueError(f"layers must be float32 or bfloat16, got {str(first.qkv.dtype)[6:]}")
    D = HD // heads
    if E % 16 or D % 16 or HD != heads * D or not 0 < D <= 256:
        raise ValueError(f"layers must have E and D that are multiples of 16, and D of at most 256, got E={E}, D={D}")
    heads_of_kv = (Q // D - heads) // 2
    if heads_of_kv < 1 or Q != (heads + 2 * heads_of_kv) * D or heads % heads_of_kv:
        raise ValueError(f"layers[0].qkv must have (H + 2 Hkv) D outputs, with H={heads} a multiple of Hkv, and D={D}, "
                         f"got {Q}")
    if last_norm is not None:
        check("last_norm", last_norm, DTYPES, like=first.qkv, E=E)
    sizes = {"qkv": {"Q": Q, "E": E}, "out": {"E": E, "HD": HD}, "gate": {"F": ffn_dim, "E": E},
             "up": {"F": ffn_dim, "E": E}, "down": {"E": E, "F": ffn_dim}, "ffn_norm": {"E": E},
             "attention_norm": {"E": E}, "qkv_bias": {"Q": Q}, "out_bias": {"E": E}}

    def pack(number: int, layer: DecoderLayer) -> tuple[Tensor, Tensor]:
        for name, size in sizes.items():
            if getattr(layer, name) is not None or name not in ("attention_norm", "qkv_bias", "out_bias"):
                check(f"layers[{number}].{name}", getattr(layer, name), first.qkv.dtype, like=first.qkv, **size)
        if layer.head_norms is not None and (not isinstance(layer.head_norms, tuple) or len(layer.head_norms) != 2):
            raise ValueError(f"layers[{number}].head_norms must be two tensors, scale and shift, or None")
        for part in layer.head_norms or ():
            check(f"layers[{number}].head_norms", part, first.qkv.dtype, like=first.qkv, heads=heads + heads_of_kv, D=D)
        gate_up = torch.stack([pack_weight(layer.gate), pack_weight(layer.up)], 1)  # panels take turns
        down = F.pad(layer.down.detach(), (0, padded(ffn_dim) - ffn_dim))
        zeros = layer.out.new_zeros
        vectors = [zeros(E) if layer.attention_norm is None else layer.attention_norm, layer.ffn_norm,
                   zeros(E) if layer.out_bias is None else layer.out_bias,
                   zeros(Q) if layer.qkv_bias is None else layer.qkv_bias, *(layer.head_norms or ())]
        matrices = pack_weight(layer.qkv), pack_weight(layer.out), gate_up, pack_weight(down)
        return torch.cat([m.flatten() for m in matrices]), torch.cat([v.detach().float().flatten() for v in vectors])

    matrices, vectors = None, []
    for number, layer in enumerate(layers):
        if (layer.attention_norm is None, layer.head_norms is None) != (first.attention_norm is None,
                                                                        first.head_norms is None):
            raise ValueError("layers must all have equal norms")
        packed, of_layer = pack(number, layer)
        if matrices is None:
            matrices = packed.new_empty(len(layers), len(packed))
        matrices[number] = packed
        vectors.append(of_layer)
    last_norm = None if last_norm is None else last_norm.detach().float().clone()
    return PackedLayers(matrices, torch.stack(vectors), last_norm, heads, ffn_dim, eps, head_eps,
                        first.attention_norm is not None, first.head_norms is not None, rotates_halves)


def decoder_layers(x: Tensor, layers: PackedLayers, kv_cache: Tensor, lengths: Tensor, ancestors: Tensor,
                   positions: Tensor, rotations: Tensor, *, first_node: int = 0, key_mask: Tensor | None = None,
                   backend: str | None = None) -> Tensor:
    """Read nodes of draft trees by all layers of a Llama-shaped decoder. This writes to the cache.

    Each layer is

        q, k, v = RMSNorm(x) W_qkv;   q and k are turned by their positions' rotations;   k and v go into the cache
        x = x + Attention(q, k, v) W_out
        x = x + (silu(y W_gate) * y W_up) W_down,   y = RMSNorm(x)

    Node n of request b is in column lengths[b] + first_node + n, and sees the columns that `tree_attention` explains.
    Grouped keys, biases, LayerNorms of q and k, and no first norm are options of the layers. A column outside the cache
    is neither written nor seen. Row r belongs to request r % B.

    One call replaces some hundred operations, whose dispatch takes most of a CPU's time when few rows are read. It is
    for few rows: for a thousand PyTorch's products are as quick. There is a kernel for CPUs only; elsewhere a decoder's
    own modules are quicker than the oracle, which is for comparison.

    Products have operands of x's dtype; their sums, the residual stream and all other numbers are float32. On a CPU the
    kernel computes each output in an order that depends on the model alone: no bit depends on how many nodes are read
    at once, on other rows, or on the number of threads.

    Args:
        x:          (R, N, E)             float32 or bfloat16   embeddings
        layers:     of L layers           from `pack_layers`, of x's dtype
        kv_cache:   (L, R, T, 2, Hkv, D)  as x   written to, contiguous
        lengths:    (B,) int32 or int64          the column of node 0; R is a multiple of B
        ancestors:  (B, N, W) or (1, N, W) int64   words of bits for the nodes that are read, from `tree_links`: a
                                                   node's own bit is first_node + n
        positions:  (Y, N) int32 or int64        the row of `rotations` of each node; R is a multiple of Y. A
                                                 position outside the table takes its first or last row
        rotations:  (P, D / 2, 2) float32        cosine and sine by which pairs of entries are turned
        first_node: how many nodes of the tree were read before
        key_mask:   (R, S) bool                  which of the first columns are seen; None: all
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        hidden:     (R, N, E)  as x, after the last norm

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> w = torch.zeros(16, 16)                              # E = F = D = 16, one head: nothing is added to x
        >>> layers = pack_layers([DecoderLayer(w.repeat(3, 1), w, w, w, w, torch.ones(16), None)], heads=1)
        >>> chain = tree_links(torch.tensor([[-1, 0]], dtype=torch.int32)).ancestors
        >>> cache = torch.zeros(1, 1, 4, 2, 1, 16)
        >>> decoder_layers(torch.ones(1, 2, 16), layers, cache, torch.tensor([1]), chain, torch.tensor([[1, 2]]),
        ...                torch.ones(4, 8, 2))[0, :, 0]
        tensor([1., 1.])
    """
    R, N, E = check_dims("x", x, "RNE", DTYPES)
    if not isinstance(layers, PackedLayers):
        raise ValueError(f"layers must be PackedLayers, from pack_layers, got {type(layers).__name__}")
    L, m = check_dims("layers.matrices", layers.matrices, "Lm")
    check("layers.matrices", layers.matrices, x.dtype, like=x, L=L, m=m)
    T, Hkv, D = (kv_cache.shape[d] for d in (2, 4, 5)) if check_dims("kv_cache", kv_cache, "LRT2GD") else ()
    check("kv_cache", kv_cache, x.dtype, like=x, L=L, R=R, T=T, two=2, Hkv=Hkv, D=D)
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous, since it is written to")
    B, = check_dims("lengths", lengths, "B")
    lengths = integers("lengths", lengths, torch.int64, x, B=B)
    W = check_dims("ancestors", ancestors, "BNW")[2]
    check("ancestors", ancestors, torch.int64, x, may_be_one=True, B=B, N=N, W=W)
    Y = check_dims("positions", positions, "YN")[0]
    positions = integers("positions", positions, torch.int64, x, Y=Y, N=N)
    P = check_dims("rotations", rotations, "Pd2")[0]
    check("rotations", rotations, torch.float32, like=x, P=P, pairs=D // 2, two=2)
    first_node = check_count("first_node", first_node, 0)
    if N < 1 or T < 1 or P < 1 or Y < 1 or R % Y:
        raise ValueError(f"there must be a node, a column, a rotation, and rows a multiple of the rows of positions, "
                         f"got N={N}, T={T}, P={P}, Y={Y} and R={R}")
    if R % B if B else R:
        raise ValueError(f"the rows of x must be a multiple of B={B}, got {R}")
    if first_node + N > 64 * W:
        raise ValueError(f"ancestors must have a word for each 64 nodes, got W={W} for {first_node + N} nodes")
    H = check_count("layers.heads", layers.heads, 1)
    if Hkv < 1 or H % Hkv or matrix_sizes(E, H, Hkv, D, check_count("layers.ffn_dim", layers.ffn_dim, 1))[-1] != m:
        raise ValueError(f"layers must be packed for E={E}, Hkv={Hkv} and D={D} as x and kv_cache have it")
    v = sum(vector_sizes(E, H, Hkv, D, layers.has_head_norms))
    check("layers.vectors", layers.vectors, torch.float32, like=x, L=L, v=v)
    if layers.last_norm is not None:
        check("layers.last_norm", layers.last_norm, torch.float32, like=x, E=E)
    check_eps("layers.eps", layers.eps)
    check_eps("layers.head_eps", layers.head_eps)
    if key_mask is not None:
        check("key_mask", key_mask, torch.bool, like=x, R=R, S=check_dims("key_mask", key_mask, "RS")[1])
    return _call(backend, x, *layers[:3], kv_cache, lengths, for_each(ancestors, B), positions, rotations, key_mask,
                 *layers[3:5], first_node, *layers[5:])


def matrix_sizes(E: int, H: int, Hkv: int, D: int, ffn_dim: int) -> list[int]:
    """Where qkv, out, gate with up, and down end in a layer's packed matrices."""
    F_ = padded(ffn_dim)
    return [*accumulate([padded((H + 2 * Hkv) * D) * E, padded(E) * H * D, 2 * F_ * E, padded(E) * F_])]


def vector_sizes(E: int, H: int, Hkv: int, D: int, has_head_norms: bool) -> list[int]:
    """How many numbers a layer's norms and biases are, in their order in `PackedLayers.vectors`."""
    n = (H + Hkv) * D * has_head_norms
    return [E, E, E, (H + 2 * Hkv) * D, n, n]


def _oracle(x: Tensor, matrices: Tensor, vectors: Tensor, last_norm: Tensor | None, kv_cache: Tensor, lengths: Tensor,
            ancestors: Tensor, positions: Tensor, rotations: Tensor, key_mask: Tensor | None, heads: int, ffn_dim: int,
            first_node: int, eps: float, head_eps: float, has_first_norm: bool, has_head_norms: bool,
            rotates_halves: bool):
    R, N, E = x.shape
    L, _, T, _, G, D = kv_cache.shape
    B, H = len(lengths), heads
    ends, padded_F = matrix_sizes(E, H, G, D, ffn_dim), padded(ffn_dim)
    first = torch.where(lengths < 0, T, lengths.clamp(max=T))[:, None] + first_node
    column = (first + torch.arange(N, device=x.device)).clamp(max=T).repeat(R // max(B, 1), 1)
    row = torch.arange(R, device=x.device)[:, None]

    def times(x, weight, outputs, K):  # operands of the dtype, sums in float32
        return x.float() @ unpacked(weight, outputs, K).float().T

    def normed(x, weight):
        return x if weight is None else F.rms_norm(x, (E,), weight, eps)

    dtype, stream = x.dtype, x.float()
    for layer, (matrix, vector) in enumerate(zip(matrices, vectors)):
        qkv, out, gate_up, down = (matrix[begin:end] for begin, end in zip([0, *ends], ends))
        Q = (H + 2 * G) * D
        first_norm, ffn_norm, out_bias, qkv_bias, scale, shift = vector.split(vector_sizes(E, H, G, D, has_head_norms))
        y = normed(stream, first_norm if has_first_norm else None).to(dtype)
        y = (times(y, qkv, Q, E) + qkv_bias).view(R, N, H + 2 * G, D)
        qk, v = y[:, :, :H + G], y[:, :, H + G:]
        if has_head_norms:
            qk = F.layer_norm(qk, (D,), eps=head_eps) * scale.view(-1, D) + shift.view(-1, D)
        qk = rotated(qk, positions, rotations, rotates_halves)
        entries = torch.stack([qk[:, :, H:], v], 2).to(dtype)
        longer = F.pad(kv_cache[layer], (0, 0, 0, 0, 0, 0, 0, 1))  # its last column takes what is outside
        longer[row, column] = entries
        kv_cache[layer].copy_(longer[:, :T])
        k_cache, v_cache = kv_cache[layer].unbind(2)
        attended = attend(qk[:, :, :H].to(dtype), k_cache, v_cache, lengths, ancestors, key_mask, D ** -0.5)
        stream = stream + times(attended.flatten(2), out, E, H * D) + out_bias
        y = normed(stream, ffn_norm).to(dtype)
        gate, up = (times(y, part, padded_F, E) for part in gate_up.view(-1, 2, E * PANEL).unbind(1))
        stream = stream + times((F.silu(gate) * up).to(dtype), down, E, padded_F)
    return normed(stream, last_norm).to(dtype)


_call = define("decoder_layers", oracle=_oracle, meta=lambda x: x.new_empty(x.shape), writes=("kv_cache",), batch=None)
