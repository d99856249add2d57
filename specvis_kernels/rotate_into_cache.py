"""rotate_into_cache: queries and keys are turned by their positions, and keys and values put into a cache."""
import torch
from torch import Tensor

from ._checks import FLOATS, check, check_count, check_dims, check_eps, integers
from ._define import checked_once, define


@checked_once
def rotate_into_cache(qkv: Tensor, kv_cache: Tensor, lengths: Tensor, positions: Tensor, rotations: Tensor, *,
                      first_node: int = 0, rotates_halves: bool = False,
                      head_norms: tuple[Tensor, Tensor] | None = None, head_eps: float = 1e-5,
                      backend: str | None = None) -> Tensor:
    """Turn the queries and keys of draft trees' nodes, and put keys and values into a cache. This writes to the cache.

    A pair of entries (a, b) of a query or a key becomes (a c - b s, a s + b c), with cosine c and sine s of the node's
    position (RoPE, arXiv:2104.09864). Node n of request b is in column lengths[b] + first_node + n; a column outside
    the cache is not written. Row r belongs to request r % B. After it comes `tree_attention(q, *kv_cache.unbind(2),
    lengths, ancestors)`.

    Numbers are computed in float32 and rounded once. All backends give the same bits; with `head_norms` but for about
    one head of float32 in a million, whose moments, in float64, show the order of their terms.

    Args:
        qkv:            (R, N, Q) float32, float16 or bfloat16   Q = (H + 2 Hkv) D: the heads of queries, keys, values
        kv_cache:       (R, T, 2, Hkv, D) as qkv   written to, contiguous, D even
        lengths:        (B,) int32 or int64        the column of node 0; R is a multiple of B
        positions:      (Y, N) int32 or int64      the row of `rotations` of each node; R is a multiple of Y. A position
                                                   outside the table takes its first or last row
        rotations:      (P, d / 2, 2) float32      cosine and sine by which pairs of a head's first d entries are
                                                   turned, d <= D; the others stay
        first_node:     how many nodes of the tree are in the cache
        rotates_halves: a pair is entries i and i + d / 2, as in transformers; else 2 i and 2 i + 1, as in LlamaGen
        head_norms:     (H + Hkv, D) each, as qkv    scale and shift of LayerNorms of each head of queries and keys,
                                                   before it is turned; None: there are none
        head_eps:       of the LayerNorms, a number >= 0, rounded to float32
        backend:        None for the device's own kernel; a name from `backends("rotate_into_cache")` to force one

    Returns:
        q:              (R, N, H, D) as qkv

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> cache = torch.zeros(1, 3, 2, 1, 2)
        >>> quarter_turn = torch.tensor([[[0., 1.]]])
        >>> rotate_into_cache(torch.tensor([[[1., 2., 3., 4., 5., 6.]]]), cache, torch.tensor([1]),
        ...                   torch.tensor([[0]]), quarter_turn)
        tensor([[[[-2.,  1.]]]])
        >>> cache[0, 1, :, 0]                                    # key and value
        tensor([[-4.,  3.],
                [ 5.,  6.]])
    """
    R, N, Q = check_dims("qkv", qkv, "RNQ", not_empty="N")
    check("qkv", qkv, FLOATS, R=R, N=N, Q=Q)
    _, T, _, Hkv, D = check_dims("kv_cache", kv_cache, "RT2GD", not_empty="TGD")
    check("kv_cache", kv_cache, qkv.dtype, like=qkv, R=R, T=T, two=2, Hkv=Hkv, D=D)
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous, since it is written to")
    B, = check_dims("lengths", lengths, "B")
    lengths = integers("lengths", lengths, torch.int64, qkv, B=B)
    Y = check_dims("positions", positions, "YN", not_empty="Y")[0]
    positions = integers("positions", positions, torch.int64, qkv, Y=Y, N=N)
    if D % 2 or Q % D or Q <= 2 * Hkv * D:
        raise ValueError(f"qkv must have Q = (H + 2 Hkv) D with H >= 1, and kv_cache an even D, "
                         f"got Q={Q}, Hkv={Hkv} and D={D}")
    check_rotations(rotations, qkv, D)
    first_node = check_count("first_node", first_node, 0)
    if not isinstance(rotates_halves, bool):
        raise ValueError(f"rotates_halves must be a bool, got {rotates_halves!r}")
    if R % Y:
        raise ValueError(f"the rows of qkv must be a multiple of the rows of positions, Y={Y}, got {R}")
    if R % B if B else R:
        raise ValueError(f"the rows of qkv must be a multiple of the requests of lengths, B={B}, got {R}")
    scale, shift = check_head_norms("head_norms", head_norms, qkv, heads=Q // D - Hkv, D=D)
    check_eps("head_eps", head_eps)
    return _call(backend, qkv, kv_cache, lengths, positions, rotations, scale, shift, first_node, rotates_halves,
                 float(head_eps))


def check_rotations(rotations: Tensor, like: Tensor, D: int) -> None:
    """Raise ValueError unless these turn pairs of entries of heads of D."""
    P, pairs = check_dims("rotations", rotations, "Pd2", not_empty="Pd")[:2]
    check("rotations", rotations, torch.float32, like=like, P=P, pairs=min(pairs, D // 2), two=2)


def check_head_norms(name: str, norms: tuple[Tensor, Tensor] | None, like: Tensor, **sizes: int) -> tuple:
    """Scale and shift, or None and None. Raises ValueError: they are not two tensors of these sizes."""
    if norms is not None and (not isinstance(norms, tuple) or len(norms) != 2):
        raise ValueError(f"{name} must be two tensors, scale and shift, or None")
    for part in norms or ():
        check(name, part, like.dtype, like=like, **sizes)
    return norms or (None, None)


def _oracle(qkv: Tensor, kv_cache: Tensor, lengths: Tensor, positions: Tensor, rotations: Tensor, scale: Tensor | None,
            shift: Tensor | None, first_node: int, rotates_halves: bool, eps: float):
    R, N, Q = qkv.shape
    T, _, G, D = kv_cache.shape[1:]
    heads = qkv.view(R, N, -1, D)
    qk, v = heads.float().split((Q // D - G, G), 2)
    if scale is not None:
        qk = head_normed(qk, scale, shift, eps)
    qk = rotated(qk, positions, rotations, rotates_halves)
    q, entries = torch.cat([qk, v], 2).to(qkv.dtype).split((Q // D - 2 * G, 2 * G), 2)

    first = torch.where(lengths < 0, T, lengths.clamp(max=T))[:, None] + first_node
    column = (first + torch.arange(N, device=qkv.device)).clamp(max=T).repeat(R // max(len(lengths), 1), 1)
    longer = torch.cat([kv_cache, kv_cache[:, :1]], 1)  # its last column takes what is outside
    longer[torch.arange(R, device=qkv.device)[:, None], column] = entries.view(R, N, 2, G, D)
    kv_cache.copy_(longer[:, :T])
    return q.contiguous()


def head_normed(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """LayerNorms of heads (.., heads, D) of float32."""
    variance, mean = torch.var_mean(x.double(), -1, correction=0, keepdim=True)
    eps = torch.full((), eps, dtype=torch.float32, device=x.device).double()
    factor = (1 / (variance + eps).sqrt()).float()
    return (x - mean.float()) * factor * scale.float() + shift.float()


def rotated(x: Tensor, positions: Tensor, rotations: Tensor, rotates_halves: bool) -> Tensor:
    """Heads (R, N, heads, D) of float32, turned by their positions (Y, N)."""
    turns = rotations[positions.clamp(0, len(rotations) - 1)].repeat(len(x) // len(positions), 1, 1, 1)
    c, s = turns[:, :, None].unbind(-1)
    x, rest = x.tensor_split([2 * c.shape[-1]], -1)
    a, b = x.chunk(2, -1) if rotates_halves else (x[..., 0::2], x[..., 1::2])
    turned = a * c - b * s, a * s + b * c
    return torch.cat([*turned, rest] if rotates_halves else [torch.stack(turned, -1).flatten(-2), rest], -1)


def _meta(qkv, kv_cache):
    G, D = kv_cache.shape[3:]
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // D - 2 * G, D)


_call = define("rotate_into_cache", oracle=_oracle, meta=_meta, writes=("kv_cache",), batch=None)
