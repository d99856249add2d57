"""decoder_layers: all layers of a Llama-shaped decoder read the nodes of draft trees, in one call."""
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import FLOATS, check, check_count, check_dims, check_eps, for_each, integers
from ._define import define
from .packed_linear import DTYPES, PANEL, pack_weight, padded, unpacked
from .rotate_into_cache import check_head_norms, check_rotations, head_normed, rotated
from .tree_attention import _oracle as attend


class DecoderLayer(NamedTuple):
    """The weights of one layer, as a model has them: all of one dtype.

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
        attention_out_norm, ffn_out_norm: (E,)  of what attention and the gated layer give, before it is added. Not in
                        a CPU's kernel
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
    attention_out_norm: Tensor | None = None
    ffn_out_norm: Tensor | None = None


class PackedLayers(NamedTuple):
    """Layers for `decoder_layers`, as `pack_layers` makes them."""

    matrices: list[Tensor]    # one (L, m), in panels; or qkv, out, gate above up, and down of each layer
    vectors: list[Tensor]     # one (L, v) float32; or eight of each layer, where (0,) stands for what it has not
    last_norm: Tensor | None  # (E,)  of the vectors' dtype
    heads: int                # H
    ffn_dim: int              # F
    eps: float
    head_eps: float
    has_first_norm: bool
    has_head_norms: bool
    rotates_halves: bool


def pack_layers(layers: Sequence[DecoderLayer], last_norm: Tensor | None = None, *, heads: int, eps: float = 1e-5,
                head_eps: float = 1e-5, rotates_halves: bool = False, in_panels: bool | None = None) -> PackedLayers:
    """Put the weights of a decoder's layers together for `decoder_layers`.

    A CPU's kernel reads them in panels: a copy, which takes as much memory again, and which changes of the weights do
    not reach. Elsewhere they are read where they are. Only `gate` and `up` become one tensor, which is a view if they
    follow each other in memory (`join_weights`), and else a copy.

    Args:
        layers:         from the first to the last, all of equal sizes
        last_norm:      (E,)  the RMSNorm after the last layer; None: no such norm
        heads:          H, how many heads the queries have
        eps, head_eps:  of the RMSNorms (in transformers `rms_norm_eps`, often 1e-6), and of the LayerNorms of q and k
        rotates_halves: a rotation turns entries i and i + D / 2, as in transformers; else 2 i and 2 i + 1, as in
                        LlamaGen
        in_panels:      whether the weights are copied in the order of a CPU's kernel, float32 or bfloat16; None: those
                        on a CPU

    Returns:
        layers:         for weights that stay on their device

    Raises:
        ValueError: the sizes or dtypes do not fit together, or for panels E or D is no multiple of 16
    """
    heads = check_count("heads", heads, 1)
    if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
        raise ValueError("layers must be DecoderLayers, at least one")
    first = layers[0]
    (Q, E), (_, HD), (ffn_dim, _) = (check_dims(f"layers[0].{name}", getattr(first, name), "oi")
                                     for name in ("qkv", "out", "gate"))
    in_panels = first.qkv.device.type == "cpu" if in_panels is None else in_panels
    dtypes, D, multiple = DTYPES if in_panels else FLOATS, HD // heads, 16 if in_panels else 2
    if first.qkv.dtype not in dtypes:
        raise ValueError(f"layers must be {' or '.join(str(d)[6:] for d in dtypes)}, got {str(first.qkv.dtype)[6:]}")
    if E % multiple or D % multiple or HD != heads * D or not 0 < D <= 256:
        raise ValueError(f"layers must have E and D that are multiples of {multiple}, and D of at most 256, got E={E}, "
                         f"D={D}")
    heads_of_kv = (Q // D - heads) // 2
    if heads_of_kv < 1 or Q != (heads + 2 * heads_of_kv) * D or heads % heads_of_kv:
        raise ValueError(f"layers[0].qkv must have (H + 2 Hkv) D outputs, with H={heads} a multiple of Hkv, and D={D}, "
                         f"got {Q}")
    if last_norm is not None:
        check("last_norm", last_norm, dtypes, like=first.qkv, E=E)
    sizes = {"qkv": {"Q": Q, "E": E}, "out": {"E": E, "HD": HD}, "gate": {"F": ffn_dim, "E": E},
             "up": {"F": ffn_dim, "E": E}, "down": {"E": E, "F": ffn_dim}, "ffn_norm": {"E": E},
             "attention_norm": {"E": E}, "qkv_bias": {"Q": Q}, "out_bias": {"E": E}, "attention_out_norm": {"E": E},
             "ffn_out_norm": {"E": E}}
    optional = "attention_norm", "qkv_bias", "out_bias", "attention_out_norm", "ffn_out_norm"

    def check_layer(number: int, layer: DecoderLayer) -> None:
        for name, size in sizes.items():
            if getattr(layer, name) is not None or name not in optional:
                check(f"layers[{number}].{name}", getattr(layer, name), first.qkv.dtype, like=first.qkv, **size)
        check_head_norms(f"layers[{number}].head_norms", layer.head_norms, first.qkv, heads=heads + heads_of_kv, D=D)
        if (layer.attention_norm is None, layer.head_norms is None) != (first.attention_norm is None,
                                                                        first.head_norms is None):
            raise ValueError("layers must all have equal norms")
        if in_panels and (layer.attention_out_norm, layer.ffn_out_norm) != (None, None):
            raise ValueError(f"layers[{number}].attention_out_norm and ffn_out_norm must be None for a CPU's kernel")

    def panels(layer: DecoderLayer) -> tuple[Tensor, Tensor]:
        gate_up = torch.stack([pack_weight(layer.gate), pack_weight(layer.up)], 1)  # panels take turns
        down = F.pad(layer.down.detach(), (0, padded(ffn_dim) - ffn_dim))
        zeros = layer.out.new_zeros
        vectors = [zeros(E) if layer.attention_norm is None else layer.attention_norm, layer.ffn_norm,
                   zeros(E) if layer.out_bias is None else layer.out_bias,
                   zeros(Q) if layer.qkv_bias is None else layer.qkv_bias, *(layer.head_norms or ())]
        matrices = pack_weight(layer.qkv), pack_weight(layer.out), gate_up, pack_weight(down)
        return torch.cat([m.flatten() for m in matrices]), torch.cat([v.detach().float().flatten() for v in vectors])

    matrices, vectors, none = [], [], first.qkv.new_empty(0)
    for number, layer in enumerate(layers):
        check_layer(number, layer)
        if not in_panels:
            matrices += layer.qkv.detach(), layer.out.detach(), joined([layer.gate, layer.up]), layer.down.detach()
            vectors += (none if v is None else v.detach().contiguous() for v in (
                layer.attention_norm, layer.ffn_norm, layer.out_bias, layer.qkv_bias,
                *(layer.head_norms or (None, None)), layer.attention_out_norm, layer.ffn_out_norm))
            continue
        packed, of_layer = panels(layer)
        matrices = matrices or [packed.new_empty(len(layers), len(packed))]
        matrices[0][number] = packed
        vectors.append(of_layer)
    if in_panels:
        vectors, last_norm = [torch.stack(vectors)], None if last_norm is None else last_norm.detach().float().clone()
    return PackedLayers(matrices, vectors, last_norm, heads, ffn_dim, eps, head_eps,
                        first.attention_norm is not None, first.head_norms is not None, rotates_halves)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights (O, ..) above each other, (sum of O, ..): a view if they follow each other in memory, else a copy."""
    first, ends = weights[0].detach(), [0, *accumulate(weight.numel() for weight in weights)]
    if all(weight.is_contiguous() and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
           and weight.storage_offset() == first.storage_offset() + end for weight, end in zip(weights, ends)):
        return first.as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())
    return torch.cat([weight.detach() for weight in weights])


def join_weights(weights: Sequence[Tensor]) -> Tensor:
    """Let parameters follow each other in one memory. They stay what they are, and no memory is taken twice.
    `deepcopy`, `.to(..)` and `load_state_dict(assign=True)` part them again. Some savers take tensors that share memory
    for one (accelerate's, `safetensors.torch.save_model`): part them before (`weight.data = weight.data.clone()`).

    Args:
        weights: (O, ..) each, equal but for O, of one dtype and on one device

    Returns:
        joined:  (sum of O, ..)  a view of all of them
    """
    with torch.no_grad(), torch.inference_mode(weights[0].is_inference()):  # they stay what they are in this, too
        whole = joined(weights)
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights])):
            weight.data = part
    return whole


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

    One call replaces some hundred operations, whose dispatch takes most of the time when few rows are read. It is for
    few rows: for a thousand PyTorch's products are as quick. On a GPU it is four products of PyTorch's a layer, and
    `rms_norm`, `rotate_into_cache`, `tree_attention` and `swiglu` between them, which a CUDA graph can hold.

    Products have operands of x's dtype; their sums and what is between them are float32. On a CPU so is the residual
    stream; on a GPU it and the results of products are rounded to x's dtype, as by a decoder's own modules. On a CPU
    the kernel computes each output in an order that depends on the model alone: no bit depends on how many nodes are
    read at once, on other rows, or on the number of threads.

    Args:
        x:          (R, N, E)             float32, bfloat16; on a GPU also float16   embeddings
        layers:     of L layers           from `pack_layers`, of x's dtype
        kv_cache:   (L, R, T, 2, Hkv, D)  as x   written to, contiguous
        lengths:    (B,) int32 or int64          the column of node 0; R is a multiple of B
        ancestors:  (B, N, W) or (1, N, W) int64   words of bits for the nodes that are read, from `tree_links`: a
                                                   node's own bit is first_node + n
        positions:  (Y, N) int32 or int64        the row of `rotations` of each node; R is a multiple of Y. A
                                                 position outside the table takes its first or last row
        rotations:  (P, d / 2, 2) float32        cosine and sine by which pairs of a head's first d entries are turned;
                                                 d is D on a CPU
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
    R, N, E = check_dims("x", x, "RNE", FLOATS)
    if not isinstance(layers, PackedLayers):
        raise ValueError(f"layers must be PackedLayers, from pack_layers, got {type(layers).__name__}")
    L, T, Hkv, D = (kv_cache.shape[d] for d in (0, 2, 4, 5)) if check_dims("kv_cache", kv_cache, "LRT2GD") else ()
    check("kv_cache", kv_cache, x.dtype, like=x, L=L, R=R, T=T, two=2, Hkv=Hkv, D=D)
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous, since it is written to")
    B, = check_dims("lengths", lengths, "B")
    lengths = integers("lengths", lengths, torch.int64, x, B=B)
    W = check_dims("ancestors", ancestors, "BNW")[2]
    check("ancestors", ancestors, torch.int64, x, may_be_one=True, B=B, N=N, W=W)
    Y = check_dims("positions", positions, "YN")[0]
    positions = integers("positions", positions, torch.int64, x, Y=Y, N=N)
    check_rotations(rotations, x, D)
    first_node = check_count("first_node", first_node, 0)
    if N < 1 or T < 1 or Y < 1 or R % Y:
        raise ValueError(f"there must be a node, a column, and rows a multiple of the rows of positions, got N={N}, "
                         f"T={T}, Y={Y} and R={R}")
    if R % B if B else R:
        raise ValueError(f"the rows of x must be a multiple of B={B}, got {R}")
    if first_node + N > 64 * W:
        raise ValueError(f"ancestors must have a word for each 64 nodes, got W={W} for {first_node + N} nodes")
    H = check_count("layers.heads", layers.heads, 1)
    if Hkv < 1 or H % Hkv:
        raise ValueError(f"layers must have heads that are a multiple of Hkv={Hkv} as kv_cache has it, got H={H}")
    check_sizes(layers, x, L, H, Hkv, D, check_count("layers.ffn_dim", layers.ffn_dim, 1))
    check_eps("layers.eps", layers.eps)
    check_eps("layers.head_eps", layers.head_eps)
    if key_mask is not None:
        check("key_mask", key_mask, torch.bool, like=x, R=R, S=check_dims("key_mask", key_mask, "RS")[1])
    matrices, vectors = ([tensor.contiguous() for tensor in tensors] for tensors in layers[:2])
    return _call(backend, x, matrices, vectors, layers.last_norm, kv_cache, lengths, for_each(ancestors, B), positions,
                 rotations, key_mask, *layers[3:5], first_node, *layers[5:])


def check_sizes(layers: PackedLayers, x: Tensor, L: int, H: int, Hkv: int, D: int, ffn_dim: int) -> None:
    """Raise ValueError unless the tensors of `layers` are as `pack_layers` makes them, for L layers and x (R, N, E)."""
    E, Q, heads = x.shape[2], (H + 2 * Hkv) * D, (H + Hkv, D)
    matrices = [(Q, E), (E, H * D), (2 * ffn_dim, E), (E, ffn_dim)] * L
    vectors = [(E,), (E,), (E,), (Q,), heads, heads, (E,), (E,)] * L
    in_panels = getattr(layers.matrices, "__len__", int)() == 1
    if in_panels:
        matrices = [(L, matrix_sizes(E, H, Hkv, D, ffn_dim)[-1])]
        vectors = [(L, sum(vector_sizes(E, H, Hkv, D, layers.has_head_norms)))]
    dtype = torch.float32 if in_panels else x.dtype
    for name, of, sizes in (("matrices", x.dtype, matrices), ("vectors", dtype, vectors)):
        tensors = getattr(layers, name)
        if not isinstance(tensors, list) or len(tensors) != len(sizes):
            raise ValueError(f"layers.{name} must be a list of {len(sizes)} tensors, as pack_layers makes it, got "
                             f"{len(tensors) if isinstance(tensors, list) else type(tensors).__name__}")
        for i, (tensor, size) in enumerate(zip(tensors, sizes)):
            if name == "matrices" or i % 8 == 1 or in_panels or getattr(tensor, "shape", None) != (0,):  # it has it
                check(f"layers.{name}[{i}]", tensor, of, like=x, **dict(zip("mn", size)))
    if layers.last_norm is not None:
        check("layers.last_norm", layers.last_norm, dtype, like=x, E=E)


def matrix_sizes(E: int, H: int, Hkv: int, D: int, ffn_dim: int) -> list[int]:
    """Where qkv, out, gate with up, and down end in a layer's packed matrices."""
    F_ = padded(ffn_dim)
    return [*accumulate([padded((H + 2 * Hkv) * D) * E, padded(E) * H * D, 2 * F_ * E, padded(E) * F_])]


def vector_sizes(E: int, H: int, Hkv: int, D: int, has_head_norms: bool) -> list[int]:
    """How many numbers a layer's norms and biases are, in their order in `PackedLayers.vectors`."""
    n = (H + Hkv) * D * has_head_norms
    return [E, E, E, (H + 2 * Hkv) * D, n, n]


def plain_layers(matrices: list[Tensor], vectors: list[Tensor], E: int, H: int, Hkv: int, D: int, ffn_dim: int,
                 has_first_norm: bool, has_head_norms: bool) -> Iterator[list[Tensor | None]]:
    """Of each layer qkv, out, gate above up, down, and attention_norm, ffn_norm, out_bias, qkv_bias, scale, shift,
    attention_out_norm, ffn_out_norm, each of which may be None."""
    if len(matrices) > 1:
        for i in range(len(matrices) // 4):
            yield [*matrices[4 * i:4 * i + 4], *(v if len(v) else None for v in vectors[8 * i:8 * i + 8])]
        return
    ends, Q, padded_F = matrix_sizes(E, H, Hkv, D, ffn_dim), (H + 2 * Hkv) * D, padded(ffn_dim)
    for matrix, vector in zip(matrices[0], vectors[0]):
        qkv, out, gate_up, down = (matrix[begin:end] for begin, end in zip([0, *ends], ends))
        gate, up = (unpacked(part, padded_F, E) for part in gate_up.view(-1, 2, E * PANEL).unbind(1))
        first_norm, ffn_norm, out_bias, qkv_bias, *norms = vector.split(vector_sizes(E, H, Hkv, D, has_head_norms))
        scale, shift = (norm.view(-1, D) if has_head_norms else None for norm in norms)
        yield [unpacked(qkv, Q, E), unpacked(out, E, H * D), torch.cat([gate, up]),
               unpacked(down, E, padded_F), first_norm if has_first_norm else None, ffn_norm, out_bias,
               qkv_bias, scale, shift, None, None]


def _oracle(x: Tensor, matrices: list[Tensor], vectors: list[Tensor], last_norm: Tensor | None, kv_cache: Tensor,
            lengths: Tensor, ancestors: Tensor, positions: Tensor, rotations: Tensor, key_mask: Tensor | None,
            heads: int, ffn_dim: int, first_node: int, eps: float, head_eps: float, has_first_norm: bool,
            has_head_norms: bool, rotates_halves: bool):
    R, N, E = x.shape
    L, _, T, _, G, D = kv_cache.shape
    B, H = len(lengths), heads
    first = torch.where(lengths < 0, T, lengths.clamp(max=T))[:, None] + first_node
    column = (first + torch.arange(N, device=x.device)).clamp(max=T).repeat(R // max(B, 1), 1)
    row = torch.arange(R, device=x.device)[:, None]

    def times(x, weight, bias=None):  # operands of the dtype, sums in float32
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def normed(x, weight):
        return x if weight is None else F.rms_norm(x, (E,), weight.float(), eps)

    dtype, stream = x.dtype, x.float()
    plain = plain_layers(matrices, vectors, E, H, G, D, ffn_dim, has_first_norm, has_head_norms)
    for layer, (qkv, out, gate_up, down, first_norm, ffn_norm, out_bias, qkv_bias, *norms) in enumerate(plain):
        scale, shift, *out_norms = norms
        y = times(normed(stream, first_norm).to(dtype), qkv, qkv_bias).view(R, N, H + 2 * G, D)
        qk, v = y[:, :, :H + G], y[:, :, H + G:]
        if scale is not None:
            qk = head_normed(qk, scale, shift, head_eps)
        qk = rotated(qk, positions, rotations, rotates_halves)
        entries = torch.stack([qk[:, :, H:], v], 2).to(dtype)
        longer = F.pad(kv_cache[layer], (0, 0, 0, 0, 0, 0, 0, 1))  # its last column takes what is outside
        longer[row, column] = entries
        kv_cache[layer].copy_(longer[:, :T])
        k_cache, v_cache = kv_cache[layer].unbind(2)
        attended = attend(qk[:, :, :H].to(dtype), k_cache, v_cache, lengths, ancestors, key_mask, D ** -0.5)
        stream = stream + normed(times(attended.flatten(2), out, out_bias), out_norms[0])
        gate, up = times(normed(stream, ffn_norm).to(dtype), gate_up).chunk(2, -1)
        stream = stream + normed(times((F.silu(gate) * up).to(dtype), down), out_norms[1])
    return normed(stream, last_norm).to(dtype)


_call = define("decoder_layers", oracle=_oracle, meta=lambda x: x.new_empty(x.shape), writes=("kv_cache",), batch=None)
