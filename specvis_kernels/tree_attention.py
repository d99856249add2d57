"""tree_attention: nodes of a draft tree attend to the cached columns and to their own ancestors."""
import torch
from torch import Tensor

from ._checks import FLOATS, check, check_dims, for_each, integers
from ._define import checked_once, define


@checked_once
def tree_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, ancestors: Tensor, *,
                   key_mask: Tensor | None = None, scale: float | None = None,
                   backend: str | None = None) -> Tensor:
    """Attention of the nodes of draft trees. It needs no mask in memory and reads no column that the nodes do not see.

    Query n of request b sees the columns

        t < lengths[b]                       except t < S where key_mask is False
        lengths[b] + j                       for each bit j of ancestors[b, n]: itself and its ancestors

    and its result is softmax(scale q k) v over these, with sums in float32. The keys and values of node j are in column
    lengths[b] + j of the cache already; `commit_kv` moves them once the node is accepted. The queries may be some of
    the nodes only, such as a level. A column outside the cache is not seen, and a request with a negative length sees
    no column. A query that sees nothing gives 0. Entries that no query of a row sees may be NaN. A NaN that one query
    of a row sees may reach the row's other queries, and no other row.

    Row r belongs to request r % B: of R = 2 B rows the first B have the condition, the others do not.

    On a CPU the kernel sums over a query's keys in the order of its cached columns, then of its ancestors. So the bits
    of a result depend only on the query and on the entries that it sees: they do not change if nodes are read one by
    one or all at once, with or without siblings, and once the ancestors are cached. Kernels agree with the oracle up to
    rounding.

    Args:
        q:          (R, N, H, D)    float32, float16 or bfloat16   D from 1 to 256
        k_cache:    (R, T, Hkv, D)  as q   H is a multiple of Hkv; columns come before heads. A view whose last
                                           dimension is contiguous is read where it is, such as one of
                                           (R, T, 2, H, D), or cache.transpose(1, 2) of (R, Hkv, T, D), as transformers
                                           has it; so with q
        v_cache:    (R, T, Hkv, D)  as q
        lengths:    (B,) int32 or int64   how many columns come before the tree's; R is a multiple of B
        ancestors:  (B, N, W) or (1, N, W) int64   words of bits, from `tree_links` and not a mask of `tree_mask`: bit
                                                   j % 64 of word j // 64 is node j
        key_mask:   (R, S) bool     which of the first columns are seen, as of a condition's padding; None: all
        scale:      of the scores; None: D ** -0.5
        backend:    None for the device's own kernel; a name from `backends()` to force one

    Returns:
        attended:   (R, N, H, D)    as q, contiguous

    Raises:
        ValueError: an argument's dtype, shape or device differs from the above

    Examples:
        >>> links = tree_links(torch.tensor([[-1, 0, 0]], dtype=torch.int32))   # a root and its two children
        >>> keys = torch.zeros(1, 4, 1, 32)                                     # one cached column, three nodes
        >>> values = torch.tensor([6., 0., 3., 9.])[None, :, None, None].expand(1, 4, 1, 32)
        >>> tree_attention(torch.ones(1, 3, 1, 32), keys, values, torch.tensor([1]), links.ancestors)[..., 0, 0]
        tensor([[3., 3., 5.]])
    """
    R, N, H, D = check_dims("q", q, "RNHD", FLOATS)
    R, T, Hkv, D = check_dims("k_cache", k_cache, "RTHD")
    check("k_cache", k_cache, q.dtype, like=q, R=q.shape[0], T=T, Hkv=Hkv, D=q.shape[3])
    check("v_cache", v_cache, q.dtype, like=q, R=R, T=T, Hkv=Hkv, D=D)
    B, = check_dims("lengths", lengths, "B")
    lengths = integers("lengths", lengths, torch.int64, q, B=B)
    W = check_dims("ancestors", ancestors, "BNW")[2]
    check("ancestors", ancestors, torch.int64, q, may_be_one=True, B=B, N=N, W=W)
    if R % B if B else R:
        raise ValueError(f"the rows of q must be a multiple of B={B}, got {R}")
    if N < 1 or T < 1 or W < 1:
        raise ValueError(f"there must be a node, a column and a word, got N={N}, T={T}, W={W}")
    if Hkv < 1 or H < 1 or H % Hkv:
        raise ValueError(f"the heads of q must be a multiple of the heads of k_cache, got H={H} and Hkv={Hkv}")
    if not 1 <= D <= 256:
        raise ValueError(f"q must have D from 1 to 256, got {D}")
    try:
        scale = D ** -0.5 if scale is None else float(scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"scale must be a number or None, got {scale!r}") from error
    if key_mask is not None:
        check("key_mask", key_mask, torch.bool, like=q, R=R, S=check_dims("key_mask", key_mask, "RS")[1])
    q, k_cache, v_cache = (a if a.stride(-1) == 1 else a.contiguous() for a in (q, k_cache, v_cache))
    return _call(backend, q, k_cache, v_cache, lengths, for_each(ancestors, B), key_mask, scale)


def _oracle(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, ancestors: Tensor, key_mask: Tensor | None,
            scale: float):
    R, N, H, D = q.shape
    _, T, Hkv, _ = k_cache.shape
    B, _, W = ancestors.shape
    column = torch.arange(T, device=q.device)
    is_cached = (column < lengths[:, None]).repeat(R // max(B, 1), 1)  # (R, T)
    if key_mask is not None:
        S = min(key_mask.shape[1], T)
        is_cached = is_cached & torch.nn.functional.pad(key_mask[:, :S], (0, T - S), value=True)
    bits = (ancestors[..., None] >> torch.arange(64, device=q.device)) & 1
    node = (column - lengths[:, None])[:, None].expand(B, N, T)
    is_node = (node >= 0) & (node < 64 * W) & (lengths >= 0)[:, None, None]
    is_node = is_node & (bits.view(B, N, 64 * W).gather(2, node.clamp(0, 64 * W - 1)) == 1)
    is_seen = is_cached[:, None] | is_node.repeat(R // max(B, 1), 1, 1)  # (R, N, T)

    in_use = is_seen.any(1)[:, :, None, None]  # entries that no query sees may hold anything
    k, v = (torch.where(in_use, cache.float(), 0.0).repeat_interleave(H // Hkv, 2) for cache in (k_cache, v_cache))
    scores = torch.einsum("rnhd,rthd->rhnt", q.float() * scale, k)
    weights = torch.where(is_seen[:, None], scores, -torch.inf).softmax(-1)
    weights = torch.where(is_seen.any(2)[:, None, :, None], weights, 0.0)
    return torch.einsum("rhnt,rthd->rnhd", weights, v).to(q.dtype).contiguous()


_call = define("tree_attention", oracle=_oracle, meta=lambda q: q.new_empty(q.shape),
               strided=("q", "k_cache", "v_cache"), batch="lengths")
