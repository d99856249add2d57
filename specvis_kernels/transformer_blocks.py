"""transformer_blocks: the blocks of a bidirectional transformer."""
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import check, check_count, check_dims, check_eps, integers
from ._define import define
from .packed_linear import DTYPES, pack_weight, padded, unpacked


class TransformerBlock(NamedTuple):
    """One block's weights (outputs, inputs), norms and biases, all of the same dtype."""

    norm1: Tensor       # (E,)
    norm1_bias: Tensor  # (E,)
    qkv: Tensor         # (3 E, E)
    qkv_bias: Tensor    # (3 E,)
    out: Tensor         # (E, E)
    out_bias: Tensor    # (E,)
    norm2: Tensor       # (E,)
    norm2_bias: Tensor  # (E,)
    up: Tensor          # (F, E)
    up_bias: Tensor     # (F,)
    down: Tensor        # (E, F)
    down_bias: Tensor   # (E,)


class PackedBlocks(NamedTuple):
    """Blocks for `transformer_blocks`, as `pack_blocks` makes them."""

    matrices: Tensor  # (L, m)  the packed weights of each block: qkv, out, up, down
    vectors: Tensor   # (L, v) float32  norms and biases, in the order of TransformerBlock
    last_norm: Tensor | None  # (2 E,) float32  weight and bias of the norm after the last block
    heads: int
    ffn_dim: int
    eps: float


def pack_blocks(blocks: Sequence[TransformerBlock], last_norm: tuple[Tensor, Tensor] | None = None, *, heads: int,
                eps: float = 1e-6) -> PackedBlocks:
    """Copy the weights of blocks for `transformer_blocks`. Changes of the weights do not reach the copy.

    Args:
        blocks:     at least one; E and F are multiples of 16, and E / heads is at most 256
        last_norm:  weight and bias (E,) of the norm after the last block; None: no such norm
        heads:      how many heads queries, keys and values have
        eps:        of the norms

    Returns:
        blocks:     the copy, in the order in which the kernel reads it

    Raises:
        ValueError: no blocks, or a weight of another dtype or shape
    """
    if not blocks:
        raise ValueError("blocks must be at least one")
    heads = check_count("heads", heads, 1)
    (ffn_dim, E), dtype = check_dims("up", blocks[0].up, "FE"), blocks[0].up.dtype
    if dtype not in DTYPES or E % 16 or ffn_dim % 16 or not E or not ffn_dim or E % heads or E // heads > 256:
        raise ValueError("blocks must be float32 or bfloat16, have E and F that are multiples of 16, and heads of at "
                         f"most 256, got {str(dtype)[6:]}, E={E}, F={ffn_dim}, heads={heads}")
    sizes = TransformerBlock((E,), (E,), (3 * E, E), (3 * E,), (E, E), (E,), (E,), (E,), (ffn_dim, E), (ffn_dim,),
                             (E, ffn_dim), (E,))
    named = [named for block in blocks for named in zip(block._fields, block, sizes)]
    for name, tensor, size in (*named, *(("last_norm", tensor, (E,)) for tensor in last_norm or ())):
        if tensor.shape != size or tensor.dtype != dtype:
            raise ValueError(f"blocks must have {name} {str(dtype)[6:]} {size}, "
                             f"got {str(tensor.dtype)[6:]} {tuple(tensor.shape)}")
    matrices = [torch.cat([pack_weight(weight).flatten() for weight in block if weight.ndim == 2]) for block in blocks]
    vectors = [torch.cat([v.detach().float() for v in block if v.ndim == 1]) for block in blocks]
    last_norm = None if last_norm is None else torch.cat(last_norm).detach().float()
    return PackedBlocks(torch.stack(matrices), torch.stack(vectors), last_norm, heads, ffn_dim, eps)


def transformer_blocks(x: Tensor, blocks: PackedBlocks, *, key_mask: Tensor | None = None,
                       wanted: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Read rows of entries by all blocks of a bidirectional transformer, as MAR's encoder and decoder are.

    Each block is

        x = x + Attention(LayerNorm(x) W_qkv) W_out
        x = x + gelu(LayerNorm(x) W_up) W_down

    where each product has a bias. After the last block there may be another LayerNorm. Products have operands of x's
    dtype; their sums and the stream x are float32. On a CPU no bit of a row depends on other rows or on the
    number of threads. Elsewhere a model's own modules are quicker than the oracle.

    Args:
        x:        (R, N, E)     float32 or bfloat16
        blocks:   of L blocks   from `pack_blocks`, of x's dtype
        key_mask: (R, N) bool   the entries that all others see; None: all entries. Without any the attention is 0
        wanted:   (R, n) int32 or int64   the entries that the last block computes. A number outside [0, N) means the
                                          first or last entry. None: all entries
        backend:  None for the device's own kernel; a name from `backends()` to force one

    Returns:
        hidden:   (R, N, E) or (R, n, E) as x

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> w, b = torch.zeros(16, 16), torch.zeros(16)          # E = F = 16: only the last bias is added to x
        >>> block = TransformerBlock(b, b, w.repeat(3, 1), b.repeat(3), w, b, b, b, w, b, w, b + 2)
        >>> transformer_blocks(torch.ones(1, 4, 16), pack_blocks([block], heads=1))[0, :, 0]
        tensor([3., 3., 3., 3.])
    """
    R, N, E = check_dims("x", x, "RNE", DTYPES, not_empty="N")
    if not isinstance(blocks, PackedBlocks):
        raise ValueError(f"blocks must be PackedBlocks, from pack_blocks, got {type(blocks).__name__}")
    L = check_dims("blocks.matrices", blocks.matrices, "Lm")[0]
    ffn_dim = check_count("blocks.ffn_dim", blocks.ffn_dim, 1)
    check("blocks.matrices", blocks.matrices, x.dtype, like=x, L=L, m=sum(matrix_sizes(E, ffn_dim)))
    check("blocks.vectors", blocks.vectors, torch.float32, like=x, L=L, v=sum(vector_sizes(E, ffn_dim)))
    if blocks.last_norm is not None:
        check("blocks.last_norm", blocks.last_norm, torch.float32, like=x, two_E=2 * E)
    if E % check_count("blocks.heads", blocks.heads, 1) or E // blocks.heads > 256:
        raise ValueError(f"blocks.heads must divide E={E} into heads of at most 256, got {blocks.heads}")
    check_eps("blocks.eps", blocks.eps)
    if key_mask is not None:
        check("key_mask", key_mask, torch.bool, like=x, R=R, N=N)
    if wanted is None:
        wanted = torch.arange(N, device=x.device).repeat(R, 1)
    wanted = integers("wanted", wanted, torch.int64, x, R=R, n=check_dims("wanted", wanted, "Rn")[1])
    return _call(backend, x, *blocks[:3], key_mask, wanted, *blocks[3:])


def matrix_sizes(E: int, ffn_dim: int) -> list[int]:
    """How many numbers the packed weights of a block are."""
    return [padded(outputs) * K for outputs, K in ((3 * E, E), (E, E), (ffn_dim, E), (E, ffn_dim))]


def vector_sizes(E: int, ffn_dim: int) -> list[int]:
    """How many numbers the norms and biases of a block are."""
    return [E, E, 3 * E, E, E, E, ffn_dim, E]


def _oracle(x: Tensor, matrices: Tensor, vectors: Tensor, last_norm: Tensor | None, key_mask: Tensor | None,
            wanted: Tensor, heads: int, ffn_dim: int, eps: float):
    (_, N, E), dtype, stream = x.shape, x.dtype, x.float()
    wanted = wanted.clamp(0, N - 1)[..., None].expand(-1, -1, E)

    def times(x, weight, outputs, K, bias):  # operands of the dtype, sums in float32
        return x.to(dtype).float() @ unpacked(weight, outputs, K).float().T + bias

    def by_heads(x):
        return x.to(dtype).float().unflatten(-1, (heads, -1)).transpose(1, 2)

    for number, (matrix, vector) in enumerate(zip(matrices, vectors), 1):
        qkv, out, up, down = matrix.split(matrix_sizes(E, ffn_dim))
        norm1, norm1_bias, qkv_bias, out_bias, norm2, norm2_bias, up_bias, down_bias = vector.split(
            vector_sizes(E, ffn_dim))
        q, k, v = times(F.layer_norm(stream, (E,), norm1, norm1_bias, eps), qkv, 3 * E, E, qkv_bias).chunk(3, -1)
        if number == len(matrices):
            q, stream = q.gather(1, wanted), stream.gather(1, wanted)
        scores = by_heads(q) @ by_heads(k).mT * (E // heads) ** -0.5
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
        shares = scores.softmax(-1)
        if key_mask is not None:
            shares = shares.masked_fill(~key_mask.any(-1)[:, None, None, None], 0.0)
        attended = shares @ by_heads(v)
        stream = stream + times(attended.transpose(1, 2).flatten(2), out, E, E, out_bias)
        y = F.gelu(times(F.layer_norm(stream, (E,), norm2, norm2_bias, eps), up, ffn_dim, E, up_bias))
        stream = stream + times(y, down, E, ffn_dim, down_bias)
    return (stream if last_norm is None else F.layer_norm(stream, (E,), *last_norm.chunk(2), eps)).to(dtype)


_call = define("transformer_blocks", oracle=_oracle, batch=None,
               meta=lambda x, wanted: x.new_empty(x.shape[0], wanted.shape[1], x.shape[2]))
